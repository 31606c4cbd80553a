//! Frames: how messages lie in a byte stream. docs/formats.md describes them.
//!
//! ```text
//! kind u8 | 0 u8 | 0 u16 | bytes u32 | CRC-32 u32 of what is before, and the payload | payload
//! ```
//! All numbers are little-endian. A reader refuses a length before it reads the payload, so a peer
//! cannot make it allocate more than the longest payload of that kind.

use crate::MigrateError;
use crate::state::JSON_MAX;
use lacuna_addr::PAGE_SIZE;
use std::io::{self, IoSlice, Read, Write};

/// The meaning of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// First frame of the source: JSON of `Hello`.
    Hello = 1,
    /// First frame of the destination: JSON of `Welcome`.
    Welcome = 2,
    /// Pages with content: the number of the first one, 8 bytes, and the pages.
    Data = 3,
    /// Pages of zeros: the number of the first one and how many, 8 bytes each.
    Zeros = 4,
    /// The source asks for a reply when everything before has arrived.
    Sync = 5,
    /// The destination's answer to `Sync`.
    Synced = 6,
    /// JSON of the machine's state. The guest is paused at the source.
    State = 7,
    /// The destination has memory and state, and waits for `Go`.
    Prepared = 8,
    /// The destination must run the guest. The source never runs it again, unless a person decides
    /// that.
    Go = 9,
    /// The destination runs the guest.
    Running = 10,
    /// The peer gives up: text for people.
    Refused = 11,
    /// First frame of the source on a further connection: JSON of `Join`.
    Join = 12,
    /// Pages that the source has and the destination lacks: the number of a page, 8 bytes, and one
    /// bit for each page from there on.
    Awaited = 13,
    /// The destination needs the page of this number, 8 bytes.
    Want = 14,
    /// The source has sent every page.
    End = 15,
    /// The destination has every page: the source may forget the guest.
    Complete = 16,
    /// Pages with content: the number of the first one, 8 bytes, and the pages as an LZ4 block.
    Lz4 = 17,
    /// The same with a Zstandard frame.
    Zstd = 18,
}

const KINDS: [Kind; 18] = [
    Kind::Hello,
    Kind::Welcome,
    Kind::Data,
    Kind::Zeros,
    Kind::Sync,
    Kind::Synced,
    Kind::State,
    Kind::Prepared,
    Kind::Go,
    Kind::Running,
    Kind::Refused,
    Kind::Join,
    Kind::Awaited,
    Kind::Want,
    Kind::End,
    Kind::Complete,
    Kind::Lz4,
    Kind::Zstd,
];

/// The most pages of one frame: 1 MiB.
pub(super) const DATA_PAGES: usize = 256;
/// Bytes of a page's number.
pub(super) const NUMBER: usize = 8;
/// The most bytes of bits of one [`Kind::Awaited`]: 4 GiB of guest memory.
pub(super) const SET_BYTES: usize = 128 << 10;
/// Bytes before a frame's payload.
pub(super) const HEAD: usize = 12;

impl Kind {
    fn of(number: u8) -> Option<Self> {
        KINDS.into_iter().find(|kind| *kind as u8 == number)
    }

    /// The longest payload in bytes.
    const fn longest(self) -> usize {
        match self {
            Self::Data | Self::Lz4 | Self::Zstd => NUMBER + DATA_PAGES * PAGE_SIZE,
            Self::Zeros => 16,
            Self::Hello => 16 << 20,
            Self::State => JSON_MAX,
            Self::Welcome | Self::Refused | Self::Join => 4 << 10,
            Self::Awaited => NUMBER + SET_BYTES,
            Self::Want => NUMBER,
            Self::Sync | Self::Synced | Self::Prepared | Self::Go | Self::Running => 0,
            Self::End | Self::Complete => 0,
        }
    }
}

/// Writes a frame whose payload is `head` and then `body`.
pub(super) fn write(
    to: &mut impl Write,
    kind: Kind,
    head: &[u8],
    body: &[u8],
) -> Result<(), MigrateError> {
    let bytes = head.len() + body.len();
    if bytes > kind.longest() {
        let most = kind.longest();
        return Err(MigrateError::TooLong { bytes, most });
    }
    let mut front = Vec::with_capacity(HEAD + head.len());
    front.extend([kind as u8, 0, 0, 0]);
    front.extend((bytes as u32).to_le_bytes());
    let mut sum = crc32fast::Hasher::new();
    [&front, head, body]
        .into_iter()
        .for_each(|part| sum.update(part));
    front.extend(sum.finalize().to_le_bytes());
    front.extend(head);
    write_both(to, &front, body).map_err(MigrateError::Cut)
}

/// One system call for both parts, if the stream takes all.
fn write_both(to: &mut impl Write, front: &[u8], body: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(front), IoSlice::new(body)];
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match to.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a frame. Its payload replaces what `payload` has.
pub(super) fn read(from: &mut impl Read, payload: &mut Vec<u8>) -> Result<Kind, MigrateError> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head).map_err(MigrateError::Cut)?;
    read_rest(from, head, payload)
}

