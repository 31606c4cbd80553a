//! Runs guests as a VMM does, on both backends.

use lacuna::boot::Segment;
use lacuna::device::Access;
use lacuna::state::StateError;
use lacuna::{
    Arch, BackendError, Builder, Device, Ending, ErrorKind, Gpa, HostClock, Image, Machine,
    PageCount, PlatformDevices, Vcpu as _, VcpuError, Vm, kvm, memory, soft,
};
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// Longer than any run here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub const SIZE: PageCount = PageCount::from_bytes(16 << 20);

/// A guest of `code`.
pub fn image(code: &[u8]) -> Image<'_> {
    let start = Gpa::truncate(1 << 20);
    Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: start,
            bytes: code,
            size: code.len() as u64,
        }],
        entry: start,
    }
}

/// A guest that never ends: a jump to itself.
pub const ENDLESS: &[u8] = &[0xeb, 0xfe];

fn a_panic_of_the_vmm_arrives<B: Builder + Send + 'static>(builder: B) {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let run = || {
            let running = builder.start(&image(ENDLESS), PlatformDevices::new(|_: &str| ()));
            let running = running.expect("it starts");
            assert!(running.wait_timeout(Duration::ZERO), "the VMM panics");
        };
        let _ = sender.send(catch_unwind(AssertUnwindSafe(run)).is_err());
    });
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(true));
}

#[test]
fn a_panic_of_the_vmm_ends_the_guest() {
    a_panic_of_the_vmm_arrives(soft::VmBuilder::new(SIZE, SIZE));
    if kvm::available().is_ok() {
        a_panic_of_the_vmm_arrives(kvm::VmBuilder::new(SIZE, SIZE));
    }
}

/// An event loop can wait for the end of a guest.
#[test]
fn the_end_of_a_guest_is_the_end_of_a_file() {
    let builder = soft::VmBuilder::new(SIZE, SIZE);
    let running = builder.start(&image(ENDLESS), PlatformDevices::new(|_: &str| ()));
    let running = running.expect("it starts");
    let end = running.as_fd().try_clone_to_owned().expect("a descriptor");
    let waiting = std::thread::spawn(move || File::from(end).read(&mut [0]));
    running.stop();
    assert_eq!(waiting.join().expect("no panic").expect("no error"), 0);
    assert_eq!(running.wait().ending, Ending::Stopped);
}

/// `out 0xf4, eax` with 7 in EAX.
const EXITS_WITH_SEVEN: &[u8] = &[0xb8, 7, 0, 0, 0, 0xe7, 0xf4, 0xf4];

fn ends_with_seven<B: Builder>(builder: &B) {
    let devices = PlatformDevices::new(|_: &str| ());
    let running = builder.start(&image(EXITS_WITH_SEVEN), devices);
    let end = running.expect("it starts").wait();
    assert_eq!(end.ending, Ending::Exited(7), "{end:?} of {:?}", end.vm);
    assert_eq!(end.ending.to_string(), "the guest exited with code 7");
}

#[test]
fn the_guest_ends_the_run_with_its_code() {
    ends_with_seven(&soft::VmBuilder::new(SIZE, SIZE));
    if kvm::available().is_ok() {
        ends_with_seven(&kvm::VmBuilder::new(SIZE, SIZE));
    }
}

fn refuses<B: Builder>(builder: &B) {
    let error = builder.build().expect_err("there is no such VM");
    assert_eq!(
        error.kind(),
        ErrorKind::Request,
        "{:?} {error}",
        <B::Vm as Vm>::BACKEND
    );
}

#[test]
fn a_guest_without_memory_is_refused_as_a_bad_request() {
    let none = PageCount::new(0);
    refuses(&soft::VmBuilder::new(none, SIZE));
    if kvm::available().is_ok() {
        refuses(&kvm::VmBuilder::new(none, SIZE));
    }
}

