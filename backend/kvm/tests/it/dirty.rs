//! Full rings, the log in two steps, and refusals. `check/conformance` tests that no mode misses a
//! write.

use crate::common;

use common::{builder, can_run, image, within};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_guest::status::{Kind, PAGE_BYTES, PAUSED_AT, Status};
use lacuna_kvm::{
    Backup, Delivery, DirtyError, KvmError, LinuxBacking, Logging, RingSize, SharedFill,
    SharedMemory, SlotId, Tracker, Vm, VmBuilder,
};
use lacuna_machine::{
    Builder as _, DirtyRings as _, DirtyTracking as _, Ending, GuestMemory as _, MemoryError, Next,
    PlatformDevices, SlotError, TwoStepLog as _, Vcpu, Vm as _, dispatch, set_logging_everywhere,
};
use lacuna_skip::test;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Each of these guests ends by itself; some kernels take minutes where others take seconds.
const HANG_SECONDS: u64 = 900;

fn ring(bytes: usize, backup: Backup) -> Delivery {
    let size = RingSize::from_bytes(bytes).unwrap();
    Delivery::Ring { size, backup }
}

/// If KVM emulates the guest's kernel, each of that kernel's stores makes an entry.
const LARGE: usize = RingSize::BYTES_MAX;

/// Whether this host's kernel supports `delivery`; if not, the test is recorded as skipped.
fn has(delivery: Delivery) -> bool {
    let mut builder = builder(16, 16, 1, "");
    builder.delivery = delivery;
    match builder.start(&image("hello"), PlatformDevices::new(|_: &str| ())) {
        Ok(_) => true,
        Err(why @ (KvmError::NoRing | KvmError::Ring { .. } | KvmError::Userfaultfd { .. })) => {
            lacuna_skip::skip(why);
            false
        }
        Err(why) => panic!("{why}"),
    }
}

/// A running guest.
struct Running<'a> {
    vm: &'a Vm,
    devices: &'a PlatformDevices,
    /// The number of vCPUs that have not ended.
    vcpus: &'a AtomicUsize,
}

impl Running<'_> {
    /// Whether all vCPUs have ended, so that none writes again.
    fn is_over(&self) -> bool {
        self.vcpus.load(Ordering::Acquire) == 0
    }

    fn status(&self) -> Option<Status> {
        let mut bytes = [0; PAGE_BYTES];
        self.vm
            .read(self.devices.status_page()?.gpa(), &mut bytes)
            .unwrap();
        Status::parse(&bytes).ok()
    }

    /// Pauses the processes of these kinds, or lets them run again.
    fn pause(&self, mask: u32) {
        let page = self.devices.status_page().unwrap().gpa();
        let at = page.checked_add(PAUSED_AT as u64).unwrap();
        self.vm.write(at, &mask.to_le_bytes()).unwrap();
    }

    /// Waits until the guest's processes are prepared: a booting kernel writes the same pages again
    /// and again.
    fn prepared(&self) {
        let is_prepared = |status: Status| status.threads.first().is_some_and(|t| t.counter > 0);
        while !self.is_over() && !self.status().is_some_and(is_prepared) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs one vCPU on this thread. Workers are paused as soon as the status page exists, so they
    /// do nothing until the monitor is ready.
    fn drive(&self, mut vcpu: impl Vcpu) {
        let mut paused = false;
        while self.devices.ending().is_none() {
            let exit = vcpu.run();
            if dispatch(&mut vcpu, exit, self.devices, self.vm) == Next::Stop {
                break;
            }
            if vcpu.index() == 0 && !paused && self.devices.status_page().is_some() {
                self.pause(Kind::Worker.paused_bit());
                paused = true;
            }
        }
        self.vcpus.fetch_sub(1, Ordering::Release);
    }
}

/// Runs `name` to success beside `monitor`, which must continue until the guest has ended.
fn beside<T: Send + 'static>(
    builder: &VmBuilder,
    name: &'static str,
    monitor: impl FnOnce(&Running<'_>) -> T + Send + 'static,
) -> T {
    let builder = builder.clone();
    within(HANG_SECONDS, move || {
        let vm = builder.build().unwrap();
        let vcpus = vm.boot(&image(name), &builder.full_command_line()).unwrap();
        let (sink, lines) = mpsc::channel();
        let devices = PlatformDevices::new(move |line: &str| drop(sink.send(line.to_owned())));
        let running = Running {
            vm: &vm,
            devices: &devices,
            vcpus: &AtomicUsize::new(vcpus.len()),
        };
        let found = thread::scope(|scope| {
            for vcpu in vcpus {
                scope.spawn(|| running.drive(vcpu));
            }
            // If the monitor panics, the guest must not be left running.
            let found = panic::catch_unwind(AssertUnwindSafe(|| monitor(&running)));
            devices.end(Ending::Stopped, &*vm);
            found.unwrap_or_else(|why| panic::resume_unwind(why))
        });
        let lines: Vec<String> = lines.try_iter().collect();
        let ending = devices.ending();
        let lines = lines.join("\n");
        assert!(
            matches!(ending, Some(Ending::Exited(0))),
            "{ending:?}\n{lines}"
        );
        found
    })
}

