//! The execution plan of a call: its NCCL operations, with the offsets of their data.

use crate::buffer::DType;
use crate::call::{Call, Operation, ReduceOp, Signature, consecutive_ranges};
use crate::communicator::Group;

/// One NCCL operation. Counts and offsets are numbers of elements. Ranks are indices in the group, or in the two-rank
/// communicator of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(prefix = "nccl")]
pub(super) enum NcclOp {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast {
        root: usize,
    },
    /// Sends `count` elements of the input to a rank.
    Send {
        to: usize,
        at: usize,
        count: usize,
    },
    /// Receives `count` elements of the result from a rank.
    #[strum(serialize = "Recv")]
    Receive {
        from: usize,
        at: usize,
        count: usize,
    },
}

/// The communicator that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommScope {
    /// The communicator of the group.
    Group,
    /// The communicator of the messages from one member to another member, given by their indices in the group. Each
    /// direction has a separate communicator, because an NCCL send blocks its stream until the receiver has called the
    /// receive.
    Message { from: usize, to: usize },
}

/// The ranks of the sender and the receiver in the communicator of a message direction.
pub(super) const SENDER: usize = 0;
pub(super) const RECEIVER: usize = 1;

/// The execution plan of a call on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NcclPlan {
    pub scope: CommScope,
    pub dtype: DType,
    /// The numbers of elements of the input and of the output on the device.
    pub input: usize,
    pub output: usize,
    /// The number of elements of the result. It is less than `output` for a barrier, which reduces a dummy element.
    pub result: usize,
    /// The operations of the call, which are launched as one NCCL group. Empty if no data is moved.
    pub steps: Vec<NcclOp>,
}

impl NcclPlan {
    /// Creates the plan of a checked call of `group`. Returns `None` for a split.
    pub fn of(signature: &Signature, group: &Group) -> Option<Self> {
        let Operation::Call(call) = &signature.operation else {
            return None;
        };
        let (len, size, own) = (signature.len, group.size(), group.index());
        let plan = |input, output, steps| Self {
            scope: CommScope::Group,
            dtype: signature.dtype,
            input,
            output,
            result: output,
            steps: if input + output == 0 { vec![] } else { steps },
        };
        Some(match call {
            Call::AllReduce(op) => plan(len, len, vec![NcclOp::AllReduce(*op)]),
            Call::AllGather => plan(len, len * size, vec![NcclOp::AllGather]),
            Call::ReduceScatter(op) => plan(len, len / size, vec![NcclOp::ReduceScatter(*op)]),
            Call::Broadcast { root } => plan(len, len, vec![NcclOp::Broadcast { root: *root }]),
            Call::AllToAll { send, receive } => {
                plan(len, receive.iter().sum(), sends_and_receives(send, receive))
            }
            Call::Send { to } => Self {
                scope: CommScope::Message { from: own, to: *to },
                ..plan(len, 0, sends(&[(RECEIVER, 0, len)]))
            },
            Call::Receive { from, .. } => Self {
                scope: CommScope::Message {
                    from: *from,
                    to: own,
                },
                ..plan(0, len, receives(&[(SENDER, 0, len)]))
            },
            Call::Barrier => Self {
                result: 0,
                ..plan(1, 1, vec![NcclOp::AllReduce(ReduceOp::Max)])
            },
        })
    }

    /// Creates the plan of a one-byte message. `rank` is the rank of this process in the message communicator.
    pub fn byte(rank: usize) -> Self {
        let (input, output, steps) = match rank {
            SENDER => (1, 0, sends(&[(RECEIVER, 0, 1)])),
            _ => (0, 1, receives(&[(SENDER, 0, 1)])),
        };
        Self {
            scope: CommScope::Message {
                from: SENDER,
                to: RECEIVER,
            },
            dtype: DType::U8,
            input,
            output,
            result: output,
            steps,
        }
    }

    /// Returns the sizes of the input and the output in bytes.
    pub fn bytes(&self) -> [usize; 2] {
        [self.input, self.output].map(|len| len * self.dtype.size_of())
    }
}

/// Returns the operations of an all-to-all: all sends, then all receives. Ranks without elements are skipped.
fn sends_and_receives(send: &[usize], receive: &[usize]) -> Vec<NcclOp> {
    [sends(&offsets(send)), receives(&offsets(receive))].concat()
}

