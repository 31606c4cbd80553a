//! Threads that read for callers that do not wait, started when first needed.

use super::Completion;
use super::timer::Timer;
use crate::core::Core;
use crate::ticket::Ticket;
use lacuna_sync::{Condvar, Mutex, Nanos, join, lock, lock_order};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

pub(crate) struct Readers {
    shared: Arc<SharedReaders>,
    handles: Mutex<Vec<JoinHandle<()>>, lock_order::ReaderHandles>,
    max: usize,
}

struct SharedReaders {
    core: Arc<Core>,
    timer: Arc<Timer>,
    queue: Mutex<Queue, lock_order::ReaderQueue>,
    read: Condvar,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<(Ticket, Nanos)>,
    readers: usize,
    idle: usize,
    stop: bool,
}

impl Readers {
    pub fn new(core: Arc<Core>, timer: Arc<Timer>, max: usize) -> Self {
        let shared = SharedReaders {
            core,
            timer,
            queue: Mutex::default(),
            read: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
            handles: Mutex::default(),
            max: max.max(1),
        }
    }

    /// Queues a claimed read.
    pub fn read(&self, ticket: Ticket, due: Nanos) {
        let mut queue = lock(&self.shared.queue);
        queue.reads.push_back((ticket, due));
        let spawn = queue.idle < queue.reads.len() && queue.readers < self.max;
        queue.readers += usize::from(spawn);
        drop(queue);
        if spawn && !self.spawn() {
            let mut queue = lock(&self.shared.queue);
            queue.readers -= 1;
            if queue.readers == 0 {
                // No thread can be started, so this thread carries the read out.
                let next = queue.reads.pop_front();
                drop(queue);
                next.into_iter()
                    .for_each(|(ticket, due)| self.shared.carry_out(ticket, due));
            }
        }
        self.shared.read.notify_one();
    }

    /// Ends the threads. They first carry out the queued reads.
    pub fn shut_down(&self) {
        lock(&self.shared.queue).stop = true;
        self.shared.read.notify_all();
        let handles = std::mem::take(&mut *lock(&self.handles));
        handles.into_iter().for_each(join);
    }

    fn spawn(&self) -> bool {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("lacuna-read".into());
        let spawned = thread.spawn(move || shared.run());
        spawned
            .map(|handle| lock(&self.handles).push(handle))
            .is_ok()
    }
}

impl SharedReaders {
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((ticket, due)) = queue.reads.pop_front() {
                drop(queue);
                self.carry_out(ticket, due);
                queue = lock(&self.queue);
            } else if queue.stop {
                return;
            } else {
                queue.idle += 1;
                queue = self
                    .read
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }

    fn carry_out(&self, ticket: Ticket, due: Nanos) {
        let result = self.core.read(&ticket);
        self.timer
            .complete_at(due, Completion::Read(ticket, result));
    }
}
