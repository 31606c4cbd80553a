//! A VMM's devices in snapshots and migrations.

use crate::snapshots::common::{WithSource as _, kvm, kvm_tsc, soft, start};
use lacuna_addr::Gpa;
use lacuna_machine::{
    Access, Arch, Builder, Device, DeviceState, Ending, Image, Machine, PlatformDevices, RunEnd,
    Running, Segment, Vm,
};
use lacuna_migrate::session::{Destination, Outcome, Outgoing, Stayed};
use lacuna_migrate::stream::{self, Connection, Connections, Mode, Plan};
use lacuna_migrate::transport::{Address, Connector, Listener};
use lacuna_migrate::{Budget, MigrateError, Snapshot, Stop, save};
use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

const BASE: Gpa = Gpa::truncate(0xd000_0000);
const CODE_AT: Gpa = Gpa::truncate(1 << 20);
/// Where the device writes its count when it is paused.
const MARK: Gpa = Gpa::truncate(3 << 20);

/// Writes to the device for ever.
const CODE: &[u8] = &[
    0xbb, 0x00, 0x00, 0x00, 0xd0, // mov ebx, BASE
    0xc7, 0x03, 1, 0, 0, 0, // again: mov dword [rbx], 1
    0xeb, 0xf8, // jmp again
];

/// Counts writes, and ends the run at one of them.
struct Counter<V> {
    /// Its memory gets the count in a pause.
    vm: Weak<V>,
    version: u32,
    count: AtomicU64,
    until: AtomicU64,
    calls: Mutex<Vec<&'static str>>,
}

impl<V: Vm> Counter<V> {
    fn of(vm: &Arc<V>) -> Arc<Self> {
        Self::with_version(vm, 1)
    }

    fn with_version(vm: &Arc<V>, version: u32) -> Arc<Self> {
        Arc::new(Self {
            vm: Arc::downgrade(vm),
            version,
            count: AtomicU64::new(0),
            until: AtomicU64::new(u64::MAX),
            calls: Mutex::default(),
        })
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    fn called(&self, name: &'static str) {
        self.calls.lock().unwrap().push(name);
    }

    fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().unwrap().clone()
    }

    /// Waits until the guest has written again.
    fn wait_for_more(&self) {
        let before = self.count();
        while self.count() < before + 10 {
            thread::yield_now();
        }
    }
}

impl<V: Vm> Device for Counter<V> {
    fn read(&self, _: Access) -> u64 {
        0
    }

    fn write(&self, _: Access, value: u64) -> Option<Ending> {
        let count = self.count.fetch_add(value, Ordering::SeqCst) + value;
        (count >= self.until.load(Ordering::SeqCst)).then_some(Ending::Exited(0))
    }

    fn pause(&self) {
        self.called("pause");
        let vm = self.vm.upgrade().expect("a VM with its device");
        // A destination's memory has the source's count.
        if self.count() > 0 {
            vm.write(MARK, &self.count().to_le_bytes()).unwrap();
        }
    }

    fn resume(&self) {
        self.called("resume");
    }

    fn version(&self) -> u32 {
        self.version
    }

    fn save(&self) -> Vec<u8> {
        self.called("save");
        self.count().to_le_bytes().into()
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        self.called("restore");
        let bytes = state.bytes.as_slice().try_into();
        let count = u64::from_le_bytes(bytes.map_err(|_| "not 8 bytes")?);
        self.count.store(count, Ordering::SeqCst);
        self.until.store(count + 1000, Ordering::SeqCst);
        Ok(())
    }
}

fn none() -> PlatformDevices {
    PlatformDevices::of(Arch::X86_64, |_: &str| ())
}

fn with<V: Vm + 'static>(counter: &Arc<Counter<V>>) -> PlatformDevices {
    let devices = none();
    devices
        .add_mmio("counter", BASE, 4, counter.clone())
        .unwrap();
    devices
}

/// Runs `body` beside the guest and its counter, and ends the run.
fn beside<B: Builder>(builder: &B, body: impl FnOnce(&Running<B::Vm>, &Counter<B::Vm>))
where
    B::Vm: 'static,
{
    let image = Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: CODE_AT,
            bytes: CODE,
            size: CODE.len() as u64,
        }],
        entry: CODE_AT,
    };
    let vm = builder.build().unwrap();
    let counter = Counter::of(&vm);
    let vcpus = vm.boot(&image, "").unwrap();
    let guest = start(vm, with(&counter), vcpus);
    counter.wait_for_more();
    body(&guest, &counter);
}

