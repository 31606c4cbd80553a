use super::*;
use crate::run::run_one;
use crate::{Ending, FaultToken, MissingMemory, PlatformDevices, TokenError};
use lacuna_addr::Gpa;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::thread;

/// The test's view of its vCPUs.
#[derive(Default)]
struct Seen {
    kicked: [AtomicBool; VCPUS],
    /// vCPUs that execute guest code.
    inside: AtomicUsize,
    runs: AtomicU64,
}

const VCPUS: usize = 3;

impl Kick for Seen {
    fn kick(&self, index: usize) {
        self.kicked[index].store(true, Ordering::SeqCst);
    }

    fn kick_all(&self) {
        (0..VCPUS).for_each(|index| self.kick(index));
    }
}

/// Writes to a device again and again until it is kicked.
struct Busy {
    index: usize,
    seen: Arc<Seen>,
}

impl Vcpu for Busy {
    fn index(&self) -> usize {
        self.index
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        self.seen.inside.fetch_add(1, Ordering::SeqCst);
        self.seen.runs.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        self.seen.inside.fetch_sub(1, Ordering::SeqCst);
        Ok(
            match self.seen.kicked[self.index].swap(false, Ordering::SeqCst) {
                true => Exit::Interrupted,
                false => Exit::MmioWrite {
                    gpa: Gpa::truncate(0xd000_0000),
                    width: crate::Width::Long,
                    value: 0,
                },
            },
        )
    }

    fn complete_read(&mut self, _value: u64) {}

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        None
    }

    fn accept(&mut self, _token: FaultToken) -> Result<(), TokenError> {
        Err(TokenError::Unknown)
    }
}

fn runs<R: Send>(body: impl FnOnce(&Pause<Busy>, &Seen, &PlatformDevices) -> R + Send) -> R {
    let (result, back) = runs_with(Pause::default(), body);
    assert_eq!(back, VCPUS, "every vCPU comes back");
    result
}

/// Also returns the number of returned vCPUs.
fn runs_with<R: Send>(
    pause: Pause<Busy>,
    body: impl FnOnce(&Pause<Busy>, &Seen, &PlatformDevices) -> R + Send,
) -> (R, usize) {
    let seen = Arc::new(Seen::default());
    let devices = PlatformDevices::new(|_: &str| {});
    let busy = |index| Busy {
        index,
        seen: Arc::clone(&seen),
    };
    pause.enter(VCPUS);
    thread::scope(|scope| {
        let start = |vcpu| {
            let (devices, seen, pause) = (&devices, &*seen, &pause);
            scope.spawn(move || run_one(vcpu, devices, seen, pause))
        };
        let threads: Vec<_> = (0..VCPUS).map(busy).map(start).collect();
        while seen.runs.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        let result = body(&pause, &seen, &devices);
        devices.end(Ending::Stopped, &*seen);
        let joined = threads
            .into_iter()
            .filter_map(|t| t.join().expect("no panic"));
        (result, joined.count())
    })
}

#[test]
fn no_vcpu_runs_in_a_pause_and_all_run_after_it() {
    runs(|pause, seen, _| {
        for _ in 0..200 {
            let mut paused = pause.begin(seen).expect("it runs");
            let numbers: Vec<_> = paused.vcpus().iter().map(Vcpu::index).collect();
            assert_eq!(numbers, [0, 1, 2]);
            let before = seen.runs.load(Ordering::SeqCst);
            thread::yield_now();
            assert_eq!(seen.inside.load(Ordering::SeqCst), 0);
            assert_eq!(seen.runs.load(Ordering::SeqCst), before);
            drop(paused);
            while seen.runs.load(Ordering::SeqCst) == before {
                thread::yield_now();
            }
        }
    });
}

#[test]
fn two_controllers_take_turns() {
    runs(|pause, seen, _| {
        let holders = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let paused = pause.begin(seen).expect("it runs");
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        thread::yield_now();
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(paused);
                    }
                });
            }
        });
    });
}

/// The run may end in a pause. Then the vCPUs leave after it, and another pause finds none.
#[test]
fn a_run_that_ends_in_a_pause() {
    runs(|pause, seen, devices| {
        let paused = pause.begin(seen).expect("it runs");
        devices.end(Ending::Stopped, seen);
        drop(paused);
        while let Some(paused) = pause.begin(seen) {
            drop(paused);
        }
    });
    assert!(
        Pause::<Busy>::default().begin(&Seen::default()).is_none(),
        "not begun"
    );
}

/// Without patience, the run ends without the vCPUs of a forgotten or kept pause.
#[test]
fn a_forgotten_pause_ends_with_the_run() {
    let pause = || Pause {
        patience: Duration::ZERO,
        ..Pause::default()
    };
    let (_, back) = runs_with(pause(), |pause, seen, devices| {
        std::mem::forget(pause.begin(seen));
        thread::scope(|scope| {
            let another = scope.spawn(|| pause.begin(seen).is_none());
            devices.end(Ending::Stopped, seen);
            assert!(another.join().expect("no panic"), "the run is over");
        });
    });
    assert_eq!(back, 0);
    let (_, back) = runs_with(pause(), |pause, seen, devices| {
        let paused = pause.begin(seen).expect("it runs");
        devices.end(Ending::Stopped, seen);
        assert!(pause.begin(seen).is_none(), "every thread has ended");
        drop(paused);
        assert!(pause.begin(seen).is_none(), "its vCPUs have no threads");
    });
    assert_eq!(back, 0);
}
