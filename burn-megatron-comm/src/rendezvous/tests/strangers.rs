//! Who has no token, and what those who have one may say.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::lines::{Standing, anywhere, coordinator, introduction, join, token};
use crate::auth::{IntroduceError, Token, introduce};
use crate::rendezvous::message::{self, Down, Hello};
use crate::rendezvous::{Coordinator, Introduction, Member, PURPOSE, RendezvousError};
use crate::testing::TIMEOUT;

fn hello(rank: usize, version: &str, host: &str) -> String {
    let hello = Hello {
        version: version.into(),
        rank,
        size: 2,
        world: 3,
        host: host.into(),
        process: 1,
        gather: 60.0,
        silence: 60.0,
    };
    serde_json::to_string(&hello).unwrap()
}

/// Says a line as soon as it is connected, and gives all that is answered.
fn shout(held: &Coordinator, line: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(held.address()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(line).unwrap();
    let mut answer = Vec::new();
    // A connection that is reset has been closed too.
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn both_join(held: &Coordinator) -> [Arc<Member>; 2] {
    let address = held.address();
    let other = thread::spawn(move || join(address, 1, 2).unwrap());
    [join(address, 0, 2).unwrap(), other.join().unwrap()]
}

fn with(token: Option<Token>, rank: usize) -> Introduction {
    Introduction {
        token,
        ..introduction(rank, 2)
    }
}

#[test]
fn a_hello_without_the_token_seats_nobody_and_ends_nothing() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let version = env!("CARGO_PKG_VERSION");
    // A rank, one that does not fit, what is no hello, and a request for a web page.
    let lines = [
        format!("{{\"Hello\":{}}}\n", hello(0, version, "stranger")),
        format!("{{\"Hello\":{}}}\n", hello(0, "0.0.1", "stranger")),
        format!("{}\n", "[".repeat(300)),
        format!("GET / HTTP/1.1\r\nUser-Agent: {}\r\n\r\n", "x".repeat(100)),
    ];
    for line in lines {
        let answer = shout(&held, line.as_bytes());
        // The greeting, and at most that it was turned away.
        assert!(answer.len() <= 49, "{answer:?}");
    }
    let members = both_join(&held);
    assert_eq!(held.verdict(), None);
    assert!(members.iter().all(|member| member.failure().is_none()));
}

#[test]
fn another_token_is_named_on_both_sides() {
    let held = coordinator(2, Duration::from_secs(1), TIMEOUT);
    for other in [None, Token::random().ok()] {
        let witness = Arc::new(Standing("x"));
        let error = Member::join(&[held.address()], with(other, 1), witness).unwrap_err();
        let RendezvousError::Token { .. } = &error else {
            panic!("{error}");
        };
        let shown = error.to_string();
        assert!(
            shown.contains("give all ranks the same BURN_MEGATRON_TOKEN"),
            "{shown}"
        );
        assert!(!shown.contains(&token().reveal()[..8]), "{shown}");
    }
    let error = join(held.address(), 0, 2).unwrap_err().to_string();
    let told = "Whoever came with another token was turned away (2 times, last from 127.0.0.1).";
    assert!(error.ends_with(told), "{error}");
}

#[test]
fn sixty_connections_that_drip_do_not_keep_the_ranks_out() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let dripping: Vec<TcpStream> = (0..60)
        .map(|_| {
            let mut stream = TcpStream::connect(held.address()).unwrap();
            stream.write_all(b"{\"Hello\":{\"version\":\"").unwrap();
            stream
        })
        .collect();
    let _members = both_join(&held);
    assert_eq!(held.verdict(), None);
    drop(dripping);
}

/// A connection that has shown the token, and says what it likes.
fn known(held: &Coordinator, hello: &str) -> TcpStream {
    let stream = TcpStream::connect(held.address()).unwrap();
    introduce(&stream, Some(&token()), PURPOSE, hello, TIMEOUT).unwrap();
    stream
}

fn is_shown(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || !c.is_control())
}

#[test]
fn escape_sequences_are_shown_and_not_obeyed() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J\r";
    let version = env!("CARGO_PKG_VERSION");
    let _first = known(&held, &hello(0, version, evil));
    let mut again = known(&held, &hello(0, version, evil));
    let mut refused = String::new();
    let _ = again.read_to_string(&mut refused);
    let refused = message::read::<Down>(&mut refused.as_bytes()).unwrap();
    let Some(Down::Refused(reason)) = refused else {
        panic!("{refused:?}");
    };
    let host = "\\u{1b}]0;owned\\u{7}\\u{1b}[2J\\r";
    assert!(reason.contains(&format!("process 1 on {host}")), "{reason}");
    crate::testing::wait_until("the misfit is told", || held.verdict().is_some());
    assert!(is_shown(&held.verdict().unwrap()));
}

#[test]
fn the_error_of_a_rank_is_escaped_for_all() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let [first, _] = both_join(&held);
    let cause = message::Cause {
        kind: message::CauseKind::Own,
        message: format!("no such file\n\u{1b}[31m{}", "x".repeat(100_000)),
    };
    let stood = crate::log::Position::At("\u{9b}2J".into());
    let failure = first.fail(cause, stood).unwrap();
    assert!(failure.message.starts_with("no such file\n\\u{1b}[31mxxx"));
    assert!(is_shown(&failure.message) && is_shown(&failure.verdict));
    assert!(failure.message.len() < 20_000);
    assert!(is_shown(&held.verdict().unwrap()));
}

#[test]
fn a_rank_of_another_version_is_told_so_only_with_the_token() {
    let held = coordinator(2, TIMEOUT, TIMEOUT);
    let other = Token::random().unwrap();
    let stream = TcpStream::connect(held.address()).unwrap();
    let other_version = hello(0, "0.0.1", "node");
    let refused = introduce(&stream, Some(&other), PURPOSE, &other_version, TIMEOUT);
    assert!(matches!(refused, Err(IntroduceError::Token)));
    assert_eq!(held.verdict(), None);
    let _first = known(&held, &hello(1, env!("CARGO_PKG_VERSION"), "node"));
    let _misfit = known(&held, &other_version);
    crate::testing::wait_until("the world has ended", || held.verdict().is_some());
    let verdict = held.verdict().unwrap();
    assert!(verdict.contains("rank 0 runs version 0.0.1"), "{verdict}");
}

/// Ports that this process listens on, from the system's own table.
#[cfg(target_os = "linux")]
#[test]
fn one_machine_without_a_token_is_bound_to_loopback() {
    let patience = crate::rendezvous::Patience {
        gather: TIMEOUT,
        silence: TIMEOUT,
    };
    let held = Coordinator::listen(&[anywhere()], 1, 3, None, patience).unwrap();
    let port = held.address().port();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = |line: &&str| line.contains(&format!(":{port:04X} 00000000:0000 0A"));
    let found: Vec<_> = table.lines().filter(listening).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("0100007F:"), "{found:?}");
    let witness = Arc::new(Standing("x"));
    let alone = Introduction {
        token: None,
        ..introduction(0, 1)
    };
    assert!(Member::join(&[held.address()], alone, witness).is_ok());
}
