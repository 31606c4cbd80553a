//! A VMM stops guests on threads at any moment. Then the same vCPUs continue, or get their own
//! states back, or the guest resumes in another VM, while the old VM is dropped with pages on their
//! way. Beside the vCPUs the VMM kicks, changes memory slots, splits huge pages, and switches
//! asynchronous page faults off and on. `seeded_moves.rs` has moves at repeatable points.
//!
//! The environment variable `LACUNA_MOVES` is the number of runs for each guest, 1 by default.

use crate::common;

use common::{Lines, apf_ways, builder_for, config, from_env, image_for, on_both};
use fastrand::Rng;
use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE};
use lacuna_machine::{
    Apf, ApfSwitch as _, Arch, Ending, Exit, GuestMemory as _, HugePagePolicy as _, Kick as _,
    MemorySlots as _, Next, PlatformDevices, SaveRestore as _, SharedState, SlotFlags, SlotId,
    StateError, Vcpu as _, VcpuState, Vm as _, dispatch,
};
use lacuna_soft::{Background, Vcpu, Vm, VmBuilder};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A run takes some seconds.
const HANG: Duration = Duration::from_secs(900);
/// The number of stops of a guest at intervals of up to [`SHORT`]. Later intervals are up to
/// [`LONG`], so that the guest ends.
const STOPS: usize = 40;
const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(2);

/// The added and removed slot.
const EXTRA: SlotId = SlotId(9);

struct Machine {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    _background: Background,
}

impl Machine {
    fn new(builder: &VmBuilder, vcpus: impl FnOnce(&Arc<Vm>) -> Vec<Vcpu>) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock)).unwrap();
        let vm = Vm::new(Arc::clone(&host), clock, config(builder)).unwrap();
        Self {
            vcpus: vcpus(&vm),
            _background: host.spawn_background().unwrap(),
            vm,
        }
    }

    /// Runs the vCPUs for `time`, or until the guest ends.
    fn run(&mut self, devices: &PlatformDevices, rng: &mut Rng, time: Duration) {
        let (vm, stop) = (&*self.vm, AtomicBool::new(false));
        let drive = |vcpu: &mut Vcpu| {
            while devices.ending().is_none() {
                let exit = vcpu.run();
                let stopped = matches!(exit, Ok(Exit::Interrupted)) && stop.load(Ordering::Acquire);
                if stopped || dispatch(vcpu, exit, devices, vm) == Next::Stop {
                    break;
                }
            }
        };
        let began = Instant::now();
        thread::scope(|scope| {
            let drive = &drive;
            let vcpus = self.vcpus.iter_mut();
            let threads: Vec<_> = vcpus.map(|vcpu| scope.spawn(|| drive(vcpu))).collect();
            let all_ended = || threads.iter().all(thread::ScopedJoinHandle::is_finished);
            while began.elapsed() < time && !all_ended() {
                operate(vm, rng);
            }
            stop.store(true, Ordering::Release);
            while !all_ended() {
                vm.kick_all();
                thread::sleep(Duration::from_micros(200));
            }
        });
        vm.withdraw_kicks();
        self.vcpus.iter().for_each(Vcpu::verify);
    }

    /// Saves the states. A vCPU in the middle of an instruction completes it first.
    fn save(&mut self, devices: &PlatformDevices) -> (SharedState, Vec<VcpuState>) {
        let vm = &*self.vm;
        let save = |vcpu: &mut Vcpu| {
            loop {
                match vcpu.save() {
                    Ok(state) => return state,
                    Err(StateError::MidInstruction { vcpu: index }) => {
                        vm.kick(index);
                        let exit = vcpu.run();
                        let _ = dispatch(vcpu, exit, devices, vm);
                    }
                    Err(refused) => panic!("{refused}"),
                }
            }
        };
        let vcpus = self.vcpus.iter_mut().map(save).collect();
        (vm.save_shared().unwrap(), vcpus)
    }

    /// The vCPUs get their own states back, some after a reset.
    fn restored(mut self, devices: &PlatformDevices, rng: &mut Rng) -> Self {
        let (shared, states) = self.save(devices);
        if rng.bool() {
            self.vcpus.iter_mut().for_each(Vcpu::reset);
        }
        self.vm.restore_shared(&shared).unwrap();
        for (vcpu, state) in self.vcpus.iter_mut().zip(&states) {
            vcpu.restore(state).unwrap();
        }
        self
    }

    /// Another machine in which the guest resumes. This one is dropped.
    fn moved(mut self, builder: &VmBuilder, devices: &PlatformDevices) -> Self {
        let (shared, states) = self.save(devices);
        Self::new(builder, |new| {
            let slots = self.vm.memory_slots();
            for gfns in slots.iter().map(|slot| slot.gfns) {
                let (mut page, start) = ([0; PAGE_SIZE], gfns.start().gpa().get());
                for n in 0..gfns.pages() {
                    let gpa = Gpa::truncate(start + n * PAGE_SIZE as u64);
                    self.vm.read(gpa, &mut page).unwrap();
                    if page != [0; PAGE_SIZE] {
                        new.write(gpa, &page).unwrap();
                    }
                }
            }
            drop(self);
            let mut vcpus = new.bare_vcpus().unwrap();
            new.restore_shared(&shared).unwrap();
            for (vcpu, state) in vcpus.iter_mut().zip(&states) {
                vcpu.restore(state).unwrap();
            }
            vcpus
        })
    }
}

