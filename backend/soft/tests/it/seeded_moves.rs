//! A seed chooses points at which the whole vCPU states are saved. The guest resumes in a fresh VM
//! with a fresh host and a fresh clock.
//!
//! The environment variable `LACUNA_SAVE_POINTS` is the number of points for each guest, 2 by
//! default:
//!
//! ```sh
//! LACUNA_SAVE_POINTS=200 cargo test --release -p lacuna-soft --test it seeded_moves -- --nocapture
//! ```
//! If a guest has not ended after [`SLICES_MAX`] slices, it hangs, and the test fails.

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Lines, builder, config, from_env, image_for};
use fastrand::Rng;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::arm64::{self, RunState};
use lacuna_machine::{
    Apf, Arch, Ending, GuestMemory as _, MemorySlots as _, PlatformDevices, SaveRestore as _,
    SharedState, StateError, Vcpu as _, VcpuState, Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Vcpu, Vm, VmBuilder};
use lacuna_sync::{Clock, VirtualClock};

/// The largest number of slices of one guest in one VM. A guest moves after at most some thousand,
/// and needs far fewer than this from its last move to its end.
const SLICES_MAX: u64 = 5_000_000;

/// The states of a VM and of its vCPUs.
struct Saved {
    shared: SharedState,
    vcpus: Vec<VcpuState>,
}

/// A situation of an AArch64 vCPU.
type Only = fn(&arm64::State) -> bool;

fn is(only: Only, state: &VcpuState) -> bool {
    match state {
        VcpuState::Arm64(state) => only(state),
        _ => true,
    }
}

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
        let vm = Vm::new(Arc::clone(&host), time, config(builder)).unwrap();
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

    /// Whether the guest still runs.
    fn run_slice(&mut self) -> bool {
        self.slices += 1;
        assert!(self.slices < SLICES_MAX, "the guest hangs");
        self.simulator.run_slice()
    }

    /// Runs at least `slices`, until every vCPU is between two instructions and a state satisfies
    /// `only`. Returns the states. `None` if the guest ends before.
    fn run_and_save(&mut self, slices: u64, only: Only) -> Option<Saved> {
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
                Ok(vcpus) if !vcpus.iter().any(|state| is(only, state)) => {}
                Ok(vcpus) => {
                    let shared = self.vm.save_shared().unwrap();
                    return Some(Saved { shared, vcpus });
                }
                Err(StateError::MidInstruction { .. }) => {}
                Err(refused) => panic!("{refused}"),
            }
            if !self.run_slice() {
                return None;
            }
        }
    }
}

/// A fresh VM in which the guest of `old` resumes.
fn moved(
    old: &Vm,
    saved: &Saved,
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
        new.restore_shared(&saved.shared).unwrap();
        for (vcpu, state) in vcpus.iter_mut().zip(&saved.vcpus) {
            vcpu.restore(state).unwrap();
            let again = vcpu.save().unwrap();
            assert_eq!(again, *state, "vCPU {}", vcpu.index());
        }
        assert_eq!(new.save_shared().unwrap(), saved.shared);
        vcpus
    })
}

/// A moving guest.
#[derive(Clone, Copy)]
struct Guest {
    arch: Arch,
    name: &'static str,
    command_line: &'static str,
    /// The word for the kernel's command line that chooses the form of asynchronous page faults.
    form: &'static str,
    apf: Apf,
    vcpus: usize,
    /// A guest moves after at most so many slices,
    slices: u64,
    /// and when this is so for one of its vCPUs, if they are AArch64's.
    only: Only,
}

impl Guest {
    const VERIFY: Self = Self {
        arch: Arch::X86_64,
        name: "verify",
        command_line: "rounds=2",
        form: "",
        apf: Apf::On,
        vcpus: 2,
        slices: 4000,
        only: |_| true,
    };
    const BM: Self = Self {
        name: "bm",
        command_line: "faulters=4 workers=2 accesses=4000 populate=1",
        ..Self::VERIFY
    };
    const APFSTORM: Self = Self {
        name: "apfstorm",
        command_line: "accesses=3000 switches=40 every_us=500",
        ..Self::VERIFY
    };

    /// Moves the guest on AArch64, in both forms, with 1, 2 and 4 vCPUs.
    fn all_of_arm64(self) {
        let runs = [
            ("apf=abort", 1),
            ("apf=abort", 4),
            ("apf=sdei", 2),
            ("apf=sdei", 4),
        ];
        for (form, vcpus) in runs {
            let guest = Self {
                arch: Arch::Arm64,
                form,
                vcpus,
                ..self
            };
            guest.moves_at_seeded_points();
        }
    }

