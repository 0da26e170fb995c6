//! Sizes in bytes as values of flags and recipes.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserializer, Error, Unexpected, Visitor};

/// Number of bytes, parsed from `80GiB`, `5GB`, `512MiB` or `1000000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, f64); 9] = [
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("B", 1.0),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
        let (number, unit) = match unit {
            Some((name, unit)) => (text.trim_end_matches(name).trim_end(), *unit),
            None => (text, 1.0),
        };
        let bytes = number.parse().ok().map(|number: f64| number * unit);
        match bytes {
            Some(bytes) if bytes >= 1.0 && bytes < u64::MAX as f64 => Ok(Self(bytes as u64)),
            _ => Err(format!(
                "invalid size \"{text}\": expected bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            )),
        }
    }
}

/// Reads a number of bytes from a recipe: an integer, or text such as `"2GiB"`.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    deserializer.deserialize_any(BytesVisitor)
}

struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = u64;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a number of bytes, or text such as \"2GiB\"")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<u64, E> {
        Ok(bytes)
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<u64, E> {
        u64::try_from(bytes).map_err(|_| E::invalid_value(Unexpected::Signed(bytes), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        let size = text.parse::<ByteSize>().map_err(E::custom)?;
        Ok(size.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("7", 7),
            ("7B", 7),
            ("80e9", 80_000_000_000),
            ("5GB", 5_000_000_000),
            ("1.5GiB", 3 << 29),
            ("512 MiB", 512 << 20),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in [
            "",
            "GiB",
            "0",
            "0GB",
            "-1MiB",
            "nan",
            "inf",
            "99999999999TiB",
            "5 gigs",
            "5GBB",
            "8M",
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(
                error.contains(text) && error.contains("expected bytes"),
                "{error}"
            );
        }
    }
}
