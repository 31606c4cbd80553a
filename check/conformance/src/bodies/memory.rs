//! Slots, faults, and memory that is not resident.

use std::time::Duration;

use iced_x86::code_asm::*;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{Ending, GuestMemory as _, MemoryError, Vm as _};

use super::Outcome;
use crate::backend::{Backend, Made, Request};
use crate::program::{assemble, image};
use crate::running::{Running, Start, beside, guest, run, within};

/// MiB of the VM in the tests of this file that have a program of their own.
const MIB: u64 = 16;
/// Where the program's data begin: behind its code and stack.
const DATA: u64 = 4 << 20;

/// The VMM writes a word into each page, the guest doubles it, and the VMM reads it: at a quarter
/// of the memory resident, all of which is taken away and brought back on the way.
pub fn every_word_is_where_it_was_written<B: Backend>(backend: &B) -> Outcome {
    let end = MIB << 20;
    let code = assemble(|a| {
        let mut next = a.create_label();
        a.mov(rdi, DATA)?;
        a.set_label(&mut next)?;
        a.shl(qword_ptr(rdi + 8), 1)?;
        a.add(rdi, PAGE_SIZE as i32)?;
        a.cmp(rdi, end as i32)?;
        a.jne(next)?;
        a.xor(eax, eax)?;
        a.mov(dx, 0xf4)?;
        a.out(dx, eax)?;
        a.hlt()
    });
    let backend = backend.clone();
    within(move || {
        let request = Request::new(MIB, MIB / 4, 1, "");
        let Made {
            vm, vcpus, beside, ..
        } = backend.make(&request, &image(&code))?;
        let words = || (DATA..end).step_by(PAGE_SIZE).map(|at| at + 8);
        for at in words() {
            vm.write(Gpa::truncate(at), &at.to_le_bytes())
                .expect("guest memory");
        }
        let devices = lacuna_machine::PlatformDevices::new(|_: &str| ());
        drop(lacuna_machine::run(vcpus, &devices, &*vm));
        let ending = devices.ending();
        assert!(matches!(ending, Some(Ending::Exited(0))), "{ending:?}");
        for at in words() {
            let mut word = [0; 24];
            vm.read(Gpa::truncate(at - 8), &mut word)
                .expect("guest memory");
            let doubled = u64::from_le_bytes(word[8..16].try_into().expect("eight bytes"));
            assert_eq!(doubled, 2 * at);
            assert_eq!(
                (&word[..8], &word[16..]),
                (&[0; 8][..], &[0; 8][..]),
                "at {at:#x}"
            );
        }
        drop(beside);
        Ok(())
    })
}

/// The guest's words that it writes, by size. Each is all zeros or all ones.
const BY_GUEST: [(u64, usize); 3] = [(DATA, 8), (DATA + 8, 4), (DATA + 16, 2)];
/// The guest's words that the VMM writes, in the same way.
const BY_HOST: [(u64, usize); 3] = [(DATA + 64, 8), (DATA + 72, 4), (DATA + 80, 2)];
/// The guest ends when the VMM sets this word.
const STOP: u64 = DATA + 128;
/// How often the VMM copies each word.
const COPIES: usize = 50_000;

