//! `--memory-kind`: where the guest's memory is.

use super::{PagesFrom, RunArgs};
use crate::size::Size;
use lacuna::memory::MemoryKind;
use lacuna_lab::options::{KINDS, name_of};

/// The resident part of a guest with more memory than this, unless `--resident` says otherwise.
const RESIDENT: Size = Size(512 << 20);

/// Options that contradict each other.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WrongMemory {
    /// A handler gets private memory, or huge pages.
    #[error(
        "--pages-from handler: a page-fault handler fills anonymous or hugetlbfs memory, and not \
         {0}; leave --memory-kind out, or give one of the two"
    )]
    Handler(&'static str),
    /// An option of the pool.
    #[error(
        "{option} is for --memory-kind pool, and the guest's memory is {kind}: its pages are \
         Linux's; leave {option} out"
    )]
    NeedsPool {
        /// The option.
        option: &'static str,
        /// Where the guest's memory is.
        kind: &'static str,
    },
    /// A virtual clock cannot repeat what Linux pages out.
    #[error(
        "--seed with --resident and --memory-kind {0}: Linux pages out in real time; leave one of \
         the three out"
    )]
    Seeded(&'static str),
    /// A part of a huge page: the bytes of memory, and the size of a page.
    #[error("--memory: {0} bytes are not whole huge pages of {1}; give a multiple of {1}")]
    PartOfHugePage(u64, Size),
    /// The pages of 1 GiB have no page source.
    #[error(
        "--pages-from: a page of 1 GiB would have to arrive whole before the guest uses it; give \
         --memory-kind hugetlbfs, or leave --pages-from out"
    )]
    Source1G,
}

impl RunArgs {
    /// Where the guest has its memory.
    pub fn kind(&self) -> MemoryKind {
        self.on.memory_kind.unwrap_or(match self.pages_from {
            // A handler fills memory of Linux only.
            Some(PagesFrom::Handler(_)) => MemoryKind::Linux,
            _ => MemoryKind::Budget,
        })
    }

    /// Whether a page-fault handler fills the guest's memory.
    pub const fn has_handler(&self) -> bool {
        matches!(self.pages_from, Some(PagesFrom::Handler(_)))
    }

    /// How much of the guest's memory may be in frames or pages that the backend evicts.
    pub fn budget(&self) -> Size {
        let most = RESIDENT.0.min(self.memory.0);
        self.on.resident.unwrap_or(Size(most))
    }

    /// How much of the guest's memory of Linux shall be resident at most, if `--resident` says it.
    pub fn linux_limit(&self) -> Option<Size> {
        let can_leave = matches!(self.kind(), MemoryKind::Linux | MemoryKind::Shared);
        self.on.resident.filter(|_| can_leave)
    }

    /// Refuses options that do not exist for this kind of memory.
    ///
    /// # Errors
    /// The first of them.
    pub fn check_kind(&self) -> Result<(), WrongMemory> {
        let kind = self.kind();
        let name = name_of(&KINDS, &kind);
        let option = match () {
            () if kind == MemoryKind::Budget => None,
            () if self.on.resident != self.linux_limit() => Some("--resident"),
            () if self.on.swap.is_some() => Some("--swap"),
            () if self.on.thp.is_some() => Some("--thp"),
            () => None,
        };
        let page = match kind {
            MemoryKind::Hugetlbfs | MemoryKind::Hugetlbfs1G => Size(kind.page_size().bytes()),
            // Other sizes are refused when the VM is made.
            _ => Size(1),
        };
        match (kind, option, &self.pages_from) {
            (_, Some(option), _) => Err(WrongMemory::NeedsPool { option, kind: name }),
            _ if self.linux_limit().and(self.seed).is_some() => Err(WrongMemory::Seeded(name)),
            (MemoryKind::Budget | MemoryKind::Shared, _, Some(PagesFrom::Handler(_))) => {
                Err(WrongMemory::Handler(name))
            }
            (MemoryKind::Hugetlbfs1G, _, Some(_)) => Err(WrongMemory::Source1G),
            _ if !self.memory.0.is_multiple_of(page.0) => {
                Err(WrongMemory::PartOfHugePage(self.memory.0, page))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    fn check(options: &str) -> Result<MemoryKind, String> {
        let line = format!("lacuna run hello {options}");
        let Some(Command::Run(args)) = parse(&line).unwrap().command else {
            panic!("{line}");
        };
        let checked = args.check_kind().map_err(|wrong| wrong.to_string());
        checked.map(|()| args.kind())
    }

    #[test]
    fn kinds_of_memory() {
        for (options, kind) in [
            ("", MemoryKind::Budget),
            ("--resident 1G --thp always --swap mem", MemoryKind::Budget),
            ("--pages-from handler:/h", MemoryKind::Linux),
            ("--pages-from zeros", MemoryKind::Budget),
            ("--pages-from zeros --memory-kind memfd", MemoryKind::Shared),
            (
                "--pages-from handler:/h --memory-kind hugetlbfs",
                MemoryKind::Hugetlbfs,
            ),
            ("--memory 6M --memory-kind hugetlbfs", MemoryKind::Hugetlbfs),
            ("--memory-kind memfd --resident 8M", MemoryKind::Shared),
            ("--pages-from handler:/h --resident 1G", MemoryKind::Linux),
            (
                "--memory 2G --memory-kind hugetlbfs-1g",
                MemoryKind::Hugetlbfs1G,
            ),
        ] {
            assert_eq!(check(options), Ok(kind), "{options}");
        }
        for (options, expected) in [
            (
                "--memory-kind memfd --swap mem",
                "--swap is for --memory-kind pool",
            ),
            ("--memory-kind hugetlbfs --thp never", "leave --thp out"),
            (
                "--memory-kind hugetlbfs --resident 1G",
                "memory is hugetlbfs",
            ),
            (
                "--memory-kind memfd --resident 8M --seed 1",
                "in real time; leave one",
            ),
            (
                "--pages-from handler:/h --memory-kind memfd",
                "and not memfd; leave --memory-kind out",
            ),
            (
                "--memory 7M --memory-kind hugetlbfs",
                "7340032 bytes are not whole huge pages of 2M",
            ),
            (
                "--memory 1025M --memory-kind hugetlbfs-1g",
                "1074790400 bytes are not whole huge pages of 1G",
            ),
            (
                "--memory 1G --memory-kind hugetlbfs-1g --pages-from zeros",
                "leave --pages-from out",
            ),
        ] {
            let refused = check(options).unwrap_err();
            assert!(refused.contains(expected), "{options}: {refused}");
        }
    }
}
