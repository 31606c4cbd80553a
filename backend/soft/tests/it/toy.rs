//! A made-up processor with a handful of instructions runs on this backend, through the same bus,
//! fault path, swap and run loop.

use crate::common;

use common::builder;
use lacuna_addr::{Access, Gfn, Gpa, PAGE_SIZE, PageCount};
use lacuna_apf::{Abi, Deliver, NotDelivered, Queue, Token, TokenFormat};
use lacuna_cpu::{Bus, Event, Exit, Privilege, Processor, Refused, Stop, Wake};
use lacuna_machine::{Apf, Arch, BootError, Exit as Left, GuestMemory as _, Image, Segment, Width};
use lacuna_machine::{StateError, Vcpu as _, VmConfig};
use lacuna_skip::test;
use lacuna_soft::{Entry, Ept, Platform, Step, VcpuOf, Vm};
use lacuna_sync::{Clock, HostClock, Nanos, VcpuSlot};
use std::sync::Arc;

/// Four registers; a program counter over instructions of 8 bytes: operation, register, register,
/// and 32 bits of operand.
#[derive(Clone, PartialEq, Debug, Default)]
struct ToyState {
    r: [u64; 4],
    pc: u64,
}

struct Toy {
    state: ToyState,
    /// The device's answer to the load at `pc`, or its acknowledgement of the store there.
    answer: Option<u64>,
    retired: u64,
    flushes: u64,
}

const LI: u8 = 1; // r := operand
const LD: u8 = 2; // r := memory at s
const ST: u8 = 3; // memory at s := r
const ADD: u8 = 4; // r += operand, signed
const SUM: u8 = 5; // r += s
const JNZ: u8 = 6; // to the operand, if r is not 0
const ALONE: u8 = 7; // memory at s += 1, with every other vCPU stopped
const WAIT: u8 = 8; // for an interrupt
const END: u8 = 9; // reports r

const fn op(code: u8, r: u8, s: u8, operand: i32) -> u64 {
    code as u64 | (r as u64) << 8 | (s as u64) << 16 | (operand as u32 as u64) << 32
}

impl Toy {
    fn load<B: Bus>(&mut self, bus: &mut B, at: u64, access: Access) -> Result<u64, Stop> {
        let gpa = Gpa::truncate(at);
        match bus.page(gpa.gfn(), access) {
            Err(Stop::Mmio(_)) => self.answer.take().ok_or(Stop::Mmio(gpa)),
            page => Ok(page?.load_u64(gpa.offset())),
        }
    }

    fn store<B: Bus>(&mut self, bus: &mut B, at: u64, value: u64) -> Result<(), Stop> {
        let gpa = Gpa::truncate(at);
        match bus.page(gpa.gfn(), Access::Write) {
            Err(Stop::Mmio(_)) => self.answer.take().map(drop).ok_or(Stop::Mmio(gpa)),
            page => {
                page?.store_u64(gpa.offset(), value);
                Ok(())
            }
        }
    }

    /// Executes one instruction. A stop has changed nothing.
    fn step<B: Bus>(&mut self, bus: &mut B, alone: bool) -> Result<Option<Exit<u64>>, Stop> {
        let code = self.load(bus, self.state.pc, Access::Fetch)?;
        let (r, s) = ((code >> 8 & 3) as usize, (code >> 16 & 3) as usize);
        let operand = (code >> 32) as i32 as i64 as u64;
        let mut next = self.state.pc + 8;
        let mut exit = None;
        let regs = self.state.r;
        let device = |stop: Stop, store: Option<u64>| match (stop, store) {
            (Stop::Mmio(gpa), None) => Ok(Some(Exit::MmioRead { gpa, size: 8 })),
            (Stop::Mmio(gpa), Some(value)) => Ok(Some(Exit::MmioWrite {
                gpa,
                size: 8,
                value,
            })),
            (stop, _) => Err(stop),
        };
        match code as u8 {
            LI => self.state.r[r] = operand,
            LD => match self.load(bus, regs[s], Access::Read) {
                Ok(value) => self.state.r[r] = value,
                Err(stop) => return device(stop, None),
            },
            ST => {
                if let Err(stop) = self.store(bus, regs[s], regs[r]) {
                    let exit = device(stop, Some(regs[r]))?;
                    // The next run counts the store as done.
                    self.answer = Some(0);
                    return Ok(exit);
                }
            }
            ADD => self.state.r[r] = regs[r].wrapping_add(operand),
            SUM => self.state.r[r] = regs[r].wrapping_add(regs[s]),
            JNZ if regs[r] != 0 => next = operand,
            JNZ => {}
            ALONE if !alone => return Ok(Some(Exit::Exclusive)),
            ALONE => {
                let value = self.load(bus, regs[s], Access::Write)?;
                self.store(bus, regs[s], value + 1)?;
            }
            WAIT => exit = Some(Exit::Halt),
            _ => exit = Some(Exit::Own(regs[r])),
        }
        self.state.pc = next;
        self.retired += 1;
        Ok(exit)
    }
}

