//! The control message that is sent before every payload, and its encoding.

use crate::buffer::DType;
use crate::error::CommError;
use burn_megatron_rendezvous::GroupId;

/// The maximum size of a control message. Including the header that MPI adds, the message fits into 4 KiB, the size up
/// to which Open MPI sends eagerly through shared memory.
pub const MAX_CONTROL_BYTES: usize = 4032;

/// The size of an encoded [`ControlHeader`].
const HEADER_BYTES: usize = 64;

/// The maximum size of a payload that is sent as part of the control message.
pub const MAX_INLINE_BYTES: usize = MAX_CONTROL_BYTES - HEADER_BYTES;

/// The version of the encoding. All processes of a world must use the same version.
const PROTOCOL_VERSION: u8 = 1;

/// The operation of the sender. [`ControlHeader::arguments`] contains further values that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum MessageKind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    Barrier,
    Split,
    Send,
    /// Bytes that rank 0 broadcasts before any group exists.
    Share,
    /// The last control message of a rank.
    Close,
}

/// The method that is used to send the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadMode {
    /// There is no payload. The body describes the call for use in error messages.
    None,
    /// The payload is the body of the control message.
    Inline,
    /// The payload is sent as a separate message with this tag.
    Tagged { tag: u16, bytes: u64 },
    /// There is no payload, because the sender detected a mismatch. The body describes the mismatch.
    Rejected,
}

/// The fixed-size part of a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    pub group: GroupId,
    pub sequence: u64,
    /// The round of the collective, counted from 0.
    pub round: u8,
    pub kind: MessageKind,
    /// The arguments of the operation:
    /// - reduction: the index of the reduction in [`ReduceOp::ALL`](crate::ReduceOp::ALL)
    /// - broadcast: the root
    /// - all_to_all: the number of elements that the sender sends to the receiver of this message, and the number of
    ///   elements that it expects from the receiver
    /// - split: hashes of the name and of the parts
    /// - send: the receiver
    pub arguments: [u64; 2],
    pub dtype: DType,
    /// The length of the sender's input, in elements.
    pub len: u64,
    pub payload_mode: PayloadMode,
}

/// A control message, which consists of a header and a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlMessage {
    pub header: ControlHeader,
    pub body: Vec<u8>,
}

impl PayloadMode {
    fn encode(self) -> (u8, u16, u64) {
        match self {
            PayloadMode::None => (0, 0, 0),
            PayloadMode::Inline => (1, 0, 0),
            PayloadMode::Tagged { tag, bytes } => (2, tag, bytes),
            PayloadMode::Rejected => (3, 0, 0),
        }
    }

    fn decode(code: u8, tag: u16, bytes: u64) -> Option<Self> {
        Some(match code {
            0 => PayloadMode::None,
            1 => PayloadMode::Inline,
            2 => PayloadMode::Tagged { tag, bytes },
            3 => PayloadMode::Rejected,
            _ => return None,
        })
    }
}

impl ControlMessage {
    /// Creates a control message that belongs to the whole world and not to a call.
    pub fn for_world(kind: MessageKind, body: Vec<u8>) -> Self {
        let header = ControlHeader {
            group: GroupId::WORLD,
            sequence: 0,
            round: 0,
            kind,
            arguments: [0; 2],
            dtype: DType::U8,
            len: body.len() as u64,
            payload_mode: PayloadMode::Inline,
        };
        Self { header, body }
    }

    /// Encodes the message: first the numbers in little-endian order, then the codes, then the body.
    pub fn encode(&self) -> Vec<u8> {
        let header = &self.header;
        let (kind, [a, b]) = (header.kind as u8, header.arguments);
        let (payload_mode, tag, bytes) = header.payload_mode.encode();
        let mut encoded = Vec::with_capacity(HEADER_BYTES + self.body.len());
        for number in [header.group.0, header.sequence, header.len, a, b, bytes] {
            encoded.extend_from_slice(&number.to_le_bytes());
        }
        // The variants of `DType` are declared in the order of `DType::ALL`.
        let dtype = header.dtype as u8;
        encoded.extend_from_slice(&[PROTOCOL_VERSION, kind, header.round, dtype, payload_mode]);
        encoded.extend_from_slice(&tag.to_le_bytes());
        encoded.resize(HEADER_BYTES, 0);
        encoded.extend_from_slice(&self.body);
        encoded
    }

