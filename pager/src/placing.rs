//! Puts units in place by userfaultfd.

use crate::regions::Unit;
use crate::shared_pages::is_zeros;
use lacuna_addr::{HvaRange, PAGE_SIZE};
use lacuna_sys::{Errno, Partial, Userfaultfd, Waiters};

/// What is put in place of a missing unit.
#[derive(Clone, Copy, Debug)]
pub enum Put<'a> {
    /// These pages, as many as the unit has. A page of 4 KiB without content needs no memory.
    Pages(&'a [[u8; PAGE_SIZE]]),
    /// Zeros.
    Zeros,
    /// The page of the file that the VMM has mapped there.
    Shared,
    /// Poison: each access gets `SIGBUS`.
    Poison,
}

/// The result of a placement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placed {
    /// All of the unit is in place, and its threads are woken.
    Whole,
    /// As `Whole`, but a page was in place before.
    Found,
    /// The kernel says that the huge page is in place. It says the same of a missing one if the
    /// host has no huge page left, so the caller must keep the content.
    Unsure,
    /// Not now, for this reason. The unit is in place up to this page.
    Later(Errno, usize),
    /// The VM no longer has this memory. Its threads are woken.
    Unmapped,
    /// The VM's process is ending.
    Ended,
    /// The kernel refuses it.
    Refused(Errno),
}

/// Places `put` at the missing pages of `unit`, from its page `from` on.
pub fn place(uffd: &Userfaultfd, unit: &Unit, put: Put<'_>, from: usize) -> Placed {
    let (pages, mut at, mut found) = (unit.memory.pages() as usize, from, false);
    // The most pages of a call, and how many are gone.
    let (mut step, mut gone) = (pages, 0);
    let put = match put {
        Put::Pages([one]) if is_zeros(one) => Put::Zeros,
        put => put,
    };
    let zeros = match put {
        Put::Zeros if pages > 1 => vec![[0; PAGE_SIZE]; pages],
        _ => Vec::new(),
    };
    let whole = |done: Result<(), Errno>| done.map_err(|errno| Partial { done: 0, errno });
    while at < pages {
        let start = unit.memory.start().checked_add_pages(at as u64);
        let end = pages.min(at + step);
        let rest = start.and_then(|start| HvaRange::new(start, (end - at) as u64));
        let rest = rest.expect("in the unit");
        let placed = match put {
            Put::Pages(content) => uffd.place(&content[at..end], rest.start(), Waiters::Wake),
            Put::Zeros if pages == 1 => whole(uffd.zero(rest.start())),
            Put::Zeros => uffd.place(&zeros[at..end], rest.start(), Waiters::Wake),
            Put::Shared => whole(uffd.resume(rest, Waiters::Wake).map(drop)),
            Put::Poison => whole(uffd.poison(rest)),
        };
        let Err(Partial { done, errno }) = placed else {
            at = end;
            continue;
        };
        at += done;
        match errno {
            // The pages behind it may be missing, unless this is a huge page: see below.
            Errno::EXIST => (at, found) = (at + 1, true),
            // The kernel takes no part of a huge page.
            Errno::INVAL if found => return Placed::Unsure,
            Errno::AGAIN | Errno::NOMEM | Errno::NOSPC => return Placed::Later(errno, at),
            Errno::SRCH => return Placed::Ended,
            // A part of the run is not registered. The other pages are placed one by one.
            Errno::NOENT if step > 1 => step = 1,
            Errno::NOENT => (at, gone) = (at + 1, gone + 1),
            Errno::INVAL if step < pages => {
                wake(uffd, unit);
                return Placed::Unmapped;
            }
            errno => return Placed::Refused(errno),
        }
    }
    if found || gone > 0 {
        // The call that has placed the page may have woken no thread.
        wake(uffd, unit);
    }
    match found {
        _ if gone > 0 && gone == pages - from => Placed::Unmapped,
        true => Placed::Found,
        false => Placed::Whole,
    }
}

/// Lets the threads that wait for the unit try again.
pub fn wake(uffd: &Userfaultfd, unit: &Unit) {
    // It fails if the process has ended, so no thread waits.
    let _ = uffd.wake_all(unit.memory);
}