impl Processor for Toy {
    type Fabric = ();
    type Own = u64;
    type State = ToyState;

    fn fabric(_vcpus: usize, _wake: Arc<dyn Wake>) {}

    fn new(_index: usize, _fabric: Arc<()>, _clock: Arc<dyn Clock>) -> Self {
        Self {
            state: ToyState::default(),
            answer: None,
            retired: 0,
            flushes: 0,
        }
    }

    fn run<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, fuel: u64) -> Exit<u64> {
        for _ in 0..fuel {
            if slot.has_request() {
                return Exit::Requested;
            }
            match self.step(bus, false) {
                Ok(None) => {}
                Ok(Some(exit)) => return exit,
                Err(stop) => return Exit::Stop(stop),
            }
        }
        Exit::Fuel
    }

    fn run_exclusive<B: Bus>(&mut self, bus: &mut B, _slot: &VcpuSlot) -> Exit<u64> {
        match self.step(bus, true) {
            Ok(exit) => exit.unwrap_or(Exit::Fuel),
            Err(stop) => Exit::Stop(stop),
        }
    }

    fn complete_read(&mut self, value: u64) {
        self.answer = Some(value);
    }

    fn inject(&mut self, _event: Event) -> Result<(), Refused> {
        Err(Refused)
    }

    fn is_interruptible(&self) -> bool {
        false
    }

    fn privilege(&self) -> Privilege {
        Privilege::Supervisor
    }

    fn has_interrupt(&mut self) -> bool {
        false
    }

    fn next_deadline(&self) -> Option<Nanos> {
        None
    }

    fn unhalt(&mut self) {}

    fn flush_tlb(&mut self) {
        self.flushes += 1;
    }

    fn drop_code(&mut self, _gfn: lacuna_addr::Gfn) {}

    fn drop_all_code(&mut self) {}

    fn retired(&self) -> u64 {
        self.retired
    }

    fn pc(&self) -> u64 {
        self.state.pc
    }

    fn reset(&mut self) {
        self.state = ToyState::default();
        self.answer = None;
    }

    fn save(&mut self) -> Option<ToyState> {
        self.answer.is_none().then(|| self.state.clone())
    }

    fn restore(&mut self, state: &ToyState) -> Result<(), StateError> {
        self.state = state.clone();
        self.answer = None;
        Ok(())
    }
}

/// A contract without events.
struct Silence;

impl Abi for Silence {
    fn tokens(&self) -> TokenFormat {
        TokenFormat {
            vcpu_bits: 6,
            id_bits: 16,
        }
    }

    fn is_enabled(&self) -> bool {
        false
    }

    fn shared_page(&self) -> Option<Gfn> {
        None
    }

    fn reset(&mut self) {}
}

impl Deliver<Entry<Toy>> for Silence {
    fn takes_not_present(&mut self, _: &mut Entry<Toy>) -> bool {
        false
    }

    fn not_present(&mut self, _token: Token, _guest: &mut Entry<Toy>) -> Result<(), NotDelivered> {
        Err(NotDelivered)
    }

    fn takes_ready(&mut self, _guest: &mut Entry<Toy>) -> bool {
        false
    }

    fn ready(&mut self, _token: Token, _guest: &mut Entry<Toy>) -> Result<(), NotDelivered> {
        Err(NotDelivered)
    }
}

impl Platform for Toy {
    type Format = Ept;
    type Boot = u64;
    type Apf = Silence;

    fn load(vm: &Vm, image: &Image<'_>, _command_line: &str) -> Result<u64, BootError> {
        for segment in &image.segments {
            vm.write(segment.gpa, segment.bytes)?;
        }
        Ok(image.entry.get())
    }

    fn contract(_offered: Apf) -> Silence {
        Silence
    }

    fn start(&mut self, _config: &VmConfig, _index: usize, boot: Option<&u64>) {
        self.state.pc = boot.copied().unwrap_or(0);
    }

    fn note_registers(&self, mut note: impl FnMut(u64)) {
        note(self.state.pc);
    }

    fn finish(_entry: &mut Entry<Toy>, _apf: &mut Queue<Silence>, reported: u64) -> Step {
        Step::Exit(Left::Shutdown(reported.to_string()))
    }
}

const CODE: u64 = 0x1_0000;
const DATA: u64 = 0x10_0000;

struct Machine {
    vm: Arc<Vm>,
    vcpus: Vec<VcpuOf<Toy>>,
}

