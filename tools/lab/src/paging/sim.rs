//! A simulation in discrete events: threads fault on missing pages, through one userfaultfd or by
//! exits.
//!
//! ```text
//! thread   fault ─► lock: enqueue ─► wake a reader ─► sleep ............................► fault
//! reader                              look ─► lock: read ─► copy ─► lock: scan ─► wake ─► look
//! ```
//! The lock protects the descriptor's two wait queues. A fill scans them for threads that wait for
//! its page, and all sleeping threads are in them, so the lock is held longer when more threads
//! sleep. A thread needs a core while it works, also while it spins for the lock. Readers and
//! faulting threads have separate cores. Ready threads take them in the order in which they became
//! ready; none is preempted.
//!
//! A thread's own work and the wake-up of an idle core vary as measured. This matters: some threads
//! on one core and their reader either run in step, where both cores sleep once for each batch, or
//! beside each other, where neither sleeps. Variation is what takes them from one to the other.
//!
//! Costs are nanoseconds. `line` is the transfer of a cache line between two cores. It counts once
//! for each sleeping thread that a scan passes, twice for a change of a wait queue (the lock, and
//! the neighbour in the list), and twice for a wake-up.

use fastrand::Rng;
use std::array::from_fn;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Picoseconds of simulated time. They are integers, so that events have one order.
type Ps = u64;

fn ps(ns: f64) -> Ps {
    (ns * 1e3).round().max(0.0) as Ps
}

/// What each step costs, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Costs {
    /// How a thread's own work varies: multiples of its mean, which are the times below.
    pub varies: Tenths,
    /// A thread's work from one fault to the next, without the lock.
    pub fault: f64,
    /// The lock, while a fault is put into the queue.
    pub enqueue: f64,
    /// A reader's calls for one batch of faults.
    pub read: f64,
    /// The lock, for each fault of a batch.
    pub read_each: f64,
    /// Filling a page.
    pub copy: f64,
    /// The lock, while a fill looks for sleeping threads.
    pub scan: f64,
    /// The same for each sleeping thread.
    pub scan_each: f64,
    /// Making a thread ready.
    pub wake: f64,
    /// The same in addition, if a core is idle.
    pub wake_idle: f64,
    /// From then on until the thread runs on the idle core.
    pub idle: Idle,
    /// A core's switch from a sleeping thread to a ready one.
    pub switch: f64,
    /// The transfer of a cache line between two cores.
    pub line: f64,
}

/// A varying figure: ten equally likely values.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Tenths(pub [f64; 10]);

impl Tenths {
    /// The mean of each tenth of `samples`, from the lowest to the highest.
    ///
    /// # Panics
    /// If there are fewer than ten.
    pub fn of(mut samples: Vec<f64>) -> Self {
        assert!(samples.len() >= 10, "ten samples");
        samples.sort_by(f64::total_cmp);
        let len = samples.len();
        Self(from_fn(|i| {
            let tenth = &samples[i * len / 10..(i + 1) * len / 10];
            tenth.iter().sum::<f64>() / tenth.len() as f64
        }))
    }

    /// A constant figure.
    #[cfg(test)]
    pub const fn always(value: f64) -> Self {
        Self([value; 10])
    }

    /// Its mean.
    pub fn mean(self) -> f64 {
        self.0.iter().sum::<f64>() / 10.0
    }

    /// Each value changed by `change`.
    pub fn map(self, change: impl FnMut(f64) -> f64) -> Self {
        Self(self.0.map(change))
    }
}

/// How long it takes until a thread runs on an idle core. The longer a core was idle, the deeper it
/// sleeps.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Idle(
    /// Nanoseconds that the core was idle, rising, and nanoseconds until a thread runs there.
    pub [(f64, Tenths); GAPS],
);

/// Points of an [`Idle`].
pub const GAPS: usize = 5;

impl Idle {
    /// The value number `tenth`: on straight lines between the points, and the nearest point's
    /// value beyond them.
    fn after(&self, gap: f64, tenth: usize) -> f64 {
        let points = &self.0;
        let next = points.partition_point(|point| point.0 <= gap);
        if next == 0 || next == GAPS {
            return points[next.min(GAPS - 1)].1.0[tenth];
        }
        let ((x0, y0), (x1, y1)) = (points[next - 1], points[next]);
        let (y0, y1) = (y0.0[tenth], y1.0[tenth]);
        y0 + (y1 - y0) * (gap - x0) / (x1 - x0)
    }
}

