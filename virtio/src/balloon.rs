//! The memory balloon (virtio 1.2, 5.5), with free page reporting.
//!
//! A page in the balloon, or reported as free, is discarded: its frame goes back to the host, and
//! the guest finds zeros at its next touch. So a deflated page needs nothing.

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest};
use crate::mmio::Mmio;
use crate::queue::Chain;
use lacuna_addr::{Gfn, GfnRange, PAGE_SIZE, PageCount};
use lacuna_machine::StateError;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM: the driver takes pages back when it needs them.
const DEFLATE_ON_OOM: u32 = 2;
/// VIRTIO_BALLOON_F_PAGE_REPORTING.
const REPORTING: u32 = 5;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// The reports have queue 4, behind the queues of two features that are not offered. Linux gives
/// them the next number, 2. So each of these queues is for reports.
const QUEUES: usize = 5;

/// `actual` of `struct virtio_balloon_config`.
const ACTUAL: Range<usize> = 4..8;
/// The most page numbers of one request. Linux sends 256.
const NUMBERS_MAX: u64 = 1 << 16;

/// A balloon. [`Mmio::set_target`] asks the guest for memory. [`Mmio::new`] refuses a VM without
/// [`Vm::balloon`](lacuna_machine::Vm::balloon).
#[derive(Debug, Default)]
pub struct Balloon {
    target: AtomicU32,
}

impl Balloon {
    /// A balloon without pages.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Discards the pages of a list of page numbers.
fn inflate(chain: &Chain, guest: &Guest<'_>) -> Result<(), Fault> {
    let count = chain.readable.bytes() / 4;
    if count > NUMBERS_MAX {
        return Err(Fault::Driver(
            "a request to the balloon has more than 65536 pages",
        ));
    }
    let mut raw = vec![0; 4 * count as usize];
    chain.readable.read(guest, 0, &mut raw)?;
    let numbers = raw
        .as_chunks()
        .0
        .iter()
        .map(|number| u32::from_le_bytes(*number));
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    for run in numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        discard(guest, run[0].into(), run.len() as u64);
    }
    Ok(())
}

/// Discards the whole pages of each reported buffer.
fn report(chain: &Chain, guest: &Guest<'_>) {
    let page = PAGE_SIZE as u64;
    for (at, bytes) in chain.writable.iter() {
        let end = at.saturating_add(bytes.into()) / page;
        let first = at.div_ceil(page);
        discard(guest, first, end.saturating_sub(first));
    }
}

/// The driver only gives hints: pages outside of memory, and pages that the VM cannot discard, are
/// none.
fn discard(guest: &Guest<'_>, first: u64, pages: u64) {
    let range = Gfn::new(first).and_then(|first| GfnRange::new(first, pages));
    if let Some(range) = range {
        guest.discard(range);
    }
}

impl VirtioDevice for Balloon {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn features(&self) -> u64 {
        1 << DEFLATE_ON_OOM | 1 << REPORTING
    }

    /// `num_pages` and `actual`.
    fn config(&self) -> Vec<u8> {
        let target = self.target.load(Ordering::Relaxed).to_le_bytes();
        [target, [0; 4]].concat()
    }

    fn driver_config(&self) -> Range<usize> {
        ACTUAL
    }

    fn discards(&self) -> bool {
        true
    }

    fn handle(&self, queue: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        match queue {
            INFLATE => inflate(chain, guest)?,
            DEFLATE => {}
            _ => report(chain, guest),
        }
        Ok(Answer::Used(0))
    }

    /// The target.
    fn save(&self) -> Vec<u8> {
        self.target.load(Ordering::Relaxed).to_le_bytes().to_vec()
    }

    fn restore(&self, state: &[u8]) -> Result<(), StateError> {
        let target = state.try_into().map_err(|_| StateError::Invalid {
            field: "virtio.own",
            value: state.len() as u64,
        })?;
        self.target
            .store(u32::from_le_bytes(target), Ordering::Relaxed);
        Ok(())
    }
}

impl Mmio<Balloon> {
    /// Asks the driver to give this much memory to the balloon, or to take the rest back.
    pub fn set_target(&self, pages: PageCount) {
        let pages = u32::try_from(pages.get()).unwrap_or(u32::MAX);
        self.device().target.store(pages, Ordering::Relaxed);
        self.shared.change_config();
    }

    /// How much the driver says is in the balloon.
    pub fn actual(&self) -> PageCount {
        let control = self.shared.lock();
        let actual = control.registers.config[ACTUAL].try_into();
        PageCount::new(u32::from_le_bytes(actual.expect("four bytes")).into())
    }
}
