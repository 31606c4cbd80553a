//! Reads of a swap file through an io_uring: the starting thread submits them, straight into their
//! frames.
//!
//! ```text
//! start:  flight number -> submission queue -> io_uring_enter, on the caller's thread
//! arrive: completion queue <- a polling thread (try_lock), or one that sleeps on the ring's
//!                             descriptor, else the reaper in io_uring_enter
//! ```
//! A read that did not bring a whole page goes to the reader threads. They read it again like any
//! other read: they retry if possible, and report final errors. Reads beyond [`ENTRIES`] in flight
//! also go to the reader threads.
//!
//! # Unsafe
//! The kernel writes into a frame while its read is in flight. From before the submission until
//! after the completion, the page word says Reading and the ticket is claimed. So no other thread
//! touches the frame. The ring is emptied before the pool is dropped (`shut_down`).

use super::Completion;
use super::readers::Readers;
use super::timer::Timer;
use super::watch::{POLLERS_LATE, Watch};
use crate::core::Core;
use crate::ticket::Ticket;
use io_uring::{IoUring, opcode, squeue, types};
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::{Mutex, MutexGuard, Nanos, join, lock, lock_order};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

/// The most reads in flight. The completion queue has twice as many entries: it cannot overflow.
const ENTRIES: u32 = 256;
/// `IORING_ENTER_GETEVENTS` of linux/io_uring.h.
const GETEVENTS: u32 = 1;
/// Not the number of a read: it wakes the reaper.
const WAKE: u64 = u64::MAX;

pub(crate) struct Ring {
    shared: Arc<SharedRing>,
    reaper: Option<JoinHandle<()>>,
}

/// The receivers of arrived reads.
pub(crate) struct Onward {
    pub core: Arc<Core>,
    pub watch: Arc<Watch>,
    pub timer: Arc<Timer>,
    pub readers: Arc<Readers>,
}

struct SharedRing {
    ring: IoUring,
    onward: Onward,
    /// Threads that sleep on the ring's descriptor, and handle what arrives: see [`Arrivals`].
    sleepers: Watch,
    /// The right to use the submission queue. Not held while the kernel takes entries from it.
    submission: Mutex<(), lock_order::RingSubmission>,
    /// The right to use the completion queue.
    completion: Mutex<(), lock_order::RingCompletion>,
    flights: Mutex<Flights, lock_order::RingFlights>,
    /// The thread that handles what arrives while no other does.
    reaper: OnceLock<Thread>,
    /// The number of flights, for statistics.
    pending: AtomicUsize,
    /// Whether the submission queue has entries that the kernel has not taken.
    owed: AtomicBool,
    stop: AtomicBool,
}

/// Reads in flight by number.
struct Flights {
    reads: Vec<Option<(Ticket, Nanos)>>,
    free: Vec<u32>,
}

