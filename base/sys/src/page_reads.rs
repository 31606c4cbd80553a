//! Reads of pages of one file through an io_uring. One thread starts many reads and takes in their
//! results.
//!
//! ```text
//! start: a buffer, a submission ─► wait: io_uring_enter ─► finished: the result; a free buffer
//! any other thread: Waker::wake ─► an eventfd, which the ring reads too ─► wait returns
//! ```
//!
//! UNSAFETY: the kernel writes into a buffer while its read is in flight. A buffer is in flight
//! from [`PageReads::start`] until its completion is taken in, and no reference to its bytes exists
//! in that time. The buffers outlive the reads: dropping a [`PageReads`] waits for all of them.

use io_uring::{IoUring, Probe, opcode, types};
use lacuna_addr::PAGE_SIZE;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, write};
use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The number of the eventfd's read. No page read has it.
const WAKE: u64 = u64::MAX;

/// Reads in flight, each with a value of the caller's.
pub struct PageReads<T> {
    ring: IoUring,
    file: OwnedFd,
    /// One for each read in flight, by its number.
    buffers: Box<[UnsafeCell<[u8; PAGE_SIZE]>]>,
    /// The caller's value of each read in flight.
    values: Vec<Option<T>>,
    free: Vec<u32>,
    waker: Waker,
    /// The buffer for the value of the eventfd.
    wakes: Box<UnsafeCell<[u8; 8]>>,
    /// Whether the read of the eventfd is in flight.
    listens: bool,
}

