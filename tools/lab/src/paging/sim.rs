//! A simulation in discrete events: threads that fault on missing pages, through one userfaultfd or
//! by exits.
//!
//! ```text
//! thread   fault ─► lock: enqueue ─► wake a reader ─► sleep ............................► fault
//! reader                              look ─► lock: read ─► copy ─► lock: scan ─► wake ─► look
//! ```
//! The lock is that of the descriptor's two wait queues. A fill scans them for threads that wait
//! for its page, and all threads that sleep are in them, so the lock is held the longer the more
//! threads sleep. A thread needs a core while it works, also while it spins for the lock. Ready
//! threads take cores in the order in which they became ready; none is preempted.
//!
//! Costs are nanoseconds. `line` is the transfer of a cache line between two cores. It counts once
//! for each sleeping thread that a scan passes, twice for a change of a wait queue (the lock, and
//! the neighbour in the list), and twice for a wake-up.

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
    /// The same for each thread that sleeps.
    pub scan_each: f64,
    /// Making a thread ready.
    pub wake: f64,
    /// The same in addition, if a core is idle.
    pub wake_idle: f64,
    /// From then on until the thread runs on a core that was idle.
    pub idle: f64,
    /// A core's change from a thread that sleeps to one that is ready.
    pub switch: f64,
    /// The transfer of a cache line between two cores.
    pub line: f64,
}

/// The threads and cores that take part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Threads that fault.
    pub threads: usize,
    /// Threads that provide pages.
    pub readers: usize,
    /// Cores for all of them.
    pub cores: usize,
    /// The most faults that a reader takes at once.
    pub batch: usize,
}

/// What serves one customer after the other, in the order in which they come.
#[derive(Default)]
struct Server {
    free_at: Ps,
}

impl Server {
    /// The end of a service that is asked for at `now`. Calls come in the order of `now`.
    fn serve(&mut self, now: Ps, service: Ps) -> Ps {
        self.free_at = self.free_at.max(now) + service;
        self.free_at
    }
}

