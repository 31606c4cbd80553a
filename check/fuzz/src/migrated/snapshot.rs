//! Damaged and forged snapshots: opened, restored, and restored lazily.
//!
//! A guest is saved once for each architecture: whole, and then the changes twice. A seed copies
//! the three folders, and changes some files of one. Mostly it corrects the checksums, so that the
//! readers behind them are reached.

use super::resting::{Resting, TestHost, architectures, memory_of};
use super::{Growth, forged, json, note_error};
use crate::run::Run;
use crate::values::pick;
use fastrand::Rng;
use lacuna_addr::PageCount;
use lacuna_machine::{Arch, GuestMemory as _, MemorySlots as _, PlatformDevices, Policy};
use lacuna_migrate::{MachineConfig, MigrateError, PausedGuest, Snapshot, Tracked, When};
use lacuna_soft::{Vm, VmConfig};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

/// Snapshots for each seed.
const CASES: usize = 12;
/// The largest VM that a test makes at a snapshot's request.
const LARGEST: u64 = 8 << 20;
/// The snapshots: each is the base of the next one.
const NAMES: [&str; 3] = ["whole", "diff", "last"];
const FILES: [&str; 4] = ["snapshot.json", "pages", "memory", "checksums"];

/// Runs one seed.
pub fn run(run: &mut Run<'_>) {
    let mut rng = Rng::with_seed(run.seed);
    let archs = architectures();
    let arch = archs[rng.usize(..archs.len())];
    let saved = Saved::of(arch);
    let place = TestHost::new();
    let growth = Growth::watch();
    for _ in 0..CASES {
        let folder = TempDir::new().expect("a folder");
        saved.copy_to(folder.path());
        let is_whole = rng.u8(..24) == 0;
        if !is_whole {
            damage(folder.path(), &mut rng);
        }
        let expected = is_whole.then_some(&*saved.memory);
        let name = if is_whole {
            "last"
        } else {
            pick(&mut rng, &["last", "last", "diff", "whole"])
        };
        let path = folder.path().join(name);
        run.pulse.doing(&format!("a snapshot is restored, {arch}"));
        run.tally.operations += 1;
        let case = Case {
            path: &path,
            place: &place,
            expected,
        };
        case.restore(&mut rng, run);
        growth.check("a snapshot is restored");
    }
    place.host.verify();
}

/// Three snapshots of one guest.
struct Saved {
    folder: TempDir,
    /// The guest's memory at the last one.
    memory: Vec<u8>,
}

impl Saved {
    fn of(arch: Arch) -> &'static Self {
        static ALL: [OnceLock<Saved>; 2] = [const { OnceLock::new() }; 2];
        ALL[usize::from(arch == Arch::Arm64)].get_or_init(|| Self::save(arch))
    }

    fn save(arch: Arch) -> Self {
        let folder = TempDir::new().expect("a folder");
        let [whole, diff, last] = NAMES.map(|name| folder.path().join(name));
        let mut guest = Resting::new(arch);
        let last_pages = guest.vm.memory_slots()[0].gfns;
        guest.beside(|guest| {
            let progress = &mut |_| ControlFlow::Continue(());
            let paused = PausedGuest::pause(guest).expect("it runs");
            let first = Tracked::save_first(guest, When::Paused(&paused), &whole, progress);
            let (_, mut tracked) = first.expect("a snapshot");
            for (path, byte) in [(&diff, 1), (&last, 2)] {
                for page in [0, 3, 4] {
                    let gfn = last_pages.end_raw() - 1 - page * u64::from(byte);
                    let gfn = lacuna_addr::Gfn::new(gfn).expect("inside of the slot");
                    guest
                        .vm()
                        .write(gfn.gpa(), &[byte; 64])
                        .expect("guest memory");
                }
                let saved = tracked.save_changes(guest, When::Paused(&paused), path, progress);
                assert!(saved.expect("a snapshot").pages > 0);
            }
        });
        Self {
            memory: guest.memory(),
            folder,
        }
    }

    /// Links the files, so that a copy costs nothing. A change copies its file first.
    fn copy_to(&self, folder: &Path) {
        for name in NAMES {
            fs::create_dir(folder.join(name)).expect("a new folder");
            for file in FILES {
                let from = self.folder.path().join(name).join(file);
                fs::hard_link(from, folder.join(name).join(file)).expect("one file system");
            }
        }
    }
}

