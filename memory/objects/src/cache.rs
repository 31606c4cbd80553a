//! A bounded number of chunks in memory.

use std::collections::HashMap;
use std::sync::Arc;

/// The bytes of a chunk.
pub(crate) type Bytes = Arc<[u8]>;

/// A bounded cache. It evicts the least recently used chunk.
pub(crate) struct Cache {
    chunks: HashMap<u64, (Bytes, u64)>,
    /// The most chunks.
    bound: usize,
    /// Counts uses.
    uses: u64,
}

impl Cache {
    pub fn new(bound: usize) -> Self {
        Self {
            chunks: HashMap::new(),
            bound: bound.max(1),
            uses: 0,
        }
    }

    pub fn get(&mut self, chunk: u64) -> Option<Bytes> {
        self.uses += 1;
        let (bytes, used) = self.chunks.get_mut(&chunk)?;
        *used = self.uses;
        Some(Arc::clone(bytes))
    }

    pub fn contains(&self, chunk: u64) -> bool {
        self.chunks.contains_key(&chunk)
    }

    pub fn insert(&mut self, chunk: u64, bytes: Bytes) {
        self.uses += 1;
        if self.chunks.len() >= self.bound && !self.contains(chunk) {
            // There are few chunks, and each took a request to a store, so a linear search is
            // cheap.
            let oldest = self.chunks.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(chunk, _)| *chunk) {
                self.chunks.remove(&oldest);
            }
        }
        self.chunks.insert(chunk, (bytes, self.uses));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_chunk_leaves() {
        let mut cache = Cache::new(2);
        let bytes = |byte: u8| Bytes::from([byte]);
        cache.insert(1, bytes(1));
        cache.insert(2, bytes(2));
        assert_eq!(cache.get(1), Some(bytes(1)));
        cache.insert(3, bytes(3));
        assert_eq!(cache.get(2), None);
        assert!(cache.contains(1) && cache.contains(3));
        cache.insert(3, bytes(4));
        assert_eq!(
            (cache.get(3), cache.get(1)),
            (Some(bytes(4)), Some(bytes(1)))
        );
    }
}
