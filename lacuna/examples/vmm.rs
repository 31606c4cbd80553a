//! A whole VMM for both backends: virtio devices, memory shared with a second process, dirty
//! logging, snapshots with a lazy restore, and migration over TLS, also to the other backend.
//!
//!     cargo run --release --features tls --example vmm soft|kvm [NAME=VALUE]...
//!
//!     disk=FILE         a virtio disk
//!     restore=FOLDER    resume a snapshot; its pages are read when the guest needs them
//!     listen=ADDRESS    run the guest that another process sends here
//!     tls=FOLDER        ca.pem, cert.pem and key.pem, for addresses tls:HOST:PORT
//!
//! It prints the number of dirty pages each second, and takes commands on stdin. Each other line is
//! input of the guest's virtio console.
//!
//!     !save FOLDER      save a snapshot; the guest keeps running
//!     !send ADDRESS     move the guest to the process that listens there
//!     !quit             end the guest
//!
//! The guest reads from its memory how many pages to write, writes them, and counts its rounds. The
//! second process has the memory file as its stdin: it writes that number, and reads the count.

use lacuna::boot::Segment;
use lacuna::memory::{LinuxBacking, SharedFill, SharedMemory};
use lacuna::migrate::session::{Destination, Outcome, Outgoing};
use lacuna::migrate::stream::Mode;
use lacuna::migrate::transport::{Connector, Listener, TlsFiles};
use lacuna::migrate::{Budget, Snapshot, save};
use lacuna::source::{PageSource, Policy};
use lacuna::virtio::{Block, Console, Mmio};
use lacuna::{
    Arch, Builder, CpuModel, Gpa, Image, LogReader, Machine, PageCount, PlatformDevices, Running,
    Vm, kvm, soft,
};
use std::io::{stdin, stdout};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::{fs::FileExt, process::parent_id};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use std::{collections::BTreeMap, error::Error, fs::File, sync::Arc, thread};

type Done<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str =
    "usage: vmm soft|kvm [disk=FILE] [restore=FOLDER | listen=ADDRESS] [tls=FOLDER]";
const SECOND: Duration = Duration::from_secs(1);
const MEMORY: PageCount = PageCount::from_bytes(64 << 20);

// A guest has no memory between 3 and 4 GiB, so devices fit there.
const DISK: Gpa = Gpa::truncate(0xd000_0000);
const CONSOLE: Gpa = Gpa::truncate(0xd000_1000);

/// Offset 0: pages to write in a round, by the second process. Offset 8: rounds done, by the guest.
/// The guest's writes put the page into the log. A page that only the second process writes is in
/// no log (`lacuna::memory::SharedFile`); here it writes the number again each second.
const SHARED: Gpa = Gpa::truncate(2 << 20);