/// An aligned copy of 2, 4 or 8 bytes is one access. The VMM and the guest store zeros and ones in
/// turns, and neither ever reads a word of some zeros and some ones.
pub fn aligned_copies_do_not_tear<B: Backend>(backend: &B) -> Outcome {
    let code = assemble(|a| {
        let (mut again, mut torn) = (a.create_label(), a.create_label());
        a.mov(rdi, DATA)?;
        // The exit code, until a word is torn.
        a.xor(ecx, ecx)?;
        a.xor(eax, eax)?;
        a.set_label(&mut again)?;
        a.not(rax)?;
        a.mov(qword_ptr(rdi), rax)?;
        a.mov(dword_ptr(rdi + 8), eax)?;
        a.mov(word_ptr(rdi + 16), ax)?;
        // The successor of a word that is not torn is 0 or 1.
        a.mov(rbx, qword_ptr(rdi + 64))?;
        a.inc(rbx)?;
        a.cmp(rbx, 1)?;
        a.ja(torn)?;
        a.mov(ebx, dword_ptr(rdi + 72))?;
        a.inc(ebx)?;
        a.cmp(ebx, 1)?;
        a.ja(torn)?;
        a.mov(bx, word_ptr(rdi + 80))?;
        a.inc(bx)?;
        a.cmp(bx, 1)?;
        a.ja(torn)?;
        a.cmp(dword_ptr(rdi + (STOP - DATA) as i32), 0)?;
        a.je(again)?;
        a.dec(ecx)?;
        a.set_label(&mut torn)?;
        a.inc(ecx)?;
        a.mov(eax, ecx)?;
        a.mov(dx, 0xf4)?;
        a.out(dx, eax)?;
        a.hlt()
    });
    let backend = backend.clone();
    within(move || {
        let request = Request::new(MIB, MIB, 1, "");
        let host = |running: &Running<'_, B>| copy_both_ways::<B>(running);
        let (finished, ()) = beside(&backend, &request, &image(&code), Start::Free, host)?;
        let _ = finished.passed();
        Ok(())
    })
}

/// Copies each word, once the guest has begun to store, and then has the guest end.
fn copy_both_ways<B: Backend>(running: &Running<'_, B>) {
    let vm = running.vm;
    let read = |at, size: usize| {
        let mut word = [0; 8];
        vm.read(Gpa::truncate(at), &mut word[..size])
            .expect("guest memory");
        let whole = word[..size] == [word[0]; 8][..size];
        assert!(whole, "torn: {:02x?}", &word[..size]);
        word[0]
    };
    let write = |at, bytes: &[u8]| vm.write(Gpa::truncate(at), bytes).expect("guest memory");
    while read(DATA, 8) == 0 && !running.is_over() {
        std::thread::yield_now();
    }
    let mut byte = 0;
    for _ in 0..COPIES {
        byte = !byte;
        for (at, size) in BY_HOST {
            write(at, &[byte; 8][..size]);
        }
        for (at, size) in BY_GUEST {
            read(at, size);
        }
    }
    write(STOP, &[1]);
}

/// `verify` finds any page that was lost, stale or another's.
pub fn nothing_is_lost_at_4x_overcommit<B: Backend>(backend: &B) -> Outcome {
    verify(backend, 1, Duration::ZERO)
}

/// The same with two vCPUs, while pages take a moment to come.
pub fn nothing_is_lost_with_late_pages<B: Backend>(backend: &B) -> Outcome {
    verify(backend, 2, Duration::from_micros(200))
}

fn verify<B: Backend>(backend: &B, vcpus: usize, latency: Duration) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            latency,
            ..Request::new(16, 4, vcpus, "rounds=1")
        };
        let finished = run(&backend, &request, &guest("verify"))?.passed();
        let brought_back = finished.vm.stats().pages_in;
        assert!(brought_back > 1000, "{brought_back} pages");
        Ok(())
    })
}

/// The VMM's own accesses are refused where there is no slot, with the address.
pub fn memory_outside_of_slots_is_refused<B: Backend>(backend: &B) -> Outcome {
    let Made { vm, .. } = backend.make(&Request::new(MIB, MIB, 1, ""), &guest("hello"))?;
    let end = Gpa::truncate(MIB << 20);
    let refused = |result: Result<(), MemoryError>| {
        assert!(matches!(result, Err(MemoryError::NoSlot(_))), "{result:?}");
    };
    refused(vm.write(end, &[1]));
    refused(vm.read(end, &mut [0]));
    // Half inside.
    let last = Gpa::truncate((MIB << 20) - 4);
    refused(vm.read(last, &mut [0; 8]));
    assert_eq!(vm.read(last, &mut [0; 4]), Ok(()));
    Ok(())
}
