//! A session of a rank with arbitrary bytes as input, for the fuzz target `rendezvous`.

use std::io;
use std::time::Duration;

use super::message::{self, CoordinatorMessage, Hello, RankMessage};
use super::registry::{Outgoing, Registry, RendezvousTimeouts};
use crate::auth::{HandshakeOutcome, Token, server_handshake};

/// Handles arbitrary input as if a client of a rendezvous had sent it, in a world of two ranks. The input is first used
/// as the bytes that a client sends before it is authenticated. The authentication must reject them. Then the input is
/// used as the first message (hello) and the further lines of an authenticated rank. Returns whether the whole input is
/// valid.
///
/// # Panics
/// If the bytes pass authentication, or if a message to a rank contains control characters.
#[doc(hidden)]
pub fn read_session(input: &[u8]) -> bool {
    let token = Token::parse(&"5".repeat(64), "a constant").expect("64 digits");
    let outcome = server_handshake(input, io::sink(), Some(&token), || true);
    assert!(
        !matches!(outcome, Ok(HandshakeOutcome::Authenticated(_))),
        "an unauthenticated client was accepted"
    );

    let (hello, mut lines) = match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (input, &[][..]),
    };
    let hello = std::str::from_utf8(hello).ok();
    let Some(Ok(hello)) = hello.map(Hello::read) else {
        return false;
    };
    let minute = Duration::from_secs(60);
    let timeouts = RendezvousTimeouts {
        join: minute,
        heartbeat: minute,
    };
    let (rank, mut registry) = (hello.rank, Registry::new(2, hello.world, timeouts));
    if registry.join(hello, Duration::ZERO).is_err() {
        return false;
    }
    let is_valid = loop {
        match message::read::<RankMessage>(&mut lines) {
            Ok(Some(message)) => check(&registry.handle(rank, message, Duration::ZERO)),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    check(&registry.disconnected(rank, minute));
    check(&registry.tick(2 * minute));
    is_valid
}

/// Checks that failure reports contain no control characters.
fn check(outgoing: &Outgoing) {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    for (_, sent) in outgoing {
        let CoordinatorMessage::Failure(report) = sent else {
            continue;
        };
        for text in [&report.message, &report.positions] {
            assert!(
                !text.contains(is_control),
                "{text:?} has control characters"
            );
        }
    }
}
