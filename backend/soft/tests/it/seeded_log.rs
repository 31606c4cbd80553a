//! Dirty logging in the simulator. Between two slices of the guest a monitor harvests, switches,
//! replaces and compares. One seed determines everything.
//!
//! `LACUNA_ROUNDS=1000 LACUNA_SEED=7` sets the number of seeds and the first one, for a longer run.

use crate::common;

use common::shadow::{DETECTIONS, Name, Shadow, end_logging, has_bitmaps, named, pages_of, ring};
use common::{Lines, apf_ways, boot_with, builder_for, from_env, on_both, second_quarter};
use fastrand::Rng;
use lacuna_machine::{
    Arch, DirtyRings as _, DirtyTracking as _, Ending, GuestMemory as _, MemorySlot,
    MemorySlots as _, PlatformDevices, TwoStepLog as _, Vm as _,
};
use lacuna_soft::{
    Apf, Backup, Delivery, Host, HugePages, LatencySetting, SimulatedVm, Simulator,
    SimulatorConfig, SlotFlags, SlotId, Swap, Trace, Vm, VmBuilder,
};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

on_both!(
    a_copy_by_harvests_is_the_guests_memory,
    a_seed_gives_one_trace,
);

/// The work and results of a monitor, a part of the trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Done {
    harvests: u64,
    pages: u64,
    switches: u64,
    replaced: u64,
    ended: u64,
    /// Hash of every harvested page, in order.
    hash: u64,
}

/// Draws the operations between two slices.
struct Monitor {
    rng: Rng,
    vm: Arc<Vm>,
    host: Arc<Host>,
    /// The copy, while the slots log.
    shadow: Option<Shadow>,
    /// Pages from rings that are not reset yet.
    collected: Vec<Name>,
    /// Whether huge leaves are forbidden in a part of the memory.
    is_limited: bool,
    done: Done,
}

impl Monitor {
    fn act(&mut self) {
        match self.rng.u16(..10_000) {
            ..100 => self.harvest(),
            100..110 => self.switch(),
            110..112 => self.start_or_end(),
            112..116 => self.replace_slots(),
            116..120 => self.limit_huge(),
            120..130 => self.write(),
            130 => self.verify(),
            _ => {}
        }
    }

    fn verify(&self) {
        self.vm.mmu().verify();
        self.host.verify();
    }

    fn switch(&mut self) {
        self.vm.set_detection(DETECTIONS[self.rng.usize(..2)]);
        self.done.switches += 1;
    }

    /// Replaces each slot by a new one, with the log of the old one.
    fn replace_slots(&mut self) {
        for MemorySlot { id, .. } in self.vm.memory_slots() {
            self.vm.set_slot_flags(id, SlotFlags::empty()).unwrap();
        }
        // The new slots' disallow counts begin at 0.
        self.is_limited = false;
        self.done.replaced += 1;
    }

    /// Forbids huge leaves in a part of the memory, or allows them again.
    fn limit_huge(&mut self) {
        let part = second_quarter(&self.vm);
        self.is_limited = !self.is_limited;
        match self.is_limited {
            false => self.vm.mmu().allow_huge(part),
            true => self.vm.mmu().disallow_huge(part).expect("tables enough"),
        }
    }

    /// Writes to a page that only the monitor uses, so no write of the guest hides it. Memory of an
    /// AArch64 guest begins with its device tree, which is far shorter than its 2 MiB.
    fn write(&mut self) {
        let page = match self.vm.config().arch {
            Arch::Arm64 => 511,
            _ => 0,
        };
        let page = self.vm.memory_slots()[0].gfns.start().checked_add(page);
        let (at, value) = (self.rng.u64(..4096), self.rng.u8(1..));
        if self.shadow.is_none() || has_bitmaps(&self.vm) {
            let gpa = page.unwrap().gpa().checked_add(at).unwrap();
            self.vm.write(gpa, &[value]).unwrap();
        }
    }

    fn start_or_end(&mut self) {
        if self.shadow.is_some() {
            return self.end();
        }
        self.shadow = Some(Shadow::drawn(&self.vm, &mut self.rng));
    }

    /// Harvests for the last time, and compares the copy with the guest's memory.
    fn end(&mut self) {
        let Some(mut shadow) = self.shadow.take() else {
            return;
        };
        self.reset(&mut shadow);
        self.done.pages += shadow.harvest(&self.vm) as u64;
        shadow.compare(&self.vm);
        end_logging(&self.vm, &mut self.rng);
        self.verify();
        self.done.ended += 1;
    }

    fn harvest(&mut self) {
        let Some(mut shadow) = self.shadow.take() else {
            return;
        };
        self.done.harvests += 1;
        if self.vm.mmu().delivery() != Delivery::Bitmap {
            self.harvest_rings(&mut shadow);
        }
        if has_bitmaps(&self.vm) {
            for MemorySlot { id, .. } in self.vm.memory_slots() {
                self.harvest_bitmap(&mut shadow, id);
            }
        }
        self.shadow = Some(shadow);
    }

