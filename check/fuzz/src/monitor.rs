//! Operations of the host and the VMM beside a running guest, drawn one at a time.
//!
//! Each may happen while vCPUs run, on another thread than theirs. A refusal is a valid answer. A
//! panic, a hang or a failed oracle ends the run.

use crate::place::*;
use crate::shadow::{Shadow, has_bitmaps, is_refusal, named, pages_of};
use crate::subject::{Extra, Subject, address};
use crate::values;
use fastrand::Rng;
use lacuna_addr::{BackingRange, Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{
    ApfSwitch as _, DirtyRings as _, DirtyTracking as _, GuestMemory as _, MemorySlot,
    MemorySlots as _, TwoStepLog as _,
};
use lacuna_soft::{
    Apf, Delivery, Detection, Host, LatencySetting, Recovery, RmapWalk, SlotFlags, SlotId, Vm,
};
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that belong to no VM and compete for frames.
pub const BALLAST: u64 = 768;

/// The VMM's side of one VM.
pub struct Monitor {
    /// The random source.
    pub rng: Rng,
    /// The oracle of dirty tracking, while the slots log.
    pub shadow: Option<Shadow>,
    host: Arc<Host>,
    latency: LatencySetting,
    ballast: BackingRange,
    is_limited: bool,
    /// Whether the last operation was refused.
    refused: bool,
}

/// An operation, and its weight in the draw.
type Operation = (&'static str, u32, fn(&mut Monitor, &Subject));

const OPERATIONS: &[Operation] = &[
    ("balance", 12, |m, _| m.balance()),
    ("reclaim", 4, |m, _| m.reclaim()),
    ("collapse", 8, |m, _| m.collapse()),
    ("ballast", 10, |m, _| m.use_ballast()),
    ("detection", 6, Monitor::switch_detection),
    ("log", 6, Monitor::switch_log),
    ("harvest", 16, Monitor::harvest),
    ("harvest a part", 6, Monitor::harvest_some),
    ("slot flags", 4, Monitor::set_flags),
    ("move slot", 4, Monitor::move_slot),
    ("delete slot", 3, Monitor::delete_slot),
    ("add slot", 8, Monitor::add_slot),
    ("replace main slot", 2, |m, s| m.replace_main(s)),
    ("remove and add main slot", 1, |m, s| m.readd_main(s)),
    ("invalidate", 6, Monitor::invalidate),
    ("write-protect", 3, Monitor::write_protect),
    ("age", 4, Monitor::age),
    ("split_huge", 3, Monitor::split_huge),
    ("huge leaves", 4, Monitor::limit_huge),
    ("host write", 8, Monitor::write),
    ("host read", 4, Monitor::read),
    ("new sequence", 16, Monitor::rewrite_sequence),
    ("latency", 2, |m, _| m.turn_latency()),
    ("apf", 3, Monitor::switch_apf),
    ("advise", 1, Monitor::advise),
    ("region", 2, Monitor::region),
];

impl Monitor {
    /// The monitor of a VM in `host`. `latency` is the setting of the host's swap device.
    pub fn new(host: &Arc<Host>, subject: &Subject, latency: LatencySetting, rng: Rng) -> Self {
        let notifier = subject.vm.mmu().notifier();
        let region = host.add_region(PageCount::new(BALLAST), notifier);
        Self {
            rng,
            shadow: None,
            host: Arc::clone(host),
            latency,
            ballast: region.expect("room for a region"),
            is_limited: false,
            refused: false,
        }
    }

    /// Carries out one operation. Returns its name, and whether it was refused.
    pub fn act(&mut self, subject: &Subject) -> (&'static str, bool) {
        let all: u32 = OPERATIONS.iter().map(|(_, weight, _)| weight).sum();
        let mut drawn = self.rng.u32(..all);
        let chosen = OPERATIONS.iter().find(|(_, weight, _)| {
            let is_it = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            is_it
        });
        let (name, _, operation) = chosen.expect("the weights add up");
        self.refused = false;
        operation(self, subject);
        (name, self.refused)
    }

    fn refuse<T, E>(&mut self, result: Result<T, E>) -> Option<T> {
        self.refused |= result.is_err();
        result.ok()
    }

    fn balance(&mut self) {
        let _ = self.host.balance();
    }

    /// The host may refuse if everything is pinned, or if the budget is too small for one more
    /// thread that takes frames.
    fn reclaim(&mut self) {
        let cache = self.host.per_cpu_pages();
        let reclaimed = cache.and_then(|mut cache| self.host.reclaim_direct(&mut cache));
        self.refuse(reclaimed);
    }

    fn collapse(&mut self) {
        for _ in 0..self.rng.u8(1..8) {
            let _ = self.host.collapse_step();
        }
    }

    /// Reads or writes pages outside all VMs. A read must return the last written value.
    fn use_ballast(&mut self) {
        let (first, count) = (self.rng.u64(..BALLAST), self.rng.u64(1..128));
        for index in first..(first + count).min(BALLAST) {
            let at = self.ballast.start().checked_add_pages(index);
            let at = at.expect("inside of the region");
            let mut bytes = [0; 16];
            self.host
                .copy_out(at, &mut bytes)
                .expect("a page of ballast");
            let expected = (index << 20 | 0xba11).to_le_bytes();
            let is_fresh = bytes == [0; 16];
            assert!(
                is_fresh || bytes[..8] == expected && bytes[8..] == expected,
                "page {index} of memory beside all VMs was changed: {bytes:x?}"
            );
            let both = [expected, expected].concat();
            self.host.copy_in(at, &both).expect("a page of ballast");
        }
    }

    fn switch_detection(&mut self, subject: &Subject) {
        let detection = values::pick(&mut self.rng, &[Detection::WriteProtect, Detection::Pml]);
        subject.vm.set_detection(detection);
    }

    fn switch_log(&mut self, subject: &Subject) {
        match self.shadow.take() {
            None => {
                let shadow = Shadow::begin(&subject.vm, subject.owner, &mut self.rng);
                self.shadow = Some(shadow);
            }
            Some(_) => self.end_log(subject),
        }
    }

    /// Ends all logs. Unharvested dirty pages are lost.
    pub fn end_log(&mut self, subject: &Subject) {
        self.shadow = None;
        let recovery = match self.rng.u8(..3) {
            0 => Recovery::Refault,
            _ => Recovery::InPlace,
        };
        let vm = &subject.vm;
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.mmu().end_logging_as(id, recovery).expect("it is there");
        }
        // A vCPU that has left with a full ring can run again.
        if vm.mmu().delivery() != Delivery::Bitmap {
            vm.reap_rings(&mut |_, _| ())
                .expect("its rings lose no page");
            vm.reset_rings().expect("its rings lose no page");
        }
    }

    fn harvest(&mut self, subject: &Subject) {
        if let Some(shadow) = &mut self.shadow {
            shadow.harvest(&subject.vm);
        }
    }

    /// Compares the copy with memory, while the vCPUs are stopped. Every written page must be in
    /// this harvest or an earlier one.
    pub fn compare(&mut self, subject: &Subject) {
        if let Some(shadow) = &mut self.shadow {
            shadow.harvest(&subject.vm);
            shadow.compare(&subject.vm);
        }
    }

    /// Puts dirty marks back, reads them, or clears some of them and copies their pages.
    fn harvest_some(&mut self, subject: &Subject) {
        let vm = &subject.vm;
        let Some(shadow) = &mut self.shadow else {
            return;
        };
        if vm.mmu().delivery() != Delivery::Bitmap {
            let mut collected = Vec::new();
            vm.reap_rings(&mut |id, page| collected.push((id, page)))
                .expect("its rings lose no page");
            match self.rng.bool() {
                true => vm.mmu().put_back_rings(),
                false => {
                    vm.reset_rings().expect("its rings lose no page");
                    shadow.replay(vm, &collected);
                }
            }
        }
        if !has_bitmaps(vm) {
            return;
        }
        for MemorySlot { id, .. } in vm.memory_slots() {
            let done = part_of_bitmap(vm, id, shadow, &mut self.rng);
            if let Err(error) = done {
                assert!(is_refusal(&error), "{id}: {error}");
                self.refused = true;
            }
        }
    }

    /// A slot other than main memory, if one exists.
    fn present<'s>(&mut self, subject: &'s Subject) -> Option<&'s Extra> {
        let slots = subject.vm.memory_slots();
        let present: Vec<_> = subject
            .extras
            .iter()
            .filter(|e| slots.iter().any(|slot| slot.id == e.id))
            .collect();
        if present.is_empty() {
            self.refused = true;
            return None;
        }
        Some(present[self.rng.usize(..present.len())])
    }

    fn flags(&mut self) -> SlotFlags {
        match self.rng.u8(..3) {
            0 => SlotFlags::READONLY,
            _ => SlotFlags::empty(),
        }
    }

    fn set_flags(&mut self, subject: &Subject) {
        let flags = self.flags();
        if let Some(extra) = self.present(subject) {
            let set = subject.vm.set_slot_flags(extra.id, flags);
            self.refuse(set);
            self.is_limited = false;
        }
    }

    /// An address: the slot's home, near another slot, above 4 GiB, or at the end of the addresses.
    fn place(&mut self, extra: &Extra) -> u64 {
        let bytes = extra.pages * PAGE;
        match self.rng.u8(..8) {
            0 => (1 << 48) - bytes,
            1 => (1 << 48) - bytes + PAGE,
            2 => (4 << 30) + self.rng.u64(..8) * PAGE,
            3 => extra.home() + self.rng.u64(..600) * PAGE,
            4 => extra.home() + 1,
            5 => EXTRA + EXTRAS * EXTRA_STEP,
            _ => extra.home(),
        }
    }

    fn move_slot(&mut self, subject: &Subject) {
        if let Some(extra) = self.present(subject) {
            let to = self.place(extra);
            let moved = subject.vm.move_slot(extra.id, Gpa::truncate(to).gfn());
            self.refuse(moved);
        }
    }

    fn delete_slot(&mut self, subject: &Subject) {
        if let Some(extra) = self.present(subject) {
            let id = extra.id;
            let deleted = subject.vm.remove_slot(id);
            self.refuse(deleted);
            if let Some(shadow) = &mut self.shadow {
                shadow.forget(id);
            }
        }
    }

    /// Adds a slot again, perhaps with another size. The VM refuses if the slot exists.
    fn add_slot(&mut self, subject: &Subject) {
        if subject.extras.is_empty() {
            return;
        }
        let extra = &subject.extras[self.rng.usize(..subject.extras.len())];
        let pages = match self.rng.bool() {
            true => extra.pages,
            false => self.rng.u64(1..=extra.pages),
        };
        let (place, flags) = (self.place(extra), self.flags());
        let added = subject.vm.add_slot(extra.spec(place, pages, flags));
        self.refuse(added);
    }

    fn replace_main(&mut self, subject: &Subject) {
        let set = subject.vm.set_slot_flags(SlotId(0), SlotFlags::empty());
        self.refuse(set);
        self.is_limited = false;
    }

    fn readd_main(&mut self, subject: &Subject) {
        let vm = &subject.vm;
        vm.remove_slot(SlotId(0)).expect("it is always there");
        vm.add_slot(subject.main).expect("its place is free");
        self.is_limited = false;
        if let Some(shadow) = &mut self.shadow {
            shadow.forget(SlotId(0));
        }
    }

    /// A part of the backing of some slot.
    fn backing(&mut self, subject: &Subject) -> Option<BackingRange> {
        let slots = subject.vm.mmu().slots();
        let all: Vec<_> = slots.iter().map(|slot| slot.backing).collect();
        let backing = *all.get(self.rng.usize(..all.len().max(1)))?;
        let first = self.rng.u64(..backing.pages());
        let count = match self.rng.u8(..3) {
            0 => 1,
            1 => backing.pages() - first,
            _ => self.rng.u64(1..=backing.pages() - first),
        };
        BackingRange::new(backing.start().checked_add_pages(first)?, count)
    }

    fn invalidate(&mut self, subject: &Subject) {
        if let Some(range) = self.backing(subject) {
            let walk = values::pick(&mut self.rng, &RmapWalk::ALL);
            let _ = subject.vm.mmu().invalidate_as(walk, range);
        }
    }

    fn write_protect(&mut self, subject: &Subject) {
        if let Some(range) = self.backing(subject) {
            subject.vm.mmu().write_protect(range);
        }
    }

    fn age(&mut self, subject: &Subject) {
        if let Some(range) = self.backing(subject) {
            let mmu = subject.vm.mmu();
            mmu.test_young(range);
            mmu.notifier().age(&[range], &mut [false]);
            mmu.notifier().end_of_aging();
        }
    }

    fn split_huge(&mut self, subject: &Subject) {
        if let Some(range) = self.backing(subject) {
            subject.vm.mmu().notifier().split_huge(range);
        }
    }

    /// Forbids huge leaves in a part of the main memory, or allows them again.
    fn limit_huge(&mut self, subject: &Subject) {
        let quarter = subject.memory / PAGE / 4;
        let first = Gfn::new(subject.base / PAGE + quarter).expect("low");
        let part = GfnRange::new(first, quarter).expect("low");
        self.is_limited = !self.is_limited;
        match self.is_limited {
            false => subject.vm.mmu().allow_huge(part),
            true => {
                let limited = subject.vm.mmu().disallow_huge(part);
                self.refuse(limited);
            }
        }
    }

    /// Writes to the guest's data, perhaps at an address without memory.
    fn write(&mut self, subject: &Subject) {
        let at = match self.rng.u8(..4) {
            0 => address(&mut self.rng, subject) & ((1 << 48) - 1),
            _ => subject.base + values::data(&mut self.rng, subject.memory),
        };
        // The runtime and everything before it stay unchanged.
        if (subject.main.guest..subject.base + DATA).contains(&at) {
            return;
        }
        let bytes: Vec<u8> = (0..self.rng.usize(1..64))
            .map(|_| self.rng.u8(..))
            .collect();
        let written = subject.write(at, &bytes);
        self.refuse(written);
    }

    fn read(&mut self, subject: &Subject) {
        let at = address(&mut self.rng, subject) & ((1 << 48) - 1);
        let mut bytes = [0; 64];
        subject.vm.peek(Gpa::truncate(at), &mut bytes);
        let read = subject.vm.read(Gpa::truncate(at), &mut bytes);
        self.refuse(read);
    }

    fn rewrite_sequence(&mut self, subject: &Subject) {
        for _ in 0..self.rng.u8(1..6) {
            let index = self.rng.u64(..SEQUENCE_COUNT);
            let written = subject.rewrite_sequence(index, &mut self.rng);
            self.refuse(written);
        }
    }

    fn turn_latency(&mut self) {
        let latency = values::pick(&mut self.rng, &[0, 0, 20, 100, 500]);
        self.latency.set(Duration::from_micros(latency));
    }

    fn switch_apf(&mut self, subject: &Subject) {
        subject
            .vm
            .set_apf(values::pick(&mut self.rng, &[Apf::On, Apf::On, Apf::Off]));
    }

    fn advise(&mut self, subject: &Subject) {
        if let Some(range) = self.backing(subject) {
            let advised = self.host.advise_huge(range);
            self.refuse(advised);
        }
    }

    /// Creates a region that no slot uses, writes to it, and removes it.
    fn region(&mut self, subject: &Subject) {
        let notifier = subject.vm.mmu().notifier();
        let pages = self.rng.u64(1..700);
        let region = self.host.add_region(PageCount::new(pages), notifier);
        let region = region.expect("room for a region");
        for _ in 0..self.rng.u64(..pages.min(40)) {
            let at = region.start().checked_add_pages(self.rng.u64(..pages));
            let at = at.expect("inside of the region");
            let mut bytes = [0; 8];
            self.host.copy_out(at, &mut bytes).expect("a page");
            let value = u64::from_le_bytes(bytes);
            assert!(
                value == 0 || value == 0x7e91,
                "a fresh page holds {value:#x}"
            );
            self.host
                .copy_in(at, &0x7e91u64.to_le_bytes())
                .expect("a page");
        }
        self.host
            .remove_region(region)
            .expect("no other code has it");
    }

    /// Ends the logs and frees the ballast at the end of a run.
    pub fn dismantle(mut self, subject: &Subject) {
        self.end_log(subject);
        let removed = self.host.remove_region(self.ballast);
        removed.expect("no other code has it");
    }
}

/// Handles a part of a slot's bitmap: reads and clears it, or takes it and puts it back.
fn part_of_bitmap(
    vm: &Vm,
    id: SlotId,
    shadow: &mut Shadow,
    rng: &mut Rng,
) -> Result<(), lacuna_soft::DirtyError> {
    let pages = pages_of(vm, id);
    let mut words = vec![0; pages.div_ceil(64)];
    if rng.bool() {
        vm.get_dirty(id, &mut words)?;
        return vm.mmu().put_back_dirty(id, &words);
    }
    vm.peek_dirty(id, &mut words)?;
    let from = rng.usize(..words.len());
    let some = rng.usize(1..=words.len() - from);
    let mask = &mut words[from..from + some];
    let count = (some * 64).min(pages - from * 64);
    vm.clear_dirty(id, from * 64, count, mask)?;
    let dirty: Vec<_> = named(id, from * 64, mask).collect();
    shadow.replay(vm, &dirty);
    Ok(())
}
