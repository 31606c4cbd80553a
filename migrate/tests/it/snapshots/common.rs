//! A guest, saved while it runs and resumed elsewhere.

use lacuna_addr::PageCount;
use lacuna_machine::{
    Arch, Backup, Builder, CpuModel, Delivery, Ending, Image, Machine, PageSource, PlatformDevices,
    Policy, RingSize, Running, Vm,
};
use lacuna_migrate::{
    Budget, MigrateError, PausedGuest, Progress, Recorder, Saved, Snapshot, Stop, Touches, Tracked,
    When, save, save_paused,
};
use lacuna_soft::{LinuxBacking, PrivateFile};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Words in front of a guest's own (the first `rounds` counts): first none, and then words for a
/// longer run.
const LONGER: [&str; 3] = ["", "rounds=90", "rounds=900"];
/// Small, because each test runs several guests to their ends.
pub const MEMORY: u64 = 6 << 20;

/// A VM of the soft backend with a third of its memory resident.
pub fn soft(arch: Arch, vcpus: usize) -> lacuna_soft::VmBuilder {
    let pages = PageCount::from_bytes;
    lacuna_soft::VmBuilder {
        arch,
        vcpus,
        cpu: CpuModel::Common { tsc_khz: None },
        apf: lacuna_machine::Apf::Off,
        ..lacuna_soft::VmBuilder::new(pages(MEMORY), pages(MEMORY / 3))
    }
}

/// A VM of the kvm backend. Ends the test as skipped where there is none.
pub fn kvm(vcpus: usize) -> lacuna_kvm::VmBuilder {
    if let Err(error) = lacuna_kvm::available() {
        lacuna_skip::skip_test(error);
    }
    let pages = PageCount::from_bytes;
    let mut builder = lacuna_kvm::VmBuilder::new(pages(MEMORY), pages(MEMORY));
    builder.vcpus = vcpus;
    builder.cpu = CpuModel::Common { tsc_khz: None };
    builder.apf = lacuna_machine::Apf::Off;
    builder
}

/// VMs of the soft backend with the smallest rings as log.
pub struct WithRings(pub lacuna_soft::VmBuilder);

impl Builder for WithRings {
    type Vm = lacuna_soft::Vm;

    fn build(&self) -> Result<Arc<Self::Vm>, <Self::Vm as Vm>::Error> {
        let vm = self.0.build()?;
        let set = vm.set_delivery(rings(RingSize::BYTES_MIN));
        set.expect("it has no vCPU yet");
        Ok(vm)
    }

    fn full_command_line(&self) -> String {
        self.0.full_command_line()
    }
}

/// Only rings of this many bytes.
pub fn rings(bytes: usize) -> Delivery {
    Delivery::Ring {
        size: RingSize::from_bytes(bytes).expect("a size"),
        backup: Backup::None,
    }
}

/// The frequency of the TSC on this host's KVM, which a guest on soft must have to move there.
pub fn kvm_tsc() -> CpuModel {
    let tsc_khz = lacuna_kvm::tsc_khz();
    CpuModel::Common { tsc_khz }
}

/// The image of a built-in guest.
fn guest(name: &str, arch: Arch) -> Vec<u8> {
    if let Some(why) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(why);
    }
    let arch = match arch {
        Arch::Arm64 => lacuna_guest::Arch::Arm64,
        _ => lacuna_guest::Arch::X86_64,
    };
    let mut images = arch.images().iter();
    let image = images.find(|image| image.name == name);
    image
        .unwrap_or_else(|| panic!("no guest {name}"))
        .file
        .to_vec()
}

/// A builder whose VMs get their pages from a source, or have memory of the VMM's own.
pub trait WithSource: Builder + Clone {
    fn with_source(&self, source: Arc<dyn PageSource>) -> Self;
    fn with_backing(&self, backing: LinuxBacking) -> Self;
}

impl WithSource for lacuna_soft::VmBuilder {
    fn with_source(&self, source: Arc<dyn PageSource>) -> Self {
        let source = Some(source);
        Self {
            source,
            ..self.clone()
        }
    }

    fn with_backing(&self, backing: LinuxBacking) -> Self {
        Self {
            backing: Some(backing),
            ..self.clone()
        }
    }
}

impl WithSource for lacuna_kvm::VmBuilder {
    fn with_source(&self, source: Arc<dyn PageSource>) -> Self {
        let source = Some(source);
        Self {
            source,
            ..self.clone()
        }
    }

    fn with_backing(&self, backing: LinuxBacking) -> Self {
        Self {
            backing: Some(backing),
            ..self.clone()
        }
    }
}

/// The work beside a running guest with late pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beside<'a> {
    /// The guest alone asks for pages.
    Nothing,
    /// The other pages are prefetched.
    Prefetch,
    /// It is saved again.
    Save(&'a Path),
}

/// Runs a guest on threads.
pub fn start<V: Vm>(
    vm: Arc<V>,
    devices: impl Into<Arc<PlatformDevices>>,
    vcpus: Vec<V::Vcpu>,
) -> Running<V> {
    Machine::new(vm, devices).expect("threads").start(vcpus)
}

