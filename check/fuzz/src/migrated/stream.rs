//! Both sides of a migration, each with a peer that sends what no release of Lacuna would.
//!
//! The streams of a successful migration are recorded once for each architecture. A seed changes
//! them, and gives them to the destination or to the source.

use super::frames::{self, Frame};
use super::resting::{Resting, TestHost, architectures, memory_of};
use super::{Growth, note_error};
use crate::run::Run;
use crate::values::pick;
use fastrand::Rng;
use lacuna_addr::PageCount;
use lacuna_machine::{Arch, GuestMemory as _, MemorySlots as _, PlatformDevices, Running};
use lacuna_migrate::stream::{
    Arrived, Compression, Connection, Connections, HangUp, Incoming, Mode, Plan, Sent, send,
};
use lacuna_migrate::{Budget, MigrateError, PausedGuest};
use lacuna_soft::{Vcpu, Vm, VmConfig};
use std::collections::VecDeque;
use std::io::{self, Cursor, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

/// Streams for each seed, for the destination and for the source.
const ARRIVALS: usize = 12;
const DEPARTURES: usize = 12;
/// The largest VM that a test makes at a stream's request.
const LARGEST: u64 = 8 << 20;

/// Runs one seed.
pub fn run(run: &mut Run<'_>) {
    let mut rng = Rng::with_seed(run.seed);
    let archs = architectures();
    let arch = archs[rng.usize(..archs.len())];
    let mode = pick(&mut rng, &MODES);
    let recorded = Recording::of(arch, mode);
    let growth = Growth::watch();
    let place = TestHost::new();
    for _ in 0..ARRIVALS {
        run.pulse
            .doing(&format!("a stream arrives, {arch} {mode:?}"));
        run.tally.operations += 1;
        arrive(recorded, &place, &mut rng, run);
        growth.check("a stream arrives");
    }
    place.host.verify();
    let mut guest = recorded.guest.lock().expect("no finding so far");
    let memory = guest.memory();
    guest.beside(|guest| {
        for _ in 0..DEPARTURES {
            run.pulse
                .doing(&format!("a guest is sent, {arch} {mode:?}"));
            run.tally.operations += 1;
            depart((recorded, mode), guest, &mut rng, run);
            growth.check("a guest is sent");
        }
    });
    assert!(
        memory == guest.memory(),
        "a migration that failed changed memory"
    );
}

/// The bytes that both sides of a migration have written on each connection, and the sent guest.
struct Recording {
    source: Vec<Vec<Frame>>,
    destination: Vec<Vec<Frame>>,
    memory: Vec<u8>,
    guest: Mutex<Resting>,
}

/// Connections of a hybrid migration: the first, another one for pages, `Want`s, and the answers to
/// them.
const CONNECTIONS: usize = 4;
const MODES: [Mode; 3] = [Mode::PreCopy, Mode::PostCopy, Mode::Hybrid];

impl Recording {
    fn of(arch: Arch, mode: Mode) -> &'static Self {
        static ALL: [[OnceLock<Recording>; 3]; 2] = [const { [const { OnceLock::new() }; 3] }; 2];
        let kind = MODES.iter().position(|other| *other == mode);
        let of_mode = &ALL[usize::from(arch == Arch::Arm64)][kind.expect("one of them")];
        of_mode.get_or_init(|| Self::record(arch, mode))
    }

    fn record(arch: Arch, mode: Mode) -> Self {
        let mut guest = Resting::new(arch);
        let memory = guest.memory();
        let pairs = [(); CONNECTIONS].map(|()| UnixStream::pair().expect("a pair"));
        let (here, there): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let (source, destination) = (Link::of(here), Link::of(there));
        guest.beside(|guest| {
            thread::scope(|scope| {
                let arrives = scope.spawn(|| {
                    let place = TestHost::new();
                    let arrived = take_in(&destination, &place);
                    memory_of(&arrived.unwrap_or_else(|(_, error)| panic!("{error}")).vm)
                });
                let plan = plan(mode);
                let sent = send(guest, &source, &plan, &mut |_| rewrite(guest.vm()));
                let Ok(Sent::Moved(outgoing)) = sent else {
                    panic!("it goes well");
                };
                outgoing.take_back();
                let arrived = arrives.join().expect("no panic");
                assert!(arrived == memory, "{arch}: memory differs");
            });
        });
        Self {
            source: source.frames(),
            destination: destination.frames(),
            memory,
            guest: Mutex::new(guest),
        }
    }
}

