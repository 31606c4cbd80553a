//! Random sequences of calls on a queue, compared with a plain model: the result of each call, and
//! the events that the guest may get. The model states the same rules, with lists and sets.
//!
//! After every step: a token is never 0; at most 64 are queued; no ready event overtakes another,
//! is delivered while one is unread (the mock guest refuses that), lacks its not-present, or comes
//! twice; and no event from before a disable, reset or cancel is delivered after it. At the end
//! every not-present has had its ready or a later wake-all.

use crate::common;

use common::{
    AREA, AS_INT, Answer, CpuState, ENABLED, Event, Fixture, NOW, SEND_ALWAYS, VECTOR, WAKE_ALL,
    answer, gfn,
};
use lacuna_apf::x86::{Features, Msr};
use lacuna_apf::{Completion, NotPresent, QUEUED_MAX};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Clone, Debug)]
enum Op {
    Fault(u64),
    /// Many faults, to fill the queue.
    Storm(u64),
    /// One of the completions is completed; `Drop` loses it.
    Complete(prop::sample::Index),
    Poll,
    /// The guest reads a ready event. (The #PF handler runs at once: an exception is not masked.)
    ReadReady,
    Acknowledge,
    /// The guest overwrites its words: it is hostile, or has not read an event.
    Scribble([u32; 2]),
    Enable(u64),
    Disable,
    Cancel,
    Reset,
    Cpu(CpuState),
    BreakHalt,
}

fn op() -> impl Strategy<Value = Op> {
    let modes = prop::sample::select(vec![
        ENABLED,
        ENABLED | SEND_ALWAYS,
        ENABLED | AS_INT,
        ENABLED | AS_INT | SEND_ALWAYS,
    ]);
    // Usually the state of a user program.
    let mostly = || prop::bool::weighted(0.8);
    let cpu = (mostly(), mostly(), mostly(), mostly()).prop_map(
        |(user, paging, interruptible, lapic)| CpuState {
            user,
            paging,
            interruptible,
            lapic,
        },
    );
    prop_oneof![
        12 => (0..90u64).prop_map(Op::Fault),
        1 => (0..90u64).prop_map(Op::Storm),
        8 => any::<prop::sample::Index>().prop_map(Op::Complete),
        8 => Just(Op::Poll),
        6 => Just(Op::ReadReady),
        3 => Just(Op::Acknowledge),
        1 => (0..3u32, 0..3u32).prop_map(|(one, two)| Op::Scribble([one, two])),
        2 => modes.prop_map(Op::Enable),
        1 => Just(Op::Disable),
        1 => Just(Op::Cancel),
        1 => Just(Op::Reset),
        4 => cpu.prop_map(Op::Cpu),
        1 => Just(Op::BreakHalt),
    ]
}

/// The model.
#[derive(Default)]
struct Model {
    /// The value of EN, if its bit 0 is set.
    enabled: Option<u64>,
    /// Pages in flight, with the token if page-not-present was delivered.
    flights: BTreeMap<u64, Option<u32>>,
    done: VecDeque<u64>,
    wake_all: bool,
    recent: VecDeque<u64>,
    halted: Option<u64>,
    /// Delivered tokens that a cancel made the queue forget. Tasks still sleep on them.
    forgotten: BTreeSet<u32>,
}

impl Model {
    fn queued(&self) -> usize {
        self.flights.len() + usize::from(self.wake_all)
    }

    fn fault(&mut self, page: u64, cpu: CpuState, unread: bool, live: usize) -> Answer {
        let Some(en) = self.enabled else {
            return Answer::Wait;
        };
        if let Some(at) = self.recent.iter().position(|&recent| recent == page) {
            self.recent.remove(at);
            return Answer::Wait;
        }
        if !cpu.interruptible || self.done.contains(&page) {
            return Answer::Wait;
        }
        if self.flights.contains_key(&page) {
            self.halted = Some(page);
            return Answer::HaltOnly;
        }
        if self.queued() == QUEUED_MAX || live >= QUEUED_MAX {
            return Answer::Wait;
        }
        self.flights.insert(page, None);
        if cpu.paging && (cpu.user || en & SEND_ALWAYS != 0) && !unread {
            return Answer::Injected;
        }
        self.halted = Some(page);
        Answer::HaltAndStart
    }

