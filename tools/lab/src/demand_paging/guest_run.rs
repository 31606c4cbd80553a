//! One run of one VM: its vCPUs' threads, the threads that provide its pages, and what is counted.
//! The guest `touch` boots, waits at a gate until the host opens it, and times the touching itself.

use super::fixture::Fixture;
use super::kernel_queue::KernelQueues;
use super::lists::{Lists, Queues, use_queue};
use super::{By, DemandPaging, Outcome};
use crate::experiment::{LabError, LabResult};
use crate::fixture::joined;
use crate::interrupt;
use crate::session::{Guest, LastWords, image};
use lacuna::device::{Next, dispatch};
use lacuna::memory::{MemoryKind, SlotFlags};
use lacuna::missing::FaultToken;
use lacuna::source::{Faults, Injected, SourcePage};
use lacuna::{Apf, Ending, Exit, Gpa, PAGE_SIZE, PlatformDevices, Vcpu, VcpuError, Vm};
use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The longest time for the boot of a guest, and for its touching without the pauses of `--delay`.
const LIMIT: Duration = Duration::from_secs(120);
/// How often the lab checks for the end of a guest. The check is rare, because it takes time from
/// the vCPUs.
const LOOK: Duration = Duration::from_millis(2);
/// The beginning of the guest's last line.
const RESULT: &str = "RESULT threads=";

impl<V: Vm<Error: Into<LabError>>> Fixture<V> {
    /// Pages a second of a fresh VM.
    pub fn rate(&self, options: &DemandPaging) -> LabResult<f64> {
        self.run(options, || Ok(())).map(|ran| ran.0.rate())
    }

    /// Boots a fresh VM, whose pages are provided as `options` say. The guest touches its pages
    /// when `gate` returns. Returns the VM too, whose guest has ended.
    pub fn run(
        &self,
        options: &DemandPaging,
        gate: impl FnOnce() -> LabResult,
    ) -> LabResult<(Outcome, Arc<V>)> {
        let run = Run::new(self, options)?;
        let outcome = thread::scope(|scope| {
            let end = End(&run);
            // Start the readers before the boot, which loads the guest into missing memory.
            let readers = run.start_readers(scope);
            let vcpus = run.start(scope)?;
            let guest = run.prepared()?;
            gate()?;
            guest.set(1)?;
            let ending = run.wait()?;
            drop(end);
            let readers = readers.into_iter();
            let readers = readers.map(|(queue, reader)| (queue, joined(reader)));
            let vcpus = vcpus.into_iter().map(joined).collect::<Vec<_>>();
            run.outcome(&ending, readers, &vcpus)
        })?;
        Ok((outcome, Arc::clone(&run.vm)))
    }

    /// The first pages of the vCPUs' shares, without the first vCPU's. Boots a guest if none has
    /// booted yet, because the guest's kernel decides where its arena begins.
    fn shares(&self, options: &DemandPaging) -> LabResult<Vec<SourcePage>> {
        if self.arena.get().is_none() {
            let options = DemandPaging {
                by: By::Exits,
                ..options.clone()
            };
            self.run(&options, || Ok(()))?;
        }
        let first = *self.arena.get().expect("a guest has booted");
        let share = options.pages() / options.guest.vcpus as u64;
        let shares = 1..options.guest.vcpus as u64;
        Ok(shares
            .map(|vcpu| SourcePage(first + vcpu * share))
            .collect())
    }

    /// For memory with the kernel's queue, that; otherwise the lab's own lists.
    fn queues(&self, options: &DemandPaging) -> LabResult<Box<dyn Queues>> {
        let parts = match (options.by, options.guest.memory_kind) {
            (By::Queue, MemoryKind::Linux | MemoryKind::Hugetlbfs) if options.queue_each => {
                self.shares(options)?
            }
            (By::Queue, MemoryKind::Linux | MemoryKind::Hugetlbfs) => Vec::new(),
            _ => {
                let lists = if options.queue_each {
                    options.guest.vcpus
                } else {
                    1
                };
                return Ok(Box::new(Arc::new(Lists::new(lists, options.guest.arch))));
            }
        };
        Ok(Box::new(KernelQueues::new(options, &parts)?))
    }
}

struct Run<'a, V> {
    fixture: &'a Fixture<V>,
    options: &'a DemandPaging,
    vm: Arc<V>,
    queues: Box<dyn Queues>,
    devices: PlatformDevices,
    words: LastWords,
}

/// An accepted exit.
type Accepted = (Gpa, FaultToken);

