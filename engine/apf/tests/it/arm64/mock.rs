//! A guest of a few fields, which records its events, and a queue for it.

use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::arm64::{
    self, Answer, Control, CpuState, Effect, ExceptionLevel, Features, Line, Numbers, Queue,
};
use lacuna_apf::{Completion, Guest, NotPresent, Prefault, SharedWords, Unwritable};
use lacuna_state::arm64::Context;
use lacuna_sync::Nanos;

pub const BLOCK: u64 = 0x7_0040;
pub const VBAR: u64 = 0xffff_8000_0001_0000;
pub const NUMBERS: Numbers = Numbers::DEFAULT;
pub const HANDLER: u64 = 0xffff_8000_0002_0000;
pub const ARGUMENT: u64 = 77;
pub const WAKE_ALL: u32 = u32::MAX;
pub const NOW: Nanos = Nanos(1000);

pub const ENABLED: u64 = 1;
pub const SEND_ALWAYS: u64 = 2;

/// Function identifiers, as in the specifications.
pub const UID: u32 = 0x8600_ff01;
pub const SERVICES: u32 = 0x8600_0000;
pub const ABORT: u32 = 0x8600_0001;
pub const SDEI: u32 = 0x8600_0002;
pub const fn event(number: u32) -> u32 {
    0xc400_0020 + number
}
pub const REGISTER: u32 = event(1);
pub const ENABLE: u32 = event(2);
pub const DISABLE: u32 = event(3);
pub const CONTEXT: u32 = event(4);
pub const COMPLETE: u32 = event(5);
pub const RESUME: u32 = event(6);
pub const UNREGISTER: u32 = event(7);
pub const STATUS: u32 = event(8);
pub const MASK: u32 = event(0xb);
pub const UNMASK: u32 = event(0xc);

/// The memory behind the guest's block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    Ram,
    ReadOnly,
    Absent,
}

pub struct Mock {
    pub level: ExceptionLevel,
    pub pc: u64,
    pub interruptible: bool,
    pub memory: Memory,
    pub block: u64,
    /// Reason and token.
    pub words: [u32; 2],
    pub context: Context,
    pub elr: (u64, u64),
    pub line: Line,
    /// The data abort that the guest is about to take.
    pub abort: Option<(u64, u64)>,
    pub resumed: usize,
}

impl Mock {
    /// A guest in a program that can take any event.
    pub fn new() -> Self {
        let mut x = [0; 18];
        (1..).zip(&mut x).for_each(|(n, x)| *x = 100 * n);
        Self {
            level: ExceptionLevel::El0,
            pc: 0x40_0000,
            interruptible: true,
            memory: Memory::Ram,
            block: BLOCK,
            words: [0; 2],
            context: Context {
                x,
                pc: 0x40_0000,
                pstate: 0,
            },
            elr: (0, 0),
            line: Line::Low,
            abort: None,
            resumed: 0,
        }
    }

    fn word(&mut self, at: Gpa) -> Option<&mut u32> {
        let offset = at.get().checked_sub(self.block)?;
        assert!(offset.is_multiple_of(4));
        self.words.get_mut(offset as usize / 4)
    }

    /// Takes the data abort: its syndrome, the reason word, FAR.
    pub fn take_abort(&mut self) -> Option<(u64, u32, u32)> {
        let (esr, far) = self.abort.take()?;
        self.interruptible = true;
        let token = u32::try_from(far).expect("32 bits");
        Some((esr, self.words[0], token))
    }
}

impl Guest for Mock {
    fn is_interruptible(&self) -> bool {
        self.interruptible
    }

    fn prefault(&mut self, _: Gfn, _: Access) -> Prefault {
        Prefault::Mapped
    }

    fn resume(&mut self) {
        self.resumed += 1;
    }
}

impl SharedWords for Mock {
    fn read_u32(&mut self, at: Gpa) -> Option<u32> {
        let memory = self.memory;
        let word = self.word(at)?;
        (memory != Memory::Absent).then_some(*word)
    }

    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable> {
        let memory = self.memory;
        match self.word(at) {
            Some(word) if memory == Memory::Ram => {
                let unread = value != 0 && *word != 0;
                assert!(!unread, "an event that was not read is overwritten");
                *word = value;
                Ok(())
            }
            _ => Err(Unwritable),
        }
    }
}

impl arm64::Guest for Mock {
    fn state(&self) -> CpuState {
        CpuState {
            level: self.level,
            pc: self.pc,
            vbar: VBAR,
        }
    }

    fn context(&self) -> Context {
        self.context
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::DataAbort { esr, far } => {
                assert!(self.interruptible, "an exception on top of another");
                self.interruptible = false;
                self.abort = Some((esr, far));
            }
            Effect::Interrupt { number, line } => {
                assert_eq!(number, NUMBERS.interrupt);
                self.line = line;
            }
            Effect::Context(context) => self.context = context,
            Effect::ExceptionReturn { elr, spsr } => self.elr = (elr, spsr),
        }
    }
}

