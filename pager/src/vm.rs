//! One VM: the states of its units, and what puts them in place.
//!
//! # The rule that keeps old content away
//! A page that the VM has taken away must never show its old content again. The kernel lets the
//! removing thread continue when the event of the removal is *read*, and that thread empties the
//! page only then. So the check of a unit's state and the copy must not enclose that read:
//!
//! ```text
//! event thread, `live` held alone          placing thread, `live` shared
//!   read the events                          the unit is Asked? it is Arrived now
//!   settle the removed units                 UFFDIO_COPY
//!                                            settle the unit
//! ```
//! A placement before the read is emptied by the removing thread. A placement after it finds a
//! settled unit, and drops the content. Between the removal's start and the read the kernel refuses
//! placements with `EAGAIN`: the content then waits for the event thread in `waiting`.

mod answers;
mod events;
mod filling;
mod requests;

use crate::cold::ColdPages;
use crate::config::{Report, WhenLost};
use crate::image::Image;
use crate::messages::{Matter, Messages};
use crate::peer_process::PeerProcess;
use crate::placing::{Placed, Put, place, wake};
use crate::regions::{Regions, Unit};
use crate::shared_pages::SharedPages;
use crate::stalls::Stalls;
use crate::state::VmState;
use crate::stats::{Count, Counts, PagerCounts, VmStats};
use crate::units::{UnitState, Units};
use crate::waiting::{Again, Waiting, WaitingList, WaitingPut};
use crate::window::Window;
use lacuna_addr::{Hva, HvaRange};
use lacuna_source::{Gathering, Measured, PageSource, Recorder, SourcePage};
use lacuna_sync::{Mutex, RwLock, RwLockReadGuard, lock, lock_order};
use lacuna_sys::{Errno, Userfaultfd};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

const NO_HUGE_PAGE: &str = "no huge page is left, or another thread has placed it";

/// One VM.
pub struct Vm {
    regions: Regions,
    process: PeerProcess,
    source: Measured<Arc<dyn PageSource>>,
    /// The image's file, if the VMM has mapped it.
    shared: Option<Arc<SharedPages>>,
    recorder: Option<Recorder>,
    when_lost: WhenLost,
    messages: Messages,
    units: Units,
    /// `None` after the end. See the module's documentation.
    live: RwLock<Option<Arc<Userfaultfd>>, lock_order::PagerVm>,
    /// The pages that have arrived, of units of several pages in the state Asked.
    gathering: Mutex<HashMap<u64, Gathering>, lock_order::PagerUnits>,
    waiting: WaitingList,
    window: Window,
    stalls: Stalls,
    /// Wakes the event thread.
    bell: OwnedFd,
    /// The kernel has said that the process is ending.
    has_ended: AtomicBool,
    /// All that the fill brings is in place.
    has_fill_ended: AtomicBool,
    counts: Counts,
}

