//! The status page: progress of each guest thread, in guest memory.
//!
//! ```text
//!    0  u64 magic "LACUNAST"   u32 version   u32 nthreads   u32 state   u32 exit_code
//!   24  u32 apf counters: not_present  ready  wake_all  dummy  idle  lost
//!   48  u32 paused   u32 setting, both written by the host   pad to 64
//!   64  entry 0:  u64 counter  u64 goal  u32 kind  u32 cpu  u8 name[24]  u32 latency_ns[4]
//!  128  entry 1 ...                                                       63 entries on this page
//! ```
//! Four further pages have 256 more entries. They lie at [`MORE_AT`], after the kernel's info page.
//!
//! The guest announces the page with a 32-bit write of its frame number to [`crate::PORT_STATUS`].
//! Threads write their counters with plain aligned stores. So a host may copy the page at any
//! moment: each counter in the copy is a value that the thread has written. `include/lacuna/abi.h`
//! is the C side; a test compares the two.

use std::fmt;

/// Size of the page, bytes.
pub const PAGE_BYTES: usize = 4096;
/// First eight bytes of the page, read as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"LACUNAST");
/// The version this module reads.
pub const VERSION: u32 = 2;
/// Entries on all pages.
pub const MAX_THREADS: usize = (PAGE_BYTES + MORE_BYTES - ENTRIES_AT) / ENTRY_BYTES;
/// Offset of the further pages from the first one.
pub const MORE_AT: usize = 2 * PAGE_BYTES;
/// Size of the further pages, bytes.
pub const MORE_BYTES: usize = 4 * PAGE_BYTES;

/// Offset of the magic, u64.
pub const MAGIC_AT: usize = 0;
/// Offset of the version, u32.
pub const VERSION_AT: usize = 8;
/// Offset of the number of entries in use, u32.
pub const NTHREADS_AT: usize = 12;
/// Offset of the machine's state, u32.
pub const STATE_AT: usize = 16;
/// Offset of the exit code, u32.
pub const EXIT_CODE_AT: usize = 20;
/// Offset of the counter of page-not-present events, u32. The other five follow it.
pub const APF_AT: usize = 24;
/// Offset of the paused kinds, u32: bits [`Kind::paused_bit`]. Only the host writes it.
pub const PAUSED_AT: usize = 48;
/// Offset of the workload's setting, u32. Only the host writes it; 0 means not set. For the
/// workload `churn`, 1 + how many of 65536 transactions go to the cold rest of its heap. At the
/// highest value, `u32::MAX`, each transaction writes to all pages of its process. With `gate=1`,
/// `touch`, `verify` and `zipf` wait until it is set. For `zipf` it is then the accesses' seed.
/// `diskbusy` ends.
pub const SETTING_AT: usize = 52;
/// Offset of the first entry.
pub const ENTRIES_AT: usize = 64;
/// Size of one entry, bytes.
pub const ENTRY_BYTES: usize = 64;
/// Offset of the counter in an entry, u64.
pub const COUNTER_AT: usize = 0;
/// Offset of the counter's final value, u64.
pub const GOAL_AT: usize = 8;
/// Offset of the kind, u32.
pub const KIND_AT: usize = 16;
/// Offset of the processor, u32.
pub const CPU_AT: usize = 20;
/// Offset of the name.
pub const NAME_AT: usize = 24;
/// Size of the name, NUL-padded.
pub const NAME_BYTES: usize = 24;
/// Offset of the latencies, u32 each, in nanoseconds: median, 99 %, 99.9 %, worst.
pub const LATENCY_AT: usize = 48;

/// A thread's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Computes; its counter is work done.
    Worker,
    /// Touches memory; its counter is accesses made.
    Faulter,
    /// Anything else.
    Other,
}

impl Kind {
    /// The bit of the word at [`PAUSED_AT`] that pauses threads of this kind. A thread may count a
    /// little further before it stops. A workload pauses only if it reads the word, as `bm` does.
    pub const fn paused_bit(self) -> u32 {
        match self {
            Kind::Worker => 1 << 1,
            Kind::Faulter => 1 << 2,
            Kind::Other => 1 << 3,
        }
    }
}

/// Async page faults as the guest kernel saw them: events since boot, summed over its vCPUs, modulo
/// 2^32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Apf {
    /// Page-not-present events: each put a thread to sleep, except the events in `dummies` and
    /// `idle`.
    pub not_present: u32,
    /// Page-ready events for one token.
    pub ready: u32,
    /// Page-ready events for all waiting threads.
    pub wake_all: u32,
    /// Events in `ready` for which no thread waited yet.
    pub dummies: u32,
    /// Events in `not_present` that hit the idle loop, which has no thread to run and halts.
    pub idle: u32,
    /// Events without a meaning for the guest. A correct host sends none.
    pub lost: u32,
}

