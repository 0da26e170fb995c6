//! Token embeddings split over the vocabulary, learned positions, and the output layer.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use super::door::{passing_value, with_anchor};
use super::linear::{InputLies, SEQUENCE_DIM, Weight, linear};
use super::lookup::lookup;
use super::{BuildError, Init, ParameterSpec, Place, Placement, Reading, Scope, Section};
use crate::choice::Operation;
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// The size of a vocabulary, and how it is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// The number of tokens.
    pub tokens: usize,
    /// With the entries that only fill up the last ranks; they have no probability.
    pub padded: usize,
}

impl Vocabulary {
    /// `tokens` entries, filled up to a multiple of `divisible_by * ranks`.
    pub fn padded(tokens: usize, divisible_by: usize, ranks: usize) -> Self {
        Self {
            tokens,
            padded: tokens.next_multiple_of((divisible_by * ranks).max(1)),
        }
    }

    /// The entries that the rank at `place` holds: the first one, and how many.
    pub fn part(&self, place: Place) -> (usize, usize) {
        let len = self.padded / place.size;
        (place.index * len, len)
    }

    fn weight(&self, hidden: usize, init: Init, ranks: usize) -> ParameterSpec<2> {
        let sections = vec![Section {
            size: self.padded,
            parts: ranks,
        }];
        ParameterSpec::new([self.tokens, hidden], init)
            .placed(Placement::Split { dim: 0, sections })
    }
}

/// Rows of a `[vocabulary, hidden]` weight, looked up by token; the rows are split over the tensor
/// axis.
///
/// Tokens of other ranks give zeros here, and the sum over the axis puts the parts together.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// This rank's rows: `[padded vocabulary / tensor, hidden]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    first: usize,
    #[module(skip)]
    sequence_parallel: bool,
}

impl VocabParallelEmbedding {
    /// Builds this rank's rows.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] when the padded vocabulary cannot be split over the tensor axis.
    pub fn new(
        vocabulary: Vocabulary,
        hidden: usize,
        init: Init,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Result<Self, BuildError> {
        let place = scope.place();
        split_evenly(
            "padded vocabulary",
            vocabulary.padded,
            Axis::Tensor,
            place.size,
        )?;
        let spec = vocabulary.weight(hidden, init, place.size);
        Ok(Self {
            weight: scope.parameter("weight", spec),
            comm: scope.groups().tensor().clone(),
            first: vocabulary.part(place).0,
            sequence_parallel,
        })
    }

    /// `[batch, seq]` tokens to `[batch, seq, hidden]`, or to `[batch, seq / tensor, hidden]` under
    /// sequence parallelism.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, seq] = tokens.dims();
        let [rows, hidden] = self.weight.lazy_shape().dims();
        let tokens = tokens.reshape([batch * seq]);
        if self.comm.size() == 1 {
            return lookup(&self.weight, tokens).reshape([batch, seq, hidden]);
        }
        let own = tokens - self.first as i64;
        let foreign = own
            .clone()
            .lower_scalar(0)
            .bool_or(own.clone().greater_equal_scalar(rows as i64));
        let found = lookup(&self.weight, own.clamp(0, rows as i64 - 1));
        let partial = found.mask_fill(
            foreign.unsqueeze_dim::<2>(1).expand([batch * seq, hidden]),
            0.0,
        );
        let partial = partial.reshape([batch, seq, hidden]);
        match self.sequence_parallel {
            true => collective::reduce_scatter_sequence(partial, SEQUENCE_DIM, &self.comm),
            false => collective::reduce(partial, &self.comm),
        }
    }
}

/// A learned vector per position, the same on every rank.
#[derive(Module, Debug)]
pub struct LearnedPositions {
    /// `[max positions, hidden]`
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    place: Place,
    #[module(skip)]
    sequence_parallel: bool,
}

