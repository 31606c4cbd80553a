//! Whole vCPU states at points that a seed chooses: the guest is saved there, and goes on in a
//! fresh VM with a fresh host and a fresh clock.
//!
//! The environment variable `LACUNA_SAVE_POINTS` is the number of points for each guest, 10 by
//! default:
//!
//! ```sh
//! LACUNA_SAVE_POINTS=200 cargo test --release -p lacuna-soft --test seeded_moves -- --nocapture
//! ```
//! A guest that has not ended after [`SLICES_MAX`] slices hangs, and the test fails.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Lines, builder, from_env, image};
use fastrand::Rng;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{
    Apf, Ending, GuestMemory as _, MemorySlots as _, PlatformDevices, SaveRestore as _, StateError,
    VcpuState, Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Vcpu, Vm, VmBuilder, VmConfig};
use lacuna_sync::{Clock, VirtualClock};

/// The slices of one guest in one VM, at most. A guest moves after at most some thousand, and takes
/// far fewer than this from its last move to its end.
const SLICES_MAX: u64 = 5_000_000;

/// A VM whose vCPUs run in virtual time.
struct Machine {
    vm: Arc<Vm>,
    simulator: Simulator,
    slices: u64,
}

impl Machine {
    fn new(
        builder: &VmBuilder,
        devices: &Arc<PlatformDevices>,
        seed: u64,
        vcpus: impl FnOnce(&Arc<Vm>) -> Vec<Vcpu>,
    ) -> Self {
        let clock = Arc::new(VirtualClock::default());
        let time = Arc::clone(&clock) as Arc<dyn Clock>;
        let host = builder.host(Arc::clone(&time)).unwrap();
        let config = VmConfig {
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf: builder.apf,
            ..VmConfig::default()
        };
        let vm = Vm::new(Arc::clone(&host), time, config).unwrap();
        let mut simulator = Simulator::new(SimulatorConfig { seed, clock, host });
        simulator.add(SimulatedVm {
            vcpus: vcpus(&vm),
            vm: Arc::clone(&vm),
            devices: Arc::clone(devices),
        });
        Self {
            vm,
            simulator,
            slices: 0,
        }
    }

    /// Whether the guest goes on.
    fn run_slice(&mut self) -> bool {
        self.slices += 1;
        assert!(self.slices < SLICES_MAX, "the guest hangs");
        self.simulator.run_slice()
    }

    /// Runs `slices`, and on until every vCPU is between two instructions; their states. `None` if
    /// the guest ends before.
    fn run_and_save(&mut self, slices: u64) -> Option<Vec<VcpuState>> {
        for _ in 0..slices {
            if !self.run_slice() {
                return None;
            }
        }
        loop {
            let states: Result<Vec<_>, _> = self
                .simulator
                .vcpus_mut(0)
                .map(|vcpu| vcpu.save())
                .collect();
            match states {
                Ok(states) => return Some(states),
                Err(StateError::MidInstruction { .. }) => {}
                Err(refused) => panic!("{refused}"),
            }
            if !self.run_slice() {
                return None;
            }
        }
    }
}

/// A fresh VM in which the guest of `old` goes on.
fn moved(
    old: &Vm,
    states: &[VcpuState],
    builder: &VmBuilder,
    devices: &Arc<PlatformDevices>,
    seed: u64,
) -> Machine {
    Machine::new(builder, devices, seed, |new| {
        for slot in old.memory_slots() {
            let (mut page, start) = ([0; PAGE_SIZE], slot.gfns.start().gpa().get());
            for n in 0..slot.gfns.pages() {
                let gpa = Gpa::truncate(start + n * PAGE_SIZE as u64);
                old.read(gpa, &mut page).unwrap();
                if page != [0; PAGE_SIZE] {
                    new.write(gpa, &page).unwrap();
                }
            }
        }
        let mut vcpus = new.bare_vcpus().unwrap();
        for (vcpu, state) in vcpus.iter_mut().zip(states) {
            vcpu.restore(state).unwrap();
        }
        vcpus
    })
}

/// Moves the guest again and again, until there were as many points as were asked for. A guest that
/// ends begins again with another seed.
fn moves_at_seeded_points(name: &str, command_line: &str, apf: Apf, slices: u64) {
    let points = from_env("LACUNA_SAVE_POINTS", 10);
    let mut done = 0;
    for seed in 1.. {
        done += run(name, command_line, apf, seed, slices, points - done);
        if done == points {
            break;
        }
    }
    println!("{name}: {done} save points");
}

/// One run of the guest to its end, which must be a success, with at most `limit` save points.
fn run(name: &str, command_line: &str, apf: Apf, seed: u64, slices: u64, limit: u64) -> u64 {
    let mut builder = builder(16, 8, 2, command_line);
    builder.apf = apf;
    builder.seed = Some(seed);
    builder.latency.set(Duration::from_micros(100));
    let (mut rng, lines) = (Rng::with_seed(seed), Lines::default());
    let devices = Arc::new(PlatformDevices::new(lines.sink()));
    let mut machine = Machine::new(&builder, &devices, seed, |vm| {
        let command_line = builder.full_command_line();
        vm.boot(&image(name), &command_line).unwrap()
    });
    let mut points = 0;
    while points < limit
        && let Some(states) = machine.run_and_save(rng.u64(1..slices))
    {
        let seed = rng.u64(..);
        machine = moved(&machine.vm, &states, &builder, &devices, seed);
        points += 1;
    }
    while machine.run_slice() {}
    let ending = devices.ending();
    let text = lines.text();
    assert!(
        matches!(ending, Some(Ending::Exited(0))),
        "{name}, seed {seed}, after {points} save points: {ending:?}\n{text}"
    );
    assert!(
        points > 0,
        "{name}, seed {seed}: it ended before the first point"
    );
    points
}

#[test]
fn verify_goes_on_from_seeded_points() {
    moves_at_seeded_points("verify", "rounds=2", Apf::On, 4000);
}

#[test]
fn bm_goes_on_from_seeded_points() {
    let command_line = "faulters=4 workers=2 accesses=4000 populate=1";
    moves_at_seeded_points("bm", command_line, Apf::On, 4000);
}

#[test]
fn apfstorm_goes_on_from_seeded_points() {
    let command_line = "accesses=3000 switches=40 every_us=500";
    moves_at_seeded_points("apfstorm", command_line, Apf::On, 4000);
}
