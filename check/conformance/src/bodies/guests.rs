//! Whole guests that check themselves.

use std::thread;
use std::time::Duration;

use lacuna_guest::status::MAGIC;
use lacuna_machine::{Ending, GuestMemory as _, Vm as _};

use super::Outcome;
use crate::backend::{Backend, Request};
use crate::running::{Start, beside, guest, run, within};

/// The smallest guest boots, prints and announces its status page.
pub fn hello_prints_its_line<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let finished = run(
            &backend,
            &Request::new(32, 32, 1, ""),
            &guest(backend.arch(), "hello"),
        )?
        .passed();
        let printed = finished.printed.join("\n").to_lowercase();
        assert!(printed.contains("hello"), "{printed}");
        assert!(finished.status.is_some(), "it announces its status page");
        assert_eq!(finished.vm.stats().pages_in, 0, "everything fits");
        Ok(())
    })
}

fn passes<B: Backend>(backend: &B, request: Request, name: &'static str) -> Outcome {
    let backend = backend.clone();
    within(move || {
        run(&backend, &request, &guest(backend.arch(), name))
            .map(|finished| drop(finished.passed()))
    })
}

/// Each of two vCPUs changes code that the other executes.
pub fn modified_code_is_seen<B: Backend>(backend: &B) -> Outcome {
    passes(backend, Request::new(16, 16, 2, "iters=50"), "smc")
}

/// Litmus tests of the architecture's memory order. On x86-64 also locked instructions that cross a
/// cache line.
pub fn memory_order_and_split_locks<B: Backend>(backend: &B) -> Outcome {
    passes(
        backend,
        Request::new(16, 16, 2, "iters=300 adds=300"),
        "litmus",
    )
}

/// Its vCPUs compute, halt, or wait for pages.
pub fn a_kick_ends_an_endless_guest<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            latency: Duration::from_millis(1),
            ..Request::new(16, 4, 2, "seconds=3600 workers=1")
        };
        let (finished, ()) = beside(
            &backend,
            &request,
            &guest(backend.arch(), "bm"),
            Start::Free,
            |running| {
                while running.vm.stats().pages_in < 100 && !running.is_over() {
                    thread::sleep(Duration::from_millis(1));
                }
                running.devices.end(Ending::Stopped, running.vm);
            },
        )?;
        let ending = finished.ending;
        assert!(matches!(ending, Ending::Stopped), "{ending:?}");
        Ok(())
    })
}

/// The VMM reads and writes memory of a running guest.
pub fn the_watcher_reads_and_writes_guest_memory<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request::new(16, 4, 1, "seconds=3600");
        let (_, seen) = beside(
            &backend,
            &request,
            &guest(backend.arch(), "bm"),
            Start::Free,
            |running| {
                let mut seen = 0_u8;
                while seen < 20 && !running.is_over() {
                    thread::sleep(Duration::from_millis(5));
                    let Some(gfn) = running.devices.status_page() else {
                        continue;
                    };
                    let mut magic = [0; 8];
                    running
                        .vm
                        .read(gfn.gpa(), &mut magic)
                        .expect("guest memory");
                    seen += u8::from(u64::from_le_bytes(magic) == MAGIC);
                    // The last entry of the page is unused.
                    let at = gfn.gpa().checked_add(4080).expect("inside of a page");
                    running.vm.write(at, &[seen; 16]).expect("guest memory");
                    let mut back = [0; 16];
                    running.vm.read(at, &mut back).expect("guest memory");
                    assert_eq!(back, [seen; 16]);
                }
                running.devices.end(Ending::Stopped, running.vm);
                seen
            },
        )?;
        assert_eq!(seen, 20);
        Ok(())
    })
}
