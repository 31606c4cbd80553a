//! One VM's memory with a writer in place of its vCPU: a thread that writes to pages on request.
//! Like a vCPU it passes quiescent points all the time, also while it has nothing to write.

use crate::experiment::LabError;
use crate::fixture::{Tables, builder};
use crate::native::thread_cpu_ns;
use lacuna_addr::{Access, Gfn, PageCount};
use lacuna_soft::{Delivery, Detection, Fault, Logging, Mmu, RingSpace, SlotId, VcpuMmu, Walk};
use lacuna_sync::Qsbr;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

const SLOT: SlotId = SlotId(0);
/// The first page of the slot.
const FIRST: Gfn = Gfn::new(1 << 20).expect("4 GiB");
const TABLES: u32 = 1 << 14;
/// Frames beyond the slot's pages, for the per-CPU page caches and because reclaim keeps some free.
const SPARE: u64 = 1 << 14;

/// A slot that logs, all of it mapped by 4 KiB leaves.
pub struct Fixture {
    mmu: Arc<Mmu>,
    pages: u64,
    /// The bits of a harvest; empty if writes are recorded in a ring.
    words: Vec<u64>,
    /// The place of the next page to be written, in the order of pages.
    next: u64,
    orders: Sender<Range<u64>>,
    answers: Receiver<Result<Wrote, String>>,
}

/// The progress of the writer with an order.
enum Wrote {
    /// To its end.
    All,
    /// The ring is full, and these places are left.
    RingFull(Range<u64>),
}

/// The cost of harvests that found some dirty pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Harvested {
    /// The time of all harvests.
    pub time: Duration,
    /// The CPU time of the harvesting thread in that.
    pub cpu_ns: u64,
    /// The number of harvests: more than one if a ring was full.
    pub harvests: u32,
    /// The number of pages that they found.
    pub pages: u64,
}

impl Fixture {
    /// Carries out `experiment` on a slot of `pages` pages, a power of two.
    pub fn with<T>(
        pages: u64,
        delivery: Delivery,
        experiment: impl FnOnce(&mut Self) -> Result<T, LabError>,
    ) -> Result<T, LabError> {
        assert!(pages.is_power_of_two(), "{pages} pages");
        let frames = PageCount::new(pages + SPARE);
        let tables = Tables::new(&builder(PageCount::new(pages), frames, 1), TABLES)?;
        let Tables { host, qsbr, mmu } = &tables;
        mmu.set_delivery(delivery)?;
        let region = tables.add_slot(SLOT, FIRST.gpa().get(), pages)?;
        let (orders, taken) = channel();
        let (steps, answers) = channel();
        let writer = Writer {
            mmu,
            qsbr,
            vcpu_mmu: mmu.vcpu_mmu()?,
            pages,
            order: 0..0,
            orders: taken,
            answers: steps,
        };
        let mut fixture = Self {
            mmu: Arc::clone(mmu),
            pages,
            words: match delivery {
                Delivery::Bitmap => vec![0; pages.div_ceil(64) as usize],
                Delivery::Ring { .. } => Vec::new(),
            },
            next: 0,
            orders,
            answers,
        };
        let done = thread::scope(|scope| {
            scope.spawn(|| writer.run());
            let done = fixture.prepare().and_then(|()| experiment(&mut fixture));
            // The writer ends when no more orders can arrive.
            drop(fixture);
            done
        });
        // The host's region holds the MMU, and the MMU holds the host. Without this, neither would
        // be freed.
        host.remove_region(region)?;
        done
    }

    /// Maps every page, and then turns logging on.
    fn prepare(&mut self) -> Result<(), LabError> {
        self.order(self.pages)?;
        let _ = self.answer()?;
        Ok(self.mmu.set_logging(SLOT, Logging::LAZY)?)
    }

    /// From now on `detection` detects writes. Every page is written and harvested once, so no
    /// state of the other detection is left, and no page is dirty.
    pub fn detect_by(&mut self, detection: Detection) -> Result<(), LabError> {
        self.mmu.set_detection(detection);
        self.dirty(self.pages, &mut Harvested::default())
    }

    /// Writes to `pages` scattered pages and harvests them, once or whenever the ring is full.
    ///
    /// # Errors
    /// The harvests find another number of pages.
    pub fn dirty(&mut self, pages: u64, all: &mut Harvested) -> Result<(), LabError> {
        let before = all.pages;
        self.order(pages)?;
        loop {
            let wrote = self.answer()?;
            self.harvest(all)?;
            match wrote {
                Wrote::All => break,
                Wrote::RingFull(left) => self.send(left)?,
            }
        }
        match all.pages - before {
            found if found == pages => Ok(()),
            found => Err(LabError::Guest(format!(
                "{pages} pages were written, and {found} harvested"
            ))),
        }
    }

    /// Carries out one harvest.
    pub fn harvest(&mut self, all: &mut Harvested) -> Result<(), LabError> {
        let (began, cpu) = (Instant::now(), thread_cpu_ns());
        let in_rings = if self.words.is_empty() {
            let pages = self.mmu.reap_rings(|_, _| {});
            let _ = self.mmu.reset_rings();
            pages as u64
        } else {
            self.mmu.get_dirty(SLOT, &mut self.words)?;
            0
        };
        all.time += began.elapsed();
        all.cpu_ns += thread_cpu_ns() - cpu;
        all.harvests += 1;
        let in_bitmap: u64 = self
            .words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum();
        all.pages += in_rings + in_bitmap;
        Ok(())
    }

    fn order(&mut self, pages: u64) -> Result<(), LabError> {
        let first = self.next;
        self.next += pages;
        self.send(first..self.next)
    }

