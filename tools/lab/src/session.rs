//! A guest under measurement: what it counts, and what may be changed while it runs.
//!
//! One guest lives through a whole experiment, on any backend ([`on`]). Two slices of time differ
//! in one word on the guest's status page (the paused processes), or in one switch of the VM (such
//! as async page faults). They differ in nothing else: the processes, the pages and the swap device
//! are the same.

use crate::experiment::{LabError, LabResult};
use crate::interrupt;
use crate::options::guests;
use lacuna::soft::Stalls;
use lacuna::{Apf, Arch, Builder, Ending, Gpa, GuestMemory, Image, PlatformDevices, Running, Vm};
use lacuna_guest::status::{Kind, PAGE_BYTES, PAUSED_AT, SETTING_AT, Status};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often [`Guest::run_until`] reads the status page.
const LOOK: Duration = Duration::from_micros(200);
/// How often [`Guest::wait_for`] looks for a status page, and [`Guest::steps_with`] counts.
const ATTACH: Duration = Duration::from_millis(1);
/// The longest time that a guest may take for its preparations.
const PREPARE: Duration = Duration::from_secs(120);

/// The guest's progress at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    /// When the counters were read.
    pub at: Instant,
    /// Steps of all workers.
    pub workers: u64,
    /// Steps of all faulters.
    pub faulters: u64,
}

impl Count {
    /// Steps a second since `before`: workers, faulters.
    pub fn rates_since(&self, before: &Self) -> [f64; 2] {
        let seconds = (self.at - before.at).as_secs_f64();
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        [
            rate(self.workers, before.workers),
            rate(self.faulters, before.faulters),
        ]
    }
}

/// A running guest, seen from outside, on any backend.
#[derive(Clone, Copy)]
pub struct Guest<'a> {
    memory: &'a dyn GuestMemory,
    devices: &'a PlatformDevices,
    page: Gpa,
}

impl<'a> Guest<'a> {
    /// The guest of `devices`, once it has announced its status page.
    pub fn attach(memory: &'a dyn GuestMemory, devices: &'a PlatformDevices) -> Option<Self> {
        Some(Self {
            memory,
            devices,
            page: devices.status_page()?.gpa(),
        })
    }

    /// Waits until the guest of `devices` has announced its status page.
    pub fn wait_for(memory: &'a dyn GuestMemory, devices: &'a PlatformDevices) -> LabResult<Self> {
        let deadline = Instant::now() + PREPARE;
        loop {
            interrupt::check()?;
            if let Some(guest) = Self::attach(memory, devices) {
                return Ok(guest);
            }
            if devices.ending().is_some() || Instant::now() > deadline {
                let why = "the guest did not announce its status page";
                return Err(LabError::Guest(why.into()));
            }
            std::thread::sleep(ATTACH);
        }
    }

    /// Reads its status page.
    pub fn status(&self) -> LabResult<Status> {
        let mut page = vec![0; PAGE_BYTES];
        self.memory.read(self.page, &mut page)?;
        Status::parse(&page).map_err(|error| LabError::Guest(error.to_string()))
    }

    /// Reads its counters.
    pub fn count(&self) -> LabResult<Count> {
        let status = self.status()?;
        let sum = |kind| {
            let of_kind = status.threads.iter().filter(|thread| thread.kind == kind);
            of_kind.map(|thread| thread.counter).sum()
        };
        Ok(Count {
            at: Instant::now(),
            workers: sum(Kind::Worker),
            faulters: sum(Kind::Faulter),
        })
    }

    /// Makes the processes of `kinds` pause, and all others run.
    pub fn pause(&self, kinds: &[Kind]) -> LabResult {
        let mask = kinds.iter().fold(0, |mask, kind| mask | kind.paused_bit());
        self.write_word(PAUSED_AT, mask)
    }

    /// Gives the workload its setting, whose meaning is the workload's.
    pub fn set(&self, setting: u32) -> LabResult {
        self.write_word(SETTING_AT, setting)
    }

    fn write_word(&self, offset: usize, word: u32) -> LabResult {
        let at = self.page.checked_add(offset as u64);
        let at = at.expect("inside the status page");
        Ok(self.memory.write(at, &word.to_le_bytes())?)
    }

    /// Lets the guest run for `time`.
    pub fn run_for(&self, time: Duration) -> LabResult {
        interrupt::check()?;
        std::thread::sleep(time);
        self.runs()
    }