impl Recording {
    /// Whether the source has a connection for answers.
    fn has_answers(&self) -> bool {
        let mut joins = self.source.iter().filter_map(|frames| frames.first());
        joins.any(|join| join.payload.windows(9).any(|word| word == b"\"answers\""))
    }
}

fn plan(mode: Mode) -> Plan {
    // No remaining page fits into it, so a hybrid migration has a second part.
    let downtime = Duration::ZERO;
    let rounds = 1;
    Plan {
        mode,
        budget: Budget { downtime, rounds },
        streams: 2,
        compression: match mode {
            Mode::PreCopy => Compression::Lz4,
            Mode::PostCopy => Compression::None,
            Mode::Hybrid => Compression::Zstd,
        },
        bandwidth: None,
    }
}

/// Writes a page without a change, so that each round leaves one page.
fn rewrite(vm: &Vm) -> ControlFlow<lacuna_migrate::Stop> {
    let gpa = vm.memory_slots()[0].gfns.start().gpa();
    let mut bytes = [0; 64];
    vm.read(gpa, &mut bytes).expect("guest memory");
    vm.write(gpa, &bytes).expect("guest memory");
    ControlFlow::Continue(())
}

/// The connections of one side, in the order of their opening, and its writes to each.
struct Link<S> {
    left: Mutex<VecDeque<S>>,
    written: Mutex<Vec<Arc<Mutex<Vec<u8>>>>>,
}

impl<S> Link<S> {
    fn of(streams: impl IntoIterator<Item = S>) -> Self {
        Self {
            left: Mutex::new(streams.into_iter().collect()),
            written: Mutex::default(),
        }
    }

    /// The written frames, for each connection.
    fn frames(&self) -> Vec<Vec<Frame>> {
        let written = self.written.lock().expect("no panic");
        let frames = |one: &Arc<Mutex<Vec<u8>>>| frames::parse(&one.lock().expect("no panic"));
        written.iter().map(frames).collect()
    }

    /// Whether this side has written a frame of `kind` on its first connection.
    fn has_said(&self, kind: u8) -> bool {
        let all = self.frames();
        all.first()
            .is_some_and(|first| first.iter().any(|frame| frame.kind == kind))
    }
}

impl<S: Stream> Connections for Link<S> {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let stream = self.left.lock().expect("no panic").pop_front();
        let stream = stream.ok_or(io::ErrorKind::NotConnected)?;
        let written = Arc::<Mutex<Vec<u8>>>::default();
        self.written
            .lock()
            .expect("no panic")
            .push(Arc::clone(&written));
        Ok(Box::new(Taped { stream, written }))
    }
}

/// A connection that keeps the written bytes.
struct Taped<S> {
    stream: S,
    written: Arc<Mutex<Vec<u8>>>,
}

/// The parts of a connection.
trait Stream: Read + Send + 'static {
    fn put(&mut self, bytes: &[u8]) -> io::Result<usize>;
    fn end(&self) -> io::Result<HangUp>;
}

impl Stream for UnixStream {
    fn put(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write(bytes)
    }

    fn end(&self) -> io::Result<HangUp> {
        self.hang_up()
    }
}

/// A peer that has sent everything, and reads everything.
struct Script {
    bytes: Cursor<Vec<u8>>,
    /// How many reads time out at its end, before the connection ends.
    silence: u32,
    is_over: Arc<AtomicBool>,
}

impl Read for Script {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.is_over.load(Ordering::Acquire) {
            return Ok(0);
        }
        let bytes = self.bytes.read(buf)?;
        if bytes == 0 && self.silence > 0 {
            self.silence -= 1;
            thread::sleep(Duration::from_millis(1));
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(bytes)
    }
}

