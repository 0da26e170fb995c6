//! The input tokens of a decoder.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::embedding::SortedLookups;

use super::context::SequenceShard;
use super::moe::RouterStep;
use super::{BatchFormat, PackedSequences, RealTokens, ScheduleNodes};

/// The input of a decoder: token ids and the properties of the batch.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// The token ids: `[batch, seq]`.
    pub ids: Tensor<2, Int>,
    /// The offsets of packed documents in the concatenated rows, followed by the end of the last document:
    /// `0, ..., batch * seq`. `None` if each row is one sequence.
    pub documents: Option<Arc<[i32]>>,
    /// The sorted embedding lookups of `ids`, in row-major order. With sorted lookups, the gradient is only added to
    /// the embedding rows of these tokens. With `None`, for example if the ids are only on the device, the gradient of
    /// the full embedding is computed, which is slow on GPUs.
    pub sorted: Option<Arc<SortedLookups>>,
    /// The state to which MoE routers add their losses and loads in a training step. See
    /// [`MoeMlp::forward_with`](super::moe::MoeMlp::forward_with).
    pub router_step: Option<RouterStep>,
    /// The schedule nodes of a forward pass that overlaps with the backward pass of another micro-batch. A model passes
    /// this value to [`MoeMlp::forward_normalized`](super::moe::MoeMlp::forward_normalized). A model that ignores this
    /// field runs as a single node.
    pub nodes: Option<ScheduleNodes>,
    /// The description of the tokens of each row that this rank holds under context parallelism. `documents` is then
    /// `None`, because the shard contains the document boundaries.
    pub shard: Option<Arc<SequenceShard>>,
    /// The mask of the real tokens. `None` if no token is padding.
    pub real: Option<Arc<RealTokens>>,
    /// The inputs of multi-token prediction, one per prediction depth. For each token, the input of depth `k`
    /// (`k >= 1`) contains the id that is `k` tokens later in the same row. Only the fields `ids`, `sorted` and `real`
    /// are read. The list is empty without multi-token prediction and in generation.
    pub further: Vec<Tokens>,
}

impl Tokens {
    /// Creates tokens `[batch, seq]` from row-major ids on the host. Each row is one sequence.
    ///
    /// # Panics
    ///
    /// If the number of ids differs from `batch * seq`.
    pub fn new(ids: &[i32], shape: [usize; 2], device: &Device) -> Self {
        let sorted = SortedLookups::new(ids);
        let ids = Tensor::from_data(TensorData::new(ids.to_vec(), shape), device);
        Self {
            sorted: Some(Arc::new(sorted)),
            ..Self::from(ids)
        }
    }

    /// Returns the batch format of the tokens, for the layers of a decoder.
    ///
    /// # Panics
    ///
    /// If the documents do not fit the rows: see [`PackedSequences::new`].
    pub fn format(&self) -> BatchFormat<'static> {
        if let Some(shard) = &self.shard {
            return BatchFormat::Sharded(shard.clone());
        }
        let (shape, device) = (self.ids.dims(), self.ids.device());
        let documents = match (&self.documents, &self.real) {
            (Some(documents), _) => documents.clone(),
            (None, None) => return BatchFormat::Rows,
            // Padding does not count towards the length of a row.
            (None, Some(_)) => (0..=shape[0]).map(|row| (row * shape[1]) as i32).collect(),
        };
        match PackedSequences::with_padding(&documents, self.real.clone(), shape, &device) {
            Ok(packed) => BatchFormat::Packed(Box::new(packed)),
            Err(error) => panic!("{error}"),
        }
    }
}

impl From<Tensor<2, Int>> for Tokens {
    fn from(ids: Tensor<2, Int>) -> Self {
        Self {
            ids,
            documents: None,
            sorted: None,
            router_step: None,
            nodes: None,
            shard: None,
            real: None,
            further: vec![],
        }
    }
}
