//! A monitor with devices and a run loop of its own, and a guest of eleven instructions.
//!
//!     cargo run --release --example devices

use lacuna::boot::Segment;
use lacuna::device::{Access, DeviceState, dispatch};
use lacuna::{
    Arch, Builder, Device, Ending, Exit, Gpa, Image, MemorySlots, PageCount, PlatformDevices, Vcpu,
    Vm as _, soft,
};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Adds up the values that the guest writes to it. A read returns the sum.
#[derive(Default)]
struct Adder(AtomicU64);

impl Device for Adder {
    fn read(&self, _access: Access) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn write(&self, _access: Access, value: u64) -> Option<Ending> {
        self.0.fetch_add(value, Ordering::Relaxed);
        None
    }

    // A snapshot or a migration has the sum. A device without a state needs none of these.
    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Vec<u8> {
        self.0.load(Ordering::Relaxed).to_le_bytes().into()
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        let bytes = state.bytes.as_slice().try_into();
        let bytes = bytes.map_err(|_| format!("{} bytes, not 8", state.bytes.len()))?;
        self.0.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        Ok(())
    }

    fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Where the guest finds the adder.
const ADDER: u64 = 0xd000_0000;
/// A port without a platform device: this monitor answers it in its loop.
const PORT: u16 = 0x700;

/// 64-bit code, entered at its first byte.
const CODE: &[u8] = &[
    0xbb, 0x00, 0x00, 0x00, 0xd0, // mov ebx, ADDER
    0xc7, 0x03, 40, 0, 0, 0, // mov dword [rbx], 40
    0x66, 0xba, 0x00, 0x07, // mov dx, PORT
    0xed, // in eax, dx
    0x89, 0x03, // mov [rbx], eax
    0x8b, 0x03, // mov eax, [rbx]
    0x66, 0xba, 0xf4, 0x00, // mov dx, 0xf4: the port that ends the run
    0xef, // out dx, eax
    0xf4, // hlt
    0xeb, 0xfd, // jmp to the hlt
];

fn main() -> Result<(), Box<dyn Error>> {
    let start = Gpa::new(1 << 20).ok_or("below 2^48")?;
    let image = Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: start,
            bytes: CODE,
            size: CODE.len() as u64,
        }],
        entry: start,
    };
    let size = PageCount::from_bytes(16 << 20);
    let vm = soft::VmBuilder::new(size, size).build()?;

    let adder = Arc::new(Adder::default());
    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    let start = Gpa::new(ADDER).ok_or("below 2^48")?;
    devices.add_mmio("adder", start, 4, adder.clone())?;

    devices.check_memory(&vm.memory_slots())?;

    // `lacuna::Machine` has this loop, with a thread for each vCPU.
    for mut vcpu in vm.boot(&image, "")? {
        while devices.ending().is_none() {
            match vcpu.run() {
                Ok(Exit::IoIn { port: PORT, .. }) => vcpu.complete_read(2),
                exit => {
                    let _ = dispatch(&mut vcpu, exit, &devices, &*vm);
                }
            }
        }
    }

    // What a snapshot has of the devices. It is restored into devices of the same names.
    let state = devices.pause()?.save()?;
    println!("saved: {:?}", state.versions());

    println!("the adder has {}", adder.0.load(Ordering::Relaxed));
    match devices.ending() {
        Some(Ending::Exited(42)) => Ok(()),
        other => Err(format!("the guest ended with {other:?}").into()),
    }
}