/// What a thread does at an event. It has a core.
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
    /// It is off its core, or was never on one.
    sleeps: bool,
    /// Its page came before it slept.
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
    idle_cores: usize,
    ready: VecDeque<(usize, Step)>,
    threads: Vec<Thread>,
    /// Faults that no reader has read.
    pending: VecDeque<usize>,
    /// Threads in the wait queues.
    waiting: usize,
    idle_readers: Vec<usize>,
    done: u64,
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
        idle_cores: cores,
        ready: VecDeque::new(),
        threads: (0..threads + readers).map(|_| Thread::default()).collect(),
        pending: VecDeque::new(),
        waiting: 0,
        idle_readers: (threads..threads + readers).collect(),
        done: 0,
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
            let Reverse((at, _, thread, step)) = self.events.pop().expect("a thread goes on");
            now = at;
            self.step(at, thread, step);
        }
        now
    }

    fn at(&mut self, time: Ps, thread: usize, step: Step) {
        self.number += 1;
        self.events.push(Reverse((time, self.number, thread, step)));
    }

    fn step(&mut self, now: Ps, thread: usize, step: Step) {
        let costs = self.costs;
        match step {
            Step::Runs => self.at(now + ps(costs.fault), thread, Step::Faulted),
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
                self.at(now + ps(costs.read), thread, Step::Reads);
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
            Step::Fills => self.at(now + ps(costs.copy), thread, Step::Filled),
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

    /// Makes `thread` ready; returns when the waking thread goes on.
    fn wake(&mut self, now: Ps, thread: usize, step: Step) -> Ps {
        let costs = self.costs;
        let idle = if self.idle_cores > 0 {
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
        if self.idle_cores > 0 {
            self.idle_cores -= 1;
            self.at(now + ps(self.costs.idle), thread, step);
        } else {
            self.ready.push_back((thread, step));
        }
    }

    fn sleep(&mut self, now: Ps, thread: usize) {
        self.threads[thread].sleeps = true;
        match self.ready.pop_front() {
            Some((next, step)) => self.at(now + ps(self.costs.switch), next, step),
            None => self.idle_cores += 1,
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
        let Reverse((at, thread)) = events.pop().expect("a thread goes on");
        now = the_line.serve(at, ps(2.0 * line));
        if page < pages / 10 {
            began = now;
        }
        events.push(Reverse((now + ps(fill), thread)));
    }
    pages as f64 * 1e12 / (now - began) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 20_000;

    const COSTS: Costs = Costs {
        fault: 1000.0,
        enqueue: 100.0,
        read: 300.0,
        read_each: 50.0,
        copy: 2000.0,
        scan: 150.0,
        scan_each: 7.0,
        wake: 400.0,
        wake_idle: 600.0,
        idle: 20_000.0,
        switch: 900.0,
        line: 0.0,
    };

    const fn setting(threads: usize, readers: usize, cores: usize) -> Setting {
        Setting {
            threads,
            readers,
            cores,
            batch: 1,
        }
    }

    #[track_caller]
    fn near(found: f64, wanted: f64, percent: f64) {
        let error = 100.0 * (found / wanted - 1.0).abs();
        assert!(error < percent, "{found} is not {wanted}: {error} %");
    }

    /// The mean wait in M/D/1 is `load / (2 (1 - load))` services.
    #[test]
    fn a_server_with_random_arrivals_is_an_m_d_1_queue() {
        for load in [0.3, 0.6, 0.8] {
            let (mut server, mut state) = (Server::default(), 0x9e37_79b9_7f4a_7c15_u64);
            let (service, customers) = (1_000_000, 400_000);
            let (mut now, mut waited) = (0.0, 0.0);
            for _ in 0..customers {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let uniform = ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
                now += -uniform.ln() * service as f64 / load;
                let end = server.serve(now as Ps, service);
                waited += (end - service - now as Ps) as f64;
            }
            let mean = waited / f64::from(customers) / service as f64;
            near(mean, load / (2.0 * (1.0 - load)), 3.0);
        }
    }

    /// One thread and one reader: a cycle is the sum of its steps, with two wake-ups of a core.
    #[test]
    fn one_thread_takes_the_sum_of_all_steps() {
        let c = Costs {
            line: 10.0,
            ..COSTS
        };
        let wake = c.wake + c.wake_idle + c.idle + 2.0 * c.line;
        let queue_changes = c.enqueue + c.read_each + 4.0 * c.line;
        let scan = c.scan + c.scan_each + 2.0 * c.line;
        let cycle = c.fault + c.read + queue_changes + c.copy + scan + 2.0 * wake;
        near(queue(&c, &setting(1, 1, 2), PAGES), 1e9 / cycle, 0.1);
    }

    /// One reader that never sleeps serves a page in the sum of its own steps.
    #[test]
    fn one_reader_that_is_saturated_sets_the_rate() {
        let c = Costs {
            scan_each: 0.0,
            enqueue: 0.0,
            wake_idle: 0.0,
            ..COSTS
        };
        let service = c.read + c.read_each + c.copy + c.scan + c.wake;
        near(queue(&c, &setting(64, 1, 128), PAGES), 1e9 / service, 0.5);
    }

    /// The scan passes every thread that sleeps: nearly all, if there are many.
    #[test]
    fn the_rate_falls_with_the_length_of_the_queue() {
        let c = Costs {
            enqueue: 0.0,
            wake_idle: 0.0,
            idle: 0.0,
            fault: 0.0,
            line: 100.0,
            ..COSTS
        };
        for threads in [64, 128, 256] {
            let each = (c.scan_each + c.line) * threads as f64;
            let lines = 5.0 * c.line;
            let service = c.read + c.read_each + c.copy + c.scan + c.wake + each + lines;
            let rate = queue(&c, &setting(threads, 1, 512), PAGES);
            near(rate, 1e9 / service, 5.0);
        }
    }

    /// On one core, every step takes its time from all others.
    #[test]
    fn one_core_does_all_steps() {
        let c = Costs {
            switch: 0.0,
            scan_each: 0.0,
            wake: 0.0,
            ..COSTS
        };
        let work = c.fault + c.enqueue + c.read + c.read_each + c.copy + c.scan;
        near(queue(&c, &setting(16, 1, 1), PAGES), 1e9 / work, 0.5);
    }

    /// A batch shares the reader's calls.
    #[test]
    fn a_batch_is_read_by_one_call() {
        let c = Costs {
            read: 50_000.0,
            ..COSTS
        };
        let batches = Setting {
            batch: 64,
            ..setting(64, 1, 128)
        };
        let (one, many) = (
            queue(&c, &setting(64, 1, 128), PAGES),
            queue(&c, &batches, PAGES),
        );
        assert!(many > 5.0 * one, "{many} against {one}");
    }

    /// With a reader for each thread and costless locks, the threads do not delay each other.
    #[test]
    fn what_shares_nothing_scales() {
        let c = Costs {
            enqueue: 0.0,
            read_each: 0.0,
            scan: 0.0,
            scan_each: 0.0,
            ..COSTS
        };
        let one = queue(&c, &setting(1, 1, 2), PAGES);
        near(queue(&c, &setting(32, 32, 64), PAGES), 32.0 * one, 1.0);
        near(exits(5000.0, 0.0, 32, 32, PAGES), 32.0 * 1e9 / 5000.0, 0.5);
        near(exits(5000.0, 0.0, 32, 2, PAGES), 2.0 * 1e9 / 5000.0, 0.5);
    }

    /// The line of the address space's lock bounds what all cores together do.
    #[test]
    fn exits_end_at_the_lock_of_the_address_space() {
        near(exits(5000.0, 100.0, 8, 8, PAGES), 8.0 * 1e9 / 5200.0, 1.0);
        near(exits(5000.0, 100.0, 256, 256, PAGES), 1e9 / 200.0, 0.5);
    }
}
