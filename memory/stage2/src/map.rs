//! Maps in two steps: prepare, which may fail, then commit, which may not.

use crate::format::Height;
use crate::{Cursor, Entry, EntryRef, Ept, Leaf, Stage2, TableFormat};
use lacuna_addr::{Gfn, Level};
use lacuna_tables::{Exhausted, TableId};

/// Why a leaf cannot be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// No table page is free.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Another mapping is in the way.
    #[error(
        "gfn {gfn} cannot be mapped to {wanted:?}: {found:?} is there; unmap that and finish its \
         flush, then map again"
    )]
    Occupied {
        /// The guest frame to be mapped.
        gfn: Gfn,
        /// The leaf to be mapped.
        wanted: Leaf,
        /// The entry there: a leaf of another frame or level, or a table of smaller leaves.
        found: Entry,
    },
    /// The gfn or the host frame is not a multiple of the leaf's pages.
    #[error(
        "gfn {gfn} and frame {pfn} do not both start a leaf of {level:?}: align both to its \
         size, or map 4 KiB leaves"
    )]
    Misaligned {
        /// The first guest frame of the leaf.
        gfn: Gfn,
        /// Its first host frame.
        pfn: lacuna_addr::Pfn,
        /// Its level.
        level: Level,
    },
    /// The leaf has 1 GiB: [`Cursor::map_gib`] maps it, under a cursor over all of its blocks.
    #[error("a leaf of {0:?} is not mapped under the lock of one block: map a 2 MiB leaf")]
    Level(Level),
}

/// The result of mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a new leaf must enter the reverse map"]
pub enum Mapped {
    /// Nothing was mapped there. The new leaf is at this place.
    New(EntryRef),
    /// The leaf at this place mapped the same frame, with fewer rights. It now has the rights, A
    /// and D of both leaves.
    Upgraded(EntryRef),
    /// The leaf at this place maps the same frame with all the requested rights: another vCPU has
    /// mapped it since the fault began.
    Spurious(EntryRef),
    /// The 2 MiB leaf over the frame lacked rights that the 4 KiB leaf needs. It was split into 512
    /// leaves, and the leaf at this place was upgraded. All 512 are new to the reverse map
    /// ([`EntryRef::beside`]).
    Split(EntryRef),
}

impl Mapped {
    /// The place of the leaf. If a larger leaf grants the requested leaf, this is the place of the
    /// larger one.
    pub const fn at(self) -> EntryRef {
        match self {
            Self::New(at) | Self::Upgraded(at) | Self::Spurious(at) | Self::Split(at) => at,
        }
    }
}

/// A place for a leaf, with every table above it: all fallible steps are done.
#[must_use = "nothing is mapped before commit"]
pub struct LeafPlace<'c, 's, F: TableFormat = Ept> {
    cursor: &'c mut Cursor<'s, F>,
    /// The first guest frame of `leaf`.
    gfn: Gfn,
    /// The place of `leaf`, or of the large leaf around it.
    at: EntryRef,
    /// The leaf to be mapped.
    leaf: Leaf,
    /// A table for the split of the large leaf at `at`; `None` if it need not be split.
    spare: Option<TableId>,
}

/// The place of a leaf, and its present content.
struct Way {
    at: EntryRef,
    found: AtPlace,
}

/// The content of a leaf's place.
enum AtPlace {
    Nothing,
    /// A leaf of the same frame and level.
    SameFrame,
}

/// Why a leaf cannot simply have its own entry.
enum Detour {
    /// A larger leaf, at this place, maps the same frame. If it is a 1 GiB leaf, it grants the
    /// access: a cursor over one block cannot split it.
    Inside(EntryRef),
    /// The leaf cannot be mapped.
    No(MapError),
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// As [`Cursor::prepare`] and [`LeafPlace::commit`] in one.
    ///
    /// # Errors
    /// As `prepare`.
    #[inline]
    pub fn map(&mut self, gfn: Gfn, leaf: Leaf) -> Result<Mapped, MapError> {
        match self.way(gfn, leaf) {
            Ok(way) => Ok(install(self.stage2, way, gfn, leaf)),
            Err(Detour::Inside(at)) => Ok(self.inside(at, gfn, leaf)?.commit()),
            Err(Detour::No(error)) => Err(error),
        }
    }

    /// Finds the place of `leaf` at `gfn`, and adds the missing tables. The place of a leaf may be
    /// inside a larger leaf over the same frame: if that grants the access, it is used. If not, the
    /// commit splits a 2 MiB leaf, and a 1 GiB leaf is in the way ([`MapError::Occupied`]).
    ///
    /// # Errors
    /// [`MapError::Exhausted`]: finish flushes, or give the VM more tables. The other errors are
    /// bugs of the caller, found before anything is changed.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`.
    pub fn prepare(&mut self, gfn: Gfn, leaf: Leaf) -> Result<LeafPlace<'_, 's, F>, MapError> {
        match self.way(gfn, leaf) {
            Err(Detour::Inside(at)) => self.inside(at, gfn, leaf),
            Err(Detour::No(error)) => Err(error),
            Ok(Way { at, .. }) => Ok(LeafPlace {
                cursor: self,
                gfn,
                at,
                leaf,
                spare: None,
            }),
        }
    }

