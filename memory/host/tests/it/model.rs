//! Random operations, compared with a plain model of page contents and verified after every step.

use crate::common;

use common::source::TestSource;
use common::{Use, Vm, huge_host, linux, ring_host, virtual_host};
use lacuna_addr::{Access, BackingRange, Level, PageCount};
use lacuna_host::{
    Collapse, Fault, FaultyStore, FileStore, Host, HostError, HugePages, Latency, LatencySetting,
    MemoryStore, Resolution, SwapStore, Ticket,
};
use lacuna_sync::{Clock, VirtualClock};
use proptest::prelude::*;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Op {
    Read {
        vm: usize,
        page: u64,
    },
    Write {
        vm: usize,
        page: u64,
        value: u64,
    },
    /// A run of writes, to cause memory pressure.
    Sweep {
        vm: usize,
        page: u64,
        count: u64,
        value: u64,
    },
    /// A fault whose ticket stays in flight.
    Prefetch {
        vm: usize,
        page: u64,
    },
    Balance,
    Time,
    Break(Option<Fault>),
    /// Replaces a VM's region by a new one.
    Replace {
        vm: usize,
    },
    Flush {
        vm: usize,
    },
    CopyIn {
        vm: usize,
        page: u64,
        value: u64,
    },
    CopyOut {
        vm: usize,
        page: u64,
    },
    /// Discards pages: they are zeros, or missing again if the VM has a source.
    Discard {
        vm: usize,
        page: u64,
        count: u64,
        missing: bool,
    },
    /// Asks Linux to page out pages, if the VM has Linux memory.
    PageOut {
        vm: usize,
        page: u64,
        count: u64,
    },
    /// Some steps of collapsing blocks, if there is memory.
    Collapse,
    Advise {
        vm: usize,
        page: u64,
    },
    /// From now on the VM can map leaves up to this level.
    MaxLevel {
        vm: usize,
        max_level: Level,
    },
    /// From now on a read from swap brings up to so many pages.
    ReadAhead(u64),
    /// A budget of so many eighths of the pool. It is refused if that is too small.
    Budget(u64),
    HugePages(bool),
    /// An added delay in microseconds.
    Delay(u64),
}

/// The size of a test's host.
#[derive(Clone, Copy)]
struct Size {
    pages: [u64; 2],
    budget: u64,
    /// The longest run of writes.
    sweep: u64,
}

const SMALL: Size = Size {
    pages: [300, 200],
    budget: 256,
    sweep: 90,
};

/// The ends of the budget and of the regions cut blocks.
const LARGE: Size = Size {
    pages: [4 * 512 + 100, 2 * 512 + 7],
    budget: 4 * 512 + 300,
    sweep: 900,
};

fn op(size: Size) -> impl Strategy<Value = Op> {
    let vm = 0..2usize;
    let page = 0..size.pages[0];
    // Often zero: all-zero pages are dropped without a write.
    let value = prop_oneof![1 => Just(0), 3 => any::<u64>()];
    prop_oneof![
        8 => (vm.clone(), page.clone()).prop_map(|(vm, page)| Op::Read { vm, page }),
        8 => (vm.clone(), page.clone(), value.clone())
            .prop_map(|(vm, page, value)| Op::Write { vm, page, value }),
        4 => (vm.clone(), page.clone(), 10..size.sweep, value.clone())
            .prop_map(|(vm, page, count, value)| Op::Sweep { vm, page, count, value }),
        4 => (vm.clone(), page.clone()).prop_map(|(vm, page)| Op::Prefetch { vm, page }),
        4 => Just(Op::Balance),
        4 => Just(Op::Time),
        1 => prop_oneof![
            Just(Some(Fault::WriteAfter(0))),
            Just(Some(Fault::WriteAfter(5))),
            Just(Some(Fault::EndsAt(100))),
        ].prop_map(Op::Break),
        2 => Just(Op::Break(None)),
        1 => vm.clone().prop_map(|vm| Op::Replace { vm }),
        1 => vm.clone().prop_map(|vm| Op::Flush { vm }),
        2 => (vm.clone(), page.clone(), value)
            .prop_map(|(vm, page, value)| Op::CopyIn { vm, page, value }),
        1 => (vm.clone(), page.clone()).prop_map(|(vm, page)| Op::CopyOut { vm, page }),
        3 => (vm.clone(), page.clone(), 1..size.sweep, any::<bool>())
            .prop_map(|(vm, page, count, missing)| Op::Discard { vm, page, count, missing }),
        3 => (vm.clone(), page.clone(), 1..size.sweep)
            .prop_map(|(vm, page, count)| Op::PageOut { vm, page, count }),
        3 => Just(Op::Collapse),
        1 => (vm.clone(), page).prop_map(|(vm, page)| Op::Advise { vm, page }),
        1 => (0..7u32).prop_map(|log| Op::ReadAhead(1 << log)),
        1 => (1..=8u64).prop_map(Op::Budget),
        1 => any::<bool>().prop_map(Op::HugePages),
        1 => prop_oneof![Just(0), 1..1000u64].prop_map(Op::Delay),
        1 => (vm, prop_oneof![Just(Level::L4K), Just(Level::L2M)])
            .prop_map(|(vm, max_level)| Op::MaxLevel { vm, max_level }),
    ]
}

