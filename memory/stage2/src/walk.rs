//! The walk of the hardware on a TLB miss.
//!
//! It takes no lock, and is safe against every change: each step reads one entry once. A and D are
//! set by compare-and-swap on the checked value, so a leaf that is unmapped or write-protected
//! meanwhile is checked again. The caller must be online in the VM's `Qsbr`, or hold the cursor
//! over the gfn: this prevents the reuse of the tables, and of the frame in the answer.

use crate::format::{Height, LookupLevel};
use crate::pml::{Log, LogFull, PmlLog, Unlogged};
use crate::{Entry, Leaf, Stage2, TableFormat};
use lacuna_addr::{Access, Gfn, Level, Pfn};
use lacuna_sync::shim::Ordering;

/// The outcome of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Walk {
    /// The tables allow the access.
    Hit(Translation),
    /// The tables do not allow the access: an Intel processor would exit with reason 48, and an
    /// arm64 processor would take a stage-2 abort.
    Violation(Violation),
}

/// A translation that a TLB may cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The host frame behind the gfn of the walk. In a large leaf this is not the leaf's first
    /// frame.
    pub pfn: Pfn,
    /// The size of the leaf that maps it.
    pub level: Level,
    /// A TLB may allow writes: the leaf has W and D, so that no write has to set D.
    pub writable: bool,
    /// A TLB may allow instruction fetches.
    pub exec: bool,
}

/// An access that the tables do not allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The requested access.
    pub access: Access,
    /// Why the tables do not allow it.
    pub cause: Cause,
}

/// Why an access fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// No leaf maps the gfn.
    Absent,
    /// This leaf maps the gfn, and does not grant the access.
    Denied(Leaf),
}

/// How one descent from the root ended.
enum Step {
    /// The walk ended with this result.
    Done(Walk),
    /// The walk must start again: it was inside an unlinked table, or another thread changed the
    /// leaf after this walk had loaded it and before it set A or D.
    Again,
    /// The walk must set A or D, and the log has no room. It has set neither.
    Full,
}

impl<F: TableFormat> Stage2<F> {
    /// Translates an access to `gfn`, setting A, and D for a write.
    #[inline]
    pub fn walk(&self, gfn: Gfn, access: Access) -> Walk {
        loop {
            if let Step::Done(outcome) = self.walk_once(gfn, access, &mut Unlogged) {
                return outcome;
            }
        }
    }

    /// As [`Stage2::walk`], by a processor with page-modification logging on: each page whose D it
    /// sets goes into `log`.
    ///
    /// # Errors
    /// [`LogFull`]: A or D would have to be set. Nothing has changed.
    #[inline]
    pub fn walk_logged(&self, gfn: Gfn, access: Access, log: &mut PmlLog) -> Result<Walk, LogFull> {
        loop {
            match self.walk_once(gfn, access, log) {
                Step::Done(outcome) => return Ok(outcome),
                Step::Again => {}
                Step::Full => return Err(LogFull),
            }
        }
    }

    /// The level at which a walk of `gfn` ends now: at a leaf, or where there is nothing. A walk
    /// does not return it, because only a syndrome contains it.
    pub fn lookup_level(&self, gfn: Gfn) -> LookupLevel {
        let mut table = self.root;
        let mut ends = |height: &Height| match self.read_table(table, height.index(gfn)) {
            Some(below) => {
                table = below;
                false
            }
            None => true,
        };
        let last = Height::DOWN.into_iter().find(|height| ends(height));
        last.expect("no table below 4 KiB leaves").lookup_level()
    }

    /// Why a walk for `access` at `gfn` would end now, and at which level. It sets neither A nor D.
    /// `None`: the access is granted.
    pub fn violation(&self, gfn: Gfn, access: Access) -> Option<(Violation, LookupLevel)> {
        let cause = match self.find(gfn).map(|at| self.read(at)) {
            Some(Entry::Leaf(leaf)) if grants(leaf, access) => return None,
            Some(Entry::Leaf(leaf)) => Cause::Denied(leaf),
            _ => Cause::Absent,
        };
        Some((Violation { access, cause }, self.lookup_level(gfn)))
    }

    #[inline(always)]
    fn walk_once(&self, gfn: Gfn, access: Access, log: &mut impl Log) -> Step {
        let mut table = self.root;
        for height in Height::DOWN {
            let entry = self.arena.entry(table, height.index(gfn));
            let raw = entry.load(Ordering::Acquire);
            if let Some(below) = F::table(raw) {
                table = below;
                continue;
            }
            match F::decode(raw) {
                Entry::Table(below) => table = below,
                Entry::Leaf(leaf) => {
                    if !grants(leaf, access) {
                        return violation(access, Cause::Denied(leaf));
                    }
                    let used = F::accessed(raw, access);
                    if used != raw {
                        if !log.has_room() {
                            return Step::Full;
                        }
                        // Relaxed on success: the load above acquired the leaf's publication, and A
                        // and D order nothing. The removal of the leaf itself hands D to the
                        // removing thread.
                        let swap =
                            entry.compare_exchange(raw, used, Ordering::Relaxed, Ordering::Relaxed);
                        if swap.is_err() {
                            return Step::Again;
                        }
                        if access.is_write() && !leaf.dirty {
                            log.written(gfn);
                        }
                    }
                    let dirty = leaf.dirty || access.is_write();
                    return Step::Done(Walk::Hit(translation(Leaf { dirty, ..leaf }, gfn)));
                }
                Entry::Absent => return violation(access, Cause::Absent),
                Entry::Frozen => return Step::Again,
            }
        }
        unreachable!("a table pointer among 4 KiB leaves: corrupt stage-2 tables")
    }
}

#[inline(always)]
const fn violation(access: Access, cause: Cause) -> Step {
    Step::Done(Walk::Violation(Violation { access, cause }))
}

#[inline(always)]
const fn grants(leaf: Leaf, access: Access) -> bool {
    match access {
        Access::Read => true,
        Access::Write => leaf.is_writable(),
        Access::Fetch => leaf.exec,
    }
}

#[inline(always)]
pub(crate) const fn translation(leaf: Leaf, gfn: Gfn) -> Translation {
    Translation {
        pfn: leaf.frame_of(gfn),
        level: leaf.level,
        writable: leaf.is_writable() && leaf.dirty,
        exec: leaf.exec,
    }
}
