//! Address spaces by PCID. A model of a TLB's possible answers checks the used translations.
//! Further tests check that certain accesses and switches need no bus look-up.

use crate::Cpu;
use crate::apic::ApicBus;
use crate::apic::tests::Wakes;
use crate::control::{Flush, write_cr};
use crate::mem::{Memory, Target};
use crate::state::System;
use crate::state::bits::*;
use crate::walk::User;
use lacuna_addr::{Access, Gfn};
use lacuna_cpu::testing::Ram;
use lacuna_cpu::{PARKED, Processor};
use lacuna_sync::VirtualClock;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// More address spaces than a processor parks.
const SPACES: u64 = PARKED as u64 + 3;
const OPEN: u64 = 7;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
/// The table of global pages, the same in every address space.
const SHARED: u64 = 0x90;
/// Frames of small pages, and first frames of large ones.
const FRAMES: u64 = 0x800;
const BLOCKS: [u64; 2] = [0x400, 0x600];
/// Accessed pages: in each address space's own 2 MiB, and in the 2 MiB of global pages.
const OWN: [u64; 3] = [0, 1, 511];
const GLOBALS: [u64; 2] = [512, 513];

fn gfn(n: u64) -> Gfn {
    Gfn::new(n).unwrap()
}

/// The address space's table pages: PML4, PDPT, PD, and two PTs that the PD may name.
fn table(space: u64, which: u64) -> u64 {
    0x100 + space * 0x10 + which
}

/// A processor with PCIDs and global pages on, and its memory.
struct Guest {
    cpu: Cpu,
    ram: Ram,
    space: u64,
}

/// Memory with each frame's number in its page.
fn memory() -> Ram {
    let mut ram = Ram::default();
    for block in BLOCKS {
        ram.add_block(gfn(block));
        for page in OWN {
            ram.add(gfn(block + page)).store_u64(0, block + page);
        }
    }
    for frame in FRAMES..FRAMES + 8 {
        ram.add(gfn(frame)).store_u64(0, frame);
    }
    ram
}

impl Guest {
    /// Another guest may have used the memory.
    fn new(mut ram: Ram) -> Self {
        ram.take_back();
        for space in 0..SPACES {
            for page in [SHARED, table(space, 3), table(space, 4)] {
                for i in OWN {
                    ram.add(gfn(page)).store_u64(i as usize * 8, 0);
                }
            }
            for level in 0..3 {
                let entry = table(space, level + 1) << 12 | OPEN;
                ram.add(gfn(table(space, level))).store_u64(0, entry);
            }
            let directory = ram.add(gfn(table(space, 2)));
            directory.store_u64(8, SHARED << 12 | OPEN);
        }
        let apics = Arc::new(ApicBus::new(1, Arc::new(Wakes::default())));
        let mut cpu = Cpu::new(0, apics, Arc::new(VirtualClock::default()));
        let mut system = System::long_mode(table(0, 0) << 12);
        system.cr4 |= CR4_PGE | CR4_PCIDE;
        cpu.set_system(system);
        Self { cpu, ram, space: 0 }
    }

    fn set_cr(&mut self, number: u32, value: u64) {
        let core = &mut self.cpu.core;
        // Only a kernel may do this, but the flush depends on which privilege's TLB is in front.
        let cpl = std::mem::replace(&mut core.sys.cpl, 0);
        let flush = write_cr(&mut core.sys, &mut core.apic, number, value).unwrap();
        core.sys.cpl = cpl;
        self.cpu.flush(flush);
    }

    fn enter(&mut self, space: u64, no_flush: u64) {
        self.space = space;
        self.set_cr(3, no_flush | table(space, 0) << 12 | (space + 1));
    }

    fn invlpg(&mut self, page: u64) {
        self.cpu.flush(Flush::Address(page << 12));
    }

    fn flush_by_host(&mut self) {
        self.ram.take_back();
        self.cpu.flush_tlb();
    }

    fn set_cpl(&mut self, user: User) {
        self.cpu.core.sys.cpl = if user == User::User { 3 } else { 0 };
        self.cpu.core.sync_privilege();
    }