impl Ring {
    /// `Err` where io_uring is missing or forbidden.
    pub fn new(onward: Onward) -> std::io::Result<Self> {
        let shared = Arc::new(SharedRing {
            // The kernel's part of a completion runs on the submitting thread, and need not
            // interrupt it: the thread polls (`poll`), or enters the kernel to sleep.
            ring: IoUring::builder()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .build(ENTRIES)?,
            onward,
            sleepers: Watch::default(),
            submission: Mutex::default(),
            completion: Mutex::default(),
            flights: Mutex::new(Flights {
                reads: (0..ENTRIES).map(|_| None).collect(),
                free: (0..ENTRIES).rev().collect(),
            }),
            reaper: OnceLock::new(),
            pending: AtomicUsize::new(0),
            owed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let runs = shared.clone();
        let named = std::thread::Builder::new().name("lacuna-reap".into());
        let reaper = named.spawn(move || runs.run())?;
        let _ = shared.reaper.set(reaper.thread().clone());
        Ok(Self {
            shared,
            reaper: Some(reaper),
        })
    }

    /// Submits claimed reads of the tickets' entries in `file` with one system call, so that the
    /// block layer joins reads of adjacent entries. `refused` gets the tickets beyond [`ENTRIES`]
    /// reads in flight.
    pub fn read(
        &self,
        file: BorrowedFd<'_>,
        tickets: impl Iterator<Item = Ticket>,
        due: Nanos,
        refused: impl Fn(Ticket),
    ) {
        let shared = &*self.shared;
        let mut submitted = 0;
        for ticket in tickets {
            match shared.board(file, ticket, due) {
                Ok(()) => submitted += 1,
                Err(ticket) => refused(ticket),
            }
        }
        if submitted == 0 {
            return;
        }
        shared.enter(submitted);
        // A thread that sleeps on the ring does not learn of a read that the kernel has not taken.
        if !shared.is_watched() || shared.owed.load(Ordering::Relaxed) {
            shared.wake();
        }
    }

    /// Handles the arrived completions, unless another thread does so. Returns their number.
    pub fn poll(&self) -> usize {
        let shared = &*self.shared;
        if shared.pending.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        shared.pay();
        match shared.completion.try_lock() {
            Ok(turn) => shared.reap(turn),
            Err(TryLockError::Poisoned(turn)) => shared.reap(turn.into_inner()),
            Err(TryLockError::WouldBlock) => 0,
        }
    }

    /// Lets the kernel post the completions of this thread's own reads.
    pub fn finish(&self) {
        let shared = &*self.shared;
        if shared.pending.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Ok(turn) = shared.submission.try_lock() else {
            return;
        };
        // SAFETY: `turn` makes this the only view of the submission queue.
        let waits = unsafe { shared.ring.submission_shared() }.taskrun();
        drop(turn);
        if waits {
            let submitter = shared.ring.submitter();
            // SAFETY: no arguments beyond the numbers. After a refusal, the next poll tries again.
            let _ = unsafe { submitter.enter::<()>(0, 0, GETEVENTS, None) };
        }
    }

    /// Called when the last poller has stopped.
    pub fn take_over(&self) {
        self.shared.take_over();
    }

    /// The calling thread handles what arrives, until it drops the result.
    pub fn arrivals(&self) -> Arrivals {
        self.shared.sleepers.join();
        Arrivals(Arc::clone(&self.shared))
    }
}

/// A thread's duty to handle the reads that arrive in its ring, until the value is dropped: it
/// sleeps until the descriptor is readable, and then calls [`Arrivals::take`].
#[must_use]
pub struct Arrivals(Arc<SharedRing>);

impl Arrivals {
    /// Handles the arrived reads, and returns their number.
    pub fn take(&self) -> usize {
        if self.0.pending.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.0.pay();
        // Not `try_lock`: the descriptor stays readable, and this thread would try again and again.
        self.0.reap(lock(&self.0.completion))
    }

    /// Gives the duty back for the life of the result, because the thread may sleep elsewhere.
    pub fn set_aside(&self) -> SetAside<'_> {
        self.0.leave();
        SetAside(self)
    }
}

impl AsFd for Arrivals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ring.as_fd()
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// See [`Arrivals::set_aside`].
#[must_use]
pub struct SetAside<'a>(&'a Arrivals);

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        self.0.0.sleepers.join();
    }
}

impl Drop for Ring {
    /// Ends the reaper, after all reads in flight have arrived: the kernel writes into frames.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared
            .submit(&opcode::Nop::new().build().user_data(WAKE));
        if let Some(reaper) = self.reaper.take() {
            self.shared.wake();
            join(reaper);
        }
    }
}

impl SharedRing {
    fn wake(&self) {
        if let Some(reaper) = self.reaper.get() {
            reaper.unpark();
        }
    }

    fn take_over(&self) {
        if self.pending.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
    }

    /// A sleeping thread gives its duty back.
    fn leave(&self) {
        if self.sleepers.leave() {
            self.take_over();
        }
    }

