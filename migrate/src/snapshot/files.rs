//! What the reader and the writer of a snapshot share.

use crate::{Machine, MachineState};
use serde::{Deserialize, Serialize};

/// The format of a snapshot that is whole by itself.
pub(super) const WHOLE: u32 = 1;
/// The format of one that has the pages only that have changed since another one.
pub(super) const DIFF: u32 = 2;

pub(super) const STATE: &str = "snapshot.json";
pub(super) const MEMORY: &str = "memory";
pub(super) const PAGES: &str = "pages";
pub(super) const CHECKSUMS: &str = "checksums";

/// [`STATE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    /// [`WHOLE`] or [`DIFF`].
    pub format: u32,
    /// That of [`DIFF`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    pub machine: Machine,
    pub state: MachineState,
}

/// The snapshot that has the unchanged pages, in the same folder.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Base {
    /// Its name.
    pub name: String,
    /// The CRC-32 of its [`CHECKSUMS`].
    pub checksums: u32,
}

/// [`Document`]'s first field, which every format has.
#[derive(Deserialize)]
pub(super) struct Version {
    pub format: u32,
}

/// An entry of [`PAGES`]: the page is zeros, and is a hole in [`MEMORY`].
pub(super) const ZEROS: u32 = 0;

/// An entry of [`PAGES`] of a diff: the page is that of its base, and is a hole in [`MEMORY`].
pub(super) const UNCHANGED: u32 = 1;

/// The entry of a page with content: its CRC-32 (that of IEEE 802.3), and never [`ZEROS`] or
/// [`UNCHANGED`].
pub(super) fn entry_of(page: &[u8]) -> u32 {
    crc32fast::hash(page).max(2)
}