/// Returns each rank that has elements, with the offset and the number of its elements.
fn offsets(counts: &[usize]) -> Vec<(usize, usize, usize)> {
    let ranges = consecutive_ranges(counts).into_iter().enumerate();
    ranges
        .map(|(peer, range)| (peer, range.start, range.len()))
        .collect()
}

fn sends(offsets: &[(usize, usize, usize)]) -> Vec<NcclOp> {
    let some = offsets.iter().filter(|(.., count)| *count > 0);
    some.map(|&(to, at, count)| NcclOp::Send { to, at, count })
        .collect()
}

fn receives(offsets: &[(usize, usize, usize)]) -> Vec<NcclOp> {
    let some = offsets.iter().filter(|(.., count)| *count > 0);
    some.map(|&(from, at, count)| NcclOp::Receive { from, at, count })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(call: Call, len: usize) -> NcclPlan {
        let group = Group::new("data", vec![4, 5, 6], 1);
        call.check_sizes(&group, DType::F32, len).unwrap();
        NcclPlan::of(&Signature::sized(call, DType::F32, len), &group).unwrap()
    }

    #[test]
    fn lengths_are_those_of_the_calls() {
        let sizes = |call, len| {
            let plan = plan(call, len);
            (plan.input, plan.output, plan.steps.len())
        };
        assert_eq!(sizes(Call::AllReduce(ReduceOp::Max), 7), (7, 7, 1));
        assert_eq!(sizes(Call::AllGather, 7), (7, 21, 1));
        assert_eq!(sizes(Call::ReduceScatter(ReduceOp::Sum), 21), (21, 7, 1));
        assert_eq!(sizes(Call::Broadcast { root: 2 }, 7), (7, 7, 1));
        assert_eq!(plan(Call::AllGather, 7).bytes(), [28, 84]);
        let barrier = plan(Call::Barrier, 0);
        assert_eq!(
            (barrier.input, barrier.output, barrier.result, barrier.dtype),
            (1, 1, 0, DType::U8)
        );
        assert_eq!(barrier.steps, [NcclOp::AllReduce(ReduceOp::Max)]);
    }

    #[test]
    fn nothing_is_not_moved() {
        for call in [
            Call::AllReduce(ReduceOp::Sum),
            Call::AllGather,
            Call::Broadcast { root: 0 },
        ] {
            assert_eq!(plan(call, 0).steps, []);
        }
        assert_eq!(plan(Call::Send { to: 0 }, 0).steps, []);
    }

    #[test]
    fn uneven_parts_follow_each_other() {
        let call = Call::AllToAll {
            send: vec![2, 1, 0],
            receive: vec![0, 1, 5],
        };
        let plan = plan(call, 3);
        assert_eq!(
            (plan.input, plan.output, plan.scope),
            (3, 6, CommScope::Group)
        );
        let send = |to, at, count| NcclOp::Send { to, at, count };
        let receive = |from, at, count| NcclOp::Receive { from, at, count };
        assert_eq!(
            plan.steps,
            [
                send(0, 0, 2),
                send(1, 2, 1),
                receive(1, 0, 1),
                receive(2, 1, 5)
            ]
        );
    }

    #[test]
    fn a_rank_may_only_give_or_only_get() {
        let all = |send: [usize; 3], receive: [usize; 3], len| {
            let (send, receive) = (send.to_vec(), receive.to_vec());
            plan(Call::AllToAll { send, receive }, len).steps
        };
        assert_eq!(all([0, 0, 0], [0, 0, 0], 0), []);
        assert_eq!(
            all([0, 0, 4], [0, 0, 0], 4),
            [NcclOp::Send {
                to: 2,
                at: 0,
                count: 4
            }]
        );
        assert_eq!(
            all([0, 0, 0], [3, 0, 0], 0),
            [NcclOp::Receive {
                from: 0,
                at: 0,
                count: 3
            }]
        );
    }

    #[test]
    fn each_direction_of_messages_has_its_own_way() {
        let send = plan(Call::Send { to: 2 }, 4);
        assert_eq!(send.scope, CommScope::Message { from: 1, to: 2 });
        assert_eq!((send.input, send.result), (4, 0));
        let (dtype, len) = (DType::BF16, 4);
        let receive = plan(
            Call::Receive {
                from: 2,
                dtype,
                len,
            },
            0,
        );
        assert_eq!(receive.scope, CommScope::Message { from: 2, to: 1 });
        assert_eq!((receive.dtype, receive.result), (DType::BF16, 4));
    }
}