    /// Returns an error if the guest has ended.
    pub fn runs(&self) -> LabResult {
        match self.devices.ending() {
            None => Ok(()),
            Some(ending) => Err(LabError::Guest(format!(
                "the guest ended while it was measured: {ending:?}"
            ))),
        }
    }

    /// Lets the guest run until `what` finds something on its status page, and returns that.
    pub fn run_until<T>(
        &self,
        limit: Duration,
        mut what: impl FnMut(&Status) -> Option<T>,
    ) -> LabResult<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = what(&self.status()?) {
                return Ok(found);
            }
            if Instant::now() > deadline {
                return Err(LabError::Guest(format!(
                    "the guest did not make the expected progress within {limit:?}"
                )));
            }
            self.run_for(LOOK)?;
        }
    }

    /// The bytes of its arena, which ends where its memory ends. The guest's kernel writes this
    /// number into the page directly after the status page.
    pub fn arena_bytes(&self) -> LabResult<u64> {
        let info = self.page.checked_add(PAGE_BYTES as u64);
        let mut bytes = [0; 8];
        self.memory
            .read(info.expect("inside its memory"), &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Lets the workload take `steps` steps with a setting; afterwards it has none.
    pub fn steps_with(&self, setting: u32, steps: u64) -> LabResult {
        self.set(setting)?;
        let enough = self.count()?.workers + steps;
        while self.count()?.workers < enough {
            self.run_for(ATTACH)?;
        }
        self.set(0)
    }

    /// Waits until its first process has counted to 1: the guest is then prepared.
    pub fn prepared(&self) -> LabResult {
        self.run_until(PREPARE, |status| {
            (status.threads.first()?.counter > 0).then_some(())
        })
    }
}

/// A measurable VM.
pub trait Measured: Vm {
    /// Each vCPU's stalls since its VM began; empty where the backend does not count them. They are
    /// not in the backend interface: soft times every wait of its vCPUs, but on `/dev/kvm` a vCPU
    /// waits for a page inside the kernel, which does not report it.
    fn stalls(&self) -> Vec<Stalls> {
        Vec::new()
    }
}

impl Measured for lacuna::soft::Vm {
    fn stalls(&self) -> Vec<Stalls> {
        Self::stalls(self)
    }
}

impl Measured for lacuna::kvm::Vm {}

/// A running guest with its VM.
pub struct Session<'a, V: Vm> {
    /// The guest.
    pub guest: Guest<'a>,
    /// Its VM.
    pub vm: &'a V,
    /// Its threads.
    pub running: &'a Running<V>,
}

impl<V: Vm> Session<'_, V> {
    /// From now on faults are taken as `apf` says.
    ///
    /// # Panics
    /// If the backend cannot switch and the VM was made with the other choice: the figures would be
    /// of another arm.
    pub fn set_apf(&self, apf: Apf) {
        match self.vm.apf_switch() {
            Some(switch) => switch.set_apf(apf),
            None => assert_eq!(self.vm.config().apf, apf, "an arm of another VM"),
        }
    }
}

/// A guest's last printed line, for the message when it fails.
#[derive(Clone, Default)]
pub struct LastWords(Arc<Mutex<String>>);

impl LastWords {
    /// A console that keeps only the last line.
    pub fn console(&self) -> impl FnMut(&str) + Send + 'static {
        let kept = Arc::clone(&self.0);
        move |line: &str| line.clone_into(&mut kept.lock().expect("no panic under this lock"))
    }

    /// The guest failed, or ended too early.
    pub fn ended(&self, ending: &Ending) -> LabError {
        let line = self.line();
        LabError::Guest(format!(
            "the guest ended with {ending:?}; its last line: {line:?}"
        ))
    }

    /// The last line.
    pub fn line(&self) -> String {
        self.0.lock().expect("no panic under this lock").clone()
    }

    /// The result of an experiment, if the experiment ended the guest. Otherwise the error says why
    /// the guest ended. The error also counts after the last measurement, because the guest may
    /// have found something wrong.
    pub fn settle<T>(&self, result: Option<LabResult<T>>, ending: &Ending) -> LabResult<T> {
        match (result, ending) {
            (Some(result), Ending::Stopped) => result,
            _ => Err(self.ended(ending)),
        }
    }
}

