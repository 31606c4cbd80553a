//! The VMM's side of the handshake: a VM without vCPUs.

use crate::image::{Image, describe};
use crate::memory::{BLOCK, Region, WORDS, load, remove, store};
use crate::queue::{LOOK, unread};
use crate::rule::{Line, Subject, event, expect};
use crate::verdict::{Stop, Verdict};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use lacuna_source::{HandlerRegion, send_regions};
use lacuna_sys::{Partial, Userfaultfd, Waiters};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::thread;

/// Pages that a line of the report stands for.
const CHUNK: usize = 16;

/// Memory and its userfaultfd, before and after the handler has them.
#[derive(Debug)]
pub(crate) struct Vm<'a> {
    subject: &'a Subject,
    regions: Vec<Region>,
    uffd: Userfaultfd,
}

impl<'a> Vm<'a> {
    /// A VM with one region.
    pub(crate) fn new(subject: &'a Subject) -> Result<Self, Stop> {
        let region = Region::map(subject.image.pages()).map_err(Stop::host("map memory"))?;
        Self::of(subject, vec![region])
    }

    /// A VM with two regions that do not touch: the second one is at lower addresses.
    pub(crate) fn with_two_regions(subject: &'a Subject) -> Result<Self, Stop> {
        let pages = subject.image.pages();
        let whole = Region::map(pages + BLOCK).map_err(Stop::host("map memory"))?;
        let first = second_begins(pages);
        let upper = whole.part(BLOCK + pages - first, first, 0);
        let lower = whole.part(0, pages - first, first);
        Self::of(subject, vec![upper, lower])
    }

    /// A VM with two regions in one mapping, the second one behind the first.
    pub(crate) fn with_adjacent_regions(subject: &'a Subject) -> Result<Self, Stop> {
        let pages = subject.image.pages();
        let whole = Region::map(pages).map_err(Stop::host("map memory"))?;
        let first = second_begins(pages);
        let parts = [
            whole.part(0, first, 0),
            whole.part(first, pages - first, first),
        ];
        Self::of(subject, parts.into())
    }

    /// A VM with these regions.
    pub(crate) fn of(subject: &'a Subject, regions: Vec<Region>) -> Result<Self, Stop> {
        let uffd = Userfaultfd::open_user_with_removals();
        let uffd = uffd.map_err(Stop::host("make a userfaultfd that reports removals"))?;
        for region in &regions {
            region
                .register(&uffd)
                .map_err(Stop::host("register memory"))?;
        }
        Ok(Self {
            subject,
            regions,
            uffd,
        })
    }

    /// Sends the regions and the descriptor to the handler.
    /// The connection stays open until this process ends, as Firecracker's does.
    pub(crate) fn connect(&self) -> Verdict {
        let connection = Connection::open(self.subject)?;
        self.send(&connection)?;
        connection.report_close();
        Ok(())
    }

    /// Sends the message of the handshake.
    pub(crate) fn send(&self, connection: &Connection) -> Verdict {
        let regions = self.for_handler();
        let sent = send_regions(&connection.socket, &regions, self.uffd.as_fd());
        sent.map_err(not_sent)?;
        event(format!(
            "regions sent: {}, with the userfaultfd",
            regions.len()
        ));
        Ok(())
    }

    pub(crate) fn for_handler(&self) -> Vec<HandlerRegion> {
        self.regions
            .iter()
            .map(|region| region.for_handler())
            .collect()
    }

    pub(crate) fn uffd(&self) -> &Userfaultfd {
        &self.uffd
    }

    pub(crate) fn image(&self) -> &Image {
        &self.subject.image
    }

    pub(crate) fn pages(&self) -> u64 {
        self.subject.image.pages()
    }

    /// The address of a page, by its number in the memory file.
    pub(crate) fn address(&self, page: u64) -> Hva {
        let address = self.regions.iter().find_map(|region| region.address(page));
        address.expect("the regions have all pages of the file")
    }

    /// Takes pages away, as a VMM does for a balloon.
    pub(crate) fn remove(&self, pages: Range<u64>) -> Verdict {
        let count = pages.end - pages.start;
        let range = HvaRange::new(self.address(pages.start), count).expect("some pages");
        remove(range).map_err(Stop::host("take pages away (MADV_DONTNEED)"))
    }

    /// As [`remove`](Self::remove), with lines for the report.
    pub(crate) fn remove_and_wait(&self, pages: Range<u64>) -> Verdict {
        let text = range_text(&pages);
        expect(format!(
            "the handler reads the removal of {text}, so MADV_DONTNEED returns"
        ));
        self.remove(pages)?;
        event(format!("removed {text}"));
        Ok(())
    }

    /// Reads a page, which must have the file's content.
    pub(crate) fn check_content(&self, page: u64) -> Verdict {
        let found = load(self.address(page));
        match found == self.image().page(page) {
            true => Ok(()),
            false => Err(Stop::failed(
                format!("page {page} has its content in the memory file"),
                describe(&found),
            )),
        }
    }