/// Exits of a vCPU at missing pages, and how many of them the guest accepted.
type Exits = [u64; 2];

impl<'a, V: Vm<Error: Into<LabError>>> Run<'a, V> {
    fn new(fixture: &'a Fixture<V>, options: &'a DemandPaging) -> LabResult<Self> {
        let queues = fixture.queues(options)?;
        let apf = match options.by {
            By::Tokens => Apf::On,
            _ => Apf::Off,
        };
        let source = match options.by {
            // A source at a distance takes more requests meanwhile.
            By::Source if !options.delay.is_zero() => {
                let far = Injected::new(queues.source(), Faults::latency(options.delay));
                Arc::new(far.map_err(LabError::io("start a page source"))?)
            }
            _ => queues.source(),
        };
        let words = LastWords::default();
        Ok(Self {
            fixture,
            options,
            vm: (fixture.make)(apf, source)?,
            queues,
            devices: PlatformDevices::of(options.guest.arch, words.console()),
            words,
        })
    }

    /// Boots the guest and starts the threads of its vCPUs.
    fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> LabResult<Vec<ScopedJoinHandle<'scope, Exits>>> {
        let image = image(self.options.guest.arch, "touch")?;
        let vcpus = self
            .vm
            .boot(&image, &self.fixture.line)
            .map_err(Into::into)?;
        let (accepted, tokens) = channel();
        match self.options.by {
            By::Exits => self.exit_on_missing()?,
            By::Tokens => {
                self.exit_on_missing()?;
                scope.spawn(move || self.provide_accepted(&tokens));
            }
            By::Queue => self.queues.open(),
            By::Source => {}
        }
        let start = |(index, vcpu): (usize, V::Vcpu)| {
            let accepted = accepted.clone();
            scope.spawn(move || {
                let pinned = self
                    .options
                    .guest
                    .pin
                    .as_ref()
                    .map(|cores| cores.pin(index));
                if let Some(Err(error)) = pinned {
                    self.fail(index, &error);
                }
                use_queue(index);
                self.drive(vcpu, &accepted)
            })
        };
        Ok(vcpus.into_iter().enumerate().map(start).collect())
    }

    fn exit_on_missing(&self) -> LabResult {
        for slot in self.vm.memory_slots() {
            self.vm
                .set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING)?;
        }
        Ok(())
    }

    /// Readers, each with the number of its queue. They return how many faults they have answered.
    fn start_readers<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Vec<(usize, ScopedJoinHandle<'scope, u64>)> {
        let readers = match self.options.by {
            By::Queue => self.options.readers,
            _ => 0,
        };
        let queues = (0..readers).flat_map(|_| 0..self.queues.count());
        let start = |queue| {
            let read = move || {
                let read = self.queues.read(queue, &|gpa| self.provide(gpa));
                read.unwrap_or_else(|error| {
                    self.fail(0, &error);
                    0
                })
            };
            (queue, scope.spawn(read))
        };
        queues.map(start).collect()
    }

    /// The work of one vCPU's thread.
    fn drive(&self, mut vcpu: V::Vcpu, accepted: &Sender<Accepted>) -> Exits {
        let _end = End(self);
        let [mut exits, mut tokens] = [0, 0];
        loop {
            let exit = vcpu.run();
            if let Ok(Exit::MemoryFault { gpa, token, .. }) = exit {
                // This loop does not ask whether the run is over: all vCPUs share the lock of the
                // answer. The end kicks every vCPU, which is another exit.
                exits += 1;
                if self.options.by == By::Tokens && vcpu.accept(token).is_ok() {
                    tokens += 1;
                    // The other thread ends only after all vCPUs.
                    let _ = accepted.send((gpa, token));
                } else if let Err(error) = self.provide(gpa) {
                    self.fail(vcpu.index(), &error);
                }
            } else if dispatch(&mut vcpu, exit, &self.devices, &*self.vm) == Next::Stop {
                return [exits, tokens];
            }
        }
    }

    /// Provides the page at `gpa`, and the run around it.
    fn provide(&self, gpa: Gpa) -> LabResult {
        self.options.pause();
        let pages = self.options.at_once();
        let bytes = (pages * PAGE_SIZE) as u64;
        let first = Gpa::truncate(gpa.get() / bytes * bytes);
        (self.fixture.provide)(&self.vm, first, pages)
    }

    /// The work of the thread that provides the pages of accepted tokens.
    fn provide_accepted(&self, accepted: &Receiver<Accepted>) {
        let memory = self.vm.missing_memory().expect("it has a source");
        for (gpa, token) in accepted {
            if let Err(error) = self.provide(gpa) {
                self.fail(token.vcpu(), &error);
            }
            // The token is unknown if the VM has ended.
            let _ = memory.ready(token);
        }
    }

    fn fail(&self, vcpu: usize, cause: &dyn Error) {
        let cause = cause.to_string();
        let error = VcpuError::Host { vcpu, cause };
        self.devices.end(Ending::Failed(error), &*self.vm);
    }

    /// The guest, once it waits at its gate. Notes where its arena begins.
    fn prepared(&self) -> LabResult<Guest<'_>> {
        let prepare = || {
            let guest = Guest::wait_for(&*self.vm, &self.devices)?;
            guest.prepared()?;
            let arena = guest.arena_bytes()? / PAGE_SIZE as u64;
            let first = self.options.memory().get().saturating_sub(arena);
            let _ = self.fixture.arena.set(first);
            Ok(guest)
        };
        prepare().map_err(|error| match self.devices.ending() {
            None => error,
            Some(ending) => self.words.ended(&ending),
        })
    }

    /// Waits for the end of the guest.
    fn wait(&self) -> LabResult<Ending> {
        let faults = self.options.pages() / self.options.at_once() as u64 + 1;
        let limit = LIMIT
            + self
                .options
                .delay
                .saturating_mul(u32::try_from(faults).unwrap_or(u32::MAX));
        let start = Instant::now();
        loop {
            interrupt::check()?;
            match self.devices.ending() {
                Some(ending) => return Ok(ending),
                None if start.elapsed() > limit => {
                    let why = format!("the guest did not end within {limit:?}");
                    return Err(LabError::Guest(why));
                }
                None => thread::sleep(LOOK),
            }
        }
    }

    /// What the threads and the guest have counted.
    fn outcome(
        &self,
        ending: &Ending,
        readers: impl Iterator<Item = (usize, u64)>,
        vcpus: &[Exits],
    ) -> LabResult<Outcome> {
        let line = self.words.line();
        let field = |name: &str| {
            let mut words = line.strip_prefix(RESULT)?.split(' ');
            words.find_map(|word| word.strip_prefix(name))?.parse().ok()
        };
        let touched: Option<(u64, u64)> = field("pages=").zip(field("ns="));
        let touched = touched.filter(|_| *ending == Ending::Exited(0));
        let (pages, ns) = touched.ok_or_else(|| self.words.ended(ending))?;
        let is_queue = self.options.by == By::Queue;
        let mut queues = vec![0; if is_queue { self.queues.count() } else { 0 }];
        readers.for_each(|(queue, faults)| queues[queue] += faults);
        let at_most = queues.iter().sum::<u64>() * self.options.at_once() as u64;
        if is_queue && at_most < pages {
            return Err(LabError::Guest(format!(
                "at most {at_most} of {pages} pages came through the queues"
            )));
        }
        Ok(Outcome {
            pages,
            ns,
            queues,
            exits: vcpus.iter().map(|exits| exits[0]).collect(),
            tokens: vcpus.iter().map(|exits| exits[1]).collect(),
        })
    }
}

