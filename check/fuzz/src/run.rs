//! Runs the seeds of a kind one after the other, until there is a finding or no time is left.

use crate::migrated::{snapshot, stream};
use crate::pulse::Pulse;
use crate::tally::Tally;
use crate::{command, control, images, machine, offload, pager, threads};
use lacuna_machine::Exit;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

/// The subject of the fuzzing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Whole machines on one thread; a seed gives the same result bit for bit.
    Machine,
    /// Whole machines on threads.
    Threads,
    /// Mutated images, given to the loader.
    Images,
    /// Both sides of a migration, each with a hostile peer.
    Stream,
    /// Damaged and forged snapshots.
    Snapshot,
    /// Command lines of `lacuna`.
    Command,
    /// Clients of a control socket.
    Control,
    /// Messages of VMMs to a pager, and its files.
    Pager,
    /// Messages of VMMs to daemons that save and restore VMs.
    Offload,
}

impl Kind {
    /// All kinds, in the order in which `all` runs them.
    pub const ALL: [Self; 9] = [
        Self::Machine,
        Self::Threads,
        Self::Images,
        Self::Stream,
        Self::Snapshot,
        Self::Command,
        Self::Control,
        Self::Pager,
        Self::Offload,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Threads => "threads",
            Self::Images => "images",
            Self::Stream => "stream",
            Self::Snapshot => "snapshot",
            Self::Command => "command",
            Self::Control => "control",
            Self::Pager => "pager",
            Self::Offload => "offload",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        let names = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("{text:?} is no kind: give one of {}", names()))
    }
}

/// One seed being run.
pub struct Run<'a> {
    /// The seed. It determines everything except how threads interleave.
    pub seed: u64,
    /// Its progress, for the watchdog.
    pub pulse: &'a Pulse,
    /// The counts of its actions.
    pub tally: &'a mut Tally,
    /// The `lacuna` to run.
    pub binary: &'a PathBuf,
}

impl Run<'_> {
    /// Carries out an operation of the host, which returns its name and whether it was refused.
    pub fn note_operation(&mut self, operation: impl FnOnce() -> (&'static str, bool)) {
        self.pulse.beat();
        let (name, refused) = operation();
        self.tally.operations += 1;
        self.tally.note("host operations", name);
        if refused {
            self.tally.note("refused", name);
        }
    }

    /// Counts an exit.
    pub fn note_exit(&mut self, exit: &Exit) {
        self.tally.note("exits", name_of(exit));
    }
}

/// The exit's kind.
pub const fn name_of(exit: &Exit) -> &'static str {
    match exit {
        Exit::IoOut { .. } => "port write",
        Exit::IoIn { .. } => "port read",
        Exit::MmioRead { .. } => "device read",
        Exit::MmioWrite { .. } => "device write",
        Exit::Shutdown(_) => "shutdown",
        Exit::DirtyRingFull => "ring full",
        Exit::Interrupted => "interrupted",
        Exit::PoweredOff => "powered off",
        Exit::Reset => "reset",
        _ => "other",
    }
}

/// A failed oracle.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The subject of the fuzzing.
    pub kind: Kind,
    /// The seed.
    pub seed: u64,
    /// The panic's message, with the stack.
    pub what: String,
}

impl Finding {
    /// The command that reproduces it.
    pub fn again(&self) -> String {
        again(self.kind, self.seed)
    }
}

fn again(kind: Kind, seed: u64) -> String {
    format!("cargo run --release -p lacuna-fuzz -- {kind} --seed {seed}")
}

/// Runs seeds, and keeps their findings.
pub struct Campaign {
    pulse: std::sync::Arc<Pulse>,
    binary: PathBuf,
    /// The counts so far.
    pub tally: Tally,
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Campaign {
    /// A campaign without seeds so far. `binary` is the `lacuna` to run as a process. From now on a
    /// watchdog ends this process if it hangs.
    pub fn new(binary: PathBuf) -> Self {
        Self {
            pulse: Pulse::watched(),
            binary,
            tally: Tally::default(),
            findings: Vec::new(),
        }
    }

    /// Runs `seeds` of `kind` in order, until `end` or until there are `most` findings. Calls
    /// `progress` after each seed.
    pub fn run(
        &mut self,
        kind: Kind,
        seeds: Range<u64>,
        end: Option<Instant>,
        most: usize,
        mut progress: impl FnMut(u64, &Tally),
    ) {
        for seed in seeds {
            if self.findings.len() >= most || end.is_some_and(|end| Instant::now() >= end) {
                return;
            }
            self.one(kind, seed);
            progress(seed, &self.tally);
        }
    }

    /// Runs one seed of `kind`.
    pub fn one(&mut self, kind: Kind, seed: u64) {
        self.pulse.set_again(&again(kind, seed));
        self.pulse.doing("the start");
        let mut tally = Tally::default();
        let mut run = Run {
            seed,
            pulse: &self.pulse,
            tally: &mut tally,
            binary: &self.binary,
        };
        // State that a panic leaves behind is not used again.
        let ended = catch_unwind(AssertUnwindSafe(|| body(kind, &mut run)));
        tally.seeds += 1;
        self.tally.absorb(tally);
        if ended.is_err() {
            let what = self.pulse.take_report();
            self.findings.push(Finding { kind, seed, what });
        }
    }
}

/// One in this many seeds of [`Kind::Machine`] runs twice. Both runs must give the same result.
const TWICE: u64 = 4;

fn body(kind: Kind, run: &mut Run<'_>) {
    match kind {
        Kind::Machine => {
            let hash = machine::run(run);
            if run.seed.is_multiple_of(TWICE) {
                let again = machine::run(run);
                assert!(hash == again, "one seed, two traces: {hash:#x}, {again:#x}");
                run.tally.note("guest", "traces compared");
            }
        }
        Kind::Threads => threads::run(run),
        Kind::Images => images::run(run),
        Kind::Stream => stream::run(run),
        Kind::Snapshot => snapshot::run(run),
        Kind::Command => command::run(run),
        Kind::Control => control::run(run),
        Kind::Pager => pager::run(run.seed, run.pulse, run.tally),
        Kind::Offload => offload::run(run.seed, run.pulse, run.tally),
    }
}
