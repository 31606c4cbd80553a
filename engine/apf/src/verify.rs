//! The invariants between any two calls.

use crate::token::Token;
use crate::{Abi, QUEUED_MAX, Queue};
use std::collections::HashSet;

impl<A: Abi> Queue<A> {
    /// Checks that the parts of the queue agree, for tests and seeded runs. Meanwhile other threads
    /// may report arrivals.
    ///
    /// # Panics
    /// If anything is wrong.
    pub fn verify(&self) {
        assert!(self.queued() <= QUEUED_MAX, "bounded");
        if !self.abi.is_enabled() {
            assert_eq!(self.queued(), 0, "nothing is queued while disabled");
        }
        let arrived = self.arrivals.pages();
        let distinct: HashSet<_> = arrived.iter().collect();
        assert_eq!(distinct.len(), arrived.len(), "a page arrives once");
        for gfn in &arrived {
            assert!(self.flights.contains_key(gfn), "{gfn} was in flight");
        }
        for gfn in self.flights.keys() {
            assert!(!self.recent.contains(*gfn), "{gfn} is not also ready");
        }
        let tokens: Vec<_> = self.flights.values().filter_map(|it| it.token).collect();
        let distinct: HashSet<_> = tokens.iter().collect();
        assert_eq!(distinct.len(), tokens.len(), "a token has one page");
        assert!(tokens.iter().all(|&t| t.get() != 0 && t != Token::WAKE_ALL));
        if let Some(gfn) = self.halted {
            assert!(
                self.flights.contains_key(&gfn),
                "the page halted for is in flight"
            );
        }
    }
}
