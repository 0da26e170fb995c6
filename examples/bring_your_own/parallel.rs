//! The same GPT after: tensor-, sequence- and data-parallel. Lines that differ from `plain.rs` are
//! marked `//*`; with groups of one rank it is the plain model.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::collective::{self, Comm}; //*
use burn_megatron::model::RecomputePrefix; //*
use burn_megatron::nn::{
    Activation, AttentionContext, BatchFormat, BuildError, ColumnParallelLinear,
    ColumnParallelLinearConfig, LearnedPositions, LearnedPositionsConfig, ModelBuilder, Norm,
    NormConfig, NormKind, OutputLayer, OutputLayerConfig, ParallelAttention,
    ParallelAttentionConfig, RowParallelLinear, RowParallelLinearConfig, VocabParallelCrossEntropy,
    VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
}; //*
use burn_megatron::train::{LanguageModel, Losses, Tokens}; //*

use crate::plain::GptConfig;

#[derive(Module, Debug)]
pub struct ParallelGpt {
    tokens: VocabParallelEmbedding, //*
    positions: LearnedPositions,    //*
    blocks: Vec<Block>,
    norm: Norm,          //*
    output: OutputLayer, //*
    #[module(skip)]
    loss: VocabParallelCrossEntropy, //*
    #[module(skip)]
    tensor: Comm, //*
    #[module(skip)]
    sequence_parallel: bool, //*
    #[module(skip)]
    config: GptConfig,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: Norm,         //*
    attention: ParallelAttention, //*
    mlp_norm: Norm,               //*
    up: ColumnParallelLinear,     //*
    down: RowParallelLinear,      //*
}

impl GptConfig {
    /// The shard of this rank. The path of each `child` must be the name of its field: parameters are
    /// identified by path on all ranks.
    pub fn init_parallel(&self, scope: &ModelBuilder) -> Result<ParallelGpt, BuildError> {
        let (hidden, ranks) = (self.hidden, scope.place().size); //*
        let vocabulary = Vocabulary::padded(self.vocabulary, 1, ranks); //*
        let norm =
            |scope: ModelBuilder| NormConfig::new(NormKind::Layer, hidden, 1e-5).init(&scope); //*
        let block = |i: usize| -> Result<Block, BuildError> {
            let scope = scope.child("blocks").child(i); //*
            let heads = self.heads;
            let attention = ParallelAttentionConfig::new(hidden, heads, heads, hidden / heads); //*
            Ok(Block {
                attention_norm: norm(scope.child("attention_norm")),
                attention: attention.init(&scope.child("attention"))?,
                mlp_norm: norm(scope.child("mlp_norm")),
                up: ColumnParallelLinearConfig::new(hidden, 4 * hidden) //*
                    .init(&scope.child("up"))?,
                down: RowParallelLinearConfig::new(4 * hidden, hidden) //*
                    .init(&scope.child("down"))?,
            })
        };
        let (embed, output) = (scope.child("tokens"), scope.child("output"));
        Ok(ParallelGpt {
            tokens: VocabParallelEmbeddingConfig::new(vocabulary, hidden).init(&embed)?, //*
            positions: LearnedPositionsConfig::new(self.context, hidden)
                .init(&scope.child("positions")),
            blocks: (0..self.layers).map(block).collect::<Result<_, _>>()?,
            norm: norm(scope.child("norm")),
            output: OutputLayerConfig::new(vocabulary, hidden).init(&output)?, //*
            loss: VocabParallelCrossEntropy::new(vocabulary, scope.groups().tensor()), //*
            tensor: scope.groups().tensor().clone(),                           //*
            sequence_parallel: scope.sequence_parallel(),                      //*
            config: self.clone(),
        })
    }
}

impl ParallelGpt {
    /// The residual stream `[batch, seq, hidden]`.
    fn run(&self, tokens: Tensor<2, Int>, mut format: BatchFormat<'_>) -> Tensor<3> {
        let x = self.tokens.forward(tokens);
        let mut x = self.positions.forward_with_format(x, &format);
        for (i, block) in self.blocks.iter().enumerate() {
            x = block.forward(x, format.layer(i));
        }
        x
    }

    /// The logits `[batch, seq, padded vocabulary / tensor]` of this rank.
    fn head(&self, x: Tensor<3>) -> Tensor<3> {
        self.output.forward(self.norm.forward(x), &self.tokens)
    }
}

/// What the trainer, `verify` and generation call. //*
impl LanguageModel for ParallelGpt {
    type Cache = RecomputePrefix;

    fn hidden(&self, _stage: usize, _input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let format = tokens.format();
        self.run(tokens.ids, format)
    }

    /// The loss of each token: the wrapper divides by the tokens of all ranks.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.loss.losses(self.head(hidden), targets)
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        let logits = collective::gather(self.head(hidden), 2, &self.tensor);
        logits.narrow(2, 0, self.config.vocabulary)
    }

    fn sequence_multiple(&self) -> usize {
        if self.sequence_parallel {
            self.tensor.size()
        } else {
            1
        }
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn context(&self) -> usize {
        self.config.context
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        let GptConfig {
            vocabulary,
            hidden,
            layers,
            ..
        } = self.config;
        let weights = 12 * layers * hidden * hidden + vocabulary * hidden;
        (6 * weights + 12 * layers * seq * hidden) as f64
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>, context: AttentionContext<'_>) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let x = x + self.attention.forward_with_context(normed, None, context);
        let up = self.up.forward(self.mlp_norm.forward(x.clone()));
        x + self.down.forward(Activation::Gelu.forward(up))
    }
}
