//! Whether the call that a note tells of is the one that this rank makes.

use serde::{Deserialize, Serialize};

use super::header::{Carriage, Header, Kind, Note};
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::process::GroupId;

/// The longest description of a call that a note carries.
const LONGEST: usize = 1200;

impl Kind {
    /// What a call is, for the member `reader`.
    fn of(operation: &Operation, reader: usize) -> Self {
        let call = match operation {
            Operation::Call(call) => call,
            Operation::Split { name, groups } => {
                return Kind::Split {
                    name: digest(name.bytes().map(u64::from)),
                    parts: digest(groups.iter().flat_map(|ranks| {
                        let ranks = ranks.iter().map(|rank| *rank as u64);
                        std::iter::once(u64::MAX).chain(ranks)
                    })),
                };
            }
        };
        match call {
            Call::AllReduce(op) => Kind::AllReduce(*op),
            Call::AllGather => Kind::AllGather,
            Call::ReduceScatter(op) => Kind::ReduceScatter(*op),
            Call::Broadcast { root } => Kind::Broadcast { root: *root as u64 },
            Call::AllToAll { send, receive } => Kind::AllToAll {
                gives: send[reader] as u64,
                expects: receive[reader] as u64,
            },
            Call::Send { to } => Kind::Send { to: *to as u64 },
            Call::Receive { .. } => unreachable!("a receive sends no note"),
            Call::Barrier => Kind::Barrier,
        }
    }
}

/// Numbers as one, by the finaliser of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195).
fn digest(numbers: impl Iterator<Item = u64>) -> u64 {
    let mix = |x: u64| {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    numbers.fold(1, |state, number| {
        mix(state
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(number))
    })
}

impl Header {
    /// What this rank tells the member `reader` of its call.
    pub fn of(
        signature: &Signature,
        group: GroupId,
        sequence: u64,
        round: u8,
        reader: usize,
    ) -> Self {
        Self {
            group,
            sequence,
            round,
            kind: Kind::of(&signature.operation, reader),
            dtype: signature.dtype,
            len: signature.len as u64,
            carriage: Carriage::Nothing,
        }
    }

    /// The signature of the sender, as far as the header has it: the counts of an all_to_all are those
    /// for the reader alone. `None` for a split.
    fn signature(&self, group: &Group) -> Option<Signature> {
        let for_reader = |count: u64| {
            let mut counts = vec![0; group.size()];
            counts[group.index()] = count as usize;
            counts
        };
        let call = match self.kind {
            Kind::AllReduce(op) => Call::AllReduce(op),
            Kind::AllGather => Call::AllGather,
            Kind::ReduceScatter(op) => Call::ReduceScatter(op),
            Kind::Broadcast { root } => Call::Broadcast {
                root: root as usize,
            },
            Kind::AllToAll { gives, expects } => Call::AllToAll {
                send: for_reader(gives),
                receive: for_reader(expects),
            },
            Kind::Send { to } => Call::Send { to: to as usize },
            Kind::Barrier | Kind::Share | Kind::Close => Call::Barrier,
            Kind::Split { .. } => return None,
        };
        Some(Signature {
            operation: Operation::Call(call),
            dtype: self.dtype,
            len: self.len as usize,
        })
    }
}

impl Note {
    /// The call of the sender in words.
    fn describe(&self, group: &Group) -> String {
        let Header {
            kind, len, dtype, ..
        } = self.header;
        match (kind, self.header.signature(group)) {
            (Kind::AllToAll { gives, expects }, _) => {
                let reader = group.world_rank();
                format!(
                    "all_to_all of {len} {dtype} (sends {gives} to rank {reader}, receives {expects} \
                     from it)"
                )
            }
            (_, Some(signature)) => signature.describe(group),
            (_, None) => String::from_utf8_lossy(&self.body).into_owned(),
        }
    }

    /// Why the member `sender` and this rank, whose part is `own`, cannot take part in one call; `None` if
    /// they agree.
    fn disagreement(&self, sender: usize, own: &Signature, group: &Group) -> Option<String> {
        let differ = |what: &str| Some(format!("the {what} differ"));
        match (self.header.kind, &own.operation) {
            (Kind::Split { name, parts }, Operation::Split { .. }) => {
                match Kind::of(&own.operation, sender) {
                    Kind::Split { name: own, .. } if own != name => differ("names"),
                    Kind::Split { parts: own, .. } if own != parts => differ("groups"),
                    _ => None,
                }
            }
            (Kind::Send { .. }, Operation::Call(Call::Receive { .. })) => {
                if self.header.dtype != own.dtype {
                    differ("types")
                } else if self.header.len != own.len as u64 {
                    differ("lengths")
                } else {
                    None
                }
            }
            _ => match self.header.signature(group) {
                Some(theirs) => theirs.disagreement(sender, own, group.index(), group),
                None => differ("operations"),
            },
        }
    }

    /// The error if the sender, a member of the group, and this rank disagree.
    pub fn mismatch(
        &self,
        sender: usize,
        own: &Signature,
        group: &Group,
        came_first: bool,
    ) -> Option<CommError> {
        let reason = self.disagreement(sender, own, group)?;
        let theirs = (group.ranks()[sender], self.describe(group));
        let ours = (group.world_rank(), own.describe(group));
        let (first, second) = match came_first {
            true => (theirs, ours),
            false => (ours, theirs),
        };
        Some(CommError::Mismatch {
            group: group.to_string(),
            sequence: self.header.sequence,
            first_rank: first.0,
            first_call: first.1,
            second_rank: second.0,
            second_call: second.1,
            reason,
        })
    }
}

/// What a note has to say in words about a call: only of a split, whose arguments the header has not.
pub fn words(signature: &Signature, group: &Group) -> Vec<u8> {
    match signature.operation {
        Operation::Split { .. } => shorten(signature.describe(group)).into_bytes(),
        Operation::Call(_) => Vec::new(),
    }
}

fn shorten(mut text: String) -> String {
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push_str("...");
    }
    text
}

/// A mismatch between two other ranks, or one of them and the reader, as a note carries it.
#[derive(Serialize, Deserialize)]
struct Refusal {
    sequence: u64,
    ranks: [usize; 2],
    calls: [String; 2],
    reason: String,
}

/// Writes a mismatch down for the other members.
pub fn write_refusal(error: &CommError) -> Vec<u8> {
    let CommError::Mismatch {
        sequence,
        first_rank,
        first_call,
        second_rank,
        second_call,
        reason,
        ..
    } = error
    else {
        unreachable!("a call is refused for a mismatch alone")
    };
    let refusal = Refusal {
        sequence: *sequence,
        ranks: [*first_rank, *second_rank],
        calls: [first_call, second_call].map(|call| shorten(call.clone())),
        reason: shorten(reason.clone()),
    };
    serde_json::to_vec(&refusal).expect("numbers and texts are JSON")
}

/// Reads what [`write_refusal`] wrote; `None` if it is none.
pub fn read_refusal(body: &[u8], group: &Group) -> Option<CommError> {
    let refusal: Refusal = serde_json::from_slice(body).ok()?;
    let [first_call, second_call] = refusal.calls;
    Some(CommError::Mismatch {
        group: group.to_string(),
        sequence: refusal.sequence,
        first_rank: refusal.ranks[0],
        first_call,
        second_rank: refusal.ranks[1],
        second_call,
        reason: refusal.reason,
    })
}