    /// Decodes a control message that was received from the rank `from`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the bytes are not a control message of this protocol version.
    pub fn decode(mut bytes: Vec<u8>, engine: &str, from: usize) -> Result<Self, CommError> {
        match ControlHeader::decode(&bytes) {
            Some(header) => {
                bytes.drain(..HEADER_BYTES);
                Ok(Self {
                    header,
                    body: bytes,
                })
            }
            None => Err(CommError::engine(
                engine,
                format!(
                    "rank {from} sent a control message of {} bytes that cannot be decoded; do all ranks run the \
                     same build of this program?",
                    bytes.len()
                ),
            )),
        }
    }
}

impl ControlHeader {
    fn decode(encoded: &[u8]) -> Option<Self> {
        let (header, _) = encoded.split_first_chunk::<HEADER_BYTES>()?;
        let (numbers, codes) = header.split_at(48);
        let mut numbers = numbers
            .chunks_exact(8)
            .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes each")));
        let mut number = || numbers.next();
        let (group, sequence, len) = (GroupId(number()?), number()?, number()?);
        let (a, b, bytes) = (number()?, number()?, number()?);
        let [layout, kind, round, dtype, payload_mode, low, high, ..] = *codes else {
            return None;
        };
        if layout != PROTOCOL_VERSION {
            return None;
        }
        Some(Self {
            group,
            sequence,
            round,
            kind: MessageKind::from_repr(kind)?,
            arguments: [a, b],
            dtype: *DType::ALL.get(usize::from(dtype))?,
            len,
            payload_mode: PayloadMode::decode(
                payload_mode,
                u16::from_le_bytes([low, high]),
                bytes,
            )?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(
        kind: MessageKind,
        dtype: DType,
        payload_mode: PayloadMode,
        body: &[u8],
    ) -> ControlMessage {
        let header = ControlHeader {
            group: GroupId(u64::MAX - 3),
            sequence: 1 << 40,
            round: 1,
            kind,
            arguments: [7, 1 << 33],
            dtype,
            len: u64::MAX,
            payload_mode,
        };
        let body = body.to_vec();
        ControlMessage { header, body }
    }

    #[test]
    fn notes_are_read_as_they_were_written() {
        let kinds = (0..).map_while(MessageKind::from_repr);
        let carriages = [
            PayloadMode::None,
            PayloadMode::Inline,
            PayloadMode::Rejected,
            PayloadMode::Tagged {
                tag: 32_000,
                bytes: 1 << 35,
            },
        ];
        for (i, kind) in kinds.enumerate() {
            let written = message(kind, DType::ALL[i % 7], carriages[i % 4], b"body");
            let bytes = written.encode();
            assert_eq!(bytes.len(), HEADER_BYTES + 4);
            assert_eq!(ControlMessage::decode(bytes, "mpi", 3), Ok(written));
        }
    }

    #[test]
    fn what_is_no_note_is_refused() {
        let good = message(MessageKind::AllGather, DType::F32, PayloadMode::None, b"").encode();
        // The version, the kind, the dtype and the payload mode.
        for (place, value) in [(48, 2), (49, 10), (51, 7), (52, 4)] {
            let mut bad = good.clone();
            bad[place] = value;
            let error = ControlMessage::decode(bad, "mpi", 3)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("rank 3 sent a control message of 64 bytes"),
                "{error}"
            );
        }
        assert!(ControlMessage::decode(good[..63].to_vec(), "mpi", 3).is_err());
    }
}
