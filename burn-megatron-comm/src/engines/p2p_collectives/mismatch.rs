//! The comparison of the call in a control message with the call of this rank.

use serde::{Deserialize, Serialize};

use super::control::{ControlHeader, ControlMessage, MessageKind, PayloadMode};
use crate::call::{Call, Operation, ReduceOp, Signature, digest, hash_of_groups};
use crate::communicator::Group;
use crate::error::CommError;
use burn_megatron_rendezvous::GroupId;

/// The maximum number of bytes of the description of a call in a control message.
const MAX_DESCRIPTION_BYTES: usize = 1200;

/// Returns the kind and the arguments of a call, as they are sent to the member `receiver`.
fn kind_of(operation: &Operation, receiver: usize) -> (MessageKind, [u64; 2]) {
    let reduction = |op: ReduceOp| [op as u64, 0];
    match operation {
        Operation::Split { name, groups } => {
            let name = digest(1, name.bytes().map(u64::from));
            (MessageKind::Split, [name, hash_of_groups(groups)])
        }
        Operation::Call(call) => match call {
            Call::AllReduce(op) => (MessageKind::AllReduce, reduction(*op)),
            Call::AllGather => (MessageKind::AllGather, [0; 2]),
            Call::ReduceScatter(op) => (MessageKind::ReduceScatter, reduction(*op)),
            Call::Broadcast { root } => (MessageKind::Broadcast, [*root as u64, 0]),
            Call::AllToAll { send, receive } => {
                let counts = [send[receiver], receive[receiver]];
                (MessageKind::AllToAll, counts.map(|count| count as u64))
            }
            Call::Send { to } => (MessageKind::Send, [*to as u64, 0]),
            Call::Receive { .. } => unreachable!("a receive sends no message"),
            Call::Barrier => (MessageKind::Barrier, [0; 2]),
        },
    }
}

impl ControlHeader {
    /// Creates the header of this rank's call for the member `receiver`.
    pub fn new(
        signature: &Signature,
        group: GroupId,
        sequence: u64,
        round: u8,
        receiver: usize,
    ) -> Self {
        let (kind, arguments) = kind_of(&signature.operation, receiver);
        Self {
            group,
            sequence,
            round,
            kind,
            arguments,
            dtype: signature.dtype,
            len: signature.len as u64,
            payload_mode: PayloadMode::None,
        }
    }

    /// Returns the fingerprint of the sender's call, as far as the header contains it. For an all_to_all, the
    /// fingerprint contains only the counts for this receiver. Returns `None` for a split.
    fn signature(&self, group: &Group) -> Option<Signature> {
        let for_receiver = |count: u64| {
            let mut counts = vec![0; group.size()];
            counts[group.index()] = count as usize;
            counts
        };
        let [first, second] = self.arguments;
        let reduction = || ReduceOp::ALL.get(first as usize).copied();
        let call = match self.kind {
            MessageKind::AllReduce => Call::AllReduce(reduction()?),
            MessageKind::AllGather => Call::AllGather,
            MessageKind::ReduceScatter => Call::ReduceScatter(reduction()?),
            MessageKind::Broadcast => Call::Broadcast {
                root: first as usize,
            },
            MessageKind::AllToAll => Call::AllToAll {
                send: for_receiver(first),
                receive: for_receiver(second),
            },
            MessageKind::Send => Call::Send { to: first as usize },
            MessageKind::Barrier | MessageKind::Share | MessageKind::Close => Call::Barrier,
            MessageKind::Split => return None,
        };
        Some(Signature {
            operation: Operation::Call(call),
            dtype: self.dtype,
            len: self.len as usize,
        })
    }
}

impl ControlMessage {
    /// Describes the call of the sender.
    fn describe(&self, group: &Group) -> String {
        let ControlHeader {
            kind, len, dtype, ..
        } = self.header;
        match (kind, self.header.signature(group)) {
            (MessageKind::AllToAll, _) => {
                let [sends, expects] = self.header.arguments;
                let receiver = group.world_rank();
                format!(
                    "all_to_all of {len} {dtype} (sends {sends} to rank {receiver}, receives {expects} \
                     from it)"
                )
            }
            (_, Some(signature)) => signature.describe(group),
            (_, None) => String::from_utf8_lossy(&self.body).into_owned(),
        }
    }

    /// Returns the reason why the calls of the member `sender` and of this rank do not match, or `None` if they match.
    /// `own` is the call of this rank.
    fn mismatch_reason(&self, sender: usize, own: &Signature, group: &Group) -> Option<String> {
        let differ = |what: &str| Some(format!("the {what} differ"));
        match (self.header.kind, &own.operation) {
            (MessageKind::Split, Operation::Split { .. }) => {
                let ([name, parts], (_, own)) =
                    (self.header.arguments, kind_of(&own.operation, sender));
                if name != own[0] {
                    differ("names")
                } else if parts != own[1] {
                    differ("groups")
                } else {
                    None
                }
            }
            (MessageKind::Send, Operation::Call(Call::Receive { .. })) => {
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

    /// Returns an error if the call of the member `sender` does not match the call of this rank.
    pub fn mismatch(
        &self,
        sender: usize,
        own: &Signature,
        group: &Group,
        sender_was_first: bool,
    ) -> Option<CommError> {
        let reason = self.mismatch_reason(sender, own, group)?;
        let theirs = (group.ranks()[sender], self.describe(group));
        let ours = (group.world_rank(), own.describe(group));
        let (first, second) = if sender_was_first {
            (theirs, ours)
        } else {
            (ours, theirs)
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

/// Returns the description of a split for the body of a control message. The header contains only hashes of its
/// arguments.
pub fn split_description(signature: &Signature, group: &Group) -> Vec<u8> {
    match signature.operation {
        Operation::Split { .. } => shorten(signature.describe(group)).into_bytes(),
        Operation::Call(_) => Vec::new(),
    }
}

fn shorten(mut text: String) -> String {
    if text.len() > MAX_DESCRIPTION_BYTES {
        text.truncate(text.floor_char_boundary(MAX_DESCRIPTION_BYTES));
        text.push_str("...");
    }
    text
}

/// A mismatch between two ranks, in the form in which it is sent in a control message.
#[derive(Serialize, Deserialize)]
struct EncodedMismatch {
    sequence: u64,
    ranks: [usize; 2],
    calls: [String; 2],
    reason: String,
}

/// Encodes a mismatch for the other members.
pub fn encode_mismatch(error: &CommError) -> Vec<u8> {
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
        unreachable!("a call is rejected for a mismatch alone")
    };
    let encoded = EncodedMismatch {
        sequence: *sequence,
        ranks: [*first_rank, *second_rank],
        calls: [first_call, second_call].map(|call| shorten(call.clone())),
        reason: shorten(reason.clone()),
    };
    serde_json::to_vec(&encoded).expect("numbers and texts are JSON")
}

/// Decodes the result of [`encode_mismatch`]. Returns `None` if the bytes are not an encoded mismatch.
pub fn decode_mismatch(body: &[u8], group: &Group) -> Option<CommError> {
    let encoded: EncodedMismatch = serde_json::from_slice(body).ok()?;
    let [first_call, second_call] = encoded.calls;
    Some(CommError::Mismatch {
        group: group.to_string(),
        sequence: encoded.sequence,
        first_rank: encoded.ranks[0],
        first_call,
        second_rank: encoded.ranks[1],
        second_call,
        reason: encoded.reason,
    })
}
