//! Functions that the tests share.
#![allow(dead_code, reason = "each test file uses its part")]

use lacuna_addr::PageCount;
use lacuna_kvm::{
    Apf, CpuModel, Delivery, HugePages, LatencySetting, MemoryKind, Swap, Tracker, Vm, VmBuilder,
    available,
};
use lacuna_machine::{Builder as _, Ending, Image, PlatformDevices, RunEnd};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Whether this host can run a VM; if not, the test is recorded as skipped.
pub fn can_run() -> bool {
    match available() {
        Ok(()) => true,
        Err(reason) => {
            lacuna_skip::skip(reason);
            false
        }
    }
}

/// Runs `body` on a thread of its own. If a vCPU hangs in the kernel, the thread is left behind and
/// the test fails.
pub fn within<T: Send + 'static>(seconds: u64, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    let name = thread::current().name().unwrap_or("body").to_owned();
    let thread = thread::Builder::new().name(name);
    let thread = thread.spawn(move || done.send(body())).unwrap();
    match result.recv_timeout(Duration::from_secs(seconds)) {
        Ok(value) => value,
        Err(_) if thread.is_finished() => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("it would have sent its result"),
        },
        Err(_) => panic!("no end after {seconds} s"),
    }
}

/// A built-in guest. In a build without guests, the calling test ends as skipped.
pub fn image(name: &str) -> Image<'static> {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let image = lacuna_guest::image(name).unwrap_or_else(|| panic!("no image {name}"));
    Image::parse(image.file).unwrap()
}

/// `memory` and `resident` are in MiB; no latency, no asynchronous page faults.
pub fn builder(memory: u64, resident: u64, vcpus: usize, command_line: &str) -> VmBuilder {
    VmBuilder {
        memory: PageCount::from_bytes(memory << 20),
        resident: PageCount::from_bytes(resident << 20),
        memory_kind: MemoryKind::Budget,
        backing: None,
        huge: HugePages::Never,
        vcpus,
        swap: Swap::Memory,
        latency: LatencySetting::default(),
        apf: Apf::Off,
        delivery: Delivery::Bitmap,
        tracker: Tracker::default(),
        cpu: CpuModel::default(),
        source: None,
        command_line: command_line.to_owned(),
    }
}

/// Runs `name` until it ends, in any way.
pub fn run(builder: &VmBuilder, name: &'static str) -> (RunEnd<Vm>, String) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let builder = builder.clone();
    let end = within(120, move || {
        let console = move |line: &str| sink.lock().unwrap().push(line.to_owned());
        let devices = PlatformDevices::new(console);
        builder.start(&image(name), devices).unwrap().wait()
    });
    let text = lines.lock().unwrap().join("\n");
    (end, text)
}

/// Runs `name` until it ends, which must be a success.
pub fn pass(builder: &VmBuilder, name: &'static str) -> (RunEnd<Vm>, String) {
    let (end, text) = run(builder, name);
    let ending = &end.ending;
    assert!(
        matches!(ending, Ending::Exited(0)),
        "{builder:?}: {ending:?} {:?}\n{text}",
        lacuna_machine::Vm::stats(&*end.vm)
    );
    (end, text)
}
