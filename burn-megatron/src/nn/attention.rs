//! Causal self-attention with its heads split over the tensor axis.

use burn::module::Module;
use burn::tensor::Tensor;

use burn_megatron_kernels::attention::{Heads, MAX_WIDTH};
use burn_megatron_kernels::rope::{self, Positions, RopeOptions, RopeTable};

use super::attention_core::Core;
use super::{
    BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Dropout, Init, Lies, Norm,
    NormConfig, NormKind, OutputSection, RowParallelLinear, RowParallelLinearConfig, Scope, Sight,
};
use crate::choice::Operation;
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
    /// Whether the output projection has a bias.
    pub bias: bool,
    /// Whether the projection to queries, keys and values has one.
    pub qkv_bias: bool,
    /// RMSNorm of each head's queries and of its keys, with this added to the mean square.
    pub qk_norm: Option<f64>,
    /// How many tokens a query sees, itself included; all before it where not given.
    pub window: Option<usize>,
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
    /// Over the features of a head, before positions enter.
    pub q_norm: Option<Norm>,
    /// The same for keys.
    pub k_norm: Option<Norm>,
    dropout: Dropout,
    #[module(skip)]
    core: Core,
    #[module(skip)]
    lies: Lies,
    #[module(skip)]
    fused_rope: bool,
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
            .with_bias(self.qkv_bias)
            .with_sequence_parallel(self.sequence_parallel)
            .init(&scope.child("qkv"))?;
        let output = RowParallelLinearConfig::new(self.heads * self.head_width, self.hidden)
            .with_init(self.output_init)
            .with_bias(self.bias)
            .with_sequence_parallel(self.sequence_parallel)
            .init(&scope.child("output"))?;
        self.check_fused(scope)?;
        if self.window == Some(0) {
            return Err(scope.error("a window of 0 tokens sees nothing; 1 and more do".to_string()));
        }
        Ok(ParallelAttention {
            qkv,
            output,
            q_norm: self.head_norm("q_norm", scope),
            k_norm: self.head_norm("k_norm", scope),
            dropout: Dropout::new(self.dropout, &scope.child("dropout"))?,
            core: Core {
                heads: Heads {
                    heads,
                    groups: (self.groups / place.size).max(1),
                    width: self.head_width,
                },
                window: self.window,
                fused: scope.is_fused(Operation::Attention),
                fused_softmax: scope.is_fused(Operation::Softmax),
            },
            lies: Lies::SplitAlong { dim: 1, place },
            fused_rope: scope.is_fused(Operation::Rope),
        })
    }

    /// The norm of each head; every rank has its own heads, so that gradients are parts of a sum.
    fn head_norm(&self, name: &str, scope: &Scope) -> Option<Norm> {
        let norm = |epsilon| NormConfig {
            kind: NormKind::Rms,
            hidden: self.head_width,
            epsilon,
            zero_centered: false,
            sequence_parallel: scope.place().size > 1,
        };
        Some(norm(self.qk_norm?).init(&scope.child(name)))
    }

    /// Says what keeps attention from being fused.
    fn check_fused(&self, scope: &Scope) -> Result<(), BuildError> {
        match why_unfused(self.dropout, self.head_width) {
            Some(reason) => scope.keep_unfused(Operation::Attention, reason),
            None => Ok(()),
        }
    }
}

/// What keeps an attention with this dropout and width of heads from being fused.
pub fn why_unfused(dropout: f64, head_width: usize) -> Option<String> {
    if dropout > 0.0 {
        return Some("the attention's dropout acts on its probabilities".into());
    }
    let wide = head_width > MAX_WIDTH;
    wide.then(|| format!("heads of {head_width} features are wider than {MAX_WIDTH}"))
}

impl ParallelAttention {
    /// `[batch, seq, hidden]` to the same; `[batch, seq / tensor, hidden]` under sequence
    /// parallelism. `rotary` turns queries and keys.
    pub fn forward(&self, x: Tensor<3>, rotary: Option<&RopeTable>) -> Tensor<3> {
        self.forward_seeing(x, rotary, Sight::Rows)
    }

    /// The same for tokens that see something else than their row.
    ///
    /// # Panics
    ///
    /// With a cache that has no room for the tokens, that holds other sequences, or for tensors that
    /// are recorded for a backward.
    pub fn forward_seeing(
        &self,
        x: Tensor<3>,
        rotary: Option<&RopeTable>,
        sight: Sight<'_>,
    ) -> Tensor<3> {
        self.output.forward(self.heads_of(x, rotary, sight))
    }

    /// The output before its bias, and the bias, for an operation that adds it itself.
    ///
    /// # Panics
    ///
    /// As [`forward_seeing`](Self::forward_seeing).
    pub fn forward_without_bias(
        &self,
        x: Tensor<3>,
        rotary: Option<&RopeTable>,
        sight: Sight<'_>,
    ) -> (Tensor<3>, Option<Tensor<1>>) {
        self.output
            .forward_without_bias(self.heads_of(x, rotary, sight))
    }

    /// What the heads of this rank give.
    fn heads_of(&self, x: Tensor<3>, rotary: Option<&RopeTable>, sight: Sight<'_>) -> Tensor<3> {
        let qkv = self.normalise(self.qkv.forward(x));
        let qkv = match rotary {
            Some(table) => self.turn(qkv, table, &sight.positions()),
            None => qkv,
        };
        let dropout = |probabilities| self.dropout.forward(probabilities, self.lies);
        self.core.attend(qkv, sight, dropout)
    }

    /// Normalises the queries and the keys of a joint projection, head by head.
    fn normalise(&self, qkv: Tensor<3>) -> Tensor<3> {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else {
            return qkv;
        };
        let ([batch, seq, _], heads) = (qkv.dims(), self.core.heads);
        let part = |first: usize, count: usize| {
            qkv.clone()
                .narrow(2, first * heads.width, count * heads.width)
        };
        let normal = |norm: &Norm, first, count| {
            let rows = part(first, count).reshape([batch, seq * count, heads.width]);
            norm.forward(rows)
                .reshape([batch, seq, count * heads.width])
        };
        let q = normal(q_norm, 0, heads.heads);
        let k = normal(k_norm, heads.heads, heads.groups);
        let v = part(heads.heads + heads.groups, heads.groups);
        Tensor::cat(vec![q, k, v], 2)
    }

    /// Turns the queries and keys of a joint projection.
    fn turn(&self, qkv: Tensor<3>, table: &RopeTable, positions: &Positions) -> Tensor<3> {
        let ([batch, seq, features], heads) = (qkv.dims(), self.core.heads);
        let x = qkv.reshape([batch, seq, features / heads.width, heads.width]);
        let options = RopeOptions {
            heads: Some(heads.heads + heads.groups),
            ..RopeOptions::default()
        };
        let turned = match self.fused_rope {
            true => rope::rotate(x, table, positions, &options),
            false => rope::composed::rotate(x, table, positions, &options),
        };
        turned.reshape([batch, seq, features])
    }
}
