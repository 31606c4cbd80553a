//! Many migrations between two processes, each with an accident after a random number of bytes: a
//! process is killed, stopped or gets a signal, or the connections are cut. Every moment has a
//! documented outcome and documented exit codes, and the guest never runs on both sides. The guest
//! checks its memory, so it also finds a stale page.

use super::destination::Destination;
use super::is_too_late;
use super::proxy::{Moment, Proxy};
use crate::guest::{Client, Guest, LIMIT};
use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The number of migrations without the variable.
const FEW: u64 = 6;
/// The number of migrations.
const NUMBER: &str = "LACUNA_PROCESS_MIGRATIONS";
/// The seed of the first one; each other has the next.
const SEED: &str = "LACUNA_PROCESS_SEED";
/// Bytes that a migration of this guest takes, more or less: an accident may happen too late.
const BYTES: u64 = 5 << 20;
/// Kinds of frames at which an accident may happen: State, Prepared, Go, Running, Join, Awaited,
/// Want, End, Complete.
const KINDS: [u8; 9] = [7, 8, 9, 10, 12, 13, 14, 15, 16];
/// Rounds of the guest. On a busy machine it may end before it can move. Then a guest with ten
/// times as many is tried.
const ROUNDS: [u64; 3] = [12, 120, 1200];
/// The time between two looks at both sides.
const LOOK: Duration = Duration::from_millis(20);

/// How many migrations there are.
fn number(variable: &str, otherwise: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(otherwise, |text| text.parse().expect("a number"))
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Accident {
    Nothing,
    SourceKilled,
    DestinationKilled,
    Cut,
    /// A client stops the run, or SIGTERM does.
    SourceEnded(By),
    DestinationEnded(By),
}

/// What ends a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum By {
    Stop,
    Signal,
}

impl By {
    /// The exit code of a run with this end.
    const fn code(self) -> i32 {
        match self {
            Self::Stop => 4,
            Self::Signal => 143,
        }
    }

    /// Ends the run of `child`, which may have ended before, without waiting for an answer.
    fn end(self, child: &Child, control: &Path) -> impl FnOnce() + Send + use<> {
        let (pid, control) = (Pid::from_child(child), control.to_owned());
        move || match self {
            Self::Stop => {
                if let Some(mut client) = Client::try_to(&control) {
                    client.send(b"{\"command\":\"stop\"}\n");
                }
            }
            Self::Signal => _ = kill_process(pid, Signal::TERM),
        }
    }
}

/// The outcome for a guest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Fate {
    /// It ended on the destination, and had found all of its memory.
    Moved,
    /// It ended on the source, which had never handed it over, or not finally.
    Stayed,
    /// It ended on the source, by a decision for it.
    Kept,
    /// It ended on the destination, by a decision for it.
    KeptThere,
    /// It was on the killed side.
    Killed,
    /// It needed a page that only the killed side had: it ended, and said so.
    PageLost,
    /// A client or a signal ended it, on the guest's side.
    Ended,
    /// It ended before it could move.
    Early,
}

/// Memory of the guest.
const MEMORY: &str = "16M";
/// Pages that it writes and checks.
const PAGES: u64 = 1024;

#[derive(Debug)]
struct Case {
    accident: Accident,
    moment: Moment,
    mode: &'static str,
    address: &'static str,
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let accidents = [
            Accident::Nothing,
            Accident::SourceKilled,
            Accident::DestinationKilled,
            Accident::Cut,
            Accident::Cut,
            Accident::SourceEnded(By::Stop),
            Accident::SourceEnded(By::Signal),
            Accident::DestinationEnded(By::Stop),
            Accident::DestinationEnded(By::Signal),
        ];
        let accident = accidents[random.usize(..accidents.len())];
        let moment = match random.bool() {
            // A post-copy takes few of them.
            true => {
                let most = BYTES >> random.u32(..8);
                Moment::Bytes(random.u64(..most))
            }
            false => Moment::Frame(KINDS[random.usize(..KINDS.len())]),
        };
        Self {
            accident,
            moment,
            mode: ["precopy", "postcopy", "hybrid"][random.usize(..3)],
            address: ["unix:FOLDER/in", "tcp:127.0.0.1:0"][random.usize(..2)],
        }
    }
}

