//! Seeded runs in which every page of the guest is missing at first. Sources are late, answer twice
//! or out of order, or do not answer. The VMM provides pages itself, too late or before anything
//! needs them, and reports missing pages ready. The guest checks each of its pages.

use crate::common;

use common::{boot_with, builder};
use fastrand::Rng;
use lacuna_machine::{
    Answer, Apf, Arch, Ending, FaultToken, MemorySlots as _, MissingMemory as _, PageRequest,
    PageSource, SlotFlags, SourcePage,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Timed, Trace, Vm, VmBuilder};
use lacuna_sync::{Clock, Nanos, VirtualClock};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, Weak};

const ZEROS: [u8; 4096] = [0; 4096];

/// A page source in virtual time, which misbehaves.
struct Source {
    clock: Arc<VirtualClock>,
    state: Mutex<SourceState>,
}

struct SourceState {
    rng: Rng,
    /// Answers at once, until the guest runs: the loader waits without virtual time.
    at_once: bool,
    /// By due time and number. `None`: the request stays unanswered, and the VMM provides the page.
    due: BTreeMap<(Nanos, u64), (SourcePage, Option<PageRequest>)>,
    asked: u64,
    /// Kept requests that will never be answered.
    kept: Vec<PageRequest>,
    done: Done,
    vm: Weak<Vm>,
}

/// The number of each kind of event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Done {
    asked: u64,
    taken: u64,
    late: u64,
    unanswered: u64,
    unasked: u64,
    switched: u64,
    /// Tokens that the VMM reported ready before their page had arrived.
    too_early: u64,
}

impl Source {
    fn new(seed: u64, clock: &Arc<VirtualClock>) -> Arc<Self> {
        let state = SourceState {
            rng: Rng::with_seed(seed),
            at_once: true,
            due: BTreeMap::new(),
            asked: 0,
            kept: Vec::new(),
            done: Done::default(),
            vm: Weak::new(),
        };
        Arc::new(Self {
            clock: Arc::clone(clock),
            state: Mutex::new(state),
        })
    }

    /// The guest is about to run.
    fn begin(&self, vm: &Arc<Vm>) {
        let mut state = self.state.lock().unwrap();
        (state.at_once, state.vm) = (false, Arc::downgrade(vm));
    }
}

impl SourceState {
    fn schedule(&mut self, now: Nanos, page: SourcePage, request: Option<PageRequest>) {
        // The delays differ widely, so that later requests are answered earlier.
        let delay = match self.rng.u8(..4) {
            0 => self.rng.u64(1..1_000),
            1 | 2 => self.rng.u64(20_000..200_000),
            _ => self.rng.u64(1_000_000..3_000_000),
        };
        self.asked += 1;
        self.due
            .insert((now.after(delay), self.asked), (page, request));
    }
}

impl PageSource for Source {
    fn describe(&self) -> String {
        "seeded source".into()
    }

    fn fetch(&self, request: PageRequest) {
        let mut state = self.state.lock().unwrap();
        state.done.asked += 1;
        if state.at_once {
            drop(state);
            assert_eq!(request.provide(&ZEROS), Answer::Taken);
            return;
        }
        let (now, page) = (self.clock.now(), request.page());
        match state.rng.u8(..16) {
            // Answer it twice.
            0..3 => {
                state.schedule(now, page, Some(request.clone()));
                state.schedule(now, page, Some(request));
            }
            // Never answer it: the VMM provides the page.
            3 => {
                state.done.unanswered += 1;
                state.kept.push(request);
                state.schedule(now, page, None);
            }
            _ => state.schedule(now, page, Some(request)),
        }
    }
}

impl Timed for Source {
    fn next_due(&self) -> Option<Nanos> {
        let state = self.state.lock().unwrap();
        state.due.first_key_value().map(|(&(due, _), _)| due)
    }

    fn act(&self, now: Nanos) {
        loop {
            let mut state = self.state.lock().unwrap();
            let next = state.due.first_entry().filter(|next| next.key().0 <= now);
            let Some(next) = next else { return };
            let (page, request) = next.remove();
            let vm = state.vm.upgrade().expect("it runs");
            // The answer runs callbacks, so no lock is held.
            drop(state);
            let answer = match request {
                Some(request) => request.provide(&ZEROS),
                None => provide(&vm, page),
            };
            let done = &mut self.state.lock().unwrap().done;
            match answer {
                Answer::Taken => done.taken += 1,
                Answer::Late => done.late += 1,
            }
        }
    }
}

/// The guests here have one memory slot, so a page's number is its place in that slot.
fn provide(vm: &Vm, page: SourcePage) -> Answer {
    let gfn = vm.memory_slots()[0].gfn(page.0 as usize).unwrap();
    let gpa = gfn.gpa();
    match vm.provide(gpa, &ZEROS).unwrap().taken {
        0 => Answer::Late,
        _ => Answer::Taken,
    }
}