/// Ends a [`PageReads::wait`], from any thread.
#[derive(Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Ends the present wait, or else the next one.
    pub fn wake(&self) {
        // The write fails only if the counter is full: then the wait ends anyway.
        let _ = write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl<T> PageReads<T> {
    /// Prepares reads of `file`, at most `depth` in flight.
    ///
    /// # Errors
    /// io_uring is missing or forbidden, or there are no descriptors left.
    pub fn new(file: OwnedFd, depth: u32) -> io::Result<Self> {
        // The ring has one more place, for the eventfd. The completion queue has twice as many
        // places.
        let ring = IoUring::new(depth + 1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let waker = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self {
            ring,
            file,
            buffers: (0..depth)
                .map(|_| UnsafeCell::new([0; PAGE_SIZE]))
                .collect(),
            values: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waker: Waker(Arc::new(waker)),
            wakes: Box::default(),
            listens: false,
        })
    }

    /// A handle that ends [`PageReads::wait`].
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Whether another read can be started.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether no read is in flight.
    pub fn is_idle(&self) -> bool {
        self.free.len() == self.buffers.len()
    }

    /// Queues a read of 4 KiB at `offset`; the next [`PageReads::wait`] submits it. Gives `value`
    /// back if too many reads are in flight.
    ///
    /// # Errors
    /// There is no room ([`PageReads::has_room`]).
    pub fn start(&mut self, value: T, offset: u64) -> Result<(), T> {
        let Some(number) = self.free.pop() else {
            return Err(value);
        };
        self.values[number as usize] = Some(value);
        let buffer = self.buffers[number as usize].get().cast::<u8>();
        let file = types::Fd(self.file.as_raw_fd());
        let read = opcode::Read::new(file, buffer, PAGE_SIZE as u32).offset(offset);
        // SAFETY: the buffer is in flight from here (module header); the file is open as long as
        // `self`, which outlives the read.
        unsafe { self.push(&read.build().user_data(u64::from(number))) };
        Ok(())
    }

    /// Submits the started reads, and waits until a read is done or [`Waker::wake`] is called.
    ///
    /// # Errors
    /// The kernel has refused the call. Nothing is lost: the caller may call again.
    pub fn wait(&mut self) -> io::Result<()> {
        if !self.listens {
            let into = self.wakes.get().cast::<u8>();
            let read = opcode::Read::new(types::Fd(self.waker.0.as_raw_fd()), into, 8);
            // SAFETY: `wakes` and the eventfd live as long as `self`, which outlives the read;
            // nothing else uses `wakes`.
            unsafe { self.push(&read.build().user_data(WAKE)) };
            self.listens = true;
        }
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Calls `each` for every finished read: with its bytes, fewer than 4 KiB at the end of the
    /// file, or with its error.
    pub fn finished(&mut self, mut each: impl FnMut(T, Result<&[u8], Errno>)) {
        while let Some((number, result)) = self.next() {
            let Some(value) = self.values[number as usize].take() else {
                continue;
            };
            self.free.push(number);
            match usize::try_from(result) {
                Ok(length) => {
                    // SAFETY: the read is done, and no other is started before this borrow ends,
                    // because `self` is borrowed mutably.
                    let bytes = unsafe { &*self.buffers[number as usize].get() };
                    each(value, Ok(&bytes[..length.min(PAGE_SIZE)]));
                }
                Err(_) => each(value, Err(Errno::from_raw_os_error(-result))),
            }
        }
    }

    /// The next completion of a read: its number and its result.
    fn next(&mut self) -> Option<(u32, i32)> {
        loop {
            let done = self.ring.completion().next()?;
            if done.user_data() != WAKE {
                return Some((done.user_data() as u32, done.result()));
            }
            self.listens = false;
        }
    }

    /// # Safety
    /// The descriptor and the memory in the submission stay valid until its completion.
    unsafe fn push(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: as the caller promises.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // The queue has a place for each buffer and one for the eventfd. `start` and `wait` push
        // only when the earlier submission of that place has completed.
        debug_assert!(pushed.is_ok(), "as many places as reads");
    }
}

impl<T> Drop for PageReads<T> {
    /// Waits for the reads in flight: the kernel writes into the buffers.
    fn drop(&mut self) {
        self.waker.wake();
        while self.listens || !self.is_idle() {
            if self
                .ring
                .submit_and_wait(1)
                .is_err_and(|error| error.kind() != io::ErrorKind::Interrupted)
            {
                // The kernel may still write there, so the buffers are never freed.
                std::mem::forget(std::mem::take(&mut self.buffers));
                std::mem::forget(std::mem::take(&mut self.wakes));
                return;
            }
            while let Some((number, _)) = self.next() {
                self.free.push(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Write as _;
    use std::thread;

    fn reads(bytes: &[u8], depth: u32) -> Option<PageReads<u64>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        match PageReads::new(file.into(), depth) {
            Ok(reads) => Some(reads),
            Err(why) => {
                lacuna_skip::skip(format!("no io_uring here: {why}"));
                None
            }
        }
    }

    fn page(number: u8) -> [u8; PAGE_SIZE] {
        [number; PAGE_SIZE]
    }

    #[test]
    fn every_read_is_finished_once_with_its_own_bytes() {
        let bytes: Vec<u8> = (1..=20).flat_map(page).collect();
        let Some(mut reads) = reads(&bytes, 8) else {
            return;
        };
        let (mut next, mut done) = (0u64, BTreeMap::new());
        while done.len() < 20 {
            while next < 20 && reads.has_room() {
                assert_eq!(reads.start(next, next * PAGE_SIZE as u64), Ok(()));
                next += 1;
            }
            reads.wait().unwrap();
            reads.finished(|value, bytes| {
                let before = done.insert(value, bytes.unwrap().to_vec());
                assert_eq!(before, None);
            });
        }
        for (number, bytes) in done {
            assert_eq!(bytes, page(number as u8 + 1));
        }
        assert!(reads.is_idle());
    }

    #[test]
    fn a_read_beyond_the_end_is_short_and_a_full_ring_gives_back() {
        let Some(mut reads) = reads(&page(7)[..100], 1) else {
            return;
        };
        assert_eq!(reads.start(1, 0), Ok(()));
        assert_eq!(reads.start(2, 0), Err(2));
        let mut lengths = Vec::new();
        while lengths.is_empty() {
            reads.wait().unwrap();
            reads.finished(|_, bytes| lengths.push(bytes.unwrap().len()));
        }
        assert_eq!(lengths, [100]);
    }

    #[test]
    fn a_wake_ends_a_wait_before_it_and_during_it() {
        let Some(mut reads) = reads(&[], 1) else {
            return;
        };
        let waker = reads.waker();
        waker.wake();
        reads.wait().unwrap();
        reads.finished(|_, _| unreachable!("no read was started"));
        thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            reads.wait().unwrap();
        });
    }

    #[test]
    fn reads_in_flight_are_waited_for_at_the_end() {
        let Some(mut reads) = reads(&page(1), 2) else {
            return;
        };
        assert_eq!(reads.start(1, 0), Ok(()));
        drop(reads);
    }
}