impl LearnedPositions {
    /// Builds the vectors of `max_positions` positions.
    pub fn new(
        max_positions: usize,
        hidden: usize,
        init: Init,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Self {
        let spec = ParameterSpec::new([max_positions, hidden], init)
            .with_partial_gradient(sequence_parallel);
        let place = scope.place();
        Self {
            weight: scope.parameter("weight", spec),
            place,
            sequence_parallel,
        }
    }

    /// Adds the vectors of the positions to `[batch, seq, hidden]`, or to this rank's part
    /// `[batch, seq / tensor, hidden]` under sequence parallelism. Each row begins at position 0.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward_reading(x, &Reading::Rows)
    }

    /// The same where the tokens may stand elsewhere.
    ///
    /// # Panics
    ///
    /// When a row or a document is longer than the positions.
    pub fn forward_reading(&self, x: Tensor<3>, reading: &Reading<'_>) -> Tensor<3> {
        let [batch, len, hidden] = x.dims();
        let own = match self.sequence_parallel {
            true => self.place.index * len,
            false => 0,
        };
        let first = match reading {
            Reading::Rows => own,
            Reading::After(cache) => cache.len() + own,
            Reading::Documents(packed) => {
                let numbers = packed.positions().clone().narrow(1, own, len);
                let numbers = numbers.reshape([batch * len]);
                let rows = with_anchor(&x, || lookup(&self.weight, numbers));
                return x + rows.reshape([batch, len, hidden]);
            }
        };
        let weight = with_anchor(&x, || passing_value(&self.weight));
        let rows = weight.narrow(0, first, len);
        x + rows.unsqueeze()
    }
}

/// The layer that gives each token of the vocabulary a logit, split over the vocabulary.
///
/// Its weight `[vocabulary, hidden]` lies as the embedding's does, so that the two can be one.
#[derive(Module, Debug)]
pub struct OutputLayer {
    /// This rank's rows: `[padded vocabulary / tensor, hidden]`; none where the embedding's serve.
    pub weight: Option<Param<Tensor<2>>>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    fused: bool,
}

impl OutputLayer {
    /// Builds this rank's rows, or none where the weight is `tied` to the embedding's.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] when the padded vocabulary cannot be split over the tensor axis.
    pub fn new(
        vocabulary: Vocabulary,
        hidden: usize,
        init: Init,
        tied: bool,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Result<Self, BuildError> {
        let ranks = scope.place().size;
        split_evenly("padded vocabulary", vocabulary.padded, Axis::Tensor, ranks)?;
        let spec = vocabulary.weight(hidden, init, ranks);
        Ok(Self {
            weight: (!tied).then(|| scope.parameter("weight", spec)),
            comm: scope.groups().tensor().clone(),
            sequence_parallel,
            fused: scope.is_fused(Operation::Linear),
        })
    }

    /// `[batch, seq, hidden]` (`[batch, seq / tensor, hidden]` under sequence parallelism) to this
    /// rank's logits `[batch, seq, padded vocabulary / tensor]`.
    ///
    /// `embedding` gives the weight where this layer has none, and can be left out where it has.
    ///
    /// # Panics
    ///
    /// Without an embedding, where the weight is tied to it.
    pub fn forward<'a>(
        &self,
        x: Tensor<3>,
        embedding: impl Into<Option<&'a VocabParallelEmbedding>>,
    ) -> Tensor<3> {
        let tied = embedding.into().map(|embedding| &embedding.weight);
        let Some(weight) = self.weight.as_ref().or(tied) else {
            panic!("an output layer that is tied to the embedding was given none")
        };
        let weight = Weight::of(weight, &x);
        let comm = self.comm.clone();
        let input = match (comm.size(), self.sequence_parallel) {
            (1, _) => InputLies::Local,
            (_, false) => InputLies::Replicated(comm),
            (_, true) => InputLies::SplitSequence(comm),
        };
        linear(x, weight.transposed(), None, input, self.fused)
    }
}