/// The state of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestState {
    /// The kernel is setting up.
    Booting,
    /// The workload runs.
    Running,
    /// Ended, with this exit code.
    Done(u32),
}

/// One thread's progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// Work done so far, in the thread's own unit.
    pub counter: u64,
    /// The counter's final value, if the thread knows it.
    pub goal: Option<u64>,
    /// The thread's work.
    pub kind: Kind,
    /// The vCPU of the thread.
    pub cpu: u32,
    /// Its name; empty until it gives itself one.
    pub name: String,
    /// The times of its latest pieces of work, if the thread records them, as `churn` does.
    pub latency: Option<Latency>,
}

/// The times of the pieces of a thread's work in its last window, in nanoseconds, at most 2^32 - 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// The median.
    pub p50_ns: u32,
    /// The value that 99 % did not exceed.
    pub p99_ns: u32,
    /// The value that 99.9 % did not exceed.
    pub p999_ns: u32,
    /// The worst.
    pub max_ns: u32,
}

/// The decoded page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The stage of the guest's run.
    pub state: GuestState,
    /// Async page faults so far.
    pub apf: Apf,
    /// Thread slots used so far, by index. A finished thread keeps its last values until its slot
    /// is used again.
    pub threads: Vec<Thread>,
}

/// Why bytes are not a status page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Fewer bytes than a page.
    Short(usize),
    /// The magic number is wrong.
    Magic(u64),
    /// A version this module does not know.
    Version(u32),
    /// More entries than the pages have.
    Threads(u32),
    /// A state this module does not know.
    State(u32),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Short(n) => write!(f, "status page has {n} bytes, {PAGE_BYTES} expected"),
            Error::Magic(m) => write!(f, "status page magic is {m:#x}, {MAGIC:#x} expected"),
            Error::Version(v) => write!(f, "status page version is {v}, {VERSION} expected"),
            Error::Threads(n) => write!(f, "status page claims {n} threads of {MAX_THREADS}"),
            Error::State(s) => write!(f, "status page state is {s}, 0 to 2 expected"),
        }
    }
}

impl std::error::Error for Error {}

/// Copies the status page, and the further pages if entries there are in use. `read` fills a buffer
/// from an offset from the status page, and returns whether it could.
pub fn copy(mut read: impl FnMut(usize, &mut [u8]) -> bool) -> Option<Vec<u8>> {
    let mut pages = vec![0; PAGE_BYTES];
    let mut complete = read(0, &mut pages);
    if complete && u32_at(&pages, NTHREADS_AT) as usize > (PAGE_BYTES - ENTRIES_AT) / ENTRY_BYTES {
        pages.resize(PAGE_BYTES + MORE_BYTES, 0);
        complete = read(MORE_AT, &mut pages[PAGE_BYTES..]);
    }
    complete.then_some(pages)
}

impl Status {
    /// Decodes a copy of the first page, or of all pages as [`copy`] makes it. A copy of the first
    /// page alone has the first 63 threads. The guest may have written anything, so every field is
    /// checked. Names lose all but printable ASCII, and unknown kinds become [`Kind::Other`].
    pub fn parse(page: &[u8]) -> Result<Self, Error> {
        if page.len() < PAGE_BYTES {
            return Err(Error::Short(page.len()));
        }
        match u64_at(page, MAGIC_AT) {
            MAGIC => {}
            other => return Err(Error::Magic(other)),
        }
        match u32_at(page, VERSION_AT) {
            VERSION => {}
            other => return Err(Error::Version(other)),
        }
        let state = match u32_at(page, STATE_AT) {
            0 => GuestState::Booting,
            1 => GuestState::Running,
            2 => GuestState::Done(u32_at(page, EXIT_CODE_AT)),
            other => return Err(Error::State(other)),
        };
        let count = u32_at(page, NTHREADS_AT);
        if count as usize > MAX_THREADS {
            return Err(Error::Threads(count));
        }
        let entries = page[ENTRIES_AT..].chunks_exact(ENTRY_BYTES);
        let threads = entries.take(count as usize).map(Thread::parse).collect();
        let apf = Apf::parse(page);
        Ok(Self {
            state,
            apf,
            threads,
        })
    }
}

impl Apf {
    fn parse(page: &[u8]) -> Self {
        let counter = |index: usize| u32_at(page, APF_AT + 4 * index);
        Self {
            not_present: counter(0),
            ready: counter(1),
            wake_all: counter(2),
            dummies: counter(3),
            idle: counter(4),
            lost: counter(5),
        }
    }
}

