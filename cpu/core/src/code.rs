//! Decoded code: a cache of basic blocks, the links between them, and their invalidation.
//!
//! ```text
//! ops           [scratch | basic block | basic block | ...]   one arena; the scratch place holds
//!               the one instruction being stepped
//! basic_blocks  start, pc, gfn, privilege: decoded for one address, one frame, one privilege
//! buckets       hash of those three -> newest basic block -> older -> ...
//! pages         gfn -> newest basic block of the page -> older -> ...    to drop a written page
//! jumps         pc -> op index, for indirect branches
//! ```
//! Links and jump entries skip the translation of the `pc`, so they are valid for one *epoch*. An
//! epoch ends when a translation may have changed or a basic block is dropped. Each privilege has
//! its own epoch. A switch of address space that keeps global pages ends or parks ([`Kept`]) only
//! the epoch of user code. No two address spaces have the same epoch, so the links of an address
//! space are invalid until it is current again. Basic blocks are found by their frame and survive
//! these switches.
//!
//! The ops of a dropped basic block stay in the arena, unreachable. A full arena is cleared as a
//! whole, so memory is bounded, however often a guest writes new code.

use crate::op::{Code, Op};
use crate::{Bus, Privilege, WalkCache};
use lacuna_addr::Gfn;
use std::collections::HashMap;

/// The number of ops in the arena, which takes 1 MiB. A `u16` can index them all, so no fetch needs
/// a bounds check.
const OPS_MAX: usize = 1 << 16;
/// The place of the first basic block, behind the scratch place.
const FIRST: usize = 64;
/// The most ops of a basic block.
const BASIC_BLOCK_MAX: usize = 256;
const BUCKETS: usize = 1 << 13;
const JUMPS: usize = 1 << 12;
/// Decoded ops.
pub type Arena<C> = [Op<C>; OPS_MAX];

/// No basic block.
const NONE: u32 = u32::MAX;
const EPOCH_MAX: u32 = NEVER - 1;
/// An epoch without links and jump entries.
pub const NEVER: u32 = u32::MAX >> 1;

/// The address, frame and privilege of a basic block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// Its first instruction's address.
    pub pc: u64,
    /// The frame of the basic block.
    pub gfn: Gfn,
    /// Its privilege.
    pub user: Privilege,
}

impl Key {
    #[inline]
    fn bucket(&self) -> usize {
        let mixed =
            (self.pc ^ self.gfn.get() << 40 ^ self.user as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 48) as usize % BUCKETS
    }
}

struct BasicBlock {
    key: Key,
    start: u16,
    alive: bool,
    next_in_bucket: u32,
    next_in_page: u32,
}

/// Targets of indirect branches.
pub struct JumpCache(Box<[Jump; JUMPS]>);

#[derive(Clone, Copy)]
struct Jump {
    pc: u64,
    op: u16,
    /// Epoch and privilege; 0 is none.
    stamp: u32,
}

impl JumpCache {
    fn new() -> Self {
        Self(Box::new(
            [Jump {
                pc: 0,
                op: 0,
                stamp: 0,
            }; JUMPS],
        ))
    }

    #[inline(always)]
    fn slot(pc: u64) -> usize {
        (pc ^ pc >> 12) as usize % JUMPS
    }

    #[inline(always)]
    fn stamp(user: Privilege, epoch: u32) -> u32 {
        epoch << 1 | u32::from(user == Privilege::User)
    }

    /// The op index of the basic block at `pc`, if it is known in this epoch.
    #[inline(always)]
    pub fn find(&self, pc: u64, user: Privilege, epoch: u32) -> Option<u16> {
        let jump = &self.0[Self::slot(pc)];
        (jump.pc == pc && jump.stamp == Self::stamp(user, epoch)).then_some(jump.op)
    }
}

/// The valid links between basic blocks after a switch of address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// All of them.
    All,
    /// None.
    Nothing,
    /// The links from the time when the address space was parked. It is current again.
    Parked(UserCode),
}

/// The links of an address space's user code, while another one is current.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UserCode {
    epoch: u32,
    era: u64,
}

/// The guest's instruction of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Address of the op's instruction.
    pub pc: u64,
    /// The number of instructions before it in the basic block.
    pub before: u64,
}

/// Decoded code in one epoch, as a processor's hot loop uses it.
#[derive(Clone, Copy)]
pub struct Decoded<'a, C> {
    /// The ops.
    pub ops: &'a Arena<C>,
    /// Targets of indirect branches.
    pub jumps: &'a JumpCache,
    /// Links of this epoch are valid.
    pub epoch: u32,
}

