//! The time until an idle thread runs after it is woken.

use crate::cores::pin;
use crate::experiment::{LabError, LabResult};
use rustix::event::{EventfdFlags, eventfd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The sleep of the thread before each wake-up: about as long as a page takes through a queue.
const GAP: Duration = Duration::from_micros(25);
const WAKES: u32 = 300;

/// The mean time from the wake-up call until a thread on another, idle core runs, in microseconds.
pub fn wake_up_us() -> LabResult<f64> {
    let failed = LabError::io("eventfd");
    let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(&failed)?;
    let ring = || rustix::io::write(&bell, &1_u64.to_ne_bytes()).map_err(&failed);
    let (epoch, woken_at, is_over) = (Instant::now(), AtomicU64::new(0), AtomicBool::new(false));
    let now = || epoch.elapsed().as_nanos() as u64;
    let wake = || {
        pin(0);
        let mut sum = 0;
        for _ in 0..WAKES {
            let (before, pause) = (woken_at.load(Ordering::Acquire), Instant::now());
            while pause.elapsed() < GAP {
                std::hint::spin_loop();
            }
            let began = now();
            ring()?;
            while woken_at.load(Ordering::Acquire) == before {
                std::hint::spin_loop();
            }
            sum += woken_at.load(Ordering::Acquire).saturating_sub(began);
        }
        Ok::<_, LabError>(sum as f64 / f64::from(WAKES) / 1e3)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            while !is_over.load(Ordering::Acquire) {
                // After an error there is nothing to wait for.
                let _ = rustix::io::read(&bell, &mut [0; 8]);
                woken_at.store(now(), Ordering::Release);
            }
        });
        let mean = scope.spawn(wake).join();
        is_over.store(true, Ordering::Release);
        ring()?;
        mean.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
