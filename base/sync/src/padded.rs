//! Values on cache lines of their own.

use std::ops::{Deref, DerefMut};

/// A value that shares its cache lines with no other. So if one processor often writes the value,
/// other processors keep their copies of its neighbours. The alignment is 128 bytes, because
/// processors fetch lines in pairs.
#[derive(Default, Debug)]
#[repr(align(128))]
pub struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    /// `value`, padded.
    pub const fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for CachePadded<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
