//! Checksums of data on disk: 64-bit xxh3.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// The size of a chunk in bytes. Each chunk has its own checksum, so a complete chunk must be read to verify one
/// element.
pub const CHECKSUM_CHUNK: usize = 4 << 20;

/// An xxh3-64 checksum. It is written as 16 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Checksum(u64);

impl Checksum {
    /// Computes the checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_64(bytes))
    }
}

/// Computes the checksum of bytes that are added in several calls.
#[derive(Default)]
pub(super) struct StreamingChecksum {
    state: Xxh3Default,
    bytes: usize,
}

impl StreamingChecksum {
    pub fn add(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
        self.bytes += bytes.len();
    }

    /// Returns the number of bytes added so far.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the checksum of the bytes added so far, and starts a new checksum.
    pub fn take(&mut self) -> Checksum {
        let sum = Checksum(self.state.digest());
        self.state.reset();
        self.bytes = 0;
        sum
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> Self {
        checksum.to_string()
    }
}

impl FromStr for Checksum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u64::from_str_radix(text, 16).ok().map(Self);
        // Each value has only one text form, so that every change is detected.
        let value = value.filter(|value| digits && value.to_string() == text);
        value.ok_or_else(|| format!("invalid checksum '{text}': expected 16 digits of 0-9 and a-f"))
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_stretches_have_the_checksum_of_all() {
        let bytes: Vec<u8> = (0..3000u32).map(|at| ((at * at) >> 3) as u8).collect();
        let mut sum = StreamingChecksum::default();
        for step in [1, 7, 300, 3000] {
            bytes.chunks(step).for_each(|some| sum.add(some));
            assert_eq!(sum.bytes(), bytes.len());
            assert_eq!(sum.take(), Checksum::of(&bytes), "{step}");
        }
        assert_eq!(sum.take(), Checksum::of(b""));
    }

    #[test]
    fn a_checksum_has_one_text() {
        // The published value for empty input.
        assert_eq!(Checksum::of(b"").to_string(), "2d06800538d394c2");
        let text = Checksum::of(b"abc").to_string();
        assert_eq!(text.parse(), Ok(Checksum::of(b"abc")));
        for bad in [
            "",
            "+123456789012345",
            "2D06800538D394C2",
            "2d06800538d394c",
            "ä",
        ] {
            assert!(bad.parse::<Checksum>().is_err(), "{bad}");
        }
    }
}