    fn replay(&mut self, shadow: &mut Shadow, dirty: &[Name]) {
        for (id, page) in dirty {
            let name = u64::from(id.0) << 48 | *page as u64;
            self.done.hash = (self.done.hash ^ name).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.done.pages += dirty.len() as u64;
        shadow.replay(&self.vm, dirty);
    }

    /// Reaps the rings. The reset may come later, and reaped pages may be lost before they are
    /// copied.
    fn harvest_rings(&mut self, shadow: &mut Shadow) {
        let collected = &mut self.collected;
        self.vm
            .reap_rings(&mut |id, at| collected.push((id, at)))
            .unwrap();
        match self.rng.u8(..4) {
            0 => {}
            1 => {
                self.vm.mmu().put_back_rings();
                self.collected.clear();
            }
            _ => self.reset(shadow),
        }
    }

    fn reset(&mut self, shadow: &mut Shadow) {
        self.vm.reset_rings().unwrap();
        let collected = std::mem::take(&mut self.collected);
        self.replay(shadow, &collected);
    }

    /// Harvests in one step, or a part in two steps; or the harvest is lost before it is copied.
    fn harvest_bitmap(&mut self, shadow: &mut Shadow, id: SlotId) {
        let vm = Arc::clone(&self.vm);
        let pages = pages_of(&vm, id);
        let mut words = vec![0; pages.div_ceil(64)];
        match self.rng.u8(..4) {
            0 => {
                vm.peek_dirty(id, &mut words).unwrap();
                let from = self.rng.usize(..words.len());
                let some = self.rng.usize(1..=words.len() - from);
                let mask = &mut words[from..from + some];
                vm.clear_dirty(id, from * 64, some * 64, mask).unwrap();
                let dirty: Vec<_> = named(id, from * 64, mask).collect();
                self.replay(shadow, &dirty);
            }
            1 => {
                vm.get_dirty(id, &mut words).unwrap();
                vm.mmu().put_back_dirty(id, &words).unwrap();
            }
            _ => {
                vm.get_dirty(id, &mut words).unwrap();
                let dirty: Vec<_> = named(id, 0, &words).collect();
                self.replay(shadow, &dirty);
            }
        }
    }
}

/// A simulated VM: all settings except the moments of the monitor's operations.
#[derive(Debug)]
struct Plan {
    seed: u64,
    guest: &'static str,
    builder: VmBuilder,
    delivery: Delivery,
}

impl Plan {
    fn draw(arch: Arch, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let vcpus = rng.usize(1..=3);
        // These sizes are in MiB.
        let (guest, memory, resident, arguments) = match rng.u8(..4) {
            0 => ("verify", 8, 4, "rounds=2"),
            1 => ("verify", 8, 10, "rounds=3"),
            2 => ("zipf", 24, 14, "huge=1 accesses=8000 writes=30"),
            _ => ("churn", 16, 10, "transactions=1500 cold=3000 huge=1"),
        };
        let delivery = match rng.u8(..3) {
            0 => Delivery::Bitmap,
            1 => ring(Backup::None),
            _ => ring(Backup::Bitmap),
        };
        let [first, second] = apf_ways(arch);
        let ways = ["", first, second];
        let way = rng.usize(..ways.len());
        let builder = VmBuilder {
            seed: Some(seed),
            huge: [HugePages::Never, HugePages::Always][rng.usize(..2)],
            apf: [Apf::Off, Apf::On, Apf::On][way],
            latency: LatencySetting::new(Duration::from_micros(rng.u64(..2) * 100)),
            swap: match rng.u8(..4) {
                0 => Swap::Memory,
                _ => Swap::File(std::env::temp_dir()),
            },
            ..builder_for(
                arch,
                (memory, resident),
                vcpus,
                &format!("{arguments} {}", ways[way]),
            )
        };
        Self {
            seed,
            guest,
            builder,
            delivery,
        }
    }

    fn run(&self) -> (Trace, Done) {
        let Self { seed, builder, .. } = self;
        let clock = Arc::new(VirtualClock::default());
        let time = || Arc::clone(&clock) as Arc<dyn Clock>;
        let host = builder.host(time()).unwrap();
        let before = |vm: &Vm| vm.set_delivery(self.delivery).unwrap();
        let (vm, vcpus, devices, lines) = boot_with(builder, &host, time(), self.guest, before);
        let mut simulator = Simulator::new(SimulatorConfig {
            seed: *seed,
            clock: Arc::clone(&clock),
            host: Arc::clone(&host),
        });
        let mut monitor = Monitor {
            rng: Rng::with_seed(!seed),
            vm: Arc::clone(&vm),
            host,
            shadow: None,
            collected: Vec::new(),
            is_limited: false,
            done: Done::default(),
        };
        simulator.add(SimulatedVm {
            vm,
            vcpus,
            devices: Arc::clone(&devices),
        });
        let trace = simulator.run_beside(|| monitor.act());
        self.assert_success(&devices, &lines);
        monitor.end();
        monitor.verify();
        (trace, monitor.done)
    }

    fn assert_success(&self, devices: &PlatformDevices, lines: &Lines) {
        let (ending, text) = (devices.ending(), lines.text());
        assert!(
            matches!(ending, Some(Ending::Exited(0))),
            "{self:?}: {ending:?}\n{text}"
        );
    }
}

fn a_copy_by_harvests_is_the_guests_memory(arch: Arch) {
    let (first, rounds) = (from_env("LACUNA_SEED", 3), from_env("LACUNA_ROUNDS", 3));
    let (mut harvests, mut pages, mut ended) = (0, 0, 0);
    for seed in first..first + rounds {
        let plan = Plan::draw(arch, seed);
        println!("{plan:?}");
        let (_, done) = plan.run();
        harvests += done.harvests;
        pages += done.pages;
        ended += done.ended;
    }
    println!("{harvests} harvests of {pages} pages, {ended} logs ended");
    // A repeated single seed may do less.
    assert!(rounds < 3 || harvests > 100 && pages > 1000 && ended > 5);
}

fn a_seed_gives_one_trace(arch: Arch) {
    for seed in [3, 11] {
        assert_eq!(
            Plan::draw(arch, seed).run(),
            Plan::draw(arch, seed).run(),
            "{seed}"
        );
    }
}