    /// The tokens of one poll; `None` for an arrival that is not delivered.
    fn poll(&mut self, mut cpu: CpuState, words: [u32; 2]) -> Vec<Option<u32>> {
        let mut tokens = Vec::new();
        let Some(en) = self.enabled else {
            return tokens;
        };
        let mut free = match en & AS_INT {
            0 => words[0] == 0,
            _ => words[1] == 0 && cpu.lapic,
        };
        while free && (en & AS_INT != 0 || cpu.interruptible) {
            let token = if self.wake_all {
                self.wake_all = false;
                self.forgotten.clear();
                Some(WAKE_ALL)
            } else if let Some(page) = self.done.pop_front() {
                self.recent.push_back(page);
                if self.recent.len() > 64 {
                    self.recent.pop_front();
                }
                self.flights.remove(&page).unwrap()
            } else {
                break;
            };
            self.halted = None;
            tokens.push(token);
            free = token.is_none();
            cpu.interruptible &= free || en & AS_INT != 0;
        }
        if self.halted.is_some_and(|page| self.done.contains(&page)) {
            self.halted = None;
        }
        tokens
    }

    fn forget(&mut self) {
        self.forgotten.extend(self.flights.values().flatten());
        self.flights.clear();
        self.done.clear();
        self.recent.clear();
        self.wake_all = false;
        self.halted = None;
    }
}

/// A completion, and whether it is still valid.
struct Work {
    page: u64,
    completion: Completion,
    void: bool,
}

struct Run {
    fixture: Fixture,
    model: Model,
    work: Vec<Work>,
}

impl Run {
    fn new() -> Self {
        Self {
            fixture: Fixture::disabled(Features::all()),
            model: Model::default(),
            work: Vec::new(),
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Fault(page) => self.fault(*page),
            Op::Storm(from) => (*from..from + 40).for_each(|page| self.fault(page)),
            Op::Complete(which) if !self.work.is_empty() => {
                self.complete(which.index(self.work.len()));
            }
            Op::Complete(_) => {}
            Op::Poll => self.poll(),
            Op::ReadReady => self.fixture.guest.words = [0; 2],
            Op::Scribble(words) => self.fixture.guest.words = *words,
            Op::Acknowledge => self.acknowledge(),
            Op::Enable(en) => self.enable(*en),
            Op::Disable => {
                assert!(self.fixture.write(Msr::Enable, AREA | AS_INT));
                self.end();
            }
            Op::Reset => {
                self.fixture.queue.reset();
                self.end();
            }
            Op::Cancel => {
                self.fixture.queue.cancel();
                self.void();
                self.model.wake_all = self.model.enabled.is_some();
            }
            Op::Cpu(state) => self.fixture.guest.state = *state,
            Op::BreakHalt => {
                self.fixture.queue.break_halt();
                self.model.halted = None;
            }
        }
        self.check();
    }

    fn fault(&mut self, page: u64) {
        let guest = &self.fixture.guest;
        let expected = self
            .model
            .fault(page, guest.state, guest.words[0] != 0, self.work.len());
        let given = self.fixture.fault(page);
        assert_eq!(answer(&given), expected, "page {page}");
        if let NotPresent::Injected(completion) | NotPresent::Halt(Some(completion)) = given {
            let void = false;
            self.work.push(Work {
                page,
                completion,
                void,
            });
        }
        if expected == Answer::Injected {
            let (reason, token) = self.fixture.guest.take_page_fault().unwrap();
            assert_eq!(reason, 1);
            assert!(token != 0 && token != WAKE_ALL);
            self.model.flights.insert(page, Some(token));
        }
    }

    fn complete(&mut self, at: usize) {
        let work = self.work.swap_remove(at);
        if at.is_multiple_of(2) {
            work.completion.complete();
        } else {
            drop(work.completion);
        }
        if !work.void {
            self.model.done.push_back(work.page);
        }
    }