/// The threads and cores that take part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Faulting threads.
    pub threads: usize,
    /// Threads that provide pages.
    pub readers: usize,
    /// Cores for the faulting threads. Each reader has one more.
    pub cores: usize,
    /// The most faults that a reader takes at once.
    pub batch: usize,
}

/// A server of one customer after the other, in the order of their arrival.
#[derive(Default)]
struct Server {
    free_at: Ps,
}

impl Server {
    /// The end of a service requested at `now`. Calls are in the order of `now`.
    fn serve(&mut self, now: Ps, service: Ps) -> Ps {
        self.free_at = self.free_at.max(now) + service;
        self.free_at
    }
}

/// The action of a thread at an event. The thread has a core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Step {
    Runs,
    Faulted,
    Enqueued,
    Sleeps,
    Looks,
    Reads,
    Fills,
    Filled,
    Scanned,
}

#[derive(Default)]
struct Thread {
    /// The thread has left its core, or was never on one.
    sleeps: bool,
    /// Its page was provided before it slept.
    is_woken: bool,
    /// Faults that a reader has read.
    batch: VecDeque<usize>,
}

struct World<'a> {
    costs: &'a Costs,
    batch: usize,
    events: BinaryHeap<Reverse<(Ps, u64, usize, Step)>>,
    /// Numbers events, so that equal times have one order.
    number: u64,
    lock: Server,
    /// Since when each idle core is idle: the faulting threads' cores, and the readers' cores.
    idle_cores: [Vec<Ps>; 2],
    ready: [VecDeque<(usize, Step)>; 2],
    /// Threads from this number on are readers.
    readers_from: usize,
    threads: Vec<Thread>,
    /// Faults that no reader has read.
    pending: VecDeque<usize>,
    /// Threads in the wait queues.
    waiting: usize,
    idle_readers: Vec<usize>,
    done: u64,
    rng: Rng,
}

/// Pages a second through one queue, over `pages` pages after a tenth as many.
///
/// # Panics
/// If there is no thread, no reader, no core or no page.
pub fn queue(costs: &Costs, setting: &Setting, pages: u64) -> f64 {
    let Setting {
        threads,
        readers,
        cores,
        batch,
    } = *setting;
    assert!(threads > 0 && readers > 0 && cores > 0 && batch > 0 && pages > 0);
    let mut world = World {
        costs,
        batch,
        events: BinaryHeap::new(),
        number: 0,
        lock: Server::default(),
        idle_cores: [vec![0; cores], vec![0; readers]],
        ready: Default::default(),
        readers_from: threads,
        threads: (0..threads + readers).map(|_| Thread::default()).collect(),
        pending: VecDeque::new(),
        waiting: 0,
        idle_readers: (threads..threads + readers).collect(),
        done: 0,
        rng: Rng::with_seed(1),
    };
    for thread in &mut world.threads {
        thread.sleeps = true;
    }
    for thread in 0..threads {
        world.make_ready(0, thread, Step::Runs);
    }
    let began = world.run_until(pages / 10);
    let ended = world.run_until(pages / 10 + pages);
    pages as f64 * 1e12 / (ended - began) as f64
}