/// Changes one of the snapshots in `folder`.
fn damage(folder: &Path, rng: &mut Rng) {
    let name = pick(rng, &["last", "last", "diff", "whole"]);
    let one = folder.join(name);
    for _ in 0..rng.usize(1..4) {
        match rng.u8(..16) {
            0..6 => change_document(&one, rng),
            6..8 => change_base(&one, rng),
            8..10 => change_pages(&one, rng),
            10..12 => change_memory(&one, rng),
            12 => change_bytes(&one.join(pick(rng, &FILES)), rng),
            13 => resize(&one.join(pick(rng, &FILES)), rng),
            _ => replace(&one.join(pick(rng, &FILES)), rng),
        }
    }
    if rng.u8(..8) != 0 {
        seal(folder, name);
    }
    if rng.u8(..24) == 0 {
        form_a_loop(folder, rng);
    }
}

/// Makes this case's own copy of a file, and returns its bytes; nothing if it is no longer a
/// regular file.
fn own(file: &Path) -> Option<Vec<u8>> {
    let found = fs::symlink_metadata(file).ok()?;
    if !found.is_file() || found.len() > 64 << 20 {
        return None;
    }
    let bytes = fs::read(file).ok()?;
    put(file, &bytes);
    Some(bytes)
}

/// Makes the file anew, because it may be a link to another case's file.
fn put(file: &Path, bytes: &[u8]) {
    let _ = fs::remove_file(file);
    // A folder may be in its place.
    let _ = fs::write(file, bytes);
}

fn change_document(one: &Path, rng: &mut Rng) {
    edit(one, |document| {
        for _ in 0..rng.usize(1..4) {
            json::mutate(document, rng);
        }
    });
}

/// Changes `snapshot.json`, if it is still an object.
fn edit(one: &Path, change: impl FnOnce(&mut Value)) {
    let file = one.join("snapshot.json");
    let Some(bytes) = own(&file) else { return };
    let document = serde_json::from_slice(&bytes).ok();
    if let Some(mut document) = document.filter(Value::is_object) {
        change(&mut document);
        put(&file, &serde_json::to_vec(&document).expect("a document"));
    }
}

/// Names another base, mostly an impossible one.
fn change_base(one: &Path, rng: &mut Rng) {
    const HOSTILE: [&str; 14] = [
        "",
        ".",
        "..",
        "../whole",
        "/",
        "/etc/passwd",
        "whole/",
        "whole/.",
        "./whole",
        "who\0le",
        "diff/../whole",
        "last",
        "nothing",
        "\u{1b}[2J",
    ];
    let name = match rng.u8(..6) {
        0 => "x".repeat(rng.usize(1..70_000)),
        _ => pick(rng, &HOSTILE).to_owned(),
    };
    edit(one, |document| {
        let checksums = document["base"]["checksums"].as_u64().unwrap_or(1);
        if let Value::Object(fields) = document {
            fields.insert("format".into(), json!(2));
            fields.insert("base".into(), json!({"name": name, "checksums": checksums}));
        }
    });
}

fn change_pages(one: &Path, rng: &mut Rng) {
    let file = one.join("pages");
    let Some(mut bytes) = own(&file) else { return };
    let entries = bytes.len() / 4;
    for _ in 0..rng.usize(1..20) {
        if entries == 0 {
            break;
        }
        let at = 4 * rng.usize(..entries);
        let entry = pick(rng, &[0, 1, 2, u32::MAX, rng.clone().u32(..)]);
        bytes[at..at + 4].copy_from_slice(&entry.to_le_bytes());
    }
    put(&file, &bytes);
}

