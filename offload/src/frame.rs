//! The frames of the protocol, as pure functions over bytes.
//!
//! ```text
//! request   u16 command | 6 bytes: u16 version in Start | u64 length of the payload
//! response  u16 status  | 6 bytes                       | u64 length of the payload
//! range     u64 guest address | u64 length, in bytes
//! ```
//! All numbers are little-endian. The bytes of a successful response are those of a `Start` request
//! of version 0, so no receiver can distinguish the two.

use std::fmt;
use std::ops::RangeInclusive;

/// Bytes of a request or a response, without its payload.
pub const FRAME_BYTES: usize = 16;
/// Bytes of a range.
pub const RANGE_BYTES: usize = 16;
/// The version of the protocol.
pub const VERSION: u16 = 0;
/// The role of a connection for page faults, its first two bytes.
pub const ROLE_FAULT: u16 = 2;

/// The longest configuration. Cloud Hypervisor's has some 100 KiB, and it is parsed in memory.
pub const CONFIG_MAX: u64 = 16 << 20;
/// The longest state. A vCPU has some 200 KiB of JSON, and the state is kept in a file.
pub const STATE_MAX: u64 = 1 << 30;
/// The longest table of ranges, 4 million ranges: it is kept in memory until its content arrives.
pub const TABLE_MAX: u64 = 64 << 20;

/// What a request wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Command {
    /// Begins a migration.
    Start = 1,
    /// The VM's configuration, as JSON.
    Config = 2,
    /// The state of vCPUs and devices, as JSON.
    State = 3,
    /// A table of ranges, and their content.
    Memory = 4,
    /// The end. The receiver resumes the VM.
    Complete = 5,
    /// The sender ends the migration before it is complete.
    Abandon = 6,
    /// The number of a memory slot, with its memory file by `SCM_RIGHTS`.
    MemoryFd = 7,
    /// The end. The VM stays paused.
    CompletePaused = 8,
    /// A range that the receiver needs, after the migration or at its end.
    PageFault = 9,
}

impl Command {
    fn of(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Start,
            2 => Self::Config,
            3 => Self::State,
            4 => Self::Memory,
            5 => Self::Complete,
            6 => Self::Abandon,
            7 => Self::MemoryFd,
            8 => Self::CompletePaused,
            9 => Self::PageFault,
            _ => return None,
        })
    }

    /// The lengths that its payload may have, in bytes.
    pub const fn lengths(self) -> RangeInclusive<u64> {
        match self {
            Self::Start | Self::Complete | Self::Abandon | Self::CompletePaused => 0..=0,
            Self::Config => 1..=CONFIG_MAX,
            Self::State => 1..=STATE_MAX,
            Self::Memory => RANGE_BYTES as u64..=TABLE_MAX,
            Self::MemoryFd => 4..=4,
            Self::PageFault => RANGE_BYTES as u64..=RANGE_BYTES as u64,
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a message is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A command that version 0 does not have.
    #[error("it sent the unknown command {0}: use Cloud Hypervisor's migration protocol v0")]
    Command(u16),
    /// Another version.
    #[error("it speaks version {0} of the protocol, and only {VERSION} is known: use v53 of it")]
    Version(u16),
    /// A payload of a wrong length.
    #[error("it sent {command} with {length} bytes, which has {} to {}: correct the VMM",
        command.lengths().start(), command.lengths().end())]
    Length {
        /// The command.
        command: Command,
        /// The length of its payload in bytes.
        length: u64,
    },
    /// A table that is no whole number of ranges.
    #[error("it sent a Memory table of {0} bytes, which is no multiple of 16: correct the VMM")]
    Table(u64),
    /// A command at the wrong time.
    #[error("it sent {command} {when}: correct the order of its messages{}", match command {
        Command::Start => "; a response has the same bytes, and none belongs here",
        _ => "",
    })]
    Order {
        /// The command.
        command: Command,
        /// The progress of the migration then.
        when: Phase,
    },
    /// A status that no response has.
    #[error("it sent a response with the unknown status {0}: use the migration protocol v0")]
    Status(u16),
    /// A response with an unexpected payload.
    #[error("it sent a response with a payload of {0} bytes, and none belongs here")]
    ResponseLength(u64),
}

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// What it wants.
    pub command: Command,
    /// The length of its payload in bytes, one of the command's lengths.
    pub length: u64,
}