    fn poll(&mut self) {
        let expected = self.expect_poll();
        assert_eq!(self.fixture.poll(), expected.len());
        self.compare(expected);
    }

    fn acknowledge(&mut self) {
        let by_interrupt = self.model.enabled.is_some_and(|en| en & AS_INT != 0);
        self.fixture.guest.events.clear();
        let expected = if by_interrupt {
            self.expect_poll()
        } else {
            Vec::new()
        };
        assert!(self.fixture.write(Msr::Acknowledge, 1));
        self.compare(expected);
    }

    fn expect_poll(&mut self) -> Vec<Option<u32>> {
        let guest = &mut self.fixture.guest;
        // An event that it received before and has not read stays in its words.
        guest.events.clear();
        self.model.poll(guest.state, guest.words)
    }

    /// The events of one poll must equal the model's.
    fn compare(&mut self, expected: Vec<Option<u32>>) {
        let guest = &mut self.fixture.guest;
        let as_int = self.model.enabled.is_some_and(|en| en & AS_INT != 0);
        let mut tokens = Vec::new();
        for event in &guest.events {
            match *event {
                Event::PageFault(address) => tokens.push(u32::try_from(address).unwrap()),
                Event::Interrupt(vector) => {
                    assert!(as_int && vector == VECTOR);
                    tokens.push(guest.words[1]);
                }
                Event::Prefault(..) | Event::Resume => {}
            }
        }
        let resumed = guest.events.iter().filter(|&&e| e == Event::Resume);
        assert_eq!(resumed.count(), expected.len());
        assert_eq!(tokens, expected.into_iter().flatten().collect::<Vec<_>>());
        if let Some((reason, _)) = guest.take_page_fault() {
            assert_eq!(reason, 2);
        }
    }

    fn enable(&mut self, en: u64) {
        self.fixture.enable(en);
        let model = &mut self.model;
        model.enabled = Some(en);
        if model.done.is_empty() && model.queued() < QUEUED_MAX {
            model.wake_all = true;
        }
    }

    fn end(&mut self) {
        self.void();
        self.model.enabled = None;
    }

    fn void(&mut self) {
        self.model.forget();
        self.work.iter_mut().for_each(|work| work.void = true);
    }

    fn check(&self) {
        let Self { fixture, model, .. } = self;
        fixture.queue.verify();
        assert!(model.queued() <= QUEUED_MAX);
        assert_eq!(fixture.queue.halted(), model.halted.is_some());
        let waiting = model.wake_all || !model.done.is_empty();
        assert_eq!(fixture.queue.has_arrivals(), waiting);
        let stats = fixture.queue.stats();
        let ended = stats.swap_in.number + stats.cancelled;
        let begun = stats.taken + stats.halted;
        assert_eq!(begun, ended + model.flights.len() as u64);
        assert_eq!(stats.ready + stats.spurious, stats.swap_in.number);
    }

    /// The guest becomes well-behaved and the workers finish: no task may still sleep.
    fn finish(mut self) {
        self.fixture.guest.state = common::Mock::new().state;
        if self.model.enabled.is_none() {
            self.enable(ENABLED | AS_INT);
        }
        while !self.work.is_empty() {
            self.complete(0);
        }
        while self.fixture.queue.has_arrivals() {
            self.fixture.guest.words = [0; 2];
            self.poll();
            self.check();
        }
        assert!(self.model.flights.is_empty() && self.model.forgotten.is_empty());
        assert!(!self.fixture.queue.halted());
        self.fixture.queue.reset();
        let none = self.fixture.queue.poll(NOW, &mut self.fixture.guest);
        assert_eq!(none, 0);
        let after = self.fixture.queue.not_present(
            gfn(1),
            lacuna_addr::Access::Read,
            NOW,
            &mut self.fixture.guest,
        );
        assert_eq!(answer(&after), Answer::Wait);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_queue_does_what_the_rules_say(ops in prop::collection::vec(op(), 1..300)) {
        let mut run = Run::new();
        run.enable(ENABLED | AS_INT);
        ops.iter().for_each(|op| run.apply(op));
        run.finish();
    }
}