    /// Reads a page, which must have this value in each word.
    pub(crate) fn check_value(&self, page: u64, value: u64) -> Verdict {
        let found = load(self.address(page));
        match found == [value; WORDS] {
            true => Ok(()),
            false => Err(Stop::failed(
                format!("page {page} has the value {value:#x} that was written"),
                describe(&found),
            )),
        }
    }

    /// Reads a page that was removed.
    pub(crate) fn check_zeros(&self, page: u64) -> Verdict {
        let found = load(self.address(page));
        match found == [0; WORDS] {
            true => Ok(()),
            false => Err(Stop::failed(
                format!("page {page} was removed, so it reads zeros"),
                describe(&found),
            )),
        }
    }

    /// Writes a page.
    pub(crate) fn write(&self, page: u64, value: u64) {
        store(self.address(page), value);
    }

    /// Checks the content of pages, with lines for the report.
    pub(crate) fn check_contents(&self, pages: impl IntoIterator<Item = u64>) -> Verdict {
        pages.into_iter().try_for_each(|page| {
            expect(format!(
                "a read of page {page} returns its content in the memory file"
            ));
            self.check_content(page)
        })
    }

    /// Checks the content of many pages, with a line for each chunk of them.
    pub(crate) fn check_in_chunks(&self, pages: &[u64], order: &str) -> Verdict {
        for chunk in pages.chunks(CHUNK) {
            let (first, count) = (chunk[0], chunk.len());
            expect(format!(
                "{count} reads {order}, from page {first} on, return the file's content"
            ));
            chunk
                .iter()
                .try_for_each(|page| self.check_content(*page))?;
        }
        event(format!("read {} pages {order}", pages.len()));
        Ok(())
    }

    /// Checks that pages read zeros, with lines for the report.
    pub(crate) fn check_all_zeros(&self, pages: impl IntoIterator<Item = u64>) -> Verdict {
        pages.into_iter().try_for_each(|page| {
            expect(format!("a read of the removed page {page} returns zeros"));
            self.check_zeros(page)
        })
    }

    /// Puts the content of a page in place, and leaves its waiting threads asleep.
    pub(crate) fn fill_without_wake(&self, page: u64) -> Result<(), Errno> {
        let words = self.image().page(page);
        let mut bytes = [0; PAGE_SIZE];
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *chunk = word.to_ne_bytes();
        }
        let placed = self
            .uffd
            .place(&[bytes], self.address(page), Waiters::LeaveAsleep);
        placed.map_err(|Partial { errno, .. }| errno)
    }
}

/// The first page of the second region of `pages` pages: no half, and no multiple of 2 MiB.
pub(crate) fn second_begins(pages: u64) -> u64 {
    pages / 2 + 137
}

pub(crate) fn range_text(pages: &Range<u64>) -> String {
    match pages.end - pages.start {
        1 => format!("page {}", pages.start),
        _ => format!("pages {} to {}", pages.start, pages.end - 1),
    }
}

/// A connection to the handler.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: UnixStream,
}

impl Connection {
    /// Connects. If the handler has just been started, its socket may appear a moment later.
    pub(crate) fn open(subject: &Subject) -> Result<Self, Stop> {
        let order = &subject.order;
        expect(format!("the handler listens at {}", order.socket.display()));
        let socket = loop {
            match UnixStream::connect(&order.socket) {
                Ok(socket) => break socket,
                Err(error) if order.is_started && is_absent(&error) => thread::sleep(LOOK),
                Err(error) => {
                    let seen =
                        format!("connect: {error}; a handler that serves one VM needs --restart");
                    return Err(Stop::failed("the handler accepts a connection", seen));
                }
            }
        };
        event("connected");
        Ok(Self { socket })
    }

    /// Keeps the connection open until this process ends, and reports its end before.
    pub(crate) fn report_close(self) {
        thread::spawn(move || {
            self.wait_for_close();
            Line::Closed.print();
        });
    }

    /// Waits until the handler closes the connection.
    pub(crate) fn wait_for_close(&self) {
        while !hangs_up(&self.socket) {}
    }

    /// Waits until the handler has read everything that was sent.
    pub(crate) fn wait_until_read(&self) {
        while self.has_unread() {
            thread::sleep(LOOK);
        }
    }

    /// As [`wait_until_read`](Self::wait_until_read), for a tenth of a second at most.
    pub(crate) fn give_time_to_read(&self) {
        let mut tries = 0..100;
        while self.has_unread() && tries.next().is_some() {
            thread::sleep(LOOK);
        }
    }

    fn has_unread(&self) -> bool {
        unread(&self.socket).is_ok_and(|bytes| bytes > 0)
    }
}

pub(crate) fn not_sent(error: io::Error) -> Stop {
    Stop::failed("the handler reads the message", format!("sendmsg: {error}"))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// Waits for an event of the connection: true if its other side has closed it.
fn hangs_up(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, None).is_ok() && !fds[0].revents().is_empty()
}
