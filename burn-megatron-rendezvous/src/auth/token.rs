//! The shared secret token of a run.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The number of bytes of a token (256 bits).
const BYTES: usize = 32;

/// The maximum number of bytes that are read from a token file. The file may contain whitespace around the token.
const MAX_FILE_BYTES: u64 = 1024;

/// The shell commands that create a token and pass it to the ranks.
pub const TOKEN_INSTRUCTIONS: &str =
    "  (umask 077; openssl rand -hex 32 > run.token)   # once, then copied to each machine
  export BURN_MEGATRON_TOKEN=$(cat run.token)       # for each rank, or --token-file run.token";

/// The shared secret of the processes of a run. It consists of 256 random bits, written as 64 hexadecimal digits.
/// `Debug` does not print it.
#[derive(Clone)]
pub struct Token(pub(super) [u8; BYTES]);

/// The reason why there is no valid [`Token`]. The messages never contain the token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The text does not have the format of a token.
    #[error(
        "invalid token in {from} ({given} characters): expected 64 hexadecimal digits, as printed by \
         `openssl rand -hex 32`"
    )]
    Format {
        /// The name of the variable or file that contains the text.
        from: String,
        /// The number of characters of the text.
        given: usize,
    },
    /// The token file cannot be read.
    #[error("cannot read the token file {}: {source}", path.display())]
    File {
        /// The path of the token file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Other users have access to the token file.
    #[error(
        "invalid mode {mode:04o} of the token file {}: expected 0600; run chmod 600 {}",
        path.display(),
        path.display()
    )]
    Mode {
        /// The path of the token file.
        path: PathBuf,
        /// The mode of the token file.
        mode: u32,
    },
    /// The environment variable and the token file contain different tokens.
    #[error(
        "BURN_MEGATRON_TOKEN and the token file {} hold different tokens: set only one of them",
        path.display()
    )]
    Disagree {
        /// The path of the token file.
        path: PathBuf,
    },
}

impl Token {
    /// The environment variable that contains the token.
    pub const VARIABLE: &str = "BURN_MEGATRON_TOKEN";

    /// Creates a random token.
    ///
    /// # Errors
    /// If the operating system has no source of random bytes.
    pub fn random() -> io::Result<Self> {
        random_bytes().map(Self)
    }

    /// Parses a token. The text may have whitespace around the token. Errors contain `from`, the name of the source of
    /// the text.
    ///
    /// # Errors
    /// [`TokenError::Format`] if the text is not a token.
    pub fn parse(text: &str, from: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let token = from_hexadecimal(text).map(Self);
        token.ok_or_else(|| TokenError::Format {
            from: from.into(),
            given: text.chars().count(),
        })
    }

    /// Reads the token from a file to which no other user has access (mode 0600 or 0400).
    ///
    /// # Errors
    /// [`TokenError`] if there is no valid token. For a wrong mode, the message contains the command that corrects the
    /// mode.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::File {
            path: path.into(),
            source,
        };
        // Reading a pipe would block.
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        let file = File::open(path).map_err(failed)?;
        check_mode(path, &file)?;
        let mut text = String::new();
        let read = file.take(MAX_FILE_BYTES).read_to_string(&mut text);
        read.map_err(failed)?;
        Self::parse(&text, &format!("the token file {}", path.display()))
    }

    /// Reads the token from a file. If `expected` is not `None`, the token must be equal to it.
    ///
    /// # Errors
    /// The errors of [`from_file`](Self::from_file), and [`TokenError::Disagree`] if the tokens differ.
    pub fn from_file_matching(path: &Path, expected: Option<&Self>) -> Result<Self, TokenError> {
        let token = Self::from_file(path)?;
        if expected.is_some_and(|expected| *expected != token) {
            return Err(TokenError::Disagree { path: path.into() });
        }
        Ok(token)
    }

    /// Returns the token as 64 hexadecimal digits. Pass the token to other processes only through their environment.
    pub fn reveal(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns an HMAC with the token as its key. If a run on one machine has no token, the key is empty.
    pub(super) fn mac(token: Option<&Self>) -> Hmac<Sha256> {
        let key = token.map_or(&[][..], |token| &token.0);
        let mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        // Distinguishes a missing token from a token of zeros.
        mac.chain_update([u8::from(token.is_some())])
    }
}

#[cfg(unix)]
fn check_mode(path: &Path, file: &File) -> Result<(), TokenError> {
    use std::os::unix::fs::PermissionsExt;

    let found = file.metadata().map_err(|source| TokenError::File {
        path: path.into(),
        source,
    })?;
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    Err(TokenError::Mode {
        path: path.into(),
        mode,
    })
}

#[cfg(not(unix))]
fn check_mode(_: &Path, _: &File) -> Result<(), TokenError> {
    Ok(())
}

/// Returns random bytes from the operating system.
pub(super) fn random_bytes() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| {
        io::Error::other(format!(
            "cannot get random bytes from the operating system: {error}"
        ))
    })?;
    Ok(bytes)
}

fn from_hexadecimal(text: &str) -> Option<[u8; BYTES]> {
    if text.len() != 2 * BYTES {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Some(bytes)
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The comparison takes constant time.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let code = |token| Self::mac(Some(token)).finalize();
        code(self) == code(other)
    }
}

impl Eq for Token {}