/// Ends the guest and the readers when the value is dropped, also after an error or a panic.
struct End<'a, V: Vm>(&'a Run<'a, V>);

impl<V: Vm> Drop for End<'_, V> {
    fn drop(&mut self) {
        let Self(run) = self;
        run.devices.end(Ending::Stopped, &*run.vm);
        run.queues.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use crate::options::options_of;
    use lacuna_skip::test;

    /// Each queue has so many readers; without queues there are none.
    #[test]
    fn so_many_readers_read_each_queue() {
        needs_guests();
        let readers = |line: &str| {
            let line = format!("--vcpus 3 --bytes 2M --memory-kind pool {line}");
            let options: DemandPaging = options_of(&line);
            let fixture = Fixture::soft(&options).unwrap();
            let run = Run::new(&fixture, &options).unwrap();
            thread::scope(|scope| {
                let _end = End(&run);
                let readers = run.start_readers(scope).into_iter();
                readers.map(|(queue, _)| queue).collect::<Vec<_>>()
            })
        };
        assert_eq!(readers(""), [0]);
        assert_eq!(readers("--readers 2"), [0, 0]);
        assert_eq!(readers("--readers 2 --queue-each"), [0, 1, 2, 0, 1, 2]);
        assert!(readers("--by exits").is_empty());
    }
}
