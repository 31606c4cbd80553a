//! Host threads on a real userfaultfd do the work of vCPU threads, without a guest.

use super::PAGES;
use super::sim::Tenths;
use crate::base::pin;
use crate::experiment::LabError;
use crate::native::thread_cpu_ns;
use lacuna_addr::Hva;
use lacuna_sys::{Errno, MissingArea, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// How long a reader sleeps before it checks whether it is to end.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
/// Faults that one call reads, at most.
pub const MOST_AT_ONCE: usize = 64;
/// Bytes of a thread's stack: there are hundreds of threads.
const STACK: usize = 128 << 10;

/// Where threads run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cores {
    /// Where the kernel's scheduler puts them.
    Any,
    /// All on one core.
    Same,
    /// The reader on the first core, and the touching threads on the second.
    Across,
}

impl Cores {
    fn pin_reader(self) {
        if self != Self::Any {
            pin(0);
        }
    }

    fn pin_toucher(self) {
        match self {
            Self::Any => {}
            Self::Same => pin(0),
            Self::Across => pin(1),
        }
    }
}

/// Nanoseconds for the transfer of a cache line between two cores: two threads write to it in
/// turns.
pub fn line_ns() -> f64 {
    const TURNS: u64 = 20_000;
    let turn = AtomicU64::new(0);
    let play = |mine: u64, core: usize| {
        pin(core);
        let began = Instant::now();
        for at in (mine..TURNS).step_by(2) {
            while turn.load(Ordering::Acquire) != at {
                std::hint::spin_loop();
            }
            turn.store(at + 1, Ordering::Release);
        }
        began.elapsed().as_nanos() as f64 / TURNS as f64
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| play(1, 1));
        let this = scope.spawn(|| play(0, 0));
        let _ = joined(other);
        joined(this)
    })
}

/// The cost of waking a thread on a core that has been idle for some time, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct IdleWake {
    /// CPU time of the wake-up call.
    pub call: f64,
    /// From the beginning of the call until the thread runs.
    pub until_it_runs: Tenths,
}

/// Wakes a thread on another core, each time `gap` after it has gone to sleep.
pub fn idle_wake(gap: Duration) -> Result<IdleWake, LabError> {
    const WAKES: u32 = 300;
    let failed = refused("eventfd");
    let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(&failed)?;
    let ring = || rustix::io::write(&bell, &1_u64.to_ne_bytes()).map_err(&failed);
    let (epoch, woken_at, is_over) = (Instant::now(), AtomicU64::new(0), AtomicBool::new(false));
    let now = || epoch.elapsed().as_nanos() as u64;
    let wake = || {
        pin(0);
        let (mut call, mut until_it_runs) = (0, Vec::new());
        for _ in 0..WAKES {
            let (before, pause) = (woken_at.load(Ordering::Acquire), Instant::now());
            while pause.elapsed() < gap {
                std::hint::spin_loop();
            }
            let (began, began_cpu) = (now(), thread_cpu_ns());
            ring()?;
            call += thread_cpu_ns() - began_cpu;
            while woken_at.load(Ordering::Acquire) == before {
                std::hint::spin_loop();
            }
            let took = woken_at.load(Ordering::Acquire).saturating_sub(began);
            until_it_runs.push(took as f64);
        }
        Ok::<_, LabError>(IdleWake {
            call: call as f64 / f64::from(WAKES),
            until_it_runs: Tenths::of(until_it_runs),
        })
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
        let cost = joined(scope.spawn(wake));
        is_over.store(true, Ordering::Release);
        ring()?;
        cost
    })
}

/// The mean time until an idle thread runs after it is woken, in microseconds. Its core has been
/// idle for about as long as a page takes through a queue.
pub fn wake_up_us() -> Result<f64, LabError> {
    let wake = idle_wake(Duration::from_micros(25))?;
    Ok(wake.until_it_runs.mean() / 1e3)
}