/// The count in the memory of `vm`.
fn marked(vm: &impl Vm) -> u64 {
    let mut mark = [0; 8];
    vm.read(MARK, &mut mark).unwrap();
    u64::from_le_bytes(mark)
}

/// A guest that resumed with the state of its device has ended.
fn assert_ended<V: Vm>(counter: &Counter<V>, end: &RunEnd<V>) {
    assert_eq!(end.ending, Ending::Exited(0));
    assert_eq!(counter.calls(), ["pause", "restore", "resume"]);
    let marked = marked(&*end.vm);
    assert!(marked > 0 && counter.count() >= marked + 1000);
}

fn is_saved_and_restored<A: Builder, B: Builder>(from: &A, to: &B)
where
    A::Vm: 'static,
    B::Vm: 'static,
{
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot");
    beside(from, |guest, counter| {
        let budget = Budget::default();
        // The guest is paused, and its last pages are about to be saved.
        let cancelled = save(
            guest,
            &*path,
            &budget,
            &mut |_| match counter.calls().len() {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(Stop::Cancel),
            },
        );
        assert!(matches!(cancelled, Err(MigrateError::Cancelled)));
        assert_eq!(counter.calls(), ["pause", "save", "resume"]);
        counter.wait_for_more();
        save(guest, &*path, &budget, &mut |_| ControlFlow::Continue(())).unwrap();
        counter.wait_for_more();
        assert_eq!(counter.calls()[3..], ["pause", "save", "resume"]);
    });

    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(
        snapshot.devices(),
        BTreeMap::from([("counter".to_owned(), 1)])
    );
    let vm = to.build().unwrap();
    for (devices, why) in refused(&vm) {
        let restored = snapshot.restore(&vm, &devices, &mut |_| panic!("a page"));
        let error = restored.map(drop).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(marked(&*vm), 0);
    let counter = Counter::of(&vm);
    let devices = with(&counter);
    let vcpus = snapshot
        .restore(&vm, &devices, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(
        counter.calls(),
        ["pause", "restore"],
        "paused until it runs"
    );
    assert_eq!(marked(&*vm), counter.count(), "written in the pause");
    assert_ended(&counter, &start(vm, devices, vcpus).wait());
}

/// Devices that a destination refuses, and parts of the reasons.
fn refused<V: Vm + 'static>(vm: &Arc<V>) -> [(PlatformDevices, &'static str); 3] {
    let extra = with(&Counter::of(vm));
    extra
        .add_ports("more", 0x600..=0x600, Counter::of(vm))
        .unwrap();
    [
        (none(), "the device \"counter\""),
        (extra, "no device \"more\""),
        (
            with(&Counter::with_version(vm, 2)),
            "\"counter\" does not take over a state of version 1",
        ),
    ]
}

/// Refuses some guests before they send a page, and one whose devices have changed meanwhile. Takes
/// the last one.
fn arrive<B: Builder>(destination: &Destination, to: &B, source: &PlatformDevices)
where
    B::Vm: 'static,
{
    let vm = to.build().unwrap();
    for (devices, why) in refused(&vm) {
        let arrival = destination.wait().unwrap().expect("a guest");
        assert_eq!(
            *arrival.devices(),
            BTreeMap::from([("counter".to_owned(), 1)])
        );
        let received = arrival.receive(&vm, &devices, &mut || panic!("a page"));
        let error = received.map(drop).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    let arrival = destination.wait().unwrap().expect("a guest");
    let received = arrival.receive(&vm, &with(&Counter::of(&vm)), &mut || {
        let late = Counter::of(&vm);
        // The first page adds it.
        let _ = source.add_ports("late", 0x601..=0x601, late);
        ControlFlow::Continue(())
    });
    let error = received.map(drop).unwrap_err().to_string();
    assert!(error.contains("\"late\""), "{error}");
    source.remove("late").unwrap();
    drop(arrival);

    let arrival = destination.wait().unwrap().expect("a guest");
    let vm = to.build().unwrap();
    let counter = Counter::of(&vm);
    let devices = with(&counter);
    let machine = Machine::new(vm, devices).unwrap();
    let end = arrival
        .run(machine, &mut || ControlFlow::Continue(()), |_| ())
        .unwrap();
    assert_ended(&counter, &end);
}

/// Sends the guest until it has moved. Returns why it stayed before.
fn send<V: Vm>(guest: &Running<V>, counter: &Counter<V>, to: &Address) -> Vec<String> {
    let mut reasons = Vec::new();
    loop {
        let connector = Connector::new(to.clone(), None).unwrap();
        match Outgoing::new(connector, Plan::default()).send(guest, &|_| ()) {
            Outcome::Moved(moved) => {
                drop(moved);
                return reasons;
            }
            Outcome::Stayed(Stayed::Failed(why)) => reasons.push(why.to_string()),
            _ => panic!("{reasons:?}"),
        }
        counter.wait_for_more();
    }
}

fn moves<A: Builder, B: Builder + Sync>(from: &A, to: &B)
where
    A::Vm: 'static,
    B::Vm: 'static,
{
    let any = "tcp:127.0.0.1:0".parse().unwrap();
    let listener = Listener::open(&any, None, Arc::default()).unwrap();
    let destination = Destination::new(listener, |_| ());
    beside(from, |guest, counter| {
        let (address, devices) = (destination.address().clone(), guest.devices());
        let reasons = thread::scope(|scope| {
            // A panic there drops the destination, so the source does not wait for it.
            scope.spawn(move || arrive(&destination, to, devices));
            send(guest, counter, &address)
        });
        let names = ["\"counter\"", "\"more\"", "\"counter\"", "\"late\""];
        assert_eq!(reasons.len(), names.len(), "{reasons:?}");
        let named = reasons
            .iter()
            .zip(names)
            .all(|(why, name)| why.contains(name));
        assert!(named, "{reasons:?}");
        // No first message has paused it. The moved guest's device stays paused.
        let calls = ["pause", "save", "resume", "pause", "save"];
        assert_eq!(counter.calls(), calls);
        assert_eq!(devices.ending(), Some(Ending::Stopped));
    });
}

/// A source's connections. The last one of a move before the memory cannot be made.
struct AllButLast(Connector, AtomicUsize);

impl Connections for AllButLast {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        match self.1.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => self.0.open(),
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }
}

