//! A vCPU with nothing to run exits to its VMM when its dirty ring is full. After a reset of the
//! ring, the vCPU gets the events of the pages that arrived meanwhile.
//!
//! ```text
//! guest      touches a swapped-out page: gets the event, continues in its handler
//!            dirties pages until the ring is full; HLT
//! vCPU       DirtyRingFull, again and again, also when the page has arrived
//! VMM        reaps and resets the ring
//! vCPU       delivers page-ready: the interrupt ends the halt
//! ```

use crate::common;

use common::program::{self, CODE, Piece, STACK, assemble, load_idt, tell, write_msr};
use common::{boot_image, builder};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use lacuna_addr::Gpa;
use lacuna_machine::{
    DirtyRings as _, DirtyTracking as _, Exit, GuestMemory as _, Kick as _, MemorySlot,
    MemorySlots as _, SaveRestore as _, StateError, Vcpu as _, Vm as _,
};
use lacuna_soft::{
    Apf, ApfStats, Backup, Delivery, Detection, Host, Logging, RingSize, Step, Vcpu, Vm, VmBuilder,
    Wait,
};
use lacuna_sync::{Clock, VirtualClock};
use std::ops::Range;
use std::sync::Arc;

/// The handlers of #PF, and of the page-ready interrupt. They share a page with the other code, so
/// that none of it is swapped out.
const FAULTED: u64 = CODE + 0x800;
const READY: u64 = CODE + 0xc00;
const READY_VECTOR: u8 = 0x50;
/// The async-fault area: two words that the host writes. The count of page-ready events follows it.
const AREA: u64 = 0x23_0000;
const TOLD: u64 = AREA + 0x100;
/// A swapped-out page, and its content.
const AWAY: u64 = 0x30_0000;
const CONTENT: u64 = 0x1234_5678_9abc_def0;
/// The pages to be dirtied.
const HEAP: u64 = 0x40_0000;
const HEAP_PAGES: u64 = 1024;

/// Progress of the guest: values that it writes to its port.
const PREPARED: u8 = 1;
const DONE: u8 = 2;

/// Why the guest waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Halts {
    /// The guest gets page-not-present, has nothing else to do, and executes HLT.
    Itself,
    /// The event cannot be delivered, so the vCPU halts artificially.
    Artificially,
}

fn store_to_pages(a: &mut CodeAssembler, pages: u64) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(rdi, HEAP)?;
    a.xor(ebx, ebx)?;
    a.set_label(&mut again)?;
    a.inc(qword_ptr(rdi))?;
    a.add(rdi, 4096)?;
    a.inc(rbx)?;
    a.cmp(rbx, pages as i32)?;
    a.jb(again)
}

fn wait_for_events(a: &mut CodeAssembler, times: i32) -> Result<(), IcedError> {
    let (mut again, mut done) = (a.create_label(), a.create_label());
    a.mov(rsi, TOLD)?;
    a.set_label(&mut again)?;
    a.cmp(qword_ptr(rsi), times)?;
    a.jae(done)?;
    a.hlt()?;
    a.jmp(again)?;
    a.set_label(&mut done)?;
    a.zero_bytes()
}

/// The program from its first instruction on. It dirties `pages` pages before it waits.
fn body(a: &mut CodeAssembler, halts: Halts, pages: u64) -> Result<(), IcedError> {
    const ENABLED: u32 = 1 | 1 << 3;
    const SEND_ALWAYS: u32 = 1 << 1;
    a.mov(rsp, STACK)?;
    load_idt(a)?;
    // The local APIC, as x2APIC.
    write_msr(a, 0x1b, 0xfee0_0c00)?;
    write_msr(a, 0x80f, 0x1ff)?;
    store_to_pages(a, HEAP_PAGES)?;
    a.sti()?;
    write_msr(a, 0x4b56_4d06, READY_VECTOR.into())?;
    let always = match halts {
        Halts::Itself => SEND_ALWAYS,
        Halts::Artificially => 0,
    };
    write_msr(a, 0x4b56_4d02, AREA as u32 | ENABLED | always)?;
    // Enabling raises a wake-all first.
    wait_for_events(a, 1)?;
    a.mov(r8, AWAY)?;
    tell(a, PREPARED)?;
    let mut resume = a.create_label();
    a.lea(r9, ptr(resume))?;
    match halts {
        Halts::Itself => {
            a.mov(rax, qword_ptr(r8))?;
            a.set_label(&mut resume)?;
            store_to_pages(a, pages)?;
            wait_for_events(a, 2)?;
        }
        Halts::Artificially => {
            store_to_pages(a, pages)?;
            a.set_label(&mut resume)?;
            a.nop()?;
        }
    }
    a.mov(r10, qword_ptr(r8))?;
    tell(a, DONE)
}

