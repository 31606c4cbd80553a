//! The lines of a connection to the control socket, parsed as requests.

use crate::message::{LINE_MAX, Request};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// What a client has sent.
pub(crate) enum Line {
    /// With the descriptors that came with it.
    Request(Request, Vec<OwnedFd>),
    Wrong(String),
    TooLong,
    /// The client has closed the connection. A line without its end is no request.
    End,
}

/// The lines of a connection.
pub(crate) struct Lines {
    stream: UnixStream,
    /// The bytes after the last whole line.
    bytes: Vec<u8>,
    /// Descriptors that came since the last request.
    descriptors: Vec<OwnedFd>,
    /// The client sends no more.
    is_over: bool,
}

impl Lines {
    pub const fn of(stream: UnixStream) -> Self {
        Self {
            stream,
            bytes: Vec::new(),
            descriptors: Vec::new(),
            is_over: false,
        }
    }

    pub const fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The next line, if it has been read.
    pub fn next(&mut self) -> Option<Line> {
        let most = self.bytes.len().min(LINE_MAX);
        let end = self.bytes[..most].iter().position(|byte| *byte == b'\n');
        match end {
            Some(end) => {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                Some(parse(&line, std::mem::take(&mut self.descriptors)))
            }
            None if most == LINE_MAX => Some(Line::TooLong),
            None => self.is_over.then_some(Line::End),
        }
    }

    /// Waits for some bytes, or the end.
    pub fn read(&mut self) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let read = recvmsg(&self.stream, slices, &mut rights, RecvFlags::CMSG_CLOEXEC);
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(all) = message {
                // More are closed, and their request is refused.
                let room = DESCRIPTORS_MAX.saturating_sub(self.descriptors.len());
                self.descriptors.extend(all.take(room));
            }
        }
        match read.map(|message| message.bytes) {
            Ok(read @ 1..) => self.bytes.extend(&bytes[..read]),
            Err(Errno::INTR) => {}
            _ => self.is_over = true,
        }
    }
}

/// The most descriptors of a request.
pub(crate) const DESCRIPTORS_MAX: usize = 8;

fn parse(line: &[u8], descriptors: Vec<OwnedFd>) -> Line {
    match serde_json::from_slice(line) {
        Ok(request) => Line::Request(request, descriptors),
        Err(error) => Line::Wrong(format!(
            "this line is no request: {error}; a request is one line, such as \
             {{\"command\":\"status\"}}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::Shutdown;

    /// The first line of a client that has sent these bytes.
    fn first_line(bytes: &[u8]) -> Line {
        let (mut client, stream) = UnixStream::pair().unwrap();
        client.write_all(bytes).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut lines = Lines::of(stream);
        loop {
            match lines.next() {
                Some(line) => return line,
                None => lines.read(),
            }
        }
    }

    #[test]
    fn lines_are_bounded_and_have_an_end() {
        let long = [b'x'; LINE_MAX];
        for (bytes, expected) in [
            (&b"{\"command\":\"stop\"}\n"[..], "Request"),
            (b"{\"command\":\"stop\"}", "End"),
            (b"", "End"),
            (b"\n", "Wrong"),
            (b"\xff\xfe\n", "Wrong"),
            (&long, "TooLong"),
            (&long[1..], "End"),
        ] {
            let found = match first_line(bytes) {
                Line::Request(..) => "Request",
                Line::Wrong(_) => "Wrong",
                Line::TooLong => "TooLong",
                Line::End => "End",
            };
            assert_eq!(found, expected, "{:?}", bytes.escape_ascii().to_string());
        }
        let deep = [b"[".repeat(LINE_MAX / 2), b"\n".to_vec()].concat();
        assert!(matches!(first_line(&deep), Line::Wrong(_)));
    }
}
