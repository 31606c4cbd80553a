//! `lacuna test demand-paging`: the guest's memory is missing, and arrives page by page.
//!
//! It is Linux's `demand_paging_test`, with the exits of the 2023 series. Each vCPU writes once to
//! every page of its share. `--by` says how a missing page is provided:
//!
//! ```text
//! queue    vCPU sleeps ─► a queue ─► a reader provides the page ─► wake-up
//! exits    vCPU exits, its own thread provides the page, and enters the guest again
//! tokens   vCPU exits, the guest gets the event and runs; another thread provides the page
//! source   vCPU sleeps; the backend asks a page source, which answers after --delay
//! ```
//! | memory | queue | copy | continue |
//! |---|---|---|---|
//! | `anonymous`, `hugetlbfs` | the kernel's: a userfaultfd (`kernel_queue`) | `UFFDIO_COPY` | |
//! | `memfd` | a list of this program (`lists`) | `UFFDIO_COPY` | `UFFDIO_CONTINUE` |
//! | `pool` | a list of this program | a copy to a frame | |
//!
//! A page is copied from a page of zeros. It is continued from a file that already has it. On soft,
//! exits and lists use a userfaultfd with `UFFD_FEATURE_SIGBUS`, but no thread gets the signal: a
//! software processor checks whether a page is present before it accesses the page. So the test
//! has no signal handler that provides pages.
//!
//! [`crate::paging`] measures lists of these options in turns.

mod fixture;
mod guest_run;
mod kernel_queue;
mod lists;
pub mod lockstep;
mod outcome;
#[cfg(test)]
mod tests;

pub(crate) use fixture::{Fixture, unavailable};
pub use outcome::Outcome;

use crate::experiment::LabResult;
use crate::options::{GuestOptions, options_of, up_to};
use crate::report::Progress;
use crate::size::parse_duration;
use clap::{Args, ValueEnum};
use lacuna::memory::MemoryKind;
use lacuna::{Backend, PAGE_SIZE, PageCount};
use std::thread;
use std::time::Duration;

/// The content of all pages: the guest expects zeros. Every page is copied from here.
pub(crate) static PAGES: [[u8; PAGE_SIZE]; MOST_AT_ONCE] = [[0; PAGE_SIZE]; MOST_AT_ONCE];
/// The most pages provided at once, and the pages of a huge page: 2 MiB.
pub(crate) const MOST_AT_ONCE: usize = 512;

/// The most bytes that a guest touches.
const BYTES_MAX: u64 = 1 << 40;

/// MiB of a guest beside the pages that it touches: its kernel, and the page tables of its arena.
const BESIDE_MIB: u64 = 32;

/// The number of pages as clap reads it.
fn batch(text: &str) -> Result<usize, String> {
    let pages = text
        .parse()
        .ok()
        .filter(|pages: &usize| pages.is_power_of_two());
    let pages = pages.filter(|&pages| pages <= MOST_AT_ONCE);
    pages.ok_or_else(|| "give a power of two up to 512".into())
}

/// What the guest touches, and how its missing pages are provided.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(
    mut_arg("bytes", |arg| arg.default_value("32M")),
    mut_arg("memory_kind", |arg| arg.default_value("anonymous")),
    mut_arg("slots", |arg| arg.value_parser(up_to(1000))),
)]
pub struct DemandPaging {
    /// The guest
    #[command(flatten)]
    pub guest: GuestOptions,
    /// How a missing page is provided
    #[arg(long, value_enum, value_name = "WAY", default_value_t = By::Queue)]
    pub by: By,
    /// Threads that read a queue
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(64))]
    pub readers: usize,
    /// A queue for each vCPU's share, instead of one for all
    #[arg(long)]
    pub queue_each: bool,
    /// How a page gets into the memory: by a copy, or by a mapping of the file's page (memfd)
    #[arg(long, value_enum, value_name = "WAY", default_value_t = Fill::Copy)]
    pub fill: Fill,
    /// Pages provided for each fault, the aligned run around the page: a power of two up to 512.
    /// In hugetlbfs it is always 512
    #[arg(long, value_name = "PAGES", default_value = "1", value_parser = batch)]
    pub batch: usize,
    /// A pause before each fill; the time until a page source answers
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub delay: Duration,
}

/// How a missing page is provided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum By {
    /// The vCPU sleeps in a queue until a reader has provided the page
    Queue,
    /// The vCPU exits, and its thread provides the page
    Exits,
    /// The vCPU exits, the guest gets an asynchronous page fault, and another thread provides the
    /// page
    Tokens,
    /// The vCPU sleeps until the page source of the backend has answered
    Source,
}

/// How a page gets into the memory: for Linux memory by `UFFDIO_COPY` or `UFFDIO_CONTINUE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Fill {
    /// From another page
    Copy,
    /// The file has the page, and the kernel maps it
    Continue,
}