/// Both sides, and the client that requested the migration.
#[derive(Debug)]
struct Sides {
    source: Option<Guest>,
    destination: Option<Destination>,
    answer: Receiver<Value>,
    /// The last answer to the migration.
    answered: Option<Value>,
    /// How they have ended: exit code and JSON.
    ends: [Option<(Option<i32>, Value)>; 2],
    /// Whether a decision for that side was accepted.
    kept: [bool; 2],
    /// The exit codes of the requests and signals by which this test ends that side.
    ended: [Vec<i32>; 2],
}

fn stage(status: &Value, of: &str) -> String {
    let stage = status[of]["stage"].as_str();
    stage.unwrap_or_default().to_owned()
}

fn pages_of(ranges: &Value) -> u64 {
    let ranges = ranges.as_array().unwrap().iter();
    ranges.map(|range| range["pages"].as_u64().unwrap()).sum()
}

impl Sides {
    /// Watches both sides until they have ended, and makes the decisions of a person.
    fn settle(&mut self) -> Fate {
        let deadline = Instant::now() + LIMIT * 2;
        while self.ends.iter().any(Option::is_none) {
            assert!(Instant::now() < deadline, "not settled: {self:?}");
            self.answered = self.answered.take().or_else(|| self.answer.try_recv().ok());
            self.collect();
            self.decide_at_destination();
            self.decide_at_source();
            thread::sleep(LOOK);
        }
        self.fate()
    }

    fn collect(&mut self) {
        if let Some(source) = &mut self.source
            && source.child.try_wait().unwrap().is_some()
        {
            self.ends[0] = self.source.take().map(Guest::end_anyhow);
        }
        if let Some(destination) = &mut self.destination
            && destination.child.try_wait().unwrap().is_some()
        {
            let (code, json, errors) = self.destination.take().unwrap().end();
            println!("    destination: {}", errors.trim().replace('\n', "\n    "));
            self.ends[1] = Some((code, json));
        }
    }

    fn decide_at_source(&mut self) {
        let Some(source) = &self.source else { return };
        let Some(mut client) = source.try_client() else {
            return;
        };
        client.be_patient();
        let status = client.ask(json!({"command": "status"}))["status"].clone();
        // Its connection may come back while the other side lives.
        if self.ends[1].is_none() {
            return;
        }
        match &*stage(&status, "migrating") {
            // The guest has ended there, or was killed there.
            "cut" => {
                let told = status["undecided"].as_str().unwrap();
                assert!(told.contains("which only this process has"), "{told}");
                let refused = client.ask(json!({"command": "keep"}));
                assert!(!refused["error"].is_null(), "{refused}");
                client.ask(json!({"command": "stop"}));
                self.ended[0].push(By::Stop.code());
            }
            "unknown" if self.is_done(1) => {
                client.ask(json!({"command": "stop"}));
                self.ended[0].push(By::Stop.code());
            }
            "unknown" => {
                let kept = client.ask(json!({"command": "keep"}));
                self.kept[0] |= kept["error"].is_null();
            }
            _ => {}
        }
    }

    fn decide_at_destination(&mut self) {
        let Some(destination) = &self.destination else {
            return;
        };
        let Some(mut client) = destination.try_client() else {
            return;
        };
        client.be_patient();
        let status = client.ask(json!({"command": "status"}))["status"].clone();
        let has_stayed = self.answered.as_ref().is_some_and(|answer| {
            let text = answer["error"]["text"].as_str().unwrap_or_default();
            text.contains("keeps running here") || text.contains("before the guest moved")
        });
        let is_source_gone = self.ends[0].is_some();
        match &*stage(&status, "arriving") {
            // No guest was announced: it has ended before, or its source was killed.
            "" if is_source_gone && status["state"] == "waiting" => {
                destination.terminate();
                self.ended[1].push(By::Signal.code());
            }
            "unknown" if has_stayed => {
                client.ask(json!({"command": "stop"}));
                self.ended[1].push(By::Stop.code());
            }
            "unknown" if is_source_gone => {
                let kept = client.ask(json!({"command": "keep"}));
                self.kept[1] |= kept["error"].is_null();
            }
            "cut" if is_source_gone => {
                let missing = status["arriving"]["missing"].as_u64().unwrap();
                let told = pages_of(&status["arriving"]["ranges"]);
                assert!(told > 0 && told <= missing, "{status}");
                client.ask(json!({"command": "cancel"}));
            }
            _ => {}
        }
    }

