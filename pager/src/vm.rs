//! One VM: the states of its units, and what puts them in place.
//!
//! # The rule that keeps old content away
//! A page that the VM has taken away must never show its old content again. The kernel lets the
//! removing thread continue when the event of the removal is *read*, and that thread empties the
//! page only then. So the check of a unit's state and the copy must not enclose that read:
//!
//! ```text
//! event thread, `live` held alone          placing thread, `live` shared
//!   read the events                          the unit is Asked?
//!   settle the removed units                 UFFDIO_COPY
//!                                            settle the unit
//! ```
//! A placement before the read is emptied by the removing thread. A placement after it finds a
//! settled unit, and drops the content. Between the removal's start and the read the kernel refuses
//! placements with `EAGAIN`: the content then waits for the event thread in `waiting`.

use crate::config::{Report, WhenLost};
use crate::peer_process::PeerProcess;
use crate::placing::{Placed, Put, place, wake};
use crate::regions::{Regions, Unit};
use crate::stats::{Count, Counts, PagerCounts, VmStats};
use crate::units::{UnitState, Units};
use crate::waiting::{Again, Waiting, WaitingList, WaitingPut};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use lacuna_source::{
    Answer, Failure, Gathered, Gathering, Measured, PageRequest, PageRequester, PageSource,
    SourcePage,
};
use lacuna_sync::{Mutex, RwLock, RwLockReadGuard, lock, lock_order};
use lacuna_sys::{Errno, Event, Userfaultfd};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, PoisonError};

/// The most reads of the descriptor under one lock. Each returns up to 64 events.
const READS: usize = 64;
/// Bits of a page's number in its unit, in the key of a request: a unit has up to 1 GiB.
const WITHIN: u32 = 18;

/// One VM.
pub struct Vm {
    regions: Regions,
    process: PeerProcess,
    source: Measured<Arc<dyn PageSource>>,
    when_lost: WhenLost,
    report: Report,
    /// `None` after the end. See the module's documentation.
    live: RwLock<Option<Live>, lock_order::PagerVm>,
    /// Units of several pages, some of which have arrived.
    gathering: Mutex<HashMap<u64, Gathering>, lock_order::PagerUnits>,
    waiting: WaitingList,
    /// Wakes the event thread.
    bell: OwnedFd,
    /// The kernel has said that the process is ending.
    has_ended: AtomicBool,
    counts: Counts,
    /// What was said once.
    said: [Once; Matter::Oddity as usize + 1],
}

/// What a message to the user is about. The first message about each matter is said.
#[derive(Clone, Copy)]
enum Matter {
    Loss,
    Shortage,
    Oddity,
}

struct Live {
    uffd: Arc<Userfaultfd>,
    units: Units,
}

