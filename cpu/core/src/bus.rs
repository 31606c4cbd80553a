//! The interface between a processor and its machine.

use crate::HostPage;
use lacuna_addr::{Access, Gfn, Gpa};

/// Why an instruction cannot complete now. The processor undoes the instruction, leaves its run
/// loop and reports the stop. When the vCPU is entered again, it executes the instruction from its
/// start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The page is not resident yet. The bus has recorded the page, and the vCPU must wait for it.
    Wait,
    /// There is no wait: the vCPU passes a quiescent point and tries again.
    Again,
    /// A device access: no memory slot lies behind the address, or it is a write to a read-only
    /// slot.
    Mmio(Gpa),
    /// The page's content is lost (I/O error on swap-in); the bus has recorded the details.
    Lost,
}

/// The machine around a processor, from the processor's side.
///
/// # Safety
/// A page from [`Bus::page`] must stay readable (and writable, if it says so) until the calling
/// vCPU's next quiescent point: its return from its run loop. Processors keep such pages in a
/// [`crate::Tlb`]. So a thread that takes a page back waits for the vCPU's next quiescent point,
/// and only then reuses the page. The processor's TLBs are flushed before that vCPU enters its run
/// loop again.
pub unsafe trait Bus {
    /// The page behind `gfn` for `access`: stage 2, faults included. Page walks use
    /// [`Access::Write`], as hardware with EPT A/D bits does (SDM vol 3 29.3.5).
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop>;

    /// The processor calls this before it keeps decoded instructions of `gfn`. After `Ok`,
    /// [`HostPage::is_write_tracked`] is true in every page that the bus returns for `gfn`, on
    /// every vCPU. So no TLB holds the page as writable, and a vCPU that writes to it calls
    /// [`Bus::code_written`].
    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop>;

    /// The processor calls this after it has written to a write-tracked page, and dropped its own
    /// decoded instructions of the page. The bus notifies the other processors.
    fn code_written(&mut self, gfn: Gfn);
}

/// How one vCPU wakes another for an inter-processor interrupt: by a kick out of its dispatch loop
/// or its halt.
pub trait Wake: Send + Sync {
    /// Makes vCPU `index` look at its pending interrupts soon.
    fn wake(&self, index: usize);
}