    /// Whether the guest has ended well on that side.
    fn is_done(&self, side: usize) -> bool {
        let end = self.ends[side].as_ref();
        end.is_some_and(|(code, json)| *code == Some(0) && json["outcome"] == "done")
    }

    fn fate(&self) -> Fate {
        let told = |side: usize| {
            let (code, json) = self.ends[side].as_ref().unwrap();
            (
                *code,
                json["outcome"].as_str().unwrap_or_default().to_owned(),
            )
        };
        let (source, destination) = (told(0), told(1));
        for (code, outcome) in [&source, &destination] {
            assert_ne!(
                *code,
                Some(1),
                "the guest has found wrong memory: {outcome}"
            );
        }
        match (self.is_done(0), self.is_done(1)) {
            (true, true) => panic!("the guest has run on both sides: {self:?}"),
            (true, false) if self.kept[0] => Fate::Kept,
            (true, false) if self.answered.as_ref().is_none_or(is_too_late) => Fate::Early,
            (true, false) => Fate::Stayed,
            (false, true) if self.kept[1] => Fate::KeptThere,
            (false, true) => Fate::Moved,
            (false, false) if destination.1.contains("is lost") => Fate::PageLost,
            (false, false) if source.0.is_none() || destination.0.is_none() => Fate::Killed,
            (false, false) if !self.ended.concat().is_empty() => Fate::Ended,
            (false, false) => panic!("the guest is nowhere: {self:?}"),
        }
    }

    /// Checks both exit codes: they are as in docs/commands.md and docs/control.md.
    fn check_codes(&self, accident: Accident, fate: Fate) {
        let [source, destination] = self.ends.each_ref().map(|end| end.as_ref().unwrap());
        let is_asked_for = |side: usize, code: i32| self.ended[side].contains(&code);
        let outcome = source.1["outcome"].as_str().unwrap_or_default();
        let is_allowed = match source.0 {
            None => accident == Accident::SourceKilled,
            Some(0) => outcome == "done" || outcome.starts_with("moved to "),
            Some(code) => is_asked_for(0, code),
        };
        assert!(is_allowed, "the source's code: {fate:?} {self:?}");
        let is_allowed = match destination.0 {
            None => accident == Accident::DestinationKilled,
            Some(0) => destination.1["outcome"] == "done",
            Some(3) => fate == Fate::PageLost,
            // The guest has not arrived.
            Some(5) => matches!(
                fate,
                Fate::Stayed | Fate::Early | Fate::Killed | Fate::Ended
            ),
            Some(code) => is_asked_for(1, code),
        };
        assert!(is_allowed, "the destination's code: {fate:?} {self:?}");
        // A guest that has ended there keeps no source.
        if fate == Fate::Ended && matches!(accident, Accident::DestinationEnded(_)) {
            assert_eq!(source.0, Some(0), "{self:?}");
        }
    }
}

/// Runs a guest, moves it, and lets the accident happen.
fn carry_out(case: &Case) -> (Fate, Sides) {
    for rounds in ROUNDS {
        let done = with_rounds(case, rounds);
        if done.0 != Fate::Early {
            return done;
        }
    }
    panic!("it always ends before it could move");
}

fn with_rounds(case: &Case, rounds: u64) -> (Fate, Sides) {
    let folder = TempDir::new().unwrap();
    let address = case
        .address
        .replace("FOLDER", folder.path().to_str().unwrap());
    let destination = Destination::start(folder.path(), &address, "");
    let proxy = Proxy::start(folder.path(), &destination.address);
    let append = format!("rounds={rounds} pages={PAGES}");
    let words = format!("verify --memory {MEMORY}");
    let source = Guest::start_with(folder.path(), &words, Some(&append));
    let kill = |child| {
        let pid = Pid::from_child(child);
        // The process may have ended before.
        move || _ = kill_process(pid, Signal::KILL)
    };
    let mut ended = [Vec::new(), Vec::new()];
    match case.accident {
        Accident::Nothing => {}
        Accident::SourceEnded(by) => {
            proxy.at(case.moment, by.end(&source.child, &source.socket));
            ended[0].push(by.code());
        }
        Accident::DestinationEnded(by) => {
            proxy.at(
                case.moment,
                by.end(&destination.child, &destination.control),
            );
            ended[1].push(by.code());
        }
        Accident::SourceKilled => proxy.at(case.moment, kill(&source.child)),
        Accident::DestinationKilled => proxy.at(case.moment, kill(&destination.child)),
        Accident::Cut => proxy.at(case.moment, proxy.cutter()),
    }
    let (tell, answer) = channel();
    let mut client = source.client();
    let request = json!({"command": "migrate", "to": proxy.address, "mode": case.mode});
    let asking = thread::spawn(move || {
        // The test may have failed.
        let _ = tell.send(client.ask(request));
    });
    let mut sides = Sides {
        source: Some(source),
        destination: Some(destination),
        answer,
        answered: None,
        ends: [None, None],
        kept: [false; 2],
        ended,
    };
    let fate = sides.settle();
    sides.check_codes(case.accident, fate);
    asking.join().unwrap();
    let answered = sides.answered.clone().unwrap_or_default();
    println!("    {} bytes, {answered}", proxy.bytes());
    (fate, sides)
}