impl Vm {
    /// A VM whose pages are all missing.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(
        (regions, uffd): (Regions, Arc<Userfaultfd>),
        process: PeerProcess,
        source: Arc<dyn PageSource>,
        (when_lost, report): (WhenLost, Report),
    ) -> Result<Self, Errno> {
        let units = Units::new(regions.units());
        Ok(Self {
            regions,
            process,
            source: Measured::new(source),
            when_lost,
            report,
            live: RwLock::new(Some(Live { uffd, units })),
            gathering: Mutex::default(),
            waiting: WaitingList::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            has_ended: AtomicBool::new(false),
            counts: Counts::default(),
            said: std::array::from_fn(|_| Once::new()),
        })
    }

    /// Reads the events of the descriptor. Settles the removed units, and appends the faults to
    /// `faults`.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn read_events(&self, faults: &mut Vec<Hva>) -> Result<(), Errno> {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let Some(live) = &mut *live else {
            return Ok(());
        };
        let (mut events, mut read) = (Vec::new(), Ok(()));
        for _ in 0..READS {
            let before = events.len();
            read = live.uffd.events(&mut events);
            if events.len() == before {
                break;
            }
        }
        // The kernel returns faults before removals that are older.
        for event in events {
            match event {
                Event::Fault(fault) => faults.push(fault.page),
                Event::Removed(range) | Event::Unmapped(range) => self.remove(live, range),
                Event::Moved { from, to } => self.moved(live, from, to),
                // The child's pages are not served. Dropping its descriptor lets the child
                // continue, with zeros in missing pages.
                Event::Forked(child) => {
                    drop(child);
                    let text = "has forked: the child's missing pages are zeros; do not fork a VMM";
                    self.say(Matter::Oddity, text);
                }
                Event::Other(number) => {
                    let text = format!("has sent the unknown event {number:#x}, which is ignored");
                    self.say(Matter::Oddity, &text);
                }
            }
        }
        read
    }

    fn remove(&self, live: &Live, range: HvaRange) {
        self.counts.add(Count::Removals);
        for number in self.regions.within(range) {
            match live.units.settle(number) {
                UnitState::Missing | UnitState::Settled => {}
                // The waiting threads fault again, and get zeros.
                UnitState::Asked | UnitState::Arrived | UnitState::Lost => {
                    lock(&self.gathering).remove(&number);
                    wake(&live.uffd, &self.regions.unit(number));
                }
            }
        }
    }

    /// The VMM has moved a part of its memory. It has not announced the new addresses, so a fault
    /// there is a fault outside of the regions.
    fn moved(&self, live: &Live, from: HvaRange, to: Hva) {
        self.regions
            .within(from)
            .for_each(|number| live.units.lose(number));
        let text = format!(
            "has moved memory from {} to {to} by mremap, which this pager does not follow: its \
             missing pages are lost",
            from.start()
        );
        self.say(Matter::Loss, &text);
        if self.when_lost == WhenLost::Kill {
            self.kill();
        }
    }

    /// Answers a fault at `address`.
    pub fn fault(self: &Arc<Self>, address: Hva) {
        self.counts.add(Count::Faults);
        let Some(unit) = self.regions.at(address) else {
            return self.fault_outside(address);
        };
        {
            let live = self.live();
            let Some(live) = &*live else { return };
            match live.units.get(unit.number) {
                UnitState::Missing if live.units.ask(unit.number) => {}
                // The answer wakes the thread.
                UnitState::Missing | UnitState::Asked | UnitState::Arrived => return,
                UnitState::Settled => return self.put(live, &unit, WaitingPut::Zeros),
                UnitState::Lost => return self.refuse_access(live, &unit),
            }
        }
        // Without the lock: the source may answer at once.
        for page in 0..unit.memory.pages() {
            let requester = Arc::clone(self) as Arc<dyn PageRequester>;
            let key = unit.number << WITHIN | page;
            let request = PageRequest::new(requester, key, SourcePage(unit.first.0 + page));
            request.send(&self.source);
        }
    }

    fn fault_outside(&self, address: Hva) {
        self.counts.add(Count::Outside);
        let text = format!(
            "has a fault at {address}, which is in none of its regions: announce all of the \
             registered memory"
        );
        self.say(Matter::Loss, &text);
        let memory = HvaRange::new(address.page(), 1).expect("a page");
        let unit = Unit {
            number: u64::MAX,
            memory,
            first: SourcePage(0),
        };
        let live = self.live();
        if let Some(live) = &*live {
            self.refuse_access(live, &unit);
        }
    }

    /// Repeats the placements that wait. Returns whether some wait again.
    pub fn repeat(&self) -> bool {
        let waiting = self.waiting.take();
        let live = self.live();
        let Some(live) = &*live else { return false };
        for Waiting { unit, put, from } in waiting {
            let is_wanted = match (&put, live.units.get(unit.number)) {
                (WaitingPut::Content(_), state) => state == UnitState::Arrived,
                (WaitingPut::Zeros, state) => state == UnitState::Settled,
                (WaitingPut::Poison, state) => state == UnitState::Lost,
            };
            if !is_wanted {
                // Taken away meanwhile. A thread that waits faults again.
                wake(&live.uffd, &unit);
                continue;
            }
            match self.place(live, &unit, put.as_put(), from) {
                // If the page is missing, a thread that needs it faults again, and gets zeros then.
                Again::Unsure if matches!(put, WaitingPut::Zeros) => {}
                again => self.waiting.keep(unit, put, again),
            }
        }
        !self.waiting.is_empty()
    }

    /// Places something, or keeps it for [`Vm::repeat`].
    fn put(&self, live: &Live, unit: &Unit, put: WaitingPut) {
        let again = self.place(live, unit, put.as_put(), 0);
        self.waiting.keep(*unit, put, again);
    }

    /// Places something.
    fn place(&self, live: &Live, unit: &Unit, put: Put<'_>, from: usize) -> Again {
        match place(&live.uffd, unit, put, from) {
            Placed::Whole => {}
            Placed::Found => self.counts.add(Count::Exists),
            Placed::Unsure => {
                wake(&live.uffd, unit);
                self.short("no huge page is left, or another thread has placed it");
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
                live.units.settle(unit.number);
                return Again::No;
            }
            Placed::Ended => {
                // The end of the request reports a failure, which is no loss then.
                live.units.settle(unit.number);
                self.has_ended.store(true, Ordering::Release);
                self.ring();
                return Again::No;
            }
            Placed::Refused(errno) if matches!(put, Put::Poison) => {
                let text = format!("waits for a lost page, which cannot be poisoned ({errno})");
                self.say(Matter::Oddity, &text);
                return Again::No;
            }
            Placed::Refused(errno) => {
                let at = unit.memory.start();
                let reason = format!("the kernel refuses a page at {at} ({errno})");
                self.lose(live, unit, &reason);
                return Again::No;
            }
        }
        match put {
            Put::Pages(_) => {
                live.units.settle(unit.number);
                self.counts.add(Count::Placed);
            }
            Put::Zeros => self.counts.add(Count::Zeros),
            Put::Poison => {}
        }
        Again::No
    }

    fn short(&self, reason: &str) {
        self.counts.add(Count::NoMemory);
        let text = format!("waits for a page: the host has no memory for it ({reason})");
        self.say(Matter::Shortage, &text);
    }

    /// The content of `unit` will not come.
    fn lose(&self, live: &Live, unit: &Unit, reason: &str) {
        self.counts.add(Count::Lost);
        live.units.lose(unit.number);
        self.say(Matter::Loss, &format!("has lost {}: {reason}", unit.first));
        self.refuse_access(live, unit);
    }

    /// Does what the policy says about an access to a page without content.
    fn refuse_access(&self, live: &Live, unit: &Unit) {
        match self.when_lost {
            WhenLost::Hold => {}
            WhenLost::Kill => self.kill(),
            WhenLost::Poison => self.put(live, unit, WaitingPut::Poison),
        }
    }

    fn kill(&self) {
        if let Err(errno) = self.process.kill() {
            let text = format!("cannot be ended ({errno}): end it by hand");
            self.say(Matter::Oddity, &text);
        }
    }

    /// Calls the pager's report, once for each matter.
    fn say(&self, matter: Matter, text: &str) {
        let text = format!("the VM of process {} {text}", self.process.pid());
        tracing::warn!(target: "lacuna::pager", "{text}");
        self.said[matter as usize].call_once(|| (self.report)(&text));
    }

    fn live(&self) -> RwLockReadGuard<'_, Option<Live>> {
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
        self.say(
            Matter::Loss,
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
        drop(self.waiting.take());
        self.source.end("the VM has ended");
    }

    /// The number of its process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its counters now.
    pub fn counts(&self) -> PagerCounts {
        self.counts.read()
    }

    /// Its counters now, and those of its page source.
    pub fn stats(&self) -> VmStats {
        VmStats {
            pid: self.pid(),
            bytes: self.regions.bytes(),
            counts: self.counts(),
            pages: self.source.stats(),
        }
    }
}

