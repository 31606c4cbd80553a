//! Dirty tracking: a monitor copies the pages of each harvest, and at the end its copy equals the
//! guest's memory.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};
use std::thread;
use std::time::Duration;

use lacuna_addr::{GfnRange, PAGE_SIZE};
use lacuna_guest::status::Kind;
use lacuna_machine::{
    DirtyError, DirtyTracking as _, GuestMemory as _, HugeLeaves, Initially, LogReader, Logging,
    MemorySlot, MemorySlots as _, SlotId, set_logging_everywhere,
};

use super::Outcome;
use crate::backend::{
    Backend, Lacks, Made, Request, Tracking, harvest, start_tracking, stop_tracking,
};
use crate::program::gpa;
use crate::running::{Start, beside, guest, within};

/// A heap that processes change all the time.
const CHURN: &str = "transactions=5000 cold=5000 tick_us=20000";

/// Its processes work only once the monitor is ready.
const HELD: Start = Start::Held(Kind::Worker);

const ALL_SET: Logging = Logging::On {
    initially: Initially::AllSet,
    huge: HugeLeaves::Lazy,
};

type Page = [u8; PAGE_SIZE];

fn read<B: Backend>(vm: &B::Vm, gfns: GfnRange, page: usize) -> Page {
    let gfn = gfns
        .start()
        .checked_add(page as u64)
        .expect("inside of the slot");
    let mut bytes = [0; PAGE_SIZE];
    vm.read(gfn.gpa(), &mut bytes).expect("guest memory");
    bytes
}

/// A copy of all slots, page by page.
pub(super) struct Copy(BTreeMap<SlotId, (GfnRange, Vec<Page>)>);

impl Copy {
    /// Starts tracking, then copies everything.
    pub(super) fn begin<B: Backend>(vm: &B::Vm) -> Self {
        start_tracking(vm);
        Self::of::<B>(vm, |gfns, page| read::<B>(vm, gfns, page))
    }

    /// Starts tracking with all pages set, and copies nothing: the first harvest has every page.
    fn begin_set<B: Backend>(vm: &B::Vm) -> Self {
        set_logging_everywhere(vm, ALL_SET).expect("slots of this VM");
        Self::of::<B>(vm, |_, _| [0; PAGE_SIZE])
    }

    fn of<B: Backend>(vm: &B::Vm, page: impl Fn(GfnRange, usize) -> Page) -> Self {
        let all = |MemorySlot { id, gfns, .. }| {
            let pages = (0..gfns.pages() as usize).map(|at| page(gfns, at));
            (id, (gfns, pages.collect()))
        };
        Self(vm.memory_slots().into_iter().map(all).collect())
    }

    /// Copies the pages written since the last time. Returns their number.
    pub(super) fn harvest<B: Backend>(&mut self, vm: &B::Vm) -> usize {
        let dirty = harvest(vm);
        for (id, page) in &dirty {
            let (gfns, pages) = self.0.get_mut(id).expect("a slot that was there");
            pages[*page] = read::<B>(vm, *gfns, *page);
        }
        dirty.len()
    }

    /// Compares the copy with the memory of the stopped guest, after all harvests.
    pub(super) fn compare<B: Backend>(&self, vm: &B::Vm) {
        for (id, (gfns, pages)) in &self.0 {
            for (page, bytes) in pages.iter().enumerate() {
                let same = *bytes == read::<B>(vm, *gfns, page);
                assert!(same, "{id}: page {page} was written and no harvest has it");
            }
        }
    }
}

/// Runs `churn` beside a monitor with one and two vCPUs.
fn follow<B: Backend>(backend: &B, tracking: Tracking) -> Outcome {
    follow_from(backend, tracking, Copy::begin::<B>, |_| ())
}

/// As [`follow`]. Before each harvest the monitor calls `meanwhile`.
pub(super) fn follow_while<B: Backend>(
    backend: &B,
    tracking: Tracking,
    meanwhile: fn(&B::Vm),
) -> Outcome {
    follow_from(backend, tracking, Copy::begin::<B>, meanwhile)
}

