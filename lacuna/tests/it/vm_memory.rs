//! Guest memory by `vm-memory`'s traits.
#![cfg(feature = "vm-memory")]

use lacuna::memory::MemoryError;
use lacuna::vm_memory::{Foreign, View};
use lacuna::{Builder, Gpa, GuestMemory, PAGE_SIZE, PageCount, soft};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

const MEMORY: u64 = 32 << 20;

fn guest() -> Arc<soft::Vm> {
    let memory = PageCount::from_bytes(MEMORY);
    let builder = soft::VmBuilder::new(memory, PageCount::from_bytes(4 << 20));
    builder.build().expect("there is memory for it")
}

/// Different bytes from page to page and from byte to byte.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

#[test]
fn a_view_moves_bytes_across_pages_in_every_way() {
    let vm = guest();
    let view = View(&*vm);
    let at = GuestAddress((4 << 20) + 1001);
    let bytes = pattern(3 * PAGE_SIZE + 77);

    view.write_slice(&bytes, at).unwrap();
    let mut read = vec![0; bytes.len()];
    view.read_slice(&mut read, at).unwrap();
    assert_eq!(read, bytes);

    let other = GuestAddress(8 << 20);
    view.read_exact_volatile_from(other, &mut &bytes[..], bytes.len())
        .unwrap();
    let mut sink = Vec::new();
    view.write_all_volatile_to(other, &mut sink, bytes.len())
        .unwrap();
    assert_eq!(sink, bytes);
}

#[test]
fn a_source_that_ends_early_is_a_partial_read() {
    let vm = guest();
    let view = View(&*vm);
    let at = GuestAddress(4 << 20);
    let source = pattern(PAGE_SIZE + 5);
    let moved = view.read_volatile_from(at, &mut &source[..], 3 * PAGE_SIZE);
    assert_eq!(moved.unwrap(), source.len());
    let exact = view.read_exact_volatile_from(at, &mut &source[..], 3 * PAGE_SIZE);
    assert!(exact.is_err());
}

#[test]
fn what_has_no_memory_is_an_invalid_address() {
    let vm = guest();
    let view = View(&*vm);
    for at in [MEMORY, MEMORY - 4, u64::MAX - 3, 1 << 52] {
        let error = view.write_slice(&[1; 8], GuestAddress(at)).unwrap_err();
        assert!(
            matches!(error, GuestMemoryError::InvalidGuestAddress(_)),
            "{at:#x}: {error}"
        );
        let mut sink = Vec::new();
        assert!(
            view.write_volatile_to(GuestAddress(at), &mut sink, 8)
                .is_err()
        );
    }
}

#[test]
fn an_atomic_access_has_its_alignment() {
    let vm = guest();
    let view = View(&*vm);
    let at = 4 << 20;
    view.store(0x1122u16, GuestAddress(at + 2), Ordering::Release)
        .unwrap();
    view.store(0x3344_5566u32, GuestAddress(at + 4), Ordering::SeqCst)
        .unwrap();
    let whole: u64 = view.load(GuestAddress(at), Ordering::Acquire).unwrap();
    assert_eq!(
        whole.to_le_bytes(),
        [0, 0, 0x22, 0x11, 0x66, 0x55, 0x44, 0x33]
    );
    let torn = view.load::<u32>(GuestAddress(at + 2), Ordering::Relaxed);
    assert!(matches!(torn, Err(GuestMemoryError::InvalidBackendAddress)));
}

#[test]
fn a_foreign_memory_refuses_as_ours_does() {
    let ranges = [(GuestAddress(0), 1 << 20)];
    let theirs = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
    let foreign = Foreign(&theirs);
    let gpa = |at| Gpa::new(at).unwrap();
    let bytes = pattern(5000);
    foreign.write(gpa(4000), &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    assert!(foreign.peek(gpa(4000), &mut read));
    assert_eq!(read, bytes);
    let refused = foreign.write(gpa(2 << 20), &bytes);
    assert!(
        matches!(refused, Err(MemoryError::NoSlot(_))),
        "{refused:?}"
    );
    assert!(foreign.write(gpa((1 << 20) - 8), &bytes).is_err());
}
