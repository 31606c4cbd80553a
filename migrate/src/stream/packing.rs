//! Pages on their way: their compression, and the limit of their bandwidth.

use super::frame::{DATA_PAGES, Kind};
#[cfg(not(feature = "zstd"))]
use super::no_zstd as bulk;
use crate::MigrateError;
use crate::bandwidth::Bandwidth;
use lacuna_addr::PAGE_SIZE;
use lz4_flex::block;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
#[cfg(feature = "zstd")]
use zstd::bulk;

/// How pages are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all: for a network faster than a processor's compression.
    #[default]
    None,
    /// LZ4: a few hundred megabytes a second and more.
    Lz4,
    /// Zstandard, level 1: smaller, and several times slower. Both sides need the feature `zstd`.
    Zstd,
}

impl Compression {
    /// Refuses a method that this build lacks.
    pub(super) fn check(self) -> Result<(), MigrateError> {
        match self {
            Self::Zstd if !cfg!(feature = "zstd") => Err(MigrateError::NoZstd),
            _ => Ok(()),
        }
    }
}

/// The level of zstd. Higher ones are slower than most networks.
const LEVEL: i32 = 1;
/// The most bytes of one frame's pages.
const WHOLE: usize = DATA_PAGES * PAGE_SIZE;

/// How pages are sent, except requested pages.
#[derive(Clone)]
pub(super) struct Carriage {
    pub compression: Compression,
    pub limit: Option<Arc<Bandwidth>>,
}

/// Compresses pages.
pub(super) struct Packer {
    method: Method,
    packed: Vec<u8>,
}

enum Method {
    Lz4,
    Zstd(bulk::Compressor<'static>),
}

impl Packer {
    /// `None`: pages are sent uncompressed.
    ///
    /// # Errors
    /// There is no memory, or this build lacks the method.
    pub fn new(compression: Compression) -> Result<Option<Self>, MigrateError> {
        compression.check()?;
        let (method, longest) = match compression {
            Compression::None => return Ok(None),
            Compression::Lz4 => (Method::Lz4, block::get_maximum_output_size(WHOLE)),
            Compression::Zstd => {
                let compressor = bulk::Compressor::new(LEVEL).map_err(MigrateError::Codec)?;
                (Method::Zstd(compressor), WHOLE)
            }
        };
        Ok(Some(Self {
            method,
            packed: vec![0; longest],
        }))
    }

    /// The frame for pages, at most one frame's: its kind, and the block. `None`: compression would
    /// save too little.
    pub fn pack(&mut self, pages: &[u8]) -> Option<(Kind, &[u8])> {
        let worthwhile = pages.len() - pages.len() / 8;
        let (kind, bytes) = match &mut self.method {
            Method::Lz4 => (
                Kind::Lz4,
                block::compress_into(pages, &mut self.packed).ok(),
            ),
            Method::Zstd(compressor) => {
                let into = &mut self.packed[..worthwhile];
                (Kind::Zstd, compressor.compress_to_buffer(pages, into).ok())
            }
        };
        let bytes = bytes.filter(|bytes| *bytes <= worthwhile)?;
        Some((kind, &self.packed[..bytes]))
    }
}

/// Decompresses pages. A peer's block takes no more memory than an uncompressed frame.
#[derive(Default)]
pub(super) struct Unpacker {
    zstd: Option<bulk::Decompressor<'static>>,
}

impl Unpacker {
    /// Puts the pages of the block `packed` behind the first `front` bytes of `into`.
    pub fn unpack(
        &mut self,
        kind: Kind,
        packed: &[u8],
        into: &mut Vec<u8>,
        front: usize,
    ) -> Result<(), MigrateError> {
        into.resize(front + WHOLE, 0);
        let pages = &mut into[front..];
        let wrong = |why: String| MigrateError::stream(format!("a {kind:?} frame: {why}"));
        let bytes = match kind {
            Kind::Zstd => {
                Compression::Zstd.check()?;
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(bulk::Decompressor::new().map_err(MigrateError::Codec)?),
                };
                let unpacked = zstd.decompress_to_buffer(packed, pages);
                unpacked.map_err(|error| wrong(error.to_string()))?
            }
            _ => {
                let unpacked = block::decompress_into(packed, pages);
                unpacked.map_err(|error| wrong(error.to_string()))?
            }
        };
        into.truncate(front + bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packer(compression: Compression) -> Packer {
        let packer = Packer::new(compression).expect("memory");
        packer.expect("a method")
    }

    const METHODS: &[Compression] = match cfg!(feature = "zstd") {
        true => &[Compression::Lz4, Compression::Zstd],
        false => &[Compression::Lz4],
    };

    #[test]
    fn pages_come_back() {
        for &compression in METHODS {
            for pages in [1, 7, DATA_PAGES] {
                let content: Vec<u8> = (0..pages * PAGE_SIZE).map(|at| (at / 100) as u8).collect();
                let mut packer = packer(compression);
                let (kind, packed) = packer.pack(&content).expect("it gets smaller");
                assert!(
                    packed.len() < content.len() / 4,
                    "{kind:?}: {}",
                    packed.len()
                );
                let mut unpacked = b"front".to_vec();
                let mut unpacker = Unpacker::default();
                for _ in 0..2 {
                    let done = unpacker.unpack(kind, packed, &mut unpacked, 5);
                    done.expect("a good block");
                    assert_eq!(unpacked, [b"front", &content[..]].concat());
                }
            }
        }
    }

    #[test]
    fn random_pages_stay_as_they_are() {
        let mut random = fastrand::Rng::with_seed(1);
        let content: Vec<u8> = (0..64 * PAGE_SIZE).map(|_| random.u8(..)).collect();
        for &compression in METHODS {
            assert!(packer(compression).pack(&content).is_none());
        }
    }

    /// A small block can stand for gigabytes.
    #[test]
    fn a_block_of_more_than_a_frame_is_refused() {
        let content = vec![0; WHOLE + PAGE_SIZE];
        let blocks = [
            (Kind::Lz4, block::compress(&content)),
            #[cfg(feature = "zstd")]
            (Kind::Zstd, bulk::compress(&content, LEVEL).expect("memory")),
        ];
        for (kind, block) in blocks {
            let mut into = Vec::new();
            let refused = Unpacker::default().unpack(kind, &block, &mut into, 0);
            let why = refused.expect_err("too long").to_string();
            assert!(why.contains(&format!("{kind:?}")), "{why}");
            assert!(into.capacity() <= 2 * WHOLE, "{}", into.capacity());
        }
    }

    proptest! {
        #[test]
        fn any_block_is_unpacked_or_refused(block: Vec<u8>) {
            for kind in [Kind::Lz4, Kind::Zstd] {
                let mut into = Vec::new();
                let _ = Unpacker::default().unpack(kind, &block, &mut into, 0);
            }
        }
    }
}
