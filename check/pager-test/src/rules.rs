//! The table of rules.

mod content;
mod demand;
mod huge;
mod messages;
mod refusals;
mod removal;
mod restore;
mod save;
mod vms;
mod waiters;

use crate::rule::Rule;

pub(crate) use vms::be_killed;

/// The parts of the table.
const TABLES: &[&[Rule]] = &[
    content::RULES,
    waiters::RULES,
    removal::RULES,
    huge::RULES,
    messages::RULES,
    vms::RULES,
    save::RULES,
    refusals::RULES,
    restore::RULES,
    demand::RULES,
];

/// The rule with this name.
pub fn rule(name: &str) -> Option<&'static Rule> {
    all().find(|rule| rule.name == name)
}

/// Every rule, in the order of a whole run.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    TABLES.iter().copied().flatten()
}
