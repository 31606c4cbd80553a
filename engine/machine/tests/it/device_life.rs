//! The life of a VMM's devices.

use crate::devices::Kicks;
use lacuna_addr::Gpa;
use lacuna_machine::{
    Access, Device, DeviceError, DeviceState, DevicesState, Ending, PlatformDevices, Width,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

const BASE: Gpa = Gpa::truncate(0xd000_0000);
const END: Gpa = Gpa::truncate(0xd000_0100);

/// A counter that writes its calls down, and panics in the one of this name.
#[derive(Default)]
struct Counter {
    count: AtomicU32,
    calls: Mutex<Vec<&'static str>>,
    bad: &'static str,
}

impl Counter {
    fn bad(bad: &'static str) -> Arc<Self> {
        Arc::new(Self {
            bad,
            ..Self::default()
        })
    }

    fn called(&self, name: &'static str) {
        assert_ne!(name, self.bad, "told to");
        self.calls.lock().unwrap().push(name);
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl Device for Counter {
    fn read(&self, _: Access) -> u64 {
        self.called("read");
        self.count.load(Ordering::Relaxed).into()
    }

    fn write(&self, _: Access, value: u64) -> Option<Ending> {
        self.called("write");
        self.count.fetch_add(value as u32, Ordering::Relaxed);
        None
    }

    fn pause(&self) {
        self.called("pause");
    }

    fn resume(&self) {
        self.called("resume");
    }

    fn version(&self) -> u32 {
        3
    }

    fn save(&self) -> Vec<u8> {
        self.called("save");
        self.count.load(Ordering::Relaxed).to_le_bytes().into()
    }

    fn accepts(&self, version: u32) -> bool {
        (2..=3).contains(&version)
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        self.called("restore");
        let bytes = state.bytes.as_slice().try_into();
        let bytes = bytes.map_err(|_| format!("{} bytes, not 4", state.bytes.len()))?;
        self.count
            .store(u32::from_le_bytes(bytes), Ordering::Relaxed);
        Ok(())
    }

    fn reset(&self) {
        self.called("reset");
        self.count.store(0, Ordering::Relaxed);
    }
}

/// A device without a state.
struct Plain;

impl Device for Plain {
    fn read(&self, _: Access) -> u64 {
        1
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

fn none() -> PlatformDevices {
    PlatformDevices::new(|_: &str| ())
}

fn with(device: Arc<dyn Device>) -> PlatformDevices {
    let devices = none();
    devices.add_mmio("it", BASE, 0x100, device).unwrap();
    devices
}

fn read(devices: &PlatformDevices) -> u64 {
    devices.mmio_read(BASE, Width::Long, 0, &Kicks::default())
}

fn write(devices: &PlatformDevices, value: u64) {
    devices.mmio_write(BASE, Width::Long, value, 0, &Kicks::default());
}

fn saved(devices: &PlatformDevices) -> DevicesState {
    devices.pause().unwrap().save().unwrap()
}

#[test]
fn each_device_has_a_name_of_its_own() {
    let devices = with(Arc::new(Plain));
    let long = "n".repeat(65);
    for name in ["it", "", "a b", "n\n", "\u{e4}", &long] {
        let refused = devices.add_ports(name, 0x600..=0x600, Arc::new(Plain));
        assert_eq!(refused, Err(DeviceError::Name(name.to_owned())));
    }
    let unknown = devices.remove("that").err();
    assert_eq!(unknown, Some(DeviceError::NoDevice("that".to_owned())));
    let added = devices.add_ports(&long[1..], 0x600..=0x600, Arc::new(Plain));
    added.unwrap();
    devices.remove("it").unwrap();
    devices
        .add_ports("it", 0x601..=0x601, Arc::new(Plain))
        .unwrap();
}

#[test]
fn a_device_is_paused_while_it_is_saved_and_until_it_runs_after_a_restore() {
    let (here, there) = (Arc::<Counter>::default(), Arc::<Counter>::default());
    let devices = with(here.clone());
    devices
        .add_ports("plain", 0x600..=0x600, Arc::new(Plain))
        .unwrap();
    write(&devices, 5);
    let state = saved(&devices);
    assert_eq!(here.calls(), ["write", "pause", "save", "resume"]);
    let versions = BTreeMap::from([("it".to_owned(), 3), ("plain".to_owned(), 0)]);
    assert_eq!(devices.versions(), Ok(versions.clone()));
    assert_eq!(state.versions(), versions);

    let devices = none();
    devices
        .add_ports("it", 0x600..=0x603, there.clone())
        .unwrap();
    devices.add_mmio("plain", BASE, 8, Arc::new(Plain)).unwrap();
    devices.restore(&state).unwrap();
    assert_eq!(there.calls(), ["pause", "restore"]);
    devices.resume();
    devices.resume();
    assert_eq!(there.calls(), ["resume"]);
    assert_eq!(devices.read(0x600, Width::Long, 0, &Kicks::default()), 5);
    devices.reset().unwrap();
    assert_eq!(devices.read(0x600, Width::Long, 0, &Kicks::default()), 0);
}

/// The guest has moved away, or its run is over: the devices must not touch anything any more.
#[test]
fn a_device_stays_paused_after_the_end() {
    let counter = Arc::<Counter>::default();
    let devices = with(counter.clone());
    let paused = devices.pause().unwrap();
    devices.end(Ending::Stopped, &Kicks::default());
    drop(paused);
    assert_eq!(counter.calls(), ["pause"]);
    devices.reset().unwrap();
    assert_eq!(devices.ending(), None);
}

#[test]
fn other_devices_than_the_saved_ones_are_refused_by_name() {
    let state = saved(&with(Arc::<Counter>::default()));
    let restored = |devices: &PlatformDevices, state: &DevicesState| {
        devices.restore(state).expect_err("other devices")
    };
    let missing = restored(&none(), &state);
    assert_eq!(missing, DeviceError::Missing("it".to_owned()));
    let extra = restored(&with(Arc::new(Plain)), &saved(&none()));
    assert_eq!(extra, DeviceError::Extra("it".to_owned()));
    let version = restored(&with(Arc::new(Plain)), &state);
    let name = "it".to_owned();
    assert_eq!(version, DeviceError::Version { name, version: 3 });

    let counter = Arc::<Counter>::default();
    let mut hostile = state.clone();
    hostile.devices.get_mut("it").unwrap().bytes.pop();
    let refused = restored(&with(counter.clone()), &hostile).to_string();
    let parts = ["\"it\"", "version 3", "3 bytes, not 4"];
    assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
    assert_eq!(counter.calls(), ["pause", "restore"], "it stays paused");
    hostile.devices.get_mut("it").unwrap().version = 2;
    let refused = restored(&with(counter.clone()), &hostile).to_string();
    assert!(refused.contains("version 2"), "{refused}");

    counter.calls();
    hostile.devices.get_mut("it").unwrap().bytes = vec![0; DevicesState::BYTES_MAX + 1];
    let long = restored(&with(counter.clone()), &hostile);
    let name = "it".to_owned();
    assert_eq!(long, DeviceError::TooLong { name });
    assert_eq!(counter.calls(), [""; 0]);
    let name = "n".repeat(1 << 20);
    let missing = none().check_versions(&BTreeMap::from([(name.clone(), 0)]));
    assert_eq!(missing, Err(DeviceError::Missing(name[..64].to_owned())));
}

/// A device with a very long state.
struct Long;

impl Device for Long {
    fn read(&self, _: Access) -> u64 {
        0
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }

    fn save(&self) -> Vec<u8> {
        vec![0; DevicesState::BYTES_MAX / 2 + 1]
    }
}

#[test]
fn all_devices_share_the_limit_of_their_states() {
    let devices = with(Arc::new(Long));
    saved(&devices);
    devices.add_mmio("too", END, 1, Arc::new(Long)).unwrap();
    let long = devices.pause().unwrap().save().unwrap_err();
    let name = "too".to_owned();
    assert_eq!(long, DeviceError::TooLong { name });
}

#[test]
fn a_panic_ends_the_run_and_names_the_device() {
    let state = saved(&with(Arc::<Counter>::default()));
    for bad in [
        "read", "write", "pause", "save", "resume", "restore", "reset",
    ] {
        let counter = Counter::bad(bad);
        let devices = with(counter.clone());
        let kicks = Kicks::default();
        match bad {
            "read" => {
                let value = devices.mmio_read(BASE, Width::Word, 0, &kicks);
                assert_eq!(value, 0xffff);
            }
            "write" => devices.mmio_write(BASE, Width::Word, 1, 0, &kicks),
            "restore" => assert!(devices.restore(&state).is_err()),
            "reset" => assert!(devices.reset().is_err()),
            _ => {
                let paused = devices.pause();
                let saved = paused.and_then(|paused| paused.save());
                assert_eq!(saved.is_ok(), bad == "resume");
            }
        }
        assert_eq!(kicks.count() > 0, ["read", "write"].contains(&bad));
        let Some(Ending::Device(DeviceError::Panicked { name, cause })) = devices.ending() else {
            panic!("{bad}: {:?}", devices.ending());
        };
        assert!(name == "it" && cause.contains("told to"), "{name}: {cause}");
        // No lock is poisoned, and the device is still there.
        devices.add_mmio("more", END, 1, Arc::new(Plain)).unwrap();
        devices.remove("it").unwrap();
    }
}

/// In an access, until the device is removed from the table.
struct Stays {
    devices: Arc<PlatformDevices>,
    entered: AtomicBool,
    left: AtomicBool,
}

impl Device for Stays {
    fn read(&self, _: Access) -> u64 {
        self.entered.store(true, Ordering::SeqCst);
        while self.devices.versions().unwrap().contains_key("it") {
            thread::yield_now();
        }
        self.left.store(true, Ordering::SeqCst);
        7
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

#[test]
fn a_removal_waits_for_accesses_that_have_begun() {
    let devices = Arc::new(none());
    let stays = Arc::new(Stays {
        devices: Arc::clone(&devices),
        entered: AtomicBool::new(false),
        left: AtomicBool::new(false),
    });
    devices.add_mmio("it", BASE, 0x100, stays.clone()).unwrap();
    thread::scope(|scope| {
        let access = scope.spawn(|| read(&devices));
        while !stays.entered.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        devices.remove("it").unwrap();
        assert!(stays.left.load(Ordering::SeqCst));
        assert_eq!(access.join().unwrap(), 7);
    });
    assert_eq!(read(&devices), u64::from(u32::MAX));
}

/// Removes the device of the other name when it is written.
struct Removes {
    devices: OnceLock<Arc<PlatformDevices>>,
    other: &'static str,
    /// How many are in their writes.
    inside: Arc<AtomicUsize>,
    together: usize,
}

impl Device for Removes {
    fn read(&self, _: Access) -> u64 {
        0
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        while self.inside.load(Ordering::SeqCst) < self.together {
            thread::yield_now();
        }
        self.devices.get().unwrap().remove(self.other).unwrap();
        None
    }
}

/// Without the rule about callers in a device's code, this waits for ever.
#[test]
fn devices_remove_themselves_and_each_other_from_their_writes() {
    let devices = Arc::new(none());
    let add = |name, start, other, inside: &Arc<_>, together| {
        let device = Arc::new(Removes {
            devices: OnceLock::from(Arc::clone(&devices)),
            other,
            inside: Arc::clone(inside),
            together,
        });
        devices.add_mmio(name, start, 8, device).unwrap();
    };
    add("it", BASE, "it", &Arc::default(), 1);
    write(&devices, 1);
    assert_eq!(devices.versions(), Ok(BTreeMap::new()));
    let inside = Arc::default();
    add("one", BASE, "two", &inside, 2);
    add("two", END, "one", &inside, 2);
    thread::scope(|scope| {
        scope.spawn(|| write(&devices, 1));
        devices.mmio_write(END, Width::Long, 1, 1, &Kicks::default());
    });
    assert_eq!(devices.versions(), Ok(BTreeMap::new()));
}

/// Notices an access after its removal.
#[derive(Default)]
struct Gone(AtomicBool);

impl Device for Gone {
    fn read(&self, _: Access) -> u64 {
        assert!(!self.0.load(Ordering::SeqCst), "it was removed");
        1
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

#[test]
fn devices_come_and_go_under_load() {
    let devices = none();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let value = read(&devices);
                    assert!(value == 1 || value == u64::from(u32::MAX));
                }
            });
        }
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                devices
                    .add_ports("other", 0x600..=0x600, Arc::new(Plain))
                    .unwrap();
                devices.remove("other").unwrap();
            }
        });
        for _ in 0..20_000 {
            let gone = Arc::<Gone>::default();
            devices.add_mmio("it", BASE, 4, gone.clone()).unwrap();
            devices.remove("it").unwrap();
            gone.0.store(true, Ordering::SeqCst);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(devices.ending(), None);
}

#[test]
fn states_are_read_from_json_with_and_without_devices() {
    let old = r#"{"status_page":null,"line":[],"serial":{"Com1":[0,0,0,0,0,0,0,0,0]}}"#;
    let mut state: DevicesState = serde_json::from_str(old).unwrap();
    assert_eq!(serde_json::to_string(&state).unwrap(), old);
    let device = DeviceState {
        version: 1,
        bytes: (0..=255).collect(),
    };
    state.devices.insert("it".to_owned(), device.clone());
    let json = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<DevicesState>(&json).unwrap(), state);
    for hostile in ["0", "0g", "0A", "\u{e4}", "[0]"] {
        let json = format!(r#"{{"version":1,"bytes":"{hostile}"}}"#);
        assert!(serde_json::from_str::<DeviceState>(&json).is_err());
    }
}