/// The handler reads the event, and continues at R9.
fn faulted(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, AREA)?;
    a.mov(dword_ptr(rax), 0)?;
    a.add(rsp, 8)?;
    a.mov(qword_ptr(rsp), r9)?;
    a.iretq()
}

fn ready(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, AREA)?;
    a.mov(dword_ptr(rax + 4), 0)?;
    a.inc(qword_ptr(rax + (TOLD - AREA)))?;
    write_msr(a, 0x4b56_4d07, 1)?;
    // End of interrupt.
    write_msr(a, 0x80b, 0)?;
    a.iretq()
}

fn guest(halts: Halts, pages: u64) -> Vec<Piece> {
    let mut pieces = program::idt(&[(14, FAULTED), (READY_VECTOR, READY)]);
    pieces.push(assemble(CODE, |a| body(a, halts, pages)));
    pieces.push(assemble(FAULTED, faulted));
    pieces.push(assemble(READY, ready));
    pieces
}

/// A VM with one vCPU. The test decides when a page arrives.
struct Bench {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    host: Arc<Host>,
    clock: Arc<VirtualClock>,
}

impl Bench {
    fn new(halts: Halts, pages: u64, detection: Detection) -> Self {
        let bench = Self::of(&guest(halts, pages), detection);
        bench.send_away();
        bench
    }

    fn of(pieces: &[Piece], detection: Detection) -> Self {
        let builder = VmBuilder {
            seed: Some(1),
            apf: Apf::On,
            ..builder(16, 12, 1, "")
        };
        let clock = Arc::new(VirtualClock::default());
        let time = || Arc::clone(&clock) as Arc<dyn Clock>;
        let host = builder.host(time()).unwrap();
        let size = RingSize::from_bytes(RingSize::BYTES_MIN).unwrap();
        let backup = Backup::None;
        let (vm, mut vcpus, ..) =
            boot_image(&builder, &host, time(), &program::image(pieces), |vm| {
                vm.set_delivery(Delivery::Ring { size, backup }).unwrap();
            });
        vm.set_detection(detection);
        let vcpu = vcpus.pop().unwrap();
        Self {
            vm,
            vcpu,
            host,
            clock,
        }
    }

    fn pages_come(&self) {
        while let Some(at) = self.host.next_completion() {
            self.clock.advance_to(at);
            self.host.poll(at);
        }
    }

    /// Evicts pages: another VM takes all frames for a moment, and this VM has more than its share.
    fn send_away(&self) {
        let at = Gpa::new(AWAY).unwrap();
        self.vm.write(at, &CONTENT.to_le_bytes()).unwrap();
        let time = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let other = Vm::new(Arc::clone(&self.host), time, self.vm.config()).unwrap();
        let pages = |vm: &Vm, pages: Range<u64>| {
            for page in pages {
                let _ = self.host.balance();
                self.pages_come();
                vm.write(Gpa::truncate(page << 12), &[1]).unwrap();
            }
        };
        let all = self.vm.config().memory.get();
        pages(&self.vm, HEAP >> 12..all);
        pages(&other, 0..all);
        assert!(!self.vm.peek(at, &mut [0]), "{:?}", self.host.stats());
    }

    /// Runs until the guest writes `said` to its port. Ends the vCPU's waits before that.
    fn run_until(&mut self, said: u8) {
        for _ in 0..10_000 {
            match self.step() {
                Step::Ran | Step::Wait(Wait::Busy) => {}
                Step::Wait(Wait::Page(ticket)) => {
                    self.host.start(&ticket);
                    self.pages_come();
                }
                Step::Exit(Exit::IoOut {
                    port: 0x80, value, ..
                }) => {
                    assert_eq!(value, said.into());
                    return;
                }
                other => panic!("before {said}: {}", name(&other)),
            }
        }
        panic!("{said} is never said");
    }

    fn step(&mut self) -> Step {
        self.vcpu.step(1_000_000)
    }

    /// Runs until the vCPU must exit or wait. Returns the reason.
    fn run_until_idle(&mut self) -> String {
        for _ in 0..1000 {
            match self.step() {
                Step::Ran => {}
                other => return name(&other),
            }
        }
        panic!("it runs for ever");
    }

    fn start_log(&self) {
        for MemorySlot { id, .. } in self.vm.memory_slots() {
            self.vm.set_logging(id, Logging::LAZY).unwrap();
        }
    }

    fn apf_stats(&self) -> ApfStats {
        self.vm.apf_stats()[0]
    }
}

fn name(step: &Step) -> String {
    match step {
        Step::Ran => "ran".into(),
        Step::Exit(exit) => format!("{exit:?}"),
        Step::Wait(Wait::Halt(_)) => "halt".into(),
        Step::Wait(Wait::Page(_) | Wait::Provided(_)) => "wait for a page".into(),
        Step::Wait(Wait::Memory) => "wait for memory".into(),
        Step::Wait(Wait::Busy) => "busy".into(),
        Step::Failed(error) => error.to_string(),
    }
}

