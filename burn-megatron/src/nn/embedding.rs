//! Token embeddings that are split over the vocabulary, learned position embeddings, and the output layer.

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor};
use burn_megatron_kernels::embedding::SortedLookups;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::arithmetic::LinearKernels;
use super::hook::{forward_only_value, tracked, with_anchor};
use super::input_layout::{InputLayout, SEQUENCE_DIM};
use super::linear::{LinearOperands, linear};
use super::lookup::{LookupIds, lookup};
use super::{
    AxisRank, BatchFormat, BuildError, Init, ModelBuilder, ParameterSpec, Placement, Tokens,
};
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// The size of a vocabulary, with and without padding.
///
/// ```
/// use burn_megatron::nn::{AxisRank, Vocabulary};
///
/// let vocabulary = Vocabulary::padded(50_257, 128, 2);
/// assert_eq!(vocabulary.padded, 50_432);
/// let last = AxisRank { index: 1, size: 2 };
/// assert_eq!(vocabulary.part(last), (25_216, 25_216));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// The number of tokens, without padding.
    pub tokens: usize,
    /// The number of entries, including padding. Padding entries have probability 0.
    pub padded: usize,
}

impl Vocabulary {
    /// Creates a vocabulary of `tokens` tokens, padded to a multiple of `divisible_by * ranks` entries.
    pub fn padded(tokens: usize, divisible_by: usize, ranks: usize) -> Self {
        Self {
            tokens,
            padded: tokens.next_multiple_of((divisible_by * ranks).max(1)),
        }
    }

    /// Returns the vocabulary entries that the rank at `place` on the tensor axis holds, as the index of the first
    /// entry and the number of entries.
    pub fn part(&self, place: AxisRank) -> (usize, usize) {
        let len = self.padded / place.size;
        (place.index * len, len)
    }

    /// Returns the specification of the weight of the embedding or the output layer.
    fn weight(
        &self,
        hidden: usize,
        init: Init,
        ranks: usize,
    ) -> Result<ParameterSpec<2>, BuildError> {
        split_evenly("padded vocabulary", self.padded, Axis::Tensor, ranks)?;
        let placement = Placement::split(0, self.padded, ranks);
        Ok(ParameterSpec::new([self.tokens, hidden], init)
            .not_hidden()
            .with_placement(Axis::Tensor, placement))
    }
}

/// A token embedding. The rows of its weight `[vocabulary, hidden]` are split over the tensor axis.
///
/// Each rank looks up the tokens whose rows it holds, and returns zeros for the other tokens. The results are summed
/// over the tensor axis.
///
/// ```
/// use burn::tensor::Device;
/// use burn_megatron::nn::{Tokens, VocabParallelEmbeddingConfig, Vocabulary};
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let builder = ModelBuilder::new(&groups, &Device::flex());
///     let vocabulary = Vocabulary::padded(10, 4, 2);
///     let embedding = VocabParallelEmbeddingConfig::new(vocabulary, 6).init(&builder)?;
///     let tokens = Tokens::new(&[3, 1, 9, 0], [2, 2], &Device::flex());
///     Ok::<_, AnyError>((embedding.weight.val().dims(), embedding.forward(tokens).dims()))
/// })?;
/// assert_eq!(shapes, [([8, 6], [2, 2, 6]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// This rank's rows of the weight: `[padded vocabulary / tensor, hidden]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    first: usize,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    scale: Option<f64>,
}

/// Configuration of a [`VocabParallelEmbedding`].
#[derive(Config, Debug)]
pub struct VocabParallelEmbeddingConfig {
    /// The vocabulary.
    pub vocabulary: Vocabulary,
    /// The hidden size: the number of features per token.
    pub hidden: usize,
    /// The initializer of the weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The scaling factor of the embeddings. It is rounded to the dtype of the embeddings. `None` does not scale the
    /// embeddings.
    pub scale: Option<f64>,
}

impl VocabParallelEmbeddingConfig {
    /// Builds this rank's rows of the embedding.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] if the padded vocabulary cannot be split over the tensor axis.
    pub fn init(&self, builder: &ModelBuilder) -> Result<VocabParallelEmbedding, BuildError> {
        let (vocabulary, place) = (self.vocabulary, builder.place());
        let spec = vocabulary.weight(self.hidden, self.init, place.size)?;
        Ok(VocabParallelEmbedding {
            weight: builder.parameter("weight", spec),
            comm: builder.groups().tensor().clone(),
            first: vocabulary.part(place).0,
            sequence_parallel: builder.sequence_parallel(),
            scale: self.scale,
        })
    }
}

