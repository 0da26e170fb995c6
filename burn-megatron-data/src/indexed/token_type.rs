//! The integer type in which tokens are stored.

use super::MalformedIndex;

/// The integer type of the tokens in a file. The code of the type is stored in the index file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// `u8`, code 1.
    U8,
    /// `i8`, code 2.
    I8,
    /// `i16`, code 3.
    I16,
    /// `i32`, code 4.
    I32,
    /// `i64`, code 5.
    I64,
    /// `u16`, code 8.
    U16,
}

impl TokenType {
    /// Returns the type that Megatron uses for a vocabulary of this size: `u16` for fewer than 65,500 tokens, otherwise
    /// `i32`.
    pub fn for_vocabulary(vocabulary: usize) -> Self {
        if vocabulary < 65_500 {
            Self::U16
        } else {
            Self::I32
        }
    }

    /// Returns the type with this code.
    ///
    /// # Errors
    ///
    /// [`MalformedIndex::FloatTokens`] for floating-point types, [`MalformedIndex::Code`] for unknown codes.
    pub fn from_code(code: u8) -> Result<Self, MalformedIndex> {
        match code {
            1 => Ok(Self::U8),
            2 => Ok(Self::I8),
            3 => Ok(Self::I16),
            4 => Ok(Self::I32),
            5 => Ok(Self::I64),
            6 | 7 => Err(MalformedIndex::FloatTokens { code }),
            8 => Ok(Self::U16),
            _ => Err(MalformedIndex::Code { code }),
        }
    }

    /// Returns the code of the type in the index file.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    /// Returns the number of bytes per token.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns the largest token that the type can store.
    pub fn max(self) -> u64 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::I8 => i8::MAX as u64,
            Self::I16 => i16::MAX as u64,
            Self::I32 => i32::MAX as u64,
            Self::I64 => i64::MAX as u64,
            Self::U16 => u16::MAX.into(),
        }
    }

    /// Encodes tokens, each at most [`max`](Self::max), and appends them.
    pub(super) fn encode(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        let tokens = tokens.iter();
        match self {
            Self::U8 | Self::I8 => bytes.extend(tokens.map(|token| *token as u8)),
            Self::I16 | Self::U16 => bytes.extend(tokens.flat_map(|x| (*x as u16).to_le_bytes())),
            Self::I32 => bytes.extend(tokens.flat_map(|token| token.to_le_bytes())),
            Self::I64 => bytes.extend(tokens.flat_map(|token| u64::from(*token).to_le_bytes())),
        }
    }

    /// Decodes bytes and appends the tokens. Returns the first token that is negative or does not fit an `i32` as an
    /// error.
    pub(super) fn decode(self, bytes: &[u8], tokens: &mut Vec<i32>) -> Result<(), i64> {
        let first = tokens.len();
        match self {
            Self::U8 => tokens.extend(bytes.iter().map(|byte| i32::from(*byte))),
            Self::I8 => tokens.extend(bytes.iter().map(|byte| i32::from(*byte as i8))),
            Self::I16 => tokens.extend(words(bytes).map(|x| i32::from(i16::from_le_bytes(x)))),
            Self::U16 => tokens.extend(words(bytes).map(|x| i32::from(u16::from_le_bytes(x)))),
            Self::I32 => tokens.extend(words(bytes).map(i32::from_le_bytes)),
            Self::I64 => {
                for token in words(bytes).map(i64::from_le_bytes) {
                    tokens.push(i32::try_from(token).map_err(|_| token)?);
                }
            }
        }
        match tokens[first..].iter().find(|token| **token < 0) {
            Some(token) => Err(i64::from(*token)),
            None => Ok(()),
        }
    }
}

/// Iterates over chunks of `N` bytes.
pub(super) fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
}

/// Returns the `N` bytes at offset `start`.
pub(super) fn word<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    let mut word = [0; N];
    word.copy_from_slice(&bytes[start..start + N]);
    word
}
