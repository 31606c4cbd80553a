//! A connection as frames in both directions.

use super::connection::{Connection, Connections, HangUp};
use super::frame::{self, DATA_PAGES, HEAD, Kind, NUMBER, SET_BYTES};
use super::packing::{Carriage, Packer, Unpacker};
use super::{Join, MigrationId, Role, Stage, VERSION, Version, Welcome};
use crate::bandwidth::Bandwidth;
use crate::error::printable;
use crate::{MigrateError, PageSet};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::SourcePage;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufReader, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest reason in bytes.
const REASON_MAX: usize = 4096;
/// The longest words of an ending in bytes. In JSON each is at most 6 bytes.
const ENDED_MAX: usize = 512;
/// Smaller frames are written together: a copy costs less than a system call.
const SMALL: usize = 64 << 10;
/// Bytes of small frames that are written at once.
const BATCH: usize = 256 << 10;
/// Bytes read at once, unless the rest of a frame is longer.
const READ_AHEAD: usize = 64 << 10;
/// A source without a page to send for this long shows that it is there.
const SILENCE: Duration = Duration::from_secs(1);
/// Bits of one frame of a set.
const SET_BITS: u64 = SET_BYTES as u64 * 8;

/// A stream of frames in both directions. Dropped, it ends the connection for the other side too.
pub(super) struct Frames {
    stream: BufReader<Box<dyn Connection>>,
    /// Small frames still to write: a guest's pages are often in many short runs.
    unwritten: Vec<u8>,
    /// Ends the connection. A clone of the descriptor may live on in another thread.
    hang_up: HangUp,
    /// When the last write was.
    written: Instant,
    /// Compresses pages.
    packer: Option<Packer>,
    /// Counts what is written.
    limit: Option<Arc<Bandwidth>>,
    unpacker: Unpacker,
    /// The payload of the frame read last.
    pub payload: Vec<u8>,
    /// A compressed payload.
    packed: Vec<u8>,
}

impl Frames {
    /// The next connection.
    pub fn open(connections: &dyn Connections) -> Result<Self, MigrateError> {
        let stream = connections.open().map_err(MigrateError::Cut)?;
        Ok(Self {
            hang_up: stream.hang_up().map_err(MigrateError::Cut)?,
            stream: BufReader::with_capacity(READ_AHEAD, stream),
            unwritten: Vec::new(),
            written: Instant::now(),
            packer: None,
            limit: None,
            unpacker: Unpacker::default(),
            payload: Vec::new(),
            packed: Vec::new(),
        })
    }

    /// The source's end of a further connection, and the destination's answer.
    pub fn join(
        connections: &dyn Connections,
        id: &MigrationId,
        role: Role,
    ) -> Result<(Self, Welcome), MigrateError> {
        let mut frames = Self::open(connections)?;
        let (version, id) = (VERSION, id.clone());
        frames.write_json(Kind::Join, &Join { version, id, role })?;
        frames.expect(Kind::Welcome)?;
        frames.check_version()?;
        let welcome = frames.json()?;
        Ok((frames, welcome))
    }

    /// The destination's end of a further connection, of one of these roles. Refuses connections of
    /// other programs and other migrations, and takes the next one.
    pub fn accept(
        connections: &dyn Connections,
        id: &MigrationId,
        roles: &[Role],
    ) -> Result<(Self, Role), MigrateError> {
        loop {
            let mut frames = Self::open(connections)?;
            match frames.accept_join(id, roles) {
                Ok(role) => return Ok((frames, role)),
                Err(why) => frames.refuse(&why),
            }
        }
    }

    fn accept_join(&mut self, id: &MigrationId, roles: &[Role]) -> Result<Role, MigrateError> {
        match self.read()? {
            Kind::Join => self.check_version()?,
            _ => return Err(MigrateError::Refused(ANOTHER.into())),
        }
        let join: Join = self.json()?;
        if join.id != *id || !roles.contains(&join.role) {
            return Err(MigrateError::Refused(ANOTHER.into()));
        }
        Ok(join.role)
    }

    /// The destination's answer to an accepted connection.
    pub fn welcome(
        &mut self,
        stage: Option<Stage>,
        unit: Option<PageCount>,
    ) -> Result<(), MigrateError> {
        let welcome = Welcome {
            version: VERSION,
            stage,
            unit: unit.map(PageCount::get),
            ended: None,
        };
        self.write_json(Kind::Welcome, &welcome)
    }

    /// The destination's answer to a returning source: the guest has ended.
    pub fn has_ended(&mut self, why: &str) -> Result<(), MigrateError> {
        let end = why.floor_char_boundary(ENDED_MAX);
        let welcome = Welcome {
            version: VERSION,
            stage: Some(Stage::Running),
            unit: None,
            ended: Some(why[..end].into()),
        };
        self.write_json(Kind::Welcome, &welcome)
    }

