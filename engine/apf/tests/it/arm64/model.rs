//! Random calls on a queue, compared with a plain model: the answer to each call, the words, the
//! interrupt's line, and the events that the vCPU takes. The model states the same rules, with
//! lists and maps.
//!
//! After every step: a token is never 0; at most 64 are queued; no event overwrites an unread one
//! (the mock guest refuses that); no page-ready is delivered without its page-not-present, or
//! twice; no event from before a disable, reset or cancel is delivered after it. At the end every
//! page-not-present that the guest has seen has had its page-ready or a later wake-all.

use super::mock::*;
use lacuna_apf::arm64::{Answer, ExceptionLevel, Line};
use lacuna_apf::{Completion, NotPresent, QUEUED_MAX};
use lacuna_state::arm64::Form;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Clone, Debug)]
enum Op {
    Fault(u64),
    /// Many faults, to fill the queue.
    Storm(u64),
    /// One of the completions is completed.
    Complete(prop::sample::Index),
    Poll,
    /// The vCPU is entered: it takes a data abort, or an SDEI event.
    Enter,
    /// The guest reads its words.
    Read,
    Acknowledge,
    /// The guest overwrites its words: it is hostile, or wants no event now.
    Scribble([u32; 2]),
    Enable(Form, u64),
    Disable(Form),
    /// RFCv2's range, in steps of 256 bytes.
    Range(u64),
    Sdei(u32),
    Cancel,
    Reset,
    Cpu(ExceptionLevel, bool, u64),
    BreakHalt,
}

