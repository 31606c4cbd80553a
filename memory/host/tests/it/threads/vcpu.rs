//! A vCPU that owns every n-th page of a region, and keeps its written content in its own model.

use super::stage2::{BLOCK, Block, Leaf, Stage2};
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{Frame, Host, HostConfig, HostError, Resolution};
use lacuna_sync::{Clock, HostClock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whether vCPUs poll for completions themselves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Polls {
    Never,
    Sometimes,
}

pub struct Vcpu {
    pub host: Arc<Host>,
    pub clock: Arc<HostClock>,
    pub polls: Polls,
    pub stage2: Arc<Stage2>,
    pub range: BackingRange,
    pub rng: fastrand::Rng,
    pub first: u64,
    pub step: u64,
    /// The largest leaf that it can map.
    pub max_level: Level,
    pub model: HashMap<u64, u64>,
}

impl Vcpu {
    pub fn run(self, accesses: usize) {
        self.try_run(accesses).unwrap();
    }

    pub fn try_run(mut self, accesses: usize) -> Result<(), HostError> {
        let mut cache = self.host.per_cpu_pages().unwrap();
        let host = self.host.clone();
        let mut polling = None;
        for _ in 0..accesses {
            let page = self.first + self.step * self.rng.u64(0..self.range.pages() / self.step);
            let addr = self.range.start().checked_add_pages(page).unwrap();
            let access = if self.rng.bool() {
                Access::Write
            } else {
                Access::Read
            };
            let seq = self.stage2.seq.load(Ordering::SeqCst);
            match self.host.resolve(addr, access, self.max_level, &mut cache) {
                Resolution::Ready(frame) => self.access(addr, frame, access, seq),
                Resolution::Pending(ticket) if self.rng.bool() => self.host.start(&ticket),
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => {
                    self.host.wait(&ticket)?;
                }
                Resolution::NoMemory => _ = self.host.reclaim_direct(&mut cache).unwrap(),
                Resolution::Busy => std::thread::yield_now(),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
            cache.unpin_all();
            if polling.is_some() {
                self.host.poll(self.clock.now());
            }
            if self.rng.u8(..) == 0 {
                polling = match polling {
                    None if self.polls == Polls::Sometimes => Some(host.polling()),
                    _ => None,
                };
            }
        }
        Ok(())
    }

    /// Installs the leaf if there was no invalidation since `seq`, and uses it.
    pub fn access(
        &mut self,
        addr: BackingAddr,
        Frame { pfn, level }: Frame,
        access: Access,
        seq: u64,
    ) {
        let stage2 = self.stage2.clone();
        stage2.with(addr, |block| {
            if stage2.seq.load(Ordering::SeqCst) == seq && seq.is_multiple_of(2) {
                self.install(block, addr, Frame { pfn, level }, access);
            }
        });
    }

    pub fn install(&mut self, block: &mut Block, addr: BackingAddr, frame: Frame, access: Access) {
        let index = (addr.get() % BLOCK) / PAGE_SIZE as u64;
        let leaf = |pfn: u64| Leaf {
            pfn: Pfn::new(pfn as u32),
            accessed: true,
            dirty: false,
        };
        let pfn = frame.pfn.get();
        if block.whole.is_none() && block.pages.is_empty() && frame.level == Level::L2M {
            assert_eq!(pfn % 512, index, "a whole block is aligned");
            block.whole = Some(leaf(pfn - index));
        }
        match &block.whole {
            Some(whole) => assert_eq!(
                whole.pfn.get() + index,
                pfn,
                "a page moves only by an invalidation"
            ),
            None => {
                let page = block.pages.entry(addr.get()).or_insert_with(|| leaf(pfn));
                assert_eq!(page.pfn, frame.pfn, "a page moves only by an invalidation");
            }
        }
        let bytes_of = self.host.clone();
        let shared = bytes_of.frame(frame.pfn);
        let mut bytes = [0; PAGE_SIZE];
        shared.read(0, &mut bytes);
        let want = self.model.get(&addr.get()).copied().unwrap_or(0);
        assert!(
            bytes.chunks(8).all(|word| word == want.to_le_bytes()),
            "{addr} is not {want:#x}"
        );
        let leaf = block.leaf(addr).expect("installed");
        leaf.accessed = true;
        if access.is_write() {
            let value = self.rng.u64(0..4) * self.rng.u64(..1 << 60);
            leaf.dirty = true;
            shared.write(0, &value.to_le_bytes().repeat(PAGE_SIZE / 8));
            self.model.insert(addr.get(), value);
        }
    }
}

pub struct Fixture {
    pub host: Arc<Host>,
    pub clock: Arc<HostClock>,
    pub stage2: Arc<Stage2>,
    pub range: BackingRange,
    pub polls: Polls,
}

impl Fixture {
    pub fn new(
        config: impl FnOnce(Arc<HostClock>) -> HostConfig,
        pages: u64,
        polls: Polls,
    ) -> Self {
        let clock = Arc::new(HostClock::default());
        let host = Host::new(config(clock.clone())).unwrap();
        let (stage2, range) = add_region(&host, pages);
        Self {
            host,
            clock,
            stage2,
            range,
            polls,
        }
    }

    pub fn vcpu(&self, first: u64) -> Vcpu {
        Vcpu {
            host: self.host.clone(),
            clock: self.clock.clone(),
            polls: self.polls,
            stage2: self.stage2.clone(),
            range: self.range,
            rng: fastrand::Rng::with_seed(first),
            first,
            step: 3,
            max_level: Level::L2M,
            model: HashMap::new(),
        }
    }

    pub fn finish(self) {
        let stats = self.host.stats();
        assert!(stats.swapped_in > 0 && stats.swapped_out > 0, "{stats:?}");
        self.host.remove_region(self.range).unwrap();
        self.host.verify();
        let stats = self.host.stats();
        assert_eq!(
            (stats.resident, stats.swap_entries, stats.huge_pages),
            (0, 0, 0)
        );
    }
}

pub fn add_region(host: &Arc<Host>, pages: u64) -> (Arc<Stage2>, BackingRange) {
    let stage2 = Arc::new(Stage2::new());
    stage2.host.set(Arc::downgrade(host)).unwrap();
    let range = host
        .add_region(PageCount::new(pages), stage2.clone())
        .unwrap();
    (stage2, range)
}
