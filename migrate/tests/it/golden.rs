//! Snapshots and streams as earlier releases wrote them: this one must read them.
//!
//! `golden/RELEASE/ARCH` has the bytes that a source sends in a pre-copy, a whole snapshot (format
//! 1), and of x86 a diff (format 3). Memory and streams are compressed. A release with another
//! number of a format gets a folder of its own. If it refuses the streams of the last one, they are
//! removed.
//!
//!     LACUNA_GOLDEN=$PWD/migrate/tests/golden/RELEASE cargo test -p lacuna-migrate golden
//!
//! No release writes format 2 any more. `sparse` was made of `diff` by docs/formats.md.

use crate::snapshots::common::{soft, start};
use crate::streams::puppet::Ready;
use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::{
    Arch, Builder, Ending, GuestMemory, Image, PlatformDevices, Running, Segment, Vm,
};
use lacuna_migrate::stream::{Connection, Connections, HangUp, Incoming, Plan, Sent, send};
use lacuna_migrate::{PausedGuest, Progress, Snapshot, Stop, Tracked, When};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{env, fs, thread};

/// Keeps 42 in a register, writes that it runs, and waits until the word at [`GO`] is set. Then it
/// ends with the sum of the register and the word at [`ADDEND`].
const X86_CODE: &[u8] = &[
    0x41, 0xbc, 42, 0, 0, 0, // mov r12d, 42
    0xbb, 0x00, 0x10, 0x01, 0x00, // mov ebx, 0x1_1000
    0xc7, 0x03, 1, 0, 0, 0, // mov dword [rbx], 1
    0x83, 0x7b, 4, 0, // again: cmp dword [rbx + GO], 0
    0x74, 0xfa, // je again
    0x8b, 0x43, 8, // mov eax, [rbx + ADDEND]
    0x44, 0x01, 0xe0, // add eax, r12d
    0x66, 0xba, 0xf4, 0x00, // mov dx, 0xf4: the port that ends the run
    0xef, // out dx, eax
    0xeb, 0xfe, // here: jmp here
];

/// As [`X86_CODE`].
const ARM64_CODE: [u32; 12] = [
    0xd2a8_0401, // movz x1, #0x4020, lsl #16
    0xf282_0001, // movk x1, #0x1000
    0x5280_0553, // mov w19, #42
    0x5280_0022, // mov w2, #1
    0xb900_0022, // str w2, [x1]
    0xb940_0423, // again: ldr w3, [x1, #GO]
    0x34ff_ffe3, // cbz w3, again
    0xb940_0820, // ldr w0, [x1, #ADDEND]
    0x0b13_0000, // add w0, w0, w19
    0xd2a1_21e1, // movz x1, #0x90f, lsl #16: the device that ends the run
    0xb900_0020, // str w0, [x1]
    0x1400_0000, // here: b here
];

/// From the beginning of the guest's data.
const GO: u64 = 4;
const ADDEND: u64 = 8;

/// The guest of each snapshot ends with this sum.
const SNAPSHOTS: [(&str, u32); 3] = [("whole", 142), ("sparse", 242), ("diff", 242)];
const MEMORY: &str = "memory.zst";
const STREAM: &str = "stream.zst";
const RELEASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// A guest of golden files.
#[derive(Clone, Copy)]
struct Golden {
    arch: Arch,
    name: &'static str,
    /// Where its code is. Its data is in the page after it.
    code: u64,
    memory: u64,
}

const X86: Golden = Golden {
    arch: Arch::X86_64,
    name: "x86",
    code: 0x1_0000,
    memory: 1 << 20,
};
const ARM64: Golden = Golden {
    arch: Arch::Arm64,
    name: "arm64",
    code: 0x4020_0000,
    memory: 3 << 20,
};