impl Stream for Script {
    fn put(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn end(&self) -> io::Result<HangUp> {
        let is_over = Arc::clone(&self.is_over);
        Ok(Box::new(move || is_over.store(true, Ordering::Release)))
    }
}

impl<S: Stream> Read for Taped<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buf)
    }
}

impl<S: Stream> Write for Taped<S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let bytes = self.stream.put(buf)?;
        let mut written = self.written.lock().expect("no panic");
        written.extend(&buf[..bytes]);
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<S: Stream> Connection for Taped<S> {
    fn hang_up(&self) -> io::Result<HangUp> {
        self.stream.end()
    }
}

/// An arrived guest, with all of its memory.
struct Guested {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    devices: PlatformDevices,
}

/// A migration's stage at an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Until {
    /// The connection, or the VM.
    Accepted,
    /// The destination has said why it gives up.
    Refused,
    /// It waits for `Go`.
    Prepared,
    /// The guest runs, and lacks memory.
    Runs,
}

/// Takes a guest in like a VMM: makes the VM that the stream asks for.
fn take_in<S: Stream>(link: &Link<S>, place: &TestHost) -> Result<Guested, (Until, MigrateError)> {
    let incoming = Incoming::accept(link).map_err(|why| (Until::Accepted, why))?;
    let Some(vm) = vm_for(&incoming, place) else {
        let why = MigrateError::Vcpus("there is no room for such a machine".into());
        incoming.refuse(&why);
        return Err((Until::Refused, why));
    };
    let devices = PlatformDevices::of(incoming.machine().arch, |_: &str| ());
    let prepared = incoming.receive(link, &vm, &devices, &mut |_| ControlFlow::Continue(()));
    let prepared = prepared.map_err(|why| (Until::Refused, why))?;
    let waiting = match prepared.start() {
        Ok(arrived) => return run_in(arrived, link, place, vm, devices),
        Err(waiting) => waiting,
    };
    match waiting.resume(link) {
        Ok(arrived) => run_in(arrived, link, place, vm, devices),
        Err(waiting) => {
            let why = waiting.why().to_string();
            Err((Until::Prepared, MigrateError::Stream(why)))
        }
    }
}

/// Takes the memory of a guest that may run already.
fn run_in<S: Stream>(
    arrived: Arrived<Vm>,
    link: &Link<S>,
    place: &TestHost,
    vm: Arc<Vm>,
    devices: PlatformDevices,
) -> Result<Guested, (Until, MigrateError)> {
    let Arrived {
        vcpus,
        mut arriving,
    } = arrived;
    let mut done = arriving.finish(&mut |_| ControlFlow::Continue(()));
    if done.is_err() && arriving.resume(link).is_ok() {
        done = arriving.finish(&mut |_| ControlFlow::Continue(()));
    }
    let mut guest = Guested { vm, vcpus, devices };
    if let Err(why) = done {
        // Without its memory the guest is lost, and must report it: it never waits for ever.
        drop(arriving);
        let Guested { vm, vcpus, devices } = &mut guest;
        place.run(vm, vcpus, devices, 20);
        return Err((Until::Runs, why));
    }
    Ok(guest)
}

/// A VM for the stream, if it is a small one.
fn vm_for(incoming: &Incoming, place: &TestHost) -> Option<Arc<Vm>> {
    let machine = incoming.machine();
    let pages = machine.layout.pages().saturating_mul(4096);
    if machine.memory.max(pages) > LARGEST || machine.vcpus > 8 {
        return None;
    }
    let config = VmConfig {
        arch: machine.arch,
        memory: PageCount::from_bytes(machine.memory),
        vcpus: machine.vcpus,
        apf: machine.apf,
        cpu: machine.cpu,
        ..VmConfig::default()
    };
    let (host, time) = (Arc::clone(&place.host), place.time());
    match incoming.page_source() {
        None => Vm::new(host, time, config).ok(),
        Some(source) => Vm::with_source(host, time, config, source).ok(),
    }
}

