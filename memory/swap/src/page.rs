//! A page of bytes.

use lacuna_addr::PAGE_SIZE;

/// One page of bytes outside of guest memory. A swap device writes such pages.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_SIZE]);

impl Page {
    /// A page of zeros.
    pub const ZERO: Self = Self([0; PAGE_SIZE]);

    /// A checksum of its bytes, against accidents; it does not protect against forgery.
    pub fn checksum(&self) -> u32 {
        crc32fast::hash(&self.0)
    }
}

const _: () = assert!(size_of::<Page>() == PAGE_SIZE);

impl Default for Page {
    fn default() -> Self {
        Self::ZERO
    }
}