/// The times of one run, in nanoseconds for each page.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// By the wall clock.
    pub wall: f64,
    /// CPU time of the touching threads.
    pub touchers: f64,
    /// CPU time of the reader.
    pub reader: f64,
}

impl Took {
    /// Pages a second by the wall clock.
    pub fn rate(&self) -> f64 {
        1e9 / self.wall
    }

    /// Pages a second if the touching threads had this number of cores for themselves.
    pub fn rate_on(&self, cores: usize) -> f64 {
        cores as f64 * 1e9 / self.touchers
    }
}

/// The error of a system call.
pub fn refused(what: &'static str) -> impl Fn(Errno) -> LabError {
    move |errno| LabError::Io {
        what: what.into(),
        source: errno.into(),
    }
}

/// Memory with this number of missing pages.
pub fn area(pages: u64) -> Result<MissingArea, LabError> {
    MissingArea::new(pages).map_err(refused("userfaultfd"))
}

/// `count` threads touch their shares of `area`, and one reader provides the pages.
pub fn through_queue(
    area: &MissingArea,
    pages: u64,
    count: usize,
    cores: Cores,
) -> Result<Took, LabError> {
    area.empty().map_err(refused("madvise"))?;
    let (is_over, reader_ns) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            cores.pin_reader();
            let before = thread_cpu_ns();
            let done = read(area, &is_over);
            reader_ns.store(thread_cpu_ns() - before, Ordering::Relaxed);
            done
        });
        let took = together(
            count,
            pages,
            |page| {
                area.touch(page);
                Ok(())
            },
            || cores.pin_toucher(),
        );
        is_over.store(true, Ordering::Relaxed);
        joined(reader)?;
        let took = took?;
        Ok(Took {
            reader: reader_ns.load(Ordering::Relaxed) as f64 / pages as f64,
            ..took
        })
    })
}

/// `count` threads fill and touch their shares themselves, as a vCPU's thread does after an exit.
pub fn in_place(area: &MissingArea, pages: u64, count: usize) -> Result<Took, LabError> {
    area.empty().map_err(refused("madvise"))?;
    let fill = |page| {
        copy(area, page)?;
        area.touch(page);
        Ok(())
    };
    together(count, pages, fill, || ())
}

/// Provides page `page`.
pub fn copy(area: &MissingArea, page: u64) -> Result<(), LabError> {
    fill(area.userfaultfd(), area.page(page))
}

fn fill(uffd: &Userfaultfd, page: Hva) -> Result<(), LabError> {
    loop {
        match uffd.copy(&PAGES[0], page) {
            // The address space is changing.
            Err(Errno::AGAIN) => thread::yield_now(),
            done => return done.map_err(refused("UFFDIO_COPY")),
        }
    }
}

/// The work of a reader.
fn read(area: &MissingArea, is_over: &AtomicBool) -> Result<(), LabError> {
    let uffd = area.userfaultfd();
    let mut faults = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        wait_for_fault(area);
        uffd.faults(&mut faults)
            .map_err(refused("read a userfaultfd"))?;
        for fault in faults.drain(..) {
            fill(uffd, fault.page)?;
        }
    }
    Ok(())
}

/// Sleeps until a fault can be read, or some milliseconds.
fn wait_for_fault(area: &MissingArea) {
    ask(area, &LOOK);
}

fn ask(area: &MissingArea, limit: &Timespec) {
    let mut fds = [PollFd::new(area.userfaultfd(), PollFlags::IN)];
    // After an error the caller reads, and finds no fault.
    let _ = poll(&mut fds, Some(limit));
}