    /// The place of `leaf` at `gfn`, with every table above it.
    #[inline]
    fn way(&self, gfn: Gfn, leaf: Leaf) -> Result<Way, Detour> {
        self.assert_holds(gfn);
        check_shape(gfn, leaf).map_err(Detour::No)?;
        // No loop over the heights: without the loop's branches a fault is faster.
        let [root, directory] = Height::ABOVE_BLOCKS;
        let upper = self.below((self.stage2.root, root), gfn, leaf)?;
        let blocks = self.below((upper, directory), gfn, leaf)?;
        let block = Height::of_leaf(Level::L2M);
        let at = match leaf.level {
            Level::L2M => EntryRef::new(blocks, block.index(gfn)),
            _ => EntryRef::page_of(self.below((blocks, block), gfn, leaf)?, gfn),
        };
        let found = match self.stage2.read(at) {
            Entry::Absent => AtPlace::Nothing,
            Entry::Leaf(found) if (found.pfn, found.level) == (leaf.pfn, leaf.level) => {
                AtPlace::SameFrame
            }
            found => return Err(Detour::No(occupied(gfn, leaf, found))),
        };
        Ok(Way { at, found })
    }

    /// The table below `table`, on the way to the place of `leaf` at `gfn`.
    #[inline(always)]
    fn below(
        &self,
        (table, height): (TableId, Height),
        gfn: Gfn,
        leaf: Leaf,
    ) -> Result<TableId, Detour> {
        let index = height.index(gfn);
        match self.stage2.read_table(table, index) {
            Some(below) => Ok(below),
            None => self.step(EntryRef::new(table, index), gfn, leaf),
        }
    }

    /// Continues from `at`, above the place of `leaf`, where the table is missing.
    #[cold]
    fn step(&self, at: EntryRef, gfn: Gfn, leaf: Leaf) -> Result<TableId, Detour> {
        match self.stage2.read(at) {
            Entry::Table(below) => Ok(below),
            Entry::Absent => self.link(at, gfn).map_err(|error| Detour::No(error.into())),
            Entry::Leaf(large)
                if large.frame_of(gfn) == leaf.pfn
                    && (large.level == Level::L2M || large.covers(leaf)) =>
            {
                Err(Detour::Inside(at))
            }
            found => Err(Detour::No(occupied(gfn, leaf, found))),
        }
    }

    /// A place for the 4 KiB `leaf` in the large leaf at `at`. If the large leaf grants less,
    /// includes a table for the split.
    #[cold]
    fn inside(
        &mut self,
        at: EntryRef,
        gfn: Gfn,
        leaf: Leaf,
    ) -> Result<LeafPlace<'_, 's, F>, MapError> {
        let spare = match self.stage2.read(at) {
            Entry::Leaf(large) if large.covers(leaf) => None,
            _ => Some(self.stage2.arena.alloc()?),
        };
        Ok(LeafPlace {
            cursor: self,
            gfn,
            at,
            leaf,
            spare,
        })
    }

    /// Links an empty table at `at`, or uses the table that a cursor with another range lock has
    /// linked meanwhile.
    #[cold]
    pub(crate) fn link(&self, at: EntryRef, gfn: Gfn) -> Result<TableId, Exhausted> {
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
            // Only a cursor over this entry's whole span could put anything else here.
            Err(seen) => unreachable!("{seen:?} appeared above a locked block"),
        }
    }
}

impl<F: TableFormat> LeafPlace<'_, '_, F> {
    /// Installs the leaf. No flush is needed: rights only grow, and a TLB holds no entry for an
    /// absent leaf.
    pub fn commit(mut self) -> Mapped {
        match self.spare.take() {
            Some(table) => self.split_and_upgrade(table),
            None => join(self.cursor.stage2, self.at, self.gfn, self.leaf),
        }
    }

    fn split_and_upgrade(&self, table: TableId) -> Mapped {
        let split = self.cursor.split_into(self.at, self.gfn, table);
        let at = split.first.beside(self.gfn);
        let _ = join(self.cursor.stage2, at, self.gfn, self.leaf);
        Mapped::Split(at)
    }
}

impl<F: TableFormat> Drop for LeafPlace<'_, '_, F> {
    fn drop(&mut self) {
        if let Some(table) = self.spare {
            self.cursor.stage2.arena.free_unlinked(table);
        }
    }
}

/// Maps `wanted` at the place that `way` leads to.
#[inline(always)]
fn install<F: TableFormat>(stage2: &Stage2<F>, way: Way, gfn: Gfn, wanted: Leaf) -> Mapped {
    let Way { at, found } = way;
    // The common case does not call `join`, so that the compiler knows the old entry's bits. It
    // succeeds: no other thread puts an entry here, because the cursor holds the block.
    if let AtPlace::Nothing = found
        && stage2
            .change(at, gfn, Entry::Absent, Entry::Leaf(wanted))
            .is_ok()
    {
        return Mapped::New(at);
    }
    join(stage2, at, gfn, wanted)
}

/// Maps `wanted` at `at`. If a leaf of the same frame is there, gives it the rights of both.
#[inline(never)]
pub(crate) fn join<F: TableFormat>(
    stage2: &Stage2<F>,
    at: EntryRef,
    gfn: Gfn,
    wanted: Leaf,
) -> Mapped {
    let found = stage2.update(at, gfn, |found| match found {
        Entry::Leaf(present) => Entry::Leaf(present.merged(wanted)),
        _ => Entry::Leaf(wanted),
    });
    match found {
        Entry::Leaf(present) if present.merged(wanted) == present => Mapped::Spurious(at),
        Entry::Leaf(_) => Mapped::Upgraded(at),
        _ => Mapped::New(at),
    }
}

#[cold]
fn occupied(gfn: Gfn, wanted: Leaf, found: Entry) -> MapError {
    MapError::Occupied { gfn, wanted, found }
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
