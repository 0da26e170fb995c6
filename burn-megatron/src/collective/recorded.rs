//! Collectives during a recording. A recording records operations without running them. The collectives return tensors
//! of the correct shape, and nothing is sent.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::record;

use super::group::Comm;
use crate::comm::Call;

/// The kind of a recorded communication call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangeKind {
    /// An all-reduce: the sum over the ranks, which all ranks receive.
    AllReduce,
    /// An all-gather: the concatenation of the tensors of all ranks.
    AllGather,
    /// A reduce-scatter: the sum over the ranks. Each rank keeps a part of the sum.
    ReduceScatter,
    /// An all-to-all: each rank sends rows to each rank.
    AllToAll,
    /// A message from one rank to another rank, for example to the next rank of the ring in context parallelism.
    SendReceive,
}

/// A recorded communication call, which is stored as a [note](record::note) between the recorded operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeNote {
    /// The kind of call.
    pub kind: ExchangeKind,
    /// The world ranks of the group.
    pub ranks: Vec<usize>,
    /// The number of bytes of the input or of the output, whichever is larger.
    pub bytes: u64,
}

/// A recorded call whose result has not been returned yet.
pub(super) struct RecordedExchange {
    kind: ExchangeKind,
    ranks: Vec<usize>,
    /// The number of sent bytes.
    bytes: u64,
    /// The sent tensor, kept until the result exists. The result of an all-reduce replaces it.
    sent: Option<Box<DispatchTensor>>,
    device: Device,
    dtype: DType,
}

impl RecordedExchange {
    /// Creates a call that sends `x`.
    pub fn new<const D: usize>(x: Tensor<D>, call: &Call, comm: &Comm) -> Self {
        let (device, dtype) = (x.device(), x.dtype());
        let kind = match call {
            Call::AllReduce(_) => ExchangeKind::AllReduce,
            Call::ReduceScatter(_) => ExchangeKind::ReduceScatter,
            Call::AllToAll { send, .. } => {
                let peers = send.iter().filter(|elements| **elements > 0);
                if peers.count() <= 1 && send.len() > 1 {
                    ExchangeKind::SendReceive
                } else {
                    ExchangeKind::AllToAll
                }
            }
            _ => ExchangeKind::AllGather,
        };
        let ranks = comm.group().ranks().to_vec();
        Self {
            kind,
            ranks,
            bytes: (x.shape().num_elements() * dtype.size()) as u64,
            sent: (kind != ExchangeKind::AllReduce).then(|| Box::new(x.into_dispatch())),
            device,
            dtype,
        }
    }

    /// Returns the result with this shape.
    pub fn result<const D: usize>(self, shape: [usize; D]) -> Tensor<D> {
        let received = (shape.iter().product::<usize>() * self.dtype.size()) as u64;
        record::note(ExchangeNote {
            kind: self.kind,
            ranks: self.ranks,
            bytes: self.bytes.max(received),
        });
        let result = Tensor::empty(shape, (&self.device, self.dtype));
        drop(self.sent);
        result
    }
}