impl Request {
    /// Parses a request.
    ///
    /// # Errors
    /// The command, the version of a `Start` or the length is wrong.
    pub fn parse(bytes: &[u8; FRAME_BYTES]) -> Result<Self, FrameError> {
        let (number, version, length) = fields(bytes);
        let command = Command::of(number).ok_or(FrameError::Command(number))?;
        // The headers of other commands have no meaning, and Cloud Hypervisor ignores them.
        if command == Command::Start && version != VERSION {
            return Err(FrameError::Version(version));
        }
        if !command.lengths().contains(&length) {
            return Err(FrameError::Length { command, length });
        }
        if command == Command::Memory && !length.is_multiple_of(RANGE_BYTES as u64) {
            return Err(FrameError::Table(length));
        }
        Ok(Self { command, length })
    }

    /// Its bytes. The version in them is 0.
    pub fn bytes(self) -> [u8; FRAME_BYTES] {
        frame(self.command as u16, self.length)
    }
}

/// A response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// Whether the request has succeeded.
    pub is_ok: bool,
    /// The length of its payload in bytes.
    pub length: u64,
}

impl Response {
    /// Parses a response.
    ///
    /// # Errors
    /// No response has this status.
    pub fn parse(bytes: &[u8; FRAME_BYTES]) -> Result<Self, FrameError> {
        let (status, _, length) = fields(bytes);
        let is_ok = match status {
            1 => true,
            2 => false,
            other => return Err(FrameError::Status(other)),
        };
        Ok(Self { is_ok, length })
    }

    /// Its bytes.
    pub fn bytes(self) -> [u8; FRAME_BYTES] {
        frame(if self.is_ok { 1 } else { 2 }, self.length)
    }
}

/// Guest memory: an address and a length, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// The first guest address.
    pub gpa: u64,
    /// Bytes.
    pub length: u64,
}

impl MemoryRange {
    /// Parses a range. Each value is possible: the caller compares it with the VM's memory.
    pub fn parse(bytes: &[u8; RANGE_BYTES]) -> Self {
        Self {
            gpa: number(&bytes[..8]),
            length: number(&bytes[8..]),
        }
    }

    /// Parses a table. Bytes behind its last whole range are ignored: [`Request::parse`] refuses
    /// such a table.
    pub fn parse_table(bytes: &[u8]) -> Vec<Self> {
        let (ranges, _) = bytes.as_chunks();
        ranges.iter().map(Self::parse).collect()
    }

    /// Its bytes.
    pub fn bytes(self) -> [u8; RANGE_BYTES] {
        let mut bytes = [0; RANGE_BYTES];
        bytes[..8].copy_from_slice(&self.gpa.to_le_bytes());
        bytes[8..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }
}

/// The progress of a migration at its receiver.
///
/// ```text
/// Connected ─Start─► Started ─MemoryFd─► Descriptors ⟲ MemoryFd
///                       │                    └─Config─► ConfiguredShared ──┐
///                       └─Config─► Configured ⟲ Memory ──────────────State─┴─► Stated
/// Stated ─Complete, CompletePaused─► Ended       each but Ended ─Abandon─► Ended
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nothing has arrived.
    Connected,
    /// `Start` has.
    Started,
    /// Memory files have.
    Descriptors,
    /// The configuration has, after memory files.
    ConfiguredShared,
    /// The configuration has, and the memory arrives as bytes.
    Configured,
    /// The state has.
    Stated,
    /// The migration has ended.
    Ended,
}

impl Phase {
    /// The progress after `command`.
    ///
    /// # Errors
    /// The command does not belong here.
    pub fn after(self, command: Command) -> Result<Self, FrameError> {
        Ok(match (self, command) {
            (Self::Connected, Command::Start) => Self::Started,
            (Self::Started | Self::Descriptors, Command::MemoryFd) => Self::Descriptors,
            (Self::Started, Command::Config) => Self::Configured,
            (Self::Descriptors, Command::Config) => Self::ConfiguredShared,
            (Self::Configured, Command::Memory) => Self::Configured,
            (Self::Configured | Self::ConfiguredShared, Command::State) => Self::Stated,
            (Self::Stated, Command::Complete | Command::CompletePaused) => Self::Ended,
            (before, Command::Abandon) if before != Self::Ended => Self::Ended,
            (when, command) => return Err(FrameError::Order { command, when }),
        })
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connected => "before Start",
            Self::Started => "after Start",
            Self::Descriptors => "after MemoryFd",
            Self::ConfiguredShared => "after MemoryFd and Config",
            Self::Configured => "after Config",
            Self::Stated => "after State",
            Self::Ended => "after the migration",
        })
    }
}

fn fields(bytes: &[u8; FRAME_BYTES]) -> (u16, u16, u64) {
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    (word(0), word(2), number(&bytes[8..]))
}

fn frame(kind: u16, length: u64) -> [u8; FRAME_BYTES] {
    let mut bytes = [0; FRAME_BYTES];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests;
