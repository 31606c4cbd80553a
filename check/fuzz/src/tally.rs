//! Counts the actions of a run, for the table at its end. The table shows whether the fuzzer
//! reaches its targets.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// Counts by group and name.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    counts: BTreeMap<(&'static str, String), u64>,
    /// Seeds that have run.
    pub seeds: u64,
    /// Guest instructions retired.
    pub instructions: u64,
    /// Operations of the host beside the guest, or inputs tried.
    pub operations: u64,
    /// Checks of all invariants.
    pub verified: u64,
}

impl Tally {
    /// Adds `count` to `name`.
    pub fn add(&mut self, group: &'static str, name: impl Into<String>, count: u64) {
        *self.counts.entry((group, name.into())).or_default() += count;
    }

    /// Adds one to `name`.
    pub fn note(&mut self, group: &'static str, name: impl Into<String>) {
        self.add(group, name, 1);
    }

    /// The count of `name`.
    pub fn count(&self, group: &'static str, name: &str) -> u64 {
        let key = (group, name.to_owned());
        self.counts.get(&key).copied().unwrap_or(0)
    }

    /// Adds the counts of another run.
    pub fn absorb(&mut self, other: Self) {
        for ((group, name), count) in other.counts {
            self.add(group, name, count);
        }
        self.seeds += other.seeds;
        self.instructions += other.instructions;
        self.operations += other.operations;
        self.verified += other.verified;
    }

    /// As JSON: the totals, and each group as an object.
    pub fn to_json(&self) -> Value {
        let mut groups: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
        for ((group, name), count) in &self.counts {
            groups.entry(group).or_default().insert(name, *count);
        }
        json!({
            "seeds": self.seeds,
            "instructions": self.instructions,
            "operations": self.operations,
            "verified": self.verified,
            "counts": groups,
        })
    }
}

/// One line of totals.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seeds,
            instructions,
            operations,
            verified,
            ..
        } = self;
        write!(
            f,
            "{seeds} seeds, {instructions} guest instructions, {operations} operations, \
             verified {verified} times"
        )
    }
}

/// Columns of a line of the table.
const COLUMNS: usize = 100;

impl Tally {
    /// The table of all counts.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let (mut group, mut line) = ("", String::new());
        for ((of, name), count) in &self.counts {
            let item = format!("{name} {count}");
            if *of != group || line.len() + item.len() + 2 > COLUMNS {
                out.push_str(line.trim_end());
                out.push('\n');
                line.clear();
            }
            if *of != group {
                out.push_str(&format!("{of}:\n"));
                group = of;
            }
            line.push_str(if line.is_empty() { "  " } else { ", " });
            line.push_str(&item);
        }
        out.push_str(&line);
        out.push('\n');
        out
    }
}