/// Waits until the guest has announced its status page: its program runs.
pub fn wait_for_program(guest: &Running<impl Vm>) {
    while guest.devices().status_page().is_none() && !guest.wait_timeout(Duration::ZERO) {
        thread::yield_now();
    }
}

/// A guest, and VMs for it.
pub struct Moved<B> {
    builder: B,
    name: &'static str,
    words: &'static str,
}

impl<B: Builder> Moved<B> {
    pub fn new(builder: B, name: &'static str, words: &'static str) -> Self {
        Self {
            builder,
            name,
            words,
        }
    }

    /// Runs the guest, and calls `body` beside it. On a busy machine the guest may end before
    /// `body` has saved it: then this tries a guest that checks its memory more often.
    pub fn run<R>(
        &self,
        body: impl Fn(&Running<B::Vm>) -> Result<R, MigrateError>,
    ) -> (Ending, Result<R, MigrateError>) {
        for longer in LONGER {
            let (ending, result) = self.run_with(longer, &body);
            if !matches!(result, Err(MigrateError::NotRunning)) {
                return (ending, result);
            }
        }
        panic!("it always ends before it could be saved");
    }

    /// Runs the guest with these words in front of its own, and calls `body` beside it.
    fn run_with<R>(&self, words: &str, body: impl FnOnce(&Running<B::Vm>) -> R) -> (Ending, R) {
        let vm = self.builder.build().expect("a VM");
        let arch = vm.config().arch;
        let file = guest(self.name, arch);
        let image = Image::parse(&file).expect("an image");
        let line = format!(
            "{} {words} {}",
            self.builder.full_command_line(),
            self.words
        );
        let vcpus = vm.boot(&image, &line).expect("it boots");
        let devices = PlatformDevices::of(arch, |line: &str| println!("saved: {line}"));
        let running = start(vm, devices, vcpus);
        wait_for_program(&running);
        let result = body(&running);
        (running.wait().ending, result)
    }

    pub fn save_while_it_runs(&self, path: &Path) -> (Ending, Result<Saved, MigrateError>) {
        self.run(|guest| {
            save(guest, path, &Budget::default(), &mut |_| {
                ControlFlow::Continue(())
            })
        })
    }

    /// Saves the guest while it is paused, and cancels another save of the running guest.
    pub fn save_paused(&self, path: &Path, cancelled: &Path) -> (Ending, Saved) {
        let (ending, saved) = self.run(|guest| {
            // Of a guest that has ended too early.
            let _ = fs::remove_dir_all(path);
            let paused = PausedGuest::pause(guest)?;
            let saved = save_paused(guest, &paused, path, &mut |_| ControlFlow::Continue(()));
            drop(paused);
            let stop = &mut |_| ControlFlow::Break(Stop::Cancel);
            match save(guest, cancelled, &Budget::default(), stop) {
                Err(MigrateError::Cancelled) => saved,
                Err(other) => Err(other),
                Ok(_) => panic!("it was cancelled"),
            }
        });
        (ending, saved.expect("a snapshot"))
    }

    /// Saves the guest whole, and then the changes twice. One save between them is cancelled.
    pub fn save_diffs(&self, [first, second, third]: &[PathBuf; 3], cancelled: &Path) -> Ending {
        let (ending, saved) = self.run(|guest| {
            for path in [first, second] {
                // Of a guest that has ended too early.
                let _ = fs::remove_dir_all(path);
            }
            let (budget, progress) = (&Budget::default(), &mut |_: Progress| {
                ControlFlow::Continue(())
            });
            let (_, mut tracked) = Tracked::save_first(guest, When::Runs(budget), first, progress)?;
            let stop = &mut |_: Progress| ControlFlow::Break(Stop::Cancel);
            match tracked.save_changes(guest, When::Runs(budget), cancelled, stop) {
                Err(MigrateError::Cancelled) => {}
                other => panic!("{:?}", other?),
            }
            let paused = PausedGuest::pause(guest)?;
            let saved = tracked.save_changes(guest, When::Paused(&paused), second, progress)?;
            assert_eq!(saved.rounds.len(), 1);
            drop(paused);
            let saved = tracked.save_changes(guest, When::Runs(budget), third, progress)?;
            assert!(!saved.rounds.is_empty());
            assert_eq!(tracked.last(), third);
            Ok(())
        });
        saved.expect("three snapshots");
        ending
    }

    pub fn save_after_the_end(&self, path: &Path) -> Result<Saved, MigrateError> {
        let (_, result) = self.run_with("", |guest| {
            while !guest.wait_timeout(Duration::MAX) {
                thread::yield_now();
            }
            save(guest, path, &Budget::default(), &mut |_| {
                ControlFlow::Continue(())
            })
        });
        result
    }

    pub fn restore(&self, path: &Path) -> Result<Ending, MigrateError> {
        let vm = self.builder.build().expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus =
            Snapshot::open(path)?.restore(&vm, &devices, &mut |_| ControlFlow::Continue(()))?;
        Ok(start(vm, devices, vcpus).wait().ending)
    }
}