const FULL: &str = "DirtyRingFull";

/// The number of pages to dirty so that the guest's last store fills the ring.
fn pages_to_fill(detection: Detection) -> u64 {
    let mut bench = Bench::new(Halts::Itself, HEAP_PAGES, detection);
    bench.run_until(PREPARED);
    bench.start_log();
    assert_eq!(bench.run_until_idle(), FULL);
    const RBX: usize = 3;
    bench.vcpu.as_x86().unwrap().regs().gpr[RBX]
}

fn gets_its_events_after_the_reset(halts: Halts, pages: u64, detection: Detection) {
    let mut bench = Bench::new(halts, pages, detection);
    bench.run_until(PREPARED);
    bench.start_log();
    let before = bench.apf_stats();
    for _ in 0..3 {
        assert_eq!(bench.run_until_idle(), FULL, "{halts:?} {detection:?}");
    }
    let halted = bench.apf_stats();
    let expected = match halts {
        Halts::Itself => (before.taken + 1, before.halted),
        Halts::Artificially => (before.taken, before.halted + 1),
    };
    assert_eq!(
        (halted.taken, halted.halted),
        expected,
        "it waits for the page"
    );
    assert!(bench.host.next_completion().is_some());
    bench.pages_come();
    for _ in 0..3 {
        assert_eq!(
            bench.run_until_idle(),
            FULL,
            "the page has arrived: {halts:?} {detection:?}"
        );
    }
    assert_eq!(
        bench.apf_stats().swap_in.number,
        before.swap_in.number,
        "no event yet"
    );
    assert!(bench.vm.reap_rings(&mut |_, _| ()).unwrap() > 0);
    assert_eq!(bench.run_until_idle(), FULL, "collected, not reset");
    assert!(bench.vm.reset_rings().unwrap() > 0);
    bench.run_until(DONE);
    assert_eq!(bench.apf_stats().swap_in.number, before.swap_in.number + 1);
    const R10: usize = 10;
    assert_eq!(bench.vcpu.as_x86().unwrap().regs().gpr[R10], CONTENT);
}

#[test]
fn a_halted_vcpu_leaves_with_a_full_ring_and_gets_its_events_after_the_reset() {
    for detection in [Detection::WriteProtect, Detection::Pml] {
        let pages = pages_to_fill(detection);
        gets_its_events_after_the_reset(Halts::Itself, pages, detection);
    }
}

/// The page-modification log is flushed into the ring before the halt.
#[test]
fn an_artificial_halt_leaves_with_a_full_ring_and_ends_after_the_reset() {
    let limit = RingSize::from_bytes(RingSize::BYTES_MIN)
        .unwrap()
        .soft_limit() as u64;
    gets_its_events_after_the_reset(Halts::Artificially, limit + 20, Detection::Pml);
}

/// An instruction holds a device's answer, and the flush of the page-modification log has filled
/// the ring. A VMM that never resets the ring gets its vCPU back after a kick.
#[test]
fn a_kick_ends_the_run_of_a_vcpu_with_a_full_ring_in_the_middle_of_an_instruction() {
    let size = RingSize::from_bytes(RingSize::BYTES_MIN).unwrap();
    let program = assemble(CODE, |a| {
        a.mov(rsp, STACK)?;
        store_to_pages(a, HEAP_PAGES)?;
        tell(a, PREPARED)?;
        store_to_pages(a, size.soft_limit() as u64 + 20)?;
        a.in_(eax, 0x80)?;
        a.mov(r10, rax)?;
        tell(a, DONE)
    });
    let mut bench = Bench::of(&[program], Detection::Pml);
    bench.run_until(PREPARED);
    bench.start_log();
    let asked = bench.vcpu.run().unwrap();
    assert!(matches!(asked, Exit::IoIn { port: 0x80, .. }), "{asked:?}");
    bench.vcpu.complete_read(1234);
    for _ in 0..3 {
        assert_eq!(bench.vcpu.run(), Ok(Exit::DirtyRingFull));
        bench.vm.kick(0);
        assert_eq!(bench.vcpu.run(), Ok(Exit::Interrupted));
        let refused = bench.vcpu.save().unwrap_err();
        assert!(
            matches!(refused, StateError::MidInstruction { .. }),
            "{refused}"
        );
    }
    assert!(bench.vm.reap_rings(&mut |_, _| ()).unwrap() > 0);
    assert!(bench.vm.reset_rings().unwrap() > 0);
    bench.vm.kick(0);
    assert_eq!(bench.vcpu.run(), Ok(Exit::Interrupted));
    assert!(bench.vcpu.save().is_ok(), "the instruction is complete");
    bench.run_until(DONE);
    const R10: usize = 10;
    assert_eq!(bench.vcpu.as_x86().unwrap().regs().gpr[R10], 1234);
    bench.vm.mmu().verify();
}
