//! vCPUs write on threads, while a monitor harvests, switches how writes are detected, ends and
//! begins logs, splits huge pages, replaces slots and evicts pages.
//!
//! The monitor makes a fixed number of steps. After the last one it only harvests, and the guest
//! must end by itself. `LACUNA_ROUNDS=2000` sets the number of steps, and `--nocapture` shows them.

use crate::common;

use common::shadow::{DETECTIONS, Shadow, end_logging, ring};
use common::{boot_with, builder_for, from_env, on_both, second_quarter, start};
use fastrand::Rng;
use lacuna_machine::{Apf, Arch, DirtyRings as _, Ending, MemorySlot, MemorySlots as _};
use lacuna_soft::{Backup, Delivery, Host, HugePages, SlotFlags, Vm, VmBuilder};
use lacuna_sync::HostClock;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

on_both!(many_vcpus_end_under_all_switches_at_once);

/// A longer step is a hang: a step normally takes milliseconds.
const HANG: Duration = Duration::from_secs(300);

/// Ends the process and prints the last step, if no further step follows.
fn watch(steps: &Receiver<String>) {
    let mut last = "the start".to_owned();
    loop {
        match steps.recv_timeout(HANG) {
            Ok(step) => last = step,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                // The test harness would keep the output of `eprintln` until the test ends.
                let _ = writeln!(std::io::stderr(), "hangs after {last}");
                std::process::abort();
            }
        }
    }
}

struct Monitor<'a> {
    vm: &'a Vm,
    host: &'a Host,
    rng: Rng,
    shadow: Option<Shadow>,
    is_limited: bool,
    harvested: usize,
}

impl Monitor<'_> {
    /// Makes one more step. Returns its name.
    fn step(&mut self) -> &'static str {
        match self.rng.u8(..10) {
            0 => {
                self.vm.set_detection(DETECTIONS[self.rng.usize(..2)]);
                "switch"
            }
            1 if self.shadow.is_some() => self.end(),
            1 | 2 if self.shadow.is_none() => self.start(),
            3 => self.replace_slots(),
            4 => self.limit_huge(),
            5 => {
                let _ = self.host.balance();
                "reclaim"
            }
            6 => {
                let _ = self.host.collapse_step();
                "collapse"
            }
            _ => self.harvest(),
        }
    }

    fn start(&mut self) -> &'static str {
        self.shadow = Some(Shadow::drawn(self.vm, &mut self.rng));
        "start"
    }

    fn end(&mut self) -> &'static str {
        end_logging(self.vm, &mut self.rng);
        // A vCPU that has left because of a full ring can enter the guest again.
        self.vm.reap_rings(&mut |_, _| ()).unwrap();
        self.vm.reset_rings().unwrap();
        self.shadow = None;
        "end"
    }

    fn replace_slots(&mut self) -> &'static str {
        for MemorySlot { id, .. } in self.vm.memory_slots() {
            self.vm.set_slot_flags(id, SlotFlags::empty()).unwrap();
        }
        self.is_limited = false;
        "replace"
    }

    fn limit_huge(&mut self) -> &'static str {
        let part = second_quarter(self.vm);
        self.is_limited = !self.is_limited;
        match self.is_limited {
            false => self.vm.mmu().allow_huge(part),
            true => self.vm.mmu().disallow_huge(part).expect("tables enough"),
        }
        "limit"
    }

    fn harvest(&mut self) -> &'static str {
        if let Some(shadow) = &mut self.shadow {
            self.harvested += shadow.harvest(self.vm);
        }
        "harvest"
    }
}

/// Runs `guest` to its end while `steps` steps are made.
fn storm(
    builder: &VmBuilder,
    guest: &str,
    delivery: Delivery,
    steps: u64,
    steps_done: &Sender<String>,
) {
    let clock = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock) as _).unwrap();
    let background = host.spawn_background().unwrap();
    let before = |vm: &Vm| vm.set_delivery(delivery).unwrap();
    let (vm, vcpus, devices, lines) = boot_with(builder, &host, clock, guest, before);
    let mut monitor = Monitor {
        vm: &vm,
        host: &host,
        rng: Rng::with_seed(from_env("LACUNA_SEED", 1)),
        shadow: None,
        is_limited: false,
        harvested: 0,
    };
    let tell = |step: u64, what: &str, began: Instant| {
        let (took, retired) = (began.elapsed(), vm.retired().iter().sum::<u64>());
        let text = format!(
            "{guest} {} {step} {what}: {took:?}, {retired} instructions",
            builder.vcpus
        );
        println!("{text}");
        steps_done.send(text).unwrap();
    };
    let began = Instant::now();
    let running = start(&vm, vcpus, &devices);
    for step in 0..steps {
        let began = Instant::now();
        let what = monitor.step();
        tell(step, what, began);
        if running.wait_timeout(Duration::ZERO) {
            break;
        }
        // The monitor must not outrun the guest: otherwise the guest would not end.
        sleep(Duration::from_millis(1));
    }
    if monitor.shadow.is_none() && !running.wait_timeout(Duration::ZERO) {
        monitor.start();
    }
    while !running.wait_timeout(Duration::ZERO) {
        let began = Instant::now();
        monitor.harvest();
        tell(steps, "harvest", began);
        sleep(Duration::from_millis(2));
    }
    running.wait();
    let ending = devices.ending();
    assert!(
        matches!(ending, Some(Ending::Exited(0))),
        "{ending:?}\n{}",
        lines.text()
    );
    if let Some(mut shadow) = monitor.shadow {
        shadow.harvest(&vm);
        shadow.compare(&vm);
    }
    drop(background);
    vm.mmu().verify();
    host.verify();
    let (harvested, took) = (monitor.harvested, began.elapsed());
    tell(steps, &format!("over, {harvested} pages, {took:?}"), began);
}

fn many_vcpus_end_under_all_switches_at_once(arch: Arch) {
    let steps = from_env("LACUNA_ROUNDS", 30);
    let (steps_done, all_steps) = channel();
    let watchdog = spawn(move || watch(&all_steps));
    let guests = [
        (
            3,
            "zipf",
            "huge=1 accesses=6000 writes=30",
            ring(Backup::Bitmap),
        ),
        (4, "verify", "rounds=1", Delivery::Bitmap),
        (
            4,
            "churn",
            "transactions=1000 cold=3000 huge=1",
            ring(Backup::None),
        ),
    ];
    for (vcpus, guest, arguments, delivery) in guests {
        let builder = VmBuilder {
            huge: HugePages::Always,
            apf: Apf::On,
            ..builder_for(arch, (20, 12), vcpus, arguments)
        };
        storm(&builder, guest, delivery, steps, &steps_done);
    }
    drop(steps_done);
    watchdog.join().unwrap();
}
