//! Running a guest to its end.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lacuna_guest::status::{self, Kind, PAUSED_AT, SETTING_AT, Status};
use lacuna_machine::{
    Arch, Ending, GuestMemory, Image, Kick, Next, PlatformDevices, Vcpu, dispatch,
};

use crate::backend::{Backend, Lacks, Made, Request};

/// Every guest here ends by itself. If the host's KVM emulates guest kernels, this takes minutes
/// instead of moments.
const HANG: Duration = Duration::from_secs(900);

/// Runs `body` on a thread of its own and panics if it takes too long. Nothing can end a vCPU that
/// hangs in the host kernel: its thread stays behind.
pub fn within<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    let name = thread::current().name().unwrap_or("body").to_owned();
    let thread = thread::Builder::new().name(name);
    let thread = thread
        .spawn(move || drop(done.send(body())))
        .expect("a thread");
    match result.recv_timeout(HANG) {
        Ok(value) => value,
        // The thread has dropped its end without a result, so it panicked.
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => panic::resume_unwind(panic),
            Ok(()) => unreachable!("it would have sent its result"),
        },
        Err(RecvTimeoutError::Timeout) => panic!("no end after {HANG:?}"),
    }
}

/// A built-in guest for `arch`. In a build without guests, the calling test ends as skipped.
///
/// # Panics
/// If there is none of this name.
pub fn guest(arch: Arch, name: &str) -> Image<'static> {
    let image = match arch {
        Arch::Arm64 => lacuna_guest::Arch::Arm64.image(name),
        _ => {
            if let Some(reason) = lacuna_guest::unavailable() {
                lacuna_skip::skip_test(reason);
            }
            lacuna_guest::image(name)
        }
    };
    let image = image.unwrap_or_else(|| panic!("no image {name} for {arch}"));
    Image::parse(image.file).expect("the image of a built-in guest")
}

/// The outcome of a run.
pub struct Finished<B: Backend> {
    /// Why it ended.
    pub ending: Ending,
    /// The lines that the guest printed.
    pub printed: Vec<String>,
    /// Its VM.
    pub vm: Arc<B::Vm>,
    /// The guest's status page at the end, if it announced one.
    pub status: Option<Status>,
}

impl<B: Backend> Finished<B> {
    /// Returns this if the guest ended well.
    ///
    /// # Panics
    /// If it did not.
    #[must_use]
    pub fn passed(self) -> Self {
        let printed = self.printed.join("\n");
        let ending = &self.ending;
        assert!(matches!(ending, Ending::Exited(0)), "{ending:?}\n{printed}");
        self
    }
}

/// A running guest.
pub struct Running<'a, B: Backend> {
    /// Its VM.
    pub vm: &'a B::Vm,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// vCPUs whose threads have not ended.
    left: &'a AtomicUsize,
}

impl<B: Backend> Running<'_, B> {
    /// Whether every vCPU has left the guest for the last time.
    pub fn is_over(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// The guest's status page, once it has announced one.
    pub fn status(&self) -> Option<Status> {
        status(self.vm, self.devices)
    }

    /// Waits until the guest's processes are prepared: a booting kernel writes the same pages over
    /// and over.
    pub fn prepared(&self) {
        let ready = || {
            let status = self.status()?;
            Some(status.threads.first()?.counter > 0)
        };
        while !self.is_over() && ready() != Some(true) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Gives the workload its setting.
    pub fn set(&self, setting: u32) {
        write_word(self.vm, self.devices, SETTING_AT, setting);
    }

    /// Pauses the guest's processes of these kinds, and lets all others run.
    pub fn pause(&self, kinds: u32) {
        write_word(self.vm, self.devices, PAUSED_AT, kinds);
    }
}

/// Runs `image` to its end.
pub fn run<B: Backend>(
    backend: &B,
    request: &Request,
    image: &Image<'_>,
) -> Result<Finished<B>, Lacks> {
    beside(backend, request, image, Start::Free, |_| ()).map(|(finished, ())| finished)
}

/// The guest's processes that wait after it has announced its status page, until [`Running::pause`]
/// changes this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// None.
    Free,
    /// The processes of this kind.
    Held(Kind),
}

/// Runs `image` to its end, and `monitor` beside it. When the monitor returns, the guest still runs
/// to its end. A panic of the monitor ends the guest.
pub fn beside<B: Backend, T>(
    backend: &B,
    request: &Request,
    image: &Image<'_>,
    start: Start,
    monitor: impl FnOnce(&Running<'_, B>) -> T,
) -> Result<(Finished<B>, T), Lacks> {
    let Made { vm, vcpus, beside } = backend.make(request, image)?;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let devices = PlatformDevices::of(backend.arch(), move |line: &str| {
        sink.lock()
            .expect("no panic under this lock")
            .push(line.to_owned());
    });
    let left = AtomicUsize::new(vcpus.len());
    let found = thread::scope(|scope| {
        for vcpu in vcpus {
            scope.spawn(|| {
                let driven = || drive(vcpu, &devices, &*vm, start);
                let driven = panic::catch_unwind(AssertUnwindSafe(driven));
                left.fetch_sub(1, Ordering::Release);
                driven.unwrap_or_else(|why| {
                    devices.end(Ending::Stopped, &*vm);
                    panic::resume_unwind(why)
                });
            });
        }
        let running = Running {
            vm: &*vm,
            devices: &devices,
            left: &left,
        };
        let found = panic::catch_unwind(AssertUnwindSafe(|| monitor(&running)));
        found.unwrap_or_else(|why| {
            devices.end(Ending::Stopped, &*vm);
            panic::resume_unwind(why)
        })
    });
    devices.flush();
    drop(beside);
    let printed = lines.lock().expect("no panic under this lock").clone();
    let finished = Finished {
        ending: devices.ending().expect("every vCPU has left"),
        printed,
        status: status(&*vm, &devices),
        vm,
    };
    Ok((finished, found))
}

fn drive<V: Vcpu, M: GuestMemory + Kick>(
    mut vcpu: V,
    devices: &PlatformDevices,
    vm: &M,
    start: Start,
) {
    let mut held = vcpu.index() != 0;
    while devices.ending().is_none() {
        let exit = vcpu.run();
        if dispatch(&mut vcpu, exit, devices, vm) == Next::Stop {
            break;
        }
        if let (false, Start::Held(kind), Some(_)) = (held, start, devices.status_page()) {
            write_word(vm, devices, PAUSED_AT, kind.paused_bit());
            held = true;
        }
    }
}

/// Writes a word of the status page.
fn write_word(vm: &impl GuestMemory, devices: &PlatformDevices, offset: usize, word: u32) {
    let page = devices.status_page().expect("it was announced");
    let at = page.gpa().checked_add(offset as u64);
    let at = at.expect("inside of a page");
    vm.write(at, &word.to_le_bytes()).expect("guest memory");
}

/// The status pages of a guest, once it has announced them.
pub fn status(vm: &impl GuestMemory, devices: &PlatformDevices) -> Option<Status> {
    let first = devices.status_page()?.gpa();
    let pages = status::copy(|offset, pages| {
        let at = first.checked_add(offset as u64);
        at.is_some_and(|at| vm.read(at, pages).is_ok())
    });
    Status::parse(&pages?).ok()
}
