//! An AArch64 guest of a few instructions, with stage 1 off, for the ABI of asynchronous page
//! faults. The test provides its far pages.

use super::builder;
use lacuna_addr::{Gpa, PageCount};
use lacuna_cpu::Processor;
use lacuna_machine::arm64::SysReg;
use lacuna_machine::{
    Arch, GuestMemory as _, PageRequest, PageSource, SlotFlags, SlotId, SourcePage, Vm as _,
};
use lacuna_soft::{Apf, ApfStats, Host, SlotSpec, Step, Vcpu, Vm, VmBuilder, VmConfig, Wait};
use lacuna_sync::{Clock, HostClock};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub const BASE: u64 = 0x4000_0000;
/// HVC, then an endless loop.
pub const CALL: u64 = BASE + 0x1000;
/// A load of [`FAR`] pages through X10, then an endless loop.
pub const LOAD: u64 = BASE + 0x1100;
pub const WAIT: u64 = BASE + 0x1200;
/// The handler of the SDEI event: an endless loop.
pub const HANDLER: u64 = BASE + 0x1300;
/// Sixteen endless loops.
pub const VBAR: u64 = BASE + 0x2000;
pub const FROM_EL1: u64 = VBAR + 0x200;
pub const FROM_EL0: u64 = VBAR + 0x400;
pub const IRQ_FROM_EL1: u64 = VBAR + 0x280;
/// A load behind the vector table.
pub const NEAR: u64 = VBAR + 0x900;
pub const BLOCK: u64 = BASE + 0x3000;
/// The test provides the pages from here on.
pub const FAR: u64 = BASE + (1 << 20);
pub const PAGE: u64 = 0x1000;
/// The slot of a page that a test adds.
pub const ADDED: SlotId = SlotId(7);

pub const HVC: u32 = 0xd400_0002;
pub const SELF: u32 = 0x1400_0000;
pub const LDR_X9_X10: u32 = 0xf940_0149;
pub const WFI: u32 = 0xd503_207f;

pub const EL0: u64 = 0;
pub const EL1: u64 = 0x3c5;
pub const EL1_UNMASKED: u64 = 0x5;

pub const UID: u32 = 0x8600_ff01;
pub const SERVICES: u32 = 0x8600_0000;
pub const ABORT: u32 = 0x8600_0001;
pub const SDEI_FORM: u32 = 0x8600_0002;
pub const ENABLE: u64 = 4;
pub const ACK: u64 = 5;
pub const SDEI: u32 = 0xc400_0020;
pub const CPU_OFF: u32 = 0x8400_0002;
pub const EVENT: u64 = 0x4040_0001;
pub const PPI: u32 = 17;

pub const ENABLED: u64 = 1;
pub const SEND_ALWAYS: u64 = 2;
pub const NOT_SUPPORTED: i64 = -1;
pub const NOT_REQUIRED: i64 = -2;
pub const WAKE_ALL: u64 = 0xffff_ffff;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    Abort,
    Sdei,
}

pub const FORMS: [Form; 2] = [Form::Abort, Form::Sdei];

/// A page source that answers for far pages at the test's command, and at once for others.
#[derive(Default)]
pub struct Held(Mutex<BTreeMap<u64, PageRequest>>);

impl PageSource for Held {
    fn describe(&self) -> String {
        "held".into()
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page().0;
        if page < (FAR - BASE) / PAGE {
            let _ = request.provide(&[0; 4096]);
        } else {
            self.0.lock().unwrap().insert(page, request);
        }
    }
}

impl Held {
    /// Answers the request for far page `page`.
    pub fn provide(&self, page: u64) {
        let page = page + (FAR - BASE) / PAGE;
        let request = self.0.lock().unwrap().remove(&page);
        let _ = request.expect("it was asked for").provide(&[7; 4096]);
    }
}

pub struct Machine {
    pub vm: Arc<Vm>,
    pub vcpu: Vcpu,
    pub source: Arc<Held>,
    pub host: Arc<Host>,
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    Ran,
    Halt,
    Page,
}

impl Machine {
    pub fn new() -> Self {
        Self::offered(Apf::On)
    }

    pub fn offered(apf: Apf) -> Self {
        Self::with_budget(apf, 24)
    }

