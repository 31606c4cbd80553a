//! Devices of the VMM's own, beside a running guest.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use lacuna_addr::Gpa;
use lacuna_machine::{
    Access, Arch, Device, DeviceError, DeviceState, Ending, Line, Machine, Next, PlatformDevices,
    Vcpu as _, Width, dispatch,
};

use super::Outcome;
use super::interrupts::{
    HALT, HELD, HELD_PIN, LEVEL, READY, REPORT, WINDOW, entry, guest, line, x86_only,
};
use super::state::small;
use crate::backend::{Backend, Lacks, Made, Request};
use crate::moving::move_to;
use crate::program::{ASK_PORT, Code, DEVICE, REPORT_PORT, Reg, assemble, image};
use crate::running::within;

/// The device that stays.
const STEADY: u64 = DEVICE + 0x1000;
/// The value of every read of the device that comes and goes.
const HERE: u64 = 1;

/// Reads the word at [`DEVICE`] and writes it to [`STEADY`], for ever.
fn copies(arch: Arch) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, DEVICE);
        a.set(Reg::B, STEADY);
        let again = a.here();
        a.load(Width::Long, Reg::C, Reg::A, 0);
        a.store(Width::Long, Reg::B, 0, Reg::C);
        a.jump(again);
    })
}

/// Counts the guest's words, and ends the run.
#[derive(Default)]
struct Steady {
    here: AtomicU64,
    absent: AtomicU64,
    is_over: AtomicBool,
}

impl Device for Steady {
    fn read(&self, _: Access) -> u64 {
        0
    }

    fn write(&self, access: Access, value: u64) -> Option<Ending> {
        let counter = match value {
            HERE => &self.here,
            value if value == access.width.ones() => &self.absent,
            value => panic!("{value:#x}"),
        };
        counter.fetch_add(1, Ordering::SeqCst);
        self.is_over
            .load(Ordering::SeqCst)
            .then_some(Ending::Exited(0))
    }
}

/// Notices an access after its removal.
#[derive(Default)]
struct Comes(AtomicBool);

impl Device for Comes {
    fn read(&self, _: Access) -> u64 {
        assert!(!self.0.load(Ordering::SeqCst), "it was removed");
        HERE
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

/// Panics at an access.
struct Bad;

impl Device for Bad {
    fn read(&self, access: Access) -> u64 {
        panic!("vCPU {}", access.vcpu)
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

/// Two vCPUs with the program [`copies`], and the device [`Steady`].
fn with_steady<B: Backend>(backend: &B) -> Result<(Made<B>, PlatformDevices, Arc<Steady>), Lacks> {
    let request = Request {
        vcpus: 2,
        ..small()
    };
    let made = backend.make(&request, &image(&copies(backend.arch())))?;
    let (devices, steady) = (
        PlatformDevices::of(backend.arch(), |_: &str| ()),
        Arc::<Steady>::default(),
    );
    let added = devices.add_mmio("steady", Gpa::truncate(STEADY), 4, steady.clone());
    added.expect("free addresses");
    Ok((made, devices, steady))
}

/// After a removal, no access is in the device's code, and the guest reads ones.
pub fn devices_come_and_go_beside_a_guest<B: Backend>(backend: &B) -> Outcome {
    const TIMES: usize = 200;
    let backend = backend.clone();
    within(move || {
        let (Made { vm, vcpus, .. }, devices, steady) = with_steady(&backend)?;
        let devices = Arc::new(devices);
        let wait_for_more = |counter: &AtomicU64| {
            let before = counter.load(Ordering::SeqCst);
            // An access of before may still be on its way to the counter.
            while counter.load(Ordering::SeqCst) < before + 4 {
                assert_eq!(devices.ending(), None);
                thread::yield_now();
            }
        };
        let machine = Machine::new(vm, Arc::clone(&devices)).expect("threads");
        let running = machine.start(vcpus);
        for _ in 0..TIMES {
            let comes = Arc::<Comes>::default();
            let added = devices.add_mmio("it", Gpa::truncate(DEVICE), 4, comes.clone());
            added.expect("a free name");
            wait_for_more(&steady.here);
            devices.remove("it").expect("it was added");
            comes.0.store(true, Ordering::SeqCst);
            wait_for_more(&steady.absent);
        }
        steady.is_over.store(true, Ordering::SeqCst);
        assert_eq!(running.wait().ending, Ending::Exited(0));
        Ok(())
    })
}

/// The threads of all vCPUs end as usual, and the ending names the device.
pub fn a_panic_of_a_device_ends_the_run<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let (Made { vm, vcpus, .. }, devices, _) = with_steady(&backend)?;
        let devices = Arc::new(devices);
        let added = devices.add_mmio("bad", Gpa::truncate(DEVICE), 4, Arc::new(Bad));
        added.expect("free addresses");
        let machine = Machine::new(vm, Arc::clone(&devices)).expect("threads");
        let vcpus = machine.start(vcpus).into_vcpus();
        let numbers: Vec<_> = vcpus.iter().map(|vcpu| vcpu.index()).collect();
        assert_eq!(numbers, [0, 1]);
        match devices.ending() {
            Some(Ending::Device(DeviceError::Panicked { name, cause })) => {
                assert!(name == "bad" && cause.contains("vCPU"), "{name}: {cause}");
            }
            other => panic!("{other:?}"),
        }
        devices.remove("bad").expect("it is still there");
        Ok(())
    })
}

/// A device with the guest's two ports. It raises its line when the guest reports [`READY`], and
/// lowers it in the handler.
struct Scripted {
    commands: Arc<Mutex<VecDeque<u32>>>,
    line: Line,
    seen: Mutex<Vec<u32>>,
}

impl Scripted {
    /// With a line of `vm`, and alone beside its platform devices.
    fn beside<B: Backend>(
        vm: &Arc<B::Vm>,
        commands: &Arc<Mutex<VecDeque<u32>>>,
    ) -> (PlatformDevices, Arc<Self>) {
        let device = Arc::new(Self {
            commands: Arc::clone(commands),
            line: line::<B>(vm, HELD_PIN),
            seen: Mutex::default(),
        });
        let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
        let added = devices.add_ports("scripted", ASK_PORT..=REPORT_PORT + 3, device.clone());
        added.expect("free ports");
        (devices, device)
    }

