//! Asynchronous page faults end to end: Lacuna's guest kernel on the soft backend, with every form
//! of its events. `arm64_apf` has the behaviour of AArch64 guests alone.

use crate::common;

use common::apf::{offered, seeded, total};
use common::{Lines, apf_ways, boot, builder, builder_for, image, on_both, pass, run};
use lacuna_addr::PageCount;
use lacuna_apf::POLL_NS;
use lacuna_host::{Fault, FaultyStore, HostConfig, HugePages, Io};
use lacuna_machine::{Arch, Ending, Next, PlatformDevices, VcpuError, dispatch};
use lacuna_skip::test;
use lacuna_soft::{ApfStats, Host, RunSummary, Step, Vcpu, Vm, VmBuilder, Wait};
use lacuna_sync::{Clock, VirtualClock};
use std::ops::Range;
use std::sync::Arc;

on_both!(
    a_guest_that_does_not_ask_gets_no_event,
    a_guest_without_the_offer_gets_no_event,
    a_seed_gives_one_trace,
    an_idle_guest_without_a_tick_misses_nothing,
);

/// The two forms of page-ready that an x86-64 guest may choose: by interrupt (today's), and by #PF
/// (2010).
const DELIVERIES: [&str; 2] = ["apf=int", "apf=pf"];

fn assert_delivered(outcome: &RunSummary, text: &str) {
    let stats = total(&outcome.apf);
    assert!(
        stats.taken > 200,
        "few faults were delivered: {stats:?}\n{text}"
    );
}

#[test]
fn verify_loses_nothing() {
    for delivery in DELIVERIES {
        for vcpus in [1, 2, 4] {
            let builder = offered(builder(16, 4, vcpus, &format!("rounds=2 {delivery}")));
            let (outcome, text) = pass(&builder, "verify");
            assert_delivered(&outcome, &text);
        }
    }
}

fn a_guest_that_does_not_ask_gets_no_event(arch: Arch) {
    let builder = offered(builder_for(arch, (24, 6), 2, "rounds=1 apf=off"));
    let stats = total(&pass(&builder, "verify").0.apf);
    assert_eq!((stats.taken, stats.halted), (0, 0), "{stats:?}");
}

fn a_guest_without_the_offer_gets_no_event(arch: Arch) {
    for way in apf_ways(arch) {
        let builder = builder_for(arch, (24, 6), 2, &format!("rounds=1 {way}"));
        let (outcome, _) = pass(&builder, "verify");
        assert_eq!(total(&outcome.apf), ApfStats::default());
    }
}

fn a_seed_gives_one_trace(arch: Arch) {
    for way in apf_ways(arch) {
        let run = || {
            let words = format!("rounds=1 {way}");
            let builder = offered(builder_for(arch, (16, 4), 4, &words));
            seeded(7, builder, "verify")
        };
        let (first, stats) = run();
        assert!(stats.taken > 100, "{stats:?}");
        assert_eq!((first, stats), run());
    }
}

#[test]
fn storms_of_enabling_and_disabling() {
    for delivery in DELIVERIES {
        for seed in 1..4 {
            let arguments = format!("accesses=3000 switches=40 every_us=500 {delivery}");
            let builder = offered(builder(16, 4, 2, &arguments));
            let (_, stats) = seeded(seed, builder, "apfstorm");
            assert!(stats.taken > 0 && stats.cancelled > 0, "{stats:?}");
        }
    }
}

#[test]
fn hostile_guests_do_no_harm() {
    for delivery in DELIVERIES {
        for case in 0..9 {
            let arguments = format!("case={case} accesses=5000 limit_ms=2000 {delivery}");
            let builder = offered(builder(16, 4, 2, &arguments));
            let (outcome, text) = run(&builder, "apfhostile");
            assert!(
                !matches!(outcome.ending, Ending::Failed(_)),
                "case {case}: {:?}\n{text}",
                outcome.ending
            );
        }
    }
}

/// No timer tick ends a halt here, so each arriving page must end it, even if several arrive
/// together, and in a form that can report only one page at a time.
fn an_idle_guest_without_a_tick_misses_nothing(arch: Arch) {
    for way in apf_ways(arch) {
        for seed in 1..4 {
            let words = format!("faulters=12 workers=0 accesses=300 tick_us=1G slice_us=1G {way}");
            let builder = offered(builder_for(arch, (16, 4), 2, &words));
            let (_, stats) = seeded(seed, builder, "bm");
            assert!(stats.taken > 100, "{stats:?}");
        }
    }
}

/// Steps the vCPUs of one VM in turn, under a virtual clock.
struct Bench {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    devices: Arc<PlatformDevices>,
    lines: Lines,
    host: Arc<Host>,
    clock: Arc<VirtualClock>,
}

