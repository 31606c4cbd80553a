//! Room for tables as large as a guest.

use core::error::Error;
use core::fmt;

/// There is no room for a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom {
    /// The table's size.
    pub bytes: u64,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no room for a table of {} bytes: give the guest less memory, or raise the limit on \
             this process's address space (ulimit -v)",
            self.bytes
        )
    }
}

impl Error for NoRoom {}

/// Asks the allocator whether it has room for a table of `len` values, and takes nothing.
///
/// Tables that grow with a guest's memory are asked for before they are made: a refusal is an error
/// here, and in the allocation itself the end of the process. (A fallible allocation of the table
/// would touch all of it to fill it. A table of zeros made by `collect` comes untouched from the
/// kernel, and most of it stays so.)
///
/// # Errors
/// [`NoRoom`], with the size.
pub fn room_for<T>(len: u64) -> Result<(), NoRoom> {
    let bytes = len.saturating_mul(size_of::<T>() as u64);
    let len = usize::try_from(len).map_err(|_| NoRoom { bytes })?;
    let mut table = Vec::<T>::new();
    table.try_reserve_exact(len).map_err(|_| NoRoom { bytes })
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
