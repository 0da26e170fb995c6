//! Tests of authentication, limits, tokens and escaping.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use super::handshake::{MAX_HELLO, client_handshake_over};
use super::*;
use burn_megatron_test_support::TIMEOUT;

fn here() -> [SocketAddr; 1] {
    [(Ipv4Addr::LOCALHOST, 0).into()]
}

/// Creates a listener for `token`. The receiver gets the hello of each client, or `None` for a client with a different
/// token.
fn listener(token: Option<&Token>, limits: ListenerLimits) -> (Listener, Receiver<Option<String>>) {
    let (sender, received) = mpsc::channel();
    let serve = move |arrival| {
        let hello = match arrival {
            Connection::Authenticated { hello, .. } => Some(hello),
            Connection::WrongToken(_) => None,
        };
        let _ = sender.send(hello);
    };
    let listener = Listener::open(&here(), token.cloned(), limits, serve);
    (listener.unwrap(), received)
}

fn connect(listener: &Listener) -> TcpStream {
    let stream = TcpStream::connect(listener.addresses()[0]).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn say(listener: &Listener, token: Option<&Token>, hello: &str) -> Result<(), HandshakeError> {
    client_handshake(&connect(listener), token, hello, TIMEOUT)
}

/// Returns whether the other side has closed the connection.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn clients_with_the_token_are_accepted_and_no_others() {
    let token = Token::random().unwrap();
    let (listener, received) = listener(Some(&token), ListenerLimits::for_ranks(2));
    say(&listener, Some(&token), "rank 1").unwrap();
    assert_eq!(
        received.recv_timeout(TIMEOUT).unwrap().as_deref(),
        Some("rank 1")
    );
    let zeros = Token::parse(&"0".repeat(64), "zeros").unwrap();
    for other in [None, Some(&zeros), Some(&Token::random().unwrap())] {
        let error = say(&listener, other, "rank 1").unwrap_err();
        assert!(matches!(error, HandshakeError::Token), "{error}");
        assert_eq!(received.recv_timeout(TIMEOUT).unwrap(), None);
    }
}

#[test]
fn no_token_differs_from_a_token_of_zeros() {
    let (listener, received) = listener(None, ListenerLimits::for_ranks(1));
    let zeros = Token::parse(&"0".repeat(64), "zeros").unwrap();
    let error = say(&listener, Some(&zeros), "x").unwrap_err();
    assert!(matches!(error, HandshakeError::Token), "{error}");
    say(&listener, None, "y").unwrap();
    let hellos = [(); 2].map(|()| received.recv_timeout(TIMEOUT).unwrap());
    assert_eq!(hellos, [None, Some("y".into())]);
}