/// Calls `page` for all pages, from `count` threads with a share each.
fn together(
    count: usize,
    pages: u64,
    page: impl Fn(u64) -> Result<(), LabError> + Sync,
    prepare: impl Fn() + Sync,
) -> Result<Took, LabError> {
    let (share, line) = (pages / count as u64, Barrier::new(count));
    let work = |first: u64| {
        prepare();
        line.wait();
        let (began, before) = (Instant::now(), thread_cpu_ns());
        (first..first + share).try_for_each(&page)?;
        Ok::<_, LabError>((began, Instant::now(), thread_cpu_ns() - before))
    };
    let spans = thread::scope(|scope| {
        let start = |index: u64| {
            let work = &work;
            let thread = Builder::new().stack_size(STACK);
            let thread = thread.spawn_scoped(scope, move || work(index * share));
            thread.expect("room for a few threads")
        };
        let threads: Vec<_> = (0..count as u64).map(start).collect();
        let spans = threads.into_iter().map(joined);
        spans.collect::<Result<Vec<_>, LabError>>()
    })?;
    let first = spans.iter().map(|span| span.0).min();
    let last = spans.iter().map(|span| span.1).max();
    let (first, last) = first.zip(last).expect("at least one thread");
    let each = (share * count as u64) as f64;
    let cpu: u64 = spans.iter().map(|span| span.2).sum();
    Ok(Took {
        wall: (last - first).as_nanos() as f64 / each,
        touchers: cpu as f64 / each,
        reader: 0.0,
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The cost of the wait queues if `sleepers` threads wait for their pages: CPU time in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct QueueCosts {
    /// Reading one fault, with many read by one call.
    pub read_each: f64,
    /// The calls that ask for faults when there is none.
    pub read_none: f64,
    /// A call that wakes no thread: it takes the lock and passes all sleeping threads.
    pub scan: f64,
}

/// Measures [`QueueCosts`] with `calls` calls.
pub fn queue_costs(sleepers: u64, calls: u32) -> Result<QueueCosts, LabError> {
    let area = area(sleepers + 1)?;
    thread::scope(|scope| {
        for index in 0..sleepers {
            let area = &area;
            let thread = Builder::new().stack_size(STACK);
            let started = thread.spawn_scoped(scope, move || area.touch(index));
            if let Err(source) = started {
                // The threads before this one wait for their pages.
                provide_all(area, index)?;
                let what = format!("start {sleepers} threads that wait for a page");
                return Err(LabError::Io { what, source });
            }
        }
        let costs = with_sleepers(&area, sleepers, calls);
        provide_all(&area, sleepers)?;
        costs
    })
}

fn provide_all(area: &MissingArea, pages: u64) -> Result<(), LabError> {
    (0..pages).try_for_each(|page| copy(area, page))
}

fn with_sleepers(area: &MissingArea, sleepers: u64, calls: u32) -> Result<QueueCosts, LabError> {
    // Most threads sleep when a call reads 64 faults; the loop waits for the others.
    thread::sleep(Duration::from_millis(2 + sleepers / 4));
    let (uffd, mut faults) = (area.userfaultfd(), Vec::new());
    let mut read_ns = 0;
    while (faults.len() as u64) < sleepers {
        // The first call finds cold caches. So it counts only if there is no other.
        if faults.len() <= MOST_AT_ONCE {
            read_ns = 0;
        }
        let began = thread_cpu_ns();
        wait_for_fault(area);
        let read = uffd.faults(&mut faults);
        read.map_err(refused("read a userfaultfd"))?;
        read_ns += thread_cpu_ns() - began;
    }
    let counted = match sleepers.checked_sub(MOST_AT_ONCE as u64) {
        None | Some(0) => sleepers,
        Some(later) => later,
    };
    let began = thread_cpu_ns();
    for _ in 0..calls {
        ask(area, &NOW);
        let none = uffd.faults(&mut faults);
        none.map_err(refused("read a userfaultfd"))?;
    }
    let read_none = (thread_cpu_ns() - began) as f64 / f64::from(calls);
    let missing = area.page(sleepers);
    let began = thread_cpu_ns();
    for _ in 0..calls {
        uffd.wake(missing).map_err(refused("UFFDIO_WAKE"))?;
    }
    let scan = (thread_cpu_ns() - began) as f64 / f64::from(calls);
    Ok(QueueCosts {
        read_each: read_ns as f64 / counted as f64,
        read_none,
        scan,
    })
}
