//! The page source of a run: `--pages-from`, and its counters.

use crate::args::{PagesFrom, Patience, RunArgs};
use crate::exit::Exit;
use crate::sample::Pages;
use lacuna_addr::PageCount;
use lacuna_machine::{MemorySlotError, SlotFlags, Vm};
use lacuna_source::{
    FileError, Measured, MemoryFile, PageSource, Peer, PeerError, Policy, WhenGone, Zeros,
};
use std::sync::Arc;
use std::time::Duration;

/// The source of a run, whose counters are shown.
pub type Source = Arc<Measured<Box<dyn PageSource>>>;

/// Why a run has no page source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A memory file that is of no use.
    #[error("--pages-from: {0}")]
    File(#[from] FileError),
    /// A peer that cannot be reached, or is of no use.
    #[error("--pages-from {from}: {error}")]
    Peer {
        /// The option's value.
        from: PagesFrom,
        /// What is wrong.
        error: PeerError,
    },
    /// Pages that come when the host has them, in a run that has to repeat.
    #[error(
        "--seed repeats a run only with --pages-from zeros, because pages from {0} come in real \
         time: leave one of the two out"
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
            } => Exit::Host,
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
    let policy = policy(args.patience);
    let source: Box<dyn PageSource> = match from {
        PagesFrom::Zeros => Box::new(Zeros),
        PagesFrom::File(path) => Box::new(MemoryFile::open(path, pages, policy)?),
        PagesFrom::Peer(path) => {
            let peer = Peer::connect(path, pages, policy);
            Box::new(peer.map_err(|error| SourceError::Peer {
                from: from.clone(),
                error,
            })?)
        }
    };
    Ok(Some(Arc::new(Measured::new(source))))
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

/// The pages of a guest of `total` pages now, `elapsed` after the sample `before`.
pub fn count(source: &Source, before: &Pages, elapsed: Duration) -> Pages {
    let stats = source.stats();
    let came = stats.provided.saturating_sub(before.present) as f64;
    let seconds = elapsed.as_secs_f64();
    Pages {
        total: before.total,
        present: stats.provided,
        missing: before.total.saturating_sub(stats.provided + stats.failed),
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
