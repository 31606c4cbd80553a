//! The end of a slot's log against a vCPU that writes, every interleaving of the real code: the
//! large leaf knows of every write, and nobody gives rights in a table that is out of use.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-stage2 --test loom_end --release
//! ```
//! Block 0 of the guest is armed: its 512 small leaves lack W, or D. Whoever ends the log does what
//! `Mmu::set_logging` does: says that it is off, lets all vCPUs pass once, makes one leaf of the
//! table, retires that. Then another block gets a table, this one as soon as it is free. A vCPU
//! walks and logs, repairs while it sees that the slot logs, and faults under the stripe when it
//! does not.
//!
//! The model with faults fails when the pass is left out, or not waited for, or comes before the
//! slot says that it is off; without the fence in `Quiescence::kick_all`; and when a vCPU repairs
//! whatever the slot says. That with the log fails when the large leaf gets W and not D with it.
#![cfg(loom)]

use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Leaf, MapError, PmlLog, Stage2, Walk, Write};
use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, Ordering};
use lacuna_sync::{Epoch, Quiescence};

/// The frame of block 0's first page.
const FIRST: u32 = 512;
/// The page that is written; its place in the other block's table, too.
const PAGE: u64 = 5;
/// The root and two upper tables, and one of leaves.
const TABLES: u32 = 4;

struct World {
    stage2: Stage2,
    quiescence: Quiescence,
    /// The slot says that it logs.
    logs: AtomicBool,
}

/// A vCPU that writes one page, with a TLB entry for it.
struct Vcpu<'w> {
    world: &'w World,
    log: PmlLog,
    tlb_writable: bool,
    flushed: Epoch,
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a small number")
}

fn frame(page: u64) -> Pfn {
    Pfn::new(FIRST + page as u32)
}

impl World {
    /// Block 0 by small leaves without D, and with W as told.
    fn new(write: Write) -> Self {
        let stage2 = Stage2::new(Arena::new(TABLES).expect("a small arena")).expect("a root");
        for page in 0..512 {
            let leaf = Leaf {
                write,
                dirty: false,
                ..Leaf::clean(frame(page))
            };
            let mapped = stage2.fault_cursor(gfn(page)).map(gfn(page), leaf);
            assert!(mapped.is_ok(), "{mapped:?}");
        }
        Self {
            stage2,
            quiescence: Quiescence::new(1),
            logs: AtomicBool::new(true),
        }
    }

    fn end(&self) {
        self.logs.store(false, Ordering::Release);
        let kick = self.quiescence.kick_all();
        while !self.quiescence.all_left(&kick) {
            yield_now();
        }
        let mut cursor = self.stage2.fault_cursor(gfn(0));
        match cursor
            .collapse_unrepaired(gfn(0), frame(0))
            .expect("uniform")
        {
            Some((collapsed, table)) => {
                assert_eq!(collapsed.leaf.level, Level::L2M);
                drop(cursor);
                table.retire(&self.quiescence);
            }
            // A vCPU's fault was first.
            None => cursor.preset_dirty(GfnRange::page(gfn(0))),
        }
    }

    /// Protects a page of block 1, if there is a table for it.
    fn use_a_free_table(&self) -> bool {
        self.stage2.reap(&self.quiescence);
        let leaf = Leaf::clean(Pfn::new(77));
        let other = gfn(512 + PAGE);
        self.stage2.fault_cursor(other).map(other, leaf).is_ok()
    }

    /// What maps `gfn` in the end.
    fn last_leaf(&self, gfn: Gfn) -> Leaf {
        let gone = self.stage2.fault_cursor(gfn).unmap_page(gfn);
        let (removed, flush) = gone.expect("still mapped");
        flush.finish(&self.quiescence);
        removed.leaf
    }
}

impl Vcpu<'_> {
    /// A stay online, in which it writes the page.
    fn write(&mut self) {
        let world = self.world;
        let epoch = world.quiescence.online(0);
        let slot = world.quiescence.vcpu(0);
        if epoch > self.flushed {
            self.flushed = epoch;
            self.tlb_writable = false;
            slot.flushed();
        }
        if !self.tlb_writable {
            slot.note(0);
            let walk = world
                .stage2
                .walk_logged(gfn(PAGE), Access::Write, &mut self.log);
            match walk.expect("room") {
                Walk::Hit(hit) => assert_eq!(hit.pfn, frame(PAGE), "another frame"),
                Walk::Violation(_) => self.fault(),
            }
            self.tlb_writable = true;
        }
        self.log.take();
        world.quiescence.offline(0);
    }

    /// As `Mmu::fault` does it, for a host that has the whole block.
    fn fault(&self) {
        let World { stage2, logs, .. } = self.world;
        let at = gfn(PAGE);
        if logs.load(Ordering::Relaxed) && stage2.repair(at).is_some() {
            return;
        }
        let mut cursor = stage2.fault_cursor(at);
        if logs.load(Ordering::Relaxed) {
            let mapped = cursor.map(at, Leaf::dirty(frame(PAGE)));
            assert!(mapped.is_ok(), "{mapped:?}");
            return;
        }
        let huge = Leaf::dirty(frame(0)).at(Level::L2M);
        match cursor.map(gfn(0), huge) {
            Ok(_) => {}
            Err(MapError::Occupied { .. }) => {
                let done = cursor.collapse_to(at, huge).expect("uniform");
                let (_, table) = done.expect("it is occupied by a table");
                drop(cursor);
                table.retire(&self.world.quiescence);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A vCPU makes two stays, and writes the page in both, while the log ends; all pages are `armed`.
fn no_write_is_lost(armed: Write) {
    let mut model = loom::model::Builder::new();
    // A table has 512 entries, which mostly only its owner touches: many steps, few choices.
    model.max_branches = 100_000;
    model.expect_explicit_explore = true;
    model.check(move || {
        let world = Arc::new(World::new(armed));
        loom::explore();
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu {
                    world: &world,
                    log: PmlLog::new(),
                    tlb_writable: false,
                    flushed: Epoch::default(),
                };
                vcpu.write();
                vcpu.write();
            })
        };
        world.end();
        let reused = world.use_a_free_table();
        vcpu.join().expect("vCPU");
        loom::stop_exploring();
        world.stage2.verify();
        if reused {
            let other = world.last_leaf(gfn(512 + PAGE));
            let found = (other.write, other.dirty);
            assert_eq!(found, (Write::OnFault, false), "W or D went astray");
        }
        let last = world.last_leaf(gfn(PAGE));
        assert_eq!(last.level, Level::L2M);
        assert!(last.dirty, "a write was lost");
    });
}

#[test]
fn by_faults_repaired_without_a_lock() {
    no_write_is_lost(Write::OnFault);
}

#[test]
fn by_the_log() {
    no_write_is_lost(Write::Allowed);
}