    /// A function that ends the connection from another thread.
    pub fn hang_up(&self) -> Result<HangUp, MigrateError> {
        self.stream.get_ref().hang_up().map_err(MigrateError::Cut)
    }

    /// Writes a frame. If it is small, it may wait for others until [`Frames::flush`].
    pub fn write(&mut self, kind: Kind, head: &[u8], body: &[u8]) -> Result<(), MigrateError> {
        if let Some(limit) = &self.limit {
            limit.count(HEAD + head.len() + body.len());
        }
        if body.len() < SMALL {
            frame::write(&mut self.unwritten, kind, head, body)?;
            return match self.unwritten.len() < BATCH {
                true => Ok(()),
                false => self.write_out(),
            };
        }
        self.write_out()?;
        frame::write(self.stream.get_mut(), kind, head, body)
    }

    /// From now on, this connection carries pages so.
    pub fn carry(&mut self, how: &Carriage) -> Result<(), MigrateError> {
        self.packer = Packer::new(how.compression)?;
        self.limit.clone_from(&how.limit);
        Ok(())
    }

    /// Sends pages with content.
    pub fn write_pages(&mut self, first: SourcePage, bytes: &[u8]) -> Result<(), MigrateError> {
        let mut at = first.0;
        let mut packer = self.packer.take();
        for pages in bytes.chunks(DATA_PAGES * PAGE_SIZE) {
            let packed = packer.as_mut().and_then(|packer| packer.pack(pages));
            let (kind, body) = packed.unwrap_or((Kind::Data, pages));
            self.write(kind, &at.to_le_bytes(), body)?;
            at += (pages.len() / PAGE_SIZE) as u64;
        }
        self.packer = packer;
        Ok(())
    }

    /// Says that pages are zeros.
    pub fn write_zeros(&mut self, first: SourcePage, pages: u64) -> Result<(), MigrateError> {
        let payload = [first.0.to_le_bytes(), pages.to_le_bytes()].concat();
        self.write(Kind::Zeros, &payload, &[])
    }

    /// Shows the other side that this one is there, if nothing was sent for a while.
    pub fn keep_alive(&mut self) -> Result<(), MigrateError> {
        if self.written.elapsed() < SILENCE {
            return Ok(());
        }
        self.write_zeros(SourcePage(0), 0)?;
        self.flush()
    }

    /// No page is sent for a while. This sends what waits for others, or shows now and then that
    /// this side is there.
    pub fn idle(&mut self) -> Result<(), MigrateError> {
        match self.unwritten.is_empty() {
            true => self.keep_alive(),
            false => self.flush(),
        }
    }

    fn write_out(&mut self) -> Result<(), MigrateError> {
        self.written = Instant::now();
        let written = self.stream.get_mut().write_all(&self.unwritten);
        self.unwritten.clear();
        written.map_err(MigrateError::Cut)
    }

    pub fn signal(&mut self, kind: Kind) -> Result<(), MigrateError> {
        self.write(kind, &[], &[])?;
        self.flush()
    }

    pub fn flush(&mut self) -> Result<(), MigrateError> {
        self.write_out()?;
        self.stream.get_mut().flush().map_err(MigrateError::Cut)
    }

    pub fn write_json(&mut self, kind: Kind, value: &impl Serialize) -> Result<(), MigrateError> {
        let text = serde_json::to_vec(value).expect("plain data has a JSON form");
        self.write(kind, &[], &text)?;
        self.flush()
    }

    /// The next frame. A peer's refusal is an error.
    pub fn read(&mut self) -> Result<Kind, MigrateError> {
        let kind = frame::read(&mut self.stream, &mut self.payload)?;
        self.check(kind)
    }

    /// As [`Frames::read`]. `None`: the connection's timeout has passed, and no frame has begun.
    pub fn read_or_idle(&mut self) -> Result<Option<Kind>, MigrateError> {
        let kind = frame::read_or_idle(&mut self.stream, &mut self.payload)?;
        kind.map(|kind| self.check(kind)).transpose()
    }

    /// Compressed pages become Data.
    fn check(&mut self, kind: Kind) -> Result<Kind, MigrateError> {
        match kind {
            Kind::Lz4 | Kind::Zstd => {
                std::mem::swap(&mut self.payload, &mut self.packed);
                let parts = self.packed.split_first_chunk::<NUMBER>();
                let (number, block) = parts.ok_or_else(no_number)?;
                self.payload.clear();
                self.payload.extend(number);
                self.unpacker
                    .unpack(kind, block, &mut self.payload, NUMBER)?;
                Ok(Kind::Data)
            }
            Kind::Refused => {
                let why = String::from_utf8_lossy(&self.payload);
                Err(MigrateError::Refused(printable(&why)))
            }
            kind => Ok(kind),
        }
    }

