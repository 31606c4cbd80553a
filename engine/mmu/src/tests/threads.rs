//! vCPUs on threads, with TLBs of their own, against all operations that unmap, split or collapse
//! leaves.
//!
//! Each page of the backing has a generation. A thread owns pages when its invalidation has
//! returned. It then increments their generations, as if the frames had been reused. A vCPU records
//! the generation when a walk gives it a page; as long as its TLB has the page, the generation must
//! not change.

use super::common::*;
use crate::fault::ResolvedPage;
use lacuna_stage2::Walk;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const HOME: u64 = SLOTS[0].0;
const ROUNDS: u64 = 250;

struct Fixture {
    mmu: Arc<Mmu>,
    /// Odd while the page is being invalidated: the host would not give it out.
    generations: Vec<AtomicU64>,
    /// One bit for each block: the host has it whole.
    whole: AtomicU64,
    /// The number of TLB hits.
    hits: AtomicU64,
    done: AtomicBool,
}

/// A vCPU's thread ends, perhaps by a failed assertion: no other thread may wait for it.
struct Gone<'w>(&'w Fixture, usize);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.mmu.qsbr.offline(self.1);
        self.0.done.store(true, Ordering::Relaxed);
    }
}

/// The disturbing thread ends, in any way.
struct Done<'w>(&'w Fixture);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::Relaxed);
    }
}

/// A small generator: the test needs variety, not quality.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

impl Fixture {
    fn generation(&self, page: u64) -> u64 {
        self.generations[page as usize].load(Ordering::SeqCst)
    }

    /// A fault, as in `Mmu::fault`.
    fn fault(&self, page: u64, access: Access, rng: &mut Rng) {
        let (mmu, at) = (&self.mmu, gfn(HOME + page));
        let seq = mmu.stage2.invalidate_seq(at);
        let whole = self.whole.load(Ordering::SeqCst) >> (page / 512) & 1 == 1;
        let mut block = page & !511..(page & !511) + 512;
        let there = |page| self.generation(page).is_multiple_of(2);
        let has = match there(page) {
            false => return,
            true if whole && block.all(there) => Level::L2M,
            true => Level::L4K,
        };
        let slots = mmu.slots.snapshot();
        let slot = slots.find(at).expect("the slot stays");
        let pfn = lacuna_addr::Pfn::new(page as u32);
        let leaf = match access {
            Access::Write => Leaf::dirty(pfn),
            Access::Read | Access::Fetch => Leaf::clean(pfn),
        };
        if rng.below(8) == 0 {
            // The host's answer may become outdated.
            std::thread::yield_now();
        }
        let page = ResolvedPage {
            gfn: at,
            leaf,
            level: has,
        };
        let mut cursor = mmu.stage2.fault_cursor(at);
        if !cursor.invalidate_retry(seq) {
            let _ = mmu
                .install(&mut cursor, &slot.attach, page)
                .expect("tables");
        }
    }

