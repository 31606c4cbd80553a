//! Which memory a source provides.

use std::fmt;

/// The identity of a memory: sources with the same identity provide the same pages. A [`Peer`]
/// compares it at each connection ([`PeerError::OtherMemory`]). It is a guard against mistakes,
/// such as two servers with swapped sockets. A lying server is believed.
///
/// [`Peer`]: crate::Peer
/// [`PeerError::OtherMemory`]: crate::PeerError::OtherMemory
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct MemoryId(pub u128);

impl MemoryId {
    /// The identity of the memory that `parts` name together: the same in every process and
    /// release. It is the 128-bit FNV-1a hash of the parts.
    pub fn of(parts: &[&[u8]]) -> Self {
        const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let step = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        // The lengths keep (ab, c) and (a, bc) apart.
        let length = |part: &&[u8]| (part.len() as u64).to_le_bytes();
        let lengths = parts.iter().flat_map(length);
        let bytes = parts.iter().flat_map(|part| part.iter().copied());
        Self(lengths.chain(bytes).fold(BASIS, step))
    }
}

impl fmt::Display for MemoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