/// Accidents with a known outcome.
#[test]
fn known_accidents() {
    let [prepared, go, running, end, complete] = [8, 9, 10, 15, 16].map(Moment::Frame);
    // The state, and some of a booted kernel's pages.
    let some = Moment::Bytes(60_000);
    for (mode, accident, moment, fates) in [
        ("precopy", Accident::Cut, go, &[Fate::Moved][..]),
        ("hybrid", Accident::Cut, running, &[Fate::Moved]),
        ("postcopy", Accident::Cut, some, &[Fate::Moved]),
        ("postcopy", Accident::Cut, end, &[Fate::Moved]),
        ("postcopy", Accident::Cut, complete, &[Fate::Moved]),
        (
            "precopy",
            Accident::SourceKilled,
            prepared,
            &[Fate::KeptThere],
        ),
        ("precopy", Accident::DestinationKilled, go, &[Fate::Kept]),
        (
            "postcopy",
            Accident::DestinationKilled,
            some,
            &[Fate::Killed],
        ),
        // A just booted guest has few pages: all may have been sent.
        (
            "postcopy",
            Accident::SourceKilled,
            some,
            &[Fate::PageLost, Fate::Moved],
        ),
    ] {
        let address = "tcp:127.0.0.1:0";
        let case = Case {
            accident,
            moment,
            mode,
            address,
        };
        println!("{case:?}");
        let (fate, sides) = carry_out(&case);
        assert!(fates.contains(&fate), "{case:?}: {fate:?}");
        let [here, there] = sides.ends.map(|end| end.unwrap().1);
        match fate {
            // The source may look for a destination that has ended meanwhile, until it is stopped.
            Fate::Moved if accident == Accident::Cut && !here["migrated"].is_null() => {
                assert!(here["migrated"]["cuts"].as_u64() > Some(0), "{here}");
            }
            Fate::PageLost => {
                let received = &there["received"];
                let told = pages_of(&received["ranges"]);
                assert_eq!(Some(told), received["missing"].as_u64(), "{there}");
            }
            _ => {}
        }
    }
}

#[test]
fn accidents_leave_one_guest() {
    let (first, number) = (number(SEED, 1), number(NUMBER, FEW));
    let mut counts = BTreeMap::new();
    for seed in first..first + number {
        let case = Case::of(seed);
        println!("seed {seed}: {case:?}");
        let (fate, _) = carry_out(&case);
        println!("  {fate:?}");
        let is_possible = match (case.accident, fate) {
            (Accident::Nothing, fate) => fate == Fate::Moved,
            (Accident::Cut, fate) => matches!(fate, Fate::Moved | Fate::Stayed),
            (Accident::SourceKilled, fate) => !matches!(fate, Fate::Stayed | Fate::Kept),
            (Accident::DestinationKilled, fate) => {
                !matches!(fate, Fate::KeptThere | Fate::PageLost)
            }
            (Accident::SourceEnded(_), fate) => !matches!(fate, Fate::Kept | Fate::Killed),
            (Accident::DestinationEnded(_), fate) => {
                matches!(fate, Fate::Moved | Fate::Stayed | Fate::Kept | Fate::Ended)
            }
        };
        assert!(is_possible, "{case:?}: {fate:?}");
        *counts.entry((case.accident, fate)).or_insert(0) += 1;
    }
    println!("{number} migrations:");
    for ((accident, fate), count) in counts {
        println!("  {accident:?} -> {fate:?}: {count}");
    }
}
