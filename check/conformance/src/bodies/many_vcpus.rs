//! VMs with as many vCPUs as there can be. Their threads share a few processors of the host, so
//! these guests are small, and a vCPU without work halts.

use std::thread;
use std::time::Duration;

use lacuna_machine::{Apf, CpuModel, VCPUS_MAX};

use super::Outcome;
use super::dirty::Copy;
use super::state::moves;
use crate::backend::{Backend, Request, Tracking};
use crate::running::{Running, Start, beside, guest, run, within};

/// The smallest resident memory of so many vCPUs on soft is 97 MiB. The guest's kernel takes an
/// eighth of the memory, where the stacks of so many threads need 16 MiB.
fn request(words: &str) -> Request {
    Request::new(160, 160, VCPUS_MAX, words)
}

/// The first vCPU starts a thread on each by an interrupt, and the last one interrupts it back.
/// Each vCPU has a ring for the guest's writes.
pub fn each_vcpu_runs_a_thread_and_its_writes_are_logged<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            tracking: Tracking::SmallRing,
            ..request("bytes=4M gate=1")
        };
        let monitor = |running: &Running<'_, B>| {
            running.prepared();
            let (mut copy, mut harvested) = (Copy::begin::<B>(running.vm), 0);
            running.set(1);
            while !running.is_over() {
                thread::sleep(Duration::from_millis(50));
                harvested += copy.harvest::<B>(running.vm);
            }
            (copy, harvested)
        };
        let guest = guest(backend.arch(), "touch");
        let run = beside(&backend, &request, &guest, Start::Free, monitor)?;
        let (finished, (mut copy, mut harvested)) = (run.0.passed(), run.1);
        harvested += copy.harvest::<B>(&finished.vm);
        copy.compare::<B>(&finished.vm);
        assert!(harvested >= 1024, "{harvested} pages");
        for index in 0..VCPUS_MAX {
            let line = format!("RESULT thread=touch{index} cpu={index} pages=4 ");
            let is_there = finished.printed.iter().any(|it| it.starts_with(&line));
            assert!(is_there, "{line}");
        }
        Ok(())
    })
}

/// A thread on each vCPU waits for pages, and each vCPU gets page-ready for each of its pages.
pub fn each_vcpu_gets_async_faults<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let words = format!("faulters={VCPUS_MAX} workers=0 accesses=20 populate=1 processes=0");
        let request = Request {
            apf: Apf::On,
            latency: Duration::from_micros(100),
            ..Request::new(160, 112, VCPUS_MAX, &words)
        };
        let finished = run(&backend, &request, &guest(backend.arch(), "bm"))?.passed();
        let status = finished.status.expect("it announces its status page");
        let (apf, threads) = (status.apf, &status.threads[1..]);
        assert!(apf.not_present as usize > VCPUS_MAX, "{apf:?}");
        assert_eq!(apf.lost, 0, "{apf:?}");
        let on: Vec<u32> = threads.iter().map(|thread| thread.cpu).collect();
        assert_eq!(on, Vec::from_iter(0..VCPUS_MAX as u32));
        let behind = threads.iter().find(|it| it.goal != Some(it.counter));
        assert_eq!(behind, None);
        Ok(())
    })
}

/// The states of all vCPUs go from VM to VM.
pub fn a_guest_moves_with_all_its_vcpus<B: Backend>(backend: &B) -> Outcome {
    let request = request("rounds=8 pages=512");
    let model = CpuModel::Common { tsc_khz: None };
    moves(backend, request, model, "verify")
}