    /// The frame that an access to `page` reaches: by the TLB if possible, as instructions do.
    fn access(&mut self, page: u64, access: Access, user: User) -> Option<u64> {
        let (core, va) = (&mut self.cpu.core, page << 12);
        let tlb = &core.translations.of(user, core.user).tlb;
        let known = match access {
            Access::Read => tlb.readable_page(va),
            Access::Write => tlb.writable_page(va),
            Access::Fetch => tlb.executable_page(va).map(|(_, page)| page),
        };
        if let Some(page) = known {
            return Some(page.load_u64(0));
        }
        match core.translate(&mut self.ram, va, access, user) {
            Ok(Target::Memory(gfn, page)) => {
                assert_eq!(page.load_u64(0), gfn.get(), "the page is the frame's");
                Some(gfn.get())
            }
            Ok(Target::Device(_)) => unreachable!("all frames are there"),
            Err(_) => None,
        }
    }
}

/// The values of the tables, with their times.
#[derive(Default)]
struct Model {
    now: u64,
    /// Every value of each entry (table frame, index) with its time, in order.
    entries: BTreeMap<(u64, u64), Vec<(u64, u64)>>,
    /// When an address space's translations of a page were last invalidated.
    own: BTreeMap<(u64, u64), u64>,
    globals: BTreeMap<u64, u64>,
}

impl Model {
    fn set(&mut self, ram: &mut Ram, table: u64, index: u64, value: u64) {
        ram.add(gfn(table)).store_u64(index as usize * 8, value);
        let history = self.entries.entry((table, index)).or_default();
        history.push((self.now, value));
    }

    /// Frames that `page` of `space` may be translated to. Empty: the access must fault.
    fn may_be(&self, space: u64, page: u64) -> Vec<u64> {
        if page >= 512 {
            let since = self.globals.get(&page).copied().unwrap_or(0);
            return self.leaves(SHARED, page % 512, since);
        }
        let since = self.own.get(&(space, page)).copied().unwrap_or(0);
        let directory = self.values(table(space, 2), 0, since);
        directory
            .flat_map(|entry| match entry & LARGE {
                0 if entry == 0 => Vec::new(),
                0 => self.leaves(entry >> 12, page, since),
                _ => vec![(entry >> 12) + page],
            })
            .collect()
    }

    fn leaves(&self, table: u64, index: u64, since: u64) -> Vec<u64> {
        let entries = self.values(table, index, since);
        entries.filter(|&e| e != 0).map(|e| e >> 12).collect()
    }

    /// The values that an entry has had since `since`.
    fn values(&self, table: u64, index: u64, since: u64) -> impl Iterator<Item = u64> {
        let history = self.entries.get(&(table, index)).map_or(&[][..], |h| h);
        let first = history.partition_point(|&(time, _)| time <= since);
        history[first.saturating_sub(1)..]
            .iter()
            .map(|&(_, value)| value)
    }

    /// A page fault at `page`: returns the present mapping. The fault drops the page from the
    /// current address space (SDM vol 3A 4.10.4.1); another one may keep its entry for a global
    /// page.
    fn fault(&mut self, space: u64, page: u64) -> Vec<u64> {
        if page >= 512 {
            return self.leaves(SHARED, page % 512, self.now);
        }
        self.invalidate(space, page);
        self.may_be(space, page)
    }

    fn invalidate_own(&mut self, space: u64) {
        for page in OWN {
            self.own.insert((space, page), self.now);
        }
    }

    fn invalidate_all(&mut self) {
        (0..SPACES).for_each(|space| self.invalidate_own(space));
        for page in GLOBALS {
            self.globals.insert(page, self.now);
        }
    }

    fn invalidate(&mut self, space: u64, page: u64) {
        if page < 512 {
            // The other pages of a large leaf are dropped with it. Pages of small leaves may stay
            // or be dropped.
            self.own.insert((space, page), self.now);
        } else {
            self.globals.insert(page, self.now);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Access(u64, Access, User),
    Switch(u64, u64),
    Privilege(User),
    /// A small leaf of an address space's table 0 or 1, or a global one; 0: not present.
    Leaf(u64, u64, u64, u64),
    /// The tables of an address space's 2 MiB: tables 0 and 1, blocks 0 and 1.
    Directory(u64, u64),
    Invlpg(u64),
    FlushByHost,
    Cr4,
}

fn step() -> impl Strategy<Value = Step> {
    let page = || prop::sample::select([&OWN[..], &GLOBALS[..]].concat());
    let user = || prop::sample::select(vec![User::User, User::Supervisor]);
    let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Fetch]);
    let no_flush = prop::sample::select(vec![0, CR3_NO_FLUSH, CR3_NO_FLUSH]);
    let leaf = prop::sample::select((0..9_u64).collect::<Vec<_>>());
    prop_oneof![
        16 => (page(), access, user()).prop_map(|(p, a, u)| Step::Access(p, a, u)),
        6 => (0..SPACES, no_flush).prop_map(|(space, bit)| Step::Switch(space, bit)),
        2 => user().prop_map(Step::Privilege),
        4 => (0..SPACES, 0..2_u64, page(), leaf).prop_map(|(s, t, p, l)| Step::Leaf(s, t, p, l)),
        3 => (0..SPACES, 0..4_u64).prop_map(|(space, to)| Step::Directory(space, to)),
        3 => page().prop_map(Step::Invlpg),
        1 => Just(Step::FlushByHost),
        1 => Just(Step::Cr4),
    ]
}

