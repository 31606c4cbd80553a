//! A guest with a busy disk and a balloon moves again and again, by each mode. At its end the
//! disk's file has the last acknowledged write of each block.
//!
//! ```sh
//! LACUNA_DISK_MOVES=1000 cargo test -p lacuna-migrate --test it busy_disk -- --nocapture
//! ```
//! Each guest moves 1000 times. Another seed gives another order of modes and pauses:
//! `LACUNA_DISK_SEED=n`.

use crate::snapshots::common::{kvm, kvm_tsc, soft, start, wait_for_program};
use crate::streams::ends::Machines;
use crate::streams::link::link;
use fastrand::Rng;
use lacuna_addr::{Gpa, PAGE_SIZE, PageCount};
use lacuna_guest::status::{SETTING_AT, Status};
use lacuna_machine::{
    Access, Arch, Device, DeviceState, Ending, Image, PlatformDevices, Running, Vm,
};
use lacuna_migrate::stream::{Arrived, Incoming, Mode, Sent, send};
use lacuna_virtio::{Answer, Balloon, Block, Chain, Fault, Guest, Mmio, VirtioDevice};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Moves of each guest without the variable.
const FEW: u64 = 6;
/// The most requests between two moves.
const REQUESTS: u64 = 300;
const BLOCKS: u64 = 16;
/// A guest whose request is lost never ends.
const HANG: Duration = Duration::from_secs(300);
/// The disk's and the balloon's addresses and lines. The lines are pins of an I/O APIC and INTIDs
/// of a GIC less 32.
const DEVICES: [(u64, u32); 2] = [(0xd000_0000, 20), (0xd000_1000, 21)];

/// Every 64th write takes `LATENCY`. A pause then often meets a write in progress. If the source
/// finished that write after the pause, it would overwrite a newer block of the destination.
const SLOW: u64 = 64;
const LATENCY: Duration = Duration::from_millis(100);
/// The first moves, one by each mode. Before each, a write begins that lasts until the pause.
const HELD: u64 = 3;

/// Writes that are in progress at a pause. All disks of one guest share it.
#[derive(Default)]
struct Pauses {
    /// The next write lasts until a pause begins.
    wanted: AtomicBool,
    /// Such a write has begun.
    is_held: AtomicBool,
    /// Pauses that met a write in progress.
    met: AtomicU64,
}

impl Pauses {
    /// Waits until the guest has a write in progress, which the next pause meets.
    fn hold_a_write(&self) {
        self.is_held.store(false, Ordering::SeqCst);
        self.wanted.store(true, Ordering::SeqCst);
        let began = Instant::now();
        while !self.is_held.load(Ordering::SeqCst) {
            assert!(began.elapsed() < HANG, "the guest writes nothing");
            thread::yield_now();
        }
    }
}

/// A disk with a latency.
struct Slow {
    block: Block,
    writes: AtomicU64,
    is_writing: AtomicBool,
    pauses: Arc<Pauses>,
}

impl Slow {
    /// The latency of the write that has begun.
    fn wait(&self) {
        let nth = self.writes.fetch_add(1, Ordering::Relaxed);
        let held = self.pauses.wanted.load(Ordering::SeqCst);
        if held {
            self.pauses.is_held.store(true, Ordering::SeqCst);
            while self.pauses.wanted.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        if held || nth % SLOW == SLOW - 1 {
            thread::sleep(LATENCY);
        }
    }
}

impl VirtioDevice for Slow {
    fn id(&self) -> u32 {
        self.block.id()
    }

    fn queues(&self) -> usize {
        self.block.queues()
    }

    fn features(&self) -> u64 {
        self.block.features()
    }

    fn config(&self) -> Vec<u8> {
        self.block.config()
    }

    fn handle(&self, queue: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        // The device writes nothing but the status.
        let is_write = chain.writable.bytes() == 1;
        self.is_writing.store(is_write, Ordering::SeqCst);
        if is_write {
            self.wait();
        }
        let answer = self.block.handle(queue, chain, guest);
        self.is_writing.store(false, Ordering::SeqCst);
        answer
    }

    fn paused(&self) {
        assert!(
            !self.is_writing.load(Ordering::SeqCst),
            "a write is in progress"
        );
        self.block.paused();
    }
}

/// The disk with its registers: notes which pauses meet a write in progress.
struct Disk(Mmio<Slow>);

impl Device for Disk {
    fn read(&self, access: Access) -> u64 {
        self.0.read(access)
    }

    fn write(&self, access: Access, value: u64) -> Option<Ending> {
        self.0.write(access, value)
    }

    fn pause(&self) {
        let slow = self.0.device();
        if slow.is_writing.load(Ordering::SeqCst) {
            slow.pauses.met.fetch_add(1, Ordering::Relaxed);
            slow.pauses.wanted.store(false, Ordering::SeqCst);
        }
        self.0.pause();
    }

    fn resume(&self) {
        self.0.resume();
    }

    fn version(&self) -> u32 {
        self.0.version()
    }

