//! Slots, faults, and evicted memory.

use std::sync::Arc;
use std::time::Duration;

use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Arch, Ending, GuestMemory as _, Machine, MemoryError, Vm as _, Width};

use super::Outcome;
use crate::backend::{Backend, Made, Request};
use crate::program::{Assembler, Code, Condition, Label, Reg, assemble, gpa, image, ram};
use crate::running::{Running, Start, beside, guest, run, within};

/// The VM's MiB in this file's tests with their own programs.
const MIB: u64 = 16;
/// The offset at which the program's data begin: behind its code and stack.
const DATA: u64 = 4 << 20;

/// The VMM writes a word into each page, the guest doubles it, and the VMM reads it. Only a quarter
/// of the memory is resident, so every page is evicted and read back on the way.
pub fn every_word_is_where_it_was_written<B: Backend>(backend: &B) -> Outcome {
    let end = MIB << 20;
    let arch = backend.arch();
    let code = assemble(arch, |a| {
        a.set(Reg::A, ram(arch, DATA));
        a.set(Reg::B, ram(arch, end));
        let next = a.here();
        a.load(Width::Quad, Reg::C, Reg::A, 8);
        a.add(Reg::C, Reg::C);
        a.store(Width::Quad, Reg::A, 8, Reg::C);
        a.add_immediate(Reg::A, PAGE_SIZE as u32);
        a.branch(Condition::NotEqual, Reg::A, Reg::B, next);
        a.set(Reg::C, 0);
        a.exit(Reg::C);
    });
    let backend = backend.clone();
    within(move || {
        let request = Request::new(MIB, MIB / 4, 1, "");
        let Made {
            vm, vcpus, beside, ..
        } = backend.make(&request, &image(&code))?;
        let words = || (DATA..end).step_by(PAGE_SIZE).map(|at| at + 8);
        for at in words() {
            vm.write(gpa(arch, at), &at.to_le_bytes())
                .expect("guest memory");
        }
        let devices = lacuna_machine::PlatformDevices::of(arch, |_: &str| ());
        let machine = Machine::new(Arc::clone(&vm), devices).expect("threads");
        let ending = machine.start(vcpus).wait().ending;
        assert!(matches!(ending, Ending::Exited(0)), "{ending:?}");
        for at in words() {
            let mut word = [0; 24];
            vm.read(gpa(arch, at - 8), &mut word).expect("guest memory");
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

/// The words that the guest writes, by size. Each is all zeros or all ones.
const BY_GUEST: [(u64, usize); 3] = [(DATA, 8), (DATA + 8, 4), (DATA + 16, 2)];
/// The words that the VMM writes, in the same way.
const BY_HOST: [(u64, usize); 3] = [(DATA + 64, 8), (DATA + 72, 4), (DATA + 80, 2)];
/// The guest ends when the VMM sets this word.
const STOP: u64 = DATA + 128;
/// How often the VMM copies each word.
const COPIES: usize = 50_000;

/// An aligned copy of 2, 4 or 8 bytes is one access. The VMM and the guest store zeros and ones in
/// turns, and neither ever reads a mixed word.
pub fn aligned_copies_do_not_tear<B: Backend>(backend: &B) -> Outcome {
    let arch = backend.arch();
    let code = torn_words(arch);
    let backend = backend.clone();
    within(move || {
        let request = Request::new(MIB, MIB, 1, "");
        let host = |running: &Running<'_, B>| copy_both_ways::<B>(arch, running);
        let (finished, ()) = beside(&backend, &request, &image(&code), Start::Free, host)?;
        let _ = finished.passed();
        Ok(())
    })
}

/// Stores words of zeros and of ones, and ends with code 1 when it loads a word of both.
fn torn_words(arch: Arch) -> Code {
    let offset = |at: u64| (at - DATA) as u32;
    assemble(arch, |a| {
        let torn = a.label();
        a.set(Reg::A, ram(arch, DATA));
        a.set(Reg::B, 0);
        a.set(Reg::C, 0);
        let again = a.here();
        a.not(Reg::B);
        for (at, size) in BY_GUEST {
            a.store(width(size), Reg::A, offset(at), Reg::B);
        }
        for (at, size) in BY_HOST {
            a.load(width(size), Reg::D, Reg::A, offset(at));
            leave_if_torn(a, width(size), torn);
        }
        a.load(Width::Long, Reg::D, Reg::A, offset(STOP));
        a.branch(Condition::Equal, Reg::D, Reg::C, again);
        a.exit(Reg::C);
        a.place(torn);
        a.set(Reg::C, 1);
        a.exit(Reg::C);
    })
}

const fn width(bytes: usize) -> Width {
    match bytes {
        2 => Width::Word,
        4 => Width::Long,
        _ => Width::Quad,
    }
}

/// Goes to `torn` unless D is C, which is zero, or all ones.
fn leave_if_torn(a: &mut Assembler, width: Width, torn: Label) {
    let whole = a.label();
    a.branch(Condition::Equal, Reg::D, Reg::C, whole);
    a.set(Reg::E, width.ones());
    a.branch(Condition::NotEqual, Reg::D, Reg::E, torn);
    a.place(whole);
}

/// Waits until the guest stores, copies each word, and then ends the guest.
fn copy_both_ways<B: Backend>(arch: Arch, running: &Running<'_, B>) {
    let vm = running.vm;
    let read = |at, size: usize| {
        let mut word = [0; 8];
        vm.read(gpa(arch, at), &mut word[..size])
            .expect("guest memory");
        let whole = word[..size] == [word[0]; 8][..size];
        assert!(whole, "torn: {:02x?}", &word[..size]);
        word[0]
    };
    let write = |at, bytes: &[u8]| vm.write(gpa(arch, at), bytes).expect("guest memory");
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

/// `verify` finds any lost, stale or misplaced page.
pub fn nothing_is_lost_at_4x_overcommit<B: Backend>(backend: &B) -> Outcome {
    verify(backend, 1, Duration::ZERO)
}

/// The same with two vCPUs, while pages take a moment to arrive.
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
        let finished = run(&backend, &request, &guest(backend.arch(), "verify"))?.passed();
        let brought_back = finished.vm.stats().pages_in;
        assert!(brought_back > 1000, "{brought_back} pages");
        Ok(())
    })
}

/// The VMM's own accesses outside of slots are refused, with the address.
pub fn memory_outside_of_slots_is_refused<B: Backend>(backend: &B) -> Outcome {
    let Made { vm, .. } = backend.make(
        &Request::new(MIB, MIB, 1, ""),
        &guest(backend.arch(), "hello"),
    )?;
    let end = gpa(backend.arch(), MIB << 20);
    let refused = |result: Result<(), MemoryError>| {
        assert!(matches!(result, Err(MemoryError::NoSlot(_))), "{result:?}");
    };
    refused(vm.write(end, &[1]));
    refused(vm.read(end, &mut [0]));
    // Half inside.
    let last = gpa(backend.arch(), (MIB << 20) - 4);
    refused(vm.read(last, &mut [0; 8]));
    assert_eq!(vm.read(last, &mut [0; 4]), Ok(()));
    Ok(())
}
