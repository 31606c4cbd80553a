//! The page source of a run: `--pages-from`, and its counters.

use crate::args::{PagesFrom, Patience, RunArgs};
use crate::control::Coming;
use crate::exit::Exit;
use crate::run::{Lazy, Refusal};
use crate::sample::Pages;
use lacuna_addr::PageCount;
use lacuna_machine::{MemorySlotError, SlotFlags, Vm};
use lacuna_source::{
    External, FileError, Measured, MemoryFile, PageSource, Peer, PeerError, Policy, WhenGone, Zeros,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The source of a run, whose counters are shown.
pub type Source = Arc<Measured<Box<dyn PageSource>>>;

/// Why a run has no page source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A memory file that is of no use.
    #[error(transparent)]
    File(#[from] FileError),
    /// A peer that cannot be reached, or is of no use.
    #[error("{from}: {error}")]
    Peer {
        /// The option's value.
        from: PagesFrom,
        /// What is wrong.
        error: PeerError,
    },
    /// A handler that cannot be had here.
    #[error(
        "{from}: this process gets no userfaultfd ({cause}); allow the system call or \
         /dev/userfaultfd"
    )]
    Handler {
        /// The option's value.
        from: PagesFrom,
        /// The system's words.
        cause: String,
    },
    /// Pages that come when the host has them, in a run that has to repeat.
    #[error(
        "--seed repeats a run only with zeros, because pages from {0} come in real time: leave one \
         of the two out"
    )]
    Seed(PagesFrom),
}

impl SourceError {
    /// How the command ends.
    pub const fn exit(&self) -> Exit {
        match self {
            Self::File(FileError::Thread(_))
            | Self::Peer {
                error: PeerError::Io(_),
                ..
            }
            | Self::Handler { .. } => Exit::Host,
            _ => Exit::Usage,
        }
    }
}

/// Opens the source that `args` name.
///
/// # Errors
/// The source cannot be used for this run.
pub fn open(args: &RunArgs) -> Result<Option<Source>, SourceError> {
    let Some(from) = &args.pages_from else {
        return Ok(None);
    };
    if args.seed.is_some() && *from != PagesFrom::Zeros {
        return Err(SourceError::Seed(from.clone()));
    }
    let pages = PageCount::from_bytes(args.memory.0);
    let source = source(from, pages, policy(args.patience))?;
    Ok(Some(Arc::new(Measured::new(source))))
}

/// The pages of a snapshot, read when the guest needs them.
///
/// # Errors
/// Its file cannot be read.
pub fn of_snapshot(lazy: &Lazy<'_>) -> Result<Source, Refusal> {
    let pages = lazy.snapshot.pages_on_demand(Policy::default());
    let mut pages = pages.map_err(|error| (error.kind().into(), error.to_string()))?;
    if let Some(record) = &lazy.record {
        pages = pages.recorded(&record.recorder);
    }
    Ok(Arc::new(Measured::new(Box::new(pages))))
}

/// The pages of a guest that comes before its memory.
pub fn of_migration(source: Arc<dyn PageSource>) -> Source {
    Arc::new(Measured::new(Box::new(source)))
}

/// Opens the source `from` of a guest with `pages` pages.
///
/// # Errors
/// The source cannot be used for this guest.
pub fn source(
    from: &PagesFrom,
    pages: PageCount,
    policy: Policy,
) -> Result<Box<dyn PageSource>, SourceError> {
    Ok(match from {
        PagesFrom::Zeros => Box::new(Zeros),
        PagesFrom::File(path) => Box::new(MemoryFile::open(path, pages, policy)?),
        PagesFrom::Peer(path) => {
            let peer = Peer::connect(path, pages, policy);
            Box::new(peer.map_err(|error| SourceError::Peer {
                from: from.clone(),
                error,
            })?)
        }
        PagesFrom::Handler(path) => {
            let external = External::process(path, policy);
            Box::new(external.map_err(|errno| SourceError::Handler {
                from: from.clone(),
                cause: errno.to_string(),
            })?)
        }
    })
}

fn policy(patience: Option<Patience>) -> Policy {
    let mut policy = Policy::default();
    match patience {
        Some(Patience::Until(time)) => policy.patience = time,
        Some(Patience::Forever) => policy.when_gone = WhenGone::Hold,
        None => {}
    }
    policy
}

/// Makes vCPUs exit for missing pages, in every slot that may have such exits.
///
/// # Errors
/// A slot refuses it.
pub fn exit_on_missing<V: Vm>(vm: &V) -> Result<(), MemorySlotError> {
    let slots = vm.memory_slots();
    let slots = slots
        .iter()
        .filter(|slot| !slot.flags.contains(SlotFlags::READONLY));
    for slot in slots {
        vm.set_slot_flags(slot.id, slot.flags | SlotFlags::EXIT_ON_MISSING)?;
    }
    Ok(())
}

/// Which pages of a guest are here, besides those that its source was asked for.
pub enum Beside {
    /// So many came without a request.
    Prefetched(Arc<AtomicU64>),
    /// A migration brings them, and counts those that were asked for too.
    Coming(Arc<Coming>),
}

/// The pages of a guest now, `elapsed` after the sample `before`.
pub fn count(source: &Source, beside: &Beside, before: &Pages, elapsed: Duration) -> Pages {
    let stats = source.stats();
    let present = match beside {
        Beside::Prefetched(pages) => stats.provided + pages.load(Ordering::Relaxed),
        Beside::Coming(coming) => coming.present(),
    };
    let came = present.saturating_sub(before.present) as f64;
    let seconds = elapsed.as_secs_f64();
    Pages {
        total: before.total,
        present,
        missing: before.total.saturating_sub(present + stats.failed),
        lost: stats.failed,
        in_flight: stats.in_flight,
        rate: if seconds > 0.0 { came / seconds } else { 0.0 },
        p50_ns: ns(stats.p50),
        p99_ns: ns(stats.p99),
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