    /// A machine with `resident` MiB of frames for its 16 MiB of memory.
    pub fn with_budget(apf: Apf, resident: u64) -> Self {
        let source = Arc::new(Held::default());
        let builder = VmBuilder {
            arch: Arch::Arm64,
            apf,
            source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
            ..builder(16, resident, 2, "")
        };
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock)).unwrap();
        let config = VmConfig {
            arch: Arch::Arm64,
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf,
            ..VmConfig::default()
        };
        let pages = Arc::clone(&source) as Arc<dyn PageSource>;
        let vm = Vm::with_source(Arc::clone(&host), clock, config, pages).unwrap();
        let put = |at: u64, word: u32| vm.write(gpa(at), &word.to_le_bytes()).unwrap();
        for (at, word) in [
            (CALL, HVC),
            (LOAD, LDR_X9_X10),
            (NEAR, LDR_X9_X10),
            (WAIT, WFI),
        ] {
            put(at, word);
            put(at + 4, SELF);
        }
        put(HANDLER, SELF);
        (0..16).for_each(|vector| put(VBAR + vector * 0x80, SELF));
        vm.write(gpa(BLOCK), &[0; 8]).unwrap();
        let vcpu = vm.bare_vcpus().unwrap().swap_remove(0);
        let mut machine = Self {
            vm,
            vcpu,
            source,
            host,
        };
        machine.set_vbar();
        // The first steps in a page of code handle requests.
        for at in [CALL + 4, VBAR] {
            machine.put_at(at, EL1);
            machine.settle();
        }
        machine
    }

    /// A guest that has enabled `form`, and has seen the wake-all.
    pub fn enabled(form: Form, flags: u64) -> Self {
        Self::new().enable(form, flags)
    }

    /// As [`Machine::enabled`].
    pub fn enable(self, form: Form, flags: u64) -> Self {
        let mut machine = self;
        if form == Form::Sdei {
            assert_eq!(machine.event(1, &[EVENT, HANDLER, 77, 0]), 0);
            assert_eq!(machine.event(2, &[EVENT]), 0);
            assert_eq!(machine.event(12, &[]), 0);
        }
        assert_eq!(machine.switch(form, BLOCK | ENABLED | flags), 0);
        machine.put_at(LOAD + 4, EL1);
        assert_eq!(machine.ready(form), Some(WAKE_ALL));
        machine.consume(form);
        machine
    }

    /// Adds the slot [`ADDED`]: a page at `at`, which is page `page` of the source.
    pub fn add_page(&self, at: u64, page: SourcePage) {
        add_page(&self.vm, &self.source, at, page);
    }

    pub fn cpu(&mut self) -> &mut lacuna_arm64::Cpu {
        match &mut self.vcpu {
            Vcpu::Arm64(vcpu) => vcpu.processor(),
            Vcpu::X86(_) => unreachable!("an AArch64 VM"),
        }
    }

    pub fn set_vbar(&mut self) {
        let mut state = self.cpu().save().unwrap();
        state.system.insert(SysReg::new([3, 0, 12, 0, 0]), VBAR);
        self.cpu().restore(&state).unwrap();
    }

    pub fn put_at(&mut self, pc: u64, pstate: u64) {
        let regs = self.cpu().regs();
        self.cpu()
            .set_regs(&lacuna_arm64::Regs { pc, pstate, ..regs });
    }

    pub fn pc(&mut self) -> u64 {
        self.cpu().regs().pc
    }

    pub fn step(&mut self) -> End {
        let end = match self.vcpu.step(1) {
            Step::Ran => End::Ran,
            Step::Wait(Wait::Halt(None)) => End::Halt,
            Step::Wait(Wait::Page(ticket)) => {
                self.host.start(&ticket);
                End::Page
            }
            Step::Wait(_) => panic!("another wait"),
            Step::Exit(exit) => panic!("{exit:?}"),
            Step::Failed(error) => panic!("{error}"),
        };
        self.vcpu.verify();
        end
    }

    /// Steps a few times, until nothing more can happen.
    pub fn settle(&mut self) -> End {
        (0..4).map(|_| self.step()).last().unwrap()
    }

    /// Calls HVC at EL1. Returns X0 to X3.
    pub fn values(&mut self, function: u32, args: &[u64]) -> [u64; 4] {
        self.put_at_call(function, args);
        assert_eq!(self.step(), End::Ran);
        self.cpu().regs().x[..4].try_into().unwrap()
    }

    /// Makes HVC at EL1 the next instruction. Returns the registers.
    pub fn put_at_call(&mut self, function: u32, args: &[u64]) -> lacuna_arm64::Regs {
        let mut regs = self.cpu().regs();
        regs.x[0] = function.into();
        regs.x[1..6].fill(0);
        regs.x[1..=args.len()].copy_from_slice(args);
        (regs.pc, regs.pstate) = (CALL, EL1);
        self.cpu().set_regs(&regs);
        self.cpu().unhalt();
        regs
    }

    pub fn call(&mut self, function: u32, args: &[u64]) -> i64 {
        let values = self.values(function, args);
        assert_eq!(self.pc(), CALL + 4);
        values[0] as i64
    }

    /// The handler of the SDEI event ends: the program continues as if there had been no event.
    pub fn complete(&mut self) {
        let before = self.cpu().regs();
        self.values(SDEI + 5, &[]);
        let after = self.cpu().regs();
        assert_eq!((after.pc, after.pstate), (before.x[2], before.x[3]));
        assert_eq!(after.x[18..], before.x[18..]);
    }

    pub fn event(&mut self, number: u32, args: &[u64]) -> i64 {
        self.call(SDEI + number, args)
    }

    pub fn acknowledge(&mut self) -> i64 {
        self.call(SDEI_FORM, &[ACK])
    }

    pub fn switch(&mut self, form: Form, value: u64) -> i64 {
        let (low, high) = (value & 0xffff_ffff, value >> 32);
        match form {
            Form::Abort => self.call(ABORT, &[low, high | 1 << 31]),
            Form::Sdei => self.call(SDEI_FORM, &[ENABLE, low, high]),
        }
    }

    /// The program at `level` loads from far page `page`.
    pub fn load(&mut self, page: u64, pstate: u64) -> End {
        self.load_at(LOAD, page, pstate)
    }

    pub fn load_at(&mut self, pc: u64, page: u64, pstate: u64) -> End {
        let mut regs = self.cpu().regs();
        regs.x[10] = FAR + page * PAGE;
        (regs.pc, regs.pstate) = (pc, pstate);
        self.cpu().set_regs(&regs);
        self.step()
    }

    pub fn provide(&mut self, page: u64) {
        self.source.provide(page);
    }

    /// Whether the source has an unanswered request for a far page.
    pub fn is_asked_for(&self, page: u64) -> bool {
        let page = page + (FAR - BASE) / PAGE;
        self.source.0.lock().unwrap().contains_key(&page)
    }

    pub fn words(&self) -> (u32, u32) {
        let mut words = [0; 8];
        self.vm.read(gpa(BLOCK), &mut words).unwrap();
        let word = |at: usize| u32::from_le_bytes(words[at..at + 4].try_into().unwrap());
        (word(0), word(4))
    }

    /// The guest reads the words, and does not acknowledge.
    pub fn read_words(&self) {
        self.vm.write(gpa(BLOCK), &[0; 8]).unwrap();
    }

    /// The guest has read the event.
    pub fn consume(&mut self, form: Form) {
        self.read_words();
        if form == Form::Sdei && self.line() {
            assert_eq!(self.acknowledge(), 0);
        }
    }

    /// The level of the page-ready interrupt.
    pub fn line(&mut self) -> bool {
        self.cpu().save().unwrap().gic.private.level >> PPI & 1 != 0
    }

    /// The token of page-not-present, if the guest has got it.
    pub fn not_present(&mut self, form: Form, vector: u64) -> Option<u64> {
        self.step();
        let (reason, word) = self.words();
        if reason != 1 {
            return None;
        }
        let regs = self.cpu().regs();
        Some(match form {
            Form::Abort => {
                assert_eq!(regs.pc, vector);
                self.abort()
            }
            Form::Sdei => {
                assert_eq!((regs.pc, regs.pstate), (HANDLER, EL1));
                assert_eq!(regs.x[..3], [EVENT, 77, LOAD]);
                word.into()
            }
        })
    }

    /// FAR_EL1 of the last taken abort, an external one.
    pub fn abort(&mut self) -> u64 {
        let system = self.cpu().system();
        assert_eq!(system.esr & 0x3f, 0x10);
        system.far
    }

    /// A program needs a page, and the guest gets page-not-present for it.
    pub fn notified(&mut self, form: Form, page: u64) -> u64 {
        assert_eq!(self.load(page, EL0), End::Ran);
        let token = self.not_present(form, FROM_EL0).expect("a notification");
        if form == Form::Sdei {
            self.complete();
        }
        self.put_at(LOAD + 4, EL0);
        token
    }

    /// The token of page-ready, if the guest has got it.
    pub fn ready(&mut self, form: Form) -> Option<u64> {
        self.settle();
        let (reason, word) = self.words();
        if reason != 2 {
            return None;
        }
        Some(match form {
            Form::Abort => self.abort(),
            Form::Sdei => {
                assert!(self.line());
                word.into()
            }
        })
    }

    pub fn stats(&self) -> ApfStats {
        self.vm.apf_stats()[0]
    }
}

/// Adds the slot [`ADDED`] to `vm`: a page at `at`, which is page `page` of `source`.
pub fn add_page(vm: &Vm, source: &Arc<Held>, at: u64, page: SourcePage) {
    let source = Arc::clone(source) as Arc<dyn PageSource>;
    let (host, notifier) = (vm.host(), vm.mmu().notifier());
    let backing = host.add_region_from(source, page, PageCount::new(1), notifier);
    let spec = SlotSpec {
        id: ADDED,
        guest: at,
        backing: backing.unwrap().start(),
        bytes: PAGE,
        flags: SlotFlags::empty(),
    };
    vm.add_slot(spec).unwrap();
}

pub fn gpa(at: u64) -> Gpa {
    Gpa::new(at).unwrap()
}
