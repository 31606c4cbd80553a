//! `verify` runs from every page source, behind a link that delays, loses and reorders requests,
//! while kicks and changes of slots arrive.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lacuna_addr::{GfnRange, Gpa, PageCount};
use lacuna_machine::{Apf, Kick as _, MemorySlots as _, PageSource, SlotFlags, SlotId};
use lacuna_source::{Faults, Injected, Measured, MemoryFile, Peer, Policy, Zeros, serve};

use super::Outcome;
use crate::backend::{Backend, Missing, Origin, Request, exit_on_missing};
use crate::running::{Running, Start, beside, guest, within};

const MIB: u64 = 6;
const VCPUS: usize = 2;
/// A slot to add and remove beside the guest's.
const BESIDE: SlotId = SlotId(9);

/// Most requests take some time, some take several, and one in ten is lost at least once.
fn link<S: PageSource + 'static>(source: S, seed: u64) -> Injected<S> {
    let faults = Faults {
        seed,
        latency: Duration::ZERO..Duration::from_micros(300),
        loss: 0.1,
        resend: Duration::from_millis(2),
        reordering: 0.2,
    };
    Injected::new(source, faults).expect("a thread for the link")
}

/// Zeros, which this process makes.
pub fn verify_from_zeros<B: Backend>(backend: &B) -> Outcome {
    verify(backend, |seed| Box::new(link(Zeros, seed)))
}

/// A sparse memory file.
pub fn verify_from_a_memory_file<B: Backend>(backend: &B) -> Outcome {
    let folder = tempfile::tempdir().expect("a folder for a memory file");
    let path = folder.path().join("memory");
    let file = File::create(&path).expect("a memory file");
    file.set_len(MIB << 20).expect("a sparse file");
    verify(backend, move |seed| {
        let _folder = &folder;
        let pages = PageCount::from_bytes(MIB << 20);
        let file = MemoryFile::open(&path, pages, Policy::default());
        Box::new(link(file.expect("it has the guest's size"), seed))
    })
}

/// A peer over a socket. Its own source loses requests, too.
pub fn verify_from_a_peer<B: Backend>(backend: &B) -> Outcome {
    let folder = tempfile::tempdir().expect("a folder for a socket");
    let path = folder.path().join("peer");
    let pages = PageCount::from_bytes(MIB << 20);
    let listener = UnixListener::bind(&path).expect("a socket");
    let served = Arc::new(link(Zeros, 77));
    let server = serve(listener, pages, served).expect("threads for a server");
    verify(backend, move |seed| {
        let _served = (&folder, &server);
        let peer = Peer::connect(&path, pages, Policy::default());
        Box::new(link(peer.expect("the server runs"), seed))
    })
}

/// With and without exits, and with and without async faults.
fn verify<B: Backend>(
    backend: &B,
    open: impl Fn(u64) -> Box<dyn PageSource> + Send + 'static,
) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let ways = [Missing::Waits, Missing::Exits];
        let ways = ways.into_iter().flat_map(|m| [(m, Apf::Off), (m, Apf::On)]);
        for (seed, (missing, apf)) in (0..).zip(ways) {
            let source = Arc::new(Measured::new(open(seed)));
            let request = Request {
                origin: Some(Origin {
                    source: Arc::clone(&source) as Arc<dyn PageSource>,
                    missing,
                }),
                apf,
                ..Request::new(MIB, MIB, VCPUS, "rounds=1")
            };
            let image = guest(backend.arch(), "verify");
            let (finished, ()) = beside(&backend, &request, &image, Start::Free, disturb)?;
            drop(finished.passed());
            let stats = source.stats();
            assert_eq!(stats.failed, 0, "{missing:?}, {apf:?}: {stats:?}");
            assert!(stats.provided > 600, "{missing:?}, {apf:?}: {stats:?}");
        }
        Ok(())
    })
}

/// Kicks vCPUs, switches the slots' flags, and adds and removes another slot, until the guest ends.
fn disturb<B: Backend>(running: &Running<'_, B>) {
    let vm = running.vm;
    let beside = GfnRange::new(Gpa::truncate(4 << 30).gfn(), 16).expect("pages");
    for round in (0..).take_while(|_| !running.is_over()) {
        vm.kick(round % VCPUS);
        if round % 8 == 3 {
            exit_on_missing(vm, SlotFlags::empty());
        }
        if round % 8 == 7 {
            exit_on_missing(vm, SlotFlags::EXIT_ON_MISSING);
        }
        if round % 16 == 5 {
            let flags = SlotFlags::empty();
            vm.add_memory(BESIDE, beside, flags).expect("room");
            vm.remove_slot(BESIDE).expect("it is there");
        }
        thread::sleep(Duration::from_micros(500));
    }
}