/// As [`read`], of a stream that may be silent. `None`: the stream's timeout has passed before the
/// first byte of a frame.
pub(super) fn read_or_idle(
    from: &mut impl Read,
    payload: &mut Vec<u8>,
) -> Result<Option<Kind>, MigrateError> {
    let mut head = [0; HEAD];
    let begun = loop {
        match from.read(&mut head) {
            Ok(0) => return Err(MigrateError::Cut(io::ErrorKind::UnexpectedEof.into())),
            Ok(begun) => break begun,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Ok(None),
                _ => return Err(MigrateError::Cut(error)),
            },
        }
    };
    let rest = from.read_exact(&mut head[begun..]);
    rest.map_err(MigrateError::Cut)?;
    read_rest(from, head, payload).map(Some)
}

/// Reads the first message of a destination's peer: a whole frame, or a head that no frame has. A
/// later read of these bytes as a frame does not wait.
///
/// # Errors
/// The peer has ended the connection, or does not send so many bytes in time.
pub fn first_message(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head)?;
    let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    let longest = Kind::of(head[0]).map_or(0, Kind::longest);
    let mut message = head.to_vec();
    if bytes as usize <= longest {
        // The memory for it grows with what arrives.
        let read = from.take(bytes.into()).read_to_end(&mut message)?;
        if read < bytes as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(message)
}

fn read_rest(
    from: &mut impl Read,
    head: [u8; HEAD],
    payload: &mut Vec<u8>,
) -> Result<Kind, MigrateError> {
    let [number, 0, 0, 0, b0, b1, b2, b3, s0, s1, s2, s3] = head else {
        return Err(MigrateError::stream(
            "a frame begins with bytes that are not zero",
        ));
    };
    let kind = Kind::of(number)
        .ok_or_else(|| MigrateError::stream(format!("a frame of unknown kind {number}")))?;
    let bytes = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
    if bytes > kind.longest() {
        return Err(MigrateError::stream(format!(
            "a frame of {bytes} bytes, and {kind:?} has at most {}",
            kind.longest()
        )));
    }
    payload.resize(bytes, 0);
    from.read_exact(payload).map_err(MigrateError::Cut)?;
    let mut sum = crc32fast::Hasher::new();
    sum.update(&head[..8]);
    sum.update(payload);
    if sum.finalize() != u32::from_le_bytes([s0, s1, s2, s3]) {
        return Err(MigrateError::stream(format!(
            "the checksum of a {kind:?} frame differs"
        )));
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn framed(kind: Kind, head: &[u8], body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, kind, head, body).expect("a Vec takes all");
        bytes
    }

    #[test]
    fn a_frame_comes_back() {
        for kind in KINDS {
            let body = vec![kind as u8; kind.longest().min(70_000).saturating_sub(8)];
            let head = &[7; 8][..kind.longest().min(8)];
            let bytes = framed(kind, head, &body);
            let mut payload = Vec::new();
            assert_eq!(read(&mut &*bytes, &mut payload).ok(), Some(kind));
            assert_eq!(payload, [head, &body].concat());
        }
    }

    #[test]
    fn a_length_is_refused_before_the_payload_is_read() {
        let mut bytes = framed(Kind::Zeros, &[0; 16], &[]);
        bytes[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        let wrong = read(&mut &*bytes, &mut Vec::new()).expect_err("too long");
        assert!(wrong.to_string().contains("at most 16"), "{wrong}");
    }

    /// A stranger's bytes are judged at once, without a wait for more.
    #[test]
    fn a_first_message_is_a_frame_or_a_wrong_head() {
        let mut good = framed(Kind::Join, &[], b"{}");
        let whole = good.len();
        good.extend(b"the next frame");
        let mut long = good.clone();
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        for (bytes, read) in [
            (&good[..], whole),
            (b"GET / HTTP/1.1\r\n\r\n", HEAD),
            (&long, HEAD),
        ] {
            let message = first_message(&mut &*bytes).expect("so many bytes");
            assert_eq!(message, bytes[..read]);
        }
        for half in [HEAD - 1, whole - 1] {
            let error = first_message(&mut &good[..half]).expect_err("more bytes are due");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    /// Only a machine with very many vCPUs has such a state.
    #[test]
    fn a_state_that_the_other_side_would_refuse_is_not_sent() {
        let mut bytes = Vec::new();
        let body = vec![b' '; JSON_MAX + 1];
        let refused = write(&mut bytes, Kind::State, &[], &body);
        let why = refused.expect_err("too long").to_string();
        assert!(why.contains("50331649") && bytes.is_empty(), "{why}");
    }

    proptest! {
        /// Each change of one bit is found, and each cut.
        #[test]
        fn damage_is_found(
            body in proptest::collection::vec(any::<u8>(), 0..200),
            at: prop::sample::Index,
            bit in 0..8,
        ) {
            let good = framed(Kind::State, &[], &body);
            let mut bad = good.clone();
            let index = at.index(bad.len());
            bad[index] ^= 1_u8 << bit;
            // A read with a longer length meets the end of the stream.
            prop_assert!(read(&mut &*bad, &mut Vec::new()).is_err());
            let cut = read(&mut &good[..index], &mut Vec::new());
            prop_assert!(matches!(cut, Err(MigrateError::Cut(_))));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = read(&mut &*bytes, &mut Vec::new());
        }
    }
}
