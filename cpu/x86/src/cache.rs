//! Decoded code: blocks by where they were decoded, links between them, and what voids both.
//!
//! ```text
//! ops      [Undefined | block | block | ...]        one arena; index 0 is no block's
//! blocks   start, rip, gfn, privilege: a block is decoded for one address, one frame, one privilege
//! buckets  hash of those three -> newest block -> older -> ...
//! pages    gfn -> newest block of the page -> older -> ...     for dropping a written page
//! jumps    rip -> op index, for indirect branches
//! ```
//! Links and jump entries skip the translation of `rip`, so they are good for one *epoch*: until a
//! translation may have changed or a block was dropped. Blocks themselves are found again by frame.
//! A dropped block's ops stay in the arena, unreachable, until it is full and everything goes at once:
//! memory is bounded however often a guest writes new code.

use crate::op::{Code, Links, Op};
use crate::walk::User;
use lacuna_addr::Gfn;
use std::collections::HashMap;

/// Ops kept: 1 MiB of them.
const OPS_MAX: usize = 1 << 16;
/// Room that a block may need.
const BLOCK_MAX: usize = 256;
const BUCKETS: usize = 1 << 13;
const JUMPS: usize = 1 << 12;
/// No block.
const NONE: u32 = u32::MAX;
const EPOCH_MAX: u32 = NEVER - 1;
/// An epoch in which nothing is linked or remembered.
pub(crate) const NEVER: u32 = u32::MAX >> 1;

/// What a block was decoded for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) rip: u64,
    pub(crate) gfn: Gfn,
    pub(crate) user: User,
}

impl Key {
    fn bucket(&self) -> usize {
        let mixed = (self.rip ^ self.gfn.get() << 40 ^ self.user as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 48) as usize % BUCKETS
    }
}

struct Block {
    key: Key,
    start: u32,
    alive: bool,
    next_in_bucket: u32,
    next_in_page: u32,
}

/// Targets of indirect branches.
pub(crate) struct JumpCache(Box<[Jump; JUMPS]>);

#[derive(Clone, Copy)]
struct Jump {
    rip: u64,
    op: u32,
    /// Epoch and privilege; 0 is none.
    stamp: u32,
}

impl JumpCache {
    fn new() -> Self {
        Self(Box::new([Jump { rip: 0, op: 0, stamp: 0 }; JUMPS]))
    }

    fn slot(rip: u64) -> usize {
        (rip ^ rip >> 12) as usize % JUMPS
    }

    fn stamp(user: User, epoch: u32) -> u32 {
        epoch << 1 | u32::from(user == User::User)
    }

    /// The op index of the block at `rip`, if it is known in this epoch.
    #[inline(always)]
    pub(crate) fn find(&self, rip: u64, user: User, epoch: u32) -> Option<usize> {
        let jump = &self.0[Self::slot(rip)];
        (jump.rip == rip && jump.stamp == Self::stamp(user, epoch)).then_some(jump.op as usize)
    }
}

/// Where in the guest an op came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    /// Address of the op's instruction.
    pub(crate) rip: u64,
    /// Instructions of the block before it.
    pub(crate) before: u64,
}

/// The decoded code of one processor.
pub(crate) struct CodeCache {
    pub(crate) ops: Vec<Op>,
    pub(crate) jumps: JumpCache,
    pub(crate) epoch: u32,
    blocks: Vec<Block>,
    buckets: Box<[u32]>,
    pages: HashMap<Gfn, u32>,
}

impl CodeCache {
    pub(crate) fn new() -> Self {
        Self {
            ops: vec![Op::new(Code::Undefined)],
            jumps: JumpCache::new(),
            epoch: 1,
            blocks: Vec::new(),
            buckets: vec![NONE; BUCKETS].into_boxed_slice(),
            pages: HashMap::new(),
        }
    }

    /// Voids links and jump entries: translations may have changed.
    pub(crate) fn new_epoch(&mut self) {
        if self.epoch == EPOCH_MAX {
            self.clear();
        }
        self.epoch += 1;
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.ops.truncate(1);
        self.blocks.clear();
        self.buckets.fill(NONE);
        self.pages.clear();
        if self.epoch == EPOCH_MAX {
            self.jumps = JumpCache::new();
            self.epoch = 0;
        }
        self.epoch += 1;
    }

    /// The op index of the block for `key`.
    pub(crate) fn find(&self, key: Key) -> Option<usize> {
        let mut at = self.buckets[key.bucket()];
        while at != NONE {
            let block = &self.blocks[at as usize];
            if block.alive && block.key == key {
                return Some(block.start as usize);
            }
            at = block.next_in_bucket;
        }
        None
    }

    /// Whether a block of this page exists, so that the page is watched.
    pub(crate) fn knows_page(&self, gfn: Gfn) -> bool {
        self.pages.contains_key(&gfn)
    }

    /// Makes room for one more block; may forget everything.
    pub(crate) fn reserve(&mut self) {
        if self.ops.len() + BLOCK_MAX > OPS_MAX {
            self.clear();
        }
    }

    /// Registers the ops from `start` to the arena's end as the block for `key`.
    pub(crate) fn insert(&mut self, key: Key, start: usize) {
        let index = self.blocks.len() as u32;
        let bucket = &mut self.buckets[key.bucket()];
        let page = self.pages.entry(key.gfn).or_insert(NONE);
        self.blocks.push(Block {
            key,
            start: start as u32,
            alive: true,
            next_in_bucket: std::mem::replace(bucket, index),
            next_in_page: std::mem::replace(page, index),
        });
    }

    /// Remembers that `rip` leads to the block at `op` in this epoch.
    pub(crate) fn remember_jump(&mut self, rip: u64, user: User, op: usize) {
        let stamp = JumpCache::stamp(user, self.epoch);
        self.jumps.0[JumpCache::slot(rip)] = Jump { rip, op: op as u32, stamp };
    }

    /// Links one way out of the branch at `branch` to the block at `op`.
    pub(crate) fn link(&mut self, branch: usize, condition: bool, op: usize) {
        let epoch = self.epoch;
        self.ops[branch + 1].link(condition, op as u32, epoch);
    }

    /// Drops the blocks of a page.
    pub(crate) fn drop_page(&mut self, gfn: Gfn) {
        let Some(mut at) = self.pages.remove(&gfn) else { return };
        while at != NONE {
            let block = &mut self.blocks[at as usize];
            block.alive = false;
            at = block.next_in_page;
        }
        self.new_epoch();
    }

    /// The instruction that the op at `op` belongs to.
    pub(crate) fn origin(&self, op: usize) -> Origin {
        let after = self.blocks.partition_point(|b| b.start as usize <= op);
        let Some(block) = after.checked_sub(1).and_then(|i| self.blocks.get(i)) else {
            return Origin { rip: 0, before: 0 };
        };
        let before = &self.ops[block.start as usize..op];
        Origin {
            rip: block.key.rip.wrapping_add(before.iter().map(Op::bytes).sum()),
            before: before.iter().map(Op::instructions).sum(),
        }
    }
}
