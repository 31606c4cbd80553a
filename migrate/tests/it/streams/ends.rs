//! Both ends of a migration in one process, on threads of their own.

use super::link::{Cut, DestinationEnd, Side, SourceEnd, link};
use crate::snapshots::common::{start, wait_for_program};
use lacuna_machine::{Arch, Builder, Ending, Image, PageSource, PlatformDevices, Running, Vm};
use lacuna_migrate::stream::{Arrived, Incoming, OutgoingGuest, Plan, Sent, send};
use lacuna_migrate::{MigrateError, Progress, Stop};
use std::cell::Cell;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A builder of VMs that may have a page source.
pub trait Machines: Builder + Sync {
    /// This builder with this page source.
    fn with_source(&self, source: Option<Arc<dyn PageSource>>) -> Self;
}

impl Machines for lacuna_soft::VmBuilder {
    fn with_source(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        let own = self.clone();
        Self { source, ..own }
    }
}

impl Machines for lacuna_kvm::VmBuilder {
    fn with_source(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        let own = self.clone();
        Self { source, ..own }
    }
}

/// The guest's fate on the source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// It resumed there, and ran to this end.
    Ran(Ending),
    /// The destination runs it, and has all of its memory.
    Gone,
    /// The connection was never restored: the destination runs it, and lacks memory.
    Cut,
    /// The connection was never restored, and the guest stayed paused. If the destination did not
    /// run it, it then resumed here and ran to this end.
    Unknown(Option<Ending>),
}

/// A limit in bytes a second. A second page follows the first one after an hour.
pub const NO_PUSH: NonZeroU64 = NonZeroU64::MIN;

/// The outcome of a migration.
#[derive(Debug)]
pub struct Outcome {
    pub source: End,
    /// How the guest ended on the destination, if it ran there.
    pub destination: Option<Ending>,
    pub rounds: usize,
    /// Sent pages with content.
    pub pages: u64,
    /// The highest reported one.
    pub dirty_rate: u64,
    /// How often both sides continued after a cut.
    pub resumed: usize,
    /// The killed side.
    pub killed: Option<Side>,
    /// Bytes written by source and destination.
    pub written: [u64; 2],
    /// The errors of source and destination, or nothing.
    pub errors: [String; 2],
}

/// The workload `verify` moves from one VM to another.
pub struct Move<A, B> {
    pub from: A,
    pub to: B,
    pub words: &'static str,
    pub plan: Plan,
    /// How often the source connects again.
    pub patience: usize,
    /// The side to kill at the last cut.
    pub victim: Option<Side>,
    /// The destination says `Break` at the first pages.
    pub breaks: bool,
    /// The source asks for the pause once, at its first report.
    pub pauses: bool,
}

impl<A: Machines, B: Machines> Move<A, B> {
    /// Runs the guest, moves it over a link with these cuts, and lets it end. On a busy machine it
    /// may end before it has moved: then this tries a guest that checks its memory more often.
    pub fn carry_out(&self, cuts: &[[Cut; 2]]) -> Outcome {
        self.carry_over(|| link(cuts, self.victim))
    }

    /// As [`Move::carry_out`], over a link made by `link`.
    pub fn carry_over(&self, link: impl Fn() -> (SourceEnd, DestinationEnd)) -> Outcome {
        // The first `rounds` of the words counts.
        for longer in ["", "rounds=90", "rounds=900"] {
            let (there, here) = link();
            let outcome = thread::scope(|scope| {
                let arriving = scope.spawn(move || self.receive(&here));
                let join = move || arriving.join().expect("no panic on the destination");
                self.send(longer, there, join)
            });
            if outcome.errors[0] != MigrateError::NotRunning.to_string() {
                return outcome;
            }
        }
        panic!("it always ends before it could move");
    }

    fn send(
        &self,
        longer: &str,
        link: SourceEnd,
        join: impl FnOnce() -> Result<Ending, MigrateError>,
    ) -> Outcome {
        let vm = self.from.build().expect("a VM");
        let arch = vm.config().arch;
        let file = image(arch);
        let image = Image::parse(&file).expect("an image");
        let line = format!("{} {longer} {}", self.from.full_command_line(), self.words);
        let vcpus = vm.boot(&image, &line).expect("it boots");
        let devices = PlatformDevices::of(arch, |line: &str| println!("source: {line}"));
        let guest = start(vm, devices, vcpus);
        wait_for_program(&guest);
        let (fate, outgoing) = self.until_settled(&guest, &link);
        // The other side must not wait for a connection that never comes.
        let (written, killed) = (link.written(), link.killed());
        drop(link);
        // This ends an arrived guest that lacks memory.
        let arrived = join();
        let stays = matches!(fate.source, End::Gone | End::Cut) || arrived.is_ok();
        match stays {
            false => outgoing.map(OutgoingGuest::take_back),
            // Its run here ends.
            true => outgoing.map(drop),
        };
        let ending = guest.wait().ending;
        let ending = (!stays).then_some(ending);
        let refused = arrived.as_ref().err().map(ToString::to_string);
        Outcome {
            source: match (fate.source, ending) {
                (End::Unknown(_), ending) => End::Unknown(ending),
                (End::Ran(_), Some(ending)) => End::Ran(ending),
                (other, _) => other,
            },
            rounds: fate.rounds,
            pages: fate.pages,
            dirty_rate: fate.dirty_rate,
            resumed: fate.resumed,
            killed,
            written,
            errors: [fate.error, refused.unwrap_or_default()],
            destination: arrived.ok(),
        }
    }

