//! Authentication between the processes of a run, which share a secret token.
//!
//! The token is never sent over a connection. Each side sends a nonce and a proof that it has the token. The proof is
//! an HMAC-SHA256 of both nonces, the purpose of the connection, and the first message of the client (the hello). Each
//! side therefore authenticates the other side before it uses any data. A recorded handshake cannot be replayed. Data
//! after the handshake is neither encrypted nor signed.

mod handshake;
mod listener;
mod printable;
#[cfg(test)]
mod tests;
mod token;

pub use handshake::{HandshakeError, client_handshake};
pub(crate) use handshake::{HandshakeOutcome, server_handshake};
pub(crate) use listener::spawn;
pub use listener::{Connection, Listener, ListenerLimits};
pub use printable::{printable_name, printable_text};
pub use token::{TOKEN_INSTRUCTIONS, Token, TokenError};