    fn save(&self) -> Vec<u8> {
        self.0.save()
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        self.0.restore(state)
    }

    fn reset(&self) {
        self.0.reset();
    }
}

fn from_env(name: &str, otherwise: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// What all VMs of one guest share: architecture, disk file, pauses, console lines.
struct Around {
    arch: Arch,
    file: File,
    pauses: Arc<Pauses>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Around {
    fn new(arch: Arch) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BLOCKS * PAGE_SIZE as u64).unwrap();
        Self {
            arch,
            file,
            pauses: Arc::default(),
            lines: Arc::default(),
        }
    }

    fn line(&self, number: u32) -> u32 {
        number + if self.arch == Arch::Arm64 { 32 } else { 0 }
    }

    fn command_line(&self) -> String {
        let [disk, balloon] = DEVICES
            .map(|(at, line)| Mmio::<Slow>::kernel_parameter(Gpa::truncate(at), self.line(line)));
        // A host of kind kvm_pvm needs the UD2.
        format!("syscall=ud2 requests=0 balloon=1 {disk} {balloon}")
    }

    /// The devices of a VM, with the same file.
    fn devices<V: Vm>(&self, vm: &Arc<V>) -> PlatformDevices {
        let lines = Arc::clone(&self.lines);
        let devices = PlatformDevices::of(self.arch, move |line: &str| {
            lines.lock().unwrap().push(line.to_owned());
        });
        let [disk, balloon] = DEVICES.map(|(at, line)| {
            let line = vm.interrupts().line(self.line(line)).unwrap();
            (Gpa::truncate(at), line)
        });
        let slow = Slow {
            block: Block::new(self.file.try_clone().unwrap()).unwrap(),
            writes: AtomicU64::new(0),
            is_writing: AtomicBool::new(false),
            pauses: Arc::clone(&self.pauses),
        };
        let block = Arc::new(Disk(Mmio::new(vm, disk.1, slow).unwrap()));
        let bytes = Mmio::<Slow>::BYTES;
        devices.add_mmio("disk0", disk.0, bytes, block).unwrap();
        let new = Arc::new(Mmio::new(vm, balloon.1, Balloon::new()).unwrap());
        devices.add_mmio("balloon", balloon.0, bytes, new).unwrap();
        devices
    }

    /// The requests that the guest has made since its boot.
    fn requests(guest: &Running<impl Vm>) -> u64 {
        let at = guest.devices().status_page().expect("it was announced");
        let mut page = [0; PAGE_SIZE];
        guest.vm().read(at.gpa(), &mut page).unwrap();
        let status = Status::parse(&page).unwrap();
        status.threads.iter().map(|thread| thread.counter).sum()
    }

    /// Waits until the guest has made `more` requests and is ready for its move number `made`.
    fn work(&self, guest: &Running<impl Vm>, made: u64, more: u64) {
        let (began, until) = (Instant::now(), Self::requests(guest) + more);
        while Self::requests(guest) < until {
            let ending = guest.devices().ending();
            assert_eq!(ending, None, "{:?}", self.lines.lock().unwrap());
            assert!(began.elapsed() < HANG, "no request comes to its end");
            thread::yield_now();
        }
        if made < HELD {
            self.pauses.hold_a_write();
        }
    }

    fn boot<B: Machines>(&self, builder: &B) -> Running<B::Vm> {
        let vm = builder.build().unwrap();
        let image = match self.arch {
            Arch::Arm64 => lacuna_guest::Arch::Arm64,
            _ => lacuna_guest::Arch::X86_64,
        };
        let image = Image::parse(image.image("diskbusy").unwrap().file).unwrap();
        let line = format!("{} {}", builder.full_command_line(), self.command_line());
        let vcpus = vm.boot(&image, &line).unwrap();
        let guest = start(Arc::clone(&vm), self.devices(&vm), vcpus);
        wait_for_program(&guest);
        guest
    }

    /// The guest in a VM of another builder, with all of its memory.
    fn moved<V: Vm, B: Machines>(&self, guest: &Running<V>, to: &B, mode: Mode) -> Running<B::Vm> {
        let (there, here) = link(&[], None);
        let all = &mut |_| ControlFlow::Continue(());
        thread::scope(|scope| {
            let arriving = scope.spawn(move || {
                let incoming = Incoming::accept(&here).unwrap();
                let vm = to.with_source(incoming.page_source()).build().unwrap();
                let devices = self.devices(&vm);
                let each = &mut |_| ControlFlow::Continue(());
                let prepared = incoming.receive(&here, &vm, &devices, each).unwrap();
                let Ok(Arrived {
                    vcpus,
                    mut arriving,
                }) = prepared.start()
                else {
                    panic!("{mode:?}: it has not arrived");
                };
                let guest = start(vm, devices, vcpus);
                arriving.finish(&mut |_| ControlFlow::Continue(())).unwrap();
                guest
            });
            match send(guest, &there, &mode.into(), all).unwrap() {
                Sent::Moved(outgoing) => drop(outgoing),
                Sent::Cut { why, .. } | Sent::Unknown { why, .. } => panic!("{mode:?}: {why}"),
            }
            arriving.join().unwrap()
        })
    }

    /// The guest ends, and every block of the file has the write that the guest's memory has.
    fn end(&self, guest: Running<impl Vm>) {
        let status = guest.devices().status_page().expect("it was announced");
        let setting = status.gpa().checked_add(SETTING_AT as u64).unwrap();
        guest.vm().write(setting, &1u32.to_le_bytes()).unwrap();
        assert!(guest.wait_timeout(HANG), "a request has no end");
        let end = guest.wait();
        let lines = self.lines.lock().unwrap().join("\n");
        assert_eq!(end.ending, Ending::Exited(0), "{lines}");
        let (_, writes) = lines.rsplit_once(" writes=").expect("a result");
        let writes = writes.split_whitespace().next().expect("an address");
        let writes = Gpa::truncate(u64::from_str_radix(writes, 16).unwrap());
        let mut last = [0; PAGE_SIZE];
        end.vm.read(writes, &mut last).unwrap();
        let (last, _) = last.as_chunks::<8>();
        for (block, last) in (0..BLOCKS).zip(last) {
            let mut found = [0; PAGE_SIZE];
            let at = block * PAGE_SIZE as u64;
            self.file.read_exact_at(&mut found, at).unwrap();
            let expected = content(block, u64::from_le_bytes(*last));
            assert!(found == expected[..], "block {block}: {last:?}");
        }
        println!("{lines}");
    }
}

/// A block after its write `write`, as `diskbusy.c` and `pattern.h` make it.
fn content(block: u64, write: u64) -> Vec<u8> {
    fn mix(v: u64) -> u64 {
        let v = (v ^ v >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let v = (v ^ v >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        v ^ v >> 31
    }
    let key = mix(mix(1).wrapping_add(block));
    let key = key.wrapping_add(write.wrapping_mul(0xd134_2543_de82_ef95));
    let word = |n: u64| match (write, n) {
        (0, _) => 0,
        (_, 0) => write,
        (_, 1) => block,
        _ => mix(key.wrapping_add(n)),
    };
    let words = (0..PAGE_SIZE as u64 / 8).map(word);
    words.flat_map(u64::to_le_bytes).collect()
}

/// The guest moves from `first` to `second`, and back, until it has moved often enough.
fn moves<A: Machines, B: Machines>(arch: Arch, first: &A, second: &B) {
    let (moves, seed) = (
        from_env("LACUNA_DISK_MOVES", FEW),
        from_env("LACUNA_DISK_SEED", 1),
    );
    let (mut rng, mut modes) = (Rng::with_seed(seed), BTreeMap::new());
    let mut next = |made| {
        let mode = match made {
            0..3 => made as usize,
            _ => rng.usize(..3),
        };
        let mode = [Mode::PreCopy, Mode::PostCopy, Mode::Hybrid][mode];
        *modes.entry(format!("{mode:?}")).or_insert(0) += 1;
        (mode, rng.u64(1..REQUESTS))
    };
    let around = Around::new(arch);
    let mut guest = around.boot(first);
    for made in (0..moves).step_by(2) {
        let (mode, work) = next(made);
        around.work(&guest, made, work);
        let there = around.moved(&guest, second, mode);
        drop(guest);
        let (mode, work) = next(made + 1);
        around.work(&there, made + 1, work);
        guest = around.moved(&there, first, mode);
    }
    around.end(guest);
    let met = around.pauses.met.load(Ordering::Relaxed);
    println!("seed {seed}: {modes:?}, {met} pauses met a write in progress");
    assert!(met >= HELD.min(moves), "{met}");
}

/// With room for the guest's kernel.
fn larger(builder: lacuna_soft::VmBuilder) -> lacuna_soft::VmBuilder {
    let memory = PageCount::from_bytes(16 << 20);
    lacuna_soft::VmBuilder {
        memory,
        resident: PageCount::new(memory.get() / 2),
        ..builder
    }
}

fn larger_kvm() -> lacuna_kvm::VmBuilder {
    let memory = PageCount::from_bytes(16 << 20);
    lacuna_kvm::VmBuilder {
        memory,
        resident: memory,
        ..kvm(2)
    }
}

#[test]
fn a_busy_disk_moves_on_soft() {
    for arch in [Arch::X86_64, Arch::Arm64] {
        let builder = larger(soft(arch, 2));
        moves(arch, &builder, &builder);
    }
}

#[lacuna_skip::test]
fn a_busy_disk_moves_on_kvm() {
    let builder = larger_kvm();
    moves(Arch::X86_64, &builder, &builder);
}

#[lacuna_skip::test]
fn a_busy_disk_moves_to_the_other_backend_and_back() {
    let kvm = larger_kvm();
    let soft = lacuna_soft::VmBuilder {
        cpu: kvm_tsc(),
        ..larger(soft(Arch::X86_64, 2))
    };
    moves(Arch::X86_64, &soft, &kvm);
}
