//! The types of addresses and frame numbers.

use crate::{BlockNumber, GPA_BITS, PAGE_SHIFT, PAGE_SIZE};
use core::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $fmt:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The raw number, for formats and arithmetic that end in a checked constructor.
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "(", $fmt, ")"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $fmt, self.0)
            }
        }
    };
}

number!(
    /// A guest-physical address in bytes, below 2^48.
    Gpa,
    "{:#x}"
);
number!(
    /// A guest frame number: a guest-physical address divided by 4 KiB.
    Gfn,
    "{:#x}"
);
number!(
    /// A host virtual address of this process. Slots of the kvm backend point to such addresses.
    Hva,
    "{:#x}"
);
number!(
    /// An address in the host memory manager's own numbering. Slots of the soft backend point to
    /// such addresses. It is no pointer: the manager knows which frame holds the page now.
    BackingAddr,
    "{:#x}"
);
number!(
    /// A frame of the resident budget: index of a real 4 KiB page in the pool.
    Pfn,
    "{:#x}"
);
number!(
    /// A number of 4 KiB pages.
    PageCount,
    "{}"
);

impl Gpa {
    /// `None` if `addr` needs more than 48 bits.
    pub const fn new(addr: u64) -> Option<Self> {
        if addr >> GPA_BITS == 0 {
            Some(Self(addr))
        } else {
            None
        }
    }

    /// The address without bits 48 and up. A processor with 48 physical bits does this with an
    /// entry whose reserved bits it has checked.
    pub const fn truncate(addr: u64) -> Self {
        Self(addr & ((1 << GPA_BITS) - 1))
    }

    /// The frame this address lies in.
    pub const fn gfn(self) -> Gfn {
        Gfn(self.0 >> PAGE_SHIFT)
    }

    /// Offset within its 4 KiB page.
    pub const fn offset(self) -> usize {
        (self.0 as usize) & (PAGE_SIZE - 1)
    }

    /// `self + bytes`, or `None` past 48 bits.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Self::new(sum),
            None => None,
        }
    }
}

impl Gfn {
    /// `None` if the frame lies past 48 bits of address.
    pub const fn new(gfn: u64) -> Option<Self> {
        if gfn >> (GPA_BITS - PAGE_SHIFT) == 0 {
            Some(Self(gfn))
        } else {
            None
        }
    }

    /// The address of the frame's first byte.
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0 << PAGE_SHIFT)
    }

    /// Makes a frame number without a check: other types of this crate have checked it already.
    #[inline(always)]
    pub(crate) const fn checked_before(gfn: u64) -> Self {
        debug_assert!(Self::new(gfn).is_some());
        Self(gfn)
    }

    /// The frame's 2 MiB block of 512 frames.
    #[inline]
    pub const fn block(self) -> BlockNumber {
        BlockNumber::of(self)
    }

    /// `self + pages`, or `None` past 48 bits of address.
    pub const fn checked_add(self, pages: u64) -> Option<Self> {
        match self.0.checked_add(pages) {
            Some(sum) => Self::new(sum),
            None => None,
        }
    }
}

/// An address that a memory slot may point to.
pub trait SlotAddress: Copy + Ord + fmt::Debug + fmt::Display {
    /// The address of byte `addr`.
    fn new(addr: u64) -> Self;

    /// The raw number.
    fn get(self) -> u64;
}

macro_rules! slot_address {
    ($name:ident) => {
        impl $name {
            /// The address of byte `addr`.
            pub const fn new(addr: u64) -> Self {
                Self(addr)
            }

            /// The start of its page.
            pub const fn page(self) -> Self {
                Self(self.0 & !(PAGE_SIZE as u64 - 1))
            }

            /// Whether the address is the first byte of a page.
            pub const fn is_page_aligned(self) -> bool {
                self.0 & (PAGE_SIZE as u64 - 1) == 0
            }

            /// `self + pages`, or `None` on overflow.
            pub const fn checked_add_pages(self, pages: u64) -> Option<Self> {
                match pages.checked_mul(PAGE_SIZE as u64) {
                    Some(bytes) => match self.0.checked_add(bytes) {
                        Some(sum) => Some(Self(sum)),
                        None => None,
                    },
                    None => None,
                }
            }
        }

        impl SlotAddress for $name {
            #[inline]
            fn new(addr: u64) -> Self {
                Self(addr)
            }

            #[inline]
            fn get(self) -> u64 {
                self.0
            }
        }
    };
}

slot_address!(Hva);
slot_address!(BackingAddr);

impl Pfn {
    /// Frame number `index` of the pool.
    pub const fn new(index: u32) -> Self {
        Self(index as u64)
    }

    /// The index into per-frame arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl PageCount {
    /// A number of `pages` pages.
    pub const fn new(pages: u64) -> Self {
        Self(pages)
    }

    /// Pages that hold `bytes`, rounded up.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes.div_ceil(PAGE_SIZE as u64))
    }

    /// The size in bytes, saturating.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(PAGE_SIZE as u64)
    }
}