impl Golden {
    fn vm(self) -> Arc<lacuna_soft::Vm> {
        let memory = PageCount::from_bytes(self.memory);
        let builder = lacuna_soft::VmBuilder {
            memory,
            resident: memory,
            ..soft(self.arch, 1)
        };
        builder.build().expect("a VM")
    }

    fn devices(self) -> PlatformDevices {
        PlatformDevices::of(self.arch, |_: &str| {})
    }

    fn data(self, offset: u64) -> Gpa {
        Gpa::truncate(self.code + 0x1000 + offset)
    }

    /// Starts the guest, and returns when its program waits for the host.
    fn boot(self, code: &[u8]) -> Running<lacuna_soft::Vm> {
        let entry = Gpa::truncate(self.code);
        let code = Segment {
            gpa: entry,
            bytes: code,
            size: code.len() as u64,
        };
        let image = Image {
            arch: self.arch,
            segments: vec![code],
            entry,
        };
        let vm = self.vm();
        let vcpus = vm.boot(&image, "").expect("it boots");
        set(&vm, self.data(ADDEND), 100);
        let guest = start(vm, self.devices(), vcpus);
        let mut runs = [0];
        while runs == [0] {
            thread::yield_now();
            guest
                .vm()
                .read(self.data(0), &mut runs)
                .expect("its memory");
        }
        guest
    }

    fn end(self, guest: Running<lacuna_soft::Vm>) -> Ending {
        set(guest.vm(), self.data(GO), 1);
        guest.wait().ending
    }

    fn restore(self, folder: &Path) -> Ending {
        let snapshot = Snapshot::open(folder).expect("a snapshot");
        let (vm, devices) = (self.vm(), self.devices());
        let vcpus = snapshot.restore(&vm, &devices, &mut |_| ControlFlow::Continue(()));
        self.end(start(vm, devices, vcpus.expect("the state of a machine")))
    }

    fn write_snapshots(self, guest: &Running<lacuna_soft::Vm>, golden: &Path) {
        let folder = tempfile::tempdir().expect("a folder");
        let [whole, _, diff] = SNAPSHOTS.map(|(name, _)| folder.path().join(name));
        let each = &mut |_: Progress| ControlFlow::<Stop>::Continue(());
        let pause = || PausedGuest::pause(guest).expect("it runs");
        let first = Tracked::save_first(guest, When::Paused(&pause()), &*whole, each);
        let (_, mut tracked) = first.expect("a snapshot");
        if self.arch == Arch::X86_64 {
            set(guest.vm(), self.data(ADDEND), 200);
            let second = tracked.save_changes(guest, When::Paused(&pause()), &*diff, each);
            second.expect("a snapshot of the changes");
            set(guest.vm(), self.data(ADDEND), 100);
        }
        copy_snapshots(folder.path(), golden, |from, to| {
            let memory = fs::read(from.join("memory")).expect("a file");
            write_packed(&to.join(MEMORY), &memory);
        });
    }

    fn write_stream(self, guest: &Running<lacuna_soft::Vm>, golden: &Path) {
        let (there, here) = UnixStream::pair().expect("a pair");
        let recorder = Recorder(there, Arc::default());
        thread::scope(|scope| {
            let taking = scope.spawn(|| self.take(here));
            let sent = send(guest, &recorder, &Plan::default(), &mut |_| {
                ControlFlow::Continue(())
            });
            assert!(matches!(sent, Ok(Sent::Moved(_))));
            assert_eq!(taking.join().unwrap(), Ending::Exited(142));
        });
        write_packed(&golden.join(STREAM), &recorder.1.lock().unwrap());
    }

    fn replay(self, stream: &[u8]) -> Ending {
        let (mut source, here) = UnixStream::pair().expect("a pair");
        thread::scope(|scope| {
            let source = &mut source;
            scope.spawn(|| source.write_all(stream).expect("the other side reads"));
            self.take(here)
        })
    }

