//! Mapping: prepare, which may fail, then commit, which may not.

use crate::format::Height;
use crate::{Cursor, Entry, EntryRef, Leaf};
use lacuna_addr::{Gfn, Level};
use lacuna_tables::{Exhausted, TableId};

/// Why a leaf cannot be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// No table page is left.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Another mapping is in the way: unmap it, finish the flush, then map.
    #[error("gfn {gfn} cannot be mapped to {wanted:?}: {found:?} is there")]
    Occupied {
        /// The frame to be mapped.
        gfn: Gfn,
        /// What was to be mapped.
        wanted: Leaf,
        /// What is there: a leaf of another frame or level, or a table of smaller leaves.
        found: Entry,
    },
    /// The gfn or the host frame is not a multiple of the leaf's pages.
    #[error("gfn {gfn} and frame {pfn} do not both start a leaf of {level:?}")]
    Misaligned {
        /// The guest frame.
        gfn: Gfn,
        /// The host frame.
        pfn: lacuna_addr::Pfn,
        /// The leaf's level.
        level: Level,
    },
    /// Leaves of 1 GiB span many blocks, while a fault locks one.
    #[error("leaves of {0:?} can be walked but not mapped: use 2 MiB leaves")]
    Level(Level),
}

/// What mapping did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a new leaf must enter the reverse map"]
pub enum Mapped {
    /// Nothing was there.
    New(EntryRef),
    /// The same frame was there with fewer rights: now it has both leaves' rights, A and D.
    Upgraded(EntryRef),
    /// The same frame was there with all that was asked for: another vCPU was faster.
    Spurious(EntryRef),
}

impl Mapped {
    /// Where the leaf is.
    pub const fn at(self) -> EntryRef {
        match self {
            Self::New(at) | Self::Upgraded(at) | Self::Spurious(at) => at,
        }
    }
}

/// A place for a leaf, with every table above it: all that can fail has been done.
#[must_use = "nothing is mapped before commit"]
pub struct Place<'c, 's> {
    cursor: &'c mut Cursor<'s>,
    gfn: Gfn,
    at: EntryRef,
    leaf: Leaf,
}

impl<'s> Cursor<'s> {
    /// [`Cursor::prepare`] and [`Place::commit`] in one.
    ///
    /// # Errors
    /// As `prepare`.
    #[inline]
    pub fn map(&mut self, gfn: Gfn, leaf: Leaf) -> Result<Mapped, MapError> {
        Ok(self.prepare(gfn, leaf)?.commit())
    }

    /// Finds the place of `leaf` at `gfn`, adding the tables that lack.
    ///
    /// # Errors
    /// [`MapError::Exhausted`]: finish flushes, or give the VM more tables. The others are bugs of
    /// the caller, found before anything is changed.
    ///
    /// # Panics
    /// When the cursor does not hold `gfn`.
    #[inline]
    pub fn prepare(&mut self, gfn: Gfn, leaf: Leaf) -> Result<Place<'_, 's>, MapError> {
        self.assert_holds(gfn);
        check_shape(gfn, leaf)?;
        let target = Height::of_leaf(leaf.level);
        let mut table = self.stage2.root;
        let mut at = EntryRef::new(table, Height::ROOT.index(gfn));
        for height in Height::DOWN {
            at = EntryRef::new(table, height.index(gfn));
            if height == target {
                break;
            }
            table = match self.stage2.read(at) {
                Entry::Table(below) => below,
                Entry::Absent => self.link(at, gfn)?,
                found => {
                    return Err(MapError::Occupied {
                        gfn,
                        wanted: leaf,
                        found,
                    });
                }
            };
        }
        match self.stage2.read(at) {
            Entry::Absent => {}
            Entry::Leaf(found) if (found.pfn, found.level) == (leaf.pfn, leaf.level) => {}
            found => {
                return Err(MapError::Occupied {
                    gfn,
                    wanted: leaf,
                    found,
                });
            }
        }
        Ok(Place {
            cursor: self,
            gfn,
            at,
            leaf,
        })
    }

    /// Links an empty table at `at`, or takes the one that another stripe linked meanwhile.
    #[cold]
    fn link(&self, at: EntryRef, gfn: Gfn) -> Result<TableId, Exhausted> {
        let new = self.stage2.arena.alloc()?;
        match self
            .stage2
            .change(at, gfn, Entry::Absent, Entry::Table(new))
        {
            Ok(()) => Ok(new),
            Err(Entry::Table(other)) => {
                self.stage2.arena.free_unlinked(new);
                Ok(other)
            }
            // Only a cursor over all that this entry spans could put anything else here.
            Err(seen) => unreachable!("{seen:?} appeared above a locked block"),
        }
    }
}

impl Place<'_, '_> {
    /// Installs the leaf. No flush is needed: rights only grow, and a TLB holds no entry for what
    /// was absent.
    #[inline]
    pub fn commit(self) -> Mapped {
        let wanted = self.leaf;
        let found = self
            .cursor
            .stage2
            .update(self.at, self.gfn, |found| match found {
                Entry::Leaf(present) => Entry::Leaf(merge(present, wanted)),
                _ => Entry::Leaf(wanted),
            });
        match found {
            Entry::Leaf(present) if merge(present, wanted) == present => Mapped::Spurious(self.at),
            Entry::Leaf(_) => Mapped::Upgraded(self.at),
            _ => Mapped::New(self.at),
        }
    }
}

#[inline]
fn check_shape(gfn: Gfn, leaf: Leaf) -> Result<(), MapError> {
    let (pfn, level) = (leaf.pfn, leaf.level);
    if level == Level::L1G {
        return Err(MapError::Level(level));
    }
    if (gfn.get() | pfn.get()).is_multiple_of(level.pages()) {
        Ok(())
    } else {
        Err(MapError::Misaligned { gfn, pfn, level })
    }
}

/// Both leaves' rights, A and D, on the frame they share.
fn merge(a: Leaf, b: Leaf) -> Leaf {
    Leaf {
        write: a.write.max(b.write),
        exec: a.exec || b.exec,
        accessed: a.accessed || b.accessed,
        dirty: a.dirty || b.dirty,
        ..a
    }
}
