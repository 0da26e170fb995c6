//! Causal self-attention with its heads split over the tensor axis.

use burn::module::Module;
use burn::tensor::Tensor;

use super::attention_core::{Heads, attend};
use super::{
    BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Dropout, Init, Lies,
    OutputSection, RotaryTable, RowParallelLinear, RowParallelLinearConfig, Scope,
};
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`ParallelAttention`].
#[derive(Clone, Debug)]
pub struct ParallelAttentionConfig {
    /// Features of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Groups of query heads that share their keys and values: `heads` for multi-head, 1 for
    /// multi-query attention.
    pub groups: usize,
    /// Features of one head.
    pub head_width: usize,
    /// Whether the linear layers have biases.
    pub bias: bool,
    /// Dropout of the attention probabilities.
    pub dropout: f64,
    /// Initial values of the joint query, key and value weight.
    pub init: Init,
    /// Initial values of the output weight.
    pub output_init: Init,
    /// Whether the input and the output are split along the sequence.
    pub sequence_parallel: bool,
}

/// Causal self-attention: multi-head, grouped-query or multi-query.
///
/// Each rank of the tensor axis has its share of the heads. With fewer groups than ranks,
/// neighbouring ranks hold the same keys and values, and the gradients of those are summed.
#[derive(Module, Debug)]
pub struct ParallelAttention {
    /// Queries, keys and values side by side.
    pub qkv: ColumnParallelLinear,
    /// Back to the residual stream.
    pub output: RowParallelLinear,
    dropout: Dropout,
    #[module(skip)]
    heads: Heads,
    #[module(skip)]
    lies: Lies,
}

impl ParallelAttentionConfig {
    /// Builds this rank's heads.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when heads or groups do not suit the tensor axis or each other.
    pub fn init(&self, scope: &Scope) -> Result<ParallelAttention, BuildError> {
        let place = scope.place();
        let heads = split_evenly("heads", self.heads, Axis::Tensor, place.size)?;
        if self.groups == 0 || !self.heads.is_multiple_of(self.groups) {
            let fits: Vec<_> = (1..=self.heads)
                .filter(|n| self.heads.is_multiple_of(*n))
                .collect();
            return Err(scope.error(format!(
                "{} heads cannot share {} groups of keys and values; {fits:?} groups can serve them",
                self.heads, self.groups,
            )));
        }
        let section = |unit, units, shared| OutputSection {
            unit,
            units,
            width: self.head_width,
            shared,
        };
        let kv = section("groups of keys and values", self.groups, true);
        let sections = vec![section("heads", self.heads, false), kv.clone(), kv];
        let qkv = ColumnParallelLinearConfig::with_sections(self.hidden, sections)
            .with_init(self.init)
            .with_bias(self.bias)
            .with_sequence_parallel(self.sequence_parallel)
            .init(&scope.child("qkv"))?;
        let output = RowParallelLinearConfig::new(self.heads * self.head_width, self.hidden)
            .with_init(self.output_init)
            .with_bias(self.bias)
            .with_sequence_parallel(self.sequence_parallel)
            .init(&scope.child("output"))?;
        Ok(ParallelAttention {
            qkv,
            output,
            dropout: Dropout::new(self.dropout, &scope.child("dropout"))?,
            heads: Heads {
                queries: heads,
                groups: (self.groups / place.size).max(1),
                width: self.head_width,
            },
            lies: Lies::SplitAlong { dim: 1, place },
        })
    }
}

impl ParallelAttention {
    /// `[batch, seq, hidden]` to the same; `[batch, seq / tensor, hidden]` under sequence
    /// parallelism. `rotary` turns queries and keys.
    pub fn forward(&self, x: Tensor<3>, rotary: Option<&RotaryTable>) -> Tensor<3> {
        let qkv = self.qkv.forward(x);
        let [batch, seq, _] = qkv.dims();
        let shape = [batch, self.heads.queries, seq, seq];
        let mask = qkv
            .is_autodiff()
            .then(|| {
                self.dropout
                    .scaled_mask(shape, self.lies, &qkv.device(), qkv.dtype())
            })
            .flatten();
        self.output
            .forward(attend(qkv, self.heads, rotary.cloned(), mask))
    }
}