pub fn gfn(number: u64) -> Gfn {
    Gfn::new(number).unwrap()
}

/// A queue and its guest.
pub struct Fixture {
    pub queue: Queue,
    pub guest: Mock,
}

/// The X0 of a refused call.
pub const NOT_SUPPORTED: i64 = -1;
pub const NOT_REQUIRED: i64 = -2;
pub const INVALID: i64 = -3;

impl Fixture {
    pub fn new() -> Self {
        Self::offered(Features::all(), Some(NUMBERS))
    }

    pub fn offered(features: Features, numbers: Option<Numbers>) -> Self {
        Self {
            queue: Queue::new(3, Control::new(features, numbers), || {}),
            guest: Mock::new(),
        }
    }

    /// With RFCv2 enabled; the wake-all is read.
    pub fn by_abort(flags: u64) -> Self {
        let mut fixture = Self::new();
        assert_eq!(fixture.switch_abort(BLOCK | ENABLED | flags), 0);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        fixture
    }

    /// With v1 to v4 enabled, and a handler that takes events; the wake-all is read.
    pub fn by_sdei(flags: u64) -> Self {
        let mut fixture = Self::new();
        fixture.register();
        assert_eq!(fixture.switch_sdei(BLOCK | ENABLED | flags), 0);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        fixture
    }

    pub fn register(&mut self) {
        let event = u64::from(NUMBERS.event);
        assert_eq!(self.x0(REGISTER, &[event, HANDLER, ARGUMENT]), 0);
        assert_eq!(self.x0(ENABLE, &[event]), 0);
        assert_eq!(self.x0(UNMASK, &[]), 0);
    }

    pub fn call(&mut self, function: u32, given: &[u64]) -> Option<Answer> {
        let mut args = [0; 5];
        args[..given.len()].copy_from_slice(given);
        let answer = self.queue.call(function, &args, NOW, &mut self.guest);
        self.queue.verify();
        answer
    }

    /// The X0 to which a call returns.
    pub fn x0(&mut self, function: u32, args: &[u64]) -> i64 {
        match self.call(function, args) {
            Some(Answer::Values([x0, ..])) => x0 as i64,
            other => panic!("{function:#x}: {other:?}"),
        }
    }

    pub fn values(&mut self, function: u32, args: &[u64]) -> [u64; 4] {
        match self.call(function, args) {
            Some(Answer::Values(values)) => values,
            other => panic!("{function:#x}: {other:?}"),
        }
    }

    /// RFCv2: enable or disable.
    pub fn switch_abort(&mut self, value: u64) -> i64 {
        let argument = 1 << 63 | value;
        self.x0(ABORT, &[argument & 0xffff_ffff, argument >> 32])
    }

    /// v1 to v4: enable or disable.
    pub fn switch_sdei(&mut self, value: u64) -> i64 {
        self.x0(SDEI, &[4, value & 0xffff_ffff, value >> 32])
    }

    pub fn acknowledge(&mut self) -> i64 {
        self.x0(SDEI, &[5])
    }

    pub fn fault(&mut self, page: u64) -> NotPresent {
        let guest = &mut self.guest;
        let answer = self.queue.not_present(gfn(page), Access::Write, NOW, guest);
        self.queue.verify();
        answer
    }

    /// A fault with a signalled page-not-present, before the guest has taken the event.
    pub fn notified(&mut self, page: u64) -> Completion {
        match self.fault(page) {
            NotPresent::Injected(completion) => completion,
            NotPresent::Wait => panic!("waits"),
            NotPresent::Halt(_) => panic!("halts"),
        }
    }

    /// A fault without a notification of the guest.
    pub fn halts(&mut self, page: u64) -> Completion {
        match self.fault(page) {
            NotPresent::Halt(Some(completion)) => completion,
            NotPresent::Wait => panic!("waits"),
            NotPresent::Halt(None) => panic!("the page is on its way"),
            NotPresent::Injected(_) => panic!("is delivered"),
        }
    }

    pub fn enter(&mut self) {
        self.queue.enter(&mut self.guest);
    }

    pub fn poll(&mut self) -> usize {
        let dequeued = self.queue.poll(NOW, &mut self.guest);
        self.queue.verify();
        dequeued
    }

    /// Polls, and reads and acknowledges, until nothing is left. Returns the tokens that became
    /// ready.
    pub fn settle(&mut self) -> Vec<u32> {
        let mut ready = Vec::new();
        loop {
            let dequeued = self.poll();
            if let Some((_, reason, token)) = self.guest.take_abort() {
                assert_eq!(reason, 2);
                self.guest.words[0] = 0;
                ready.push(token);
            } else if self.guest.line == Line::High {
                let [reason, token] = std::mem::take(&mut self.guest.words);
                assert_eq!(reason, 2);
                ready.push(token);
                assert_eq!(self.acknowledge(), 0);
            } else if dequeued == 0 {
                return ready;
            }
        }
    }
}