/// One operation of a VMM beside the vCPUs.
fn operate(vm: &Vm, rng: &mut Rng) {
    let nap = |rng: &mut Rng, most| thread::sleep(Duration::from_micros(rng.u64(..most)));
    match rng.u8(..8) {
        0 => vm.kick(rng.usize(..vm.config().vcpus)),
        1 => vm.kick_all(),
        2 => {
            vm.set_apf(Apf::Off);
            nap(rng, 500);
            vm.set_apf(Apf::On);
        }
        3 => {
            let gfns = GfnRange::new(Gpa::truncate(1 << 40).gfn(), 16).unwrap();
            vm.add_memory(EXTRA, gfns, SlotFlags::empty()).unwrap();
            vm.remove_slot(EXTRA).unwrap();
        }
        4 => {
            let gfns = vm.memory_slots()[0].gfns;
            vm.disallow_huge(gfns).unwrap();
            vm.allow_huge(gfns);
        }
        _ => nap(rng, 2000),
    }
}

/// Runs a guest to its end, which must be a success.
fn run(arch: Arch, name: &str, line: &str, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let (vcpus, resident) = ([1, 2, 4][rng.usize(..3)], rng.u64(4..10));
    let mut builder = builder_for(arch, (16, resident), vcpus, line);
    builder.apf = Apf::On;
    builder
        .latency
        .set(Duration::from_micros(rng.u64(..2) * 100));
    let lines = Lines::default();
    let devices = Arc::new(PlatformDevices::of(arch, lines.sink()));
    let image = image_for(arch, name);
    let began = Instant::now();
    let mut machine = Machine::new(&builder, |vm| {
        vm.boot(&image, &builder.full_command_line()).unwrap()
    });
    for stop in 0.. {
        let most = if stop < STOPS { SHORT } else { LONG };
        let time = Duration::from_micros(rng.u64(..most.as_micros() as u64));
        machine.run(&devices, &mut rng, time);
        if devices.ending().is_some() {
            break;
        }
        let text = lines.text();
        assert!(began.elapsed() < HANG, "{name} {line}, seed {seed}: {text}");
        machine = match rng.u8(..3) {
            0 => machine,
            1 => machine.restored(&devices, &mut rng),
            _ => machine.moved(&builder, &devices),
        };
    }
    let (ending, text) = (devices.ending(), lines.text());
    let good = matches!(ending, Some(Ending::Exited(0)));
    assert!(good, "{name} {line}, seed {seed}: {ending:?}\n{text}");
}

fn a_guest_goes_on(arch: Arch) {
    for seed in 0..from_env("LACUNA_MOVES", 1) {
        for form in apf_ways(arch) {
            let storm = format!("accesses=500 switches=40 every_us=500 {form}");
            run(arch, "apfstorm", &storm, seed);
            run(arch, "verify", &format!("rounds=1 {form}"), seed);
        }
    }
}

on_both!(a_guest_goes_on);
