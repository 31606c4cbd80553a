//! A VM used from inside its own devices, and two VMs that share a device or a memory file.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{
    Access, Arch, Device, DeviceError, DirtyError, Ending, GuestMemory as _, LogReader, Machine,
    PlatformDevices, Running, SlotFlags, SlotId, Vm, Width,
};
use lacuna_soft::{LinuxBacking, SharedFill, SharedMemory};

use super::Outcome;
use super::state::small;
use crate::backend::{Backend, Lacks, Made, Request, Tracking};
use crate::program::{Code, DEVICE, Reg, assemble, gpa, image, ram};
use crate::running::within;

/// The accesses of the device before a test ends the guest.
const ACCESSES: u64 = 200;
/// A page-aligned offset in memory that [`asks`] does not use.
const DATA: u64 = 5 << 20;
/// The address of the slots that the device adds.
const ADDED: u64 = 0x9000_0000;
const PAGE: u64 = PAGE_SIZE as u64;

/// Reads the device, and adds one to the word at `count`, for ever.
fn asks(arch: Arch, count: u64) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, DEVICE);
        a.set(Reg::B, ram(arch, count));
        let again = a.here();
        a.load(Width::Long, Reg::C, Reg::A, 0);
        a.load(Width::Long, Reg::C, Reg::B, 0);
        a.add_immediate(Reg::C, 1);
        a.store(Width::Long, Reg::B, 0, Reg::C);
        a.jump(again);
    })
}

/// A VM about to run [`asks`] with this device.
struct Guest<B: Backend> {
    made: Made<B>,
    devices: PlatformDevices,
}

impl<B: Backend> Guest<B> {
    fn new(backend: &B, request: &Request, count: u64) -> Result<Self, Lacks> {
        let code = asks(backend.arch(), count);
        Ok(Self {
            made: backend.make(request, &image(&code))?,
            devices: PlatformDevices::of(backend.arch(), |_: &str| ()),
        })
    }

    fn start(self, device: Arc<dyn Device>) -> Running<B::Vm> {
        let added = self
            .devices
            .add_mmio("it", Gpa::truncate(DEVICE), 4, device);
        added.expect("free addresses");
        let machine = Machine::new(self.made.vm, self.devices).expect("threads");
        machine.start(self.made.vcpus)
    }
}

/// Calls its VM at each access.
struct Caller<V> {
    vm: Arc<V>,
    arch: Arch,
    /// Accesses of each vCPU.
    accesses: [AtomicU64; 2],
    /// Harvests that had the call's page.
    taken: AtomicU64,
}

impl<V: Vm> Caller<V> {
    fn call(&self, vcpu: u64) {
        let vm = &*self.vm;
        let mut reader = LogReader::begin(vm).expect("any number");
        let at = gpa(self.arch, DATA + vcpu * PAGE);
        vm.write(at, &[1]).expect("guest memory");
        vm.kick_all();
        let gpa = Gpa::truncate(ADDED + vcpu * PAGE);
        let id = SlotId(10 + vcpu as u16);
        let gfns = GfnRange::new(gpa.gfn(), 1).expect("a page");
        vm.add_memory(id, gfns, SlotFlags::empty())
            .expect("a free place");
        vm.write(gpa, &[2]).expect("the new slot");
        vm.remove_slot(id).expect("the new slot");
        let mut has_page = false;
        match reader.harvest(|_, page| has_page |= page as u64 == DATA / PAGE + vcpu) {
            Ok(_) => {
                assert!(has_page, "vCPU {vcpu}");
                self.taken.fetch_add(1, Ordering::Relaxed);
            }
            // The other vCPU's call has begun a later reader, which gets the pages.
            Err(refused) => assert_eq!(refused, DirtyError::InUse),
        }
    }
}

impl<V: Vm> Device for Caller<V> {
    fn read(&self, access: Access) -> u64 {
        self.call(access.vcpu as u64);
        self.accesses[access.vcpu].fetch_add(1, Ordering::Relaxed);
        0
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

fn wait_for<V: Vm>(running: &Running<V>, accesses: &AtomicU64) {
    while accesses.load(Ordering::Relaxed) < ACCESSES {
        assert_eq!(running.devices().ending(), None);
        thread::sleep(Duration::from_millis(1));
    }
}

/// A device calls its VM as any thread beside the guest may: memory, slots, the log, kicks.
pub fn a_device_calls_its_vm<B: Backend>(backend: &B) -> Outcome {
    calls_its_vm(backend, Tracking::Bitmap)
}

/// The same, where each vCPU has a dirty ring.
pub fn a_device_calls_its_vm_beside_rings<B: Backend>(backend: &B) -> Outcome {
    calls_its_vm(backend, Tracking::Ring)
}

fn calls_its_vm<B: Backend>(backend: &B, tracking: Tracking) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            vcpus: 2,
            tracking,
            ..small()
        };
        let guest = Guest::new(&backend, &request, 0)?;
        let device = Arc::new(Caller {
            vm: Arc::clone(&guest.made.vm),
            arch: backend.arch(),
            accesses: Default::default(),
            taken: AtomicU64::new(0),
        });
        let running = guest.start(Arc::clone(&device) as _);
        // An AArch64 guest would have to switch the second vCPU on.
        let vcpus = if backend.arch() == Arch::Arm64 { 1 } else { 2 };
        for accesses in &device.accesses[..vcpus] {
            wait_for(&running, accesses);
        }
        running.stop();
        assert_eq!(running.wait().ending, Ending::Stopped);
        // No later reader has taken the pages of the last one.
        assert!(device.taken.load(Ordering::Relaxed) > 0);
        Ok(())
    })
}

