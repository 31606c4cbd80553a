//! Installs a leaf for a page of the host: chooses its level, and splits or collapses existing
//! leaves.
//!
//! ```text
//! what the host has   in stage 2      result
//! 4 KiB               nothing         a small leaf
//! 4 KiB               a huge leaf     the same if it grants the access; else split, one upgraded
//! 2 MiB, allowed      nothing         a huge leaf
//! 2 MiB, allowed      small leaves    collapsed in place to a huge one
//! 1 GiB, allowed      any             `gib`
//! any                 a 1 GiB leaf    the same if it grants the access; else it is split first
//! ```
//! The fault read the invalidation sequence; then the host reported that it has the block whole;
//! then the cursor found the sequence unchanged. So no page of the block was moved in between, and
//! its small leaves map the frames that a huge leaf maps. If they do not (a bug, or rights that
//! cannot be combined), the page gets its small leaf.

use crate::fault::{NotInstalled, ResolvedPage};
use crate::rmap::{BLOCK, Rmap};
use crate::{InBlock, Mmu, MmuFormat};
use lacuna_addr::{Gfn, Level, Pfn};
use lacuna_stage2::{Cursor, Exhausted, Leaf, MapError, Mapped};

impl<F: MmuFormat> Mmu<F> {
    /// Maps the page by its small leaf, or the whole block with the same rights, if the host has
    /// the block whole. Returns the level of the leaf.
    #[inline(always)]
    pub(crate) fn install(
        &self,
        cursor: &mut Cursor<'_, F>,
        rmap: &Rmap,
        page: ResolvedPage,
    ) -> Result<Level, NotInstalled> {
        let ResolvedPage { gfn, leaf, level } = page;
        // Read again under the range lock: `disallow_huge` may have visited this block after the
        // host's answer. While the slot logs, the first write to a huge leaf would mark 512 pages.
        let max_level = match rmap.log().is_on() {
            true => Level::L4K,
            false => rmap.max_level(gfn),
        };
        if level.min(max_level) >= Level::L2M {
            let installed = F::install_huge(self, cursor, rmap, gfn, leaf);
            if installed.map_err(NotInstalled::Exhausted)? {
                return Ok(Level::L2M);
            }
        }
        install_small(cursor, rmap, gfn, leaf)
    }

    /// Maps the block around `gfn` by one leaf. Returns whether one leaf maps it now.
    #[inline(always)]
    pub(crate) fn map_block(
        &self,
        cursor: &mut Cursor<'_, F>,
        rmap: &Rmap,
        gfn: Gfn,
        leaf: Leaf,
    ) -> Result<bool, Exhausted> {
        let first = leaf.pfn.get() - gfn.get() % BLOCK;
        let huge = Leaf {
            pfn: Pfn::new(u32::try_from(first).expect("frame numbers have 32 bits")),
            ..leaf.at(Level::L2M)
        };
        match cursor.map(gfn.block().range().start(), huge) {
            Ok(mapped) => {
                if let Mapped::New(at) = mapped {
                    rmap.set_huge(gfn, at);
                }
                return Ok(true);
            }
            Err(MapError::Exhausted(error)) => return Err(error),
            Err(MapError::Occupied { .. }) => {}
            Err(error) => unreachable!("a whole block is aligned: {error}"),
        }
        let Ok(Some((collapsed, table))) = cursor.collapse_to(gfn, huge) else {
            return Ok(false);
        };
        rmap.collapse(gfn, collapsed.at);
        table.retire(&*self.qsbr);
        Ok(true)
    }

    /// Splits the huge leaf around `gfn`, if there is one.
    pub(crate) fn split(
        &self,
        cursor: &mut Cursor<'_, F>,
        rmap: &Rmap,
        gfn: Gfn,
    ) -> Result<(), Exhausted> {
        if let InBlock::Huge(_) = rmap.block(gfn)
            && let Some(split) = cursor.split(gfn)?
        {
            rmap.split(gfn, split.first);
        }
        Ok(())
    }
}

#[inline]
fn install_small<F: MmuFormat>(
    cursor: &mut Cursor<'_, F>,
    rmap: &Rmap,
    gfn: Gfn,
    leaf: Leaf,
) -> Result<Level, NotInstalled> {
    match cursor.map(gfn, leaf) {
        Ok(Mapped::New(at)) => rmap.set_page(gfn, at),
        Ok(Mapped::Split(at)) => rmap.split(gfn, at),
        Ok(Mapped::Upgraded(_) | Mapped::Spurious(_)) => {
            return Ok(match rmap.block(gfn) {
                InBlock::Huge(_) => Level::L2M,
                InBlock::Small(_) => Level::L4K,
                InBlock::Nothing => Level::L1G,
            });
        }
        Err(MapError::Exhausted(error)) => return Err(NotInstalled::Exhausted(error)),
        Err(MapError::Occupied { .. }) if rmap.gib(gfn).is_some() => {
            return Err(NotInstalled::InGib);
        }
        Err(error) => unreachable!("the recheck admits no stale frame: {error}"),
    }
    Ok(Level::L4K)
}
