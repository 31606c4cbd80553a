//! The parts that a snapshot's reader and writer share.

use crate::{MachineConfig, MachineState};
use serde::{Deserialize, Serialize};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

/// The format of a whole snapshot.
pub(super) const WHOLE: u32 = 1;
/// The format of a snapshot with only the pages that have changed since another one. Earlier
/// versions wrote it. Its [`MEMORY`] has a hole in place of each other page.
pub(super) const DIFF: u32 = 2;
/// The format of a snapshot whose [`MEMORY`] has only its pages with content, one after the other.
/// It may have a [`Base`].
pub(super) const PACKED: u32 = 3;

pub(super) const STATE: &str = "snapshot.json";
pub(super) const MEMORY: &str = "memory";
pub(super) const PAGES: &str = "pages";
pub(super) const CHECKSUMS: &str = "checksums";

/// [`STATE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    /// [`WHOLE`], [`DIFF`] or [`PACKED`].
    pub format: u32,
    /// [`DIFF`] has one, and [`PACKED`] may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    pub machine: MachineConfig,
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

/// An entry of [`PAGES`] of a diff: the page is as in its base, and is a hole in [`MEMORY`].
pub(super) const UNCHANGED: u32 = 1;

/// Whether a page with this entry is in [`MEMORY`] of the same snapshot.
pub(super) const fn has_content(entry: u32) -> bool {
    entry != ZEROS && entry != UNCHANGED
}

/// The entry of a page with content: its CRC-32 (IEEE 802.3), and never [`ZEROS`] or [`UNCHANGED`].
pub(super) fn entry_of(page: &[u8]) -> u32 {
    crc32fast::hash(page).max(2)
}

/// Makes a folder that only this user can enter: it has all of a guest's memory.
pub(super) fn create_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}
