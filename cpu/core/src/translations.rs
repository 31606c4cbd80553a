//! A processor's cached translations: for each privilege, and for several address spaces. An
//! address space has a number ([`Space`]): x86's PCID (SDM vol 3 4.10.1), arm64's ASID.
//!
//! ```text
//! front, back   a TLB for the privilege that runs, and one for the other; they change places
//! supervisor's  one: a kernel maps itself globally. With any non-global entry it is valid for one
//!               address space only
//! user's        the current address space's, with its paging-structure cache
//!                 switch to another number: parked ------------+
//! parked        the user's of up to 3 others, by number  <-----+   Retain::Keep: used again as it
//!                                                                  was left, else emptied first
//! ```
//! Without such numbers every address space is number 0, and nothing is ever parked. A TLB may
//! forget entries at any time, so the least recently used parked TLB is dropped when a place is
//! needed.
//!
//! TLBs hold host pointers. When the machine takes pages back, it calls [`Translations::flush`],
//! which empties all TLBs, also of parked address spaces.

use crate::code::{Kept, UserCode};
use crate::{HostPage, Privilege, Rights, Span, Tlb, WalkCache};
use lacuna_addr::{Gfn, Level};

/// Parked address spaces; each takes 160 KiB once it is used.
pub const PARKED: usize = 3;

/// The number of an address space: x86's PCID, arm64's ASID. 0 without such numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space(pub u16);

/// A translation of stage 1 and its rights, for the requested privilege.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The 4 KiB frame, inside a larger leaf too.
    pub gfn: Gfn,
    /// Writes are allowed and the leaf is already dirty: a TLB may let writes through.
    pub writable: bool,
    /// A user page.
    pub user: bool,
    /// Instruction fetches are allowed.
    pub exec: bool,
    /// The translation is the same in every address space.
    pub global: bool,
    /// Size of the leaf.
    pub level: Level,
}

/// Whether a switch of address space keeps the translations of the new one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retain {
    /// Its translations are still valid.
    Keep,
    /// They may have changed.
    Forget,
}

/// The links of basic blocks that a switch of address space has kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Switched {
    /// Translations of supervisor code.
    pub supervisor: Kept,
    /// Translations of user code.
    pub user: Kept,
}

/// Translations for one privilege.
#[derive(Default)]
pub struct Learned {
    /// Their pages.
    pub tlb: Tlb,
    /// Whether the TLB may have a translation from a non-global page.
    local: bool,
    /// Whether the TLB may have a translation from a global page.
    global: bool,
    /// The level of the translations' largest leaf; `None` if the TLB is empty.
    max_level: Option<Level>,
}

impl Learned {
    /// Remembers a translation.
    #[inline]
    pub fn insert(&mut self, va: u64, mapping: &Mapping, page: HostPage) {
        let rights = Rights {
            write: mapping.writable,
            exec: mapping.exec,
        };
        self.local |= !mapping.global;
        self.global |= mapping.global;
        self.max_level = self.max_level.max(Some(mapping.level));
        let span = match mapping.level {
            Level::L4K => Span::Page,
            Level::L2M | Level::L1G => Span::Block,
        };
        self.tlb.insert(va, mapping.gfn, page.within(span), rights);
    }

    /// Drops the translations of the leaf of `va`.
    pub fn forget(&mut self, va: u64) {
        if let Some(max_level) = self.max_level {
            self.tlb.forget(va, max_level);
        }
    }

    /// Drops every translation.
    pub fn flush(&mut self) {
        let Self {
            tlb,
            local,
            global,
            max_level,
        } = self;
        tlb.flush();
        (*local, *global, *max_level) = (false, false, None);
    }
}

/// A parked address space.
#[derive(Default)]
struct Parked {
    space: Space,
    user: Learned,
    walk: WalkCache,
    /// The links of its user code; `None` if they are void.
    code: Option<UserCode>,
}

impl Parked {
    fn flush(&mut self) {
        let Self {
            space: _,
            user,
            walk,
            code,
        } = self;
        user.flush();
        walk.flush();
        *code = None;
    }
}

/// All cached translations of a processor.
#[derive(Default)]
pub struct Translations {
    /// For the running privilege.
    pub front: Learned,
    /// For the other one.
    back: Learned,
    /// The paging-structure cache of the current address space.
    pub walk: WalkCache,
    space: Space,
    /// The least recently used first.
    parked: Vec<Parked>,
}

