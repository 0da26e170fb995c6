//! The input of a decoder.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::embedding::SortedLookups;

use super::context::SequenceShard;
use super::moe::RouterStep;
use super::{BatchFormat, PackedSequences, RealTokens, ScheduleNodes};

/// The input of a decoder.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[batch, seq]`
    pub ids: Tensor<2, Int>,
    /// The offsets of packed documents in the concatenated rows, followed by the end of the last one:
    /// `0, ..., batch * seq`. None if every row is one sequence.
    pub documents: Option<Arc<[i32]>>,
    /// The lookups of `ids`, row by row, sorted: with them the gradient of an embedding is added to the rows
    /// of these tokens alone. None, as for ids that only the device has, makes a gradient of the whole
    /// embedding, which is slow on GPUs.
    pub sorted: Option<Arc<SortedLookups>>,
    /// The receiver of the reports of experts' routers, in a training step: the argument of
    /// [`MoeMlp::forward_with`](super::moe::MoeMlp::forward_with).
    pub router_step: Option<RouterStep>,
    /// The nodes of a forward that runs beside the backward of another micro-batch: an argument of
    /// [`MoeMlp::forward_normalized`](super::moe::MoeMlp::forward_normalized). A model may ignore them, and is then one node.
    pub nodes: Option<ScheduleNodes>,
    /// Which tokens of each row this rank has, under context parallelism; `documents` is None then, as the shard
    /// knows them.
    pub shard: Option<Arc<SequenceShard>>,
    /// The real tokens. `None` if no token is padding.
    pub real: Option<Arc<RealTokens>>,
    /// The inputs of each depth of multi-token prediction: depth `k`, from 1 on, reads the ids `k` tokens later, in the
    /// same rows. Only their ids, lookups and real tokens are read. Empty without it, as for generation.
    pub further: Vec<Tokens>,
}

impl Tokens {
    /// Tokens `[batch, seq]` from the host, row by row, one sequence in each.
    ///
    /// # Panics
    ///
    /// If the number of ids is not that of the shape.
    pub fn new(ids: &[i32], shape: [usize; 2], device: &Device) -> Self {
        let sorted = SortedLookups::new(ids);
        let ids = Tensor::from_data(TensorData::new(ids.to_vec(), shape), device);
        Self {
            sorted: Some(Arc::new(sorted)),
            ..Self::from(ids)
        }
    }

    /// Their format, for the layers of a decoder.
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
            // Padding does not count in the length of a row.
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
