//! Who may join a run: a token that its processes have in common, and the listener that asks for it.
//!
//! The token itself never travels on these connections. Each side sends a random number, and answers that
//! of the other with HMAC-SHA256 under the token over both numbers, what the connection is for, and the
//! hello. So neither side believes a word of the other before the other has shown that it knows the token,
//! and what was overheard cannot be used again. What follows the hello is neither encrypted nor signed.

mod handshake;
mod listener;
mod printable;
#[cfg(test)]
mod tests;
mod token;

pub(crate) use handshake::{Admission, admit};
pub use handshake::{IntroduceError, MAX_HELLO, introduce};
pub use listener::{Arrival, Limits, Listener};
pub use printable::{printable_name, printable_text};
pub use token::{MAKE_A_TOKEN, NoToken, Token, TokenError};