struct Fixture {
    size: Size,
    host: Arc<Host>,
    clock: Arc<VirtualClock>,
    store: Option<FaultyStore>,
    vms: Vec<Vm>,
    /// A source provides the first VM's pages.
    sourced: bool,
    /// The second VM has Linux memory, with the pages of this file.
    file: Option<File>,
    tickets: Vec<Ticket>,
}

impl Fixture {
    fn new(swap: Box<dyn SwapStore>, store: Option<FaultyStore>) -> Self {
        Self::on(SMALL, virtual_host(SMALL.budget, swap), store)
    }

    fn on(
        size: Size,
        (host, clock): (Arc<Host>, Arc<VirtualClock>),
        store: Option<FaultyStore>,
    ) -> Self {
        let vms = size
            .pages
            .iter()
            .map(|&pages| Vm::new(&host, &clock, pages))
            .collect();
        Self {
            sourced: false,
            file: None,
            size,
            host,
            clock,
            store,
            vms,
            tickets: Vec::new(),
        }
    }

    /// Adds a source for the first VM's pages.
    fn with_source(mut self) -> Self {
        self.sourced = true;
        self.replace(0);
        self
    }

    /// Adds a file with the second VM's pages.
    fn with_file(mut self) -> Self {
        self.file = Some(linux::file(self.size.pages[1]));
        self.replace(1);
        self
    }

    /// Replaces a VM's region by a fresh one.
    fn replace(&mut self, vm: usize) {
        self.host.remove_region(self.vms[vm].range).unwrap();
        self.vms.remove(vm);
        let (host, clock, pages) = (&self.host, &self.clock, self.size.pages[vm]);
        let fresh = match &self.file {
            Some(file) if vm == 1 => linux::vm_of_file(host, clock, file, pages),
            _ if self.sourced && vm == 0 => Vm::with_source(host, clock, pages, &TestSource::new()),
            _ => Vm::new(host, clock, pages),
        };
        self.vms.insert(vm, fresh);
    }

