//! Reclaim: one batch of the clock.
//!
//! ```text
//! hand -> pick -----> age ------> evict --------> sort out --------------------------> write out
//!         isolate     young ones  word: Evicting  clean           -> Swapped or Empty
//!         frames      are spared  then unmapped   dirty, all zero -> Empty
//!                                                 dirty           -> copied, Writeback
//! ```
//! Second chance: a page is skipped once if its accessed bit is set in any table, or if it has just
//! been swapped in. A batch does not pick pinned pages, pages of a region at its floor, or frames
//! that another thread has isolated. Several threads may reclaim at once; each takes its own window
//! of frames from the clock hand. `sampled_split` describes how compound pages are handled.
//!
//! MMU notifiers are called with no lock held. A fault can take a page back until its frame is
//! free.

pub(crate) mod balance;
pub(crate) mod collapse;
mod patience;
pub(crate) mod round;
mod sampled_split;
pub(crate) mod samples;
pub(crate) mod writeback;

use crate::core::Core;
use crate::counters::Counters;
use crate::error::HostError;
use crate::host::Host;
use crate::reclaim::round::{CLUSTER, Round, ScanPriority, Victim, Window};
use lacuna_addr::{BackingRange, Pfn};
use lacuna_frames::{BLOCK, Content, Dirt, FrameState, PageNo, PageState};
use lacuna_swap::Page;
use std::sync::atomic::Ordering;
use tracing::debug;

/// Frames in one window of the clock hand: a part of one block.
const WINDOW: usize = 64;
/// The most pages that one batch isolates.
const PICK: usize = 2 * CLUSTER;
/// The most looks in one batch. A frame is one look, and so is a skipped window.
const SCAN: usize = 1024;
const _: () = assert!(BLOCK.is_multiple_of(WINDOW));

/// The result of one batch.
#[derive(Debug)]
pub(crate) struct Batch {
    pub scanned: usize,
    pub error: Option<HostError>,
}

impl Host {
    pub(crate) fn reclaim_batch(&self, priority: ScanPriority) -> Batch {
        let core = &*self.core;
        let mut round = Round::new(core, priority);
        let picked = core.pick(&mut round);
        let victims = match priority {
            ScanPriority::SpareAccessed => core.spare_young(&mut round, picked),
            ScanPriority::SpareCompound | ScanPriority::TakeAll => picked,
        };
        round.end();
        let victims = core.evict(victims);
        let out = core.sort_out(victims);
        debug!(
            target: "lacuna::reclaim",
            ?priority,
            scanned = round.scanned,
            freed = out.freed.len(),
            written = out.dirty.len(),
            "batch is reclaimed"
        );
        core.release(out.freed);
        let (writes, result) = core.prepare_write(out.dirty, out.pages);
        for write in writes {
            self.io.write(core, write);
        }
        Batch {
            scanned: round.scanned,
            error: result.err(),
        }
    }
}

/// The pages of a batch after they were unmapped.
#[derive(Default)]
struct Sorted {
    freed: Vec<Victim>,
    dirty: Vec<Victim>,
    /// The bytes of `dirty`, in order, in a buffer that may be longer.
    pages: Vec<Page>,
}

impl Core {
    /// Isolates the next pages under the clock hand that may be taken. Returns them sorted by
    /// notifier and address.
    fn pick(&self, round: &mut Round) -> Vec<Victim> {
        let total = self.frames.total();
        let mut picked = Vec::with_capacity(PICK);
        let mut looks = 0;
        while picked.len() < PICK && looks < SCAN && round.scanned < total {
            let window = self.hand.fetch_add(1, Ordering::Relaxed) % total.div_ceil(WINDOW);
            let frames = window * WINDOW..total.min((window + 1) * WINDOW);
            round.scanned += frames.len();
            if self.meet_block(round, Pfn::new(frames.start as u32)) == Window::Passed {
                looks += 1;
                continue;
            }
            looks += frames.len();
            for index in frames {
                let frame = Pfn::new(index as u32);
                let Some(page) = self.try_isolate(frame, &round.pinned) else {
                    continue;
                };
                match round.take_from(page) {
                    Some(region) => picked.push(Victim {
                        frame,
                        page,
                        region,
                    }),
                    None => self.frames.desc(frame).publish(),
                }
            }
        }
        Counters::add(&self.stats.scanned, round.scanned as u64);
        picked.sort_unstable_by_key(|victim| (victim.region.listener, victim.page));
        picked
    }