impl PageRequester for Vm {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let unit = self.regions.unit(key >> WITHIN);
        let page = key & ((1 << WITHIN) - 1);
        let live = self.live();
        let Some(live) = &*live else {
            return Answer::Late;
        };
        if live.units.get(unit.number) != UnitState::Asked {
            return Answer::Late;
        }
        let gathered;
        let pages = match content {
            // The end of a request calls this with a failure, also after an answer.
            Err(_) if self.has_gathered(&unit, page) => return Answer::Late,
            Err(failure) => {
                lock(&self.gathering).remove(&unit.number);
                self.lose(live, &unit, failure.reason);
                self.ring();
                return Answer::Taken;
            }
            Ok(content) if unit.memory.pages() == 1 => std::slice::from_ref(content),
            Ok(content) => match self.gather(&unit, page, content) {
                Gathered::Late => return Answer::Late,
                Gathered::Partly => return Answer::Taken,
                Gathered::Wholly(pages) => {
                    gathered = pages;
                    gathered.all()
                }
            },
        };
        let again = self.place(live, &unit, Put::Pages(pages), 0);
        if again != Again::No {
            live.units.arrive(unit.number);
            self.waiting
                .keep(unit, WaitingPut::Content(pages.to_vec()), again);
            self.ring();
        }
        Answer::Taken
    }
}

impl Vm {
    fn has_gathered(&self, unit: &Unit, page: u64) -> bool {
        let all = lock(&self.gathering);
        all.get(&unit.number)
            .is_some_and(|unit| unit.has(page as usize))
    }

    fn gather(&self, unit: &Unit, page: u64, content: &[u8; PAGE_SIZE]) -> Gathered {
        let mut all = lock(&self.gathering);
        let pages = unit.memory.pages() as usize;
        let gathered = all
            .entry(unit.number)
            .or_default()
            .add((page as usize, pages), content);
        if let Gathered::Wholly(_) = gathered {
            all.remove(&unit.number);
        }
        gathered
    }
}
