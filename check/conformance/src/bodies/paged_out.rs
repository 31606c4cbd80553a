//! Linux memory that the VMM pages out beside the guest.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lacuna_addr::PAGE_SIZE;
use lacuna_guest::status::{Apf as Events, Status};
use lacuna_machine::{
    Apf, Ending, GuestMemory as _, MemorySlot, MemorySlots, PlatformDevices, Vm as _,
};
use lacuna_skip::SwapFile;
use lacuna_soft::{LinuxBacking, PrivateFile};

use super::Outcome;
use super::async_faults::contracts;
use super::dirty::follow_while;
use crate::backend::{Backend, Lacks, Made, Request, Tracking};
use crate::moving::{resume, run_for, stop};
use crate::running::{Start, beside, guest, status, within};

/// Longer than a vCPU polls for a page, so the guest is notified.
const LATENCY: Duration = Duration::from_micros(200);
/// More than the guests of this file use.
const SWAP_MIB: u64 = 64;

/// Pages out all memory. Returns how many pages have left.
fn page_out<B: Backend>(vm: &B::Vm) -> u64 {
    let memory = vm.page_out().expect("Linux memory");
    let slots = vm.memory_slots().into_iter();
    let left = slots.map(|slot| memory.page_out(slot.gfns).expect("its slots"));
    left.map(|pages| pages.get()).sum()
}

fn check<B: Backend>(backend: &B) -> Outcome {
    let Made { vm, .. } = backend.make_bare(&Request::new(16, 16, 1, ""))?;
    let pages_out = vm.page_out().map(drop);
    pages_out.ok_or_else(|| Lacks::because("no Linux memory that can be paged out"))
}

/// A file on a disk with the memory of a VM, in the order of its slots.
fn file_of(vm: &impl MemorySlots, read: impl Fn(MemorySlot, &mut [u8])) -> File {
    let file = tempfile::tempfile().expect("a file");
    let mut at = 0;
    for slot in vm.memory_slots() {
        let mut bytes = vec![0; slot.gfns.pages() as usize * PAGE_SIZE];
        read(slot, &mut bytes);
        file.write_all_at(&bytes, at).expect("room for a guest");
        at += bytes.len() as u64;
    }
    // Linux drops only what the disk has.
    file.sync_data().expect("a disk");
    file
}

/// A guest whose memory is a saved guest's file reads all of it, while every page leaves again and
/// again. One thread needs a page, and the others run. They check each word that they read.
pub fn a_paged_out_guest_runs_another_thread<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        check(&backend)?;
        for contract in contracts(backend.arch()) {
            let line = format!("threads=6 bytes=4M tick_us=20000 {contract}");
            let mut request = Request {
                apf: Apf::On,
                latency: LATENCY,
                ..Request::new(24, 24, 1, &line)
            };
            let mut from = backend.make(&request, &guest(backend.arch(), "reads"))?;
            let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
            let reads = |status: &Status| {
                let counters = status.threads.iter().map(|thread| thread.counter);
                counters.sum::<u64>()
            };
            let begun = |made: &Made<B>| {
                status(&*made.vm, &devices).is_some_and(|status| reads(&status) > 0)
            };
            while !begun(&from) {
                run_for(&mut from, &devices, Duration::from_millis(10));
                assert!(devices.ending().is_none(), "{:?}", devices.ending());
            }
            let stopped = stop(&mut from, &devices);
            let file = file_of(&*from.vm, |slot, bytes| {
                let read = from.vm.read(slot.gfns.start().gpa(), bytes);
                read.expect("guest memory");
            });
            drop(from);
            let private = PrivateFile::of_file(file.into(), 0).expect("a file");
            request.backing = Some(LinuxBacking::Private(private));
            let mut made = backend.make_bare(&request)?;
            resume(&mut made, &stopped);
            let vm = Arc::clone(&made.vm);
            let state = || status(&*vm, &devices).expect("it was announced");
            let before = state();
            thread::scope(|scope| {
                scope.spawn(|| run_for(&mut made, &devices, Duration::MAX));
                let new = |now: &Events| now.not_present - before.apf.not_present;
                while devices.ending().is_none() && new(&state().apf) < 200 {
                    page_out::<B>(&vm);
                    // The guest's kernel and its page tables are paged out too, and are awaited.
                    thread::sleep(Duration::from_millis(10));
                }
                devices.end(Ending::Stopped, &*vm);
            });
            let ending = devices.ending();
            assert_eq!(ending, Some(Ending::Stopped), "a word was wrong");
            let (after, stats) = (state(), vm.stats());
            let (not_present, ready) = (after.apf.not_present, after.apf.ready);
            assert!(not_present - ready <= 64, "{contract}: {:?}", after.apf);
            assert!(reads(&after) > reads(&before), "{contract}");
            assert!(stats.pages_out >= 200 && stats.pages_in >= 200, "{stats:?}");
        }
        Ok(())
    })
}

/// A monitor's copy has every write of a guest whose pages leave all the time.
pub fn no_write_is_missed_of_paged_out_pages<B: Backend>(backend: &B) -> Outcome {
    check(backend)?;
    for tracking in [Tracking::WriteProtectBitmap, Tracking::PmlBitmap] {
        follow_while(backend, tracking, |vm| _ = page_out::<B>(vm))?;
    }
    Ok(())
}

/// `verify`, with async faults, in anonymous memory that goes to Linux's swap.
pub fn nothing_is_lost_in_linux_swap<B: Backend>(backend: &B) -> Outcome {
    check(backend)?;
    let _swap = SwapFile::add(SWAP_MIB);
    let backend = backend.clone();
    within(move || {
        for contract in contracts(backend.arch()) {
            let request = Request {
                apf: Apf::On,
                latency: LATENCY,
                ..Request::new(16, 16, 2, &format!("rounds=1 threads=6 {contract}"))
            };
            let image = guest(backend.arch(), "verify");
            let paged = beside(&backend, &request, &image, Start::Free, |running| {
                while !running.is_over() {
                    page_out::<B>(running.vm);
                    thread::sleep(Duration::from_millis(5));
                }
            });
            let stats = paged?.0.passed().vm.stats();
            assert!(stats.pages_out > 100, "{contract}: {stats:?}");
        }
        Ok(())
    })
}
