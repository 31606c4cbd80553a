//! Walks against split and collapse, every interleaving of the real code over the real tables.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-stage2 --test loom --release
//! ```
//! Block 0 of the guest is block 1 of the host. The arena has room for one leaf table. So a table
//! freed too early is given to guest block 1 at once, and a walk still inside it finds another
//! block's frames.
#![cfg(loom)]

use lacuna_addr::{Access, Gfn, Level, Pfn};
use lacuna_stage2::{Arena, Leaf, Stage2, Walk, Write};
use lacuna_sync::Qsbr;
use lacuna_sync::shim::Arc;
use lacuna_sync::shim::thread;

const FIRST: u32 = 512;
/// The accessed page.
const PAGE: u64 = 5;
/// The root, two upper tables, and one leaf table.
const TABLES: u32 = 4;

struct Fixture {
    stage2: Stage2,
    qsbr: Qsbr,
}

impl Fixture {
    fn new() -> Self {
        let arena = Arena::new(TABLES).expect("a small arena");
        Self {
            stage2: Stage2::new(arena).expect("a root"),
            qsbr: Qsbr::new(1),
        }
    }

    /// Block 0 mapped by 512 writable leaves without A and D.
    fn small() -> Self {
        let fixture = Self::new();
        for page in 0..512 {
            let leaf = unused(Leaf::clean(Pfn::new(FIRST + page as u32)), Write::Allowed);
            let mapped = fixture.stage2.fault_cursor(gfn(page)).map(gfn(page), leaf);
            assert!(mapped.is_ok(), "{mapped:?}");
        }
        fixture
    }

    /// Block 0 mapped by one leaf without A and D.
    fn large(write: Write) -> Self {
        let fixture = Self::new();
        let leaf = unused(Leaf::clean(Pfn::new(FIRST)).at(Level::L2M), write);
        let mapped = fixture.stage2.fault_cursor(gfn(0)).map(gfn(0), leaf);
        assert!(mapped.is_ok(), "{mapped:?}");
        fixture
    }

    /// A vCPU's access, from online to offline. Returns whether it succeeded.
    fn access(&self, access: Access) -> bool {
        self.qsbr.online(0);
        self.qsbr.vcpu(0).flushed();
        self.qsbr.vcpu(0).note(0);
        let outcome = self.stage2.walk(gfn(PAGE), access);
        if let Walk::Hit(hit) = outcome {
            assert_eq!(hit.pfn, Pfn::new(FIRST + PAGE as u32), "another frame");
        }
        self.qsbr.offline(0);
        matches!(outcome, Walk::Hit(_))
    }

    /// Gives guest block 1 a leaf table, if one is free.
    fn use_a_free_table(&self) {
        self.stage2.reap(&self.qsbr);
        let other = gfn(512 + PAGE);
        let leaf = Leaf::dirty(Pfn::new(77));
        let _ = self.stage2.fault_cursor(other).map(other, leaf);
    }

    /// The final state of page `PAGE`: whether it was written.
    fn is_dirty(&self) -> bool {
        let at = gfn(PAGE);
        let gone = self.stage2.fault_cursor(at).unmap_page(at);
        let (removed, flush) = gone.expect("still mapped");
        flush.finish(&self.qsbr);
        removed.leaf.dirty
    }
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a small number")
}

fn unused(leaf: Leaf, write: Write) -> Leaf {
    Leaf {
        write,
        accessed: false,
        dirty: false,
        ..leaf
    }
}

/// One vCPU accesses while `change` is made. Then `after` gets whether the access succeeded, and
/// the result of `change`.
fn race<R>(
    setup: impl Fn() -> Fixture + Send + Sync + 'static,
    access: Access,
    change: impl Fn(&Fixture) -> R + Send + Sync + 'static,
    after: impl Fn(&Fixture, bool, R) + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    // Only their owner touches a table's 512 entries: many steps, few choices.
    model.max_branches = 100_000;
    model.expect_explicit_explore = true;
    model.check(move || {
        let fixture = Arc::new(setup());
        loom::explore();
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.access(access))
        };
        let changed = change(&fixture);
        let hit = vcpu.join().expect("vCPU");
        loom::stop_exploring();
        after(&fixture, hit, changed);
        fixture.stage2.verify();
    });
}

fn collapse(fixture: &Fixture) {
    let mut cursor = fixture.stage2.fault_cursor(gfn(0));
    let done = cursor.collapse(gfn(0)).expect("uniform");
    let (collapsed, flush) = done.expect("there is a table");
    assert_eq!(collapsed.leaf.level, Level::L2M);
    drop(cursor);
    flush.retire(&fixture.qsbr);
}

fn split(fixture: &Fixture) {
    let done = fixture.stage2.fault_cursor(gfn(0)).split(gfn(0));
    assert!(done.expect("room").is_some());
}

#[test]
fn a_collapse_loses_no_d() {
    race(
        Fixture::small,
        Access::Write,
        collapse,
        |fixture, hit, ()| {
            assert!(hit, "a walk found nothing");
            assert!(fixture.is_dirty(), "D was lost");
        },
    );
}

#[test]
fn a_collapsed_table_is_not_reused_under_a_walk() {
    let change = |fixture: &Fixture| {
        collapse(fixture);
        fixture.use_a_free_table();
    };
    race(Fixture::small, Access::Read, change, |_, hit, ()| {
        assert!(hit, "a walk found nothing");
    });
}

#[test]
fn a_split_loses_no_d() {
    let setup = || Fixture::large(Write::Allowed);
    race(setup, Access::Write, split, |fixture, hit, ()| {
        assert!(hit, "a walk found nothing");
        assert!(fixture.is_dirty(), "D was lost");
    });
}

#[test]
fn a_page_cut_out_of_a_block_takes_its_d_along() {
    let setup = || Fixture::large(Write::Allowed);
    let change = |fixture: &Fixture| {
        split(fixture);
        fixture.is_dirty()
    };
    race(setup, Access::Write, change, |_, hit, dirty| {
        // Either the write precedes the unmap, and the leaf has D; or the write finds no leaf.
        assert_eq!(hit, dirty, "a write succeeded without D, or the reverse");
    });
}

#[test]
fn an_upgrade_inside_a_block_disturbs_no_reader() {
    let setup = || Fixture::large(Write::OnFault);
    let change = |fixture: &Fixture| {
        let leaf = Leaf::dirty(Pfn::new(FIRST + PAGE as u32));
        let mapped = fixture.stage2.fault_cursor(gfn(PAGE)).map(gfn(PAGE), leaf);
        assert!(mapped.is_ok(), "{mapped:?}");
    };
    race(setup, Access::Read, change, |fixture, hit, ()| {
        assert!(hit, "a walk found nothing");
        assert!(fixture.is_dirty(), "D was preset");
    });
}

#[test]
fn there_and_back_loses_no_d() {
    let change = |fixture: &Fixture| {
        split(fixture);
        collapse(fixture);
    };
    race(
        || Fixture::large(Write::Allowed),
        Access::Write,
        change,
        |fixture, hit, ()| {
            assert!(hit, "a walk found nothing");
            assert!(fixture.is_dirty(), "D was lost");
        },
    );
}
