//! A small guest that has finished its work and waits for interrupts. Virtual time is stopped, so
//! none arrives, and each process saves the same bytes.

use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::{
    Arch, CpuModel, DevicesState, Ending, Exit, GuestMemory as _, Image, Machine, MemorySlots as _,
    PlatformDevices, Running, Vcpu as _, Vm as _,
};
use lacuna_soft::{Apf, Host, Step, Swap, Vcpu, Vm, VmBuilder, VmConfig, Wait};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

/// Its memory.
pub const MEMORY: PageCount = PageCount::from_bytes(4 << 20);
/// Slices: more than its work needs.
const SLICES: u64 = 4000;
/// Instructions in a slice.
const SLICE: u64 = 2000;

/// A host, and VMs in it.
pub struct TestHost {
    pub host: Arc<Host>,
    clock: Arc<VirtualClock>,
}

impl TestHost {
    pub fn new() -> Self {
        let clock = Arc::new(VirtualClock::default());
        let builder = VmBuilder {
            seed: Some(1),
            swap: Swap::Memory,
            ..VmBuilder::new(PageCount::from_bytes(64 << 20), PageCount::new(4096))
        };
        let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>);
        Self {
            host: host.expect("a host"),
            clock,
        }
    }

    pub fn time(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as Arc<dyn Clock>
    }

    /// Runs vCPUs for a while. Only a panic matters.
    pub fn run(&self, vm: &Vm, vcpus: &mut [Vcpu], devices: &PlatformDevices, slices: u64) {
        for vcpu in vcpus {
            for _ in 0..slices {
                if !self.slice(vm, vcpu, devices) || devices.ending().is_some() {
                    break;
                }
            }
        }
    }

    /// One slice. `false`: the vCPU rests, or has ended.
    fn slice(&self, vm: &Vm, vcpu: &mut Vcpu, devices: &PlatformDevices) -> bool {
        let step = vcpu.step(SLICE);
        self.host.poll(self.clock.now());
        match step {
            Step::Ran | Step::Wait(Wait::Busy) => {}
            Step::Wait(Wait::Halt(_)) | Step::Failed(_) => return false,
            Step::Wait(Wait::Page(ticket) | Wait::Provided(ticket)) => {
                // Its page may be lost.
                let _ = self.host.wait(&ticket);
            }
            Step::Wait(Wait::Memory) => {
                if vcpu.reclaim().is_err() {
                    return false;
                }
            }
            Step::Exit(Exit::Shutdown(_) | Exit::PoweredOff | Exit::Reset) => return false,
            Step::Exit(exit) => answer(vcpu, exit, devices, vm),
        }
        true
    }
}

fn answer(vcpu: &mut Vcpu, exit: Exit, devices: &PlatformDevices, kick: &Vm) {
    match exit {
        Exit::IoOut { port, width, value } => devices.write(port, width, value, 0, kick),
        Exit::IoIn { port, width } => vcpu.complete_read(devices.read(port, width, 0, kick)),
        Exit::MmioRead { gpa, width } => vcpu.complete_read(devices.mmio_read(gpa, width, 0, kick)),
        Exit::MmioWrite { gpa, width, value } => devices.mmio_write(gpa, width, value, 0, kick),
        _ => {}
    }
}

/// The guest.
pub struct Resting {
    place: TestHost,
    pub vm: Arc<Vm>,
    devices: DevicesState,
    /// Missing after a panic.
    vcpu: Option<Vcpu>,
}

/// The guest architectures of this build.
pub fn architectures() -> &'static [Arch] {
    match lacuna_guest::unavailable() {
        Some(_) => &[Arch::Arm64],
        None => &[Arch::X86_64, Arch::Arm64],
    }
}

impl Resting {
    /// Boots `verify`, and lets it check a few pages.
    pub fn new(arch: Arch) -> Self {
        let images = match arch {
            Arch::Arm64 => lacuna_guest::Arch::Arm64,
            _ => lacuna_guest::Arch::X86_64,
        };
        let file = images.image("verify").expect("a built-in guest").file;
        let image = Image::parse(file).expect("an image");
        let place = TestHost::new();
        let config = VmConfig {
            arch,
            memory: MEMORY,
            vcpus: 1,
            apf: Apf::On,
            cpu: CpuModel::Common { tsc_khz: None },
            ..VmConfig::default()
        };
        let vm = Vm::new(Arc::clone(&place.host), place.time(), config).expect("a VM");
        let words = "smp=1 pages=16 rounds=1";
        let mut vcpus = vm.boot(&image, words).expect("it boots");
        let before = PlatformDevices::of(arch, |_: &str| ());
        let vcpu = &mut vcpus[0];
        // The kernel waits for ever after its exit code.
        let mut slices = 0..SLICES;
        assert!(slices.any(|_| before.ending().is_some() || !place.slice(&vm, vcpu, &before)));
        assert_eq!(before.ending(), Some(Ending::Exited(0)), "{arch}");
        // On AArch64 it switches the machine off first.
        let rests = slices.filter(|_| !place.slice(&vm, vcpu, &before));
        assert_eq!(rests.take(3).count(), 3, "{arch}: it does not rest");
        let saved = before.pause().and_then(|paused| paused.save());
        Self {
            place,
            vm,
            devices: saved.expect("no device of a VMM's"),
            vcpu: vcpus.pop(),
        }
    }

    /// Runs `body` beside the guest.
    pub fn beside<R>(&mut self, body: impl FnOnce(&Running<Vm>) -> R) -> R {
        let devices = PlatformDevices::of(self.vm.config().arch, |_: &str| ());
        devices.restore(&self.devices).expect("its own state");
        let vcpus = vec![self.vcpu.take().expect("no finding so far")];
        let machine = Machine::new(Arc::clone(&self.vm), devices).expect("a thread");
        let guest = machine.start(vcpus);
        let done = body(&guest);
        assert!(!guest.wait_timeout(Duration::ZERO), "the guest has ended");
        guest.stop();
        self.vcpu = guest.into_vcpus().pop();
        self.vm.withdraw_kicks();
        self.place.host.verify();
        done
    }

    /// All of its memory.
    pub fn memory(&self) -> Vec<u8> {
        memory_of(&self.vm)
    }
}

/// All memory of a VM, slot after slot.
pub fn memory_of(vm: &Vm) -> Vec<u8> {
    let mut all = Vec::new();
    for slot in vm.memory_slots() {
        let start = all.len();
        all.resize(start + slot.gfns.pages() as usize * PAGE_SIZE, 0);
        let gpa = slot.gfns.start().gpa();
        vm.read(gpa, &mut all[start..]).expect("guest memory");
    }
    all
}