fn follow_from<B: Backend>(
    backend: &B,
    tracking: Tracking,
    begin: fn(&B::Vm) -> Copy,
    meanwhile: fn(&B::Vm),
) -> Outcome {
    let backend = backend.clone();
    within(move || {
        for vcpus in [1, 2] {
            let request = Request {
                tracking,
                ..Request::new(16, 16, vcpus, CHURN)
            };
            let (finished, (mut copy, mut harvested)) = beside(
                &backend,
                &request,
                &guest(backend.arch(), "churn"),
                HELD,
                |running| {
                    running.prepared();
                    let mut copy = begin(running.vm);
                    if !running.is_over() {
                        running.pause(0);
                    }
                    let mut harvested = 0;
                    while !running.is_over() {
                        thread::sleep(Duration::from_millis(5));
                        meanwhile(running.vm);
                        harvested += copy.harvest::<B>(running.vm);
                    }
                    (copy, harvested)
                },
            )?;
            let finished = finished.passed();
            harvested += copy.harvest::<B>(&finished.vm);
            copy.compare::<B>(&finished.vm);
            assert!(
                harvested > 1000,
                "{tracking:?}, {vcpus} vCPUs: {harvested} pages"
            );
        }
        Ok(())
    })
}

/// Bits, with the backend's detection.
pub fn a_bitmap_has_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::Bitmap)
}

/// Bits, by write protection.
pub fn a_bitmap_by_write_protection_has_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::WriteProtectBitmap)
}

/// Bits, by page-modification logging.
pub fn a_bitmap_by_pml_has_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::PmlBitmap)
}

/// Rings, with the backend's detection.
pub fn rings_have_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::Ring)
}

/// Small rings are full now and then, and KVM may overflow them. The guest ends, so a full ring
/// stops no vCPU for ever.
pub fn small_rings_have_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::SmallRing)
}

/// Small rings, sometimes full, by write protection.
pub fn rings_by_write_protection_have_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::WriteProtectRing)
}

/// Small rings, sometimes full, by page-modification logging.
pub fn rings_by_pml_have_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::PmlRing)
}

/// The page tables of the host's kernel.
pub fn the_page_map_has_every_write<B: Backend>(backend: &B) -> Outcome {
    follow(backend, Tracking::PageMap)
}

/// The VMM's writes are harvested with the guest's writes, and only while a slot is tracked.
pub fn host_writes_are_tracked<B: Backend>(backend: &B) -> Outcome {
    let all = [Tracking::Bitmap, Tracking::Ring, Tracking::PageMap];
    let mut found = Err(Lacks::because("no way to track writes"));
    for tracking in all {
        let request = Request {
            tracking,
            ..Request::new(16, 16, 1, "")
        };
        let made = backend.make(&request, &guest(backend.arch(), "hello"));
        let Ok(Made { vm, .. }) = made else {
            found = found.or(made.map(drop));
            continue;
        };
        let arch = backend.arch();
        let write = |at| vm.write(gpa(arch, at), &[1; 2]).expect("guest memory");
        write(0x3000);
        // Make every page resident first: an arriving page counts as written in the page map.
        for MemorySlot { gfns, .. } in vm.memory_slots() {
            (0..gfns.pages() as usize).for_each(|page| drop(read::<B>(&vm, gfns, page).to_vec()));
        }
        let mut copy = Copy::begin::<B>(&vm);
        assert_eq!(harvest(&*vm), BTreeSet::new(), "{tracking:?}");
        write(0x5fff);
        write(0xff_f000);
        let id = vm.memory_slots()[0].id;
        let expected = [5, 6, 0xfff].map(|page| (id, page));
        assert_eq!(harvest(&*vm), BTreeSet::from(expected), "{tracking:?}");
        assert_eq!(copy.harvest::<B>(&vm), 0, "{tracking:?}");
        found = Ok(());
    }
    found
}

