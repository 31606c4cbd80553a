//! Guests with asynchronous page faults.

use super::boot;
use lacuna_machine::Ending;
use lacuna_soft::{
    Apf, ApfStats, LatencySetting, SimulatedVm, Simulator, SimulatorConfig, Trace, VmBuilder,
};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

/// The guest is offered asynchronous page faults, and its swap has a latency.
pub fn offered(builder: VmBuilder) -> VmBuilder {
    VmBuilder {
        apf: Apf::On,
        latency: LatencySetting::new(Duration::from_micros(100)),
        ..builder
    }
}

pub fn total(stats: &[ApfStats]) -> ApfStats {
    let mut sum = ApfStats::default();
    stats.iter().for_each(|one| sum.merge(one));
    sum
}

/// Runs all vCPUs on one thread. Also returns the host's counters at the end.
pub fn seeded(seed: u64, builder: VmBuilder, name: &str) -> (Trace, ApfStats) {
    let builder = VmBuilder {
        seed: Some(seed),
        ..builder
    };
    let clock = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let mut simulator = Simulator::new(SimulatorConfig {
        seed,
        clock: Arc::clone(&clock),
        host: Arc::clone(&host),
    });
    let time = Arc::clone(&clock) as Arc<dyn Clock>;
    let (vm, vcpus, devices, lines) = boot(&builder, &host, time, name);
    simulator.add(SimulatedVm {
        vm: Arc::clone(&vm),
        vcpus,
        devices: Arc::clone(&devices),
    });
    let mut looks = 0u64;
    let trace = simulator.run(|| {
        looks += 1;
        // The latency changes while pages are on their way.
        let latency = [0, 10, 100, 1000][(looks ^ seed) as usize % 4];
        builder.latency.set(Duration::from_micros(latency));
        if looks.is_multiple_of(16) {
            vm.mmu().verify();
            host.verify();
        }
    });
    let (ending, text) = (devices.ending(), lines.text());
    assert!(
        matches!(ending, Some(Ending::Exited(0))),
        "seed {seed}, {name} {}: {ending:?}\n{text}",
        builder.command_line
    );
    simulator.vcpus(0).for_each(|vcpu| vcpu.verify());
    vm.mmu().verify();
    host.verify();
    (trace, total(&vm.apf_stats()))
}