/// Pauses its own guest.
struct Pauses<V: Vm>(OnceLock<Arc<Running<V>>>);

impl<V: Vm> Device for Pauses<V> {
    fn read(&self, _: Access) -> u64 {
        self.0
            .get()
            .is_some_and(|running| running.pause().is_some())
            .into()
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

/// A pause would wait for the vCPU whose access the device answers. The run ends instead, with the
/// device's name.
pub fn a_device_may_not_pause_its_guest<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let device = Arc::new(Pauses::<B::Vm>(OnceLock::new()));
        let guest = Guest::new(&backend, &small(), 0)?;
        let running = Arc::new(guest.start(Arc::clone(&device) as _));
        assert!(device.0.set(Arc::clone(&running)).is_ok());
        while !running.wait_timeout(Duration::from_secs(1)) {}
        match running.devices().ending() {
            Some(Ending::Device(DeviceError::Panicked { name, cause })) => {
                assert!(name == "it" && cause.contains("pause"), "{name}: {cause}");
            }
            other => panic!("{other:?}"),
        }
        // The device has the guest, and the guest has the device.
        running.devices().remove("it").expect("it is still there");
        Ok(())
    })
}

/// Drops its own guest.
struct Drops<V: Vm>(Mutex<Option<Running<V>>>);

impl<V: Vm> Device for Drops<V> {
    fn read(&self, _: Access) -> u64 {
        drop(self.0.lock().expect("no panic under this lock").take());
        0
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

/// The drop ends the guest, and does not wait for the thread that it is on.
pub fn a_device_drops_its_guest<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let device = Arc::new(Drops::<B::Vm>(Mutex::new(None)));
        let guest = Guest::new(&backend, &small(), 0)?;
        let running = guest.start(Arc::clone(&device) as _);
        let devices = Arc::clone(running.devices());
        *device.0.lock().expect("no panic under this lock") = Some(running);
        while devices.ending().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(devices.ending(), Some(Ending::Stopped));
        Ok(())
    })
}

/// Counts its accesses by any guest.
#[derive(Default)]
struct Counter(AtomicU64);

impl Device for Counter {
    fn read(&self, _: Access) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

/// Two VMs have one memory file and one device. Each sees the other's writes, also after the other
/// has ended.
pub fn vms_share_a_memory_file_and_a_device<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let arch = backend.arch();
        let pages = PageCount::from_bytes(16 << 20);
        let memory = SharedMemory::new(pages, SharedFill::CopiedIn).expect("a memory file");
        let own = || memory.file().try_clone_to_owned().expect("a descriptor");
        let started = |count: u64, device: &Arc<Counter>| {
            let shared = SharedMemory::of_file(own(), 0, SharedFill::CopiedIn);
            let request = Request {
                backing: Some(LinuxBacking::Shared(shared.expect("a file"))),
                ..small()
            };
            let guest = Guest::new(&backend, &request, count)?;
            Ok::<_, Lacks>(guest.start(Arc::clone(device) as _))
        };
        let device = Arc::<Counter>::default();
        let one = started(DATA, &device)?;
        // The image of the other VM replaces this one's. Only their loops are the same.
        while device.0.load(Ordering::Relaxed) == 0 {
            assert_eq!(one.devices().ending(), None);
            thread::yield_now();
        }
        let other = started(DATA + PAGE, &device)?;
        let word = |running: &Running<B::Vm>, at| {
            let mut word = [0; 4];
            let read = running.vm().read(gpa(arch, at), &mut word);
            read.expect("guest memory");
            u32::from_le_bytes(word)
        };
        wait_for(&one, &device.0);
        while word(&one, DATA + PAGE) == 0 || word(&other, DATA) == 0 {
            assert_eq!(one.devices().ending(), None);
            assert_eq!(other.devices().ending(), None);
            thread::yield_now();
        }
        drop(one);
        let (last, first) = (word(&other, DATA), word(&other, DATA + PAGE));
        while word(&other, DATA + PAGE) == first {
            assert_eq!(other.devices().ending(), None);
        }
        assert_eq!(word(&other, DATA), last, "its guest has ended");
        drop(other);
        let shared = File::from(own());
        let mut bytes = [0; 4];
        let read = std::os::unix::fs::FileExt::read_exact_at(&shared, &mut bytes, DATA);
        read.expect("the file");
        assert_eq!(u32::from_le_bytes(bytes), last);
        Ok(())
    })
}