impl VocabParallelEmbedding {
    /// Looks up the embeddings of `[batch, seq]` tokens. Returns `[batch, seq, hidden]`, or
    /// `[batch, seq / tensor, hidden]` under sequence parallelism.
    ///
    /// Pass [`Tokens`] with their [sorted lookups](Tokens::sorted), as the trainer does. If only token ids are passed,
    /// the backward pass accumulates into all rows of the weight gradient instead of only the rows of these tokens.
    pub fn forward(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        let features = tracked(self.features(tokens));
        match self.scale {
            Some(scale) => {
                let scale = rounded(scale, features.dtype());
                features.mul_scalar(scale)
            }
            None => features,
        }
    }

    /// Returns the features before scaling.
    fn features(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        let Tokens { ids, sorted, .. } = tokens.into();
        let [batch, seq] = ids.dims();
        let [rows, hidden] = self.weight.lazy_shape().dims();
        let ids = ids.reshape([batch * seq]);
        let sorted = sorted.map(|sorted| (sorted, self.first));
        if self.comm.size() == 1 {
            let ids = LookupIds { rows: ids, sorted };
            return lookup(&self.weight, ids).reshape([batch, seq, hidden]);
        }
        let local = ids - self.first as i64;
        let is_foreign = local
            .clone()
            .lower_scalar(0)
            .bool_or(local.clone().greater_equal_scalar(rows as i64));
        let local = local.clamp(0, rows as i64 - 1);
        let rows = local;
        let found = lookup(&self.weight, LookupIds { rows, sorted });
        let is_foreign = is_foreign.unsqueeze_dim::<2>(1);
        let partial = found.mask_fill(is_foreign.expand([batch * seq, hidden]), 0.0);
        let partial = partial.reshape([batch, seq, hidden]);
        if self.sequence_parallel {
            collective::reduce_scatter_sequence(partial, SEQUENCE_DIM, &self.comm)
        } else {
            collective::reduce(partial, &self.comm)
        }
    }
}

/// Rounds to the nearest value of a dtype.
fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::BF16 => bf16::from_f64(value).to_f64(),
        DType::F16 => f16::from_f64(value).to_f64(),
        _ => f64::from(value as f32),
    }
}

/// Learned position embeddings, replicated on every rank.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::LearnedPositionsConfig;
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let positions = LearnedPositionsConfig::new(16, 6).init(&builder);
/// let x = Tensor::<3>::zeros([2, 4, 6], &Device::flex());
/// assert_eq!(positions.forward(x).dims(), [2, 4, 6]);
/// ```
#[derive(Module, Debug)]
pub struct LearnedPositions {
    /// The position embeddings: `[max positions, hidden]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    place: AxisRank,
    #[module(skip)]
    sequence_parallel: bool,
}

/// Configuration of [`LearnedPositions`].
#[derive(Config, Debug)]
pub struct LearnedPositionsConfig {
    /// The number of positions.
    pub max_positions: usize,
    /// The hidden size: the number of features per token.
    pub hidden: usize,
    /// The initializer of the weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
}

impl LearnedPositionsConfig {
    /// Builds the embeddings.
    pub fn init(&self, builder: &ModelBuilder) -> LearnedPositions {
        let sequence_parallel = builder.sequence_parallel();
        let spec = ParameterSpec::new([self.max_positions, self.hidden], self.init)
            .not_hidden()
            .with_sum_over(sequence_parallel.then_some(Axis::Tensor));
        LearnedPositions {
            weight: builder.parameter("weight", spec),
            place: builder.place(),
            sequence_parallel,
        }
    }
}

impl LearnedPositions {
    /// Adds the position embeddings to `[batch, seq, hidden]`. Under sequence parallelism the input is this rank's part
    /// `[batch, seq / tensor, hidden]`. The positions of each row start at 0.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward_with_format(x, &BatchFormat::Rows)
    }

    /// Adds the position embeddings to the features of a batch with the given format.
    ///
    /// # Panics
    ///
    /// If a row or a document has more tokens than there are positions.
    pub fn forward_with_format(&self, x: Tensor<3>, format: &BatchFormat<'_>) -> Tensor<3> {
        let [batch, len, _] = x.dims();
        let start = if self.sequence_parallel {
            self.place.index * len
        } else {
            0
        };
        let first = match format {
            BatchFormat::Rows => start,
            BatchFormat::Cached(cache) => {
                return self.add_numbered(x, cache.position_numbers(start..start + len));
            }
            BatchFormat::Packed(packed) => {
                let numbers = packed.positions().clone().narrow(1, start, len);
                let sorted = packed.sorted_positions(start..start + len);
                return self.add_each(x, numbers.reshape([batch * len]), sorted);
            }
            BatchFormat::Sharded(shard) => {
                return self.add_numbered(x, &shard.position_numbers(start..start + len));
            }
        };
        let weight = with_anchor(&x, || forward_only_value(&self.weight));
        let rows = weight.narrow(0, first, len);
        x + rows.unsqueeze()
    }

    /// Adds the embedding of a position to each token of `x`.
    fn add_numbered(&self, x: Tensor<3>, numbers: &[i32]) -> Tensor<3> {
        let sorted = SortedLookups::new(numbers);
        let device = x.device().inner();
        self.add_each(x, Tensor::from_data(numbers, &device), sorted)
    }

    /// Adds the embeddings of positions on the device.
    fn add_each(&self, x: Tensor<3>, rows: Tensor<1, Int>, sorted: SortedLookups) -> Tensor<3> {
        let ids = LookupIds {
            rows,
            sorted: Some((Arc::new(sorted), 0)),
        };
        let shape = x.dims();
        let rows = with_anchor(&x, || lookup(&self.weight, ids));
        x + rows.reshape(shape)
    }
}

