//! The layout of a decoded op, for any instruction set.
//!
//! ```text
//! byte  0     1     2    3     4    5    6     7      8          12         16
//!       code  form  len  aux   dst  src  base  index  disp i32   imm i32
//! ```
//! A processor gives the fields their meaning. In the links of a basic block's end, `form` is the
//! number of its instructions, the slots are an epoch, and the numbers are the op indices of two
//! basic blocks.

/// The operations of a processor.
pub trait Code: Copy {
    /// The operation at every unused place of the arena.
    const UNREACHABLE: Self;
    /// The operation of links.
    const LINKS: Self;
    /// `dst`, `src`, `base` and `index` of an op that names no slot.
    const SLOTS: [u8; 4];

    /// Bytes of the instructions that an op with this `len` completes.
    fn bytes(len: u8) -> u64;

    /// The number of instructions that an op with this `len` completes.
    fn instructions(len: u8) -> u64;
}

/// A decoded operation. A basic block ends in a branch, and then one op with the links of its two
/// exits.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "a processor says what they are")]
pub struct Op<C> {
    pub code: C,
    pub form: u8,
    /// The instructions that this op completes, as [`Code`] counts them.
    pub len: u8,
    /// A kind within the code.
    pub aux: u8,
    pub dst: u8,
    pub src: u8,
    pub base: u8,
    pub index: u8,
    pub disp: i32,
    pub imm: i32,
}

const _: () = assert!(size_of::<Op<u8>>() == 16);

impl<C: Code> Op<C> {
    /// An op without operands.
    pub const fn new(code: C) -> Self {
        let [dst, src, base, index] = C::SLOTS;
        Self {
            code,
            form: 0,
            len: 0,
            aux: 0,
            dst,
            src,
            base,
            index,
            disp: 0,
            imm: 0,
        }
    }

    /// This op with a 64-bit immediate.
    pub const fn with_wide(self, value: u64) -> Self {
        Self {
            disp: (value >> 32) as i32,
            imm: value as i32,
            ..self
        }
    }

    /// The 64-bit immediate.
    #[inline(always)]
    pub const fn wide(&self) -> u64 {
        (self.disp as u32 as u64) << 32 | self.imm as u32 as u64
    }

    /// `imm`, sign-extended.
    #[inline(always)]
    pub const fn imm64(&self) -> u64 {
        self.imm as i64 as u64
    }

    /// Whether `form` has `flag`.
    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.form & flag != 0
    }

    /// Bytes of the instructions that this op completes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        C::bytes(self.len)
    }

    /// The number of instructions that this op completes.
    #[inline]
    pub fn instructions(&self) -> u64 {
        C::instructions(self.len)
    }

    /// Links without targets, ending a basic block of `instructions`.
    pub const fn unlinked(instructions: u8) -> Self {
        Self {
            form: instructions,
            ..Self::new(C::LINKS)
        }
    }

    /// These links: the op index of the basic block for `condition`. 0 is "not known yet".
    #[inline(always)]
    pub const fn target(&self, condition: bool) -> u32 {
        if condition {
            self.disp as u32
        } else {
            self.imm as u32
        }
    }

    /// These links: the epoch in which the indices are valid.
    #[inline(always)]
    pub const fn epoch(&self) -> u32 {
        u32::from_ne_bytes([self.dst, self.src, self.base, self.index])
    }

    /// These links: instructions in the whole basic block.
    #[inline(always)]
    pub const fn block_instructions(&self) -> i64 {
        self.form as i64
    }

    /// These links: sets the target of the exit for `condition`, for one epoch.
    pub(crate) fn link(&mut self, condition: bool, target: u32, epoch: u32) {
        if self.epoch() != epoch {
            (self.disp, self.imm) = (0, 0);
            [self.dst, self.src, self.base, self.index] = epoch.to_ne_bytes();
        }
        if condition {
            self.disp = target as i32;
        } else {
            self.imm = target as i32;
        }
    }
}