fn op() -> impl Strategy<Value = Op> {
    let form = || prop::sample::select(vec![Form::Abort, Form::Sdei]);
    let flags = prop::sample::select(vec![0, SEND_ALWAYS]);
    let level = prop::sample::select(vec![
        ExceptionLevel::El0,
        ExceptionLevel::El0,
        ExceptionLevel::El0,
        ExceptionLevel::El1,
    ]);
    let calls = prop::sample::select(vec![
        REGISTER, ENABLE, DISABLE, COMPLETE, COMPLETE, COMPLETE, UNREGISTER, MASK, UNMASK, UNMASK,
        STATUS,
    ]);
    // Usually far from the vectors.
    let offset = prop_oneof![4 => Just(1 << 20), 1 => 0..0x1000u64];
    prop_oneof![
        12 => (0..90u64).prop_map(Op::Fault),
        1 => (0..90u64).prop_map(Op::Storm),
        8 => any::<prop::sample::Index>().prop_map(Op::Complete),
        8 => Just(Op::Poll),
        8 => Just(Op::Enter),
        8 => Just(Op::Read),
        4 => Just(Op::Acknowledge),
        1 => (0..4u32, 0..3u32).prop_map(|(reason, token)| Op::Scribble([reason, token])),
        3 => (form(), flags).prop_map(|(form, flags)| Op::Enable(form, flags)),
        1 => form().prop_map(Op::Disable),
        1 => (0..12u64).prop_map(Op::Range),
        6 => calls.prop_map(Op::Sdei),
        1 => Just(Op::Cancel),
        1 => Just(Op::Reset),
        4 => (level, prop::bool::weighted(0.85), offset)
            .prop_map(|(level, free, offset)| Op::Cpu(level, free, offset)),
        1 => Just(Op::BreakHalt),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expect {
    Wait,
    Injected,
    HaltAndStart,
    HaltOnly,
}

/// The model.
struct Model {
    enabled: Option<(Form, bool)>,
    range: u64,
    // The SDEI.
    registered: bool,
    event_on: bool,
    masked: bool,
    running: bool,
    untaken: Option<u32>,
    line: bool,
    words: [u32; 2],
    /// FAR of the data abort that the vCPU is about to take.
    abort: Option<u32>,
    // The vCPU.
    kernel: bool,
    free: bool,
    offset: u64,
    // The queue: pages in flight, with the token if page-not-present was delivered.
    flights: BTreeMap<u64, Option<u32>>,
    done: VecDeque<u64>,
    wake_all: bool,
    recent: VecDeque<u64>,
    halted: Option<u64>,
    /// Delivered tokens that the queue has forgotten. Tasks still sleep on them.
    forgotten: BTreeSet<u32>,
}

impl Model {
    fn new() -> Self {
        Self {
            enabled: None,
            range: 0x800,
            registered: false,
            event_on: false,
            masked: true,
            running: false,
            untaken: None,
            line: false,
            words: [0; 2],
            abort: None,
            kernel: false,
            free: true,
            offset: 1 << 20,
            flights: BTreeMap::new(),
            done: VecDeque::new(),
            wake_all: false,
            recent: VecDeque::new(),
            halted: None,
            forgotten: BTreeSet::new(),
        }
    }

    fn is_interruptible(&self) -> bool {
        self.free && self.abort.is_none()
    }

    fn may_abort(&self) -> bool {
        self.offset >= self.range && self.is_interruptible() && self.words[0] == 0
    }

    fn takes_event(&self) -> bool {
        self.registered && self.event_on && !self.masked && !self.running
    }

    fn queued(&self) -> usize {
        self.flights.len() + usize::from(self.wake_all)
    }

    fn fault(&mut self, page: u64, live: usize) -> Expect {
        let Some((form, always)) = self.enabled else {
            return Expect::Wait;
        };
        if let Some(at) = self.recent.iter().position(|&recent| recent == page) {
            self.recent.remove(at);
            return Expect::Wait;
        }
        if !self.is_interruptible() || self.done.contains(&page) {
            return Expect::Wait;
        }
        if self.flights.contains_key(&page) {
            self.halted = Some(page);
            return Expect::HaltOnly;
        }
        if self.queued() == QUEUED_MAX || live >= QUEUED_MAX {
            return Expect::Wait;
        }
        self.flights.insert(page, None);
        let possible = match form {
            Form::Abort => self.may_abort(),
            Form::Sdei => self.words == [0; 2] && self.untaken.is_none() && self.takes_event(),
        };
        if possible && (always || !self.kernel) {
            return Expect::Injected;
        }
        self.halted = Some(page);
        Expect::HaltAndStart
    }

    /// The guest got page-not-present for `page`.
    fn notified(&mut self, form: Form, page: u64, token: u32) {
        self.flights.insert(page, Some(token));
        match form {
            Form::Abort => {
                self.words[0] = 1;
                self.abort = Some(token);
            }
            Form::Sdei => {
                self.words = [1, token];
                self.untaken = Some(token);
            }
        }
    }

    /// The number of arrivals that a poll dequeues.
    fn poll(&mut self) -> usize {
        let Some((form, _)) = self.enabled else {
            return 0;
        };
        let mut dequeued = 0;
        while self.wake_all || !self.done.is_empty() {
            let possible = match form {
                Form::Abort => self.may_abort(),
                Form::Sdei => !self.line && self.words == [0; 2],
            };
            let first = self.done.front().and_then(|page| self.flights[page]);
            let unseen = !self.wake_all && self.untaken.is_some() && first == self.untaken;
            if !possible && !unseen {
                break;
            }
            dequeued += 1;
            self.halted = None;
            if std::mem::take(&mut self.wake_all) {
                self.forgotten.clear();
                self.ready(form, WAKE_ALL);
                continue;
            }
            let page = self.done.pop_front().unwrap();
            self.recent.push_back(page);
            if self.recent.len() > 64 {
                self.recent.pop_front();
            }
            let Some(token) = self.flights.remove(&page).unwrap() else {
                continue;
            };
            match self.untaken == Some(token) {
                true => self.withdraw(),
                false => self.ready(form, token),
            }
        }
        if self.halted.is_some_and(|page| self.done.contains(&page)) {
            self.halted = None;
        }
        dequeued
    }

    fn ready(&mut self, form: Form, token: u32) {
        match form {
            Form::Abort => {
                self.words[0] = 2;
                self.abort = Some(token);
            }
            Form::Sdei => {
                self.words = [2, token];
                self.line = true;
            }
        }
    }

    fn withdraw(&mut self) {
        if let Some(token) = self.untaken.take()
            && self.words == [1, token]
        {
            self.words = [0; 2];
        }
    }

    fn forget(&mut self) {
        self.forgotten.extend(self.flights.values().flatten());
        self.flights.clear();
        self.done.clear();
        self.recent.clear();
        self.wake_all = false;
        self.halted = None;
    }

    /// X0 of a call of the SDEI; `None` if registers are replaced.
    fn sdei(&mut self, call: u32) -> Option<i64> {
        const DENIED: i64 = -3;
        Some(match call {
            REGISTER if self.registered || self.running => DENIED,
            REGISTER => {
                (self.registered, self.event_on) = (true, false);
                0
            }
            ENABLE | DISABLE if !self.registered => DENIED,
            ENABLE | DISABLE => {
                self.event_on = call == ENABLE;
                0
            }
            UNREGISTER if !self.registered && !self.running => DENIED,
            UNREGISTER => {
                (self.registered, self.event_on) = (false, false);
                if self.running { -5 } else { 0 }
            }
            MASK => i64::from(!std::mem::replace(&mut self.masked, true)),
            UNMASK => {
                self.masked = false;
                0
            }
            STATUS => {
                let bits = [self.registered, self.event_on, self.running];
                (0..).zip(bits).map(|(bit, on)| i64::from(on) << bit).sum()
            }
            COMPLETE if self.running => {
                self.running = false;
                return None;
            }
            COMPLETE => DENIED,
            _ => unreachable!("no such call is made"),
        })
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
            fixture: Fixture::new(),
            model: Model::new(),
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
            Op::Poll => assert_eq!(self.fixture.poll(), self.model.poll()),
            Op::Enter => self.enter(),
            Op::Read => self.write([0; 2]),
            Op::Scribble(words) => self.write(*words),
            Op::Acknowledge => self.acknowledge(),
            Op::Enable(form, flags) => self.enable(*form, *flags),
            Op::Disable(form) => self.disable(*form),
            Op::Range(steps) => self.range(steps * 0x100),
            Op::Sdei(call) => self.sdei(*call),
            Op::Cancel => {
                self.fixture.queue.cancel();
                self.void();
                self.model.wake_all = self.model.enabled.is_some();
            }
            Op::Reset => self.reset(),
            Op::Cpu(level, free, offset) => {
                let guest = &mut self.fixture.guest;
                (guest.level, guest.pc) = (*level, VBAR + offset);
                guest.interruptible = *free && guest.abort.is_none();
                let model = &mut self.model;
                model.kernel = *level == ExceptionLevel::El1;
                (model.free, model.offset) = (*free, *offset);
            }
            Op::BreakHalt => {
                self.fixture.queue.break_halt();
                self.model.halted = None;
            }
        }
        self.check();
    }

    fn fault(&mut self, page: u64) {
        let expected = self.model.fault(page, self.work.len());
        let before = self.fixture.guest.words;
        let (given, completion) = match self.fixture.fault(page) {
            NotPresent::Wait => (Expect::Wait, None),
            NotPresent::Injected(completion) => (Expect::Injected, Some(completion)),
            NotPresent::Halt(None) => (Expect::HaltOnly, None),
            NotPresent::Halt(Some(completion)) => (Expect::HaltAndStart, Some(completion)),
        };
        assert_eq!(given, expected, "page {page}");
        self.work.extend(completion.map(|completion| Work {
            page,
            completion,
            void: false,
        }));
        let guest = &self.fixture.guest;
        if expected == Expect::Injected {
            let (form, _) = self.model.enabled.unwrap();
            let token = match form {
                Form::Abort => guest.abort.unwrap().1 as u32,
                Form::Sdei => guest.words[1],
            };
            assert!(token != 0 && token != WAKE_ALL);
            self.model.notified(form, page, token);
        } else {
            assert_eq!(guest.words, before);
        }
    }

    fn complete(&mut self, at: usize) {
        let work = self.work.swap_remove(at);
        match at.is_multiple_of(2) {
            true => work.completion.complete(),
            false => drop(work.completion),
        }
        if !work.void {
            self.model.done.push_back(work.page);
        }
    }

    /// The vCPU executes an instruction.
    fn enter(&mut self) {
        let guest = &mut self.fixture.guest;
        if let Some((_, far)) = guest.abort.take() {
            assert_eq!(Some(far as u32), self.model.abort.take());
            guest.interruptible = self.model.free;
        }
        let takes = self.model.untaken.is_some() && self.model.takes_event() && self.model.free;
        let before = guest.context;
        guest.context.x[0] = 0;
        self.fixture.enter();
        let taken = &mut self.fixture.guest.context;
        assert_eq!(taken.x[0] == u64::from(NUMBERS.event), takes);
        if takes {
            self.model.untaken = None;
            self.model.running = true;
        } else {
            *taken = before;
        }
    }

    fn write(&mut self, words: [u32; 2]) {
        self.fixture.guest.words = words;
        self.model.words = words;
    }

    fn acknowledge(&mut self) {
        if std::mem::take(&mut self.model.line) {
            self.model.poll();
        }
        assert_eq!(self.fixture.acknowledge(), 0);
    }

    fn enable(&mut self, form: Form, flags: u64) {
        let result = match self.model.enabled {
            Some((now, _)) if now == form => NOT_REQUIRED,
            Some(_) => NOT_SUPPORTED,
            None => {
                self.model.enabled = Some((form, flags != 0));
                self.model.wake_all = true;
                0
            }
        };
        assert_eq!(self.switch(form, BLOCK | ENABLED | flags), result);
    }

    fn disable(&mut self, form: Form) {
        let is_on = self.model.enabled.is_some_and(|(now, _)| now == form);
        let result = self.switch(form, BLOCK);
        assert_eq!(result, if is_on { 0 } else { NOT_REQUIRED });
        if is_on {
            self.model.withdraw();
            self.model.line = false;
            self.end();
        }
    }

    fn switch(&mut self, form: Form, value: u64) -> i64 {
        match form {
            Form::Abort => self.fixture.switch_abort(value),
            Form::Sdei => self.fixture.switch_sdei(value),
        }
    }

    fn range(&mut self, bytes: u64) {
        let result = match self.model.enabled {
            Some(_) => NOT_SUPPORTED,
            None => {
                self.model.range = self.model.range.max(bytes);
                0
            }
        };
        assert_eq!(self.fixture.x0(ABORT, &[bytes, 1 << 30]), result);
    }

    fn sdei(&mut self, call: u32) {
        let args = [u64::from(NUMBERS.event), HANDLER, ARGUMENT, 0, 0];
        let expected = self.model.sdei(call);
        match self.fixture.call(call, &args) {
            Some(Answer::Values([x0, ..])) => assert_eq!(Some(x0 as i64), expected, "{call:#x}"),
            Some(Answer::Resumed) => assert_eq!(expected, None),
            None => panic!("{call:#x} is answered"),
        }
    }

    fn reset(&mut self) {
        self.fixture.queue.reset();
        // The processor and its interrupt controller are reset with the queue.
        let guest = &mut self.fixture.guest;
        (guest.line, guest.abort, guest.interruptible) = (Line::Low, None, true);
        let (words, kernel, offset) = (self.model.words, self.model.kernel, self.model.offset);
        self.end();
        self.model = Model {
            words,
            kernel,
            offset,
            forgotten: std::mem::take(&mut self.model.forgotten),
            ..Model::new()
        };
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
        assert_eq!(fixture.guest.words, model.words);
        assert_eq!(fixture.guest.line == Line::High, model.line);
        let abort = fixture.guest.abort.map(|(_, far)| far as u32);
        assert_eq!(abort, model.abort);
        assert_eq!(fixture.queue.halted(), model.halted.is_some());
        let waiting = model.wake_all || !model.done.is_empty();
        assert_eq!(fixture.queue.has_arrivals(), waiting);
        let saved = fixture.queue.save();
        assert_eq!((saved.untaken, saved.range), (model.untaken, model.range));
        assert_eq!(saved.sdei.interrupted.is_some(), model.running);
        let stats = fixture.queue.stats();
        let ended = stats.swap_in.number + stats.cancelled;
        let begun = stats.taken + stats.halted;
        assert_eq!(begun, ended + model.flights.len() as u64);
        assert_eq!(stats.ready + stats.spurious, stats.swap_in.number);
    }

    /// The guest becomes well-behaved and the workers finish: no task may still sleep.
    fn finish(mut self) {
        self.apply(&Op::Cpu(ExceptionLevel::El0, true, 1 << 20));
        if self.model.enabled.is_none() {
            self.enable(Form::Sdei, 0);
        }
        for call in [COMPLETE, REGISTER, ENABLE, UNMASK] {
            self.sdei(call);
        }
        while !self.work.is_empty() {
            self.complete(0);
        }
        while self.fixture.queue.has_arrivals() || self.model.untaken.is_some() {
            self.enter();
            self.sdei(COMPLETE);
            self.write([0; 2]);
            self.acknowledge();
            assert_eq!(self.fixture.poll(), self.model.poll());
            self.check();
        }
        assert!(self.model.flights.is_empty() && self.model.forgotten.is_empty());
        assert!(!self.fixture.queue.halted());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_queue_does_what_the_rules_say(
        form in prop::sample::select(vec![Form::Abort, Form::Sdei]),
        ops in prop::collection::vec(op(), 1..300),
    ) {
        let mut run = Run::new();
        for call in [REGISTER, ENABLE, UNMASK] {
            run.sdei(call);
        }
        run.enable(form, 0);
        ops.iter().for_each(|op| run.apply(op));
        run.finish();
    }
}
