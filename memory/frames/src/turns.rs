//! The queue of threads that wait for a free frame, first in, first out.
//!
//! ```text
//! free frames    f f f f f
//! waiting        3 5 8           turns; a thread may take a frame when more frames are free than
//!                                threads wait before it
//! spare                f f       what a vCPU outside the queue may take
//! ```
//! A waiting thread is not handed a frame. The frame stays in the free map, which keeps one frame
//! for each waiting thread. So no frame is lost when a waiting thread gives up, and a thread that
//! frees a frame need not know which thread waits.

use std::collections::VecDeque;

/// A place in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Turn(u64);

/// The queue. The lock of the free map guards it.
#[derive(Default)]
pub(crate) struct Turns {
    /// Ascending, because [`Turns::join`] appends ever larger turns.
    waiting: VecDeque<Turn>,
    /// The last assigned turn.
    dealt: u64,
}

impl Turns {
    /// Adds a thread at the end; returns its turn.
    pub fn join(&mut self) -> Turn {
        self.dealt += 1;
        let turn = Turn(self.dealt);
        self.waiting.push_back(turn);
        turn
    }

    /// Removes `turn` from the queue; no effect if it is not in the queue.
    pub fn leave(&mut self, turn: Turn) {
        if let Ok(at) = self.waiting.binary_search(&turn) {
            self.waiting.remove(at);
        }
    }

    /// Number of waiting threads.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Number of threads that joined before `turn` and still wait.
    pub fn before(&self, turn: Turn) -> usize {
        self.waiting.partition_point(|&other| other < turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_waiting_is_first_whoever_leaves() {
        let mut turns = Turns::default();
        let [a, b, c] = [turns.join(), turns.join(), turns.join()];
        assert_eq!(
            (turns.before(a), turns.before(b), turns.before(c)),
            (0, 1, 2)
        );
        turns.leave(b);
        turns.leave(b);
        assert_eq!((turns.before(a), turns.before(c), turns.len()), (0, 1, 2));
        turns.leave(a);
        let d = turns.join();
        assert_eq!((turns.before(c), turns.before(d)), (0, 1));
    }
}