impl World<'_> {
    /// Runs until `done` pages are provided, and returns the time.
    fn run_until(&mut self, done: u64) -> Ps {
        let mut now = 0;
        while self.done < done {
            let Reverse((at, _, thread, step)) = self.events.pop().expect("a thread continues");
            now = at;
            self.step(at, thread, step);
        }
        now
    }

    /// The kind of core that the thread has: 0 for faulting threads, 1 for readers.
    fn side(&self, thread: usize) -> usize {
        usize::from(thread >= self.readers_from)
    }

    fn at(&mut self, time: Ps, thread: usize, step: Step) {
        self.number += 1;
        self.events.push(Reverse((time, self.number, thread, step)));
    }

    /// The thread takes `step` after work of its own, which takes `mean` on average.
    fn after_work(&mut self, now: Ps, mean: f64, (thread, step): (usize, Step)) {
        let factor = self.costs.varies.0[self.rng.usize(..10)];
        self.at(now + ps(mean * factor), thread, step);
    }

    fn step(&mut self, now: Ps, thread: usize, step: Step) {
        let costs = self.costs;
        match step {
            Step::Runs => self.after_work(now, costs.fault, (thread, Step::Faulted)),
            Step::Faulted => {
                let hold = ps(costs.enqueue + 2.0 * costs.line);
                let end = self.lock.serve(now, hold);
                self.at(end, thread, Step::Enqueued);
            }
            Step::Enqueued => {
                self.pending.push_back(thread);
                self.waiting += 1;
                let end = match self.idle_readers.pop() {
                    Some(reader) => self.wake(now, reader, Step::Looks),
                    None => now,
                };
                self.at(end, thread, Step::Sleeps);
            }
            Step::Sleeps if self.threads[thread].is_woken => {
                self.threads[thread].is_woken = false;
                self.at(now, thread, Step::Runs);
            }
            Step::Sleeps => self.sleep(now, thread),
            Step::Looks if self.pending.is_empty() => {
                self.idle_readers.push(thread);
                self.sleep(now, thread);
            }
            Step::Looks => {
                let count = self.pending.len().min(self.batch);
                let batch = self.pending.drain(..count).collect();
                self.threads[thread].batch = batch;
                self.after_work(now, costs.read, (thread, Step::Reads));
            }
            Step::Reads => {
                let count = self.threads[thread].batch.len() as f64;
                let hold = ps((costs.read_each + 2.0 * costs.line) * count);
                let end = self.lock.serve(now, hold);
                self.at(end, thread, Step::Fills);
            }
            Step::Fills if self.threads[thread].batch.is_empty() => {
                self.at(now, thread, Step::Looks);
            }
            Step::Fills => self.after_work(now, costs.copy, (thread, Step::Filled)),
            Step::Filled => {
                let each = (costs.scan_each + costs.line) * self.waiting as f64;
                let end = self.lock.serve(now, ps(costs.scan + costs.line + each));
                self.at(end, thread, Step::Scanned);
            }
            Step::Scanned => {
                let served = self.threads[thread].batch.pop_front();
                let served = served.expect("it is filling a batch");
                self.waiting -= 1;
                self.done += 1;
                let end = self.wake(now, served, Step::Runs);
                self.at(end, thread, Step::Fills);
            }
        }
    }

    /// Makes `thread` ready; returns when the waking thread continues.
    fn wake(&mut self, now: Ps, thread: usize, step: Step) -> Ps {
        let costs = self.costs;
        let idle = if !self.idle_cores[self.side(thread)].is_empty() {
            costs.wake_idle
        } else {
            0.0
        };
        let end = now + ps(costs.wake + idle + 2.0 * costs.line);
        if self.threads[thread].sleeps {
            self.make_ready(end, thread, step);
        } else {
            self.threads[thread].is_woken = true;
        }
        end
    }

    fn make_ready(&mut self, now: Ps, thread: usize, step: Step) {
        self.threads[thread].sleeps = false;
        let side = self.side(thread);
        // The last core to become idle.
        if let Some(since) = self.idle_cores[side].pop() {
            let gap = now.saturating_sub(since) as f64 / 1e3;
            let idle = self.costs.idle.after(gap, self.rng.usize(..10));
            self.at(now + ps(idle), thread, step);
        } else {
            self.ready[side].push_back((thread, step));
        }
    }

    fn sleep(&mut self, now: Ps, thread: usize) {
        self.threads[thread].sleeps = true;
        let side = self.side(thread);
        match self.ready[side].pop_front() {
            Some((next, step)) => self.at(now + ps(self.costs.switch), next, step),
            None => self.idle_cores[side].push(now),
        }
    }
}

/// Pages a second if each thread fills its own pages, `fill` nanoseconds for one. A fill takes and
/// releases the lock of the address space for reading, and each of the two moves the lock's cache
/// line. So the threads do not exclude each other, but the line has one place at a time.
///
/// # Panics
/// If there is no thread, no core or no page.
pub fn exits(fill: f64, line: f64, threads: usize, cores: usize, pages: u64) -> f64 {
    assert!(threads > 0 && cores > 0 && pages > 0);
    let mut the_line = Server::default();
    let mut events: BinaryHeap<_> = (0..threads.min(cores))
        .map(|thread| Reverse((ps(fill), thread)))
        .collect();
    let (mut now, mut began) = (0, 0);
    for page in 0..pages + pages / 10 {
        let Reverse((at, thread)) = events.pop().expect("a thread continues");
        now = the_line.serve(at, ps(2.0 * line));
        if page < pages / 10 {
            began = now;
        }
        events.push(Reverse((now + ps(fill), thread)));
    }
    pages as f64 * 1e12 / (now - began) as f64
}

#[cfg(test)]
mod tests;
