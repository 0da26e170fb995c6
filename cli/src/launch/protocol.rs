//! The protocol between an agent and its launcher.
//!
//! The agent proves that it knows the token of the run, with its rank as the hello, then sends messages: one byte for the
//! kind, four for the length (little-endian), the payload. The launcher sends single bytes: a signal for the rank, or
//! [`RELEASE`].

use std::io::{self, Read, Write};

use burn_megatron::comm::auth::printable_text;

use super::exit_status::RankExitStatus;

/// The environment variable with the address at which the launcher listens for agents: `host:port`.
pub const AGENT_SERVER_ADDRESS: &str = "BURN_MEGATRON_LAUNCH_LINK";

/// The command that lets an agent exit. Sent once all ranks have exited.
pub const RELEASE: u8 = 0;

/// The purpose of the connections, as [`burn_megatron::comm::auth::client_handshake`] needs it.
pub const PURPOSE: &str = "launch";

/// The most bytes of a payload.
pub const MAX_PAYLOAD: usize = 1 << 16;

/// A message from an agent.
#[derive(Debug, PartialEq, Eq)]
pub enum AgentMessage {
    /// Bytes that the rank wrote to standard output.
    Stdout(Vec<u8>),
    /// Bytes that the rank wrote to standard error.
    Stderr(Vec<u8>),
    /// The rank has exited.
    Exited(RankExitStatus),
}

const OUT: u8 = 1;
const ERR: u8 = 2;
const CODE: u8 = 3;
const SIGNAL: u8 = 4;
const NOT_STARTED: u8 = 5;
const LOST: u8 = 6;

/// One of the two output streams of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Sends output of a rank: at most [`MAX_PAYLOAD`] bytes.
pub fn send_output(to: &mut impl Write, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
    let kind = match stream {
        OutputStream::Stdout => OUT,
        OutputStream::Stderr => ERR,
    };
    send(to, kind, bytes)
}

/// Sends the exit status of the rank.
pub fn send_exit_status(to: &mut impl Write, status: &RankExitStatus) -> io::Result<()> {
    match status {
        RankExitStatus::Code(code) => send(to, CODE, &code.to_le_bytes()),
        RankExitStatus::Signal(signal) => send(to, SIGNAL, &signal.to_le_bytes()),
        RankExitStatus::NotStarted(reason) => send(to, NOT_STARTED, cut(reason)),
        RankExitStatus::Lost(reason) => send(to, LOST, cut(reason)),
    }
}

fn cut(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_PAYLOAD)]
}

fn send(to: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    // In one write, so that a message is one packet where it fits.
    let mut bytes = Vec::with_capacity(5 + payload.len());
    bytes.push(kind);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)
}

/// Receives the next message.
///
/// # Errors
/// The connection is closed, or the message is malformed.
pub fn receive(from: &mut impl Read) -> io::Result<AgentMessage> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [kind, len @ ..] = head;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_PAYLOAD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    let number = |payload: &[u8]| payload.try_into().map(i32::from_le_bytes).ok();
    let text = |payload: &[u8]| printable_text(&String::from_utf8_lossy(payload));
    let message = match kind {
        OUT => Some(AgentMessage::Stdout(payload)),
        ERR => Some(AgentMessage::Stderr(payload)),
        CODE => number(&payload).map(|code| AgentMessage::Exited(RankExitStatus::Code(code))),
        SIGNAL => {
            number(&payload).map(|signal| AgentMessage::Exited(RankExitStatus::Signal(signal)))
        }
        NOT_STARTED => Some(AgentMessage::Exited(RankExitStatus::NotStarted(text(
            &payload,
        )))),
        LOST => Some(AgentMessage::Exited(RankExitStatus::Lost(text(&payload)))),
        _ => None,
    };
    message.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let mut wire = Vec::new();
        send_output(&mut wire, OutputStream::Stdout, b"a\xff\n").unwrap();
        send_output(&mut wire, OutputStream::Stderr, b"").unwrap();
        let statuses = [
            RankExitStatus::Code(-1),
            RankExitStatus::Signal(9),
            RankExitStatus::NotStarted("no such file".into()),
            RankExitStatus::Lost("no such process".into()),
        ];
        for status in &statuses {
            send_exit_status(&mut wire, status).unwrap();
        }
        let mut from = &wire[..];
        assert_eq!(
            receive(&mut from).unwrap(),
            AgentMessage::Stdout(b"a\xff\n".into())
        );
        assert_eq!(
            receive(&mut from).unwrap(),
            AgentMessage::Stderr(Vec::new())
        );
        for status in statuses {
            assert_eq!(receive(&mut from).unwrap(), AgentMessage::Exited(status));
        }
        let error = receive(&mut from).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_reason_is_made_printable() {
        let mut wire = Vec::new();
        send_exit_status(&mut wire, &RankExitStatus::Lost("gone\u{1b}[2J".into())).unwrap();
        let shown = RankExitStatus::Lost("gone\\u{1b}[2J".into());
        assert_eq!(
            receive(&mut &wire[..]).unwrap(),
            AgentMessage::Exited(shown)
        );
    }

    #[test]
    fn malformed_messages_are_refused() {
        for wire in [[9, 0, 0, 0, 0], [OUT, 0, 0, 0, 1], [CODE, 0, 0, 0, 0]] {
            let error = receive(&mut &wire[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{wire:?}");
        }
    }
}