/// Numbers beyond every host, which overflow when they are added or multiplied.
#[test]
fn numbers_that_no_host_has_are_refused_as_bad_requests() {
    for vcpus in [0, lacuna::VCPUS_MAX + 1, usize::MAX / 8, usize::MAX] {
        let mut builder = soft::VmBuilder::new(SIZE, SIZE);
        builder.vcpus = vcpus;
        refuses(&builder);
        if kvm::available().is_ok() {
            let mut builder = kvm::VmBuilder::new(SIZE, SIZE);
            builder.vcpus = vcpus;
            refuses(&builder);
        }
    }
    for pages in [1, 1 << 51, u64::MAX / 2 + 1, u64::MAX] {
        let odd = PageCount::new(pages);
        refuses(&soft::VmBuilder::new(odd, SIZE));
        if kvm::available().is_ok() {
            refuses(&kvm::VmBuilder::new(odd, SIZE));
        }
    }
    refuses(&soft::VmBuilder::new(SIZE, PageCount::new(0)));
    refuses(&soft::VmBuilder::new(SIZE, PageCount::new(u64::MAX)));
    let odd = soft::VmBuilder::new(PageCount::new(u64::MAX), SIZE);
    assert!(
        odd.host(Arc::new(HostClock::default())).is_ok(),
        "swap that grows"
    );
    assert_eq!(memory::Host::minimum_budget(usize::MAX).get(), u64::MAX);
}

fn is_held_and_dropped<B: Builder>(builder: &B) {
    let devices = Arc::new(PlatformDevices::new(|_: &str| ()));
    let running = builder.start(&image(ENDLESS), Arc::clone(&devices));
    let running = running.expect("it starts");
    let vm = Arc::downgrade(running.vm());
    let mut paused = running.pause().expect("it runs");
    assert_eq!(paused.vcpus().len(), 1);
    drop(paused);
    assert!(!running.wait_timeout(Duration::from_millis(1)));
    assert_eq!(devices.ending(), None);
    drop(running);
    assert_eq!(devices.ending(), Some(Ending::Stopped));
    assert!(vm.upgrade().is_none(), "no thread has it");
}

/// The VMM has no loop for its guest: it holds a value, and drops it.
#[test]
fn a_dropped_guest_ends() {
    is_held_and_dropped(&soft::VmBuilder::new(SIZE, SIZE));
    if kvm::available().is_ok() {
        is_held_and_dropped(&kvm::VmBuilder::new(SIZE, SIZE));
    }
}

/// A destination drops its machine if no guest arrives, and uses its devices again.
#[test]
fn a_machine_that_is_not_started_does_not_end_its_devices() {
    let devices = Arc::new(PlatformDevices::new(|_: &str| ()));
    let builder = soft::VmBuilder::new(SIZE, SIZE);
    let vm = builder.build().expect("a VM");
    let machine = Machine::new(Arc::clone(&vm), Arc::clone(&devices)).expect("threads");
    drop(machine);
    assert_eq!((Arc::strong_count(&vm), devices.ending()), (1, None));
    let running = builder.start(&image(EXITS_WITH_SEVEN), devices);
    assert_eq!(running.expect("it starts").wait().ending, Ending::Exited(7));
}

/// Writes an empty line to the serial line, and never ends.
const PRINTS: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, 0x0a, 0xee, 0xeb, 0xfe];

/// A panic on a vCPU's thread ends the guest, and is the waiting thread's.
#[test]
fn a_panic_of_the_console_arrives() {
    let devices = PlatformDevices::new(|_: &str| panic!("the console panics"));
    let mut builder = soft::VmBuilder::new(SIZE, SIZE);
    builder.vcpus = 2;
    let running = builder.start(&image(PRINTS), devices).expect("it starts");
    assert!(catch_unwind(AssertUnwindSafe(|| running.wait())).is_err());
}

/// Devices of an ended run do not run another guest.
#[test]
fn devices_of_an_earlier_run_end_a_run_at_once() {
    let devices = Arc::new(PlatformDevices::new(|_: &str| ()));
    let builder = soft::VmBuilder::new(SIZE, SIZE);
    for _ in 0..2 {
        let code = image(EXITS_WITH_SEVEN);
        let running = builder.start(&code, Arc::clone(&devices));
        assert_eq!(running.expect("it starts").wait().ending, Ending::Exited(7));
    }
    let running = builder.start(&image(ENDLESS), devices);
    assert_eq!(running.expect("it starts").wait().ending, Ending::Exited(7));
}