fn set_flags(vm: &Vm, flags: SlotFlags) {
    for slot in vm.memory_slots() {
        vm.set_slot_flags(slot.id, flags).unwrap();
    }
}

/// The VMM reports unknown and completed tokens ready, and one token whose page has not arrived, if
/// there is one. Returns the number of tokens of the last kind.
fn say_ready(vm: &Vm, vcpu: usize) -> u64 {
    let tokens = (1..6000).rev().map(|number| FaultToken::new(vcpu, number));
    let said = tokens.filter(|token| vm.ready(*token).is_ok()).take(1);
    said.count() as u64
}

/// The words by which a guest chooses each form of async faults. Without a word, no form is
/// offered.
const WAYS: [(Arch, [&str; 3]); 2] = [
    (Arch::X86_64, ["", "apf=int", "apf=pf"]),
    (Arch::Arm64, ["", "apf=abort", "apf=sdei"]),
];

fn simulate(seed: u64, (arch, ways): (Arch, [&str; 3])) -> (Trace, Done) {
    let mut rng = Rng::with_seed(seed);
    let vcpu_count = rng.usize(1..=3);
    let way = rng.usize(..ways.len());
    // With 4 of 8 MiB, provided pages go to swap.
    let resident = [4, 10][rng.usize(..2)];
    let words = format!("rounds=2 {}", ways[way]);
    let clock = Arc::new(VirtualClock::default());
    let source = Source::new(rng.u64(..), &clock);
    let builder = VmBuilder {
        arch,
        seed: Some(seed),
        apf: [Apf::Off, Apf::On, Apf::On][way],
        source: Some(Arc::clone(&source) as Arc<dyn PageSource>),
        ..builder(8, resident, vcpu_count, &words)
    };
    let time = || Arc::clone(&clock) as Arc<dyn Clock>;
    let host = builder.host(time()).unwrap();
    let (vm, vcpus, devices, lines) = boot_with(&builder, &host, time(), "verify", |_| ());
    let mut exits = rng.bool();
    if exits {
        set_flags(&vm, SlotFlags::EXIT_ON_MISSING);
    }
    source.begin(&vm);
    let mut simulator = Simulator::new(SimulatorConfig {
        seed,
        clock: Arc::clone(&clock),
        host: Arc::clone(&host),
    });
    simulator.add_timed(Arc::clone(&source) as Arc<dyn Timed>);
    simulator.add(SimulatedVm {
        vm: Arc::clone(&vm),
        vcpus,
        devices: Arc::clone(&devices),
    });
    let pages = builder.memory.get();
    let early = RefCell::new(BTreeSet::new());
    let trace = simulator.run_beside(|| match rng.u16(..) {
        // The VMM provides a page without a request.
        0..500 => {
            let page = SourcePage(rng.u64(..pages));
            if provide(&vm, page) == Answer::Taken {
                assert!(early.borrow_mut().insert(page), "a page is provided once");
            }
        }
        500..520 => {
            exits = !exits;
            let flags = [SlotFlags::empty(), SlotFlags::EXIT_ON_MISSING];
            set_flags(&vm, flags[usize::from(exits)]);
            source.state.lock().unwrap().done.switched += 1;
        }
        530..900 => {
            let said = say_ready(&vm, rng.usize(..vcpu_count));
            source.state.lock().unwrap().done.too_early += said;
        }
        520..530 => {
            host.verify();
            vm.mmu().verify();
        }
        _ => {}
    });
    let ending = devices.ending();
    let why = format!("seed {seed}: {ending:?}\n{}", lines.text());
    assert!(matches!(ending, Some(Ending::Exited(0))), "{why}");
    host.verify();
    let mut done = source.state.lock().unwrap().done;
    done.unasked = early.borrow().len() as u64;
    (trace, done)
}

#[test]
fn every_page_comes_once_whatever_the_source_and_the_vmm_do() {
    let mut sum = Done::default();
    for seed in 0..8 {
        let (_, done) = simulate(seed, WAYS[seed as usize % 2]);
        sum.asked += done.asked;
        sum.taken += done.taken;
        sum.late += done.late;
        sum.unanswered += done.unanswered;
        sum.unasked += done.unasked;
        sum.switched += done.switched;
        sum.too_early += done.too_early;
    }
    println!("{sum:?}");
    let rare = [
        sum.late,
        sum.unanswered,
        sum.unasked,
        sum.switched,
        sum.too_early,
    ];
    assert!(rare.iter().all(|count| *count > 10), "{sum:?}");
    assert!(sum.asked > 1000 && sum.taken > 1000, "{sum:?}");
}

#[test]
fn a_seed_gives_one_trace() {
    for (seed, way) in [(3, WAYS[0]), (4, WAYS[1])] {
        assert_eq!(simulate(seed, way), simulate(seed, way));
    }
}