    /// Queues a read. The caller enters the kernel.
    fn board(&self, file: BorrowedFd<'_>, ticket: Ticket, due: Nanos) -> Result<(), Ticket> {
        let (frame, entry) = (ticket.frame(), self.onward.core.entry_of(&ticket));
        let number = lock(&self.flights).board(ticket, due)?;
        self.pending.fetch_add(1, Ordering::Relaxed);
        let frame = self.onward.core.frames.pool.frame(frame).as_non_null();
        let sqe = opcode::Read::new(
            types::Fd(file.as_raw_fd()),
            frame.as_ptr(),
            PAGE_SIZE as u32,
        );
        let sqe = sqe.offset(entry.offset()).build();
        self.queue(&sqe.user_data(u64::from(number)));
        Ok(())
    }

    fn submit(&self, sqe: &squeue::Entry) {
        self.queue(sqe);
        self.enter(1);
    }

    fn queue(&self, sqe: &squeue::Entry) {
        let turn = lock(&self.submission);
        // SAFETY: `turn` makes this the only view of the submission queue.
        let mut queue = unsafe { self.ring.submission_shared() };
        // SAFETY: the file is the store's and the frame the pool's: both outlive the flight (module
        // header).
        let pushed = unsafe { queue.push(sqe) };
        debug_assert!(pushed.is_ok(), "as many places as flights");
        drop(queue);
        drop(turn);
    }

    /// Makes the kernel take all queued submissions, also other threads'. The caller has queued
    /// `own` of them.
    fn enter(&self, own: usize) {
        // If the kernel took fewer, the call was interrupted or short of memory for a moment, or
        // another thread's call has taken them.
        if !self.ring.submit().is_ok_and(|taken| taken >= own) {
            self.owed.store(true, Ordering::Relaxed);
        }
    }

    fn pay(&self) {
        if self.owed.load(Ordering::Relaxed) && self.owed.swap(false, Ordering::Relaxed) {
            while let taken @ (Err(_) | Ok(1..)) = self.ring.submit() {
                if taken.is_err() {
                    return self.owed.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    fn reap(&self, turn: MutexGuard<'_, ()>) -> usize {
        // SAFETY: `turn` makes this the only view of the completion queue.
        let queue = unsafe { self.ring.completion_shared() };
        let arrived: Vec<(u64, i32)> = queue.map(|cqe| (cqe.user_data(), cqe.result())).collect();
        drop(turn);
        let mut reads = 0;
        for (number, result) in arrived {
            if number == WAKE {
                continue;
            }
            let Some((ticket, due)) = lock(&self.flights).land(number) else {
                continue;
            };
            if result == PAGE_SIZE as i32 {
                let completion = Completion::Read(ticket, Ok(()));
                self.onward.timer.complete_at(due, completion);
            } else {
                self.onward.readers.read(ticket, due);
            }
            reads += 1;
        }
        self.pending.fetch_sub(reads, Ordering::Release);
        reads
    }

    /// Whether a thread handles what arrives. The caller has counted its read in `pending`.
    fn is_watched(&self) -> bool {
        self.onward.watch.is_polled() || self.sleepers.is_polled()
    }

    /// The reaper's loop.
    fn run(&self) {
        loop {
            let stop = self.stop.load(Ordering::Acquire);
            let pending = self.pending.load(Ordering::Acquire) > 0;
            if !pending && stop {
                return;
            }
            if !pending {
                std::thread::park();
                continue;
            }
            if self.is_watched() && !stop {
                // A poller may be late: preempted, or in a long string instruction.
                std::thread::park_timeout(POLLERS_LATE);
                self.pay();
                if self.is_watched() {
                    self.reap(lock(&self.completion));
                }
                continue;
            }
            self.pay();
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.reap(lock(&self.completion));
        }
    }
}

impl Flights {
    fn board(&mut self, ticket: Ticket, due: Nanos) -> Result<u32, Ticket> {
        let Some(number) = self.free.pop() else {
            return Err(ticket);
        };
        self.reads[number as usize] = Some((ticket, due));
        Ok(number)
    }

    fn land(&mut self, number: u64) -> Option<(Ticket, Nanos)> {
        let read = self.reads.get_mut(number as usize)?.take();
        if read.is_some() {
            self.free.push(number as u32);
        }
        read
    }
}
