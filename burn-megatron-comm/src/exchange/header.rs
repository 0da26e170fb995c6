//! What a note says, and how it is written down.

use crate::buffer::DType;
use crate::call::ReduceOp;
use crate::error::CommError;
use crate::process::GroupId;

/// The most bytes of a note. With the few that MPI adds, such a note fits the 4 KiB that Open MPI sends at
/// once through shared memory.
pub const NOTE: usize = 4032;

/// The bytes of a header.
const HEADER: usize = 64;

/// The most bytes that travel inside a note.
pub const INLINE: usize = NOTE - HEADER;

/// The version of this layout, which the processes of a world must share.
const LAYOUT: u8 = 1;

/// What a note is about: the operation with what all ranks must agree on besides type and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast {
        root: u64,
    },
    /// Elements for the reader of the note, and from it.
    AllToAll {
        gives: u64,
        expects: u64,
    },
    Barrier,
    /// Digests of the name and of the parts.
    Split {
        name: u64,
        parts: u64,
    },
    /// A message to the member with that index.
    Send {
        to: u64,
    },
    /// What rank 0 tells all before there are groups.
    Share,
    /// The last note of a rank.
    Close,
}

/// How the payload of a note travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carriage {
    /// There is none; the bytes in the note are words for a person.
    Nothing,
    /// In the note.
    Inline,
    /// By itself.
    Tagged { tag: u16, bytes: u64 },
    /// There is none, as the sender has found that ranks disagree; the bytes in the note say how.
    Refused,
}

/// The fixed part of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub group: GroupId,
    pub sequence: u64,
    /// The round of messages inside the call, from 0.
    pub round: u8,
    pub kind: Kind,
    pub dtype: DType,
    /// The elements that the call of the sender is about.
    pub len: u64,
    pub carriage: Carriage,
}

/// A header and the bytes behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub header: Header,
    pub body: Vec<u8>,
}

const DTYPES: [DType; 7] = [
    DType::F64,
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::I64,
    DType::I32,
    DType::U8,
];

const REDUCTIONS: [ReduceOp; 4] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Max,
    ReduceOp::Min,
];

fn code<T: PartialEq>(table: &[T], value: &T) -> u8 {
    let place = table.iter().position(|entry| entry == value);
    place.expect("the table has every value") as u8
}

impl Kind {
    /// A code and two numbers.
    fn encode(self) -> (u8, [u64; 2]) {
        let reduction = |op: ReduceOp| u64::from(code(&REDUCTIONS, &op));
        match self {
            Kind::AllReduce(op) => (0, [reduction(op), 0]),
            Kind::AllGather => (1, [0, 0]),
            Kind::ReduceScatter(op) => (2, [reduction(op), 0]),
            Kind::Broadcast { root } => (3, [root, 0]),
            Kind::AllToAll { gives, expects } => (4, [gives, expects]),
            Kind::Barrier => (5, [0, 0]),
            Kind::Split { name, parts } => (6, [name, parts]),
            Kind::Send { to } => (7, [to, 0]),
            Kind::Share => (8, [0, 0]),
            Kind::Close => (9, [0, 0]),
        }
    }

    fn decode(code: u8, [a, b]: [u64; 2]) -> Option<Self> {
        let reduction = || REDUCTIONS.get(usize::try_from(a).ok()?).copied();
        Some(match code {
            0 => Kind::AllReduce(reduction()?),
            1 => Kind::AllGather,
            2 => Kind::ReduceScatter(reduction()?),
            3 => Kind::Broadcast { root: a },
            4 => Kind::AllToAll {
                gives: a,
                expects: b,
            },
            5 => Kind::Barrier,
            6 => Kind::Split { name: a, parts: b },
            7 => Kind::Send { to: a },
            8 => Kind::Share,
            9 => Kind::Close,
            _ => return None,
        })
    }
}

impl Carriage {
    fn encode(self) -> (u8, u16, u64) {
        match self {
            Carriage::Nothing => (0, 0, 0),
            Carriage::Inline => (1, 0, 0),
            Carriage::Tagged { tag, bytes } => (2, tag, bytes),
            Carriage::Refused => (3, 0, 0),
        }
    }

    fn decode(code: u8, tag: u16, bytes: u64) -> Option<Self> {
        Some(match code {
            0 => Carriage::Nothing,
            1 => Carriage::Inline,
            2 => Carriage::Tagged { tag, bytes },
            3 => Carriage::Refused,
            _ => return None,
        })
    }
}

impl Note {
    /// A note about the world and not about a call.
    pub fn plain(kind: Kind, body: Vec<u8>) -> Self {
        let header = Header {
            group: GroupId::WORLD,
            sequence: 0,
            round: 0,
            kind,
            dtype: DType::U8,
            len: body.len() as u64,
            carriage: Carriage::Inline,
        };
        Self { header, body }
    }

