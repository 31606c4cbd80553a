//! A whole VMM for both backends: arguments, a device, dirty logging, and one function generic over
//! the backend.
//!
//!     cargo run --release --example vmm soft|kvm [SECONDS]
//!
//! The device is a dial. The guest reads from it how many pages to write, writes them, and counts
//! its rounds there. This program turns the dial up once a second and prints the number of written
//! pages.

use lacuna::boot::Segment;
use lacuna::device::Access;
use lacuna::dirty::{Logging, harvest, set_logging_everywhere};
use lacuna::{
    Arch, BackendError, Builder, Device, Ending, Gpa, Image, PageCount, PlatformDevices, Vm, kvm,
    soft,
};
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const USAGE: &str = "usage: vmm soft|kvm [SECONDS]";

/// A guest has no memory between 3 and 4 GiB, so devices fit there.
const DIAL: Gpa = Gpa::truncate(0xd000_0000);

/// Register 0: pages to write in a round, 0 to stop. Register 4: rounds done.
struct Dial {
    pages: AtomicU64,
    rounds: AtomicU64,
}

impl Device for Dial {
    fn read(&self, _access: Access) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    fn write(&self, access: Access, value: u64) -> Option<Ending> {
        if access.offset == 4 {
            self.rounds.store(value, Ordering::Relaxed);
        }
        None
    }
}

/// 64-bit code, entered at its first byte.
const CODE: &[u8] = &[
    0xbb, 0x00, 0x00, 0x00, 0xd0, // mov ebx, DIAL
    0x31, 0xed, // xor ebp, ebp
    0x8b, 0x0b, // round: mov ecx, [rbx]
    0x85, 0xc9, // test ecx, ecx
    0x74, 0x18, // jz stop
    0xbf, 0x00, 0x00, 0x20, 0x00, // mov edi, 0x200000
    0xff, 0x07, // page: inc dword [rdi]
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
    0xff, 0xc9, // dec ecx
    0x75, 0xf4, // jnz page
    0xff, 0xc5, // inc ebp
    0x89, 0x6b, 0x04, // mov [rbx + 4], ebp
    0xeb, 0xe2, // jmp round
    0x31, 0xc0, // stop: xor eax, eax
    0x66, 0xba, 0xf4, 0x00, // mov dx, 0xf4: the port that ends the run
    0xef, // out dx, eax
    0xf4, // hlt
    0xeb, 0xfd, // jmp to the hlt
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match start(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("vmm: {message}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: &[String]) -> Result<(), String> {
    let (backend, seconds) = match arguments {
        [backend] => (backend, 5),
        [backend, seconds] => {
            let number = seconds.parse();
            let refused = |_| format!("SECONDS: `{seconds}` is not a number\n{USAGE}");
            (backend, number.map_err(refused)?)
        }
        _ => return Err(USAGE.into()),
    };
    let (memory, resident) = (
        PageCount::from_bytes(64 << 20),
        PageCount::from_bytes(32 << 20),
    );
    match &**backend {
        "soft" => monitor(&soft::VmBuilder::new(memory, resident), seconds),
        "kvm" => match kvm::available() {
            Ok(()) => monitor(&kvm::VmBuilder::new(memory, resident), seconds),
            Err(reason) => Err(format!("skipped: {reason}")),
        },
        other => Err(format!("there is no backend `{other}`\n{USAGE}")),
    }
}

fn monitor<B: Builder>(builder: &B, seconds: u64) -> Result<(), String> {
    // The kind says whether another request or another host would help.
    let refused = |error: <B::Vm as Vm>::Error| format!("{error} ({:?})", error.kind());
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
    let dial = Arc::new(Dial {
        pages: AtomicU64::new(1000),
        rounds: AtomicU64::new(0),
    });
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    let added = devices.add_mmio("dial", DIAL, 8, dial.clone());
    added.map_err(|error| error.to_string())?;

    let running = builder.start(&image, devices).map_err(refused)?;
    let vm = &**running.vm();
    set_logging_everywhere(vm, Logging::LAZY).map_err(|error| error.to_string())?;
    let (mut second, mut before) = (1, 0);
    while !running.wait_timeout(Duration::from_secs(1)) {
        let mut dirty = BTreeSet::new();
        let harvested = harvest(vm, |slot, page| {
            dirty.insert((slot, page));
        });
        if let Err(error) = harvested {
            eprintln!("{error}");
        }
        let rounds = dial.rounds.load(Ordering::Relaxed);
        println!(
            "{} pages written in {} rounds",
            dirty.len(),
            rounds - before
        );
        (second, before) = (second + 1, rounds);
        let pages = if second > seconds { 0 } else { 1000 * second };
        dial.pages.store(pages, Ordering::Relaxed);
    }
    match running.wait().ending {
        Ending::Exited(0) => Ok(()),
        ending => Err(ending.to_string()),
    }
}