/// A built-in image of `arch`.
pub fn image(arch: Arch, name: &str) -> LabResult<Image<'static>> {
    let guests = guests(arch);
    let found = guests.image(name).map(|image| Image::parse(image.file));
    match found {
        Some(Ok(image)) => Ok(image),
        Some(Err(error)) => Err(LabError::Guest(format!("{name}: {error}"))),
        None => Err(LabError::Guest(match guests.unavailable() {
            Some(reason) => format!("no guest images of {arch} are built in: {reason}"),
            None => format!("{arch} has no guest {name}"),
        })),
    }
}

/// Starts a VM of `builder` with the guest `image`, carries out `experiment` while it runs, and
/// ends it. The experiment is the same code for every backend.
///
/// # Errors
/// An error of the experiment or the builder; and a guest that ends before the experiment does.
pub fn on<B: Builder<Vm: Vm<Error: Into<LabError>>>, T>(
    builder: &B,
    image: &Image<'_>,
    experiment: impl FnOnce(&Session<'_, B::Vm>) -> LabResult<T>,
) -> LabResult<T> {
    let words = LastWords::default();
    let devices = PlatformDevices::of(image.arch, words.console());
    let running = builder.start(image, devices).map_err(Into::into)?;
    let vm = &**running.vm();
    let guest = Guest::wait_for(vm, running.devices());
    let result = guest.and_then(|guest| {
        experiment(&Session {
            guest,
            vm,
            running: &running,
        })
    });
    running.stop();
    words.settle(Some(result), &running.wait().ending)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{builder, needs_guests};
    use lacuna::PageCount;
    use lacuna::memory::Swap;
    use lacuna::soft::VmBuilder;
    use lacuna_skip::test;

    const BM: &str = "workers=2 faulters=2 populate=1 seconds=1000000";

    fn small(words: &str) -> VmBuilder {
        let [memory, resident] = [32, 8].map(|mib| PageCount::from_bytes(mib << 20));
        VmBuilder {
            // Not compressed memory: pages with bm's random writes compress worse and worse.
            swap: Swap::File(std::env::temp_dir()),
            apf: Apf::On,
            command_line: words.into(),
            ..builder(memory, resident, 2)
        }
    }

    /// Waits for two readings between which the threads of `kind` did nothing and the others
    /// something.
    fn still(guest: &Guest<'_>, kind: Kind) -> LabResult {
        for _ in 0..1000 {
            let before = guest.count()?;
            guest.run_for(Duration::from_millis(20))?;
            let [workers, faulters] = guest.count()?.rates_since(&before);
            let (resting, going) = match kind {
                Kind::Worker => (workers, faulters),
                _ => (faulters, workers),
            };
            if resting == 0.0 && going > 0.0 {
                return Ok(());
            }
        }
        panic!("{kind:?} never paused while the others ran");
    }

    #[test]
    fn kinds_pause_and_go_on_and_faults_are_taken_as_told() {
        needs_guests();
        let counted = on(&small(BM), &image(Arch::X86_64, "bm").unwrap(), |session| {
            let guest = &session.guest;
            guest.prepared()?;
            guest.pause(&[Kind::Faulter])?;
            still(guest, Kind::Faulter)?;
            guest.pause(&[Kind::Worker])?;
            still(guest, Kind::Worker)?;
            let before = guest.status()?.apf.not_present;
            let more = |status: &Status| (status.apf.not_present != before).then_some(());
            guest.run_until(PREPARE, more)?;
            session.set_apf(Apf::Off);
            // Pages in flight arrive; after that the counts stay.
            let mut last = guest.status()?.apf;
            let deadline = Instant::now() + PREPARE;
            loop {
                guest.run_for(Duration::from_millis(20))?;
                let now = guest.status()?.apf;
                if now == last && now.not_present == now.ready {
                    return Ok(now);
                }
                assert!(Instant::now() < deadline, "pages are on their way: {now:?}");
                last = now;
            }
        });
        let counted = counted.unwrap();
        assert_eq!((counted.not_present, counted.lost), (counted.ready, 0));
    }

    #[test]
    fn a_guest_that_ends_too_early_is_an_error_with_its_last_line() {
        needs_guests();
        let hello = image(Arch::X86_64, "hello").unwrap();
        let found = on(&small(""), &hello, |session| {
            session.guest.run_until(PREPARE, |_| None::<()>)
        });
        let text = found.unwrap_err().to_string();
        assert!(text.contains("the guest ended with Exited(0)"), "{text}");
    }
}
