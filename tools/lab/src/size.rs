//! Numbers as people write them: `512M`, `2G`, `250us`, `10s`.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub u64);

/// Why a number could not be read, with an example of a right one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeError {
    /// No number, or not a whole one.
    #[error("{0:?} does not begin with a whole number; write for example {1}")]
    NoNumber(String, &'static str),
    /// Not a unit.
    #[error("{0:?} is no unit here; use one of {1}")]
    Unit(String, &'static str),
    /// A number without the unit that it needs.
    #[error("{0:?} has no unit; add one of {1}")]
    NoUnit(String, &'static str),
    /// Not a size a second, or zero.
    #[error("{0:?} is no size a second; write for example 100M/s")]
    NoRate(String),
    /// Larger than 64 bits hold.
    #[error("{0:?} is too large")]
    TooLarge(String),
}

/// Binary in either spelling, because memory is a multiple of pages.
const SIZE_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("K", 1 << 10),
    ("KiB", 1 << 10),
    ("M", 1 << 20),
    ("MiB", 1 << 20),
    ("G", 1 << 30),
    ("GiB", 1 << 30),
    ("T", 1 << 40),
    ("TiB", 1 << 40),
];

/// In nanoseconds. A duration without a unit is an error, because programs disagree about the
/// default.
const DURATION_UNITS: &[(&str, u64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
];

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        parse(text, SIZE_UNITS, "512M", "B K M G T").map(Self)
    }
}

/// In the largest unit up to the value, with at most one decimal: `1.5G`, `768M`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
        let Some((unit, shift)) = units.into_iter().find(|(_, shift)| self.0 >> shift > 0) else {
            return write!(f, "{}B", self.0);
        };
        let value = self.0 as f64 / (1_u64 << shift) as f64;
        let text = format!("{value:.1}");
        write!(f, "{}{unit}", text.strip_suffix(".0").unwrap_or(&text))
    }
}

/// Reads a duration with its unit: `250us`, `10s`, `2min`.
///
/// # Errors
/// [`SizeError`].
pub fn parse_duration(text: &str) -> Result<Duration, SizeError> {
    parse(text, DURATION_UNITS, "250us", "ns us ms s min").map(Duration::from_nanos)
}

/// Reads a size a second: `100M/s`.
///
/// # Errors
/// [`SizeError`].
pub fn parse_rate(text: &str) -> Result<NonZeroU64, SizeError> {
    let size = text.trim().strip_suffix("/s");
    let size: Size = size
        .ok_or_else(|| SizeError::NoRate(text.into()))?
        .parse()?;
    NonZeroU64::new(size.0).ok_or_else(|| SizeError::NoRate(text.into()))
}

fn parse(
    text: &str,
    units: &[(&str, u64)],
    example: &'static str,
    names: &'static str,
) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim();
    if number.is_empty() || unit.starts_with(['.', ',']) {
        return Err(SizeError::NoNumber(text.to_owned(), example));
    }
    let known = units
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let (_, factor) = known.ok_or_else(|| match unit {
        "" => SizeError::NoUnit(text.to_owned(), names),
        _ => SizeError::Unit(unit.to_owned(), names),
    })?;
    let number: Option<u64> = number.parse().ok();
    let value = number.and_then(|number| number.checked_mul(*factor));
    value.ok_or_else(|| SizeError::TooLarge(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, String> {
        text.parse::<Size>()
            .map(|size| size.0)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64k", 64 << 10),
            ("512M", 512 << 20),
            ("2G", 2 << 30),
            ("2 GiB", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn bad_sizes_say_what_would_be_right() {
        for (text, error) in [
            (
                "",
                "\"\" does not begin with a whole number; write for example 512M",
            ),
            (
                "lots",
                "\"lots\" does not begin with a whole number; write for example 512M",
            ),
            (
                "1.5G",
                "\"1.5G\" does not begin with a whole number; write for example 512M",
            ),
            (
                "-1",
                "\"-1\" does not begin with a whole number; write for example 512M",
            ),
            ("5X", "\"X\" is no unit here; use one of B K M G T"),
            ("99999999999G", "\"99999999999G\" is too large"),
            (
                "99999999999999999999999",
                "\"99999999999999999999999\" is too large",
            ),
        ] {
            assert_eq!(size(text), Err(error.to_owned()));
        }
    }

    #[test]
    fn durations_need_their_unit() {
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("0ms"), Ok(Duration::ZERO));
        let error = parse_duration("10").unwrap_err().to_string();
        assert_eq!(error, "\"10\" has no unit; add one of ns us ms s min");
    }

    #[test]
    fn a_rate_is_a_size_a_second() {
        let rate = |text| parse_rate(text).map_err(|error| error.to_string());
        assert_eq!(rate("100M/s"), Ok(NonZeroU64::new(100 << 20).unwrap()));
        for text in ["100M", "0/s", "0G/s", "100M/min"] {
            let error = format!("{text:?} is no size a second; write for example 100M/s");
            assert_eq!(rate(text), Err(error));
        }
        let error = rate("5X/s").unwrap_err();
        assert_eq!(error, "\"X\" is no unit here; use one of B K M G T");
    }

    #[test]
    fn sizes_print_as_they_are_written() {
        for text in ["0B", "512B", "4K", "768M", "1.5G", "2G", "1T"] {
            let bytes = if text == "1.5G" {
                3 << 29
            } else {
                size(text).unwrap()
            };
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
