//! A guest of a few fields, which records its events.
#![allow(dead_code, reason = "every test file uses its part")]

use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::x86::{self, Control, Features, Msr, Queue};
use lacuna_apf::{Completion, Guest, NotPresent, Prefault, SharedWords, Unwritable};
use lacuna_sync::Nanos;

pub const AREA: u64 = 0x7_0040;
pub const VECTOR: u8 = 0xf3;
pub const WAKE_ALL: u32 = u32::MAX;

/// EN bits.
pub const ENABLED: u64 = 1;
pub const SEND_ALWAYS: u64 = 2;
pub const AS_INT: u64 = 8;

/// The content of the guest's area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    Ram,
    ReadOnly,
    Absent,
}

/// The events delivered to the guest, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    PageFault(u64),
    Interrupt(u8),
    Prefault(Gfn, Access),
    Resume,
}

/// The processor as the guest's queue sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuState {
    pub user: bool,
    pub paging: bool,
    pub interruptible: bool,
    pub lapic: bool,
}

pub struct Mock {
    pub state: CpuState,
    pub memory: Memory,
    /// The address of its two words.
    pub area: u64,
    pub words: [u32; 2],
    pub prefault: Prefault,
    pub events: Vec<Event>,
}

impl Mock {
    /// A guest in user mode that can take any event.
    pub fn new() -> Self {
        Self {
            state: CpuState {
                user: true,
                paging: true,
                interruptible: true,
                lapic: true,
            },
            memory: Memory::Ram,
            area: AREA,
            words: [0; 2],
            prefault: Prefault::Mapped,
            events: Vec::new(),
        }
    }

    fn word(&mut self, at: Gpa) -> Option<&mut u32> {
        let offset = at.get().checked_sub(self.area)?;
        assert!(offset.is_multiple_of(4));
        self.words.get_mut(offset as usize / 4)
    }

    /// The events delivered since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Its #PF handler: reads and zeroes the reason word and the token.
    pub fn take_page_fault(&mut self) -> Option<(u32, u32)> {
        let at = self
            .events
            .iter()
            .position(|event| matches!(event, Event::PageFault(_)))?;
        let Event::PageFault(address) = self.events.remove(at) else {
            unreachable!();
        };
        self.state.interruptible = true;
        let reason = std::mem::take(&mut self.words[0]);
        Some((reason, u32::try_from(address).unwrap()))
    }

    /// Its interrupt handler: reads and zeroes the token.
    pub fn take_interrupt(&mut self) -> Option<u32> {
        let interrupt = Event::Interrupt(VECTOR);
        let at = self.events.iter().position(|&event| event == interrupt)?;
        self.events.remove(at);
        Some(std::mem::take(&mut self.words[1]))
    }
}

impl Guest for Mock {
    fn is_interruptible(&self) -> bool {
        self.state.interruptible
    }

    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault {
        self.events.push(Event::Prefault(gfn, access));
        self.prefault
    }

    fn resume(&mut self) {
        self.events.push(Event::Resume);
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
                assert_eq!(*word, 0, "an event that was not read is overwritten");
                *word = value;
                Ok(())
            }
            _ => Err(Unwritable),
        }
    }
}

impl x86::Guest for Mock {
    fn state(&self) -> x86::CpuState {
        let CpuState {
            user,
            paging,
            lapic,
            ..
        } = self.state;
        x86::CpuState {
            user,
            paging,
            lapic,
        }
    }

    fn inject_page_fault(&mut self, address: u64) {
        assert!(self.state.interruptible, "an exception on top of another");
        self.state.interruptible = false;
        self.events.push(Event::PageFault(address));
    }

    fn interrupt(&mut self, vector: u8) {
        self.events.push(Event::Interrupt(vector));
    }
}

pub fn gfn(number: u64) -> Gfn {
    Gfn::new(number).unwrap()
}

pub const NOW: Nanos = Nanos(1000);

/// A queue and its guest. `en` is the low bits of EN. The wake-all of enabling is already read.
pub struct Fixture {
    pub queue: Queue,
    pub guest: Mock,
}

impl Fixture {
    pub fn new(en: u64) -> Self {
        let mut fixture = Self::disabled(Features::all());
        fixture.enable(en);
        fixture.settle();
        fixture.guest.events.clear();
        fixture
    }

    pub fn disabled(features: Features) -> Self {
        Self::with_kick(features, || {})
    }

    pub fn with_kick(features: Features, kick: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            queue: Queue::new(3, Control::new(features), kick),
            guest: Mock::new(),
        }
    }

    pub fn enable(&mut self, en: u64) {
        assert!(self.write(Msr::Vector, u64::from(VECTOR)));
        assert!(self.write(Msr::Enable, AREA | en));
    }

    /// Whether the write was accepted.
    pub fn write(&mut self, msr: Msr, value: u64) -> bool {
        let written = self.queue.write_msr(msr, value, NOW, &mut self.guest);
        self.queue.verify();
        written.is_ok()
    }

    pub fn fault(&mut self, number: u64) -> NotPresent {
        self.fault_at(number, NOW)
    }

    pub fn fault_at(&mut self, number: u64, now: Nanos) -> NotPresent {
        let guest = &mut self.guest;
        let answer = self
            .queue
            .not_present(gfn(number), Access::Write, now, guest);
        self.queue.verify();
        answer
    }

    /// Makes a fault and delivers its page-not-present. Returns its token, which the guest has
    /// read, and its completion.
    pub fn inject(&mut self, number: u64) -> (u32, Completion) {
        let NotPresent::Injected(completion) = self.fault(number) else {
            panic!("page-not-present is delivered");
        };
        let (reason, token) = self.guest.take_page_fault().unwrap();
        assert_eq!(reason, 1);
        (token, completion)
    }

    pub fn poll(&mut self) -> usize {
        self.poll_at(NOW)
    }

    pub fn poll_at(&mut self, now: Nanos) -> usize {
        let dequeued = self.queue.poll(now, &mut self.guest);
        self.queue.verify();
        dequeued
    }

    /// Polls and reads until nothing is left. Returns the tokens that became ready, in order.
    pub fn settle(&mut self) -> Vec<u32> {
        let mut ready = Vec::new();
        loop {
            let dequeued = self.poll();
            if let Some((reason, token)) = self.guest.take_page_fault() {
                assert_eq!(reason, 2);
                ready.push(token);
            } else if let Some(token) = self.guest.take_interrupt() {
                ready.push(token);
            } else if dequeued == 0 {
                return ready;
            }
        }
    }
}

/// The result of a fault, in a form that can be compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    Wait,
    Injected,
    HaltAndStart,
    HaltOnly,
}

pub fn answer(of: &NotPresent) -> Answer {
    match of {
        NotPresent::Wait => Answer::Wait,
        NotPresent::Injected(_) => Answer::Injected,
        NotPresent::Halt(Some(_)) => Answer::HaltAndStart,
        NotPresent::Halt(None) => Answer::HaltOnly,
    }
}
