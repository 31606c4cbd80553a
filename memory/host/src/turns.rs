//! Whose turn it is: threads that wait for a free frame, the longest first.
//!
//! ```text
//! free frames    f f f f f
//! waiting        3 5 8           a thread may take one once more are free than wait before it
//! spare                f f       what a vCPU that does not wait may still take
//! ```
//! A frame is not handed over: it stays free, and is owed. So nothing is lost when a waiting thread
//! gives up, and who frees a frame need not know for whom.

use std::collections::VecDeque;

/// A place in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Turn(u64);

/// The queue.
#[derive(Default)]
pub(crate) struct Turns {
    /// Ascending: turns are dealt out in order.
    waiting: VecDeque<Turn>,
    dealt: u64,
}

impl Turns {
    /// A place at the end.
    pub fn join(&mut self) -> Turn {
        self.dealt += 1;
        let turn = Turn(self.dealt);
        self.waiting.push_back(turn);
        turn
    }

    /// Gives the place up; without effect if that was done before.
    pub fn leave(&mut self, turn: Turn) {
        if let Ok(at) = self.waiting.binary_search(&turn) {
            self.waiting.remove(at);
        }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many have waited longer than `turn`.
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
