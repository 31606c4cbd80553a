//! Shared by the tests: an MMU whose host is not asked, and its leaves.

pub(super) use super::Mmu;
use crate::InBlock;
pub(super) use crate::RmapWalk;
use crate::SlotSpec;
use crate::fault::{NotInstalled, ResolvedPage};
pub(super) use crate::rmap::parts;
pub(super) use lacuna_addr::{
    Access, BackingAddr, BackingRange, Gfn, GfnRange, Level, PAGE_SIZE, PageCount,
};
pub(super) use lacuna_host::MmuNotifier;
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore};
use lacuna_slots::SlotFlags;
pub(super) use lacuna_slots::SlotId;
pub(super) use lacuna_stage2::{Age, Exhausted, Leaf};
use lacuna_sync::{HostClock, Qsbr};
pub(super) use std::sync::Arc;
use std::sync::OnceLock;

/// Pages of backing: four blocks.
pub(super) const PAGES: u64 = 2048;
/// The backing's first page: it starts a block.
pub(super) const BACKING: u64 = 0x10_0000;

/// The place of a slot: its first guest frame, its first page of the backing, its pages.
pub(super) type SlotPlace = (u64, u64, u64);

/// One slot of whole blocks; one with frames and backing that are aligned differently; two that
/// meet inside a block, the upper of them with a whole block in it. All share backing.
pub(super) const SLOTS: [SlotPlace; 4] = [
    (0x400, 0, PAGES),
    (0x1_0001, 512, 600),
    (0x2_0000 + 300, 300, 1024),
    (0x2_0000, 1024, 300),
];

/// Provides frame numbers; the frames are not used.
pub(super) fn host() -> Arc<Host> {
    static HOST: OnceLock<Arc<Host>> = OnceLock::new();
    let make = || {
        let config = HostConfig {
            budget: PageCount::new(2 * PAGES),
            huge: HugePages::Never,
            swap: Box::new(MemoryStore::new()),
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        };
        Host::new(config).expect("a small host")
    };
    Arc::clone(HOST.get_or_init(make))
}

/// An MMU with no slots, at most `tables` table pages, and offline vCPUs.
pub(crate) fn mmu(tables: u32) -> Arc<Mmu> {
    Mmu::new(host(), Arc::new(Qsbr::new(2)), tables).expect("an MMU")
}

pub(super) fn spec(id: u16, (gfn, page, pages): SlotPlace) -> SlotSpec {
    SlotSpec {
        id: SlotId(id),
        guest: gfn * PAGE_SIZE as u64,
        backing: addr(page),
        bytes: pages * PAGE_SIZE as u64,
        flags: SlotFlags::empty(),
    }
}

pub(crate) fn add(mmu: &Mmu, slots: &[SlotPlace]) {
    for (id, place) in (0..).zip(slots) {
        mmu.insert_slot(spec(id, *place)).expect("room");
    }
}

pub(crate) fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

pub(super) fn addr(page: u64) -> BackingAddr {
    BackingAddr::new((BACKING + page) * PAGE_SIZE as u64)
}

pub(super) fn range(page: u64, pages: u64) -> BackingRange {
    BackingRange::new(addr(page), pages).expect("a range")
}

/// The end of a fault at `at`, after the host has reported the page at level `has`. `None` if there
/// is no slot.
pub(super) fn touch(
    mmu: &Mmu,
    at: u64,
    access: Access,
    has: Level,
) -> Option<Result<Level, Exhausted>> {
    let at = gfn(at);
    let slots = mmu.slots.snapshot();
    let slot = slots.find(at)?;
    let frame = slot.backing_of(at).get() / PAGE_SIZE as u64 - BACKING;
    let pfn = lacuna_addr::Pfn::new(frame as u32);
    let leaf = match access {
        Access::Write => Leaf::dirty(pfn),
        Access::Read | Access::Fetch => Leaf::clean(pfn),
    };
    let page = ResolvedPage {
        gfn: at,
        leaf,
        level: has,
    };
    if has == Level::L1G {
        let mut cursor = mmu.stage2.cursor(GfnRange::gib_of(at));
        if slot.attach.allows_gib(at) && mmu.install_gib(&mut cursor, &slot.attach, page) {
            return Some(Ok(Level::L1G));
        }
    }
    loop {
        let mut cursor = mmu.stage2.fault_cursor(at);
        return Some(match mmu.install(&mut cursor, &slot.attach, page) {
            Ok(level) => Ok(level),
            Err(NotInstalled::Exhausted(error)) => Err(error),
            Err(NotInstalled::InGib) => {
                drop(cursor);
                mmu.split_gib(&slot.attach, at);
                continue;
            }
        });
    }
}

/// Every leaf in the reverse maps: its first frame, its level, and whether it is young.
pub(super) fn leaves(mmu: &Mmu) -> Vec<(u64, Level, bool)> {
    let mut found = Vec::new();
    for slot in mmu.slots.snapshot().iter() {
        for part in parts(slot.gfns) {
            let cursor = mmu.stage2.fault_cursor(part.start());
            if let Some(at) = slot.attach.gib(part.start()) {
                if GfnRange::gib_of(part.start()).start() == part.start() {
                    let young = cursor.test_young_at(at, part.start()) == Age::Young;
                    found.push((part.start().get(), Level::L1G, young));
                }
                continue;
            }
            let level = match slot.attach.block(part.start()) {
                InBlock::Huge(_) => Level::L2M,
                InBlock::Nothing | InBlock::Small(_) => Level::L4K,
            };
            slot.attach.leaves(&mmu.stage2, part, |at, gfn| {
                let young = cursor.test_young_at(at, gfn) == Age::Young;
                found.push((gfn.get(), level, young));
            });
        }
    }
    found.sort_unstable();
    found
}
