//! Tests of clients without the token, and of invalid input from clients with the token.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::connections::{FixedStatus, anywhere, coordinator, join, request, token};
use crate::auth::{HandshakeError, Token, client_handshake};
use crate::rendezvous::message::{self, CoordinatorMessage, Hello};
use crate::rendezvous::{Coordinator, JoinRequest, RendezvousClient, RendezvousError};
use burn_megatron_test_support::TIMEOUT;

fn hello(rank: usize, version: &str, host: &str) -> String {
    let hello = Hello {
        version: version.into(),
        rank,
        size: 2,
        world: 3,
        host: host.into(),
        process: 1,
        join_timeout: 60.0,
        heartbeat_timeout: 60.0,
    };
    serde_json::to_string(&hello).unwrap()
}

/// Connects, sends a line immediately, and returns the complete answer.
fn send_line(server: &Coordinator, line: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(line).unwrap();
    let mut answer = Vec::new();
    // A reset connection has been closed too.
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn both_join(server: &Coordinator) -> [Arc<RendezvousClient>; 2] {
    let address = server.address();
    let other = thread::spawn(move || join(address, 1, 2).unwrap());
    [join(address, 0, 2).unwrap(), other.join().unwrap()]
}

fn with(token: Option<Token>, rank: usize) -> JoinRequest {
    JoinRequest {
        token,
        ..request(rank, 2)
    }
}

#[test]
fn a_hello_without_the_token_is_refused_and_has_no_effect() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let version = env!("CARGO_PKG_VERSION");
    // The hello of a rank, the hello of an incompatible rank, invalid JSON, and an HTTP request.
    let lines = [
        format!("{{\"Hello\":{}}}\n", hello(0, version, "unknown")),
        format!("{{\"Hello\":{}}}\n", hello(0, "0.0.1", "unknown")),
        format!("{}\n", "[".repeat(300)),
        format!("GET / HTTP/1.1\r\nUser-Agent: {}\r\n\r\n", "x".repeat(100)),
    ];
    for line in lines {
        let answer = send_line(&server, line.as_bytes());
        // The answer is the greeting and at most the byte for a wrong token.
        assert!(answer.len() <= 49, "{answer:?}");
    }
    let clients = both_join(&server);
    assert_eq!(server.failure_report(), None);
    assert!(clients.iter().all(|client| client.failure().is_none()));
}

#[test]
fn another_token_is_named_on_both_sides() {
    let server = coordinator(2, Duration::from_secs(1), TIMEOUT);
    for other in [None, Token::random().ok()] {
        let provider = Arc::new(FixedStatus("x"));
        let error =
            RendezvousClient::join(&[server.address()], with(other, 1), provider).unwrap_err();
        let RendezvousError::Token { .. } = &error else {
            panic!("{error}");
        };
        let shown = error.to_string();
        assert!(
            shown.contains("set the same BURN_MEGATRON_TOKEN"),
            "{shown}"
        );
        assert!(!shown.contains(&token().reveal()[..8]), "{shown}");
    }
    let error = join(server.address(), 0, 2).unwrap_err().to_string();
    let rejected =
        "Connections with a different token were rejected (2 times, last from 127.0.0.1).";
    assert!(error.ends_with(rejected), "{error}");
}

#[test]
fn sixty_slow_connections_do_not_block_the_ranks() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let slow: Vec<TcpStream> = (0..60)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.write_all(b"{\"Hello\":{\"version\":\"").unwrap();
            stream
        })
        .collect();
    let _members = both_join(&server);
    assert_eq!(server.failure_report(), None);
    drop(slow);
}

/// Creates an authenticated connection with the given hello.
fn authenticated(server: &Coordinator, hello: &str) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    client_handshake(&stream, Some(&token()), hello, TIMEOUT).unwrap();
    stream
}

fn is_printable(text: &str) -> bool {
    text.chars().all(|c| c == '\n' || !c.is_control())
}

#[test]
fn escape_sequences_are_escaped() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J\r";
    let version = env!("CARGO_PKG_VERSION");
    let _first = authenticated(&server, &hello(0, version, evil));
    let mut again = authenticated(&server, &hello(0, version, evil));
    let mut refused = String::new();
    let _ = again.read_to_string(&mut refused);
    let refused = message::read::<CoordinatorMessage>(&mut refused.as_bytes()).unwrap();
    let Some(CoordinatorMessage::Refused(reason)) = refused else {
        panic!("{refused:?}");
    };
    let host = "\\u{1b}]0;owned\\u{7}\\u{1b}[2J\\r";
    assert!(reason.contains(&format!("process 1 on {host}")), "{reason}");
    burn_megatron_test_support::wait_until("the incompatibility is reported", || {
        server.failure_report().is_some()
    });
    assert!(is_printable(&server.failure_report().unwrap()));
}

#[test]
fn the_error_of_a_rank_is_escaped_for_all() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let [first, _] = both_join(&server);
    let cause = message::FailureCause {
        kind: message::FailureKind::OwnError,
        message: format!("no such file\n\u{1b}[31m{}", "x".repeat(100_000)),
    };
    let position = crate::RankPosition::Waiting("\u{9b}2J".into());
    let failure = first.fail(cause, position).unwrap();
    assert!(failure.message.starts_with("no such file\n\\u{1b}[31mxxx"));
    assert!(is_printable(&failure.message) && is_printable(&failure.positions));
    assert!(failure.message.len() < 20_000);
    assert!(is_printable(&server.failure_report().unwrap()));
}

#[test]
fn another_version_is_reported_only_to_clients_with_the_token() {
    let server = coordinator(2, TIMEOUT, TIMEOUT);
    let other = Token::random().unwrap();
    let stream = TcpStream::connect(server.address()).unwrap();
    let other_version = hello(0, "0.0.1", "node");
    let refused = client_handshake(&stream, Some(&other), &other_version, TIMEOUT);
    assert!(matches!(refused, Err(HandshakeError::Token)));
    assert_eq!(server.failure_report(), None);
    let _first = authenticated(&server, &hello(1, env!("CARGO_PKG_VERSION"), "node"));
    let _misfit = authenticated(&server, &other_version);
    burn_megatron_test_support::wait_until("the world has ended", || {
        server.failure_report().is_some()
    });
    let report = server.failure_report().unwrap();
    assert!(report.contains("rank 0 runs version 0.0.1"), "{report}");
}

/// Reads the ports on which this process listens from the table of the operating system.
#[cfg(target_os = "linux")]
#[test]
fn one_machine_without_a_token_is_bound_to_loopback() {
    let timeouts = crate::rendezvous::RendezvousTimeouts {
        join: TIMEOUT,
        heartbeat: TIMEOUT,
    };
    let server = Coordinator::listen(&[anywhere()], 1, 3, None, timeouts).unwrap();
    let port = server.address().port();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = |line: &&str| line.contains(&format!(":{port:04X} 00000000:0000 0A"));
    let found: Vec<_> = table.lines().filter(listening).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("0100007F:"), "{found:?}");
    let provider = Arc::new(FixedStatus("x"));
    let alone = JoinRequest {
        token: None,
        ..request(0, 1)
    };
    assert!(RendezvousClient::join(&[server.address()], alone, provider).is_ok());
}