impl Thread {
    fn parse(entry: &[u8]) -> Self {
        let name = &entry[NAME_AT..NAME_AT + NAME_BYTES];
        let name = name
            .iter()
            .take_while(|b| **b != 0)
            .filter(|b| (32..127).contains(*b));
        Self {
            counter: u64_at(entry, COUNTER_AT),
            goal: Some(u64_at(entry, GOAL_AT)).filter(|g| *g != 0),
            kind: match u32_at(entry, KIND_AT) {
                1 => Kind::Worker,
                2 => Kind::Faulter,
                _ => Kind::Other,
            },
            cpu: u32_at(entry, CPU_AT),
            name: name.map(|b| char::from(*b)).collect(),
            latency: Latency::parse(entry),
        }
    }
}

impl Latency {
    fn parse(entry: &[u8]) -> Option<Self> {
        let number = |index: usize| u32_at(entry, LATENCY_AT + 4 * index);
        let latency = Self {
            p50_ns: number(0),
            p99_ns: number(1),
            p999_ns: number(2),
            max_ns: number(3),
        };
        Some(latency).filter(|latency| latency.max_ns != 0)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Vec<u8> {
        let mut p = vec![0; PAGE_BYTES];
        p[..8].copy_from_slice(b"LACUNAST");
        p[VERSION_AT] = 2;
        p[NTHREADS_AT] = 2;
        p[STATE_AT] = 1;
        for counter in 0..6 {
            p[APF_AT + 4 * counter] = 10 + counter as u8;
        }
        let e = ENTRIES_AT + ENTRY_BYTES;
        p[e..e + 8].copy_from_slice(&77u64.to_le_bytes());
        p[e + GOAL_AT] = 100;
        p[e + KIND_AT] = 2;
        p[e + CPU_AT] = 3;
        p[e + NAME_AT..e + NAME_AT + 7].copy_from_slice(b"fault\x1b0");
        for part in 0..4 {
            p[e + LATENCY_AT + 4 * part] = 20 + part as u8;
        }
        p
    }

    #[test]
    fn reads_what_a_guest_wrote() {
        let status = Status::parse(&page()).unwrap();
        assert_eq!(status.state, GuestState::Running);
        assert_eq!(status.threads.len(), 2);
        let apf = Apf {
            not_present: 10,
            ready: 11,
            wake_all: 12,
            dummies: 13,
            idle: 14,
            lost: 15,
        };
        assert_eq!(status.apf, apf);
        let t = &status.threads[1];
        assert_eq!(
            (t.counter, t.goal, t.kind, t.cpu),
            (77, Some(100), Kind::Faulter, 3)
        );
        assert_eq!(t.name, "fault0");
        let latency = Latency {
            p50_ns: 20,
            p99_ns: 21,
            p999_ns: 22,
            max_ns: 23,
        };
        assert_eq!(t.latency, Some(latency));
        let idle = &status.threads[0];
        assert_eq!((idle.goal, idle.latency), (None, None));
    }

    #[test]
    fn a_copy_has_the_further_pages_if_they_are_in_use() {
        let copied = |threads: u16| {
            let mut first = page();
            first[NTHREADS_AT..NTHREADS_AT + 2].copy_from_slice(&threads.to_le_bytes());
            let read = |at, buffer: &mut [u8]| match at {
                0 => buffer.copy_from_slice(&first),
                _ => buffer[COUNTER_AT] = 5,
            };
            copy(|at, buffer| {
                read(at, buffer);
                true
            })
            .unwrap()
        };
        assert_eq!(copied(63).len(), PAGE_BYTES);
        let status = Status::parse(&copied(256)).unwrap();
        assert_eq!((status.threads.len(), status.threads[63].counter), (256, 5));
        assert_eq!(
            copy(|at, _| at == 0).map(|page| page.len()),
            Some(PAGE_BYTES)
        );
        assert_eq!(copy(|_, _| false), None);
    }

    #[test]
    fn refuses_what_is_not_a_status_page() {
        assert_eq!(Status::parse(&[0; 100]), Err(Error::Short(100)));
        assert_eq!(Status::parse(&[0; PAGE_BYTES]), Err(Error::Magic(0)));
        for (at, value, error) in [
            (VERSION_AT, 9, Error::Version(9)),
            (NTHREADS_AT + 1, 2, Error::Threads(514)),
            (STATE_AT, 3, Error::State(3)),
        ] {
            let mut p = page();
            p[at] = value;
            assert_eq!(Status::parse(&p), Err(error));
        }
    }
}