/// Halts with interrupts on, after it has armed a timer in the APIC's page.
const WAITS_FOR_ITS_TIMER: &[u8] = &[
    0xbb, 0x00, 0x00, 0xe0, 0xfe, // mov ebx, 0xfee00000
    0xc7, 0x83, 0xf0, 0, 0, 0, 0xff, 1, 0, 0, // mov dword [rbx + 0xf0], 0x1ff: SVR
    0xc7, 0x83, 0x20, 3, 0, 0, 0x30, 0, 0,
    0, // mov dword [rbx + 0x320], 0x30: the timer's vector
    0xc7, 0x83, 0x80, 3, 0, 0, 0x40, 0, 0, 0,    // mov dword [rbx + 0x380], 0x40: its count
    0xfb, // sti
    0xf4, // hlt
    0xeb, 0xfe, // jmp to itself
];

/// A VMM's own loop cannot move the time of a VM with a seed: its guest would wait for ever.
#[test]
fn a_vm_with_a_seed_does_not_wait_for_time_in_another_loop() {
    let mut builder = soft::VmBuilder::new(SIZE, SIZE);
    builder.seed = Some(1);
    let vm = builder.build().expect("room for it");
    let mut vcpus = vm.boot(&image(WAITS_FOR_ITS_TIMER), "").expect("it fits");
    let error = vcpus[0].run().expect_err("its time is stopped");
    assert_eq!(error, VcpuError::TimeStandsStill { vcpu: 0 });
    assert_eq!(error.kind(), ErrorKind::Request, "{error}");
}

/// A device that no guest of these tests may reach.
struct Unreachable;

impl Device for Unreachable {
    fn read(&self, access: Access) -> u64 {
        panic!("a read: {access:?}")
    }

    fn write(&self, access: Access, _: u64) -> Option<Ending> {
        panic!("a write: {access:?}")
    }
}

/// The last page of the guest's memory belongs to the device too.
fn over_memory() -> PlatformDevices {
    let devices = PlatformDevices::new(|_: &str| ());
    let last = Gpa::truncate(SIZE.bytes() - 0x1000);
    let added = devices.add_mmio("unreachable", last, 0x2000, Arc::new(Unreachable));
    added.expect("the VM is not known yet");
    devices
}

fn refuses_over_memory<T, E: BackendError>(run: Result<T, E>) {
    let error = run.err().expect("the guest's memory would hide the device");
    assert_eq!(error.kind(), ErrorKind::Request, "{error}");
    let text = error.to_string();
    assert!(text.contains("overlaps the guest's memory"), "{text}");
}

#[test]
fn a_device_over_memory_is_refused_before_the_guest_runs() {
    let code = image(EXITS_WITH_SEVEN);
    refuses_over_memory(soft::VmBuilder::new(SIZE, SIZE).start(&code, over_memory()));
    let mut seeded = soft::VmBuilder::new(SIZE, SIZE);
    seeded.seed = Some(1);
    let devices = Arc::new(over_memory());
    refuses_over_memory(seeded.run_seeded(&code, devices, &mut |_, _| ()));
    if kvm::available().is_ok() {
        refuses_over_memory(kvm::VmBuilder::new(SIZE, SIZE).start(&code, over_memory()));
    }
}

/// A vCPU's state that the other backend does not take over: the message says what to do.
#[test]
fn a_refused_processor_is_named_with_a_remedy() {
    let (field, bits) = ("features.pcid", 1 << 17);
    let feature = StateError::Feature { field, bits };
    let (field, value) = ("tsc.khz", 1_000_000);
    let frequency = StateError::Unsupported { field, value };
    for error in [feature, frequency] {
        let text = error.to_string();
        assert!(text.contains("start a guest that will move"), "{text}");
        assert!(text.contains("`CpuModel::Common`"), "{text}");
    }
}
