//! The groups of options in `--help`. A command shows them in the order of its options.

pub const GUEST: &str = "Guest";
pub const MEMORY: &str = "Memory";
pub const PAGES: &str = "Page source";
pub const AHEAD: &str = "Pages that arrive before a VM needs them";
pub const LINK: &str = "Faults of the connection";
pub const MIGRATION: &str = "Migration";
pub const DECISION: &str = "Decisions about a migration that has begun";
pub const DEVICES: &str = "Devices";
pub const CONTROL: &str = "Control and output";
pub const SECURITY: &str = "Security";
pub const RESTART: &str = "A pager that follows this one";
pub const DEBUGGING: &str = "Debugging";
