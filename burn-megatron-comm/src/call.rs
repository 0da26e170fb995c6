//! The operations of a communicator, and the comparison of these operations between ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use crate::buffer::{Buffer, DType};
use crate::communicator::Group;
use crate::error::CommError;
use burn_megatron_rendezvous::list_ranks;

/// The reduction that a collective applies to the inputs of all ranks.
///
/// Values of type `bf16` and `f16` are accumulated in `f32`. The result is rounded once at the end.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum ReduceOp {
    /// The sum. Integer sums wrap around on overflow.
    Sum,
    /// The sum divided by the number of ranks. Only for floating-point types.
    Average,
    /// The largest value. The result is NaN if the value of any rank is NaN.
    Max,
    /// The smallest value. The result is NaN if the value of any rank is NaN.
    Min,
}

impl ReduceOp {
    /// The list of all reductions. Messages between ranks encode a reduction as its index in this list.
    pub const ALL: [ReduceOp; 4] = *Self::VARIANTS.as_array().unwrap();
}

/// An operation of a [`Communicator`](crate::Communicator): a collective, a send or a receive. Root and peer ranks are
/// indices in the group. Counts and lengths are numbers of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Reduces the inputs of all ranks element by element: `[n] -> [n]`.
    AllReduce(ReduceOp),
    /// Concatenates the inputs of all ranks in group order: `[n] -> [size * n]`.
    AllGather,
    /// Reduces the inputs of all ranks element by element and returns this rank's chunk: `[size * n] -> [n]`.
    ReduceScatter(ReduceOp),
    /// Broadcasts the input of the root: `[n] -> [n]`. The inputs of the other ranks are ignored.
    Broadcast {
        /// The rank whose input is broadcast.
        root: usize,
    },
    /// Sends `send[i]` elements to rank `i` and receives `receive[i]` elements from rank `i`. The input and the result
    /// are in group order. The numbers may be zero.
    AllToAll {
        /// The number of elements that are sent to each rank.
        send: Vec<usize>,
        /// The number of elements that are received from each rank.
        receive: Vec<usize>,
    },
    /// Sends the input to one rank. Sends are buffered and never block. Messages between two ranks arrive in the order
    /// in which they were sent.
    Send {
        /// The receiving rank.
        to: usize,
    },
    /// Receives the next message from one rank. The input is empty.
    Receive {
        /// The sending rank.
        from: usize,
        /// The type that the message must have.
        dtype: DType,
        /// The length that the message must have.
        len: usize,
    },
    /// Waits until all ranks have called the barrier. The input and the result are empty.
    Barrier,
}

impl Call {
    /// Returns the name of the operation, for example `"all_reduce"`.
    pub fn name(&self) -> &'static str {
        match self {
            Call::AllReduce(_) => "all_reduce",
            Call::AllGather => "all_gather",
            Call::ReduceScatter(_) => "reduce_scatter",
            Call::Broadcast { .. } => "broadcast",
            Call::AllToAll { .. } => "all_to_all",
            Call::Send { .. } => "send",
            Call::Receive { .. } => "receive",
            Call::Barrier => "barrier",
        }
    }

    /// Describes the operation, with the length and type of `input`. The description contains the world ranks of the
    /// root and the peers.
    pub fn describe(&self, group: &Group, input: &Buffer) -> String {
        Signature::new(self.clone(), input).describe(group)
    }

    /// Checks, without communication, that the root or peer ranks are in the group, that the counts match the length of
    /// the input, and that the element type supports the reduction. An engine calls this method before it sends
    /// anything.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] if a check fails. The error contains the given values and the valid values.
    pub fn check(&self, group: &Group, input: &Buffer) -> Result<(), CommError> {
        self.check_sizes(group, input.dtype(), input.len())
    }

    /// Same as [`check`](Self::check), for an input of `len` elements of `dtype`.
    pub(crate) fn check_sizes(
        &self,
        group: &Group,
        dtype: DType,
        len: usize,
    ) -> Result<(), CommError> {
        let reason = match self {
            Call::AllReduce(op) => check_reduction(*op, dtype),
            Call::AllGather => None,
            Call::ReduceScatter(op) => {
                check_reduction(*op, dtype).or_else(|| check_chunks(group, len))
            }
            Call::Broadcast { root } => check_peer("root", *root, group),
            Call::AllToAll { send, receive } => check_counts(group, len, send, receive),
            Call::Send { to } => check_peer("receiver", *to, group),
            Call::Receive { from, .. } => {
                check_peer("sender", *from, group).or_else(|| check_empty(len))
            }
            Call::Barrier => check_empty(len),
        };
        let call = || Signature::sized(self.clone(), dtype, len).describe(group);
        reason.map_or(Ok(()), |reason| {
            Err(CommError::invalid_call(group, call(), reason))
        })
    }
}

