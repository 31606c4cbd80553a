//! The example `controlled` is a VMM of its own, in another process: clients control its guest.

use lacuna::dirty::Detection;
use lacuna::memory::PageStates;
use lacuna::migrate::Snapshot;
use lacuna::migrate::session::Destination;
use lacuna::migrate::transport::Listener;
use lacuna::{Builder, ErrorKind, Machine, PageCount, PlatformDevices, soft};
use lacuna_control::{
    AskError, Client, MoveRequest, PROTOCOL, SaveRequest, SetRequest, State, Status, WatchRequest,
};
use lacuna_skip::test;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than any machine needs: a test that takes so long has failed.
const LIMIT: Duration = Duration::from_secs(120);

/// The process of a VMM. It is killed when the value is dropped.
struct Vmm {
    child: Child,
    socket: PathBuf,
}

impl Vmm {
    fn start(folder: &Path) -> Self {
        if let Some(reason) = lacuna_guest::unavailable() {
            lacuna_skip::skip_test(reason);
        }
        let test = std::env::current_exe().expect("a test knows its own path");
        let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
        let socket = folder.join("control");
        let program = profile.join("examples/controlled");
        let mut command = Command::new(&program);
        let child = command.arg(&socket).stdout(Stdio::piped()).spawn();
        let advice = "`cargo test -p lacuna-control` builds the example, `--test` alone does not";
        let child =
            child.unwrap_or_else(|error| panic!("{}: {error}: {advice}", program.display()));
        Self { child, socket }
    }