impl Translations {
    /// Follows a change of privilege.
    pub fn swap(&mut self) {
        std::mem::swap(&mut self.front, &mut self.back);
    }

    /// The translations for `user` while `running` runs.
    #[inline(always)]
    pub fn of(&mut self, user: Privilege, running: Privilege) -> &mut Learned {
        if user == running {
            &mut self.front
        } else {
            &mut self.back
        }
    }

    /// Forgets everything of every address space; `space` is the current one from now on.
    pub fn flush(&mut self, space: Space) {
        // Every field is named, so that the compiler refuses a missing new field.
        let Self {
            front,
            back,
            walk,
            space: current,
            parked,
        } = self;
        front.flush();
        back.flush();
        walk.flush();
        *current = space;
        parked.iter_mut().for_each(Parked::flush);
    }

    /// Removes the write right from every translation to `gfn`, in every address space.
    pub fn protect(&mut self, gfn: Gfn) {
        let parked = self.parked.iter_mut().map(|parked| &mut parked.user);
        for learned in [&mut self.front, &mut self.back].into_iter().chain(parked) {
            learned.tlb.protect(gfn);
        }
    }

    /// Drops the translations of the leaf of `va`: this address space's, and global ones in all
    /// address spaces. Drops this one's paging-structure cache too.
    pub fn invalidate(&mut self, va: u64) {
        self.front.forget(va);
        self.back.forget(va);
        self.walk.flush();
        for parked in self.parked.iter_mut().filter(|parked| parked.user.global) {
            parked.user.forget(va);
            parked.code = None;
        }
    }

    /// Drops the translations from the leaf of `va` and the paging-structure caches, in every
    /// address space.
    pub fn invalidate_everywhere(&mut self, va: u64) {
        self.front.forget(va);
        self.back.forget(va);
        self.walk.flush();
        for parked in &mut self.parked {
            parked.user.forget(va);
            parked.walk.flush();
            parked.code = None;
        }
    }

    /// Drops the translations of the address space `space`. Translations of global pages may go
    /// too. Returns whether it is the current one.
    pub fn forget_space(&mut self, space: Space) -> bool {
        if space == self.space {
            self.front.flush();
            self.back.flush();
            self.walk.flush();
            return true;
        }
        let parked = self.parked.iter_mut().find(|parked| parked.space == space);
        if let Some(parked) = parked {
            parked.flush();
        }
        false
    }

    /// A page fault at `va`: drops the translations of `va`. The walk has already dropped its own
    /// cache entry.
    pub fn faulted(&mut self, va: u64) {
        self.front.forget(va);
        self.back.forget(va);
    }

    /// Switches to the address space `to`, while code of privilege `running` runs. `code` is the
    /// links of user code in the old address space.
    pub fn switch(
        &mut self,
        to: Space,
        retain: Retain,
        running: Privilege,
        code: UserCode,
    ) -> Switched {
        if to == self.space && retain == Retain::Keep {
            return Switched {
                supervisor: Kept::All,
                user: Kept::All,
            };
        }
        let supervisor = self.of(Privilege::Supervisor, running);
        let links = if supervisor.local {
            supervisor.flush();
            Kept::Nothing
        } else {
            Kept::All
        };
        if to == self.space {
            self.of(Privilege::User, running).flush();
            self.walk.flush();
            return Switched {
                supervisor: links,
                user: Kept::Nothing,
            };
        }
        let mut next = self.unpark(to);
        if retain == Retain::Forget {
            next.flush();
        }
        std::mem::swap(self.of(Privilege::User, running), &mut next.user);
        std::mem::swap(&mut self.walk, &mut next.walk);
        next.space = std::mem::replace(&mut self.space, to);
        let user = next.code.replace(code).map_or(Kept::Nothing, Kept::Parked);
        self.parked.push(next);
        Switched {
            supervisor: links,
            user,
        }
    }

    /// The address space `space`, empty if it is not known.
    fn unpark(&mut self, space: Space) -> Parked {
        if let Some(at) = self.parked.iter().position(|parked| parked.space == space) {
            return self.parked.remove(at);
        }
        if self.parked.len() < PARKED {
            return Parked::default();
        }
        let mut oldest = self.parked.remove(0);
        oldest.flush();
        oldest
    }
}
