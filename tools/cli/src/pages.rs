//! The page source of a run: `--pages-from`, and its counters.

use crate::args::{Backend, PagesFrom, Patience, RunArgs};
use crate::output::complain;
use crate::run::{Lazy, Refusal};
use crate::source::{self, SourceError, no_handler};
use lacuna::memory::{MemorySlotError, SlotFlags};
use lacuna::metrics::Metrics;
use lacuna::migrate::Snapshot;
use lacuna::migrate::session::IncomingHandle;
use lacuna::source::{External, Measured, PageSource};
use lacuna::{PageCount, Vm};
use lacuna_control::{PageCounts, Pages};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The source of a run, with counters.
pub type Source = Arc<Measured<Box<dyn PageSource>>>;

/// Opens the source that `args` name. `interrupt` ends a wait for an object store.
///
/// # Errors
/// The source cannot be used for this run.
pub fn open(
    args: &RunArgs,
    backend: Backend,
    interrupt: &Arc<AtomicBool>,
) -> Result<Option<Source>, SourceError> {
    let Some(from) = &args.pages_from else {
        return Ok(None);
    };
    if args.seed.is_some() && *from != PagesFrom::Zeros {
        return Err(SourceError::Seed(from.clone()));
    }
    let pages = PageCount::from_bytes(args.memory.0);
    let policy = Patience::policy(args.patience);
    let source = match (from, backend) {
        (PagesFrom::Handler(path), Backend::Kvm) => {
            let external = External::process(path.as_ref(), policy).and_then(External::for_kernel);
            Box::new(external.map_err(|errno| no_handler(from, errno))?)
        }
        _ => source::open(from, Some(pages), policy, interrupt)?.0,
    };
    Ok(Some(Arc::new(Measured::new(source))))
}

/// The pages of a snapshot, read when the guest needs them.
///
/// # Errors
/// Its file cannot be read.
pub fn of_snapshot(lazy: &Lazy<'_>) -> Result<Source, Refusal> {
    let pages = lazy.snapshot.pages_on_demand(lazy.policy.clone());
    let pages = pages.map_err(|error| (error.kind().into(), error.to_string()))?;
    let mut pages = pages.counted(&lazy.counts.on_demand);
    if let Some(record) = &lazy.record {
        pages = pages.recorded(&record.recorder);
    }
    Ok(Arc::new(Measured::new(Box::new(pages))))
}

/// The pages of a guest that arrives before its memory.
pub fn of_migration(source: Arc<dyn PageSource>) -> Source {
    Arc::new(Measured::new(Box::new(source)))
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

/// The present pages of a guest.
pub enum Here {
    /// The pages that its source has provided.
    Provided,
    /// The restored pages of a snapshot.
    Restored(Arc<Restoring>),
    /// A migration brings the pages, and its count includes the requested ones.
    IncomingGuest(IncomingHandle),
}

/// The progress of a lazy restore.
pub struct Restoring {
    /// Pages of the snapshot with content; the others are zeros, and need no file.
    content: u64,
    /// Requested pages with content.
    pub on_demand: Arc<AtomicU64>,
    /// Pages with content that arrived before the guest needed them.
    pub prefetched: AtomicU64,
    /// The guest needs nothing of the snapshot any more.
    pub is_whole: AtomicBool,
}

impl Restoring {
    /// Nothing of `snapshot` is restored yet.
    pub fn new(snapshot: &Snapshot) -> Self {
        Self {
            content: snapshot.pages(),
            on_demand: Arc::default(),
            prefetched: AtomicU64::new(0),
            is_whole: AtomicBool::new(false),
        }
    }

    /// Missing pages with content.
    fn missing(&self) -> u64 {
        if self.is_whole.load(Ordering::Relaxed) {
            return 0;
        }
        let came = [&*self.on_demand, &self.prefetched].map(|pages| pages.load(Ordering::Relaxed));
        self.content.saturating_sub(came.iter().sum())
    }
}

/// The pages of a guest with a page source.
pub struct GuestPages {
    source: Source,
    total: u64,
    here: Here,
}

impl GuestPages {
    /// The pages of a guest with `total` pages.
    pub fn new(source: Source, total: PageCount, here: Here) -> Self {
        let total = total.get();
        Self {
            source,
            total,
            here,
        }
    }

    /// Their source.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Their counts now, `elapsed` after the sample `before`.
    pub fn count(&self, before: &Pages, elapsed: Duration) -> Pages {
        let stats = self.source.stats();
        let left = |here: u64| self.total.saturating_sub(here + stats.failed);
        let missing = match &self.here {
            Here::Provided => left(stats.provided),
            Here::Restored(restoring) => restoring.missing().saturating_sub(stats.failed),
            Here::IncomingGuest(incoming_guest) => left(incoming_guest.present()),
        };
        let present = self.total.saturating_sub(missing + stats.failed);
        let came = present.saturating_sub(before.present) as f64;
        let seconds = elapsed.as_secs_f64();
        Pages {
            total: self.total,
            present,
            missing,
            lost: stats.failed,
            whole: missing + stats.failed == 0,
            in_flight: stats.in_flight,
            rate: if seconds > 0.0 { came / seconds } else { 0.0 },
            p50_ns: ns(stats.p50),
            p99_ns: ns(stats.p99),
        }
    }
}

impl PageCounts for GuestPages {
    fn pages(&self, ran: Duration) -> Pages {
        self.count(&Pages::default(), ran)
    }

    /// A guest with all of its memory needs no source.
    fn outage(&self) -> Option<String> {
        let reason = self.source.outage()?;
        let now = self.count(&Pages::default(), Duration::ZERO);
        (now.missing > 0).then(|| {
            let source = self.source.describe();
            format!("{source} provides no pages: {reason}")
        })
    }

    fn fill(&self, to: &mut Metrics) {
        self.source.stats().fill(to);
    }
}

/// Says on stderr when the source of a run's pages fails, and when it provides pages again.
#[derive(Default)]
pub struct Outages {
    is_out: bool,
    /// The last message, and its time.
    last: Option<(String, Instant)>,
}

/// The time before the same message is repeated.
const REPEAT: Duration = Duration::from_secs(60);

impl Outages {
    /// Looks at the source of `pages`.
    pub fn look(&mut self, pages: &GuestPages) {
        match pages.outage() {
            Some(text) if !self.is_out => {
                let repeats =
                    |(last, at): &(String, Instant)| *last == text && at.elapsed() < REPEAT;
                if self.last.as_ref().is_some_and(repeats) {
                    return;
                }
                complain(&format!("{text}; a vCPU that needs a missing page waits"));
                (self.is_out, self.last) = (true, Some((text, Instant::now())));
            }
            None if std::mem::take(&mut self.is_out) => {
                let source = pages.source.describe();
                complain(&format!("{source} provides pages again"));
            }
            _ => {}
        }
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