    /// Copies on this thread wait for the source, so provide the page first.
    fn provide(&mut self, vm: usize, page: u64) -> Result<(), HostError> {
        if self.vms[vm].source.is_none() {
            return Ok(());
        }
        let vm = &mut self.vms[vm];
        let provided = vm.fault(page, Access::Read).map(|_| ());
        vm.cache.unpin_all();
        provided
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Read { vm, page } => self.touch(vm, page, Use::Read),
            Op::Write { vm, page, value } => self.touch(vm, page, Use::Write(value)),
            Op::Sweep {
                vm,
                page,
                count,
                value,
            } => {
                for i in 0..count {
                    self.touch(vm, page + i, Use::Write(value.wrapping_mul(i + 1)));
                }
            }
            Op::Prefetch { vm, page } => self.prefetch(vm, page),
            Op::Balance => _ = self.host.balance(),
            Op::Time => _ = self.vms[0].step_time() || self.host.poll(self.clock.now()) > 0,
            Op::Break(fault) => self.store.iter().for_each(|store| store.set_fault(fault)),
            Op::Replace { vm } => self.replace(vm),
            Op::Flush { vm } => self.vms[vm].cache.flush(),
            Op::CopyIn { vm, page, value } => {
                if let Err(error) = self.provide(vm, page) {
                    return self.may_fail(&error);
                }
                let vm = &mut self.vms[vm];
                let addr = vm.addr(page);
                match self.host.copy_in(addr, &value.to_le_bytes().repeat(512)) {
                    Ok(()) => _ = vm.model.insert(addr.get(), value),
                    Err(error) => self.may_fail(&error),
                }
            }
            Op::CopyOut { vm, page } => self.copy_out(vm, page),
            Op::Discard {
                vm,
                page,
                count,
                missing,
            } => self.discard(vm, page..page + count, missing),
            Op::PageOut { vm, page, count } => self.page_out(&self.vms[vm], page, count),
            Op::Collapse => while self.host.collapse_step() != Collapse::Idle {},
            Op::Advise { vm, page } => {
                let range = self.vms[vm].range;
                let from = self.vms[vm].addr(page);
                let range = range
                    .intersect(BackingRange::new(from, 1000).unwrap())
                    .unwrap();
                self.host.advise_huge(range).unwrap();
            }
            Op::ReadAhead(pages) => self.host.set_read_ahead(PageCount::new(pages)),
            Op::Budget(eighths) => {
                let budget = PageCount::new(self.size.budget * eighths / 8);
                match self.host.set_budget(budget) {
                    Ok(()) => assert_eq!(self.host.budget(), budget),
                    Err(error) => assert!(matches!(error, HostError::BudgetTooSmall { .. })),
                }
            }
            Op::HugePages(on) => self.host.make_huge_pages(on),
            // In real time here, the clock stands still and no delay would end.
            Op::Delay(_) if self.host.seed().is_none() => {}
            Op::Delay(us) => self.host.set_delay(Duration::from_micros(us)),
            Op::MaxLevel { vm, max_level } => self.vms[vm].max_level = max_level,
        }
        self.host.verify();
    }

    fn prefetch(&mut self, vm: usize, page: u64) {
        let vm = &mut self.vms[vm];
        let addr = vm.addr(page);
        if let Resolution::Pending(ticket) | Resolution::Missing(ticket) =
            self.host
                .resolve(addr, Access::Read, Level::L4K, &mut vm.cache)
        {
            if page.is_multiple_of(2) {
                self.host.start(&ticket);
            }
            self.tickets.push(ticket);
        }
        vm.cache.unpin_all();
    }

    fn copy_out(&mut self, vm: usize, page: u64) {
        if let Err(error) = self.provide(vm, page) {
            return self.may_fail(&error);
        }
        let vm = &self.vms[vm];
        let (addr, mut word) = (vm.addr(page), [0; 8]);
        match self.host.copy_out(addr, &mut word) {
            Ok(()) => assert_eq!(u64::from_le_bytes(word), vm.expected(addr)),
            Err(error) => self.may_fail(&error),
        }
    }

    fn discard(&mut self, vm: usize, pages: Range<u64>, missing: bool) {
        let vm = &mut self.vms[vm];
        let from = BackingRange::new(vm.addr(pages.start), pages.end - pages.start).unwrap();
        let range = vm.range.intersect(from).unwrap();
        let pages = (0..range.pages()).map(|i| range.start().get() + (i << 12));
        if let Some(source) = vm.source.as_ref().filter(|_| missing) {
            self.host.make_missing(range).unwrap();
            source.lacks_again(range);
            pages.for_each(|page| _ = vm.model.remove(&page));
        } else {
            self.host.discard(range).unwrap();
            vm.model.extend(pages.map(|page| (page, 0)));
        }
    }

    fn page_out(&self, vm: &Vm, page: u64, count: u64) {
        let from = BackingRange::new(vm.addr(page), count).unwrap();
        let range = vm.range.intersect(from).unwrap();
        if self.host.addresses(vm.range).is_some() {
            self.host.page_out(range).unwrap();
        }
    }

    fn touch(&mut self, vm: usize, page: u64, how: Use) {
        if let Err(error) = self.vms[vm].touch(page, how) {
            self.vms[vm].cache.unpin_all();
            self.may_fail(&error);
        }
    }

    /// Only a broken device may refuse.
    fn may_fail(&self, error: &HostError) {
        let refused = matches!(
            error,
            HostError::SwapFull { .. } | HostError::SwapWrite { .. }
        );
        assert!(refused && self.store.is_some(), "{error}");
    }

    /// Repairs the device and reads everything back.
    fn finish(mut self) {
        if let Some(store) = &self.store {
            store.set_fault(None);
        }
        let sources = self.vms.iter().filter_map(|vm| vm.source.as_ref());
        for source in sources {
            while source.answer_one(3) {}
        }
        for ticket in self.tickets.iter().filter(|ticket| !ticket.is_done()) {
            if let Some(source) = self.source_of(ticket) {
                self.host.start(ticket);
                while source.answer_one(1) {}
            }
            if !ticket.is_started() {
                // The region may have been removed: then the ticket reports it.
                let _ = self.host.wait(ticket);
            }
        }
        if self.store.is_none() {
            self.vms.iter_mut().for_each(Vm::check_all);
        } else {
            self.check_in_place();
        }
        while self.vms[0].step_time() {}
        while self.tickets.iter().any(|ticket| !ticket.is_done()) {
            self.host.poll(self.clock.now());
        }
        self.host.verify();
        for vm in &self.vms {
            self.host.remove_region(vm.range).unwrap();
        }
        self.vms.clear();
        assert_eq!(self.host.stats().resident, 0);
        assert_eq!(self.host.stats().swap_entries, 0);
        self.host.verify();
    }

    /// The source that completes the ticket.
    fn source_of(&self, ticket: &Ticket) -> Option<Arc<TestSource>> {
        let vm = self.vms.iter().find(|vm| {
            let range = vm.range.start()..vm.range.end();
            range.contains(&ticket.page())
        });
        vm?.source.clone()
    }

    /// A device that ended early stays small, so swap-in may find no room. A readable page must be
    /// right.
    fn check_in_place(&mut self) {
        for (vm, pages) in self.size.pages.into_iter().enumerate() {
            (0..pages).for_each(|page| self.touch(vm, page, Use::Read));
        }
    }
}

