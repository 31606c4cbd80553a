//! Random threads of a VM against a plain model.

use crate::fill::all;
use crate::vmm::{Bed, Memory, Vmm, Words, or_skip, removals, word};
use fastrand::Rng;
use lacuna_addr::{Level, PageCount};
use lacuna_pager::{Config, Image};
use lacuna_skip::test;
use lacuna_source::{Faults, Injected};
use lacuna_sys::Userfaultfd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Pages of each thread. No other thread uses them, so the thread's model is exact.
const PAGES: u64 = 48;
const THREADS: u64 = 3;

/// Reads, writes and removes pages, and checks every byte that it reads. Without events of removals
/// (`touches`), a page must be in place before it is removed, or its content comes later. Returns
/// the longest time of a step.
pub fn use_pages(memory: Memory, (first, touches): (u64, bool), seed: u64) -> Duration {
    let (mut rng, mut longest) = (Rng::with_seed(seed), Duration::ZERO);
    let mut model: Vec<u64> = (first..first + PAGES).map(word).collect();
    for step in 0..600 {
        let (at, began) = (rng.u64(0..PAGES), Instant::now());
        match rng.u8(0..8) {
            0 => {
                memory.write(first + at, step + 1);
                model[at as usize] = step + 1;
            }
            1 => {
                let pages = rng.u64(1..=(PAGES - at).min(4));
                if touches {
                    (at..at + pages).for_each(|at| _ = memory.read_whole(first + at));
                }
                memory.discard(first + at, pages);
                model[at as usize..(at + pages) as usize].fill(0);
            }
            _ => {
                let found = memory.read_whole(first + at);
                assert_eq!(
                    found, model[at as usize],
                    "seed {seed}, step {step}, page {at}"
                );
            }
        }
        longest = longest.max(began.elapsed());
    }
    for at in 0..PAGES {
        assert_eq!(
            memory.read_whole(first + at),
            model[at as usize],
            "seed {seed}, page {at}"
        );
    }
    longest
}

fn random_threads((uffd, touches): (Userfaultfd, bool), is_filled: bool, seed: u64) {
    let faults = Faults {
        seed,
        reordering: 0.3,
        ..Faults::latency(Duration::from_micros(20))
    };
    let pages = PAGES * THREADS;
    let source = || Arc::new(Injected::new(Words, faults.clone()).unwrap());
    let image = Image {
        fill: is_filled.then(|| all(source())),
        ..Image::new(source(), PageCount::new(pages))
    };
    let bed = Bed::of(image, Config::default());
    let memory = Memory::anonymous(pages, 4096);
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L4K);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || use_pages(memory, (thread * PAGES, touches), seed << 8 | thread));
        }
    });
    assert_eq!(bed.said(), [""; 0]);
}

#[test]
fn every_byte_is_right() {
    for seed in 0..4 {
        random_threads((removals(), false), false, seed);
    }
}

#[test]
fn every_byte_is_right_without_events_of_removals() {
    for seed in 0..4 {
        random_threads((or_skip(Userfaultfd::open_user()), true), false, seed);
    }
}

#[test]
fn every_byte_is_right_beside_a_fill() {
    for seed in 4..8 {
        random_threads((removals(), false), true, seed);
    }
}
