//! Guests that wait at a gate, resume from a snapshot, or move: how they are made and observed, on
//! any backend.

use crate::experiment::{LabError, LabResult, Options};
use crate::fixture::{on_kvm, resident};
use crate::session::{Guest, LastWords, Session, image, on};
use lacuna::soft::VmBuilder;
use lacuna::source::PageSource;
use lacuna::{Arch, Builder, Machine, PageCount, PlatformDevices, Running, Vm};
use lacuna_guest::status::Thread;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest time that a guest may take to its gate.
const PREPARE: Duration = Duration::from_secs(300);

/// The settings of a backend's builder that experiments change for one guest.
pub trait GuestBuilder: Builder<Vm: Vm<Error: Into<LabError>>> + Clone + Sync {
    /// Its processor.
    fn arch(&self) -> Arch;

    /// The same, with these words of the guest's command line.
    fn with(&self, words: &str) -> Self;

    /// The same for an incoming guest, as `lacuna run --incoming` and `lacuna snapshot restore`
    /// make it.
    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self;
}

impl GuestBuilder for VmBuilder {
    fn arch(&self) -> Arch {
        self.arch
    }

    fn with(&self, words: &str) -> Self {
        let command_line = words.into();
        Self {
            command_line,
            ..self.clone()
        }
    }

    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        Self {
            source,
            prefault: false,
            ..self.clone()
        }
    }
}

impl GuestBuilder for lacuna::kvm::VmBuilder {
    fn arch(&self) -> Arch {
        Arch::X86_64
    }

    fn with(&self, words: &str) -> Self {
        let command_line = words.into();
        Self {
            command_line,
            ..self.clone()
        }
    }

    fn coming(&self, source: Option<Arc<dyn PageSource>>) -> Self {
        Self {
            source,
            ..self.clone()
        }
    }
}

/// Makes VMs of so many MiB and vCPUs on soft, with a frame for each page.
pub fn soft(options: &Options) -> impl Fn(u64, usize) -> VmBuilder {
    let arch = options.arch;
    move |mib, vcpus| VmBuilder {
        arch,
        ..resident(mib, vcpus)
    }
}

/// As [`soft`], on `/dev/kvm`, or the reason why there are none.
pub fn kvm(options: &Options) -> Result<impl Fn(u64, usize) -> lacuna::kvm::VmBuilder, String> {
    match options.arch {
        Arch::X86_64 => lacuna::kvm::available().map_err(|why| why.to_string())?,
        arch => return Err(format!("the kvm backend has no guests of {arch}")),
    }
    Ok(|mib: u64, vcpus| on_kvm(PageCount::from_bytes(mib << 20), vcpus))
}

/// A folder that is removed when the value is dropped.
pub fn folder() -> LabResult<TempDir> {
    tempfile::tempdir().map_err(LabError::io("make a folder"))
}

/// A guest's console: the printed lines with their times, and the last one.
pub struct Lines {
    pub received: Receiver<(Instant, String)>,
    pub last: LastWords,
}

/// Devices for an incoming guest in a VM of `builder`, and its console.
pub fn devices(builder: &impl GuestBuilder) -> (PlatformDevices, Lines) {
    let (sender, received) = channel();
    let last = LastWords::default();
    let mut keep = last.console();
    let console = move |line: &str| {
        keep(line);
        // The experiment may not listen any more.
        let _ = sender.send((Instant::now(), line.to_owned()));
    };
    let devices = PlatformDevices::of(builder.arch(), console);
    (devices, Lines { received, last })
}

/// A machine for an incoming guest whose pages `source` provides.
pub fn machine_for<B: GuestBuilder>(
    builder: &B,
    source: Option<Arc<dyn PageSource>>,
) -> LabResult<(Machine<B::Vm>, Lines)> {
    let vm = builder.coming(source).build().map_err(Into::into)?;
    let (devices, lines) = devices(builder);
    Ok((Machine::new(vm, devices)?, lines))
}

/// Runs `guest` with `words` until it waits at its gate, and then `work` beside it.
pub fn beside<B: GuestBuilder, T>(
    builder: &B,
    guest: &str,
    words: &str,
    work: impl FnOnce(&Session<'_, B::Vm>) -> LabResult<T>,
) -> LabResult<T> {
    let image = image(builder.arch(), guest)?;
    on(&builder.with(words), &image, |session| {
        wait_at_gate(session)?;
        work(session)
    })
}

/// The guest, once it has a status page.
pub fn attached<V: Vm>(running: &Running<V>) -> LabResult<Guest<'_>> {
    let guest = Guest::attach(&**running.vm(), running.devices());
    guest.ok_or_else(|| LabError::Guest("it has no status page".into()))
}

/// Waits until all processes of the guest wait at its gate.
fn wait_at_gate(session: &Session<'_, impl Vm>) -> LabResult {
    session.guest.run_until(PREPARE, |status| {
        let [main, members @ ..] = &*status.threads else {
            return None;
        };
        // `verify`: each thread has made one of its two passes. `zipf`: the first entry says so.
        let half = |thread: &Thread| thread.goal.is_some_and(|goal| 2 * thread.counter >= goal);
        let all = members.len() == session.vm.config().vcpus && members.iter().all(half);
        (main.counter > 0 || all).then_some(())
    })
}
