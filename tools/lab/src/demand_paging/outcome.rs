//! The result of one run.

use crate::report::{align, short};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What one guest touched, and what its vCPUs and readers counted. The counts include the guest's
/// kernel, which needs some pages before the time begins.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Touched pages.
    pub pages: u64,
    /// Nanoseconds from the first touch to the last one, by the guest's clock.
    pub ns: u64,
    /// The faults of each queue.
    pub queues: Vec<u64>,
    /// The exits of each vCPU at missing pages.
    pub exits: Vec<u64>,
    /// How many of these exits the guest accepted as asynchronous page faults.
    pub tokens: Vec<u64>,
}

impl Outcome {
    /// Pages a second.
    pub fn rate(&self) -> f64 {
        self.pages as f64 * 1e9 / self.ns as f64
    }
}

/// The table of the command.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, rate) = (self.pages, short(self.rate()));
        writeln!(
            f,
            "{pages} pages in {} ms: {rate} pages a second\n",
            self.ns / 1_000_000
        )?;
        let mut rows = vec![["vCPU", "exits", "accepted tokens"].map(str::to_owned)];
        let counts = self.exits.iter().zip(&self.tokens).enumerate();
        rows.extend(counts.map(|(vcpu, (exits, tokens))| {
            [vcpu.to_string(), exits.to_string(), tokens.to_string()]
        }));
        writeln!(f, "{}", align(&rows))?;
        let mut rows = vec![["queue", "faults"].map(str::to_owned)];
        let counts = self.queues.iter().enumerate();
        rows.extend(counts.map(|(queue, faults)| [queue.to_string(), faults.to_string()]));
        f.write_str(&align(&rows))
    }
}