fn check_reduction(op: ReduceOp, dtype: DType) -> Option<String> {
    (op == ReduceOp::Average && !dtype.is_float()).then(|| {
        format!("reduction average is not defined for {dtype}: use sum and divide, or a float type")
    })
}

fn check_chunks(group: &Group, len: usize) -> Option<String> {
    let size = group.size();
    (!len.is_multiple_of(size)).then(|| {
        format!(
            "invalid length {len}: expected a multiple of the group size {size}, such as {} or {}",
            len / size * size,
            len.div_ceil(size) * size
        )
    })
}

fn check_peer(role: &str, index: usize, group: &Group) -> Option<String> {
    let size = group.size();
    (index >= size).then(|| {
        format!(
            "invalid {role} index {index}: expected 0 to {} in a group of {size}",
            size - 1
        )
    })
}

fn check_empty(len: usize) -> Option<String> {
    (len != 0).then(|| {
        format!("invalid input of {len} elements: expected an empty input, because it is not read")
    })
}

fn check_counts(group: &Group, len: usize, send: &[usize], receive: &[usize]) -> Option<String> {
    let (size, own) = (group.size(), group.index());
    for (name, counts) in [("send", send), ("receive", receive)] {
        if counts.len() != size {
            return Some(format!(
                "invalid number of {name} counts {}: expected {size}, one per rank of the group",
                counts.len()
            ));
        }
    }
    // A sum that overflows cannot match.
    let total = send
        .iter()
        .try_fold(0usize, |sum, count| sum.checked_add(*count));
    if total != Some(len) {
        return Some(format!(
            "invalid send counts {send:?}: expected a sum of {len}, the length of the input"
        ));
    }
    (send[own] != receive[own]).then(|| {
        format!(
            "invalid counts for this rank itself: expected equal counts, but it sends {} elements to itself and \
             receives {}",
            send[own], receive[own]
        )
    })
}

/// Checks that `groups` is a partition of the ranks of `whole`.
///
/// # Errors
/// [`CommError::InvalidCall`] with the ranks that are missing, repeated, or not in the group.
pub(crate) fn check_parts(
    whole: &Group,
    name: &str,
    groups: &[Vec<usize>],
) -> Result<(), CommError> {
    let mut counts: BTreeMap<usize, usize> = whole.ranks().iter().map(|rank| (*rank, 0)).collect();
    let mut foreign: Vec<usize> = vec![];
    for rank in groups.iter().flatten() {
        match counts.get_mut(rank) {
            Some(count) => *count += 1,
            None => foreign.push(*rank),
        }
    }
    let with = |is_wrong: fn(usize) -> bool| {
        let ranks = whole.ranks().iter().copied();
        ranks.filter(|rank| is_wrong(counts[rank])).collect()
    };
    let missing: Vec<usize> = with(|count| count == 0);
    let repeated: Vec<usize> = with(|count| count > 1);
    if foreign.is_empty() && missing.is_empty() && repeated.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "invalid groups: expected each rank of the group in exactly one of them; missing: {missing:?}, \
         repeated: {repeated:?}, not in the group: {foreign:?}"
    );
    let call = describe_split(name, groups);
    Err(CommError::invalid_call(whole, call, reason))
}

/// A collective, a message, or a split of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Call(Call),
    Split {
        name: String,
        groups: Vec<Vec<usize>>,
    },
}

/// The fingerprint of a call, which is compared between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub operation: Operation,
    pub dtype: DType,
    pub len: usize,
}

impl Signature {
    pub fn new(call: Call, input: &Buffer) -> Self {
        Self::sized(call, input.dtype(), input.len())
    }

    /// Creates the fingerprint of a call on `len` elements of `dtype`.
    pub fn sized(call: Call, dtype: DType, len: usize) -> Self {
        let (dtype, len) = match call {
            Call::Receive { dtype, len, .. } => (dtype, len),
            // An empty input of another type is not a mismatch.
            Call::Barrier => (DType::U8, 0),
            _ => (dtype, len),
        };
        Self {
            operation: Operation::Call(call),
            dtype,
            len,
        }
    }

    pub fn split(name: &str, groups: &[Vec<usize>]) -> Self {
        let operation = Operation::Split {
            name: name.to_owned(),
            groups: groups.to_vec(),
        };
        Self {
            operation,
            dtype: DType::U8,
            len: 0,
        }
    }

