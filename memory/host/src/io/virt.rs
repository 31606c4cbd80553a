//! One thread and virtual time: the device carries out an operation at its submission; the
//! completion is delivered at a later virtual time.

use super::Completion;
use crate::core::Core;
use crate::ticket::Ticket;
use lacuna_sync::{Mutex, Nanos, lock, lock_order};
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) struct Virtual {
    pub seed: u64,
    queue: Mutex<Queue, lock_order::VirtualQueue>,
    latency_ns: Range<u64>,
}

struct Queue {
    rng: fastrand::Rng,
    /// By due time, then by submission: this determines the order of delivery.
    due: BTreeMap<(Nanos, u64), Completion>,
    submitted: u64,
}

impl Virtual {
    pub fn new(seed: u64, latency_ns: Range<u64>) -> Self {
        let rng = fastrand::Rng::with_seed(seed);
        Self {
            seed,
            queue: Mutex::new(Queue {
                rng,
                due: BTreeMap::new(),
                submitted: 0,
            }),
            latency_ns,
        }
    }

    /// Delivers `completion` at `due`, or as much later as the seed says.
    pub fn submit(&self, due: Nanos, completion: Completion) {
        let mut queue = lock(&self.queue);
        let range = self.latency_ns.clone();
        let extra = if range.is_empty() {
            range.start
        } else {
            queue.rng.u64(range)
        };
        let due = due.after(extra);
        queue.submitted += 1;
        let number = queue.submitted;
        queue.due.insert((due, number), completion);
    }

    pub fn next_due(&self) -> Option<Nanos> {
        lock(&self.queue)
            .due
            .first_key_value()
            .map(|(&(due, _), _)| due)
    }

    /// Whether the read of `ticket` is due by `end`.
    pub fn is_due_by(&self, ticket: &Ticket, end: Nanos) -> bool {
        let queue = lock(&self.queue);
        let mut due = queue.due.range(..=(end, u64::MAX));
        due.any(|(_, completion)| completion.is_read_of(ticket))
    }

    /// Delivers the next completion, even before it is due. Returns false if there is none.
    pub fn deliver_next(&self, core: &Core) -> bool {
        let next = lock(&self.queue).due.pop_first();
        next.map(|(_, completion)| core.complete(completion))
            .is_some()
    }

    pub fn deliver_until(&self, core: &Core, now: Nanos) -> usize {
        let mut delivered = 0;
        while self.next_due().is_some_and(|due| due <= now) && self.deliver_next(core) {
            delivered += 1;
        }
        delivered
    }
}