impl<B: Builder> Moved<B> {
    /// A lazy restore into a VM without a page source.
    pub fn restore_state_alone(&self, path: &Path) -> Result<(), MigrateError> {
        let vm = self.builder.build().expect("a VM");
        let devices = PlatformDevices::of(vm.config().arch, |_: &str| {});
        let restored = Snapshot::open(path)?.restore_lazily(&vm, &devices);
        restored.map(drop)
    }
}

/// The requests of a restored guest.
pub struct Replayed {
    pub ending: Ending,
    /// The requested pages.
    pub asked: Touches,
    /// Pages provided before it ran.
    pub replayed: u64,
}

impl<B: WithSource> Moved<B> {
    /// Restores into a VM that maps the memory file.
    pub fn restore_in_place(&self, path: &Path) -> Result<Ending, MigrateError> {
        let snapshot = Snapshot::open(path)?;
        let file = snapshot.memory_file().expect("a file that can be mapped");
        let private = PrivateFile::of_file(file, 0).expect("a file");
        let builder = self.builder.with_backing(LinuxBacking::Private(private));
        let vm = builder.build().expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus = snapshot.restore_in_place(&vm, &devices, &mut |_| ControlFlow::Continue(()))?;
        Ok(start(vm, devices, vcpus).wait().ending)
    }

    /// Restores lazily and saves again at once: the guest starts with the save, so all of its pages
    /// are missing then. Returns how the guest has ended, and the number of pages requested from
    /// the source.
    pub fn save_while_all_is_missing(&self, path: &Path, again: &Path) -> (Ending, usize) {
        let snapshot = Snapshot::open(path).expect("a snapshot");
        let recorder = snapshot.recorder();
        let pages = snapshot.pages_on_demand(Policy::default()).expect("pages");
        let source = Arc::new(pages.recorded(&recorder));
        let vm = self.builder.with_source(source).build().expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus = snapshot.restore_lazily(&vm, &devices).expect("a restore");
        let guest = start(vm, devices, vcpus);
        let saved = save(&guest, again, &Budget::default(), &mut |_| {
            ControlFlow::Continue(())
        });
        saved.expect("it is saved");
        let ending = guest.wait().ending;
        (ending, recorder.touches().pages().len())
    }

    /// Restores lazily, brings the pages of `touches`, and runs the guest, which then requests the
    /// others.
    pub fn replay(
        &self,
        snapshot: &Snapshot,
        touches: Option<&Touches>,
    ) -> Result<Replayed, MigrateError> {
        let recorder = snapshot.recorder();
        let pages = snapshot.pages_on_demand(Policy::default())?;
        let source = Arc::new(pages.recorded(&recorder));
        let vm = self.builder.with_source(source).build().expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus = snapshot.restore_lazily(&vm, &devices)?;
        let mut replayed = 0;
        if let Some(touches) = touches {
            snapshot.replay(&*vm, touches, &mut |pages| {
                replayed += pages;
                ControlFlow::Continue(())
            })?;
        }
        let end = start(vm, devices, vcpus).wait();
        let asked = recorder.touches();
        if let Some(touches) = touches {
            snapshot.prefetch_rest(&*end.vm, touches, &mut |_| ControlFlow::Continue(()))?;
        }
        Ok(Replayed {
            ending: end.ending,
            asked,
            replayed,
        })
    }

    /// Restores lazily, calls `beside` while the guest runs, and returns how it ends.
    pub fn restore_beside(
        &self,
        snapshot: &Snapshot,
        policy: Policy,
        beside: impl FnOnce(&Recorder),
    ) -> Result<Ending, MigrateError> {
        let recorder = snapshot.recorder();
        let pages = snapshot.pages_on_demand(policy)?;
        let source = Arc::new(pages.recorded(&recorder));
        let vm = self.builder.with_source(source).build().expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus = snapshot.restore_lazily(&vm, &devices)?;
        let guest = start(vm, devices, vcpus);
        beside(&recorder);
        Ok(guest.wait().ending)
    }

    /// Restores lazily, and calls a function meanwhile. Its result is the second value.
    pub fn restore_lazily(
        &self,
        path: &Path,
        beside: Beside<'_>,
    ) -> Result<(Ending, Result<(), MigrateError>), MigrateError> {
        let snapshot = Snapshot::open(path)?;
        let pages = snapshot.pages_on_demand(Policy::default())?;
        let vm = self
            .builder
            .with_source(Arc::new(pages))
            .build()
            .expect("a VM");
        let arch = vm.config().arch;
        let devices = PlatformDevices::of(arch, |line: &str| println!("restored: {line}"));
        let vcpus = snapshot.restore_lazily(&vm, &devices)?;
        let guest = start(vm, devices, vcpus);
        let done = match beside {
            Beside::Nothing => Ok(()),
            Beside::Prefetch => {
                snapshot.prefetch(&**guest.vm(), &mut |_| ControlFlow::Continue(()))
            }
            Beside::Save(path) => save(&guest, path, &Budget::default(), &mut |_| {
                ControlFlow::Continue(())
            })
            .map(drop),
        };
        Ok((guest.wait().ending, done))
    }
}