    /// As it travels: little-endian numbers, then the codes, then the body.
    pub fn encode(&self) -> Vec<u8> {
        let header = &self.header;
        let (kind, [a, b]) = header.kind.encode();
        let (carriage, tag, bytes) = header.carriage.encode();
        let mut note = Vec::with_capacity(HEADER + self.body.len());
        for number in [header.group.0, header.sequence, header.len, a, b, bytes] {
            note.extend_from_slice(&number.to_le_bytes());
        }
        let dtype = code(&DTYPES, &header.dtype);
        note.extend_from_slice(&[LAYOUT, kind, header.round, dtype, carriage]);
        note.extend_from_slice(&tag.to_le_bytes());
        note.resize(HEADER, 0);
        note.extend_from_slice(&self.body);
        note
    }

    /// Reads what `from` sent.
    ///
    /// # Errors
    /// [`CommError::Engine`] if it is no note of this layout.
    pub fn decode(mut bytes: Vec<u8>, engine: &str, from: usize) -> Result<Self, CommError> {
        match Header::decode(&bytes) {
            Some(header) => {
                bytes.drain(..HEADER);
                Ok(Self {
                    header,
                    body: bytes,
                })
            }
            None => Err(CommError::Engine {
                engine: engine.to_owned(),
                message: format!(
                    "rank {from} has sent a note of {} bytes that cannot be read; do all ranks run the \
                     same build of this program?",
                    bytes.len()
                ),
            }),
        }
    }
}

impl Header {
    fn decode(note: &[u8]) -> Option<Self> {
        let (header, _) = note.split_first_chunk::<HEADER>()?;
        let (numbers, codes) = header.split_at(48);
        let mut numbers = numbers
            .chunks_exact(8)
            .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes each")));
        let mut number = || numbers.next();
        let (group, sequence, len) = (GroupId(number()?), number()?, number()?);
        let (a, b, bytes) = (number()?, number()?, number()?);
        let [layout, kind, round, dtype, carriage, low, high, ..] = *codes else {
            return None;
        };
        if layout != LAYOUT {
            return None;
        }
        Some(Self {
            group,
            sequence,
            round,
            kind: Kind::decode(kind, [a, b])?,
            dtype: *DTYPES.get(usize::from(dtype))?,
            len,
            carriage: Carriage::decode(carriage, u16::from_le_bytes([low, high]), bytes)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(kind: Kind, dtype: DType, carriage: Carriage, body: &[u8]) -> Note {
        let header = Header {
            group: GroupId(u64::MAX - 3),
            sequence: 1 << 40,
            round: 1,
            kind,
            dtype,
            len: u64::MAX,
            carriage,
        };
        let body = body.to_vec();
        Note { header, body }
    }

    #[test]
    fn notes_are_read_as_they_were_written() {
        let mut kinds = vec![
            Kind::AllGather,
            Kind::Broadcast { root: 7 },
            Kind::AllToAll {
                gives: 1 << 33,
                expects: 5,
            },
            Kind::Barrier,
            Kind::Split {
                name: u64::MAX,
                parts: 2,
            },
            Kind::Send { to: 1023 },
            Kind::Share,
            Kind::Close,
        ];
        kinds.extend(REDUCTIONS.map(Kind::AllReduce));
        kinds.extend(REDUCTIONS.map(Kind::ReduceScatter));
        let carriages = [
            Carriage::Nothing,
            Carriage::Inline,
            Carriage::Refused,
            Carriage::Tagged {
                tag: 32_000,
                bytes: 1 << 35,
            },
        ];
        for (i, kind) in kinds.into_iter().enumerate() {
            let written = note(kind, DTYPES[i % 7], carriages[i % 4], b"body");
            let bytes = written.encode();
            assert_eq!(bytes.len(), HEADER + 4);
            assert_eq!(Note::decode(bytes, "mpi", 3), Ok(written));
        }
    }

    #[test]
    fn what_is_no_note_is_refused() {
        let good = note(Kind::AllGather, DType::F32, Carriage::Nothing, b"").encode();
        // Layout, kind, dtype and carriage.
        for (place, value) in [(48, 2), (49, 10), (51, 7), (52, 4)] {
            let mut bad = good.clone();
            bad[place] = value;
            let error = Note::decode(bad, "mpi", 3).unwrap_err().to_string();
            assert!(
                error.contains("rank 3 has sent a note of 64 bytes"),
                "{error}"
            );
        }
        assert!(Note::decode(good[..63].to_vec(), "mpi", 3).is_err());
    }
}
