//! Bases that form a loop, with correct checksums.
//!
//! A CRC-32 is linear: a flipped bit changes the CRC by a value that depends only on the bit's
//! place. So linear equations over GF(2) give the bits to flip for a wanted CRC. They can be in a
//! further line, which `checksums` may have.

/// Letters in the added line: more than a CRC has bits.
const LETTERS: usize = 60;

/// `text` with a line behind it, so that the CRC-32 of both is `wanted`.
pub fn with_crc(text: &str, wanted: u32) -> String {
    let line = |flips: u64| -> String {
        let letter = |at: usize| if flips >> at & 1 == 1 { 'b' } else { 'c' };
        let letters: String = (0..LETTERS).map(letter).collect();
        format!("{text}{letters}\n")
    };
    let crc = |flips: u64| crc32fast::hash(line(flips).as_bytes());
    let plain = crc(0);
    // A basis of all changes, each with its flips; the leading bits differ.
    let mut basis: Vec<(u32, u64)> = Vec::new();
    for at in 0..LETTERS {
        let (change, flips) = reduce(&basis, crc(1 << at) ^ plain, 1 << at);
        if change != 0 {
            basis.push((change, flips));
        }
    }
    let (left, flips) = reduce(&basis, wanted ^ plain, 0);
    assert_eq!(left, 0, "the changes of so many letters give every CRC");
    line(flips)
}

/// Takes the changes of the basis out of `change`.
fn reduce(basis: &[(u32, u64)], mut change: u32, mut flips: u64) -> (u32, u64) {
    for (other, its_flips) in basis {
        if change & 1 << (31 - other.leading_zeros()) != 0 {
            change ^= other;
            flips ^= its_flips;
        }
    }
    (change, flips)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_gets_any_crc() {
        for wanted in [0, 1, 0xdead_beef, u32::MAX] {
            let text = with_crc("12345678  pages\n", wanted);
            assert_eq!(crc32fast::hash(text.as_bytes()), wanted);
            assert!(text.starts_with("12345678  pages\n") && text.is_ascii());
        }
    }
}
