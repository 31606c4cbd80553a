//! Frames of Cloud Hypervisor's migration protocol, version 0, on a UNIX socket.
//!
//! A request and an answer have the same layout: a 16-bit kind (the command, or the status), 6
//! bytes, and the 64-bit length of the payload that follows. All numbers are little-endian.

use crate::queue::{LOOK, unread};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

/// Begins a session. Its first 2 header bytes are the sender's version.
pub(crate) const START: u16 = 1;
/// Carries the VM's configuration, in JSON.
pub(crate) const CONFIG: u16 = 2;
/// Carries the state of vCPUs and devices.
pub(crate) const STATE: u16 = 3;
/// Ends a session; the receiving side resumes the VM.
pub(crate) const COMPLETE: u16 = 5;
/// Gives a session up. Cloud Hypervisor sends it up to v52.
pub(crate) const ABANDON: u16 = 6;
/// Carries a slot's number, with the descriptor of its memory.
pub(crate) const MEMORY_FD: u16 = 7;
/// Ends a session; the VM stays paused.
pub(crate) const COMPLETE_PAUSED: u16 = 8;
/// Asks for a range of guest-physical memory.
pub(crate) const PAGE_FAULT: u16 = 9;

/// The status of a request that was done.
pub(crate) const OK: u16 = 1;
/// The status of a refused request.
pub(crate) const ERROR: u16 = 2;
/// The role of a connection that carries page faults.
pub(crate) const FAULT_ROLE: u16 = 2;

/// Bytes of a frame before its payload.
pub(crate) const HEADER: usize = 16;
/// The longest payload that the suite reads.
const PAYLOAD_MAX: u64 = 64 << 20;
/// Descriptors that one message may carry.
const FDS: usize = 4;

/// The name of a command, for a report.
pub(crate) fn name(kind: u16) -> String {
    match kind {
        START => "Start".into(),
        CONFIG => "Config".into(),
        STATE => "State".into(),
        COMPLETE => "Complete".into(),
        ABANDON => "Abandon".into(),
        MEMORY_FD => "MemoryFd".into(),
        COMPLETE_PAUSED => "CompletePaused".into(),
        PAGE_FAULT => "PageFault".into(),
        _ => format!("command {kind}"),
    }
}

/// Whether the command ends a session.
pub(crate) fn completes(kind: u16) -> bool {
    [COMPLETE, COMPLETE_PAUSED].contains(&kind)
}

/// The bytes of a frame before its payload.
pub(crate) fn header(kind: u16, middle: [u8; 6], length: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[2..8].copy_from_slice(&middle);
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// A frame that the other side has sent.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u16,
    pub(crate) middle: [u8; 6],
    pub(crate) length: u64,
    pub(crate) payload: Vec<u8>,
    /// The descriptors of the messages that carried the payload.
    pub(crate) fds: Vec<OwnedFd>,
}

/// A connection. A read or a write without any progress fails with `WouldBlock` after the limit.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: UnixStream,
}

impl Peer {
    pub(crate) fn new(socket: UnixStream, limit: Duration) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(limit))?;
        socket.set_write_timeout(Some(limit))?;
        Ok(Self { socket })
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        (&self.socket).write_all(bytes)
    }

    /// Sends the first byte by itself. The rest follows when the other side has read that byte, or
    /// after a tenth of a second.
    pub(crate) fn send_in_pieces(&self, bytes: &[u8]) -> io::Result<()> {
        let (first, rest) = bytes.split_at(bytes.len().min(1));
        self.send(first)?;
        let mut tries = 0..100;
        while unread(&self.socket).is_ok_and(|unread| unread > 0) && tries.next().is_some() {
            thread::sleep(LOOK);
        }
        self.send(rest)
    }

    /// Sends a few bytes with descriptors, in one message.
    pub(crate) fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let text = [IoSlice::new(bytes)];
        retry_on_intr(|| sendmsg(&self.socket, &text, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Reads `N` bytes. Descriptors of their messages are lost, as in Cloud Hypervisor.
    pub(crate) fn read<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        (&self.socket).read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the kind, the 6 bytes, and the length of a frame.
    pub(crate) fn read_header(&self) -> io::Result<(u16, [u8; 6], u64)> {
        let [k0, k1, m0, m1, m2, m3, m4, m5, length @ ..] = self.read::<HEADER>()?;
        let kind = u16::from_le_bytes([k0, k1]);
        Ok((kind, [m0, m1, m2, m3, m4, m5], u64::from_le_bytes(length)))
    }

    /// Reads a frame with its payload. A message of the payload may carry descriptors.
    pub(crate) fn read_frame(&self) -> io::Result<Frame> {
        let (kind, middle, length) = self.read_header()?;
        if length > PAYLOAD_MAX {
            let why = format!("a payload of {length} bytes is announced");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut payload = vec![0; length as usize];
        let fds = self.read_with(&mut payload)?;
        Ok(Frame {
            kind,
            middle,
            length,
            payload,
            fds,
        })
    }

    fn read_with(&self, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
        let (mut read, mut fds) = (0, Vec::new());
        while read < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut text = [IoSliceMut::new(&mut bytes[read..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = retry_on_intr(|| recvmsg(&self.socket, &mut text, &mut control, flags))?;
            if got.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            read += got.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    fds.extend(received);
                }
            }
        }
        Ok(fds)
    }

    /// Closes the connection. The other side reads its end; later calls fail.
    pub(crate) fn close(&self) {
        // It may be closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Whether the other side has sent bytes that are unread.
    pub(crate) fn has_bytes(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&self.socket, &mut byte, flags);
        peeked.is_ok_and(|(_, bytes)| bytes > 0)
    }
}

/// Whether the error says that the other side has closed the connection.
pub(crate) fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind())
}