    /// Moves again and again, for the requested number of points. After its end, the guest begins
    /// again with another seed.
    fn moves_at_seeded_points(&self) {
        let points = from_env("LACUNA_SAVE_POINTS", 2);
        let mut done = 0;
        for seed in 1..=4 * points {
            done += self.run(seed, points - done);
            if done == points {
                break;
            }
        }
        let Self {
            arch,
            name,
            form,
            vcpus,
            ..
        } = self;
        println!("{arch:?}, {name} {form}, {vcpus} vCPUs: {done} save points");
        assert_eq!(done, points, "{name}: its runs end before the points");
    }

    /// One run to its end, which must be a success, with at most `limit` save points.
    fn run(&self, seed: u64, limit: u64) -> u64 {
        let command_line = format!("{} {}", self.command_line, self.form);
        let mut builder = builder(16, 8, self.vcpus, &command_line);
        builder.arch = self.arch;
        builder.apf = self.apf;
        builder.seed = Some(seed);
        builder.latency.set(Duration::from_micros(100));
        let (mut rng, lines) = (Rng::with_seed(seed), Lines::default());
        let devices = Arc::new(PlatformDevices::of(self.arch, lines.sink()));
        let mut machine = Machine::new(&builder, &devices, seed, |vm| {
            let image = image_for(self.arch, self.name);
            vm.boot(&image, &builder.full_command_line()).unwrap()
        });
        let mut points = 0;
        while points < limit
            && let Some(saved) = machine.run_and_save(rng.u64(1..self.slices), self.only)
        {
            let seed = rng.u64(..);
            machine = moved(&machine.vm, &saved, &builder, &devices, seed);
            points += 1;
        }
        while machine.run_slice() {}
        let (name, ending, text) = (self.name, devices.ending(), lines.text());
        assert!(
            matches!(ending, Some(Ending::Exited(0))),
            "{name}, seed {seed}, after {points} save points: {ending:?}\n{text}"
        );
        points
    }
}

#[test]
fn verify_goes_on_from_seeded_points() {
    Guest::VERIFY.moves_at_seeded_points();
}

#[test]
fn bm_goes_on_from_seeded_points() {
    Guest::BM.moves_at_seeded_points();
}

#[test]
fn apfstorm_goes_on_from_seeded_points() {
    Guest::APFSTORM.moves_at_seeded_points();
}

#[test]
fn verify_of_arm64_goes_on_from_seeded_points() {
    Guest::VERIFY.all_of_arm64();
}

#[test]
fn bm_of_arm64_goes_on_from_seeded_points() {
    Guest::BM.all_of_arm64();
}

#[test]
fn apfstorm_of_arm64_goes_on_from_seeded_points() {
    Guest::APFSTORM.all_of_arm64();
}

/// When every fault waits, many save points find a vCPU waiting for a page.
#[test]
fn a_guest_of_arm64_that_waits_for_pages_goes_on() {
    for vcpus in [1, 4] {
        let guest = Guest {
            arch: Arch::Arm64,
            apf: Apf::Off,
            vcpus,
            slices: 400,
            ..Guest::VERIFY
        };
        guest.moves_at_seeded_points();
    }
}

/// Rare situations at seeded points: in each, a guest moves again and again.
#[test]
fn a_guest_of_arm64_goes_on_from_rare_situations() {
    const BOOT: Guest = Guest {
        arch: Arch::Arm64,
        command_line: "rounds=1",
        vcpus: 4,
        slices: 8,
        ..Guest::VERIFY
    };
    const FAULTS: Guest = Guest {
        arch: Arch::Arm64,
        slices: 1000,
        ..Guest::BM
    };
    const STORM: Guest = Guest {
        arch: Arch::Arm64,
        slices: 1000,
        ..Guest::APFSTORM
    };
    let situations: [(Guest, &str, Only); 8] = [
        (BOOT, "", |s| s.run == RunState::Off),
        (BOOT, "", |s| matches!(s.run, RunState::OnPending { .. })),
        (STORM, "apf=abort", |s| s.run == RunState::Halted),
        (STORM, "apf=abort", |s| s.abort.is_some()),
        (STORM, "apf=sdei", |s| s.apf.untaken.is_some()),
        (FAULTS, "apf=sdei", |s| s.apf.sdei.interrupted.is_some()),
        (STORM, "apf=sdei", |s| s.apf.unacknowledged),
        (STORM, "apf=sdei", |s| s.gic.private.active != 0),
    ];
    for (guest, form, only) in situations {
        let guest = Guest {
            form,
            only,
            ..guest
        };
        guest.moves_at_seeded_points();
    }
}
