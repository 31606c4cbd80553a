//! Reclaim: one batch of the clock.
//!
//! ```text
//! hand -> pick -----> age ------> evict --------> sort out --------------------------> write out
//!         isolate     young ones  word: Evicting  clean           -> Swapped or Empty
//!         frames      are spared  then unmapped   dirty, all zero -> Empty
//!                                                 dirty           -> copied, Writeback
//! ```
//! Second chance: a page whose accessed bit is set in any table, or that has just been swapped in,
//! is passed over once. Held pages, pages of a region at its floor, and frames that somebody has
//! isolated are not picked. Several threads may reclaim at once: the hand deals each its own window
//! of frames.
//!
//! Listeners are called with no lock held; a page can be taken back by a fault at any moment until
//! its frame is free.

use crate::desc::{Dirt, FrameState};
use crate::error::HostError;
use crate::host::{Core, Host};
use crate::pool::{Content, Page};
use crate::region::{Region, find};
use crate::residency::{PageNo, PageState, PageWord};
use crate::stats::Counters;
use crate::writeback::CLUSTER;
use lacuna_addr::{Hva, Pfn};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Frames that the hand deals at once.
const WINDOW: usize = 64;
/// Pages looked at closely in one batch.
const PICK: usize = 2 * CLUSTER;
/// Frames passed in one batch before it is enough.
const SCAN: usize = 1024;

/// What a batch does with pages in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mercy {
    /// Spares pages accessed since the hand's last turn.
    SecondChance,
    /// None: somebody waits, and everything was accessed.
    None,
}

/// A frame that this thread has isolated, with the page it is to be taken from.
pub(crate) struct Victim {
    pub frame: Pfn,
    pub page: PageNo,
    pub region: Arc<Region>,
}

impl Victim {
    pub fn word(&self) -> &PageWord {
        self.region.word(self.page).expect("picked from its region")
    }
}

/// What one batch has come to.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub scanned: usize,
    pub error: Option<HostError>,
}

impl Host {
    pub(crate) fn reclaim_batch(&self, mercy: Mercy) -> Batch {
        let core = &*self.core;
        let mut batch = Batch::default();
        let picked = core.pick(&mut batch.scanned);
        let victims = match mercy {
            Mercy::SecondChance => core.spare_young(picked),
            Mercy::None => picked,
        };
        let victims = core.evict(victims);
        let out = core.sort_out(victims);
        core.release(out.freed);
        let (writes, result) = core.prepare_write(out.dirty, out.pages);
        batch.error = result.err();
        for write in writes {
            self.io.write(core, write);
        }
        batch
    }
}

/// A batch's victims after they were unmapped.
#[derive(Default)]
struct Sorted {
    freed: Vec<Victim>,
    dirty: Vec<Victim>,
    /// The bytes of `dirty`, in order, in a buffer that may be longer.
    pages: Vec<Page>,
}

impl Core {
    /// Isolates the next pages under the clock hand that may be taken, by listener and address.
    fn pick(&self, scanned: &mut usize) -> Vec<Victim> {
        let held = self.held_pages();
        let regions = self.regions.snapshot();
        let total = self.frames.len();
        // What a store in memory has taken is no region's to share.
        let pages = total - self.frames.in_store();
        let mut allowance: Vec<i64> = regions
            .iter()
            .map(|region| region.resident() - region.floor(pages, regions.len()))
            .collect();
        let mut picked = Vec::with_capacity(PICK);
        while picked.len() < PICK && *scanned < SCAN.min(total) {
            let start = self.hand.fetch_add(WINDOW, Ordering::Relaxed);
            *scanned += WINDOW;
            for i in start..start + WINDOW {
                let frame = Pfn::new((i % total) as u32);
                let Some(page) = self.try_isolate(frame, &held) else {
                    continue;
                };
                let at = regions.partition_point(|region| region.range().start() <= page.hva());
                match (
                    find(&regions, page),
                    at.checked_sub(1).map(|at| &mut allowance[at]),
                ) {
                    (Some(region), Some(left)) if *left > 0 => {
                        *left -= 1;
                        picked.push(Victim {
                            frame,
                            page,
                            region: region.clone(),
                        });
                    }
                    _ => self.frames.desc(frame).publish(),
                }
            }
        }
        Counters::add(&self.stats.scanned, *scanned as u64);
        picked.sort_unstable_by_key(|victim| (victim.region.listener, victim.page));
        picked
    }