#[test]
fn without_a_token_nothing_listens_to_other_machines() {
    let all = [(Ipv4Addr::UNSPECIFIED, 0).into()];
    let open = |token| Listener::open(&all, token, ListenerLimits::for_ranks(1), |_| {});
    let error = open(None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert!(open(Some(Token::random().unwrap())).is_ok());
}

/// A stream that records all bytes that are written to it.
struct Tape {
    stream: TcpStream,
    sent: Vec<u8>,
}

impl Read for &mut Tape {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for &mut Tape {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sent.extend(bytes);
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_replayed_handshake_is_refused_and_does_not_contain_the_token() {
    let token = Token::random().unwrap();
    let (listener, received) = listener(Some(&token), ListenerLimits::for_ranks(1));
    let mut tape = Tape {
        stream: connect(&listener),
        sent: vec![],
    };
    client_handshake_over(&mut tape, Some(&token), "rank 0").unwrap();
    assert!(received.recv_timeout(TIMEOUT).unwrap().is_some());
    for secret in [token.reveal().into_bytes(), token.0.to_vec()] {
        assert!(!tape.sent.windows(secret.len()).any(|part| part == secret));
    }
    let mut again = connect(&listener);
    again.write_all(&tape.sent).unwrap();
    assert_eq!(received.recv_timeout(TIMEOUT).unwrap(), None);
}

#[test]
fn a_listener_without_the_token_is_refused() {
    let listener = TcpListener::bind(here()[0]).unwrap();
    let address = listener.local_addr().unwrap();
    let answers = [
        [&b"burn-megatron/1\n"[..], &[7; 32], &[1], &[0; 32]].concat(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
    ];
    let errors = answers.map(|answer| {
        let token = Token::random().unwrap();
        let coming = thread::spawn(move || {
            let stream = TcpStream::connect(address).unwrap();
            client_handshake(&stream, Some(&token), "rank 0", TIMEOUT).unwrap_err()
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&answer).unwrap();
        coming.join().unwrap()
    });
    assert!(matches!(errors[0], HandshakeError::Token), "{}", errors[0]);
    let text = "the answer is not from burn-megatron of this version";
    assert_eq!(errors[1].to_string(), text);
}

#[test]
fn idle_and_slow_connections_block_no_others() {
    let token = Token::random().unwrap();
    let limits = ListenerLimits {
        pending: 8,
        hello: 10 * TIMEOUT,
    };
    let (listener, received) = listener(Some(&token), limits);
    let idle: Vec<TcpStream> = (0..60)
        .map(|count| {
            let mut stream = connect(&listener);
            stream.write_all(&vec![b'{'; count]).unwrap();
            stream
        })
        .collect();
    for rank in 0..4 {
        say(&listener, Some(&token), &rank.to_string()).unwrap();
        assert!(received.recv_timeout(TIMEOUT).unwrap().is_some());
    }
    // The ranks connected after all idle connections.
    let open = idle.iter().filter(|stream| !is_closed(stream)).count();
    assert!(open <= limits.pending, "{open} are open");
    assert!(received.try_recv().is_err());
}

#[test]
fn a_hello_has_a_deadline_as_a_whole() {
    let token = Token::random().unwrap();
    let limits = ListenerLimits {
        pending: 8,
        hello: Duration::from_millis(100),
    };
    let (listener, _heard) = listener(Some(&token), limits);
    let mut stream = connect(&listener);
    let length = (MAX_HELLO as u16).to_le_bytes();
    stream.write_all(&[&[0; 64][..], &length].concat()).unwrap();
    // Each byte arrives within the timeout of a single read.
    let mut sent = 0;
    while !is_closed(&stream) && stream.write_all(&[0]).is_ok() {
        sent += 1;
        assert!(sent < MAX_HELLO, "every byte restarts the timeout");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_hello_that_is_too_long_is_not_read() {
    let token = Token::random().unwrap();
    let (listener, received) = listener(Some(&token), ListenerLimits::for_ranks(1));
    let longest = "x".repeat(MAX_HELLO);
    say(&listener, Some(&token), &longest).unwrap();
    assert_eq!(received.recv_timeout(TIMEOUT).unwrap(), Some(longest));
    assert!(say(&listener, Some(&token), &"x".repeat(MAX_HELLO + 1)).is_err());
    let mut stream = connect(&listener);
    let length = (MAX_HELLO as u16 + 1).to_le_bytes();
    stream.write_all(&[&[0; 64][..], &length].concat()).unwrap();
    let mut rest = vec![];
    // The listener closes the connection after the greeting and sends no further byte.
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(rest.len(), 48);
}

#[test]
fn a_token_is_64_digits_and_is_in_no_message() {
    let token = Token::random().unwrap();
    let text = token.reveal();
    assert_eq!(text.len(), 64);
    assert_eq!(
        Token::parse(&format!(" {}\n", text.to_uppercase()), "x").unwrap(),
        token
    );
    assert_ne!(Token::random().unwrap(), token);
    assert_eq!(format!("{token:?}"), "Token(..)");
    for wrong in [
        "",
        "secret",
        &text[1..],
        &format!("g{}", &text[1..]),
        &"ä".repeat(32),
    ] {
        let error = Token::parse(wrong, "BURN_MEGATRON_TOKEN")
            .unwrap_err()
            .to_string();
        let expected = format!(
            "invalid token in BURN_MEGATRON_TOKEN ({} characters): expected 64 hexadecimal digits, as \
             printed by `openssl rand -hex 32`",
            wrong.chars().count()
        );
        assert_eq!(error, expected);
    }
}

#[cfg(unix)]
#[test]
fn a_token_file_is_for_one_user() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.token");
    let token = Token::random().unwrap();
    fs::write(&path, token.reveal() + "\n").unwrap();
    let with = |mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Token::from_file(&path)
    };
    for mode in [0o600, 0o400] {
        assert_eq!(with(mode).unwrap(), token);
    }
    for mode in [0o644, 0o640, 0o602, 0o660] {
        let error = with(mode).unwrap_err().to_string();
        let shown = path.display();
        let expected = format!(
            "invalid mode {mode:04o} of the token file {shown}: expected 0600; run chmod 600 {shown}"
        );
        assert_eq!(error, expected);
    }
    with(0o600).unwrap();
    fs::write(&path, "x".repeat(5000)).unwrap();
    let error = Token::from_file(&path).unwrap_err().to_string();
    assert!(error.contains("run.token (1024 characters)"), "{error}");
    for wrong in [folder.path(), &folder.path().join("none")] {
        let error = Token::from_file(wrong).unwrap_err().to_string();
        assert!(error.contains("cannot read the token file"), "{error}");
    }
}

#[test]
fn control_characters_are_escaped() {
    let name = printable_name("node\u{1b}[2J\r\n\t\u{202e}\u{7}\u{9b}é\"'\\");
    assert_eq!(name, "node\\u{1b}[2J\\r\\n\\t\\u{202e}\\u{7}\\u{9b}é\"'\\");
    assert_eq!(printable_text("a\n\tb\u{1b}"), "a\n\tb\\u{1b}");
    assert_eq!(printable_name(&"x".repeat(10_000)), "x".repeat(255) + "...");
    assert_eq!(printable_text(&"x".repeat(20_000)).len(), (16 << 10) + 3);
}
