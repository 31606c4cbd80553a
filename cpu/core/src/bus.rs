//! The interface between a processor and the machine that runs it.

use crate::HostPage;
use lacuna_addr::{Access, Gfn, Gpa};

/// Why an instruction cannot complete now. The processor undoes it, leaves its run loop and reports
/// the stop; it is executed again from its start when the vCPU is entered again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The page is not here yet; the bus has noted what there is to wait for.
    Wait,
    /// Nothing to wait for: pass a quiescent point and try again.
    Again,
    /// No memory slot lies behind the address (or a write to a read-only one): a device access.
    Mmio(Gpa),
    /// The page's content is lost (I/O error on swap-in); the bus has noted the details.
    Lost,
}

/// The machine around a processor, as the processor uses it.
///
/// # Safety
/// A page returned by [`Bus::page`] must stay readable (and writable, if it says so) until the
/// calling vCPU passes its next quiescent point, that is, until it returns from its run loop.
/// Processors keep such pages in a [`crate::Tlb`]. So code that takes a page back waits until the
/// vCPU has passed a quiescent point, and only then reuses the page. The processor's TLBs are
/// flushed before that vCPU enters its run loop again.
pub unsafe trait Bus {
    /// The page behind `gfn` for `access`: stage 2, faults included. Page walks ask with
    /// [`Access::Write`], as hardware with EPT A/D bits does (SDM vol 3 29.3.5).
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop>;

    /// The processor is about to keep decoded instructions of `gfn`. From the moment this returns
    /// `Ok`, [`HostPage::is_write_tracked`] is true in every page returned for it, on every vCPU,
    /// so that no TLB takes it as writable and writers come by [`Bus::code_written`].
    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop>;

    /// This processor has written into a write-tracked page. The bus tells the others; the caller
    /// has dropped its own decoded instructions.
    fn code_written(&mut self, gfn: Gfn);
}

/// How one vCPU wakes another (inter-processor interrupts): kick it out of its dispatch loop or its
/// halt.
pub trait Wake: Send + Sync {
    /// Makes vCPU `index` look at its pending interrupts soon.
    fn wake(&self, index: usize);
}