/// The options of the command without arguments.
impl Default for DemandPaging {
    fn default() -> Self {
        options_of("")
    }
}

impl DemandPaging {
    /// Refuses options that exclude each other.
    ///
    /// # Errors
    /// The first such pair, and what to do.
    pub fn check(&self) -> Result<(), &'static str> {
        let (guest, by, kind) = (&self.guest, self.by, self.guest.memory_kind);
        let (is_kvm, has_queue) = (guest.backend == Backend::Kvm, by == By::Queue);
        let is_huge_total = guest.bytes.0 > BYTES_MAX / guest.vcpus as u64;
        let runs = self.at_once() as u64 * PAGE_SIZE as u64;
        let wrong = [
            (is_huge_total, "--bytes: give all vCPUs together at most 1T"),
            (
                by == By::Source && self.fill == Fill::Continue,
                "--by source: the source's answer is copied; leave --fill continue out",
            ),
            (
                self.queue_each && !self.guest.bytes.0.is_multiple_of(runs),
                "--queue-each: two vCPUs' shares may have parts of one run of --batch pages; give \
                 --bytes a multiple of the run",
            ),
            (
                self.guest.bytes.0 == 0 || !self.guest.bytes.0.is_multiple_of(PAGE_SIZE as u64),
                "--bytes: give a multiple of 4K",
            ),
            (
                !has_queue && (self.readers > 1 || self.queue_each),
                "--readers and --queue-each are for --by queue: leave them out",
            ),
            (
                self.guest.overlap && self.queue_each,
                "--overlap: the vCPUs have no shares of their own; leave --queue-each out",
            ),
            (
                by == By::Source && self.batch > 1,
                "--by source provides one page at a time: leave --batch out",
            ),
            (
                self.queue_each && kind == MemoryKind::Hugetlbfs,
                "--queue-each: two vCPUs' shares may have parts of one huge page; choose another \
                 --memory-kind",
            ),
            (
                kind == MemoryKind::Hugetlbfs1G,
                "--memory-kind hugetlbfs-1g: a page of 1 GiB is never missing; choose another kind",
            ),
            (
                self.fill == Fill::Continue && kind != MemoryKind::Shared,
                "--fill continue maps pages of a file: add --memory-kind memfd",
            ),
            (
                is_kvm && kind != MemoryKind::Linux,
                "--backend kvm runs guests in anonymous memory: leave --memory-kind out",
            ),
            (
                is_kvm && guest.slots > 1,
                "--slots is for --backend soft: leave it out",
            ),
        ];
        let found = wrong.into_iter().find(|(is_wrong, _)| *is_wrong);
        found.map_or_else(|| guest.check(), |(_, why)| Err(why))
    }

    /// Boots a guest and lets it touch its memory once.
    ///
    /// # Errors
    /// The VM cannot be made here, or the guest failed.
    pub fn run(&self, progress: &Progress) -> LabResult<Outcome> {
        progress.step("the guest boots")?;
        let touches = || progress.step("the guest touches its memory");
        Ok(match self.guest.backend {
            Backend::Soft => Fixture::soft(self)?.run(self, touches)?.0,
            Backend::Kvm => Fixture::kvm(self).run(self, touches)?.0,
        })
    }

    /// The pause before a fill.
    fn pause(&self) {
        if !self.delay.is_zero() {
            thread::sleep(self.delay);
        }
    }

    /// Pages that the vCPUs touch together.
    pub(crate) const fn pages(&self) -> u64 {
        self.guest.pages().1
    }

    /// Pages provided for each fault.
    pub(crate) fn at_once(&self) -> usize {
        self.batch.max(self.guest.unit())
    }

    /// The memory of the guest, in whole huge pages.
    pub(crate) fn memory(&self) -> PageCount {
        let touched = self.pages().next_multiple_of(MOST_AT_ONCE as u64);
        PageCount::new(touched + (BESIDE_MIB << 20) / PAGE_SIZE as u64)
    }

    /// The parameters of its guest.
    fn words(&self) -> String {
        format!(
            "gate=1 threads={} bytes={} overlap={} order={}",
            self.guest.vcpus,
            self.pages() * PAGE_SIZE as u64,
            u8::from(self.guest.overlap),
            if self.guest.random { "random" } else { "seq" },
        )
    }

    /// The name of this way in results.
    pub(crate) fn way(&self) -> String {
        match self.by {
            By::Queue if self.queue_each => "queue_each".into(),
            By::Queue => format!("queue_{}_readers", self.readers),
            By::Exits => "exits".into(),
            By::Tokens => "exits_apf".into(),
            By::Source => "source".into(),
        }
    }
}