    fn client(&mut self) -> Client {
        let deadline = Instant::now() + LIMIT;
        loop {
            match Client::connect(&self.socket) {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            assert_eq!(self.child.try_wait().unwrap(), None, "it has ended");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its output, after it has ended by itself.
    fn output(mut self) -> String {
        let mut text = String::new();
        let mut stdout = self.child.stdout.take().unwrap();
        std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
        assert!(self.child.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn state(status: Result<Status, AskError>) -> State {
    status.unwrap().state
}

/// The counted exits of all vCPUs.
fn exits(client: &mut Client) -> f64 {
    let counters = client.counters().unwrap();
    let exits = counters
        .iter()
        .filter(|(name, _)| name.starts_with("lacuna_vcpu_exits_total"));
    exits.map(|(_, value)| value.as_f64().unwrap()).sum()
}

#[test]
fn a_guest_of_another_vmm_is_paused_saved_watched_and_stopped() {
    let folder = TempDir::new().unwrap();
    let mut vmm = Vmm::start(folder.path());
    let mut client = vmm.client();
    let status = client.status().unwrap();
    assert_eq!((status.protocol, status.state), (PROTOCOL, State::Running));
    assert_eq!((&*status.backend, status.memory_bytes), ("soft", 16 << 20));

    assert_eq!(state(client.pause()), State::Paused);
    let before = exits(&mut client);
    let saved = folder.path().join("saved");
    let mut request = SaveRequest::to(&saved);
    let done = client.save(request.clone(), &mut |_| {}).unwrap();
    assert_eq!((&done.path, done.downtime_us), (&saved, 0));
    assert_eq!(Snapshot::open(&saved).unwrap().pages(), done.pages);
    // The snapshot of a paused guest leaves it paused.
    assert_eq!(state(vmm.client().status()), State::Paused);
    assert_eq!(exits(&mut client), before);

    assert_eq!(state(client.resume()), State::Running);
    request.path = "saved".into();
    let refused = client.save(request, &mut |_| {}).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Request);
    assert!(refused.to_string().contains("is relative"), "{refused}");
    let nowhere = MoveRequest {
        to: format!("unix:{}/none", folder.path().display()),
        ..MoveRequest::default()
    };
    let refused = client.migrate(nowhere, &mut |_| {}).unwrap_err();
    assert!(refused.to_string().contains("cannot connect"), "{refused}");

    let watch = WatchRequest {
        every_ms: Some(100),
        count: NonZeroU64::new(2),
        ..WatchRequest::default()
    };
    let periods: Result<Vec<_>, _> = vmm.client().watch(watch).unwrap().collect();
    assert_eq!(periods.unwrap().len(), 2);
    let deadline = Instant::now() + LIMIT;
    while exits(&mut client) <= before {
        assert!(Instant::now() < deadline, "the guest does not run");
    }

    assert_eq!(state(client.stop()), State::Ended);
    assert!(vmm.output().ends_with("the VMM stopped the run\n"));
}

/// The settings change while the guest runs, all or none of them.
#[test]
fn settings_change_and_are_refused() {
    let folder = TempDir::new().unwrap();
    let mut vmm = Vmm::start(folder.path());
    let mut client = vmm.client();
    let before = client.settings().unwrap();
    let change = SetRequest {
        async_faults: Some(false),
        huge_pages: Some(true),
        detect: Some(Detection::WriteProtect),
        resident_bytes: before.resident_bytes.value.map(|bytes| bytes / 2),
        source_delay_us: Some(100),
    };
    let changed = client.set(change.clone()).unwrap();
    assert_eq!(
        (changed.async_faults.value, changed.huge_pages.value),
        (change.async_faults, change.huge_pages)
    );
    assert_eq!(
        (changed.detect.value, changed.resident_bytes.value),
        (change.detect, change.resident_bytes)
    );
    assert_eq!(changed.source_delay_us.value, change.source_delay_us);
    let impossible = [
        ("resident_bytes: memory budget too small", 4096, 0),
        ("resident_bytes 4097: give a multiple", 4097, 0),
        ("resident_bytes: memory budget too large", 1 << 40, 0),
        ("source_delay_us: ", 16 << 20, 60_000_001),
    ];
    for (text, bytes, delay) in impossible {
        let request = SetRequest {
            async_faults: Some(true),
            resident_bytes: Some(bytes),
            source_delay_us: Some(delay),
            ..SetRequest::default()
        };
        let refused = client.set(request).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Request);
        assert!(refused.to_string().contains(text), "{refused}");
        assert_eq!(client.settings().unwrap(), changed, "{text}");
    }
    // While a client watches the writes by a detection of its choice, that stays.
    let watch = WatchRequest {
        every_ms: Some(100),
        detect: Some(Detection::Pml),
        ..WatchRequest::default()
    };
    let mut periods = vmm.client().watch(watch).unwrap();
    periods.next().unwrap().unwrap();
    let refused = client.set(change).unwrap_err().to_string();
    assert!(
        refused.contains("detect: a client that watches"),
        "{refused}"
    );
    drop(periods);
    let map = client.map(10).unwrap();
    let pages = |cell: &PageStates| cell.resident + cell.swapped + cell.missing + cell.untouched;
    let counted = map.cells.iter().map(pages).sum::<u64>() * 4096;
    assert_eq!(counted, client.status().unwrap().memory_bytes);
    assert!(map.cells.len() <= 10 && map.cells.iter().any(|cell| cell.resident > 0));
    assert!(client.map(0).is_err() && client.map(4097).is_err());
    assert_eq!(state(client.stop()), State::Ended);
}

/// This process is the destination.
#[test]
fn a_guest_moves_from_another_vmm() {
    let folder = TempDir::new().unwrap();
    let mut vmm = Vmm::start(folder.path());
    let at = format!("unix:{}/in", folder.path().display());
    let listener = Listener::open(&at.parse().unwrap(), None, Default::default()).unwrap();
    let destination = Destination::new(listener, |_| ());
    let take = || {
        let arrival = destination.wait().unwrap().unwrap();
        let memory = PageCount::from_bytes(arrival.machine().memory);
        let vm = soft::VmBuilder::new(memory, memory).build().unwrap();
        let machine = Machine::new(vm, PlatformDevices::new(|_: &str| ())).unwrap();
        let each = &mut || ControlFlow::Continue(());
        arrival.run(machine, each, |guest| guest.stop()).unwrap();
    };
    let request = MoveRequest {
        to: at.clone(),
        ..MoveRequest::default()
    };
    let migrated = thread::scope(|scope| {
        scope.spawn(take);
        vmm.client().migrate(request, &mut |_| {}).unwrap()
    });
    assert_eq!(migrated.to, at);
    let text = vmm.output();
    let outcome = text.lines().last().unwrap_or_default();
    assert!(outcome.starts_with(&format!("moved to {at}")), "{text}");
}

#[test]
fn a_path_without_a_json_form_is_refused_here() {
    use std::os::unix::ffi::OsStrExt as _;
    let folder = TempDir::new().unwrap();
    let mut vmm = Vmm::start(folder.path());
    let name = std::ffi::OsStr::from_bytes(b"/\xff");
    let refused = vmm.client().save(SaveRequest::to(name), &mut |_| {});
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("give another path"), "{refused}");
}