impl Bench {
    fn new(builder: &VmBuilder, host: Arc<Host>, clock: Arc<VirtualClock>, name: &str) -> Self {
        let time = Arc::clone(&clock) as Arc<dyn Clock>;
        let (vm, vcpus, devices, lines) = boot(builder, &host, time, name);
        Self {
            vm,
            vcpus,
            devices,
            lines,
            host,
            clock,
        }
    }

    /// Runs one slice of one vCPU, and ends its wait.
    fn step(&mut self, index: usize) -> Option<VcpuError> {
        let vcpu = &mut self.vcpus[index];
        match vcpu.step(1000) {
            Step::Ran | Step::Wait(Wait::Busy | Wait::Halt(_)) => {}
            Step::Wait(Wait::Page(ticket) | Wait::Provided(ticket)) => {
                drop(self.host.wait(&ticket));
            }
            Step::Wait(Wait::Memory) => drop(vcpu.reclaim()),
            Step::Exit(exit) => {
                let next = dispatch(vcpu, Ok(exit), &self.devices, &*self.vm);
                assert_eq!(next, Next::Enter, "{}", self.lines.text());
            }
            Step::Failed(error) => return Some(error),
        }
        self.clock.advance(1000);
        self.host.poll(self.clock.now());
        None
    }

    fn run_until(&mut self, mut enough: impl FnMut(&ApfStats) -> bool) {
        for turn in 0..4_000_000 {
            let failed = self.step(turn % self.vcpus.len());
            assert!(failed.is_none(), "{failed:?}");
            if enough(&total(&self.vm.apf_stats())) {
                return;
            }
        }
        panic!("not in 4 million slices: {:?}", self.vm.apf_stats());
    }
}

#[test]
fn a_reset_vcpu_gets_no_event_from_before() {
    let builder = VmBuilder {
        seed: Some(1),
        ..offered(builder(16, 4, 2, "apf=int faulters=8 workers=2"))
    };
    let clock = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let mut bench = Bench::new(&builder, host, clock, "bm");
    let regs = |vcpu: &Vcpu| vcpu.as_x86().unwrap().regs();
    let fresh: Vec<_> = bench.vcpus.iter().map(regs).collect();
    bench.run_until(|stats| stats.taken > 100);
    let command_line = builder.full_command_line();
    bench.vm.reload(&image("bm"), &command_line).unwrap();
    for (vcpu, fresh) in bench.vcpus.iter_mut().zip(fresh) {
        vcpu.reset();
        assert_eq!(regs(vcpu), fresh);
    }
    // Pages on their way arrive; no vCPU waits for them any more.
    while let Some(at) = bench.host.next_completion() {
        bench.clock.advance_to(at);
        bench.host.poll(at);
    }
    let before = total(&bench.vm.apf_stats());
    for _ in 0..100 {
        (0..2).for_each(|index| assert!(bench.step(index).is_none()));
    }
    let after = total(&bench.vm.apf_stats());
    assert_eq!(after.ready, before.ready, "{after:?}");
    // After its second load, the machine works as before.
    bench.run_until(|stats| stats.taken > before.taken + 100);
    bench.host.verify();
    bench.vm.mmu().verify();
}

/// A machine for `bm` under a virtual clock. Each read takes a time in `latency_ns`.
fn bench(latency_ns: Range<u64>) -> (Bench, FaultyStore) {
    let builder = VmBuilder {
        seed: Some(1),
        ..offered(builder(16, 4, 2, "apf=int faulters=8 workers=2"))
    };
    let clock = Arc::new(VirtualClock::default());
    let store = FaultyStore::new(PageCount::new(1 << 14));
    let host = Host::new(HostConfig {
        budget: builder.resident,
        huge: HugePages::Never,
        swap: Box::new(store.clone()),
        io: Io::Virtual {
            seed: 1,
            latency_ns,
        },
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
    });
    (Bench::new(&builder, host.unwrap(), clock, "bm"), store)
}

/// The vCPU waits for a page that arrives so soon that a notification is not worth its cost.
#[test]
fn a_guest_is_notified_only_if_a_page_takes_longer_than_that() {
    let (mut fast, _) = bench(POLL_NS / 4..POLL_NS);
    fast.run_until(|stats| stats.waited_polled > 200);
    let stats = total(&fast.vm.apf_stats());
    assert_eq!(stats.taken, 0, "{stats:?}");
    let (mut slow, _) = bench(2 * POLL_NS..4 * POLL_NS);
    slow.run_until(|stats| stats.taken > 200);
    let stats = total(&slow.vm.apf_stats());
    assert_eq!(stats.waited_polled, 0, "{stats:?}");
}

#[test]
fn a_page_that_cannot_be_read_ends_the_run_after_it_was_announced() {
    let (mut bench, store) = bench(100_000..200_000);
    bench.run_until(|stats| stats.taken > 100);
    store.set_fault(Some(Fault::Read));
    let error = (0..1_000_000).find_map(|turn| bench.step(turn % 2));
    let Some(VcpuError::PageLost { .. }) = error else {
        panic!("{error:?}")
    };
}
