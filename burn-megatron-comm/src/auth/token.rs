//! The secret of a run.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// 256 bits.
const BYTES: usize = 32;

/// More than a token file has, with blanks around the token.
const LONGEST_FILE: u64 = 1024;

/// The two lines that give every rank a token.
pub const MAKE_A_TOKEN: &str =
    "  (umask 077; openssl rand -hex 32 > run.token)   # once, then copied to each machine
  export BURN_MEGATRON_TOKEN=$(cat run.token)       # for each rank, or --token-file run.token";

/// The secret that the processes of a run have in common: 256 random bits, written as 64 hexadecimal
/// digits. `Debug` does not show it.
#[derive(Clone)]
pub struct Token(pub(super) [u8; BYTES]);

/// What cannot be used as a [`Token`]. The token itself is in no message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// A text that is none.
    #[error(
        "{from} holds {given} characters that are no token; 64 hexadecimal digits would fit, which \
         `openssl rand -hex 32` makes"
    )]
    Format {
        /// The variable or the file.
        from: String,
        /// How many characters were given.
        given: usize,
    },
    /// A file that cannot be read.
    #[error("the token file {} cannot be read: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        source: io::Error,
    },
    /// A file that is open to others.
    #[error(
        "the token file {} is open to others (mode {mode:04o}, expected 0600); close it: chmod 600 {}",
        path.display(),
        path.display()
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A variable and a file that disagree.
    #[error(
        "BURN_MEGATRON_TOKEN and the token file {} hold different tokens; leave one of them out",
        path.display()
    )]
    Disagree {
        /// The file.
        path: PathBuf,
    },
}

impl Token {
    /// The variable by which ranks are told of it.
    pub const VARIABLE: &str = "BURN_MEGATRON_TOKEN";

    /// A new one, from the operating system.
    ///
    /// # Errors
    /// That the operating system gives no random bytes.
    pub fn random() -> io::Result<Self> {
        random_bytes().map(Self)
    }

    /// The token that a text has, blanks around it aside; `from` names where it stands.
    ///
    /// # Errors
    /// [`TokenError::Format`].
    pub fn parse(text: &str, from: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        text.parse().map_err(|NoToken| TokenError::Format {
            from: from.into(),
            given: text.chars().count(),
        })
    }

    /// The token in a file that nobody else may read or write: mode 0600 or 0400.
    ///
    /// # Errors
    /// [`TokenError`], with the line that closes a file that is open to others.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::File {
            path: path.into(),
            source,
        };
        // A pipe would be waited for.
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        let file = File::open(path).map_err(failed)?;
        check_mode(path, &file)?;
        let mut text = String::new();
        let read = file.take(LONGEST_FILE).read_to_string(&mut text);
        read.map_err(failed)?;
        Self::parse(&text, &format!("the token file {}", path.display()))
    }

    /// The token in a file, which must be the one that was told by the variable, if any was.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file), and [`TokenError::Disagree`].
    pub fn from_file_beside(path: &Path, told: Option<&Self>) -> Result<Self, TokenError> {
        let token = Self::from_file(path)?;
        if told.is_some_and(|told| *told != token) {
            return Err(TokenError::Disagree { path: path.into() });
        }
        Ok(token)
    }

    /// The text that hands it on, by the environment alone: 64 hexadecimal digits.
    pub fn reveal(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// An authentication code under a token; without one, of a run on this machine alone.
    pub(super) fn mac(token: Option<&Self>) -> Hmac<Sha256> {
        let key = token.map_or(&[][..], |token| &token.0);
        let mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        // No token is another key than one of zeros.
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

/// Random bytes of the operating system.
pub(super) fn random_bytes() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| {
        io::Error::other(format!(
            "the operating system gives no random bytes: {error}"
        ))
    })?;
    Ok(bytes)
}

/// A text that is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("64 hexadecimal digits were expected")]
pub struct NoToken;

impl FromStr for Token {
    type Err = NoToken;

    fn from_str(text: &str) -> Result<Self, NoToken> {
        let digits = text.as_bytes();
        if digits.len() != 2 * BYTES {
            return Err(NoToken);
        }
        let mut bytes = [0; BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(NoToken);
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// In a time that does not depend on the tokens.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let code = |token| Self::mac(Some(token)).finalize();
        code(self) == code(other)
    }
}

impl Eq for Token {}
