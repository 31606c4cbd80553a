//! The kinds of instructions to compare with QEMU.

use fastrand::Rng;

/// A pattern is fields of bits: `0` and `1` are fixed, `.` is random. Fields of 5 bits: `D` a data
/// register or 31, `N` a data register, `B` x8 or SP, `S` SP, `X` x9, `W` x7, `E` an even data
/// register. `I7`, `I9` and `I12` are small displacements. A bar divides the instruction from the
/// second one.
pub(super) const KINDS: &[(&str, &str)] = &[
    ("adr", ". .. 10000 ................... D"),
    ("add immediate", ". .. 100010 . ............ D D"),
    ("logical immediate", ". .. 100100 . ...... ...... D D"),
    ("move wide", ". .. 100101 .. ................ D"),
    (
        "move wide and keep",
        "1 .0 100101 .. ................ 00010 | 1 11 100101 .. ................ 00010",
    ),
    (
        "adrp, add",
        "1 .. 10000 ................... 00011 | 1 0 0 100010 . ............ 00011 00011",
    ),
    ("bitfield", ". .. 100110 . ...... ...... D D"),
    ("extract", ". 00 100111 . 0 D ...... D D"),
    ("compare and branch", ". 011010 . 0000000000000000011 D"),
    ("test and branch", ". 011011 . ..... 00000000000011 D"),
    ("conditional branch", "0101010 0 0000000000000000011 0 ...."),
    ("branch", ". 00101 00000000000000000000000011"),
    (
        "compare, branch",
        ". 11 01011 .. 0 D ...... D D | 0101010 0 0000000000000000010 0 ....",
    ),
    (
        "compare immediate, branch",
        ". .1 100010 . ............ D D | 0101010 0 0000000000000000010 0 ....",
    ),
    (
        "test, branch",
        ". 11 01010 .. . D ...... D D | 0101010 0 0000000000000000010 0 000.",
    ),
    (
        "test immediate, branch",
        ". 11 100100 . ...... ...... D D | 0101010 0 0000000000000000010 0 000.",
    ),
    ("two sources", ". 0 0 11010110 D ...... D D"),
    ("crc32", ". 0 0 11010110 D 010... D D"),
    ("one source", ". 1 0 11010110 00000 000... D D"),
    ("logical shifted", ". .. 01010 .. . D ...... D D"),
    ("add shifted", ". . . 01011 .. 0 D ...... D D"),
    ("add extended", ". . . 01011 00 1 D ... ... D D"),
    ("carry", ". . . 11010000 D 000000 D D"),
    ("conditional compare", ". . 1 11010010 D .... . 0 D 0 ...."),
    ("conditional select", ". . 0 11010100 D .... 0. D D"),
    ("three sources", ". 00 11011 ... D . D D D"),
    (
        "hint, prefetch",
        "11010101000000110010 0000 000 11111 | 11 111 0 01 10 I12 B D",
    ),
    ("barrier", "11010101000000110011 .... 101 11111"),
    ("dc zva", "1101010100 0 01 011 0111 0100 001 01000"),
    ("literal", ".. 011 0 00 000000000000....... D"),
    ("unsigned offset", ".. 111 0 01 .. I12 B D"),
    ("unscaled", ".. 111 0 00 .. 0 I9 00 B D"),
    ("post-index", ".. 111 0 00 .. 0 I9 01 B D"),
    ("unprivileged", ".. 111 0 00 .. 0 I9 10 B D"),
    ("pre-index", ".. 111 0 00 .. 0 I9 11 B D"),
    ("register offset, x", ".. 111 0 00 .. 1 X .11 . 10 B D"),
    ("register offset, sxtw", ".. 111 0 00 .. 1 X 110 . 10 B D"),
    ("register offset, uxtw", ".. 111 0 00 .. 1 W 010 . 10 B D"),
    ("pair", ".. 101 0 0 .. . I7 D B D"),
    ("ordered", ".. 001000 1 . 0 11111 1 11111 S D"),
    ("rcpc", ".. 111 0 00 10 1 11111 1 100 00 S D"),
    ("atomic", ".. 111 0 00 .. 1 D 0 ... 00 S D"),
    ("swap", ".. 111 0 00 .. 1 D 1 000 00 S D"),
    ("cas", ".. 001000 1 . 1 D . 11111 S D"),
    ("cas, equal", "11 001000 1 . 1 00000 . 11111 S D"),
    ("casp", "0. 001000 0 . 1 E . 11111 S E"),
    (
        "exclusive, b",
        "00 001000 0 1 0 11111 . 11111 S 00000 | 00 001000 0 0 0 00001 . 11111 S N",
    ),
    (
        "exclusive, h",
        "01 001000 0 1 0 11111 . 11111 S 00000 | 01 001000 0 0 0 00001 . 11111 S N",
    ),
    (
        "exclusive, w",
        "10 001000 0 1 0 11111 . 11111 S 00000 | 10 001000 0 0 0 00001 . 11111 S N",
    ),
    (
        "exclusive, x",
        "11 001000 0 1 0 11111 . 11111 S D | 11 001000 0 0 0 00001 . 11111 S N",
    ),
    (
        "exclusive pair, w",
        "10 001000 0 1 1 11111 . 00010 S 00000 | 10 001000 0 0 1 00001 . N S N",
    ),
    (
        "exclusive pair, x",
        "11 001000 0 1 1 11111 . 00010 S 00000 | 11 001000 0 0 1 00001 . N S N",
    ),
    ("no exclusive", ".. 001000 0 0 0 00001 . 11111 S N"),
];

/// A word of the pattern `fields`.
pub(super) fn random_word(fields: &str, rng: &mut Rng) -> u32 {
    let (mut word, mut bits) = (0, 0);
    for field in fields.split_ascii_whitespace() {
        let (width, value) = match field {
            "D" => (5, [0, 1, 2, 3, 4, 5, 6, 31][rng.usize(..8)]),
            "N" => (5, rng.u32(2..7)),
            "B" => (5, [8, 31][rng.usize(..2)]),
            "S" => (5, 31),
            "X" => (5, 9),
            "W" => (5, 7),
            "E" => (5, [0, 2, 4][rng.usize(..3)]),
            "I7" => (7, rng.u32(..16).wrapping_sub(8) & 0x7f),
            "I9" => (9, rng.u32(..240).wrapping_sub(120) & 0x1ff),
            "I12" => (12, rng.u32(..15)),
            _ => (field.len() as u32, random_bits(field, rng)),
        };
        word = word << width | value;
        bits += width;
    }
    assert_eq!(bits, 32, "{fields}");
    word
}

fn random_bits(field: &str, rng: &mut Rng) -> u32 {
    field.bytes().fold(0, |bits, bit| {
        let bit = match bit {
            b'0' => 0,
            b'1' => 1,
            b'.' => rng.u32(..2),
            _ => panic!("{field} is no field"),
        };
        bits << 1 | bit
    })
}
