//! Authentication of the processes of a run, with a shared token and a listener that requires it.
//!
//! The token is never sent on these connections. Each side sends a nonce and proves that it has the token. The proof is
//! an HMAC-SHA256 over both nonces, the purpose of the connection, and the hello. Each side thus authenticates the
//! other before it uses any data. A recorded handshake cannot be replayed. Data after the hello is neither encrypted
//! nor signed.

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