    fn try_isolate(&self, frame: Pfn, pinned: &[PageNo]) -> Option<PageNo> {
        let desc = self.frames.desc(frame);
        if desc.state() != FrameState::Used || desc.take_recent() {
            return None;
        }
        let page = desc.isolate()?;
        if pinned.binary_search(&page).is_ok() {
            desc.publish();
            return None;
        }
        Some(page)
    }

    /// Asks the MMU notifiers which pages were accessed. Ends the isolation of these pages, and
    /// returns the others.
    fn spare_young(&self, round: &mut Round, picked: Vec<Victim>) -> Vec<Victim> {
        let mut young = vec![false; picked.len()];
        let mut start = 0;
        for group in picked.chunk_by(|a, b| a.region.listener == b.region.listener) {
            let pages: Vec<_> = group.iter().map(|victim| victim.page.range()).collect();
            let young = &mut young[start..start + group.len()];
            round.age(&group[0].region, &pages, young);
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

    /// Changes the page words to Evicting, and calls the MMU notifiers to unmap the pages.
    fn evict(&self, victims: Vec<Victim>) -> Vec<Victim> {
        let mut evicting = Vec::with_capacity(victims.len());
        for victim in victims {
            match victim.word().advance(PageState::evicted) {
                Ok(_) => evicting.push(victim),
                Err(_) => self.keep(victim),
            }
        }
        let mut kept = Vec::new();
        for group in evicting.chunk_by(|a, b| a.region.listener == b.region.listener) {
            let pages = group.iter().map(|victim| victim.page.range());
            let notifier = &group[0].region.notifier;
            notifier.try_invalidate(&joined(pages), &mut kept);
        }
        for victim in evicting.extract_if(.., |victim| kept.contains(&victim.page.addr())) {
            let _ = victim.word().advance(PageState::rescued);
            self.keep(victim);
        }
        evicting
    }

    /// Drops the pages that need no write, and copies the others.
    fn sort_out(&self, victims: Vec<Victim>) -> Sorted {
        let mut out = Sorted {
            pages: self.take_buffer(),
            ..Sorted::default()
        };
        for victim in victims {
            let desc = self.frames.desc(victim.frame);
            if desc.take_dirty() == Dirt::Clean {
                match victim.word().advance(PageState::dropped) {
                    Ok(before) => {
                        let swapped = i64::from(before.entry().is_some());
                        self.swapped_out_now.fetch_add(swapped, Ordering::Relaxed);
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
                    if let Some(entry) = before.entry() {
                        self.free_entry(entry);
                    }
                    out.freed.push(victim);
                }
                Err(_) => self.keep_dirty(victim),
            }
        }
        out
    }

    /// Ends the isolation of a page that stays: it is resident, or a fault took it back.
    pub fn keep(&self, victim: Victim) {
        self.frames.desc(victim.frame).publish();
    }

    /// Gives a page back after its dirty mark was taken. Sets the mark first, because it must be
    /// there as soon as the page can be used.
    pub fn keep_dirty(&self, victim: Victim) {
        self.frames.desc(victim.frame).mark_dirty();
        // The word is still Evicting if the reclaimer gives up. Otherwise a fault has already taken
        // the page back.
        let _ = victim.word().advance(PageState::rescued);
        self.keep(victim);
    }

    /// Frees the frames of evicted pages.
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

/// `ranges`, ascending, with adjacent ranges joined.
fn joined(ranges: impl Iterator<Item = BackingRange>) -> Vec<BackingRange> {
    let mut joined: Vec<BackingRange> = Vec::new();
    for range in ranges {
        let last = joined.last_mut();
        match last.filter(|last| last.end() == range.start()) {
            Some(last) => {
                let pages = last.pages() + range.pages();
                *last = BackingRange::new(last.start(), pages).expect("both are ranges");
            }
            None => joined.push(range),
        }
    }
    joined
}