fn run(fixture: Fixture, ops: &[Op]) {
    let mut fixture = fixture;
    ops.iter().for_each(|op| fixture.apply(op));
    fixture.finish();
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..Default::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pages_keep_their_contents(ops in prop::collection::vec(op(SMALL), 1..120)) {
        let store = FaultyStore::new(PageCount::new(2000));
        run(Fixture::new(Box::new(store), None), &ops);
    }

    #[test]
    fn paged_out_pages_keep_their_contents(ops in prop::collection::vec(op(SMALL), 1..120)) {
        let store = FaultyStore::new(PageCount::new(2000));
        let host = linux::virtual_host(SMALL.budget, Box::new(store), SMALL.pages[1]);
        run(Fixture::on(SMALL, host, None).with_file(), &ops);
    }

    #[test]
    fn pages_keep_their_contents_when_writes_fail(ops in prop::collection::vec(op(SMALL), 1..120)) {
        let store = FaultyStore::new(PageCount::new(2000));
        run(Fixture::new(Box::new(store.clone()), Some(store)), &ops);
    }

    #[test]
    fn pages_keep_their_contents_in_compressed_memory(
        ops in prop::collection::vec(op(SMALL), 1..120)
    ) {
        let latency = LatencySetting::new(Duration::from_micros(50));
        let store = Latency::new(MemoryStore::new(), latency);
        run(Fixture::new(Box::new(store), None), &ops);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn provided_pages_keep_their_contents(ops in prop::collection::vec(op(SMALL), 1..120)) {
        let store = FaultyStore::new(PageCount::new(2000));
        run(Fixture::new(Box::new(store), None).with_source(), &ops);
    }

    #[test]
    fn provided_pages_keep_their_contents_when_writes_fail(
        ops in prop::collection::vec(op(SMALL), 1..120)
    ) {
        let store = FaultyStore::new(PageCount::new(2000));
        run(Fixture::new(Box::new(store.clone()), Some(store)).with_source(), &ops);
    }

    #[test]
    fn provided_pages_keep_their_contents_beside_huge_pages(
        ops in prop::collection::vec(op(LARGE), 1..40)
    ) {
        let store = FaultyStore::new(PageCount::new(20_000));
        let host = huge_host(LARGE.budget, Box::new(store), HugePages::Always);
        run(Fixture::on(LARGE, host, None).with_source(), &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..config() })]

    #[test]
    fn pages_keep_their_contents_in_a_file(ops in prop::collection::vec(op(SMALL), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::create(dir.path(), PageCount::new(2000)).unwrap();
        run(Fixture::on(SMALL, ring_host(SMALL.budget, Box::new(store)), None), &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..config() })]

    #[test]
    fn huge_pages_keep_their_contents(ops in prop::collection::vec(op(LARGE), 1..100)) {
        let store = FaultyStore::new(PageCount::new(20_000));
        let host = huge_host(LARGE.budget, Box::new(store), HugePages::Always);
        run(Fixture::on(LARGE, host, None), &ops);
    }

    #[test]
    fn huge_pages_keep_their_contents_where_advised(
        ops in prop::collection::vec(op(LARGE), 1..100)
    ) {
        let store = FaultyStore::new(PageCount::new(20_000));
        let host = huge_host(LARGE.budget, Box::new(store.clone()), HugePages::Madvise);
        run(Fixture::on(LARGE, host, Some(store)), &ops);
    }

    #[test]
    fn huge_pages_keep_their_contents_in_compressed_memory(
        ops in prop::collection::vec(op(LARGE), 1..100)
    ) {
        let store = Box::new(MemoryStore::new());
        let host = huge_host(LARGE.budget, store, HugePages::Always);
        run(Fixture::on(LARGE, host, None), &ops);
    }
}

/// The same seed twice gives the same run, down to the last counter.
#[test]
fn a_virtual_run_repeats_itself() {
    let once = || {
        let (host, clock) = virtual_host(SMALL.budget, Box::new(MemoryStore::new()));
        let mut vm = Vm::new(&host, &clock, 700);
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..3000 {
            let (page, value) = (rng.u64(0..700), rng.u64(..));
            let how = if rng.bool() {
                Use::Read
            } else {
                Use::Write(value)
            };
            vm.touch(page, how).unwrap();
            let _ = host.balance();
        }
        (host.stats(), host.next_completion())
    };
    assert_eq!(once(), once());
}
