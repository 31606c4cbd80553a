//! Functions that the tests of whole guests share.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod program;
pub mod shadow;

use lacuna_addr::PageCount;
use lacuna_machine::{Ending, Image, PlatformDevices, Vm as _};
use lacuna_soft::{
    Apf, CpuModel, HugePages, LatencySetting, MemoryKind, RunSummary, Swap, Vcpu, Vm, VmBuilder,
    VmConfig,
};
use std::sync::{Arc, Mutex};

pub const MIB: u64 = 1 << 20;

/// A number that an environment variable may set, for a longer run.
pub fn from_env(name: &str, otherwise: u64) -> u64 {
    let told = std::env::var(name).ok();
    told.map_or(otherwise, |text| text.parse().expect("a number"))
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

/// A built-in guest. In a build without guests, the calling test ends as skipped.
pub fn image(name: &str) -> Image<'static> {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let image = lacuna_guest::image(name).unwrap_or_else(|| panic!("no image {name}"));
    Image::parse(image.elf).unwrap()
}

/// `memory` and `resident` are in MiB; swap is a file in the temporary folder.
pub fn builder(memory: u64, resident: u64, vcpus: usize, command_line: &str) -> VmBuilder {
    VmBuilder {
        memory: PageCount::from_bytes(memory * MIB),
        resident: PageCount::from_bytes(resident * MIB),
        vcpus,
        memory_kind: MemoryKind::Budget,
        huge: HugePages::Never,
        swap: Swap::File(std::env::temp_dir()),
        source: None,
        latency: LatencySetting::default(),
        apf: Apf::Off,
        cpu: CpuModel::default(),
        seed: None,
        command_line: command_line.to_owned(),
    }
}

pub fn run(builder: &VmBuilder, name: &str) -> (RunSummary, String) {
    let lines = Lines::default();
    let outcome = builder
        .run_to_summary(&image(name), lines.sink(), |_| ())
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
    boot_image(builder, host, clock, &image(name), before_vcpus)
}

/// As [`boot_with`], with an image that the test made.
pub fn boot_image(
    builder: &VmBuilder,
    host: &Arc<lacuna_soft::Host>,
    clock: Arc<dyn lacuna_sync::Clock>,
    image: &Image<'_>,
    before_vcpus: impl FnOnce(&Vm),
) -> (Arc<Vm>, Vec<Vcpu>, Arc<PlatformDevices>, Lines) {
    let config = VmConfig {
        memory: builder.memory,
        vcpus: builder.vcpus,
        apf: builder.apf,
        ..VmConfig::default()
    };
    let vm = match &builder.source {
        None => Vm::new(Arc::clone(host), clock, config),
        Some(source) => Vm::with_source(Arc::clone(host), clock, config, Arc::clone(source)),
    };
    let vm = vm.unwrap();
    before_vcpus(&vm);
    let vcpus = vm.boot(image, &builder.full_command_line()).unwrap();
    let lines = Lines::default();
    let devices = Arc::new(PlatformDevices::new(lines.sink()));
    (vm, vcpus, devices, lines)
}
