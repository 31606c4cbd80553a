//! The rare ends of the fault path, compiled in this crate for each table format.
//!
//! [`Mmu`] is generic, so its functions are compiled in the crate that uses them. If these three
//! were compiled there too, the functions shared with the fault path
//! ([`lacuna_host::Host::resolve`], [`Cursor::map`]) would have several callers there, and the
//! compiler would inline them nowhere. That cost 55 of the 2990 instructions of a first touch
//! (callgrind).

use crate::fault::Again;
use crate::{Mmu, Outcome, Rmap, VcpuMmu};
use lacuna_addr::{Access, Gfn};
use lacuna_stage2::{Arm64, Cursor, Ept, Exhausted, Leaf, TableFormat};

/// A table format of an [`Mmu`].
pub trait MmuFormat: TableFormat + Sized {
    /// The attempts of a fault after the first, which ended because of `why`.
    #[doc(hidden)]
    fn fault_again(
        mmu: &Mmu<Self>,
        vcpu: &mut VcpuMmu,
        gfn: Gfn,
        access: Access,
        why: Again,
    ) -> Outcome;

    /// As [`Mmu::wait_for_page`].
    #[doc(hidden)]
    fn wait_for_page(
        mmu: &Mmu<Self>,
        vcpu: &mut VcpuMmu,
        gfn: Gfn,
        access: Access,
    ) -> Option<Outcome>;

    /// Maps the block around `gfn` by one leaf. Returns whether one leaf maps it now.
    #[doc(hidden)]
    fn install_huge(
        mmu: &Mmu<Self>,
        cursor: &mut Cursor<'_, Self>,
        rmap: &Rmap,
        gfn: Gfn,
        leaf: Leaf,
    ) -> Result<bool, Exhausted>;
}

macro_rules! compiled_here {
    ($($format:ty),*) => {$(
        impl MmuFormat for $format {
            #[cold]
            #[inline(never)]
            fn fault_again(
                mmu: &Mmu<Self>,
                vcpu: &mut VcpuMmu,
                gfn: Gfn,
                access: Access,
                why: Again,
            ) -> Outcome {
                mmu.attempt_again(vcpu, gfn, access, why)
            }

            #[cold]
            #[inline(never)]
            fn wait_for_page(
                mmu: &Mmu<Self>,
                vcpu: &mut VcpuMmu,
                gfn: Gfn,
                access: Access,
            ) -> Option<Outcome> {
                mmu.resolve_page(vcpu, gfn, access)
            }

            #[inline(never)]
            fn install_huge(
                mmu: &Mmu<Self>,
                cursor: &mut Cursor<'_, Self>,
                rmap: &Rmap,
                gfn: Gfn,
                leaf: Leaf,
            ) -> Result<bool, Exhausted> {
                mmu.map_block(cursor, rmap, gfn, leaf)
            }
        }
    )*};
}

compiled_here!(Ept, Arm64);
