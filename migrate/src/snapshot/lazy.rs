//! A snapshot whose pages are read when the guest needs them, and in the background.
//!
//! ```text
//! vCPU needs a page ─► the VM asks SnapshotPages ─┬─ zeros ─────────────────────────► provided
//!                                                 └─ its folder reads it ─► check ─► provided
//! replay, prefetch: a thread of the VMM ─┬─ the pages of a record of first touches, in its order
//!                                        └─ the other pages with content, in the order of the file
//! ```
//! The first provided page counts. Both ways check a page's checksum before the guest gets the
//! page.

use super::files::{ZEROS, entry_of};
use super::places::{Layer, Place, Places};
use super::reader::{Buffer, Snapshot};
use crate::copy::OnPages;
use crate::state::restore_state;
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::{
    Answer, MissingMemory, PageRequest, PageSource, PlatformDevices, Policy, SourcePage, Vm,
};
use lacuna_source::{Failure, MemoryId, PageRequester, Recorder, Touches};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// How many pages of a record are sorted by their order in the file. First a few, because the guest
/// needs those at once. Then more, because larger parts of the file are read faster.
const WINDOW_FIRST: usize = 64;
/// 16 MiB.
const WINDOW_LAST: usize = 4096;

/// The pages of a snapshot, each read on request.
pub struct SnapshotPages {
    /// One for each layer.
    files: Vec<Box<dyn PageSource>>,
    places: Arc<Places>,
    path: PathBuf,
    recorder: Option<Recorder>,
    /// Counts requested and provided pages with content.
    provided: Arc<AtomicU64>,
}

impl SnapshotPages {
    /// The guest's memory in pages, zeros included.
    pub fn pages(&self) -> PageCount {
        PageCount::new(self.places.pages())
    }

    /// Records from now on which pages are requested, in this order.
    ///
    /// A page that [`Snapshot::prefetch`] brings first is not requested, so it is not in the
    /// record. To record all first touches of a period, begin to prefetch after that period.
    #[must_use]
    pub fn recorded(mut self, by: &Recorder) -> Self {
        self.recorder = Some(by.clone());
        self
    }

    /// Counts in `counter` from now on each requested and provided page with content. This count,
    /// [`Snapshot::prefetch`]'s and [`Snapshot::replay`]'s are in sum the pages of
    /// [`Snapshot::pages`] that the guest has.
    #[must_use]
    pub fn counted(mut self, counter: &Arc<AtomicU64>) -> Self {
        self.provided = Arc::clone(counter);
        self
    }
}

impl Snapshot {
    /// An empty recorder of first touches.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(self.touched_memory())
    }

    /// A source of this snapshot's pages: make the VM for [`Snapshot::restore_lazily`] with it.
    ///
    /// # Errors
    /// [`MigrateError::Source`].
    pub fn pages_on_demand(&self, policy: Policy) -> Result<SnapshotPages, MigrateError> {
        let open = |layer: &Layer| {
            let pages = PageCount::new(layer.pages);
            layer.file.page_source(pages, policy.clone())
        };
        let files: Result<Vec<_>, _> = self.layers().iter().map(open).collect();
        Ok(SnapshotPages {
            files: files?,
            places: Arc::clone(self.places()),
            path: self.layers()[0].path.clone(),
            recorder: None,
            provided: Arc::default(),
        })
    }

    /// As [`Snapshot::restore`], but reads no page: the guest's requests do. The page source of
    /// `vm` must be [`Snapshot::pages_on_demand`]. The files must stay unchanged until
    /// [`Snapshot::prefetch`] has ended: a page of a changed file is lost.
    ///
    /// # Errors
    /// The VM is another machine, has no page source or other memory slots, or a value of the state
    /// is refused.
    pub fn restore_lazily<V: Vm>(
        &self,
        vm: &Arc<V>,
        devices: &PlatformDevices,
    ) -> Result<Vec<V::Vcpu>, MigrateError> {
        self.check(&**vm, devices)?;
        // A VM asks its page source for its first slots, by their order.
        if MemoryLayout::of(&**vm) != self.machine().layout {
            return Err(MigrateError::OtherSlots);
        }
        missing_memory(&**vm)?;
        let bare = vm.bare_vcpus();
        let mut vcpus = bare.map_err(|error| MigrateError::Vcpus(error.to_string()))?;
        restore_state(&**vm, &mut vcpus, devices, self.state())?;
        Ok(vcpus)
    }

    /// Provides all still missing pages with content, in the order of the file, while the guest
    /// runs. Calls `each` with the number of pages provided since the last call. Afterwards the
    /// guest needs no file of the snapshot.
    ///
    /// # Errors
    /// A page is damaged, or `each` says `Break`. The guest keeps running, and loses the damaged
    /// pages when it needs them.
    pub fn prefetch<V: Vm>(&self, vm: &V, each: OnPages<'_>) -> Result<(), MigrateError> {
        let missing = missing_memory(vm)?;
        self.read_pages(each, &mut |gpa, bytes| {
            Ok(missing.provide(gpa, bytes)?.taken)
        })
    }

    /// Provides the still missing pages of `touches`, zeros included, before the guest runs or
    /// while it runs. They come about in the record's order, adjacent pages together. Calls `each`
    /// as [`Snapshot::prefetch`] does: pages of zeros do not count. [`Snapshot::prefetch_rest`]
    /// brings the other pages.
    ///
    /// The first touches are the pages that a guest uses most. A VMM may replay a part of the
    /// record before it runs the vCPUs ([`Touches::split_at`]), and the rest while they run.
    ///
    /// # Errors
    /// As [`Snapshot::prefetch`]; [`MigrateError::OtherSnapshot`].
    pub fn replay<V: Vm>(
        &self,
        vm: &V,
        touches: &Touches,
        each: OnPages<'_>,
    ) -> Result<(), MigrateError> {
        let missing = missing_memory(vm)?;
        if !touches.is_of(self.touched_memory()) {
            return Err(MigrateError::OtherSnapshot);
        }
        let mut provide = |gpa, bytes: &[u8]| Ok(missing.provide(gpa, bytes)?.taken);
        let mut buffer = Buffer::default();
        for run in runs(touches.pages()) {
            self.read_range(run.clone(), &mut buffer, each, &mut provide)?;
            let is_zeros = |page: &u64| {
                let place = self.places().get(*page);
                place.is_some_and(|place| place.entry == ZEROS)
            };
            for page in run.filter(is_zeros) {
                self.put(page, &ZERO_PAGE, &mut provide)?;
                if each(0).is_break() {
                    return Err(MigrateError::Cancelled);
                }
            }
        }
        Ok(())
    }

    /// As [`Snapshot::prefetch`], without the pages of `touches`, which [`Snapshot::replay`] has
    /// brought.
    ///
    /// # Errors
    /// As [`Snapshot::prefetch`].
    pub fn prefetch_rest<V: Vm>(
        &self,
        vm: &V,
        touches: &Touches,
        each: OnPages<'_>,
    ) -> Result<(), MigrateError> {
        let missing = missing_memory(vm)?;
        let mut rest = PageSet::full(self.places().pages());
        touches
            .pages()
            .iter()
            .for_each(|page| _ = rest.remove(*page));
        let mut provide = |gpa, bytes: &[u8]| Ok(missing.provide(gpa, bytes)?.taken);
        let mut buffer = Buffer::default();
        rest.runs()
            .try_for_each(|run| self.read_range(run, &mut buffer, each, &mut provide))
    }
}