/// Changes pages, with correct entries afterwards or not.
fn change_memory(one: &Path, rng: &mut Rng) {
    let (Some(mut entries), Some(mut memory)) = (own(&one.join("pages")), own(&one.join("memory")))
    else {
        return;
    };
    let fits = rng.bool();
    let pages = memory.len() / 4096;
    for _ in 0..rng.usize(1..8) {
        let page = rng.usize(..pages.max(1));
        let at = page * 4096 + rng.usize(..4096);
        let Some(byte) = memory.get_mut(at) else {
            break;
        };
        *byte = rng.u8(..);
        let end = memory.len().min((page + 1) * 4096);
        let crc = crc32fast::hash(&memory[page * 4096..end]).max(2);
        if let (true, Some(entry)) = (fits, entries.get_mut(4 * page..4 * page + 4)) {
            entry.copy_from_slice(&crc.to_le_bytes());
        }
    }
    put(&one.join("pages"), &entries);
    put(&one.join("memory"), &memory);
}

fn change_bytes(file: &Path, rng: &mut Rng) {
    let Some(mut bytes) = own(file) else { return };
    for _ in 0..rng.usize(1..4) {
        if let 1.. = bytes.len() {
            let at = rng.usize(..bytes.len());
            match rng.u8(..4) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, rng.u8(..)),
                _ => bytes[at] ^= 1 << rng.u32(..8),
            }
        }
    }
    put(file, &bytes);
}

/// Gives a file another size, as a sparse file.
fn resize(file: &Path, rng: &mut Rng) {
    if own(file).is_none() {
        return;
    }
    let size = pick(
        rng,
        &[0, 1, 4095, 4 << 10, 1 << 20, 8 << 20, 1 << 34, 1 << 42],
    );
    let opened = File::options().write(true).open(file);
    // A file system may refuse such a size.
    let _ = opened.and_then(|file| file.set_len(size));
}

/// Puts something else in place of a file.
fn replace(file: &Path, rng: &mut Rng) {
    let _ = fs::remove_file(file);
    let other = pick(rng, &FILES);
    let done = match rng.u8(..8) {
        0 => Ok(()),
        1 => fs::create_dir(file),
        2 => mknodat(CWD, file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).map_err(Into::into),
        3 => symlink("/dev/zero", file),
        4 => symlink(file, file),
        5 => symlink("/proc/self/mem", file),
        6 => symlink(other, file),
        _ => fs::write(file, rng.u64(..).to_le_bytes()),
    };
    // The attack fails if the name is in use.
    let _ = done;
}

/// Corrects the checksums of `name` and of the snapshots above it.
fn seal(folder: &Path, name: &str) {
    let first = NAMES
        .iter()
        .position(|other| *other == name)
        .expect("one of them");
    for (index, name) in NAMES.iter().enumerate().skip(first) {
        let one = folder.join(name);
        if index > first {
            let below = own(&folder.join(NAMES[index - 1]).join("checksums"));
            let sum = crc32fast::hash(&below.unwrap_or_default());
            edit(&one, |document| {
                if let Value::Object(base) = &mut document["base"] {
                    base.insert("checksums".into(), json!(sum));
                }
            });
        }
        put(&one.join("checksums"), checksums(&one).as_bytes());
    }
}

/// The correct `checksums` of a folder.
fn checksums(one: &Path) -> String {
    let line = |file: &str| {
        let bytes = own(&one.join(file)).unwrap_or_default();
        format!("{:08x}  {file}\n", crc32fast::hash(&bytes))
    };
    line("snapshot.json") + &line("pages")
}

/// Puts each snapshot below the other one, or below itself, with correct checksums.
fn form_a_loop(folder: &Path, rng: &mut Rng) {
    let (first, second) = pick(rng, &[("last", "last"), ("last", "diff")]);
    let sums = [rng.u32(..), rng.u32(..)];
    for (name, base, own_sum, sum) in [
        (first, second, sums[0], sums[1]),
        (second, first, sums[1], sums[0]),
    ] {
        let sum = if first == second { own_sum } else { sum };
        let one = folder.join(name);
        edit(&one, |document| {
            document["format"] = json!(2);
            document["base"] = json!({"name": base, "checksums": sum});
        });
        let text = forged::with_crc(&checksums(&one), own_sum);
        put(&one.join("checksums"), text.as_bytes());
        if first == second {
            break;
        }
    }
}

