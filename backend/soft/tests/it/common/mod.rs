//! Functions that the tests of whole guests share.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod apf;
pub mod arm64;
pub mod program;
pub mod shadow;

use lacuna_addr::{GfnRange, PageCount};
use lacuna_machine::{
    Arch, Ending, Image, Machine, MemorySlots as _, PageRequest, PageSource, PlatformDevices,
    Running, Vm as _,
};
use lacuna_soft::{Apf, RunSummary, Swap, Vcpu, Vm, VmBuilder, VmConfig};
use std::sync::{Arc, Mutex};

pub const MIB: u64 = 1 << 20;

/// A number that an environment variable may set, for a longer run.
pub fn from_env(name: &str, otherwise: u64) -> u64 {
    let found = std::env::var(name).ok();
    found.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// A page source that provides zeros at once.
pub struct Zeros;

impl PageSource for Zeros {
    fn describe(&self) -> String {
        "zeros".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = request.provide(&[0; 4096]);
    }
}

/// The console output of a guest.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    pub fn sink(&self) -> impl FnMut(&str) + Send + use<> {
        let lines = Arc::clone(&self.0);
        move |line: &str| lines.lock().unwrap().push(line.to_owned())
    }

    pub fn text(&self) -> String {
        self.0.lock().unwrap().join("\n")
    }
}

/// Tests of both architectures: for each named function, which takes the architecture, a test in a
/// module `x86_64` and one in a module `arm64`.
#[allow(unused_macros, reason = "each test file uses its part")]
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod x86_64 {
            $(#[lacuna_skip::test]
            fn $name() {
                super::$name(lacuna_machine::Arch::X86_64);
            })*
        }

        mod arm64 {
            $(#[lacuna_skip::test]
            fn $name() {
                super::$name(lacuna_machine::Arch::Arm64);
            })*
        }
    };
}

#[allow(unused_imports, reason = "each test file uses its part")]
pub(crate) use on_both;

/// A built-in guest. In a build without guests, the calling test ends as skipped.
pub fn image(name: &str) -> Image<'static> {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let image = lacuna_guest::image(name).unwrap_or_else(|| panic!("no image {name}"));
    Image::parse(image.file).unwrap()
}

/// A built-in guest of the architecture `arch`.
pub fn image_for(arch: Arch, name: &str) -> Image<'static> {
    match arch {
        Arch::Arm64 => {
            let image = lacuna_guest::Arch::Arm64.image(name);
            let image = image.unwrap_or_else(|| panic!("no AArch64 image {name}"));
            Image::parse(image.file).unwrap()
        }
        _ => image(name),
    }
}

/// The two ways of asynchronous page faults that a guest may choose, by its command line.
pub fn apf_ways(arch: Arch) -> [&'static str; 2] {
    match arch {
        Arch::Arm64 => ["apf=abort", "apf=sdei"],
        _ => ["apf=int", "apf=pf"],
    }
}

/// An x86-64 VM, by [`builder_for`].
pub fn builder(memory: u64, resident: u64, vcpus: usize, command_line: &str) -> VmBuilder {
    builder_for(Arch::X86_64, (memory, resident), vcpus, command_line)
}

/// The sizes of the memory and of its resident part are in MiB; swap is a file in the temporary
/// folder.
pub fn builder_for(
    arch: Arch,
    (memory, resident): (u64, u64),
    vcpus: usize,
    command_line: &str,
) -> VmBuilder {
    let memory = PageCount::from_bytes(memory * MIB);
    VmBuilder {
        arch,
        vcpus,
        swap: Swap::File(std::env::temp_dir()),
        apf: Apf::Off,
        command_line: command_line.to_owned(),
        ..VmBuilder::new(memory, PageCount::from_bytes(resident * MIB))
    }
}

pub fn run(builder: &VmBuilder, name: &str) -> (RunSummary, String) {
    let lines = Lines::default();
    let outcome = builder
        .run_to_summary(&image_for(builder.arch, name), lines.sink())
        .unwrap();
    (outcome, lines.text())
}

/// Runs `name` until it ends, which must be a success.
pub fn pass(builder: &VmBuilder, name: &str) -> (RunSummary, String) {
    let (outcome, text) = run(builder, name);
    let ending = &outcome.ending;
    assert!(
        matches!(ending, Ending::Exited(0)),
        "{builder:?}: {ending:?}\n{text}"
    );
    (outcome, text)
}

/// Runs `vcpus` on their threads.
pub fn start(vm: &Arc<Vm>, vcpus: Vec<Vcpu>, devices: &Arc<PlatformDevices>) -> Running<Vm> {
    let machine = Machine::new(Arc::clone(vm), Arc::clone(devices));
    machine.unwrap().start(vcpus)
}

/// The second quarter of a VM's memory.
pub fn second_quarter(vm: &Vm) -> GfnRange {
    let pages = vm.config().memory.get() / 4;
    let start = vm.memory_slots()[0].gfns.start().checked_add(pages);
    GfnRange::new(start.unwrap(), pages).unwrap()
}

/// A VM in `host`, booted with `name`, for tests that share or damage a host.
pub fn boot(
    builder: &VmBuilder,
    host: &Arc<lacuna_soft::Host>,
    clock: Arc<dyn lacuna_sync::Clock>,
    name: &str,
) -> (Arc<Vm>, Vec<Vcpu>, Arc<PlatformDevices>, Lines) {
    boot_with(builder, host, clock, name, |_| ())
}

/// As [`boot`], with an action before the vCPUs are made.
pub fn boot_with(
    builder: &VmBuilder,
    host: &Arc<lacuna_soft::Host>,
    clock: Arc<dyn lacuna_sync::Clock>,
    name: &str,
    before_vcpus: impl FnOnce(&Vm),
) -> (Arc<Vm>, Vec<Vcpu>, Arc<PlatformDevices>, Lines) {
    let image = image_for(builder.arch, name);
    boot_image(builder, host, clock, &image, before_vcpus)
}

/// The configuration of a VM of `builder`.
pub fn config(builder: &VmBuilder) -> VmConfig {
    VmConfig {
        arch: builder.arch,
        memory: builder.memory,
        vcpus: builder.vcpus,
        apf: builder.apf,
        ..VmConfig::default()
    }
}

/// As [`boot_with`], with the test's own image.
pub fn boot_image(
    builder: &VmBuilder,
    host: &Arc<lacuna_soft::Host>,
    clock: Arc<dyn lacuna_sync::Clock>,
    image: &Image<'_>,
    before_vcpus: impl FnOnce(&Vm),
) -> (Arc<Vm>, Vec<Vcpu>, Arc<PlatformDevices>, Lines) {
    let vm = match &builder.source {
        None => Vm::new(Arc::clone(host), clock, config(builder)),
        Some(source) => {
            Vm::with_source(Arc::clone(host), clock, config(builder), Arc::clone(source))
        }
    };
    let vm = vm.unwrap();
    before_vcpus(&vm);
    let vcpus = vm.boot(image, &builder.full_command_line()).unwrap();
    let lines = Lines::default();
    let devices = Arc::new(PlatformDevices::of(builder.arch, lines.sink()));
    (vm, vcpus, devices, lines)
}
