//! Collectives in a recording: they have the shapes of their results, and nothing is sent.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::record;

use super::group::Comm;
use crate::comm::Call;

/// The kind of call of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangeKind {
    /// Sum over the ranks, on all of them.
    AllReduce,
    /// Concatenation over the ranks.
    AllGather,
    /// Sum over the ranks, each keeping a part.
    ReduceScatter,
    /// Rows from each rank to each.
    AllToAll,
    /// From one rank to another, as around the ring of context parallelism.
    SendReceive,
}

/// A call that was recorded, as a [note](record::note) among the operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeNote {
    /// The call.
    pub kind: ExchangeKind,
    /// The world ranks of the group.
    pub ranks: Vec<usize>,
    /// Bytes of the larger of input and output.
    pub bytes: u64,
}

/// A call in flight, in a recording.
pub(super) struct RecordedExchange {
    kind: ExchangeKind,
    ranks: Vec<usize>,
    /// Bytes of what is sent.
    bytes: u64,
    /// The tensor that is sent, until the result is there. A sum over all ranks takes its place.
    sent: Option<Box<DispatchTensor>>,
    device: Device,
    dtype: DType,
}

impl RecordedExchange {
    /// A call that sends `x`.
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

    /// The result, of this shape.
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