fn take(step: Step, guest: &mut Guest, model: &mut Model) {
    match step {
        Step::Access(page, access, user) => {
            let got = guest.access(page, access, user);
            let may_be = model.may_be(guest.space, page);
            match got {
                Some(frame) => {
                    assert!(may_be.contains(&frame), "{frame:#x} of {may_be:#x?}");
                    assert!(
                        guest.ram.is_handed_out(gfn(frame)),
                        "{frame:#x} was taken back"
                    );
                }
                // A page reported as absent is absent now, or was at its last access.
                None => {
                    let now = model.fault(guest.space, page);
                    assert!(now.is_empty(), "{page} is mapped to {now:#x?}");
                }
            }
        }
        Step::Switch(space, no_flush) => {
            guest.enter(space, no_flush);
            if no_flush == 0 {
                model.invalidate_own(space);
            }
        }
        Step::Privilege(user) => guest.set_cpl(user),
        Step::Leaf(space, which, page, leaf) => {
            let value = leaf.checked_sub(1).map_or(0, |n| (FRAMES + n) << 12 | OPEN);
            match page {
                512.. if value == 0 => model.set(&mut guest.ram, SHARED, page % 512, 0),
                512.. => model.set(&mut guest.ram, SHARED, page % 512, value | GLOBAL),
                _ => model.set(&mut guest.ram, table(space, 3 + which), page, value),
            }
        }
        Step::Directory(space, to) => {
            let value = match to {
                0 | 1 => table(space, 3 + to) << 12 | OPEN,
                _ => BLOCKS[to as usize - 2] << 12 | LARGE | OPEN,
            };
            model.set(&mut guest.ram, table(space, 2), 0, value);
        }
        Step::Invlpg(page) => {
            guest.invlpg(page);
            model.invalidate(guest.space, page);
        }
        Step::FlushByHost => {
            guest.flush_by_host();
            model.invalidate_all();
        }
        Step::Cr4 => {
            let cr4 = guest.cpu.core.sys.cr4;
            guest.set_cr(4, cr4 ^ CR4_PGE);
            guest.set_cr(4, cr4);
            model.invalidate_all();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_tlb_returns_what_was_true_since_it_was_told(
        steps in prop::collection::vec(step(), 1..250),
    ) {
        let ram = MEMORY.take().unwrap_or_else(memory);
        let (mut guest, mut model) = (Guest::new(ram), Model::default());
        for space in 0..SPACES {
            take(Step::Directory(space, space % 4), &mut guest, &mut model);
        }
        for step in steps {
            model.now += 1;
            take(step, &mut guest, &mut model);
        }
        MEMORY.set(Some(guest.ram));
    }
}

thread_local! {
    /// Kept from one case to the next, because `Ram` leaks its pages.
    static MEMORY: Cell<Option<Ram>> = const { Cell::new(None) };
}

/// A guest whose address spaces each map their own pages and the global ones.
fn mapped() -> Guest {
    let (mut guest, mut model) = (
        Guest::new(MEMORY.take().unwrap_or_else(memory)),
        Model::default(),
    );
    for space in 0..SPACES {
        take(Step::Directory(space, 0), &mut guest, &mut model);
        for page in OWN.into_iter().chain(GLOBALS) {
            take(
                Step::Leaf(space, 0, page, 1 + space),
                &mut guest,
                &mut model,
            );
        }
    }
    guest.set_cpl(User::User);
    guest
}

/// The bus look-ups when the user reads each page.
fn lookups(guest: &mut Guest) -> u64 {
    let before = guest.ram.lookups;
    for page in OWN {
        let frame = guest.access(page, Access::Read, User::User);
        assert_eq!(frame, Some(FRAMES + guest.space));
    }
    for page in GLOBALS {
        let frame = guest.access(page, Access::Read, User::Supervisor);
        assert_eq!(frame, Some(FRAMES + SPACES - 1));
    }
    guest.ram.lookups - before
}

#[test]
fn as_many_address_spaces_as_it_keeps_walk_once() {
    let mut guest = mapped();
    let kept = PARKED as u64 + 1;
    for space in 0..kept {
        guest.enter(space, CR3_NO_FLUSH);
        assert!(lookups(&mut guest) > 0, "it was never there");
        assert_eq!(lookups(&mut guest), 0);
    }
    for space in (0..kept).chain(0..kept).rev() {
        guest.enter(space, CR3_NO_FLUSH);
        assert_eq!(lookups(&mut guest), 0, "{space} is back");
    }
    // One more replaces the least recently used one: the order was 3, 2, 1, 0.
    guest.enter(kept, CR3_NO_FLUSH);
    assert!(lookups(&mut guest) > 0);
    for (space, known) in [(0, true), (1, true), (2, true), (3, false)] {
        guest.enter(space, CR3_NO_FLUSH);
        assert_eq!(lookups(&mut guest) == 0, known, "{space}");
    }
}

#[test]
fn a_switch_that_flushes_leaves_global_pages_and_other_address_spaces() {
    let mut guest = mapped();
    for space in [0, 1] {
        guest.enter(space, CR3_NO_FLUSH);
        let _ = lookups(&mut guest);
    }
    guest.enter(0, 0);
    let before = guest.ram.lookups;
    for page in GLOBALS {
        let _ = guest.access(page, Access::Read, User::Supervisor);
    }
    assert_eq!(guest.ram.lookups, before, "global");
    assert!(lookups(&mut guest) > 0, "its own are gone");
    guest.enter(1, CR3_NO_FLUSH);
    assert_eq!(lookups(&mut guest), 0, "the other's are not");
    guest.enter(1, 0);
    assert!(lookups(&mut guest) > 0, "the current one's own");
}

/// Host pointers must not outlive a shoot-down. So a flush includes every address space, whichever
/// is current, and at any privilege.
#[test]
fn a_flush_by_the_host_leaves_nothing_in_any_address_space() {
    let kept = PARKED as u64 + 1;
    for (current, user) in (0..kept).flat_map(|c| [(c, User::User), (c, User::Supervisor)]) {
        for flush in [Guest::flush_by_host, |guest: &mut Guest| {
            let cr4 = guest.cpu.core.sys.cr4;
            guest.set_cr(4, cr4 & !CR4_PGE);
            guest.set_cr(4, cr4);
        }] {
            let mut guest = mapped();
            for space in (0..kept).chain([current]) {
                guest.enter(space, CR3_NO_FLUSH);
                let _ = lookups(&mut guest);
            }
            guest.set_cpl(user);
            flush(&mut guest);
            for space in 0..kept {
                guest.enter(space, CR3_NO_FLUSH);
                let before = guest.ram.lookups;
                for page in OWN {
                    let _ = guest.access(page, Access::Read, User::User);
                    let page = guest.cpu.core.translations.of(User::User, user);
                    assert!(page.tlb.readable_page(GLOBALS[0] << 12).is_none());
                }
                // Four tables for the first, one for each of the others, and the pages.
                assert_eq!(guest.ram.lookups - before, 4 + 2 + 3);
            }
            MEMORY.set(Some(guest.ram));
        }
    }
}

#[test]
fn a_page_that_becomes_code_is_read_only_in_every_address_space() {
    let mut guest = mapped();
    let frame = gfn(FRAMES + SPACES - 1);
    for space in 0..=PARKED as u64 {
        guest.enter(space, CR3_NO_FLUSH);
        let _ = guest.access(GLOBALS[0], Access::Write, User::User);
    }
    guest.cpu.core.translations.protect(frame);
    for space in 0..=PARKED as u64 {
        guest.enter(space, CR3_NO_FLUSH);
        let tlb = &guest.cpu.core.translations.front.tlb;
        assert!(tlb.readable_page(GLOBALS[0] << 12).is_some());
        assert!(tlb.writable_page(GLOBALS[0] << 12).is_none());
    }
}
