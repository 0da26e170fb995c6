//! How two processes show each other that they know the token.
//!
//! | who | sends |
//! |---|---|
//! | the one that listens | [`GREETING`], its number (32 random bytes) |
//! | the one that comes | its number, its proof (32 bytes), the length of its hello (2 bytes, little-endian), its hello |
//! | the one that listens | one byte: 1 with its proof, or 0 if the proof of the other is wrong |

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::Mac;

use super::listener::Timed;
use super::token::{Token, random_bytes};

/// The longest hello, in bytes.
pub const MAX_HELLO: usize = 4096;

/// What the one that listens begins with; the number is that of this protocol.
const GREETING: &[u8; 16] = b"burn-megatron/1\n";

const LET_IN: u8 = 1;
const TURNED_AWAY: u8 = 0;

/// The bytes of a random number, and of a proof.
const BYTES: usize = 32;

/// What both sides have seen of one connection.
struct Seen<'a> {
    purpose: &'a str,
    numbers: [[u8; BYTES]; 2],
    hello: &'a [u8],
}

impl Seen<'_> {
    /// The proof of one side. Every part has a fixed length or its length in front.
    fn code(&self, token: Option<&Token>, side: u8) -> hmac::Hmac<sha2::Sha256> {
        let mut code = Token::mac(token);
        code.update(GREETING);
        code.update(&[side]);
        for part in [self.purpose.as_bytes(), self.hello] {
            code.update(&(part.len() as u64).to_le_bytes());
            code.update(part);
        }
        self.numbers.iter().for_each(|number| code.update(number));
        code
    }
}

const LISTENS: u8 = 0;
const COMES: u8 = 1;

/// Why a connection was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IntroduceError {
    /// One of the two does not have the token of the other.
    #[error("the tokens of the two processes differ")]
    Token,
    /// Nothing of burn-megatron answers, or not in time.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What came to a listener.
#[derive(Debug)]
pub(crate) enum Admission {
    /// Somebody who knows the token, with its hello.
    Known(String),
    /// Somebody with another token.
    OtherToken,
}

/// The listener's side. `purpose` keeps a proof for one listener from being of use at another; `keep` says
/// whether the connection is still wanted, before the other side is told that it is let in.
///
/// # Errors
/// What cannot be read or written in time, and a hello that is too long or no text.
pub(crate) fn admit(
    mut stream: impl Read + Write,
    token: Option<&Token>,
    purpose: &str,
    keep: impl FnOnce() -> bool,
) -> io::Result<Admission> {
    let own = random_bytes()?;
    stream.write_all(&[&GREETING[..], &own].concat())?;
    let (mut number, mut proof, mut length) = ([0; BYTES], [0; BYTES], [0; 2]);
    stream.read_exact(&mut number)?;
    stream.read_exact(&mut proof)?;
    stream.read_exact(&mut length)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > MAX_HELLO {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a hello of {length} bytes; at most {MAX_HELLO} would fit"),
        ));
    }
    let mut hello = vec![0; length];
    stream.read_exact(&mut hello)?;
    let seen = Seen {
        purpose,
        numbers: [own, number],
        hello: &hello,
    };
    // In a time that does not depend on what was sent.
    if seen.code(token, COMES).verify_slice(&proof).is_err() {
        stream.write_all(&[TURNED_AWAY])?;
        return Ok(Admission::OtherToken);
    }
    let own = seen.code(token, LISTENS).finalize().into_bytes();
    let hello = String::from_utf8(hello).map_err(io::Error::other)?;
    if !keep() {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    stream.write_all(&[&[LET_IN][..], &own].concat())?;
    Ok(Admission::Known(hello))
}

/// The side that comes: says `hello` to the listener for `purpose`, which has so long to answer. What stands
/// for timeouts of the stream is undone.
///
/// # Errors
/// [`IntroduceError`]. Nothing that the other side said counts then.
pub fn introduce(
    stream: &TcpStream,
    token: Option<&Token>,
    purpose: &str,
    hello: &str,
    patience: Duration,
) -> Result<(), IntroduceError> {
    let until = Instant::now() + patience;
    introduce_over(Timed { stream, until }, token, purpose, hello)?;
    stream.set_read_timeout(None)?;
    Ok(stream.set_write_timeout(None)?)
}

/// The same over any stream.
pub(crate) fn introduce_over(
    mut stream: impl Read + Write,
    token: Option<&Token>,
    purpose: &str,
    hello: &str,
) -> Result<(), IntroduceError> {
    let hello = hello.as_bytes();
    let length = u16::try_from(hello.len()).ok();
    let length = length.filter(|length| usize::from(*length) <= MAX_HELLO);
    let length = length.ok_or_else(|| io::Error::other("the hello is too long"))?;
    let (mut greeting, mut number) = ([0; GREETING.len()], [0; BYTES]);
    stream.read_exact(&mut greeting)?;
    if greeting != *GREETING {
        return Err(
            io::Error::other("what answers there is not burn-megatron of this version").into(),
        );
    }
    stream.read_exact(&mut number)?;
    let own = random_bytes()?;
    let seen = Seen {
        purpose,
        numbers: [number, own],
        hello,
    };
    let proof = seen.code(token, COMES).finalize().into_bytes();
    stream.write_all(&[&own[..], &proof, &length.to_le_bytes(), hello].concat())?;
    let (mut answer, mut proof) = ([0], [0; BYTES]);
    stream.read_exact(&mut answer)?;
    if answer != [LET_IN] {
        return Err(IntroduceError::Token);
    }
    stream.read_exact(&mut proof)?;
    let proven = seen.code(token, LISTENS).verify_slice(&proof);
    proven.map_err(|_| IntroduceError::Token)
}