impl Vm {
    /// A VM with these units.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(
        (regions, uffd): (Regions, Arc<Userfaultfd>),
        units: Units,
        process: PeerProcess,
        (image, shared): (&Image, Option<Arc<SharedPages>>),
        report: Report,
    ) -> Result<Self, Errno> {
        // The first touches of a VM of an earlier pager are gone.
        let record = image.record.as_ref().filter(|_| units.are_missing());
        let recorder = record.and_then(|record| record.take());
        Ok(Self {
            units,
            messages: Messages::new(&process, report),
            regions,
            process,
            source: Measured::new(match &shared {
                Some(shared) => Arc::clone(shared) as Arc<dyn PageSource>,
                None => Arc::clone(&image.source),
            }),
            shared,
            recorder,
            when_lost: image.when_lost,
            live: RwLock::new(Some(uffd)),
            gathering: Mutex::default(),
            waiting: WaitingList::default(),
            window: Window::default(),
            stalls: Stalls::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            has_ended: AtomicBool::new(false),
            has_fill_ended: AtomicBool::new(false),
            counts: Counts::default(),
        })
    }

    /// Answers a fault at `address`, or makes requests for [`Vm::send_requests`].
    pub fn fault(&self, address: Hva) {
        self.counts.add(Count::Faults);
        if self.has_fill_ended.load(Ordering::Relaxed) {
            self.counts.add(Count::FaultsAfterFill);
        }
        let Some(unit) = self.regions.at(address) else {
            return self.fault_outside(address);
        };
        {
            let live = self.live();
            let Some(uffd) = live.as_deref() else { return };
            match self.units.get(unit.number) {
                UnitState::Missing if self.units.ask(unit.number) => {
                    self.counts.add(Count::First);
                }
                // The answer wakes the thread.
                UnitState::Missing | UnitState::Asked | UnitState::Arrived => {
                    return self.counts.add(Count::Joined);
                }
                // What waits for this unit wakes the thread.
                UnitState::Settled | UnitState::Shared if self.waiting.need(&unit) => return,
                UnitState::Shared => return self.put(Some(uffd), &unit, WaitingPut::Shared),
                UnitState::Settled => return self.put(Some(uffd), &unit, WaitingPut::Zeros),
                UnitState::Lost => return self.refuse_access(Some(uffd), &unit),
            }
        }
        if let Some(recorder) = &self.recorder {
            let pages = 0..unit.memory.pages();
            pages.for_each(|page| recorder.note(SourcePage(unit.first.0 + page)));
        }
        self.window.push(unit);
    }

    fn fault_outside(&self, address: Hva) {
        self.counts.add(Count::Outside);
        let text = format!(
            "has a fault at {address}, which is in none of its regions: announce all of the \
             registered memory"
        );
        self.messages.say(Matter::Loss, &text);
        let memory = HvaRange::new(address.page(), 1).expect("a page");
        let unit = Unit {
            number: u64::MAX,
            memory,
            first: SourcePage(0),
        };
        let live = self.live();
        if let Some(uffd) = live.as_deref() {
            self.refuse_access(Some(uffd), &unit);
        }
    }

    /// Repeats the placements that wait. Returns whether some wait again.
    pub fn repeat(&self) -> bool {
        let waiting = self.waiting.take();
        let live = self.live();
        let Some(uffd) = live.as_deref() else {
            return false;
        };
        for one in waiting {
            let is_there = one.is_there();
            let Waiting {
                unit, put, from, ..
            } = one;
            let is_wanted = match (&put, self.units.get(unit.number)) {
                (WaitingPut::Content(_), state) => state == UnitState::Arrived,
                (WaitingPut::Zeros, state) => state == UnitState::Settled,
                (WaitingPut::Shared, state) => {
                    matches!(state, UnitState::Arrived | UnitState::Shared)
                }
                (WaitingPut::Poison, state) => state == UnitState::Lost,
            };
            if !is_wanted {
                // Taken away meanwhile. A thread that waits faults again.
                wake(uffd, &unit);
                continue;
            }
            let is_zeros = matches!(put, WaitingPut::Zeros);
            if is_zeros && is_there {
                continue;
            }
            let again = self.place(uffd, &unit, put.as_put(), from);
            if is_zeros && again == Again::Unsure {
                self.short(NO_HUGE_PAGE);
            }
            self.waiting.keep(unit, put, again);
        }
        !self.waiting.is_empty()
    }

    /// Places something, or keeps it for [`Vm::repeat`]. Without a descriptor, because the event
    /// thread holds the lock alone, it keeps it.
    fn put(&self, uffd: Option<&Userfaultfd>, unit: &Unit, put: WaitingPut) {
        let again = uffd.map_or(Again::Later(0), |uffd| {
            self.place(uffd, unit, put.as_put(), 0)
        });
        self.keep(*unit, put, again);
    }

    /// Keeps something for [`Vm::repeat`], if it is to be repeated, and wakes the event thread.
    fn keep(&self, unit: Unit, put: WaitingPut, again: Again) {
        if self.waiting.keep(unit, put, again) {
            self.ring();
        }
    }

    /// Places something.
    fn place(&self, uffd: &Userfaultfd, unit: &Unit, put: Put<'_>, from: usize) -> Again {
        let placed = place(uffd, unit, put, from);
        match placed {
            Placed::Whole => {}
            Placed::Found => self.counts.add(Count::Exists),
            Placed::Unsure => {
                wake(uffd, unit);
                // Zeros are usual for a page that another thread has placed: see `repeat`.
                if !matches!(put, Put::Zeros) {
                    self.short(NO_HUGE_PAGE);
                }
                return Again::Unsure;
            }
            Placed::Later(Errno::AGAIN, at) => {
                self.counts.add(Count::Again);
                return Again::Later(at);
            }
            Placed::Later(errno, at) => {
                self.short(&errno.to_string());
                return Again::Later(at);
            }
            Placed::Unmapped => {
                self.units.settle(unit.number);
                return Again::No;
            }
            Placed::Ended => {
                // The end of the request reports a failure, which is no loss then.
                self.units.settle(unit.number);
                self.has_ended.store(true, Ordering::Release);
                self.ring();
                return Again::No;
            }
            Placed::Refused(errno) if matches!(put, Put::Poison) => {
                let text = format!("waits for a lost page, which cannot be poisoned ({errno})");
                self.messages.say(Matter::Oddity, &text);
                return Again::No;
            }
            Placed::Refused(errno) => {
                let at = unit.memory.start();
                let reason = format!("the kernel refuses a page at {at} ({errno})");
                self.lose(Some(uffd), unit, &reason);
                return Again::No;
            }
        }
        self.stalls.end(unit.number);
        match put {
            Put::Pages(_) => drop(self.units.settle(unit.number)),
            Put::Shared => self.units.share(unit.number),
            Put::Zeros | Put::Poison => {}
        }
        match put {
            Put::Pages(_) if placed == Placed::Whole => self.counts.add(Count::Placed),
            Put::Shared if placed == Placed::Whole => self.counts.add(Count::Shared),
            Put::Zeros if placed == Placed::Whole => self.counts.add(Count::Zeros),
            _ => {}
        }
        Again::No
    }

    fn short(&self, reason: &str) {
        self.counts.add(Count::NoMemory);
        let text = format!("waits for a page: the host has no memory for it ({reason})");
        self.messages.say(Matter::Shortage, &text);
    }

    /// The content of `unit` will not come. No effect if it is settled or lost.
    fn lose(&self, uffd: Option<&Userfaultfd>, unit: &Unit, reason: &str) {
        if self.units.lose(unit.number).is_some() {
            self.report_loss(uffd, unit, reason);
        }
    }

    /// `unit` is lost from now on.
    fn report_loss(&self, uffd: Option<&Userfaultfd>, unit: &Unit, reason: &str) {
        lock(&self.gathering).remove(&unit.number);
        self.counts.add(Count::Lost);
        let text = format!("has lost {}: {reason}", unit.first);
        self.messages.say(Matter::Loss, &text);
        self.refuse_access(uffd, unit);
    }

    /// Does what the policy says about an access to a page without content.
    fn refuse_access(&self, uffd: Option<&Userfaultfd>, unit: &Unit) {
        match self.when_lost {
            WhenLost::Hold => {}
            WhenLost::Kill => self.kill(),
            WhenLost::Poison => self.put(uffd, unit, WaitingPut::Poison),
        }
    }

    fn kill(&self) {
        if let Err(errno) = self.process.kill() {
            let text =
                format!("waits for a lost page, and cannot be ended ({errno}): end it by hand");
            self.messages.say(Matter::Kill, &text);
        }
    }

    fn live(&self) -> RwLockReadGuard<'_, Option<Arc<Userfaultfd>>> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // It fails only if the counter is full: then the thread wakes up anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Where the event thread is woken.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Whether its process is ending.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Reports an error of the pager: no fault is answered any more.
    pub fn hold(&self, reason: &str) {
        self.messages.say(
            Matter::Service,
            &format!("waits for missing pages: {reason}; restart the VM"),
        );
    }

    /// Ends the service, and frees its memory. Later answers are late.
    pub fn end(&self) {
        let live = self
            .live
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(live);
        lock(&self.gathering).clear();
        self.waiting.clear();
        self.window.clear();
        self.source.end("the VM has ended");
    }

    /// Whether the record of the image is this VM's.
    pub fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    /// Watches whether it is idle.
    pub fn watch(&self, after: Duration) -> ColdPages {
        ColdPages::new(after, &self.process)
    }

    /// Moves its next pages to swap, if it is idle.
    pub fn page_out(&self, cold: &mut ColdPages) {
        let bytes = cold.look(&self.regions, &self.process, &self.messages);
        self.counts.add_many(Count::PagedOut, bytes);
    }

    /// Its process.
    pub fn process(&self) -> &PeerProcess {
        &self.process
    }

    /// What outlives the pager.
    pub fn state(&self) -> &VmState {
        self.units.state()
    }

    /// The number of its process, unless that is in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.process.pid()
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> u64 {
        self.regions.bytes()
    }

    /// Its counters now.
    pub fn counts(&self) -> PagerCounts {
        self.counts.read()
    }

    /// Its counters now, and those of its page source. `number` is its own.
    pub fn stats(&self, number: u64) -> VmStats {
        VmStats {
            number,
            pid: self.pid(),
            bytes: self.bytes(),
            is_filled: self.has_fill_ended.load(Ordering::Relaxed),
            counts: self.counts(),
            pages: self.source.stats(),
            units: self.units.count(),
            threads: self.stalls.read(),
        }
    }
}