    /// Sends the guest, and connects again after each cut.
    fn until_settled<'a, V: Vm>(
        &self,
        guest: &'a Running<V>,
        link: &SourceEnd,
    ) -> (Fate, Option<OutgoingGuest<'a, V>>) {
        let began = Instant::now();
        let dirty_rate = Cell::new(0);
        let mut each = |now: Progress| {
            dirty_rate.set(now.dirty_rate.max(dirty_rate.get()));
            let step = self.check_limit(now, link.written()[0], began.elapsed());
            match self.pauses && now.round == 1 && now.done == 0 && step.is_continue() {
                true => ControlFlow::Break(Stop::Pause),
                false => step,
            }
        };
        let mut fate = Fate::default();
        let mut sent = match send(guest, link, &self.plan, &mut each) {
            Ok(sent) => sent,
            Err(why) => {
                fate.error = why.to_string();
                return (fate, None);
            }
        };
        loop {
            let (outgoing, why, end) = match sent {
                Sent::Moved(outgoing) => (outgoing, None, End::Gone),
                Sent::Cut { outgoing, why } => (outgoing, Some(why), End::Cut),
                Sent::Unknown { outgoing, why } => (outgoing, Some(why), End::Unknown(None)),
            };
            (fate.source, fate.rounds) = (end, outgoing.rounds().len());
            fate.pages = outgoing.pages();
            fate.dirty_rate = dirty_rate.get();
            assert_eq!(outgoing.ran().is_some(), fate.source != End::Unknown(None));
            fate.error = why.as_ref().map(ToString::to_string).unwrap_or_default();
            if why.is_none() || fate.resumed == self.patience {
                return (fate, Some(outgoing));
            }
            fate.resumed += 1;
            sent = outgoing.resume(link, &mut each);
        }
    }

    /// Checks that this many bytes in this time fit into the limit while the guest runs here. There
    /// it gets requested pages beside the limit. If there are some, [`NO_PUSH`] has shown that.
    fn check_limit(&self, now: Progress, written: u64, took: Duration) -> ControlFlow<Stop> {
        let Some(limit) = self.plan.bandwidth else {
            return ControlFlow::Continue(());
        };
        if now.round == 1 {
            let streams = f64::from(self.plan.streams);
            let fits = limit.get() as f64 * (took.as_secs_f64() + 0.06 * streams);
            assert!(written as f64 <= fits + 8192.0, "{written} in {took:?}");
        }
        match now.round == 0 && limit == NO_PUSH && now.done > 1 {
            true => ControlFlow::Break(Stop::Cancel),
            false => ControlFlow::Continue(()),
        }
    }

    /// Takes the guest in, and runs it to its end.
    fn receive(&self, link: &DestinationEnd) -> Result<Ending, MigrateError> {
        let incoming = Incoming::accept(link)?;
        let vm = self
            .to
            .with_source(incoming.page_source())
            .build()
            .expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("destination: {line}"));
        let each = &mut |_| match self.breaks {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let prepared = incoming.receive(link, &vm, &devices, each)?;
        let mut started = prepared.start();
        let Arrived { vcpus, arriving } = loop {
            match started {
                Ok(arrived) => break arrived,
                Err(waiting) if waiting.why().to_string().contains(NO_LINK) => {
                    return Err(MigrateError::NotRunning);
                }
                Err(waiting) => started = waiting.resume(link),
            }
        };
        let guest = start(vm, devices, vcpus);
        let mut arriving = arriving;
        while let Err(why) = arriving.finish(&mut |_| ControlFlow::Continue(())) {
            assert!(matches!(why, MigrateError::Cut(_)), "{why}");
            if arriving
                .resume(link)
                .is_err_and(|why| why.to_string().contains(NO_LINK))
            {
                break;
            }
        }
        // From here on, missing pages are lost.
        drop(arriving);
        Ok(guest.wait().ending)
    }
}

/// The error of [`DestinationEnd`] when the source's end is gone.
const NO_LINK: &str = "not connected";

/// The source's knowledge at the end.
struct Fate {
    source: End,
    rounds: usize,
    pages: u64,
    dirty_rate: u64,
    resumed: usize,
    error: String,
}

impl Default for Fate {
    /// The guest was never handed over.
    fn default() -> Self {
        Self {
            source: End::Ran(Ending::Stopped),
            rounds: 0,
            pages: 0,
            dirty_rate: 0,
            resumed: 0,
            error: String::new(),
        }
    }
}

/// The image of `verify`.
fn image(arch: Arch) -> Vec<u8> {
    if let Some(why) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(why);
    }
    let arch = match arch {
        Arch::Arm64 => lacuna_guest::Arch::Arm64,
        _ => lacuna_guest::Arch::X86_64,
    };
    let mut images = arch.images().iter();
    let image = images.find(|image| image.name == "verify");
    image.expect("a built-in guest").file.to_vec()
}
