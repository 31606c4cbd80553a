//! Room for tables as large as a guest, and for threads.

use core::error::Error;
use core::fmt;

/// There is no room for a table or for threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom {
    /// The requested size.
    pub bytes: u64,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no room for {} bytes: give the guest less memory, or raise the limit on \
             this process's address space (ulimit -v)",
            self.bytes
        )
    }
}

impl Error for NoRoom {}

/// Bytes kept free beside each table for small allocations: if one fails, Rust ends the process.
const BESIDE: u64 = 16 << 20;

/// Address space that a thread may take with its first allocation: glibc maps 128 MiB to cut an
/// aligned arena of 64 MiB from, and does not fall back to another thread's arena.
const ARENA: u64 = 128 << 20;

/// Asks the allocator whether it has room for a table of `len` values and 16 MiB beside it.
/// Allocates nothing.
///
/// Call it before making a table that grows with a guest's memory. A refusal here is an error; a
/// refusal in the allocation itself ends the process. (A fallible allocation would touch the whole
/// table to fill it. A table of zeros made by `collect` is untouched kernel memory, and most of it
/// stays untouched.)
///
/// # Errors
/// [`NoRoom`], with the size.
pub fn room_for<T>(len: u64) -> Result<(), NoRoom> {
    let bytes = len.saturating_mul(size_of::<T>() as u64);
    let wanted = usize::try_from(bytes.saturating_add(BESIDE)).map_err(|_| NoRoom { bytes })?;
    let mut table = Vec::<u8>::new();
    table
        .try_reserve_exact(wanted)
        .map_err(|_| NoRoom { bytes })
}

/// Asks the allocator whether `threads` more threads find room for their first allocations.
/// Allocates nothing.
///
/// # Errors
/// [`NoRoom`], with the size.
pub fn room_for_threads(threads: usize) -> Result<(), NoRoom> {
    let refused = |_| NoRoom {
        bytes: threads as u64 * ARENA,
    };
    // Make one reservation for each thread: Linux refuses a single reservation larger than its
    // memory.
    let mut arenas = Vec::new();
    for _ in 0..threads {
        let mut arena = Vec::<u8>::new();
        arena.try_reserve_exact(ARENA as usize).map_err(refused)?;
        arenas.push(arena);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_has_is_refused_with_its_size() {
        assert_eq!(room_for::<u64>(512), Ok(()));
        let bytes = 1 << 62;
        assert_eq!(room_for::<u64>(bytes / 8), Err(NoRoom { bytes }));
        assert_eq!(room_for::<u64>(u64::MAX), Err(NoRoom { bytes: u64::MAX }));
    }
}