    fn seen(&self) -> Vec<u32> {
        let seen = self.seen.lock().expect("no panic under this lock");
        seen.clone()
    }

    /// What the guest does: the line interrupts its halt, and then its loop.
    fn commands() -> Arc<Mutex<VecDeque<u32>>> {
        let program = entry(HELD_PIN, u64::from(HELD) | LEVEL);
        let commands = [program.to_vec(), vec![REPORT, HALT, REPORT, WINDOW]].concat();
        Arc::new(Mutex::new(commands.into()))
    }

    /// The line follows the last report.
    fn set_line(&self, seen: &[u32]) {
        match seen.last() {
            Some(&READY) => self.line.raise(),
            _ => self.line.lower(),
        }
    }
}

impl Device for Scripted {
    fn read(&self, _: Access) -> u64 {
        let mut commands = self.commands.lock().expect("no panic under this lock");
        commands.pop_front().expect("a command").into()
    }

    fn write(&self, _: Access, value: u64) -> Option<Ending> {
        let mut seen = self.seen.lock().expect("no panic under this lock");
        seen.push(value as u32);
        seen.dedup();
        self.set_line(&seen);
        (seen.len() == 4).then_some(Ending::Exited(0))
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Vec<u8> {
        let seen = self.seen();
        seen.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        let (words, _) = state.bytes.as_chunks();
        let words: Vec<_> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        self.set_line(&words);
        *self.seen.lock().expect("no panic under this lock") = words;
        Ok(())
    }
}

/// Runs the vCPU until the run is over, or `is_over`.
fn run_until<B: Backend>(
    made: &mut Made<B>,
    devices: &PlatformDevices,
    is_over: impl Fn() -> bool,
) {
    while !is_over() {
        let vcpu = &mut made.vcpus[0];
        let exit = vcpu.run();
        if dispatch(vcpu, exit, devices, &*made.vm) == Next::Stop {
            break;
        }
    }
}

/// A device interrupts from the thread of the vCPU that accesses it.
pub fn a_device_interrupts_from_its_write<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let mut made = backend.make(&small(), &image(&guest()))?;
        let (devices, device) = Scripted::beside::<B>(&made.vm, &Scripted::commands());
        run_until(&mut made, &devices, || false);
        assert_eq!(devices.ending(), Some(Ending::Exited(0)));
        assert_eq!(device.seen(), [READY, HELD, READY, HELD]);
        Ok(())
    })
}

/// A device moves with its state, while its line is high.
pub fn a_device_moves_with_its_line<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || device_moves(&backend, &backend, &small()))
}

pub(super) fn device_moves<A: Backend, B: Backend>(
    first: &A,
    second: &B,
    request: &Request,
) -> Outcome {
    let commands = Scripted::commands();
    let mut made = first.make(request, &image(&guest()))?;
    let (devices, device) = Scripted::beside::<A>(&made.vm, &commands);
    run_until(&mut made, &devices, || !device.seen().is_empty());
    let mut made = move_to(second, request, made, &devices)?;
    let state = devices.pause().and_then(|paused| paused.save());
    let state = state.expect("a device that is saved");

    let lacks = PlatformDevices::of(Arch::X86_64, |_: &str| ());
    let refused = lacks.restore(&state).expect_err("it lacks the device");
    assert_eq!(refused, DeviceError::Missing("scripted".to_owned()));
    let (devices, device) = Scripted::beside::<B>(&made.vm, &commands);
    devices.restore(&state).expect("its own state");
    devices.resume();
    run_until(&mut made, &devices, || false);
    assert_eq!(devices.ending(), Some(Ending::Exited(0)));
    assert_eq!(device.seen(), [READY, HELD, READY, HELD]);
    Ok(())
}
