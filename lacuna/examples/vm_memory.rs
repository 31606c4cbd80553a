//! Both directions of rust-vmm's `vm-memory` traits.
//!
//!     cargo run --release --features vm-memory --example vm_memory

use lacuna::vm_memory::{Foreign, View};
use lacuna::{Boot, Builder, GuestMemory, Image, Layout, PageCount, soft};
use std::error::Error;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

/// A device as another project may write it: it puts a message where the guest expects it.
fn device<M>(memory: &M, queue: GuestAddress) -> Result<(), GuestMemoryError>
where
    M: Bytes<GuestAddress, E = GuestMemoryError>,
{
    memory.write_slice(b"from the device", GuestAddress(queue.0 + 64))?;
    // The index last, in one piece.
    memory.store(1u16, queue, Ordering::Release)
}

fn main() -> Result<(), Box<dyn Error>> {
    // 1. Code for `vm-memory`, with a guest of this crate whose pages may be in swap.
    let queue = GuestAddress(2 << 20);
    let vm = soft::VmBuilder::new(
        PageCount::from_bytes(64 << 20),
        PageCount::from_bytes(16 << 20),
    )
    .build()?;
    device(&View(&*vm), queue)?;
    let mut message = [0; 15];
    View(&*vm).read_slice(&mut message, GuestAddress(queue.0 + 64))?;
    println!("the guest sees: {}", String::from_utf8_lossy(&message));

    // 2. This crate's loader, with another monitor's memory.
    let size = 64 << 20;
    let theirs = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), size)])?;
    let guest = lacuna_guest::image("hello").ok_or("no guests are built in")?;
    let image = Image::parse(guest.file)?;
    let layout = Layout::new(PageCount::from_bytes(size as u64))?;
    let boot = Boot::load(&image, &layout, "", &Foreign(&theirs))?;
    println!("loaded; their vCPU begins with {boot:x?}");

    let segment = &image.segments[0];
    let mut loaded = vec![0; segment.bytes.len()];
    Foreign(&theirs).read(segment.gpa, &mut loaded)?;
    assert_eq!(loaded, segment.bytes);
    Ok(())
}
