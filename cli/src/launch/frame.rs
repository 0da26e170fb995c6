//! What a keeper and its launcher say to each other over their connection.
//!
//! The keeper shows that it knows the token of the run, with its rank as the hello, then sends frames: a byte
//! for the kind, four for the length (little-endian), the payload. The launcher sends single bytes: a signal for the
//! rank, or [`LEAVE`].

use std::io::{self, Read, Write};

use burn_megatron::comm::auth::printable_text;

use super::ending::Ending;

/// The variable that tells a keeper where its launcher listens: `host:port`.
pub const LINK: &str = "BURN_MEGATRON_LAUNCH_LINK";

/// The order to a keeper whose rank has ended: all have, so it may go too.
pub const LEAVE: u8 = 0;

/// What the connections of keepers are for: see [`burn_megatron::comm::auth::introduce`].
pub const PURPOSE: &str = "launch";

/// The most bytes of a payload.
pub const MAX_PAYLOAD: usize = 1 << 16;

/// What a keeper tells.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// Bytes that the rank wrote to standard output.
    Out(Vec<u8>),
    /// Bytes that the rank wrote to standard error.
    Err(Vec<u8>),
    /// The rank has ended.
    Ended(Ending),
}

const OUT: u8 = 1;
const ERR: u8 = 2;
const CODE: u8 = 3;
const SIGNAL: u8 = 4;
const UNSTARTABLE: u8 = 5;
const LOST: u8 = 6;

/// One of the two streams of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Sends what a rank wrote: at most [`MAX_PAYLOAD`] bytes.
pub fn send_output(to: &mut impl Write, stream: Stream, bytes: &[u8]) -> io::Result<()> {
    let kind = match stream {
        Stream::Out => OUT,
        Stream::Err => ERR,
    };
    send(to, kind, bytes)
}

/// Sends how the rank ended.
pub fn send_ending(to: &mut impl Write, ending: &Ending) -> io::Result<()> {
    match ending {
        Ending::Code(code) => send(to, CODE, &code.to_le_bytes()),
        Ending::Signal(signal) => send(to, SIGNAL, &signal.to_le_bytes()),
        Ending::Unstartable(reason) => send(to, UNSTARTABLE, cut(reason)),
        Ending::Lost(reason) => send(to, LOST, cut(reason)),
    }
}

fn cut(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_PAYLOAD)]
}

fn send(to: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    // As one write, so that a frame is one packet where it fits.
    let mut bytes = Vec::with_capacity(5 + payload.len());
    bytes.push(kind);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)
}

/// The next frame; an error once the connection has ended.
pub fn receive(from: &mut impl Read) -> io::Result<Frame> {
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
    let frame = match kind {
        OUT => Some(Frame::Out(payload)),
        ERR => Some(Frame::Err(payload)),
        CODE => number(&payload).map(|code| Frame::Ended(Ending::Code(code))),
        SIGNAL => number(&payload).map(|signal| Frame::Ended(Ending::Signal(signal))),
        UNSTARTABLE => Some(Frame::Ended(Ending::Unstartable(text(&payload)))),
        LOST => Some(Frame::Ended(Ending::Lost(text(&payload)))),
        _ => None,
    };
    frame.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let mut wire = Vec::new();
        send_output(&mut wire, Stream::Out, b"a\xff\n").unwrap();
        send_output(&mut wire, Stream::Err, b"").unwrap();
        let endings = [
            Ending::Code(-1),
            Ending::Signal(9),
            Ending::Unstartable("no such file".into()),
            Ending::Lost("no such process".into()),
        ];
        for ending in &endings {
            send_ending(&mut wire, ending).unwrap();
        }
        let mut from = &wire[..];
        assert_eq!(receive(&mut from).unwrap(), Frame::Out(b"a\xff\n".into()));
        assert_eq!(receive(&mut from).unwrap(), Frame::Err(Vec::new()));
        for ending in endings {
            assert_eq!(receive(&mut from).unwrap(), Frame::Ended(ending));
        }
        let error = receive(&mut from).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_reason_is_made_printable() {
        let mut wire = Vec::new();
        send_ending(&mut wire, &Ending::Lost("gone\u{1b}[2J".into())).unwrap();
        let shown = Ending::Lost("gone\\u{1b}[2J".into());
        assert_eq!(receive(&mut &wire[..]).unwrap(), Frame::Ended(shown));
    }

    #[test]
    fn nonsense_is_refused() {
        for wire in [[9, 0, 0, 0, 0], [OUT, 0, 0, 0, 1], [CODE, 0, 0, 0, 0]] {
            let error = receive(&mut &wire[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{wire:?}");
        }
    }
}