/// 64-bit code, entered at its first byte.
const CODE: &[u8] = &[
    0xbb, 0x00, 0x00, 0x20, 0x00, // mov ebx, SHARED
    0x8b, 0x0b, // round: mov ecx, [rbx]
    0xbf, 0x00, 0x10, 0x20, 0x00, // mov edi, SHARED + 4096
    0x85, 0xc9, // test ecx, ecx
    0x74, 0xf5, // jz round
    0xff, 0x07, // page: inc dword [rdi]
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
    0xff, 0xc9, // dec ecx
    0x75, 0xf4, // jnz page
    0xff, 0x43, 0x08, // inc dword [rbx + 8]
    0xeb, 0xe6, // jmp round
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match start(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: &[String]) -> Done {
    let (backend, rest) = arguments.split_first().ok_or(USAGE)?;
    let pairs = rest.iter().map(|text| text.split_once('='));
    let pairs = pairs.map(|pair| pair.map(|(name, value)| (name.into(), value.into())));
    let options = pairs.collect::<Option<_>>().ok_or(USAGE)?;
    match &**backend {
        "soft" => monitor(options, &|cpu, source, backing| soft::VmBuilder {
            cpu,
            source,
            backing,
            ..soft::VmBuilder::new(MEMORY, MEMORY)
        }),
        "kvm" => match kvm::available() {
            Ok(()) => monitor(options, &|cpu, source, backing| kvm::VmBuilder {
                cpu,
                source,
                backing,
                ..kvm::VmBuilder::new(MEMORY, MEMORY)
            }),
            Err(reason) => Err(format!("skipped: {reason}").into()),
        },
        "second" => second_process(),
        other => Err(format!("there is no backend `{other}`\n{USAGE}").into()),
    }
}

/// The second process. Its stdin is the file with the guest's memory.
fn second_process() -> Done {
    let memory = File::from(stdin().as_fd().try_clone_to_owned()?);
    let (vmm, mut pages) = (parent_id(), 100);
    while parent_id() == vmm {
        memory.write_all_at(&u32::to_le_bytes(pages), SHARED.get())?;
        thread::sleep(SECOND);
        let mut rounds = [0; 4];
        memory.read_exact_at(&mut rounds, SHARED.get() + 8)?;
        println!("second process: {} rounds", u32::from_le_bytes(rounds));
        pages = pages % 1000 + 100;
    }
    Ok(())
}

/// The second process of a guest. It ends when this value is dropped.
struct Second(Child);

impl Second {
    fn start<V: Vm>(vm: &V) -> Done<Self> {
        // The page may be missing until now. A write of another process must not come before it.
        vm.read(SHARED, &mut [0])?;
        let memory = vm.shared_file().ok_or("its memory is in a file")?.file;
        let mut program = Command::new(std::env::current_exe()?);
        program
            .arg("second")
            .stdin(Stdio::from(memory.try_clone_to_owned()?));
        Ok(Self(program.spawn()?))
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes the builder of a backend: processor, page source, memory.
type Make<'a, B> = &'a dyn Fn(CpuModel, Option<Arc<dyn PageSource>>, Option<LinuxBacking>) -> B;

/// A machine, and the console for its input.
type Made<V> = (Machine<V>, Arc<Mmio<Console>>);

/// A VMM whose guest has not started.
struct Vmm {
    options: BTreeMap<String, String>,
    /// From stdin.
    lines: Receiver<String>,
}

fn monitor<B: Builder>(options: BTreeMap<String, String>, builder: Make<'_, B>) -> Done {
    let (to, lines) = channel();
    thread::spawn(move || {
        stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| to.send(line))
    });
    let vmm = Vmm { options, lines };
    match (vmm.options.get("listen"), vmm.options.get("restore")) {
        (Some(address), _) => vmm.listen(address, builder),
        (None, Some(folder)) => vmm.restore(Path::new(folder), builder),
        (None, None) => vmm.boot(builder),
    }
}

impl Vmm {
    fn boot<B: Builder>(&self, builder: Make<'_, B>) -> Done {
        // Both backends have this processor, with a frequency of the TSC that KVM has.
        let cpu = CpuModel::Common {
            tsc_khz: kvm::tsc_khz(),
        };
        let (machine, console) = self.machine(cpu, None, builder)?;
        let start = Gpa::truncate(1 << 20);
        let image = Image {
            arch: Arch::X86_64,
            segments: vec![Segment {
                gpa: start,
                bytes: CODE,
                size: CODE.len() as u64,
            }],
            entry: start,
        };
        let vcpus = machine.vm().boot(&image, "")?;
        let guest = machine.start(vcpus);
        self.watch(&guest, &console)?;
        println!("{}", guest.wait().ending);
        Ok(())
    }

    fn restore<B: Builder>(&self, folder: &Path, builder: Make<'_, B>) -> Done {
        let snapshot = Snapshot::open(folder)?;
        let pages = Arc::new(snapshot.pages_on_demand(Policy::default())?);
        let (machine, console) = self.machine(snapshot.machine().cpu, Some(pages), builder)?;
        let vcpus = snapshot.restore_lazily(machine.vm(), machine.devices())?;
        let guest = machine.start(vcpus);
        thread::scope(|scope| {
            // Without this, the guest needs the snapshot until it has touched every page.
            scope.spawn(|| {
                let each = &mut |_| match guest.devices().ending() {
                    None => ControlFlow::Continue(()),
                    Some(_) => ControlFlow::Break(()),
                };
                if let Err(error) = snapshot.prefetch(&**guest.vm(), each) {
                    eprintln!("vmm: {error}");
                }
            });
            self.watch(&guest, &console)
        })?;
        println!("{}", guest.wait().ending);
        Ok(())
    }

    fn listen<B: Builder>(&self, address: &str, builder: Make<'_, B>) -> Done {
        let listener = Listener::open(&address.parse()?, self.tls().as_ref(), Arc::default())?;
        let destination = Destination::new(listener, |event| eprintln!("{event}"));
        println!("listens at {}", destination.address());
        let arrival = destination.wait()?.ok_or("nothing ends the wait")?;
        let cpu = arrival.machine().cpu;
        let (machine, console) = self.machine(cpu, arrival.page_source(), builder)?;
        let mut watched = Ok(());
        let end = arrival.run(machine, &mut || ControlFlow::Continue(()), |guest| {
            watched = self.watch(guest, &console);
            if watched.is_err() {
                guest.stop();
            }
        })?;
        println!("{}", end.ending);
        watched
    }

    /// Makes a machine whose guest is booted, restored or received next.
    fn machine<B: Builder>(
        &self,
        cpu: CpuModel,
        source: Option<Arc<dyn PageSource>>,
        builder: Make<'_, B>,
    ) -> Done<Made<B::Vm>> {
        let memory = SharedMemory::new(MEMORY, SharedFill::CopiedIn)?;
        let vm = builder(cpu, source, Some(LinuxBacking::Shared(memory))).build()?;
        let console = Mmio::new(&vm, vm.interrupts().line(6)?, Console::new(stdout()))?;
        let console = Arc::new(console);
        let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
        if let Some(path) = self.options.get("disk") {
            let disk = File::options().read(true).write(true).open(path)?;
            let disk = Mmio::new(&vm, vm.interrupts().line(5)?, Block::new(disk)?)?;
            devices.add_mmio("disk", DISK, Mmio::<Block>::BYTES, Arc::new(disk))?;
        }
        devices.add_mmio("console", CONSOLE, Mmio::<Console>::BYTES, console.clone())?;
        Ok((Machine::new(vm, devices)?, console))
    }

    fn tls(&self) -> Option<TlsFiles> {
        let folder = Path::new(self.options.get("tls")?);
        Some(TlsFiles {
            ca: folder.join("ca.pem"),
            cert: folder.join("cert.pem"),
            key: folder.join("key.pem"),
        })
    }

    /// Prints the dirty pages each second, and obeys stdin, until the guest has ended here.
    fn watch<V: Vm>(&self, guest: &Running<V>, console: &Mmio<Console>) -> Done {
        let _second = Second::start(&**guest.vm())?;
        let mut log = LogReader::begin(&**guest.vm())?;
        let mut next = Instant::now() + SECOND;
        while guest.devices().ending().is_none() {
            let wait = next.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(wait) {
                Ok(line) => {
                    if let Err(error) = self.obey(&line, guest, console) {
                        eprintln!("vmm: {error}");
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    println!("{} dirty pages", log.harvest(|_, _| ())?);
                    next += SECOND;
                }
                Err(RecvTimeoutError::Disconnected) => guest.stop(),
            }
        }
        Ok(())
    }

    fn obey<V: Vm>(&self, line: &str, guest: &Running<V>, console: &Mmio<Console>) -> Done {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("!quit", _) => guest.stop(),
            ("!save", folder) => {
                let saved = save(guest, Path::new(folder), &Budget::default(), &mut |_| {
                    ControlFlow::Continue(())
                })?;
                println!("saved; the guest was paused for {:?}", saved.downtime);
            }
            ("!send", address) => {
                let connector = Connector::new(address.parse()?, self.tls().as_ref())?;
                let outgoing = Outgoing::new(connector, Mode::Hybrid.into());
                match outgoing.send(guest, &|_| ()) {
                    Outcome::Moved(moved) => println!("{}", moved.report.outcome()),
                    Outcome::Stayed(why) => return Err(why.into()),
                    _ => return Err("the guest has ended, or it is undecided where it runs".into()),
                }
            }
            _ => {
                let text = format!("{line}\n");
                if console.input(text.as_bytes()) < text.len() {
                    return Err("the guest does not read its console: input is lost".into());
                }
            }
        }
        Ok(())
    }
}