#[test]
fn a_full_ring_stops_the_vcpu_until_it_is_reset() {
    let delivery = ring(RingSize::BYTES_MIN, Backup::Bitmap);
    if !can_run() || !has(delivery) {
        return;
    }
    let mut builder = builder(32, 32, 1, "transactions=3000000 cold=3000 tick_us=20000");
    builder.delivery = delivery;
    beside(&builder, "churn", |guest| {
        guest.prepared();
        let vm = guest.vm;
        set_logging_everywhere(vm, Logging::LAZY).unwrap();
        let rings = vm.dirty_rings().unwrap();
        guest.pause(0);
        let mut collected = 0;
        while collected < 960 && !guest.is_over() {
            thread::sleep(Duration::from_millis(1));
            collected += rings.reap_rings(&mut |_, _| ()).unwrap();
        }
        // The vCPU runs only until it enters KVM again. With room in its ring it would run to its
        // end.
        let count = || guest.status().unwrap().threads[1].counter;
        let mut full = 0;
        while full != count() {
            full = count();
            thread::sleep(Duration::from_millis(300));
        }
        assert!(!guest.is_over(), "{full} transactions");
        set_logging_everywhere(vm, Logging::Off).unwrap();
        // A panic of the VMM's code loses no page and breaks no other call.
        let panics = || rings.reap_rings(&mut |_, _| panic!("the VMM's own"));
        let _ = panic::catch_unwind(AssertUnwindSafe(panics));
        rings.reap_rings(&mut |_, _| ()).unwrap();
        assert!(rings.reset_rings().unwrap() >= 960);
        // With room in the ring it runs to its end.
        while !guest.is_over() {
            thread::sleep(Duration::from_millis(10));
        }
    });
}

#[test]
fn the_bitmap_is_read_and_cleared_in_two_steps_by_whole_words() {
    if !can_run() {
        return;
    }
    let vm = builder(16, 16, 1, "").build().unwrap();
    let (id, mut words) = (SlotId(0), vec![0; 64]);
    assert_eq!(
        vm.get_dirty(id, &mut words),
        Err(DirtyError::NotLogging(id))
    );
    vm.set_logging(id, Logging::LAZY).unwrap();
    for page in [0, 70, 4095] {
        vm.write(Gpa::truncate(page * PAGE_SIZE as u64), &[1])
            .unwrap();
    }
    for _ in 0..2 {
        vm.peek_dirty(id, &mut words).unwrap();
        assert_eq!((words[0], words[1], words[63]), (1, 1 << 6, 1 << 63));
    }
    vm.clear_dirty(id, 64, 64, &mut words[1..2]).unwrap();
    vm.peek_dirty(id, &mut words).unwrap();
    assert_eq!((words[0], words[1], words[63]), (1, 0, 1 << 63));
    let clear = |first, pages| vm.clear_dirty(id, first, pages, &mut [1]).unwrap_err();
    assert!(matches!(clear(1, 64), DirtyError::Clear(_)));
    assert!(matches!(clear(4096, 64), DirtyError::Clear(_)));
    vm.get_dirty(id, &mut words).unwrap();
    assert_eq!((words[0], words[1], words[63]), (1, 0, 1 << 63));
    let none = vm.get_dirty(SlotId(9), &mut words);
    assert_eq!(
        none,
        Err(DirtyError::Slot(SlotError::Unknown { id: SlotId(9) }))
    );
    let short = vm.get_dirty(id, &mut words[1..]).unwrap_err();
    assert!(
        short.to_string().contains("64 words of dirty bits, not 63"),
        "{short}"
    );
}

#[test]
fn impossible_requests_are_refused_with_a_reason() {
    if !can_run() {
        return;
    }
    let mut builder = builder(16, 8, 1, "");
    builder.tracker = Tracker::Pagemap;
    let partly = builder.build().map(drop).unwrap_err();
    assert!(matches!(partly, KvmError::PartlyResident), "{partly}");
    // Linux may swap pages of the VMM's own file too.
    let memory = SharedMemory::new(builder.memory, SharedFill::CopiedIn).unwrap();
    builder.backing = Some(LinuxBacking::Shared(memory));
    let shared = builder.build().map(drop).unwrap_err();
    assert!(matches!(shared, KvmError::PartlyResident), "{shared}");
    builder.backing = None;
    builder.tracker = Tracker::Kvm;
    builder.delivery = ring(LARGE, Backup::None);
    if has(builder.delivery) {
        let vm = builder.build().unwrap();
        let (id, mut words) = (SlotId(0), vec![0; 64]);
        vm.set_logging(id, Logging::LAZY).unwrap();
        assert_eq!(vm.get_dirty(id, &mut words), Err(DirtyError::NoBitmap));
        assert_eq!(vm.peek_dirty(id, &mut words), Err(DirtyError::NoBitmap));
        assert_eq!(vm.reap_rings(&mut |_, _| ()), Ok(0));
        let write = vm.write(Gpa::truncate(0x1000), &[1]);
        assert!(
            matches!(write, Err(MemoryError::Refused { .. })),
            "{write:?}"
        );
    }
}
