//! Copies of bytes that other threads access are made piece by piece, each as one aligned integer.

/// The size in bytes, at most 8, of the largest integer that lies aligned at `at` and has no more
/// than `left` bytes. A copy that moves each such piece by one atomic access does not tear an
/// aligned access of 2, 4 or 8 bytes. `at` is an address, or an offset from an aligned one.
///
/// # Panics
/// If `left` is 0.
#[inline]
pub const fn aligned_piece(at: usize, left: usize) -> usize {
    let (by_address, by_length) = ((at | 8).trailing_zeros(), left.ilog2());
    if by_address < by_length {
        1 << by_address
    } else {
        1 << by_length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_largest_integer_that_lies_aligned_and_fits() {
        let ends = (usize::MAX - 32..usize::MAX).chain(0..32);
        for (at, left) in ends.flat_map(|at| (1..40).map(move |left| (at, left))) {
            let fits = |size: &usize| at.is_multiple_of(*size) && *size <= left;
            let largest = [8, 4, 2, 1].into_iter().find(fits);
            assert_eq!(Some(aligned_piece(at, left)), largest, "{left} at {at}");
        }
    }

    #[test]
    fn a_copy_of_pieces_moves_each_byte_once() {
        for (start, len) in (0..16).flat_map(|start| (0..64).map(move |len| (start, len))) {
            let (mut at, mut left) = (start, len);
            while left > 0 {
                let size = aligned_piece(at, left);
                (at, left) = (at + size, left - size);
            }
            assert_eq!(at, start + len);
        }
    }
}
