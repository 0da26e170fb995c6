//! The same GPT after: tensor-, sequence- and data-parallel. Lines that differ from `plain.rs` are
//! marked `//*`; with groups of one rank it is the plain model.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::collective::{self, Comm}; //*
use burn_megatron::nn::{
    Activation, BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Init,
    LearnedPositions, ModelBuilder, Norm, NormKind, OutputLayer, ParallelAttention,
    ParallelAttentionConfig, RowParallelLinear, RowParallelLinearConfig, SEQUENCE_DIM,
    VocabParallelCrossEntropy, VocabParallelEmbedding, Vocabulary,
}; //*

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
    sequence: Option<Comm>, //*
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: Norm,         //*
    attention: ParallelAttention, //*
    mlp_norm: Norm,               //*
    up: ColumnParallelLinear,     //*
    down: RowParallelLinear,      //*
}

const INIT: Init = Init::Normal(0.02);

impl GptConfig {
    /// The shard of this rank. The path of each `child` must be the name of its field: parameters are
    /// identified by path on all ranks.
    pub fn init_parallel(&self, scope: &ModelBuilder, sp: bool) -> Result<ParallelGpt, BuildError> {
        let (hidden, ranks) = (self.hidden, scope.place().size); //*
        let vocabulary = Vocabulary::padded(self.vocabulary, 1, ranks); //*
        let norm = |scope: ModelBuilder| Norm::new(NormKind::Layer, hidden, 1e-5, sp, &scope); //*
        let block = |i: usize| -> Result<Block, BuildError> {
            let scope = scope.child("blocks").child(i); //*
            let attention = ParallelAttentionConfig {
                hidden,
                heads: self.heads,
                groups: self.heads,
                head_width: hidden / self.heads,
                bias: true,
                qkv_bias: true,
                qk_norm: None,
                window: None,
                dropout: 0.0,
                init: INIT,
                output_init: INIT,
                sequence_parallel: sp, //*
            };
            Ok(Block {
                attention_norm: norm(scope.child("attention_norm")),
                attention: attention.init(&scope.child("attention"))?,
                mlp_norm: norm(scope.child("mlp_norm")),
                up: ColumnParallelLinearConfig::new(hidden, 4 * hidden) //*
                    .with_sequence_parallel(sp) //*
                    .init(&scope.child("up"))?,
                down: RowParallelLinearConfig::new(4 * hidden, hidden) //*
                    .with_sequence_parallel(sp) //*
                    .init(&scope.child("down"))?,
            })
        };
        let (embed, output) = (scope.child("tokens"), scope.child("output"));
        Ok(ParallelGpt {
            tokens: VocabParallelEmbedding::new(vocabulary, hidden, INIT, sp, &embed)?, //*
            positions: LearnedPositions::new(
                self.context,
                hidden,
                INIT,
                sp,
                &scope.child("positions"),
            ),
            blocks: (0..self.layers).map(block).collect::<Result<_, _>>()?,
            norm: norm(scope.child("norm")),
            output: OutputLayer::new(vocabulary, hidden, INIT, false, sp, &output)?, //*
            loss: VocabParallelCrossEntropy::new(vocabulary, scope.groups().tensor()), //*
            sequence: sp.then(|| scope.groups().tensor().clone()),                   //*
        })
    }
}

impl ParallelGpt {
    /// The loss of each token: the wrapper divides by the tokens of all ranks. //*
    /// `offset` is added to the embedded tokens, so that `verify` can see their gradient. //*
    pub fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        offset: Option<Tensor<3>>,
    ) -> Tensor<2> {
        let mut x = self.tokens.forward(tokens);
        if let Some(offset) = offset {
            x = x + match &self.sequence {
                Some(comm) => collective::scatter_sequence(offset, SEQUENCE_DIM, comm), //*
                None => offset,
            };
        }
        x = self.positions.forward(x);
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits = self.output.forward(self.norm.forward(x), &self.tokens);
        self.loss.forward(logits, targets) //*
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), None);
        let up = self.up.forward(self.mlp_norm.forward(x.clone()));
        x + self.down.forward(Activation::Gelu.forward(up))
    }
}