/// The output layer, which projects hidden features to logits. It is split over the vocabulary.
///
/// Its weight `[vocabulary, hidden]` has the same layout as the weight of the embedding, so that the two weights can be
/// tied.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{OutputLayerConfig, VocabParallelEmbeddingConfig, Vocabulary};
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let vocabulary = Vocabulary::padded(10, 4, 1);
/// let embedding =
///     VocabParallelEmbeddingConfig::new(vocabulary, 6).init(&builder.child("embedding"))?;
/// let output = OutputLayerConfig::new(vocabulary, 6)
///     .with_tied(true)
///     .init(&builder.child("output"))?;
/// assert!(output.weight.is_none());
/// let x = Tensor::<3>::ones([1, 4, 6], &Device::flex());
/// assert_eq!(output.forward(x, &embedding).dims(), [1, 4, 12]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct OutputLayer {
    /// This rank's rows of the weight: `[padded vocabulary / tensor, hidden]`. `None` if the weight is tied to the
    /// embedding.
    pub weight: Option<Param<Tensor<2>>>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    pub(super) kernels: LinearKernels,
}

/// Configuration of an [`OutputLayer`].
#[derive(Config, Debug)]
pub struct OutputLayerConfig {
    /// The vocabulary.
    pub vocabulary: Vocabulary,
    /// The hidden size: the number of features per token.
    pub hidden: usize,
    /// The initializer of the weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// Whether the layer uses the weight of the embedding and has no weight itself.
    #[config(default = false)]
    pub tied: bool,
}

impl OutputLayerConfig {
    /// Builds this rank's rows of the weight, or no weight if it is tied to the embedding.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] if the padded vocabulary cannot be split over the tensor axis.
    pub fn init(&self, builder: &ModelBuilder) -> Result<OutputLayer, BuildError> {
        let ranks = builder.place().size;
        let spec = self.vocabulary.weight(self.hidden, self.init, ranks)?;
        Ok(OutputLayer {
            weight: (!self.tied).then(|| builder.parameter("weight", spec)),
            comm: builder.groups().tensor().clone(),
            sequence_parallel: builder.sequence_parallel(),
            kernels: builder.linear_kernels(),
        })
    }
}

impl OutputLayer {
    /// Projects `[batch, seq, hidden]` (`[batch, seq / tensor, hidden]` under sequence parallelism) to this rank's
    /// logits `[batch, seq, padded vocabulary / tensor]`.
    ///
    /// `embedding` supplies the weight if the layer is tied. Otherwise `embedding` is ignored.
    ///
    /// # Panics
    ///
    /// If the layer is tied and `embedding` is `None`.
    pub fn forward<'a>(
        &self,
        x: Tensor<3>,
        embedding: impl Into<Option<&'a VocabParallelEmbedding>>,
    ) -> Tensor<3> {
        let weight = self.weight_of(embedding.into());
        let operands = LinearOperands {
            transposed: true,
            ..LinearOperands::new(weight, self.input(), self.kernels)
        };
        linear(x, operands)
    }

    /// Returns the weight of the layer, or of the embedding to which it is tied.
    pub(super) fn weight_of<'a>(
        &'a self,
        embedding: Option<&'a VocabParallelEmbedding>,
    ) -> &'a Param<Tensor<2>> {
        let tied = embedding.map(|embedding| &embedding.weight);
        let Some(weight) = self.weight.as_ref().or(tied) else {
            panic!("an output layer tied to the embedding needs the embedding")
        };
        weight
    }

    /// Returns the layout of the input over the tensor ranks.
    pub(super) fn input(&self) -> InputLayout {
        InputLayout::whole(&self.comm, self.sequence_parallel)
    }
}
