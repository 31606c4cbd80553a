//! The translations that a processor has cached: for each privilege, and for several address spaces
//! (SDM vol 3 4.10.1, process-context identifiers).
//!
//! ```text
//! front, back   a TLB for the privilege that runs, and one for the other; they change places
//! supervisor's  one: a kernel maps itself globally. With any non-global entry it is valid for one
//!               address space only
//! user's        the current address space's, with its WalkCache
//!                 MOV CR3 to another PCID: parked ----------+
//! parked        the user's of up to 3 others, by PCID  <----+   bit 63: used again as it was left,
//!                                                               else emptied first
//! ```
//! Without CR4.PCIDE every address space is PCID 0, and nothing is ever parked. A TLB may forget
//! entries at any time, so the least recently used parked one is dropped when a place is needed.
//!
//! TLBs hold host pointers. When the machine takes pages back, it calls [`Translations::flush`]. So
//! that function empties all TLBs, those of parked address spaces too.

use crate::state::Pcid;
use crate::walk::{Mapping, User, WalkCache};
use lacuna_addr::{Gfn, Level};
use lacuna_cpu::code::{Kept, UserCode};
use lacuna_cpu::{HostPage, Rights, Span, Tlb};

/// Parked address spaces; each takes 160 KiB once it is used.
const PARKED: usize = 3;

/// Whether a switch of address space keeps the translations of the new one: bit 63 of the value
/// written to CR3.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Retain {
    /// Its translations are still valid.
    Keep,
    /// They may have changed.
    Forget,
}

/// Which links of basic blocks a switch of address space has kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) struct Switched {
    pub(crate) supervisor: Kept,
    pub(crate) user: Kept,
}

/// Translations for one privilege.
#[derive(Default)]
pub(crate) struct Learned {
    pub(crate) tlb: Tlb,
    /// Whether the TLB may have a translation from a page that is not global.
    local: bool,
    /// Whether the TLB may have a translation from a global page.
    global: bool,
    /// The level of the largest leaf that a translation came from; `None` if the TLB is empty.
    max_level: Option<Level>,
}

impl Learned {
    /// Remembers a translation.
    pub(crate) fn insert(&mut self, va: u64, mapping: &Mapping, page: HostPage) {
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

    fn forget(&mut self, va: u64) {
        if let Some(max_level) = self.max_level {
            self.tlb.forget(va, max_level);
        }
    }

    fn flush(&mut self) {
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

/// An address space that is not current.
#[derive(Default)]
struct Parked {
    pcid: Pcid,
    user: Learned,
    walk: WalkCache,
    /// The links of its user code; `None` if they are void.
    code: Option<UserCode>,
}

impl Parked {
    fn flush(&mut self) {
        let Self {
            pcid: _,
            user,
            walk,
            code,
        } = self;
        user.flush();
        walk.flush();
        *code = None;
    }
}

/// Every translation that a processor has cached.
#[derive(Default)]
pub(crate) struct Translations {
    /// For the privilege that runs.
    pub(crate) front: Learned,
    /// For the other one.
    back: Learned,
    pub(crate) walk: WalkCache,
    pcid: Pcid,
    /// The least recently used first.
    parked: Vec<Parked>,
}

impl Translations {
    /// Follows a change of privilege.
    pub(crate) fn swap(&mut self) {
        std::mem::swap(&mut self.front, &mut self.back);
    }

    /// The translations for `user` while `running` runs.
    #[inline(always)]
    pub(crate) fn of(&mut self, user: User, running: User) -> &mut Learned {
        if user == running {
            &mut self.front
        } else {
            &mut self.back
        }
    }

    /// Forgets everything of every address space; `pcid` is the current one from now on.
    pub(crate) fn flush(&mut self, pcid: Pcid) {
        // Every field is named, so that the compiler refuses a new field that is left out.
        let Self {
            front,
            back,
            walk,
            pcid: current,
            parked,
        } = self;
        front.flush();
        back.flush();
        walk.flush();
        *current = pcid;
        parked.iter_mut().for_each(Parked::flush);
    }

    /// Removes the write right from every translation to `gfn`, in every address space.
    pub(crate) fn protect(&mut self, gfn: Gfn) {
        let parked = self.parked.iter_mut().map(|parked| &mut parked.user);
        for learned in [&mut self.front, &mut self.back].into_iter().chain(parked) {
            learned.tlb.protect(gfn);
        }
    }

    /// INVLPG (SDM vol 3 4.10.4.1): drops the translations that this address space has from the
    /// leaf of `va`, global pages in all address spaces, and this one's paging-structure cache.
    pub(crate) fn invalidate(&mut self, va: u64) {
        self.front.forget(va);
        self.back.forget(va);
        self.walk.flush();
        for parked in self.parked.iter_mut().filter(|parked| parked.user.global) {
            parked.user.forget(va);
            parked.code = None;
        }
    }

    /// A page fault at `va` (SDM vol 3 4.10.4.1): drops what would translate it. The walk has
    /// already dropped its own cache entry.
    pub(crate) fn faulted(&mut self, va: u64) {
        self.front.forget(va);
        self.back.forget(va);
    }

    /// MOV to CR3, while code of privilege `running` runs. `code` is the links of user code in the
    /// address space that is left.
    pub(crate) fn switch(
        &mut self,
        to: Pcid,
        retain: Retain,
        running: User,
        code: UserCode,
    ) -> Switched {
        if to == self.pcid && retain == Retain::Keep {
            return Switched {
                supervisor: Kept::All,
                user: Kept::All,
            };
        }
        let supervisor = self.of(User::Supervisor, running);
        let links = if supervisor.local {
            supervisor.flush();
            Kept::Nothing
        } else {
            Kept::All
        };
        if to == self.pcid {
            self.of(User::User, running).flush();
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
        std::mem::swap(self.of(User::User, running), &mut next.user);
        std::mem::swap(&mut self.walk, &mut next.walk);
        next.pcid = std::mem::replace(&mut self.pcid, to);
        let user = next.code.replace(code).map_or(Kept::Nothing, Kept::Parked);
        self.parked.push(next);
        Switched {
            supervisor: links,
            user,
        }
    }

    /// The address space `pcid`, empty if it is not known.
    fn unpark(&mut self, pcid: Pcid) -> Parked {
        if let Some(at) = self.parked.iter().position(|parked| parked.pcid == pcid) {
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

#[cfg(test)]
mod tests;
