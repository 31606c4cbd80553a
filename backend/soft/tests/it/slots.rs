//! Slots added after boot. Guest code runs from them, and changes of that code take effect. A
//! read-only slot may hold the guest's page tables.

use crate::common;

use common::program::{self, CODE, Piece, STACK, assemble};
use common::{MIB, boot_image, builder};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use lacuna_addr::{BackingAddr, BackingRange, Gfn, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{Exit, GuestMemory as _, MemorySlots as _, VcpuError, Vm as _};
use lacuna_soft::{
    Host, HugePages, SlotError, SlotFlags, SlotId, SlotSpec, SoftError, Step, Vcpu, Vm, VmBuilder,
    VmConfig, Wait,
};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;

/// Three words: the address that the guest calls next, the address at which it then stores a byte
/// (0: none), and the byte.
const TARGET: u64 = 0x23_0000;
const PATCH: u64 = TARGET + 8;
const VALUE: u64 = TARGET + 16;
/// The address of a later slot, far beyond the first memory of the VM. The identity map of the boot
/// includes it.
const LATER: u64 = 1 << 30;
/// The offset of the immediate operand in [`function`].
const OPERAND: u64 = 1;
const SLOT: SlotId = SlotId(7);

/// Calls the target, reports the result, stores the byte, and repeats.
fn caller(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(rsp, STACK)?;
    a.mov(rsi, TARGET)?;
    a.set_label(&mut again)?;
    a.call(qword_ptr(rsi))?;
    a.out(0x80, al)?;
    a.mov(rdi, qword_ptr(rsi + (PATCH - TARGET)))?;
    a.mov(cl, byte_ptr(rsi + (VALUE - TARGET)))?;
    a.test(rdi, rdi)?;
    a.jz(again)?;
    a.mov(byte_ptr(rdi), cl)?;
    a.jmp(again)
}

/// Returns `value`.
fn function(value: u8) -> Vec<u8> {
    let (_, bytes) = assemble(LATER, |a| {
        a.mov(al, i32::from(value))?;
        a.ret()
    });
    assert_eq!(bytes[OPERAND as usize], value);
    bytes
}

struct Bench {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    host: Arc<Host>,
}

impl Bench {
    fn new(vcpus: usize, huge: HugePages, pieces: &[Piece]) -> Self {
        let builder = VmBuilder {
            seed: Some(1),
            huge,
            ..builder(16, 32, vcpus, "")
        };
        let clock = Arc::new(VirtualClock::default()) as Arc<dyn Clock>;
        let host = builder.host(Arc::clone(&clock)).unwrap();
        let (vm, vcpus, ..) = boot_image(&builder, &host, clock, &program::image(pieces), |_| ());
        Self { vm, vcpus, host }
    }

    /// Adds a slot of 4 MiB at `guest`.
    fn add_slot(&self, guest: u64, flags: SlotFlags) -> BackingRange {
        let notifier = self.vm.mmu().notifier();
        let pages = PageCount::from_bytes(4 * MIB);
        let backing = self.host.add_region(pages, notifier).unwrap();
        self.host.advise_huge(backing).unwrap();
        let spec = SlotSpec {
            id: SLOT,
            guest,
            backing: backing.start(),
            bytes: 4 * MIB,
            flags,
        };
        self.vm.add_slot(spec).unwrap();
        backing
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.vm.write(Gpa::new(at).unwrap(), bytes).unwrap();
    }

    fn read(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.vm.read(Gpa::new(at).unwrap(), &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    fn call(&self, target: u64) {
        self.write(TARGET, &target.to_le_bytes());
    }

    /// Runs vCPU `index` until it reports a value, and returns the value.
    fn reported(&mut self, index: usize) -> u32 {
        for _ in 0..10_000 {
            match self.vcpus[index].step(1_000_000) {
                Step::Ran | Step::Wait(Wait::Busy) => {}
                Step::Exit(Exit::IoOut {
                    port: 0x80, value, ..
                }) => return value,
                Step::Exit(exit) => panic!("{exit:?}"),
                Step::Failed(error) => panic!("{error}"),
                Step::Wait(_) => panic!("it waits"),
            }
        }
        panic!("vCPU {index} runs for ever, and gets nowhere");
    }
}

const POLICIES: [HugePages; 2] = [HugePages::Never, HugePages::Always];

#[test]
fn code_runs_from_a_slot_that_came_later_and_changes_there() {
    for huge in POLICIES {
        let mut bench = Bench::new(2, huge, &[assemble(CODE, caller)]);
        bench.add_slot(LATER, SlotFlags::empty());
        bench.write(LATER, &function(1));
        bench.call(LATER);
        assert_eq!([bench.reported(0), bench.reported(1)], [1, 1], "{huge:?}");

        // The vCPU that runs the function writes to it, and so does another vCPU.
        bench.write(VALUE, &[2]);
        bench.write(PATCH, &(LATER + OPERAND).to_le_bytes());
        assert_eq!(bench.reported(0), 2, "{huge:?}");
        bench.write(PATCH, &[0; 8]);
        assert_eq!(bench.reported(1), 2, "{huge:?}");

        // The VMM writes to the function.
        bench.write(LATER + OPERAND, &[3]);
        assert_eq!([bench.reported(0), bench.reported(1)], [3, 3], "{huge:?}");
    }
}

#[test]
fn code_runs_where_its_slot_has_moved_to() {
    // The last address is at the end of the identity map, in the hole for devices.
    for to in [2 * LATER, 3 * LATER + (LATER >> 1), 64 * MIB] {
        let mut bench = Bench::new(1, HugePages::Always, &[assemble(CODE, caller)]);
        bench.add_slot(LATER, SlotFlags::empty());
        bench.write(LATER, &function(1));
        bench.call(LATER);
        assert_eq!(bench.reported(0), 1);
        bench
            .vm
            .move_slot(SLOT, Gpa::new(to).unwrap().gfn())
            .unwrap();
        bench.call(to);
        assert_eq!(bench.reported(0), 1, "at {to:#x}");
        bench.write(VALUE, &[2]);
        bench.write(PATCH, &(to + OPERAND).to_le_bytes());
        assert_eq!(bench.reported(0), 2, "at {to:#x}");
    }
}

#[test]
fn code_runs_from_a_read_only_slot_and_a_new_one_in_its_place() {
    for huge in POLICIES {
        let mut bench = Bench::new(1, huge, &[assemble(CODE, caller)]);
        bench.add_slot(LATER, SlotFlags::READONLY);
        bench.write(LATER, &function(1));
        bench.call(LATER);
        assert_eq!(bench.reported(0), 1);
        bench.write(LATER + OPERAND, &[2]);
        assert_eq!(bench.reported(0), 2, "the VMM writes to it");

        bench.vm.set_slot_flags(SLOT, SlotFlags::empty()).unwrap();
        bench.write(VALUE, &[3]);
        bench.write(PATCH, &(LATER + OPERAND).to_le_bytes());
        assert_eq!(bench.reported(0), 3, "the guest may now too");

        bench.write(PATCH, &[0; 8]);
        bench.vm.remove_slot(SLOT).unwrap();
        bench.add_slot(LATER, SlotFlags::empty());
        bench.write(LATER, &function(4));
        assert_eq!(bench.reported(0), 4);
    }
}

/// Bits of page-table entries.
const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// The identity map of the first GiB at `at`, as in a firmware's ROM.
fn tables(at: u64, used: u64) -> Vec<Piece> {
    let page = PAGE_SIZE as u64;
    let link = |to| [to | PRESENT | WRITE | used & ACCESSED];
    let leaf = |i: u64| i << 21 | PRESENT | WRITE | LARGE | used;
    let leaves: Vec<u64> = (0..512).map(leaf).collect();
    vec![
        program::words(at, &link(at + page)),
        program::words(at + page, &link(at + 2 * page)),
        program::words(at + 2 * page, &leaves),
    ]
}

/// Loads the page tables at `at`, increments a word through them, and reports its value.
fn under_tables(a: &mut CodeAssembler, at: u64) -> Result<(), IcedError> {
    a.mov(rsp, STACK)?;
    a.mov(rax, at)?;
    a.mov(cr3, rax)?;
    a.mov(rsi, TARGET)?;
    a.inc(qword_ptr(rsi))?;
    a.mov(rax, qword_ptr(rsi))?;
    a.out(0x80, al)
}

/// A walk cannot set A and D in read-only page tables. An entry with the bits needs no write. The
/// walk uses an entry without the bits unchanged, as KVM's walker does.
#[test]
fn page_tables_may_be_in_a_read_only_slot() {
    for (huge, used) in POLICIES
        .into_iter()
        .flat_map(|huge| [(huge, ACCESSED | DIRTY), (huge, ACCESSED), (huge, 0)])
    {
        let program = assemble(CODE, |a| under_tables(a, LATER));
        let mut bench = Bench::new(1, huge, &[program]);
        bench.add_slot(LATER, SlotFlags::READONLY);
        let tables = tables(LATER, used);
        tables
            .iter()
            .for_each(|(at, bytes)| bench.write(*at, bytes));
        bench.write(TARGET, &41_u64.to_le_bytes());
        assert_eq!(bench.reported(0), 42, "{huge:?} {used:#x}");
        assert_eq!(bench.read(TARGET), 42, "{huge:?} {used:#x}");
        for (at, bytes) in &tables {
            let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert_eq!(bench.read(*at), first, "read-only means so");
        }
    }
}

/// Exits on missing memory are refused for read-only slots and for memory without missing pages,
/// and nothing changes.
#[test]
fn exits_where_no_page_is_missing_are_refused() {
    let bench = Bench::new(
        1,
        HugePages::Never,
        &[assemble(CODE, |a| under_tables(a, LATER))],
    );
    bench.add_slot(LATER, SlotFlags::empty());
    let flags = SlotFlags::EXIT_ON_MISSING;
    let slots = bench.vm.mmu().slots();
    let id = slots.iter().last().expect("just added").id;
    let refused = bench.vm.set_slot_flags(id, flags | SlotFlags::READONLY);
    assert_eq!(refused, Err(SlotError::ReadOnlyExits { id }.into()));
    let refused = bench.vm.set_slot_flags(id, flags);
    assert_eq!(refused, Err(SlotError::NoSource { id }.into()));
    let after = bench.vm.mmu().slots();
    assert!(after.iter().all(|slot| slot.flags.is_empty()));
}

/// The backing of a slot is removed while the guest runs, and another VM gets its frames.
#[test]
fn a_guest_whose_memory_is_removed_stops_and_writes_to_no_other_memory() {
    for huge in POLICIES {
        let counter = |a: &mut CodeAssembler| {
            let mut again = a.create_label();
            a.mov(rsi, LATER)?;
            a.set_label(&mut again)?;
            a.inc(qword_ptr(rsi))?;
            a.jmp(again)
        };
        let mut bench = Bench::new(1, huge, &[assemble(CODE, counter)]);
        let backing = bench.add_slot(LATER, SlotFlags::empty());
        for _ in 0..10 {
            assert!(matches!(bench.vcpus[0].step(10_000), Step::Ran));
        }
        assert!(bench.read(LATER) > 10_000, "{huge:?}");
        bench.host.remove_region(backing).unwrap();

        let builder = builder(16, 32, 1, "");
        let clock = Arc::new(VirtualClock::default()) as Arc<dyn Clock>;
        let config = VmConfig {
            memory: builder.memory,
            vcpus: 1,
            apf: builder.apf,
            ..VmConfig::default()
        };
        let heir = Vm::new(Arc::clone(&bench.host), clock, config).unwrap();
        let ones = vec![1; 16 << 20];
        heir.write(Gpa::new(0).unwrap(), &ones).unwrap();
        let ended = (0..1000).find_map(|_| match bench.vcpus[0].step(10_000) {
            Step::Failed(error) => Some(error),
            _ => None,
        });
        assert!(
            matches!(ended, Some(VcpuError::PageLost { .. })),
            "{ended:?}"
        );
        let mut bytes = vec![0; 16 << 20];
        heir.read(Gpa::new(0).unwrap(), &mut bytes).unwrap();
        assert!(bytes == ones, "{huge:?}");
    }
}

/// Reclaim would evict pages of that memory without invalidating this VM's tables and TLBs.
#[test]
fn memory_of_another_vm_is_refused_as_backing() {
    let bench = Bench::new(1, HugePages::Never, &[assemble(CODE, caller)]);
    let time = Arc::new(VirtualClock::default()) as Arc<dyn Clock>;
    let other = Vm::new(Arc::clone(&bench.host), time, bench.vm.config()).unwrap();
    let theirs = other
        .mmu()
        .slots()
        .find(Gfn::new(0).unwrap())
        .unwrap()
        .backing;
    let ours = bench.add_slot(LATER, SlotFlags::empty());
    let past = ours.start().checked_add_pages(1).unwrap();
    for backing in [theirs.start(), BackingAddr::new(0), past] {
        let spec = SlotSpec {
            id: SlotId(8),
            guest: 2 * LATER,
            backing,
            bytes: 4 * MIB,
            flags: SlotFlags::empty(),
        };
        let refused = bench.vm.add_slot(spec);
        let id = SlotId(8);
        assert_eq!(refused, Err(SlotError::ForeignBacking { id, backing }));
    }
}

#[test]
fn a_vm_boots_once() {
    let pieces = [assemble(CODE, caller)];
    let bench = Bench::new(2, HugePages::Never, &pieces);
    let again = || bench.vm.boot(&program::image(&pieces), "").err();
    assert!(matches!(again(), Some(SoftError::Booted)));
    // A second boot is refused even after the vCPUs are dropped, because their pending interrupts
    // and logged pages remain in the VM.
    drop(bench.vcpus);
    assert!(matches!(again(), Some(SoftError::Booted)));
}