/// The pages of a record as ranges: windows of the record one after the other, and in each window
/// the pages in the order of the file.
fn runs(pages: &[SourcePage]) -> impl Iterator<Item = Range<u64>> {
    let (mut rest, mut window) = (pages, WINDOW_FIRST);
    let windows = std::iter::from_fn(move || {
        let (now, later) = rest.split_at(window.min(rest.len()));
        rest = later;
        window = (window * 2).min(WINDOW_LAST);
        (!now.is_empty()).then_some(now)
    });
    windows.flat_map(|window| {
        let mut pages: Vec<u64> = window.iter().map(|page| page.0).collect();
        pages.sort_unstable();
        pages.dedup();
        let side_by_side = |a: &u64, b: &u64| *b == *a + 1;
        let runs = pages.chunk_by(side_by_side);
        let runs: Vec<_> = runs.map(|run| run[0]..run[run.len() - 1] + 1).collect();
        runs
    })
}

fn missing_memory(vm: &impl Vm) -> Result<&dyn MissingMemory, MigrateError> {
    vm.missing_memory().ok_or(MigrateError::NoSource)
}

impl PageSource for SnapshotPages {
    fn describe(&self) -> String {
        format!("the snapshot's memory {}", self.path.display())
    }

    fn memory_id(&self) -> MemoryId {
        // The first file has the newest pages, and belongs to no other snapshot.
        self.files[0].memory_id()
    }

    fn outage(&self) -> Option<String> {
        self.files.iter().find_map(|file| file.outage())
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page();
        if let Some(recorder) = &self.recorder {
            recorder.note(page);
        }
        // `Answer::Late`: prefetch has provided the page, or its memory is gone.
        let _ = match self.places.get(page.0) {
            None => request.fail(&format!("{page} is beyond the snapshot's memory")),
            Some(Place { entry: ZEROS, .. }) => request.provide(&ZERO_PAGE),
            Some(Place { entry, layer, at }) => {
                let provided = Arc::clone(&self.provided);
                let checked = Arc::new(Checked {
                    request,
                    entry,
                    provided,
                });
                return self.files[layer].fetch(PageRequest::new(checked, page.0, at));
            }
        };
    }
}

/// Checks an answer before it is passed on.
struct Checked {
    request: PageRequest,
    entry: u32,
    provided: Arc<AtomicU64>,
}

impl PageRequester for Checked {
    fn answer(&self, page: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        match content {
            Ok(bytes) if entry_of(bytes) == self.entry => {
                let answer = self.request.provide(bytes);
                let taken = u64::from(answer == Answer::Taken);
                self.provided.fetch_add(taken, Ordering::Relaxed);
                answer
            }
            Ok(_) => {
                let page = SourcePage(page);
                let reason = format!("the checksum of {page} differs: the snapshot is damaged");
                self.request.fail(&reason)
            }
            Err(failure) => self.request.pass(failure),
        }
    }
}