/// One snapshot.
struct Case<'a> {
    path: &'a Path,
    place: &'a TestHost,
    /// The memory that the snapshot must have, if it is whole.
    expected: Option<&'a [u8]>,
}

impl Case<'_> {
    fn restore(&self, rng: &mut Rng, run: &mut Run<'_>) {
        let done = Snapshot::open(self.path).and_then(|snapshot| {
            run.tally.note("snapshots", "opened");
            match rng.bool() {
                true => self.eagerly(&snapshot),
                false => self.lazily(&snapshot),
            }
        });
        match done {
            Ok(what) => run.tally.note("snapshots", what),
            Err(error) => {
                assert!(self.expected.is_none(), "a whole snapshot: {error}");
                self.judge(&error);
                note_error("snapshots refused", &error, run);
            }
        }
    }

    /// An error about a file names it.
    fn judge(&self, error: &MigrateError) {
        let text = error.to_string();
        let is_of_a_file = matches!(
            error,
            MigrateError::Io { .. }
                | MigrateError::Damaged { .. }
                | MigrateError::Version { .. }
                | MigrateError::NoRoom { .. }
                | MigrateError::Layout(_)
        );
        let folder = self.path.parent().expect("a temporary folder");
        let is_named = text.contains(&*folder.to_string_lossy());
        assert!(!is_of_a_file || is_named, "it names no file: {text}");
    }

    fn eagerly(&self, snapshot: &Snapshot) -> Result<&'static str, MigrateError> {
        let Some(vm) = self.vm(snapshot.machine(), |config| {
            Vm::new(Arc::clone(&self.place.host), self.place.time(), config).ok()
        }) else {
            return Ok("for a VM that cannot be made");
        };
        let devices = PlatformDevices::of(snapshot.machine().arch, |_: &str| ());
        let mut vcpus = snapshot.restore(&vm, &devices, &mut |_| ControlFlow::Continue(()))?;
        if let Some(expected) = self.expected {
            assert!(memory_of(&vm) == expected, "memory differs");
        }
        self.place.run(&vm, &mut vcpus, &devices, 20);
        vm.mmu().verify();
        Ok("restored")
    }

    fn lazily(&self, snapshot: &Snapshot) -> Result<&'static str, MigrateError> {
        let pages = Arc::new(snapshot.pages_on_demand(Policy::default())?);
        let Some(vm) = self.vm(snapshot.machine(), |config| {
            let (host, time) = (Arc::clone(&self.place.host), self.place.time());
            Vm::with_source(host, time, config, pages).ok()
        }) else {
            return Ok("for a VM that cannot be made");
        };
        let devices = PlatformDevices::of(snapshot.machine().arch, |_: &str| ());
        let mut vcpus = snapshot.restore_lazily(&vm, &devices)?;
        if self.expected.is_none() {
            self.place.run(&vm, &mut vcpus, &devices, 20);
        }
        let prefetched = snapshot.prefetch(&*vm, &mut |_| ControlFlow::Continue(()));
        vm.mmu().verify();
        prefetched?;
        if let Some(expected) = self.expected {
            assert!(memory_of(&vm) == expected, "memory differs");
        }
        Ok("restored lazily")
    }

    /// A VM for `machine`, if it is a small one.
    fn vm(
        &self,
        machine: &MachineConfig,
        make: impl FnOnce(VmConfig) -> Option<Arc<Vm>>,
    ) -> Option<Arc<Vm>> {
        let pages = machine.layout.pages().saturating_mul(4096);
        if machine.memory.max(pages) > LARGEST || machine.vcpus > 8 {
            return None;
        }
        make(VmConfig {
            arch: machine.arch,
            memory: PageCount::from_bytes(machine.memory),
            vcpus: machine.vcpus,
            apf: machine.apf,
            cpu: machine.cpu,
            ..VmConfig::default()
        })
    }
}
