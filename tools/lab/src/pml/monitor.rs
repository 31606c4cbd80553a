//! The score of a guest beside a monitor that harvests once a period, in one VM of any backend.
//!
//! ```text
//! slice   settle ─ switch on ─┬─ period ─ harvest ─┬─ ... ─ switch off
//!                             └────── counted ─────┘
//! ```

use crate::experiment::LabResult;
use crate::session::Session;
use lacuna::Vm;
use lacuna::dirty::{Logging, harvest, set_logging_everywhere};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// The times of a slice.
#[derive(Clone, Copy)]
pub struct Pace {
    pub period: Duration,
    pub periods: u32,
    /// The guest's uncounted time before the slice.
    pub settle: Duration,
}

/// What the guest did in a slice: transactions a second, the same of the vCPUs' processor time,
/// pages dirtied a second, and milliseconds a harvest.
pub type Slice = [f64; 4];
pub const PER_S: usize = 0;
pub const PER_CPU_S: usize = 1;
pub const DIRTIED: usize = 2;
pub const HARVEST: usize = 3;

/// One slice. If slots log, the calling thread is the monitor.
pub fn slice<V: Vm>(session: &Session<'_, V>, pace: Pace, logs: bool) -> LabResult<Slice> {
    let Session { guest, vm, .. } = session;
    guest.run_for(pace.settle)?;
    if logs {
        set_logging_everywhere(*vm, Logging::LAZY)?;
    }
    let (before, cpu) = (guest.count()?, vcpu_time());
    let (mut dirtied, mut harvesting) = (0, Duration::ZERO);
    for period in 1..=pace.periods {
        let due = before.at + pace.period * period;
        guest.run_for(due.saturating_duration_since(Instant::now()))?;
        if logs {
            let (start, mut pages) = (Instant::now(), Vec::new());
            harvest(*vm, |id, page| pages.push((id.0, page)))?;
            harvesting += start.elapsed();
            // A page may have several entries.
            pages.sort_unstable();
            pages.dedup();
            dirtied += pages.len();
        }
    }
    let (after, cpu) = (guest.count()?, vcpu_time().saturating_sub(cpu));
    set_logging_everywhere(*vm, Logging::Off)?;
    let seconds = (after.at - before.at).as_secs_f64();
    let rate = after.rates_since(&before)[0];
    Ok([
        rate,
        rate * seconds / cpu.as_secs_f64(),
        dirtied as f64 / seconds,
        harvesting.as_secs_f64() * 1e3 / f64::from(pace.periods),
    ])
}

/// The processor time so far of all threads of the process except the calling one, the monitor.
/// During a measurement only the vCPUs' threads use processor time beside it.
fn vcpu_time() -> Duration {
    let spent = |clock| {
        let time = clock_gettime(clock);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    // The process first: the monitor's time between the two readings is in neither.
    let all = spent(ClockId::ProcessCPUTime);
    all.saturating_sub(spent(ClockId::ThreadCPUTime))
}