    fn vcpu(&self, index: usize) {
        let (qsbr, mut rng) = (&self.mmu.qsbr, Rng(7 + index as u64));
        let mut tlb = HashMap::new();
        let _gone = Gone(self, index);
        let mut last = None;
        while !self.done.load(Ordering::Relaxed) {
            // Take requests before the vCPU goes online, so that a later request stays.
            let requested = qsbr.vcpu(index).take() != 0;
            let wanted = qsbr.online(index);
            if requested || last != Some(wanted) {
                tlb.clear();
                qsbr.vcpu(index).flushed();
                last = Some(wanted);
            }
            while !qsbr.vcpu(index).has_request() && !self.done.load(Ordering::Relaxed) {
                // This vCPU uses two of the four blocks more than the other vCPU does.
                let own = (index as u64 * 2 + rng.below(2)) % 4 * 512 + rng.below(512);
                let page = [own, rng.below(PAGES)][usize::from(rng.below(8) == 0)];
                if let Some(seen) = tlb.get(&page) {
                    assert_eq!(self.generation(page) / 2, *seen, "page {page} was reused");
                    self.hits.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                qsbr.vcpu(index).note((HOME + page) / 512);
                let access = [Access::Read, Access::Write][rng.below(2) as usize];
                match self.mmu.stage2.walk(gfn(HOME + page), access) {
                    Walk::Hit(hit) => {
                        assert_eq!(hit.pfn.get(), page);
                        tlb.insert(page, self.generation(page) / 2);
                    }
                    Walk::Violation(_) => self.fault(page, access, &mut rng),
                }
            }
            if rng.below(4) == 0 {
                qsbr.offline(index);
            }
        }
    }

    fn take_back(&self, page: u64, pages: u64) {
        let pages = page..(page + pages).min(PAGES);
        for page in pages.clone() {
            self.generations[page as usize].fetch_add(1, Ordering::SeqCst);
        }
        self.mmu
            .invalidate(&[range(pages.start, pages.end - pages.start)]);
        for page in pages {
            self.generations[page as usize].fetch_add(1, Ordering::SeqCst);
        }
    }

    fn disturb(&self) {
        let _done = Done(self);
        let mut rng = Rng(99);
        let mut disallowed = Vec::new();
        // The vCPUs' threads may run seldom on a busy machine.
        let unused = || self.hits.load(Ordering::Relaxed) == 0;
        for round in 0.. {
            if self.done.load(Ordering::Relaxed) || (round >= ROUNDS && !unused()) {
                break;
            }
            let (page, block) = (rng.below(PAGES), rng.below(4));
            match rng.below(8) {
                0 | 1 => self.take_back(page, 1 + rng.below(4)),
                2 => self.take_back(page, 1 + rng.below(700)),
                3 => self.take_back(block * 512, 512),
                4 => drop(self.whole.fetch_xor(1 << block, Ordering::SeqCst)),
                5 => self.mmu.split_huge(range(block * 512, 512)),
                6 => self.mmu.write_protect(range(page, 1 + rng.below(300))),
                _ => match disallowed.pop() {
                    Some(gfns) => self.mmu.allow_huge(gfns),
                    None => {
                        let gfns = GfnRange::new(gfn(HOME + page), 1 + rng.below(600));
                        let gfns = gfns.expect("a range");
                        self.mmu.disallow_huge(gfns).expect("tables");
                        disallowed.push(gfns);
                    }
                },
            }
            std::thread::yield_now();
        }
    }
}

fn fixture() -> Fixture {
    let fixture = Fixture {
        mmu: mmu(4096),
        generations: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
        whole: AtomicU64::new(0b0101),
        hits: AtomicU64::new(0),
        done: AtomicBool::new(false),
    };
    add(&fixture.mmu, &SLOTS[..1]);
    fixture
}

/// A fuzzer verifies while no vCPU runs, but the host's background thread may still reclaim then.
#[test]
fn verify_runs_beside_faults_and_invalidations() {
    let (fixture, rounds) = (&fixture(), &AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (_done, mut rng) = (Done(fixture), Rng(5));
            while !fixture.done.load(Ordering::Relaxed) {
                let (page, block) = (rng.below(PAGES), rng.below(4));
                match rng.below(16) {
                    0 => fixture.take_back(block * 512, 512),
                    1 => fixture.mmu.split_huge(range(block * 512, 512)),
                    2..6 => fixture.take_back(page, 1),
                    _ => fixture.fault(page, Access::Write, &mut rng),
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _done = Done(fixture);
        // The test ends when the other thread has run between enough pairs of checks. This thread
        // never yields, so that on one core it is also preempted in the middle of a check.
        let (mut seen, mut changes) = (0, 0);
        while changes < ROUNDS / 4 && !fixture.done.load(Ordering::Relaxed) {
            fixture.mmu.verify();
            let now = rounds.load(Ordering::Relaxed);
            changes += u64::from(now != seen);
            seen = now;
        }
    });
}

#[test]
fn no_tlb_outlives_an_invalidation() {
    let fixture = fixture();
    std::thread::scope(|scope| {
        let vcpus = [0, 1].map(|index| {
            let fixture = &fixture;
            scope.spawn(move || fixture.vcpu(index))
        });
        fixture.disturb();
        for vcpu in vcpus {
            vcpu.join().expect("a vCPU");
        }
    });
    fixture.mmu.verify();
}