/// The downtime of a guest does not contain the set-up of its connections.
#[test]
fn a_guest_runs_until_its_connections_are_made() {
    let any = "tcp:127.0.0.1:0".parse().unwrap();
    let builder = soft(Arch::X86_64, 1);
    beside(&builder, |guest, counter| {
        for mode in [Mode::PostCopy, Mode::Hybrid] {
            let listener = Listener::open(&any, None, Arc::default()).unwrap();
            let destination = Destination::new(listener, |_| ());
            // No remaining page fits into it, so a hybrid needs them all.
            let plan = Plan {
                budget: Budget {
                    downtime: Duration::ZERO,
                    rounds: 1,
                },
                ..mode.into()
            };
            thread::scope(|scope| {
                let arriving = scope.spawn(|| {
                    let arrival = destination.wait().unwrap().expect("a guest");
                    let source = arrival.page_source();
                    let vm = builder.with_source(source.unwrap()).build().unwrap();
                    let devices = with(&Counter::of(&vm));
                    let each = &mut || ControlFlow::Continue(());
                    arrival.receive(&vm, &devices, each).map(drop).unwrap_err()
                });
                let connector = Connector::new(destination.address().clone(), None).unwrap();
                let connections = AllButLast(connector, AtomicUsize::new(0));
                let each = &mut |_| ControlFlow::Continue(());
                let sent = stream::send(guest, &connections, &plan, each).map(drop);
                assert!(matches!(sent, Err(MigrateError::Cut(_))), "{sent:?}");
                destination.end_wait();
                arriving.join().unwrap();
            });
            assert_eq!(counter.calls(), [""; 0], "{mode:?}: never paused");
        }
    });
}

#[test]
fn a_device_is_saved_and_restored_on_soft() {
    is_saved_and_restored(&soft(Arch::X86_64, 1), &soft(Arch::X86_64, 1));
}

#[lacuna_skip::test]
fn a_device_is_saved_and_restored_on_kvm() {
    is_saved_and_restored(&kvm(1), &kvm(1));
}

#[lacuna_skip::test]
fn a_device_is_saved_on_one_backend_and_restored_on_the_other() {
    let (mut on_soft, on_kvm) = (soft(Arch::X86_64, 1), kvm(1));
    on_soft.cpu = kvm_tsc();
    is_saved_and_restored(&on_soft, &on_kvm);
    is_saved_and_restored(&on_kvm, &on_soft);
}

#[test]
fn a_device_moves_on_soft() {
    moves(&soft(Arch::X86_64, 1), &soft(Arch::X86_64, 1));
}

#[lacuna_skip::test]
fn a_device_moves_to_another_backend_and_between_kvm_vms() {
    let (mut on_soft, on_kvm) = (soft(Arch::X86_64, 1), kvm(1));
    on_soft.cpu = kvm_tsc();
    moves(&on_soft, &on_kvm);
    moves(&on_kvm, &on_soft);
    moves(&on_kvm, &on_kvm);
}