    /// Reads a frame that must be of this kind.
    pub fn expect(&mut self, kind: Kind) -> Result<(), MigrateError> {
        match self.read()? {
            found if found == kind => Ok(()),
            found => Err(unexpected(found, kind)),
        }
    }

    /// As [`Frames::expect`], where the other side may work for any time before. Calls `waits` each
    /// time that it shows that it is there ([`Frames::keep_alive`]): an error ends the wait.
    pub fn expect_after_work(
        &mut self,
        kind: Kind,
        waits: &mut dyn FnMut() -> Result<(), MigrateError>,
    ) -> Result<(), MigrateError> {
        loop {
            match self.read()? {
                found if found == kind => return Ok(()),
                Kind::Zeros if self.payload.get(NUMBER..) == Some(&[0; 8]) => waits()?,
                found => return Err(unexpected(found, kind)),
            }
        }
    }

    pub fn json<T: DeserializeOwned>(&self) -> Result<T, MigrateError> {
        let parsed = serde_json::from_slice(&self.payload);
        parsed.map_err(|error| MigrateError::stream(error.to_string()))
    }

    /// The version of a first message.
    pub fn check_version(&self) -> Result<(), MigrateError> {
        match self.json::<Version>()?.version {
            VERSION => Ok(()),
            found => Err(MigrateError::PeerVersion {
                found,
                known: VERSION,
            }),
        }
    }

    /// The page number with which the payload begins, and what follows it.
    pub fn numbered(&self) -> Result<(SourcePage, &[u8]), MigrateError> {
        let parts = self.payload.split_first_chunk::<NUMBER>();
        let (number, rest) = parts.ok_or_else(no_number)?;
        Ok((SourcePage(u64::from_le_bytes(*number)), rest))
    }

    /// Sends a set of pages: a frame for each part of it that has a page.
    pub fn write_set(&mut self, set: &PageSet) -> Result<(), MigrateError> {
        let parts = set.words().chunks(SET_BYTES / 8).enumerate();
        for (index, words) in parts.filter(|(_, words)| words.iter().any(|word| *word != 0)) {
            let first = index as u64 * SET_BITS;
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            self.write(Kind::Awaited, &first.to_le_bytes(), &bytes)?;
        }
        Ok(())
    }

    /// Adds the pages of a frame of [`Frames::write_set`] to `set`.
    pub fn read_set(&self, set: &mut PageSet) -> Result<(), MigrateError> {
        let (first, bytes) = self.numbered()?;
        let (words, rest) = bytes.as_chunks::<8>();
        let most = set.pages().next_multiple_of(64);
        let end = first.0.checked_add(words.len() as u64 * 64);
        let fits = end.is_some_and(|end| end <= most) && rest.is_empty();
        if !fits || !first.0.is_multiple_of(64) {
            let wrong = format!("pages from {first} on that the machine does not have");
            return Err(MigrateError::stream(wrong));
        }
        set.add_words((first.0 / 64) as usize, words);
        Ok(())
    }

    /// The other side's reason for the end of the connections, if `cut` is such an end and the
    /// reason was sent. Otherwise `cut`.
    pub fn reason(&mut self, cut: MigrateError) -> MigrateError {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let ended = [
            BrokenPipe,
            ConnectionAborted,
            ConnectionReset,
            UnexpectedEof,
        ];
        match &cut {
            MigrateError::Cut(error) if ended.contains(&error.kind()) => {}
            _ => return cut,
        }
        // Answers to earlier messages may come first.
        loop {
            match self.read() {
                Ok(_) => {}
                Err(refused @ MigrateError::Refused(_)) => return refused,
                Err(_) => return cut,
            }
        }
    }

    /// As [`Frames::reason`], but reads only what has arrived already. Ends the connection.
    pub fn last_words(&mut self, cut: MigrateError) -> MigrateError {
        (self.hang_up)();
        loop {
            match self.read() {
                Ok(_) => {}
                Err(refused @ MigrateError::Refused(_)) => return refused,
                Err(_) => return cut,
            }
        }
    }

    /// Sends the other side, which may be gone, the reason why this one gives up.
    pub fn refuse(&mut self, why: &MigrateError) {
        let mut text = match why {
            MigrateError::Refused(text) => text.clone(),
            other => other.to_string(),
        };
        let end = text.floor_char_boundary(REASON_MAX);
        text.truncate(end);
        let _ = self.write(Kind::Refused, &[], text.as_bytes());
        let _ = self.flush();
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        (self.hang_up)();
    }
}

/// Why a connection of another migration is refused.
const ANOTHER: &str = "another migration is in progress here: wait for its end, or name another \
                       address";

fn no_number() -> MigrateError {
    MigrateError::stream("a frame without a page's number")
}

pub(super) fn unexpected(found: Kind, wanted: Kind) -> MigrateError {
    MigrateError::stream(format!("{found:?} arrived, and {wanted:?} was due"))
}