/// An exit of a basic block that is not linked.
#[derive(Clone, Copy)]
struct Unlinked {
    branch: u16,
    condition: bool,
    target: u64,
    user: Privilege,
    epoch: u32,
}

/// The decoded code of one processor.
pub struct CodeCache<C> {
    /// The ops of all basic blocks and of the scratch place.
    pub ops: Box<Arena<C>>,
    /// The end of the arena's used part.
    end: usize,
    /// Targets of indirect branches.
    pub jumps: JumpCache,
    /// The epochs of supervisor code and user code.
    epochs: [u32; 2],
    /// The newest epoch so far.
    last_epoch: u32,
    /// How often all epochs have ended together, including parked address spaces' epochs.
    era: u64,
    basic_blocks: Vec<BasicBlock>,
    /// Where each basic block starts, ascending. The array is compact, because
    /// [`CodeCache::origin`] searches it at every unlinked exit.
    starts: Vec<u16>,
    buckets: Box<[u32]>,
    pages: HashMap<Gfn, u32>,
    /// The exit that led to the next instruction.
    unlinked: Option<Unlinked>,
}

impl<C: Code> Default for CodeCache<C> {
    fn default() -> Self {
        Self::new()
    }
}

impl<C: Code> CodeCache<C> {
    /// An empty cache.
    pub fn new() -> Self {
        Self {
            ops: arena(),
            end: FIRST,
            jumps: JumpCache::new(),
            epochs: [1, 2],
            last_epoch: 2,
            era: 0,
            basic_blocks: Vec::new(),
            starts: Vec::new(),
            buckets: vec![NONE; BUCKETS].into_boxed_slice(),
            pages: HashMap::new(),
            unlinked: None,
        }
    }

    /// The epoch of code of privilege `user`.
    #[inline(always)]
    pub fn epoch(&self, user: Privilege) -> u32 {
        self.epochs[user as usize]
    }

    /// Invalidates links and jump entries of every address space: translations may have changed.
    pub fn new_epoch(&mut self) {
        self.era += 1;
        self.begin_epoch(Privilege::Supervisor);
        self.begin_epoch(Privilege::User);
    }

    /// Invalidates links and jump entries of code of privilege `user`, in the current address
    /// space.
    pub fn begin_epoch(&mut self, user: Privilege) {
        if self.last_epoch == EPOCH_MAX {
            // The epochs' numbers begin again, so no link with an old number may remain.
            self.forget_basic_blocks();
            self.jumps = JumpCache::new();
            self.last_epoch = 0;
            self.era += 1;
        }
        self.last_epoch += 1;
        self.epochs[user as usize] = self.last_epoch;
    }

    /// The links of the current address space's user code, to restore them later.
    pub fn user_code(&self) -> UserCode {
        UserCode {
            epoch: self.epoch(Privilege::User),
            era: self.era,
        }
    }

    /// Keeps or invalidates the links of code of privilege `user`, after a switch of address space.
    pub fn follow(&mut self, user: Privilege, kept: Kept) {
        match kept {
            Kept::All => {}
            Kept::Parked(code) if code.era == self.era => self.epochs[user as usize] = code.epoch,
            Kept::Parked(_) | Kept::Nothing => self.begin_epoch(user),
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.forget_basic_blocks();
        self.new_epoch();
    }

    fn forget_basic_blocks(&mut self) {
        self.end = FIRST;
        self.basic_blocks.clear();
        self.starts.clear();
        self.buckets.fill(NONE);
        self.pages.clear();
    }

    /// The op index of the basic block for `key`.
    pub fn find(&self, key: Key) -> Option<u16> {
        let mut at = self.buckets[key.bucket()];
        while at != NONE {
            let block = &self.basic_blocks[at as usize];
            if block.alive && block.key == key {
                return Some(block.start);
            }
            at = block.next_in_bucket;
        }
        None
    }

    /// Whether the page has a basic block, and so is write-tracked.
    pub fn knows_page(&self, gfn: Gfn) -> bool {
        self.pages.contains_key(&gfn)
    }

    /// Makes room for one more basic block; may forget everything.
    pub fn reserve(&mut self) {
        if self.end + BASIC_BLOCK_MAX > OPS_MAX {
            self.clear();
        }
    }

    /// Puts a basic block's ops in the scratch place; returns its op index.
    pub fn set_scratch(&mut self, ops: &[Op<C>]) -> u16 {
        self.ops[..ops.len()].copy_from_slice(ops);
        0
    }

    /// Keeps `ops` as the basic block for `key`, after [`CodeCache::reserve`]; returns its op
    /// index.
    pub fn insert(&mut self, key: Key, ops: &[Op<C>]) -> u16 {
        let start = self.end;
        self.end += ops.len();
        self.ops[start..self.end].copy_from_slice(ops);
        let index = self.basic_blocks.len() as u32;
        let bucket = &mut self.buckets[key.bucket()];
        let page = self.pages.entry(key.gfn).or_insert(NONE);
        self.starts.push(start as u16);
        self.basic_blocks.push(BasicBlock {
            key,
            start: start as u16,
            alive: true,
            next_in_bucket: std::mem::replace(bucket, index),
            next_in_page: std::mem::replace(page, index),
        });
        start as u16
    }

    /// Records that `pc` leads to the basic block at `op` in this epoch.
    pub fn remember_jump(&mut self, pc: u64, user: Privilege, op: u16) {
        let stamp = JumpCache::stamp(user, self.epoch(user));
        self.jumps.0[JumpCache::slot(pc)] = Jump { pc, op, stamp };
    }

    /// The code, for links of `epoch`.
    #[inline(always)]
    pub fn decoded(&self, epoch: u32) -> Decoded<'_, C> {
        Decoded {
            ops: &self.ops,
            jumps: &self.jumps,
            epoch,
        }
    }