    fn send(&self, order: Range<u64>) -> Result<(), LabError> {
        let sent = self.orders.send(order);
        sent.map_err(|_| LabError::Guest("the writer has ended".into()))
    }

    fn answer(&self) -> Result<Wrote, LabError> {
        match self.answers.recv() {
            Ok(Ok(wrote)) => Ok(wrote),
            Ok(Err(why)) => Err(LabError::Guest(why)),
            Err(_) => Err(LabError::Guest("the writer has ended".into())),
        }
    }
}

/// The thread that writes in place of a vCPU.
struct Writer<'a> {
    mmu: &'a Mmu,
    qsbr: &'a Qsbr,
    vcpu_mmu: VcpuMmu,
    pages: u64,
    order: Range<u64>,
    orders: Receiver<Range<u64>>,
    answers: Sender<Result<Wrote, String>>,
}

/// Whether more orders can arrive.
enum Wanted {
    Yes,
    No,
}

impl Writer<'_> {
    fn run(mut self) {
        loop {
            let vcpu = self.qsbr.vcpu(0);
            let _ = vcpu.take();
            let _ = self.qsbr.online(0);
            vcpu.flushed();
            let wanted = self.online();
            self.mmu.flush_log(&mut self.vcpu_mmu);
            self.qsbr.offline(0);
            if matches!(wanted, Wanted::No) {
                return;
            }
        }
    }

    /// Works on orders until the next quiescent point.
    fn online(&mut self) -> Wanted {
        while !self.qsbr.vcpu(0).has_request() {
            let Some(place) = self.order.next() else {
                match self.orders.try_recv() {
                    Ok(order) => self.order = order,
                    Err(TryRecvError::Empty) => spin_loop(),
                    Err(TryRecvError::Disconnected) => return Wanted::No,
                }
                continue;
            };
            // The first time in the order of addresses, so that neighbouring pages have
            // neighbouring frames, as after a guest's boot.
            let page = match place {
                first if first < self.pages => first,
                later => page_at(later, self.pages),
            };
            let wrote = self.write(page);
            let answer = match wrote {
                Err(why) => Some(Err(why)),
                Ok(()) if self.order.is_empty() => Some(Ok(Wrote::All)),
                Ok(()) if self.vcpu_mmu.space() == RingSpace::SoftFull => {
                    Some(Ok(Wrote::RingFull(std::mem::take(&mut self.order))))
                }
                Ok(()) => None,
            };
            if let Some(answer) = answer {
                // A failed send means that the fixture is dropped. Then no order arrives either.
                let _ = self.answers.send(answer);
            }
        }
        Wanted::Yes
    }

    fn write(&mut self, page: u64) -> Result<(), String> {
        let gfn = FIRST.checked_add(page).expect("inside the slot");
        self.qsbr.vcpu(0).note(gfn.block().get());
        loop {
            if let Walk::Hit(_) = self.mmu.walk(&mut self.vcpu_mmu, gfn, Access::Write) {
                return Ok(());
            }
            let fault = self.mmu.fault(&mut self.vcpu_mmu, gfn, Access::Write);
            self.vcpu_mmu.retired();
            match fault {
                Fault::Mapped(_) => return Ok(()),
                Fault::Busy => {}
                _ => return Err("a fault found no frame".into()),
            }
        }
    }
}

/// The page at `place` in an order that has every one of `pages` pages once, and in which
/// successive pages are rarely neighbours. `pages` is a power of two. Then a multiplication by an
/// odd number and an exclusive-or with the upper half are both one to one.
fn page_at(place: u64, pages: u64) -> u64 {
    let half = pages.ilog2() / 2;
    let mut page = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) % pages;
    page ^= page >> half;
    page = page.wrapping_mul(0xbf58_476d_1ce4_e5b9) % pages;
    page ^ page >> half
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_soft::{Backup, RingSize};

    #[test]
    fn every_page_comes_once() {
        for pages in [1 << 9, 1 << 12] {
            let mut seen = vec![false; pages as usize];
            for place in 77..77 + pages {
                let page = page_at(place, pages) as usize;
                assert!(!std::mem::replace(&mut seen[page], true), "page {page}");
            }
        }
    }

    #[test]
    fn few_of_the_pages_are_neighbours() {
        let pages = 1 << 16;
        let mut some: Vec<u64> = (0..pages / 100)
            .map(|place| page_at(place, pages))
            .collect();
        some.sort_unstable();
        let neighbours = some.windows(2).filter(|two| two[1] - two[0] == 1).count();
        assert!(
            neighbours < some.len() / 20,
            "{neighbours} of {}",
            some.len()
        );
    }

    #[test]
    fn what_is_written_is_harvested_by_every_detection_and_delivery() {
        let size = RingSize::from_bytes(RingSize::BYTES_MIN).unwrap();
        let backup = Backup::None;
        for delivery in [Delivery::Bitmap, Delivery::Ring { size, backup }] {
            let done = Fixture::with(1 << 12, delivery, |fixture| {
                for detection in [Detection::WriteProtect, Detection::Pml] {
                    fixture.detect_by(detection)?;
                    let mut some = Harvested::default();
                    fixture.dirty(100, &mut some)?;
                    assert_eq!((some.pages, some.harvests), (100, 1));
                    let mut all = Harvested::default();
                    fixture.dirty(1 << 12, &mut all)?;
                    let many = delivery != Delivery::Bitmap;
                    assert_eq!(all.harvests > 1, many, "{delivery:?} {}", all.harvests);
                }
                Ok(())
            });
            done.unwrap();
        }
    }
}
