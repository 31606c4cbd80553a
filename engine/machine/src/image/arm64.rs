//! The header of Linux's arm64 `Image` (Documentation/arch/arm64/booting.rst, "Call the kernel
//! image"): 64 bytes, little-endian.

use super::{Image, ImageError, Segment};
use crate::Arch;
use crate::boot::arm64::IMAGE_BASE;
use lacuna_addr::Gpa;

const MAGIC: &[u8; 4] = b"ARM\x64";
const MAGIC_AT: usize = 56;
const HEADER: usize = 64;
/// The text offset of kernels before 3.17, whose headers have no image size.
const OLD_TEXT_OFFSET: u64 = 0x8_0000;
/// The largest text offset: the image's base is a multiple of this.
const BLOCK: u64 = 2 << 20;
/// Flags, bit 0: the kernel is big-endian.
const BIG_ENDIAN: u64 = 1;

/// Whether `file` begins with such a header.
pub(super) fn is_image(file: &[u8]) -> bool {
    file.get(MAGIC_AT..HEADER)
        .is_some_and(|end| end.starts_with(MAGIC))
}

/// The kernel in `file`, which [`is_image`].
pub(super) fn parse(file: &[u8]) -> Result<Image<'_>, ImageError> {
    let word = |at: usize| {
        let bytes = file.get(at..at + 8).and_then(|b| b.first_chunk());
        u64::from_le_bytes(*bytes.expect("the header is complete"))
    };
    let (text_offset, image_size, flags) = (word(8), word(16), word(24));
    if flags & BIG_ENDIAN != 0 {
        return Err(ImageError::BigEndian);
    }
    // 0: unspecified.
    match flags >> 1 & 3 {
        0 | 1 => {}
        2 => return Err(ImageError::Granule(16)),
        _ => return Err(ImageError::Granule(64)),
    }
    let text_offset = match image_size {
        0 => OLD_TEXT_OFFSET,
        _ => text_offset,
    };
    if text_offset >= BLOCK {
        return Err(ImageError::TextOffset(text_offset));
    }
    let size = image_size.max(file.len() as u64);
    let at = IMAGE_BASE + text_offset;
    let bad = ImageError::BadAddress {
        index: 0,
        addr: at,
        size,
    };
    let gpa = Gpa::new(at).ok_or(bad.clone())?;
    gpa.checked_add(size).ok_or(bad)?;
    Ok(Image {
        arch: Arch::Arm64,
        segments: vec![Segment {
            gpa,
            bytes: file,
            size,
        }],
        entry: gpa,
    })
}
