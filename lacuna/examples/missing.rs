//! A guest whose memory is elsewhere. Its vCPU leaves the guest for each missing page, and this
//! monitor provides the page and enters the vCPU again.
//!
//!     cargo run --release --example missing

use lacuna::boot::Segment;
use lacuna::device::dispatch;
use lacuna::memory::SlotFlags;
use lacuna::source::{PageRequest, PageSource, SourcePage};
use lacuna::{
    Arch, Builder, Exit, Gpa, Image, MemorySlots, PAGE_SIZE, PageCount, PlatformDevices, Vcpu,
    Vm as _, soft,
};
use std::error::Error;
use std::sync::Arc;

/// Where the guest's memory is: here, each page begins with its own number.
struct Snapshot;

impl Snapshot {
    fn page(&self, page: SourcePage) -> [u8; PAGE_SIZE] {
        let mut bytes = [0; PAGE_SIZE];
        bytes[..8].copy_from_slice(&page.0.to_le_bytes());
        bytes
    }
}

/// No vCPU requests a page of the source. Here the loader does: it writes the guest's code and page
/// tables.
impl PageSource for Snapshot {
    fn describe(&self) -> String {
        "snapshot".into()
    }

    fn fetch(&self, request: PageRequest) {
        // `Answer::Late` would mean that the page was provided in another way.
        let _ = request.provide(&self.page(request.page()));
    }
}

/// Adds up the first words of 100 pages from 2 MiB on. 64-bit code, entered at its first byte.
const CODE: &[u8] = &[
    0xbe, 0x00, 0x00, 0x20, 0x00, // mov esi, 0x20_0000
    0x31, 0xc0, // xor eax, eax
    0xb9, 100, 0, 0, 0, // mov ecx, 100
    0x03, 0x06, // next: add eax, [rsi]
    0x48, 0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add rsi, 4096
    0xff, 0xc9, // dec ecx
    0x75, 0xf3, // jnz next
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
    let mut builder = soft::VmBuilder::new(size, size);
    builder.source = Some(Arc::new(Snapshot));
    let vm = builder.build()?;
    let memory = vm.missing_memory().ok_or("it has a source")?;
    let vcpus = vm.boot(&image, &builder.full_command_line())?;
    for slot in vm.memory_slots() {
        vm.set_slot_flags(slot.id, slot.flags | SlotFlags::EXIT_ON_MISSING)?;
    }

    let devices = PlatformDevices::new(|line: &str| println!("guest: {line}"));
    let mut exits = 0;
    for mut vcpu in vcpus {
        while devices.ending().is_none() {
            match vcpu.run() {
                // If the monitor had to wait for the page, it would call `vcpu.accept(token)`
                // first: a guest with async page faults runs another process meanwhile.
                Ok(Exit::MemoryFault { gpa, .. }) => {
                    let page = SourcePage(gpa.get() / PAGE_SIZE as u64);
                    memory.provide(gpa, &Snapshot.page(page))?;
                    exits += 1;
                }
                exit => _ = dispatch(&mut vcpu, exit, &devices, &*vm),
            }
        }
    }
    let ending = devices.ending().ok_or("the loop has ended")?;
    println!("{exits} exits for missing pages; {ending}");
    Ok(())
}
