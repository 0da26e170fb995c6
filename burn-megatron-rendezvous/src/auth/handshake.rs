//! The handshake in which two processes prove to each other that they have the same token.
//!
//! | side | sends |
//! |---|---|
//! | server | [`GREETING`], its nonce (32 random bytes) |
//! | client | its nonce, its proof (32 bytes), the length of its hello (2 bytes, little-endian), its hello |
//! | server | one byte: 1 followed by its proof, or 0 if the proof of the client is wrong |

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::Mac;

use super::listener::Timed;
use super::token::{Token, random_bytes};

/// The purpose of the connections, which is part of the proof. A proof for a different purpose is not valid.
const PURPOSE: &[u8] = b"rendezvous";

/// The maximum length of the first message (hello) of a client, in bytes.
pub const MAX_HELLO: usize = 4096;

/// The first bytes that the server sends. They contain the version of the protocol.
const GREETING: &[u8; 16] = b"burn-megatron/1\n";

const ACCEPTED: u8 = 1;
const REJECTED: u8 = 0;

/// The number of bytes of a nonce and of a proof.
const BYTES: usize = 32;

/// The data of a handshake. Each side proves that it has the same data as the other side.
struct Transcript<'a> {
    nonces: [[u8; BYTES]; 2],
    hello: &'a [u8],
}

impl Transcript<'_> {
    /// Returns the authentication code of one side. Every field has a fixed length or is preceded by its length.
    fn code(&self, token: Option<&Token>, side: u8) -> hmac::Hmac<sha2::Sha256> {
        let mut code = Token::mac(token);
        code.update(GREETING);
        code.update(&[side]);
        for part in [PURPOSE, self.hello] {
            code.update(&(part.len() as u64).to_le_bytes());
            code.update(part);
        }
        self.nonces.iter().for_each(|nonce| code.update(nonce));
        code
    }
}

const SERVER: u8 = 0;
const CLIENT: u8 = 1;

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The two processes have different tokens.
    #[error("the tokens of the two processes differ")]
    Token,
    /// A connection error, a timeout, or a response from a program that is not a rendezvous server.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The outcome of a handshake on the server.
#[derive(Debug)]
pub(crate) enum HandshakeOutcome {
    /// The client has proved that it has the token. Contains the hello of the client.
    Authenticated(String),
    /// The client has a different token.
    WrongToken,
}

/// Runs the server side of the handshake. Calls `keep` before the client is accepted. If `keep` returns false, the
/// connection is dropped.
///
/// # Errors
/// A connection error, a timeout, or a hello that is too long or not valid UTF-8.
pub(crate) fn server_handshake(
    mut from: impl Read,
    mut to: impl Write,
    token: Option<&Token>,
    keep: impl FnOnce() -> bool,
) -> io::Result<HandshakeOutcome> {
    let own = random_bytes()?;
    to.write_all(&[&GREETING[..], &own].concat())?;
    let (mut nonce, mut proof, mut length) = ([0; BYTES], [0; BYTES], [0; 2]);
    from.read_exact(&mut nonce)?;
    from.read_exact(&mut proof)?;
    from.read_exact(&mut length)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > MAX_HELLO {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("invalid handshake message of {length} bytes: expected at most {MAX_HELLO}"),
        ));
    }
    let mut hello = vec![0; length];
    from.read_exact(&mut hello)?;
    let transcript = Transcript {
        nonces: [own, nonce],
        hello: &hello,
    };
    // The comparison takes constant time.
    if transcript.code(token, CLIENT).verify_slice(&proof).is_err() {
        to.write_all(&[REJECTED])?;
        return Ok(HandshakeOutcome::WrongToken);
    }
    let own = transcript.code(token, SERVER).finalize().into_bytes();
    let hello = String::from_utf8(hello).map_err(io::Error::other)?;
    if !keep() {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    to.write_all(&[&[ACCEPTED][..], &own].concat())?;
    Ok(HandshakeOutcome::Authenticated(hello))
}

/// Runs the client side of the handshake within `timeout`: authenticates to the server and sends `hello`, the first
/// message of the client. Resets the timeouts of the stream.
///
/// # Errors
/// [`HandshakeError`] if the tokens differ, on a connection error, or after the timeout.
pub fn client_handshake(
    stream: &TcpStream,
    token: Option<&Token>,
    hello: &str,
    timeout: Duration,
) -> Result<(), HandshakeError> {
    let until = Instant::now() + timeout;
    client_handshake_over(Timed { stream, until }, token, hello)?;
    stream.set_read_timeout(None)?;
    Ok(stream.set_write_timeout(None)?)
}

/// Runs the client side of the handshake over any stream, without a timeout.
pub(crate) fn client_handshake_over(
    mut stream: impl Read + Write,
    token: Option<&Token>,
    hello: &str,
) -> Result<(), HandshakeError> {
    let hello = hello.as_bytes();
    let length = u16::try_from(hello.len()).ok();
    let length = length.filter(|length| usize::from(*length) <= MAX_HELLO);
    let length =
        length.ok_or_else(|| io::Error::other("invalid handshake message: it is too long"))?;
    let (mut greeting, mut nonce) = ([0; GREETING.len()], [0; BYTES]);
    stream.read_exact(&mut greeting)?;
    if greeting != *GREETING {
        return Err(
            io::Error::other("the answer is not from burn-megatron of this version").into(),
        );
    }
    stream.read_exact(&mut nonce)?;
    let own = random_bytes()?;
    let transcript = Transcript {
        nonces: [nonce, own],
        hello,
    };
    let proof = transcript.code(token, CLIENT).finalize().into_bytes();
    stream.write_all(&[&own[..], &proof, &length.to_le_bytes(), hello].concat())?;
    let (mut answer, mut proof) = ([0], [0; BYTES]);
    stream.read_exact(&mut answer)?;
    if answer != [ACCEPTED] {
        return Err(HandshakeError::Token);
    }
    stream.read_exact(&mut proof)?;
    let proven = transcript.code(token, SERVER).verify_slice(&proof);
    proven.map_err(|_| HandshakeError::Token)
}