/// 16 MiB of guest memory, `resident` MiB of it at once.
fn machine(resident: u64, vcpus: usize, program: &[u64]) -> Machine {
    let bytes: Vec<u8> = program.iter().flat_map(|op| op.to_le_bytes()).collect();
    let image = Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: Gpa::new(CODE).unwrap(),
            bytes: &bytes,
            size: bytes.len() as u64,
        }],
        entry: Gpa::new(CODE).unwrap(),
    };
    let clock = Arc::new(HostClock::default()) as Arc<dyn Clock>;
    let host = builder(16, resident, vcpus, "").host(Arc::clone(&clock));
    let config = VmConfig {
        memory: PageCount::from_bytes(16 << 20),
        vcpus,
        ..VmConfig::default()
    };
    let vm = Vm::new(host.unwrap(), clock, config).unwrap();
    let vcpus = vm.boot_on::<Toy>(&image, "").unwrap();
    Machine { vm, vcpus }
}

/// Writes each page's number to `pages` pages, then reads them, and reports the sum.
fn sum_of_pages(pages: i32) -> Vec<u64> {
    let at = |index: u64| (CODE + 8 * index) as i32;
    let page = PAGE_SIZE as i32;
    vec![
        op(LI, 0, 0, pages),
        op(LI, 1, 0, DATA as i32),
        op(ST, 0, 1, 0), // 2
        op(ADD, 1, 0, page),
        op(ADD, 0, 0, -1),
        op(JNZ, 0, 0, at(2)),
        op(LI, 0, 0, pages),
        op(LI, 1, 0, DATA as i32),
        op(LI, 3, 0, 0),
        op(LD, 2, 1, 0), // 9
        op(SUM, 3, 2, 0),
        op(ADD, 1, 0, page),
        op(ADD, 0, 0, -1),
        op(JNZ, 0, 0, at(9)),
        op(END, 3, 0, 0),
    ]
}

#[test]
fn its_memory_is_faulted_in_swapped_out_and_read_back() {
    let Machine { vm, mut vcpus } = machine(6, 1, &sum_of_pages(3000));
    let exit = vcpus[0].run().unwrap();
    assert_eq!(exit, Left::Shutdown((3000 * 3001 / 2).to_string()));
    let stats = vm.host().stats();
    assert!(stats.swapped_in > 500, "{stats:?}");
    assert!(
        vcpus[0].processor().flushes > 0,
        "pages were taken back from it"
    );
    assert_eq!(vcpus[0].retired(), 3 + 4 * 3000 + 2 + 5 * 3000 + 1);
}

#[test]
fn its_device_accesses_leave_to_the_vmm() {
    let device = 0x4000_0000;
    let program = [
        op(LI, 1, 0, device),
        op(LI, 0, 0, 77),
        op(ST, 0, 1, 0),
        op(LD, 2, 1, 0),
        op(END, 2, 0, 0),
    ];
    let Machine { mut vcpus, .. } = machine(32, 1, &program);
    let gpa = Gpa::new(device as u64).unwrap();
    let width = Width::Quad;
    let value = 77;
    assert_eq!(
        vcpus[0].run().unwrap(),
        Left::MmioWrite { gpa, width, value }
    );
    assert_eq!(vcpus[0].run().unwrap(), Left::MmioRead { gpa, width });
    vcpus[0].complete_read(1234);
    assert_eq!(vcpus[0].processor().save(), None, "it holds an answer");
    assert_eq!(vcpus[0].run().unwrap(), Left::Shutdown("1234".into()));
    let state = vcpus[0].processor().save().unwrap();
    vcpus[0].reset();
    assert_eq!(vcpus[0].processor().pc(), CODE, "where the boot says");
    vcpus[0].processor().restore(&state).unwrap();
    assert_eq!(vcpus[0].processor().save(), Some(state));
}

#[test]
fn two_of_them_stop_each_other_for_an_exclusive_access() {
    const ROUNDS: i32 = 2000;
    let program = [
        op(LI, 0, 0, ROUNDS),
        op(LI, 1, 0, DATA as i32),
        op(ALONE, 0, 1, 0), // 2
        op(ADD, 0, 0, -1),
        op(JNZ, 0, 0, CODE as i32 + 16),
        op(END, 0, 0, 0),
    ];
    let Machine { vm, vcpus } = machine(32, 2, &program);
    std::thread::scope(|scope| {
        for mut vcpu in vcpus {
            scope.spawn(move || assert_eq!(vcpu.run().unwrap(), Left::Shutdown("0".into())));
        }
    });
    let mut word = [0; 8];
    vm.read(Gpa::new(DATA).unwrap(), &mut word).unwrap();
    assert_eq!(
        u64::from_le_bytes(word),
        2 * ROUNDS as u64,
        "no increment is lost"
    );
}