/// With every delivery, the harvest of one reader may begin another reader. A panic in a harvest
/// loses no page, and a forgotten reader blocks no other one.
pub fn readers_of_the_log_are_nested_anywhere<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        for tracking in [Tracking::Bitmap, Tracking::Ring] {
            let request = Request {
                tracking,
                ..Request::new(16, 16, 1, "")
            };
            let made = backend.make(&request, &guest(backend.arch(), "hello"));
            let Made { vm, .. } = match made {
                Err(_) if tracking != Tracking::Bitmap => continue,
                made => made?,
            };
            let id = vm.memory_slots()[0].id;
            let write = |page: u64| {
                let at = gpa(backend.arch(), page * PAGE_SIZE as u64);
                vm.write(at, &[1]).expect("guest memory");
            };
            let mut reader = LogReader::begin(&*vm).expect("the first");
            let mut harvest = |each: &mut dyn FnMut(SlotId, usize)| reader.harvest(each);
            harvest(&mut |_, _| ()).expect("a harvest");
            [3, 4, 70].into_iter().for_each(write);
            let panics = || harvest(&mut |_, page| assert_ne!(page, 4, "the test's own panic"));
            let panicked = panic::catch_unwind(AssertUnwindSafe(panics));
            assert!(panicked.is_err());
            let mut pages = BTreeSet::new();
            let nested = harvest(&mut |slot, page| {
                let mut inner = LogReader::begin(&*vm).expect("another");
                inner.harvest(|_, _| ()).expect("the last reader");
                pages.insert((slot, page));
            });
            assert_eq!(nested, Ok(2));
            assert_eq!(pages, BTreeSet::from([(id, 4), (id, 70)]));
            std::mem::forget(LogReader::begin(&*vm));
            assert_eq!(harvest(&mut |_, _| ()), Err(DirtyError::InUse));
            let mut later = LogReader::begin(&*vm).expect("a later one");
            write(5);
            let mut written = BTreeSet::new();
            later
                .harvest(|_, page| _ = written.insert(page))
                .expect("the last reader");
            assert!(written.contains(&5));
        }
        Ok(())
    })
}

/// Tracking is switched on and off a hundred times while the guest checks its own memory.
pub fn tracking_begins_and_ends_while_the_guest_runs<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request::new(16, 8, 2, "rounds=1");
        let (finished, ()) = beside(
            &backend,
            &request,
            &guest(backend.arch(), "verify"),
            Start::Free,
            |running| {
                for _ in 0..100 {
                    start_tracking(running.vm);
                    thread::sleep(Duration::from_millis(1));
                    harvest(running.vm);
                    stop_tracking(running.vm);
                }
            },
        )?;
        drop(finished.passed());
        Ok(())
    })
}

/// A log may begin with every page set, and then has every write. A backend without this feature
/// refuses by name, and does not log.
pub fn a_log_begins_with_all_pages_set<B: Backend>(backend: &B) -> Outcome {
    let Made { vm, .. } = backend.make(
        &Request::new(16, 16, 1, ""),
        &guest(backend.arch(), "hello"),
    )?;
    let id = vm.memory_slots()[0].id;
    match vm.set_logging(id, ALL_SET) {
        Ok(()) => {
            let pages = harvest(&*vm).len() as u64;
            assert_eq!(pages, vm.memory_slots()[0].gfns.pages());
            assert_eq!(harvest(&*vm), BTreeSet::new(), "taken");
            follow_from(backend, Tracking::Bitmap, Copy::begin_set::<B>, |_| ())
        }
        Err(refused @ DirtyError::Unsupported(_)) => {
            let refused_again = vm.get_dirty(id, &mut [0; 64]);
            assert_eq!(refused_again, Err(DirtyError::NotLogging(id)));
            Err(Lacks::because(refused))
        }
        Err(wrong) => panic!("{wrong}"),
    }
}