    fn try_isolate(&self, frame: Pfn, held: &[PageNo]) -> Option<PageNo> {
        let desc = self.frames.desc(frame);
        if desc.state() != FrameState::Used || desc.take_recent() {
            return None;
        }
        let page = desc.isolate()?;
        if held.binary_search(&page).is_ok() {
            desc.publish();
            return None;
        }
        Some(page)
    }

    /// Asks the listeners which pages were accessed, and lets those go.
    fn spare_young(&self, picked: Vec<Victim>) -> Vec<Victim> {
        let mut young = vec![false; picked.len()];
        let mut start = 0;
        for group in picked.chunk_by(|a, b| a.region.listener == b.region.listener) {
            let pages: Vec<Hva> = group.iter().map(|victim| victim.page.hva()).collect();
            let notifier = &group[0].region.notifier;
            notifier.age(&pages, &mut young[start..start + group.len()]);
            notifier.end_of_aging();
            start += group.len();
        }
        let mut old = Vec::with_capacity(picked.len());
        for (victim, young) in picked.into_iter().zip(young) {
            if young {
                Counters::add(&self.stats.young, 1);
                self.keep(victim);
            } else {
                old.push(victim);
            }
        }
        old
    }

    /// Moves the pages to Evicting and has them unmapped.
    fn evict(&self, victims: Vec<Victim>) -> Vec<Victim> {
        let mut evicting = Vec::with_capacity(victims.len());
        for victim in victims {
            match victim.word().advance(PageState::evicted) {
                Ok(_) => evicting.push(victim),
                Err(_) => self.keep(victim),
            }
        }
        for group in evicting.chunk_by(|a, b| a.region.listener == b.region.listener) {
            let pages: Vec<Hva> = group.iter().map(|victim| victim.page.hva()).collect();
            group[0].region.notifier.invalidate(&pages);
        }
        evicting
    }

    /// Drops what need not be written and copies what must.
    fn sort_out(&self, victims: Vec<Victim>) -> Sorted {
        let mut out = Sorted {
            pages: self.take_buffer(),
            ..Sorted::default()
        };
        for victim in victims {
            let desc = self.frames.desc(victim.frame);
            if desc.take_dirty() == Dirt::Clean {
                match victim.word().advance(PageState::dropped) {
                    Ok(_) => {
                        Counters::add(&self.stats.clean_dropped, 1);
                        out.freed.push(victim);
                    }
                    Err(_) => self.keep(victim),
                }
                continue;
            }
            if out.pages.len() == out.dirty.len() {
                out.pages.push(Page::ZERO);
            }
            let copy = &mut out.pages[out.dirty.len()];
            if self.frames.pool.frame(victim.frame).snapshot(copy) == Content::Data {
                out.dirty.push(victim);
                continue;
            }
            match victim.word().advance(PageState::zero_dropped) {
                Ok(before) => {
                    Counters::add(&self.stats.zero_dropped, 1);
                    if let Some(slot) = before.slot() {
                        self.free_slot(slot);
                    }
                    out.freed.push(victim);
                }
                Err(_) => self.keep_dirty(victim),
            }
        }
        out
    }

    /// Lets an isolated page be: it is resident, or its owner took it back.
    pub fn keep(&self, victim: Victim) {
        self.frames.desc(victim.frame).publish();
    }

    /// Lets a page be whose dirty mark was taken. The mark first: once the page is anybody's, it
    /// counts.
    pub fn keep_dirty(&self, victim: Victim) {
        self.frames.desc(victim.frame).mark_dirty();
        // Still Evicting when it is the reclaimer who gives up; an owner who took it back was
        // quicker.
        let _ = victim.word().advance(PageState::rescued);
        self.keep(victim);
    }

    /// Frees the frames of pages that have left them.
    pub fn release(&self, victims: Vec<Victim>) {
        if victims.is_empty() {
            return;
        }
        Counters::add(&self.stats.freed, victims.len() as u64);
        self.frames
            .give(victims.iter().map(|victim| victim.frame.index() as u32));
        victims
            .iter()
            .for_each(|victim| victim.region.add_resident(-1));
        self.settled.bump();
    }
}