    /// Records that the branch at `branch` has left its basic block by the exit for `condition`, to
    /// `target`. The basic block was entered in `epoch`.
    pub fn leave(
        &mut self,
        branch: u16,
        condition: bool,
        target: u64,
        user: Privilege,
        epoch: u32,
    ) {
        self.unlinked = Some(Unlinked {
            branch,
            condition,
            target,
            user,
            epoch,
        });
    }

    /// The basic block at `pc` begins at `op`: links the exit that led to it, for one epoch.
    pub fn enter(&mut self, pc: u64, user: Privilege, op: u16) {
        if let Some(way) = self.unlinked.take()
            && (way.target, way.user, way.epoch) == (pc, user, self.epoch(user))
        {
            let links = way.branch.wrapping_add(1) as usize;
            self.ops[links].link(way.condition, op.into(), way.epoch);
        }
    }

    /// Forgets the exit that led to the next instruction.
    pub fn forget_exit(&mut self) {
        self.unlinked = None;
    }

    /// Drops the pages that this processor has written, and lets the bus notify the other
    /// processors. Such pages are rare, so only the check is inlined.
    #[inline(always)]
    pub fn drop_written(
        &mut self,
        written: &mut Vec<Gfn>,
        walk: &mut WalkCache,
        bus: &mut impl Bus,
    ) {
        if !written.is_empty() || walk.wrote_code() {
            self.drop_written_pages(written, walk, bus);
        }
    }

    #[cold]
    #[inline(never)]
    fn drop_written_pages(
        &mut self,
        written: &mut Vec<Gfn>,
        walk: &mut WalkCache,
        bus: &mut impl Bus,
    ) {
        while let Some(gfn) = written.pop() {
            self.drop_page(gfn);
            bus.code_written(gfn);
        }
        if walk.take_wrote_code() {
            self.clear();
        }
    }

    /// Drops the basic blocks of a page.
    pub fn drop_page(&mut self, gfn: Gfn) {
        let Some(mut at) = self.pages.remove(&gfn) else {
            return;
        };
        while at != NONE {
            let block = &mut self.basic_blocks[at as usize];
            block.alive = false;
            at = block.next_in_page;
        }
        self.new_epoch();
    }

    /// The instruction of the op at `op`. `scratch` is the address of the scratch place.
    pub fn origin(&self, op: u16, scratch: u64) -> Origin {
        let after = self.starts.partition_point(|&start| start <= op);
        let (start, pc) = match after.checked_sub(1).map(|i| &self.basic_blocks[i]) {
            Some(block) if usize::from(op) >= FIRST => (block.start, block.key.pc),
            _ => (0, scratch),
        };
        let before = &self.ops[start.into()..op.into()];
        Origin {
            pc: pc.wrapping_add(before.iter().map(Op::bytes).sum()),
            before: before.iter().map(Op::instructions).sum(),
        }
    }
}

fn arena<C: Code>() -> Box<Arena<C>> {
    let ops = vec![Op::new(C::UNREACHABLE); OPS_MAX].into_boxed_slice();
    let Ok(arena) = ops.try_into() else {
        unreachable!("the length is OPS_MAX")
    };
    arena
}
