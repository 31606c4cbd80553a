//! A guest moves from one VM to another: its vCPUs stop, and their states and the memory are
//! copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{
    Exit, GuestMemory, Kick as _, MemorySlot, MemorySlots, Next, PlatformDevices, SaveRestore,
    SharedState, StateError, Vcpu as _, VcpuState, Vm as _, dispatch,
};

use crate::backend::{Backend, Lacks, Made, Request, VcpuOf};

/// The time between two looks whether a run has ended.
const LOOK: Duration = Duration::from_millis(1);

/// Runs the vCPUs for `time`, or until the guest ends.
pub fn run_for<B: Backend>(made: &mut Made<B>, devices: &PlatformDevices, time: Duration) {
    let stop = AtomicBool::new(false);
    let vm = &*made.vm;
    let began = Instant::now();
    let drive = |vcpu: &mut VcpuOf<B>| {
        while devices.ending().is_none() {
            let exit = vcpu.run();
            let stopped = matches!(exit, Ok(Exit::Interrupted)) && stop.load(Ordering::Acquire);
            if stopped || dispatch(vcpu, exit, devices, vm) == Next::Stop {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let drive = &drive;
        let threads: Vec<_> = (made.vcpus.iter_mut())
            .map(|vcpu| scope.spawn(move || drive(vcpu)))
            .collect();
        let all_ended = || threads.iter().all(thread::ScopedJoinHandle::is_finished);
        while began.elapsed() < time && !all_ended() {
            thread::sleep(LOOK);
        }
        stop.store(true, Ordering::Release);
        while !all_ended() {
            vm.kick_all();
            thread::sleep(LOOK);
        }
    });
}

/// The states of all stopped vCPUs. A vCPU in the middle of an instruction completes it first.
///
/// # Panics
/// If one is not saved.
pub fn save<B: Backend>(made: &mut Made<B>, devices: &PlatformDevices) -> Vec<VcpuState> {
    let vm = &*made.vm;
    let save = |vcpu: &mut VcpuOf<B>| {
        loop {
            match vcpu.save() {
                Ok(state) => return state,
                Err(StateError::MidInstruction { vcpu: index }) => {
                    vm.kick(index);
                    let exit = vcpu.run();
                    let _ = dispatch(vcpu, exit, devices, vm);
                }
                Err(refused) => panic!("vCPU {}: {refused}", vcpu.index()),
            }
        }
    };
    made.vcpus.iter_mut().map(save).collect()
}

/// Copies all memory of `from` to `to`, which has the same slots.
pub fn copy_memory(from: &(impl GuestMemory + MemorySlots), to: &impl GuestMemory) {
    let mut page = [0; PAGE_SIZE];
    for MemorySlot { gfns, .. } in from.memory_slots() {
        for offset in 0..gfns.pages() {
            let gfn = gfns
                .start()
                .checked_add(offset)
                .expect("inside of the slot");
            from.read(gfn.gpa(), &mut page).expect("guest memory");
            if page != [0; PAGE_SIZE] {
                to.write(gfn.gpa(), &page).expect("guest memory");
            }
        }
    }
}

/// Calls `attempt`, which runs the guest of `request` to its end and returns how often it moved. On
/// a fast machine, or if a thread wakes late, the guest may end before it has moved `least` times.
/// Then it gets ten times as much work, and then a hundred times.
///
/// # Panics
/// If that did not suffice.
pub fn move_at_least(
    least: usize,
    request: &Request,
    mut attempt: impl FnMut(&Request) -> Result<usize, Lacks>,
) -> Result<(), Lacks> {
    let mut moves = 0;
    for times in [1, 10, 100] {
        let request = Request {
            command_line: with_more_work(&request.command_line, times),
            ..request.clone()
        };
        moves = attempt(&request)?;
        if moves >= least {
            return Ok(());
        }
    }
    let command_line = &request.command_line;
    panic!("{moves} moves instead of {least} before the end of the guest: {command_line}");
}

/// `command_line` with its numbers of rounds, iterations and accesses multiplied by `times`.
fn with_more_work(command_line: &str, times: u64) -> String {
    const WORK: [&str; 4] = ["rounds", "iters", "adds", "accesses"];
    let more = |word: &str| match word.split_once('=') {
        Some((name, number)) if WORK.contains(&name) => {
            let number: u64 = number.parse().expect("a number");
            format!("{name}={}", number * times)
        }
        _ => word.to_owned(),
    };
    let words: Vec<String> = command_line.split(' ').map(more).collect();
    words.join(" ")
}

/// The state of a stopped guest, without its memory.
pub struct Stopped {
    shared: SharedState,
    vcpus: Vec<VcpuState>,
}

/// Saves a guest whose vCPUs do not run.
///
/// # Panics
/// If a state is not saved.
pub fn stop<B: Backend>(from: &mut Made<B>, devices: &PlatformDevices) -> Stopped {
    // It completes half-done instructions, which may change the shared state.
    save(from, devices);
    let shared = from.vm.save_shared().expect("no vCPU runs");
    let vcpus = save(from, devices);
    Stopped { shared, vcpus }
}

/// Makes `to`, which has the guest's memory, continue at this state.
///
/// # Panics
/// If a state is refused.
pub fn resume<B: Backend>(to: &mut Made<B>, stopped: &Stopped) {
    let restored = to.vm.restore_shared(&stopped.shared);
    restored.unwrap_or_else(|refused| panic!("{refused}"));
    for (vcpu, state) in to.vcpus.iter_mut().zip(&stopped.vcpus) {
        let restored = vcpu.restore(state);
        restored.unwrap_or_else(|refused| panic!("vCPU {}: {refused}", vcpu.index()));
    }
}

/// Makes a VM of `backend`, moves the guest of `from` there, and drops the old VM.
///
/// # Panics
/// If a state is refused.
pub fn move_to<A: Backend, B: Backend>(
    backend: &B,
    request: &Request,
    mut from: Made<A>,
    devices: &PlatformDevices,
) -> Result<Made<B>, Lacks> {
    let mut to = backend.make_bare(request)?;
    let stopped = stop(&mut from, devices);
    copy_memory(&*from.vm, &*to.vm);
    drop(from);
    resume(&mut to, &stopped);
    Ok(to)
}