/// The scripts of a hostile peer: a good peer's bytes on each connection, with a change in one of
/// them.
fn scripts(good: &[Vec<Frame>], is_whole: bool, rng: &mut Rng) -> Link<Script> {
    let changed = match rng.u8(..3) {
        0 => rng.usize(..good.len()),
        _ => 0,
    };
    let mut all: Vec<_> = good.iter().map(|frames| frames::encode(frames)).collect();
    if !is_whole {
        all[changed] = frames::mutate(good[changed].clone(), rng);
        if rng.u8(..8) == 0 {
            // A replacement for a connection.
            let again = rng.usize(..good.len());
            all.push(frames::mutate(good[again].clone(), rng));
        }
    }
    let script = |(index, bytes)| Script {
        bytes: Cursor::new(bytes),
        // The connections beside the first one may be silent while no page is needed.
        silence: match (1..CONNECTIONS).contains(&index) {
            true if is_whole => u32::MAX,
            true => 20,
            false => 0,
        },
        is_over: Arc::default(),
    };
    Link::of(all.into_iter().enumerate().map(script))
}

/// Streams of a hostile source.
fn arrive(recorded: &Recording, place: &TestHost, rng: &mut Rng, run: &mut Run<'_>) {
    // A script answers before the VM has asked, and an answer to no request is an error. The
    // recording itself has compared the memory of such a guest.
    let is_whole = rng.u8(..24) == 0 && !recorded.has_answers();
    let link = scripts(&recorded.source, is_whole, rng);
    match take_in(&link, place) {
        Ok(Guested {
            vm,
            mut vcpus,
            devices,
        }) => {
            assert!(link.has_said(frames::RUNNING), "the source is not told");
            run.tally.note("streams", "the guest arrived");
            if is_whole {
                assert!(memory_of(&vm) == recorded.memory, "memory differs");
            }
            place.run(&vm, &mut vcpus, &devices, 20);
            vm.mmu().verify();
        }
        Err((until, error)) => {
            assert!(!is_whole, "whole streams: {error}");
            run.tally
                .note("streams", format!("{until:?}, then an error"));
            let says_run = link.has_said(frames::RUNNING);
            assert_eq!(says_run, until == Until::Runs, "{until:?}: {error}");
            let is_told = link.has_said(frames::REFUSED);
            let must_tell = matches!(until, Until::Accepted | Until::Refused);
            assert!(is_told || !must_tell, "the source is not told: {error}");
            note_error("streams refused", &error, run);
        }
    }
}

/// The answers of a hostile destination.
fn depart(
    (recorded, mode): (&Recording, Mode),
    guest: &Running<Vm>,
    rng: &mut Rng,
    run: &mut Run<'_>,
) {
    let slots = guest.vm().memory_slots();
    let before = PausedGuest::pause(guest).expect("it runs").state().clone();
    let is_whole = rng.u8(..24) == 0;
    let link = scripts(&recorded.destination, is_whole, rng);
    match send(guest, &link, &plan(mode), &mut |_| rewrite(guest.vm())) {
        Ok(Sent::Moved(outgoing)) => {
            assert!(link.has_said(frames::GO), "it is gone without a word");
            run.tally.note("answers", "moved");
            outgoing.take_back();
        }
        Ok(Sent::Unknown { outgoing, why } | Sent::Cut { outgoing, why }) => {
            assert!(!is_whole, "whole answers: {why}");
            assert!(
                link.has_said(frames::GO),
                "the source has let go of the guest without Go"
            );
            run.tally.note("answers", "not known, or cut");
            match outgoing.resume(&link, &mut |_| ControlFlow::Continue(())) {
                Sent::Moved(outgoing)
                | Sent::Unknown { outgoing, .. }
                | Sent::Cut { outgoing, .. } => {
                    outgoing.take_back();
                }
            }
        }
        Err(error) => {
            assert!(!is_whole, "whole answers: {error}");
            assert!(
                !link.has_said(frames::GO),
                "the source has sent Go: {error}"
            );
            note_error("answers refused", &error, run);
        }
    }
    let after = PausedGuest::pause(guest).expect("the guest runs at the source");
    assert!(
        *after.state() == before,
        "the guest at the source has changed"
    );
    assert_eq!(guest.vm().memory_slots(), slots, "its slots have changed");
}