    fn take(self, from: UnixStream) -> Ending {
        let connections = Ready::new([from]);
        let incoming = Incoming::accept(&connections).expect("a migration");
        let (vm, devices) = (self.vm(), self.devices());
        let each = &mut |_| ControlFlow::Continue(());
        let prepared = incoming.receive(&connections, &vm, &devices, each);
        let started = prepared.expect("a guest").start();
        let arrived = started.unwrap_or_else(|waiting| panic!("{}", waiting.why()));
        let guest = start(vm, devices, arrived.vcpus);
        let mut arriving = arrived.arriving;
        let finish = arriving.finish(&mut |_| ControlFlow::Continue(()));
        finish.expect("all of its memory");
        self.end(guest)
    }
}

/// Copies the snapshots in a folder; `memory` does so for their memory.
fn copy_snapshots(from: &Path, to: &Path, memory: impl Fn(&Path, &Path)) {
    for (name, _) in SNAPSHOTS {
        let (from, to) = (from.join(name), to.join(name));
        if from.exists() {
            fs::create_dir_all(&to).expect("a folder");
            for file in ["snapshot.json", "pages", "checksums"] {
                fs::copy(from.join(file), to.join(file)).expect("a file");
            }
            memory(&from, &to);
        }
    }
}

fn set(vm: &lacuna_soft::Vm, word: Gpa, to: u32) {
    vm.write(word, &to.to_le_bytes()).expect("its memory");
}

fn unpacked(file: &Path) -> Vec<u8> {
    zstd::decode_all(&*fs::read(file).expect("a golden file")).expect("Zstandard")
}

fn write_packed(file: &Path, bytes: &[u8]) {
    let packed = zstd::encode_all(bytes, 19).expect("memory");
    fs::write(file, packed).expect("room");
}

/// A connection, and the bytes written to it.
struct Recorder(UnixStream, Arc<Mutex<Vec<u8>>>);

impl Read for Recorder {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Recorder {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let bytes = self.0.write(buf)?;
        self.1.lock().unwrap().extend(&buf[..bytes]);
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Connection for Recorder {
    fn hang_up(&self) -> io::Result<HangUp> {
        self.0.hang_up()
    }
}

impl Connections for Recorder {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let recorder = Self(self.0.try_clone()?, Arc::clone(&self.1));
        Ok(Box::new(recorder))
    }
}

/// Reads the files of one release.
fn read(release: &Path) {
    for guest in [X86, ARM64] {
        let golden = release.join(guest.name);
        let folder = tempfile::tempdir().expect("a folder");
        copy_snapshots(&golden, folder.path(), |from, to| {
            fs::write(to.join("memory"), unpacked(&from.join(MEMORY))).expect("room");
        });
        for (name, sum) in SNAPSHOTS {
            let path = folder.path().join(name);
            if path.exists() {
                assert_eq!(
                    guest.restore(&path),
                    Ending::Exited(sum),
                    "{golden:?} {name}"
                );
            }
        }
        if golden.join(STREAM).exists() {
            let stream = unpacked(&golden.join(STREAM));
            assert_eq!(guest.replay(&stream), Ending::Exited(142), "{golden:?}");
        }
    }
}

#[test]
fn golden_files_of_each_release_are_read() {
    for release in fs::read_dir(RELEASES).expect("golden files") {
        read(&release.expect("a folder").path());
    }
}

#[test]
fn golden_files_are_written_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let release = env::var_os("LACUNA_GOLDEN").map(PathBuf::from);
    let release = release.unwrap_or_else(|| folder.path().join("release"));
    fs::create_dir(&release).expect("a new folder");
    let arm64: Vec<u8> = ARM64_CODE
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    for (guest, code) in [(X86, X86_CODE), (ARM64, &arm64)] {
        let (running, golden) = (guest.boot(code), release.join(guest.name));
        guest.write_snapshots(&running, &golden);
        guest.write_stream(&running, &golden);
    }
    read(&release);
}