    pub fn name(&self) -> &'static str {
        match &self.operation {
            Operation::Call(call) => call.name(),
            Operation::Split { .. } => "split",
        }
    }

    /// Returns whether this is a send or a receive.
    pub fn is_message(&self) -> bool {
        matches!(
            self.operation,
            Operation::Call(Call::Send { .. } | Call::Receive { .. })
        )
    }

    /// Returns whether the fingerprint must be compared with the fingerprint of every rank. If not, it is sufficient to
    /// compare it with the fingerprint of one rank.
    pub fn is_pairwise(&self) -> bool {
        matches!(self.operation, Operation::Call(Call::AllToAll { .. }))
    }

    /// Describes the call with its length and type. Peers are given as world ranks.
    pub fn describe(&self, group: &Group) -> String {
        let Self { dtype, len, .. } = self;
        // An invalid call may name a peer outside the group.
        let peer = |index: usize| match group.ranks().get(index) {
            Some(rank) => format!("rank {rank}"),
            None => format!("index {index}"),
        };
        let call = match &self.operation {
            Operation::Call(call) => call,
            Operation::Split { name, groups } => return describe_split(name, groups),
        };
        let name = call.name();
        match call {
            Call::AllReduce(op) | Call::ReduceScatter(op) => {
                format!("{name}({op}) of {len} {dtype}")
            }
            Call::AllGather => format!("{name} of {len} {dtype}"),
            Call::Broadcast { root } => format!("{name} of {len} {dtype} from {}", peer(*root)),
            Call::AllToAll { send, receive } => {
                format!("{name} of {len} {dtype} (sends {send:?}, receives {receive:?})")
            }
            Call::Send { to } => format!("{name} of {len} {dtype} to {}", peer(*to)),
            Call::Receive { from, .. } => {
                format!("{name} of {len} {dtype} from {}", peer(*from))
            }
            Call::Barrier => name.to_owned(),
        }
    }

    /// Compares the calls of two ranks of `group`, given by their indices. Returns the difference, or `None` if the
    /// calls match.
    pub fn disagreement(
        &self,
        index: usize,
        other: &Signature,
        other_index: usize,
        group: &Group,
    ) -> Option<String> {
        use Operation::{Call as Called, Split};
        let differ = |what: &str| Some(format!("the {what} differ"));
        if self.name() != other.name() {
            return differ("operations");
        }
        if self.dtype != other.dtype {
            return differ("types");
        }
        match (&self.operation, &other.operation) {
            (Split { name: a, .. }, Split { name: b, .. }) if a != b => return differ("names"),
            (Split { groups: a, .. }, Split { groups: b, .. }) if a != b => {
                return differ("groups");
            }
            (
                Called(Call::AllToAll { send, receive }),
                Called(Call::AllToAll {
                    send: other_send,
                    receive: other_receive,
                }),
            ) => {
                return unexpected_count(index, send, other_index, other_receive, group)
                    .or_else(|| unexpected_count(other_index, other_send, index, receive, group));
            }
            (Called(Call::Broadcast { root: a }), Called(Call::Broadcast { root: b }))
                if a != b =>
            {
                return differ("roots");
            }
            (a, b) if a != b => return differ("reductions"),
            _ => {}
        }
        if self.len != other.len {
            differ("lengths")
        } else {
            None
        }
    }
}

/// The maximum number of ranks of a split whose groups are all listed.
const MAX_LISTED: usize = 64;

/// Describes a split with its groups. For many ranks, lists only the first group and a hash of all groups.
fn describe_split(name: &str, groups: &[Vec<usize>]) -> String {
    let ranks: usize = groups.iter().map(Vec::len).sum();
    match groups {
        [first, ..] if ranks > MAX_LISTED => format!(
            "split {name} into {} groups of hash {:016x}, the first [{}]",
            groups.len(),
            hash_of_groups(groups),
            list_ranks(first)
        ),
        _ => format!("split {name} into {groups:?}"),
    }
}

/// Hashes groups of ranks. The hash is equal on all ranks.
pub(crate) fn hash_of_groups(groups: &[Vec<usize>]) -> u64 {
    let numbers = groups.iter().flat_map(|ranks| {
        let ranks = ranks.iter().map(|rank| *rank as u64);
        std::iter::once(u64::MAX).chain(ranks)
    });
    digest(1, numbers)
}

/// Returns adjacent ranges with these lengths.
#[cfg(any(test, feature = "mpi", feature = "cuda"))]
pub(crate) fn consecutive_ranges(counts: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut end = 0;
    let range = |count: &usize| {
        end += count;
        end - count..end
    };
    counts.iter().map(range).collect()
}

/// Hashes numbers, starting from `seed`, with the finalizer of SplitMix64 (Steele et al. 2014,
/// doi:10.1145/2660193.2660195).
pub(crate) fn digest(seed: u64, numbers: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |x: u64| {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    numbers.into_iter().fold(seed, |state, number| {
        mix(state
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(number))
    })
}

fn unexpected_count(
    from: usize,
    send: &[usize],
    to: usize,
    receive: &[usize],
    group: &Group,
) -> Option<String> {
    let (sent, expected) = (send[to], receive[from]);
    let (from, to) = (group.ranks()[from], group.ranks()[to]);
    (sent != expected).then(|| {
        format!("rank {from} sends {sent} elements to rank {to}, which expects {expected}")
    })
}
