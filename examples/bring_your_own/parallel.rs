//! The same GPT after: tensor-, sequence-, pipeline- and data-parallel. Lines that differ from `plain.rs` are
//! marked `//*`; an item that is new, or changed throughout, has one mark on its first line. On one rank it is
//! the plain model.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::collective::{self, Comm}; //*
use burn_megatron::model::{
    LanguageModel, RecomputePrefix, StageBuilder, StageLayers, Tokens, on_stage,
}; //*
use burn_megatron::nn::{
    Activation, AttentionContext, BatchFormat, BuildError, ColumnParallelLinear,
    ColumnParallelLinearConfig, LearnedPositions, LearnedPositionsConfig, Losses, ModelBuilder,
    Norm, NormConfig, NormKind, OutputLayer, OutputLayerConfig, ParallelAttention,
    ParallelAttentionConfig, RowParallelLinear, RowParallelLinearConfig, VocabParallelCrossEntropy,
    VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};
use burn_megatron_data::IGNORE; //* //*

use crate::config::GptConfig;

/// The stages of one pipeline rank: without the first or the last one, the modules at that end are `None`.
#[derive(Module, Debug)]
pub struct ParallelGpt {
    tokens: Option<VocabParallelEmbedding>, //*
    positions: Option<LearnedPositions>,    //*
    blocks: StageLayers<Block>,             //*
    norm: Option<Norm>,                     //*
    output: Option<OutputLayer>,            //*
    #[module(skip)]
    loss: VocabParallelCrossEntropy, //*
    #[module(skip)]
    tensor: Comm,        //*
    #[module(skip)]
    sequence_multiple: usize, //*
    #[module(skip)]
    config: GptConfig,   //*
}

#[derive(Module, Debug)]
pub struct Block {
    attention_norm: Norm,         //*
    attention: ParallelAttention, //*
    mlp_norm: Norm,               //*
    up: ColumnParallelLinear,     //*
    down: RowParallelLinear,      //*
}

impl ParallelGpt {
    /// Each module has the name of its field: parameters are identified by path on all ranks. //*
    pub fn new(config: &GptConfig, stages: &StageBuilder) -> Result<Self, BuildError> {
        let (hidden, heads, root) = (config.hidden, config.heads, stages.root());
        let (tensor, ranks) = (root.groups().tensor(), root.place().size);
        let vocabulary = Vocabulary::padded(config.vocabulary, 1, ranks);
        let norm = |b: ModelBuilder| NormConfig::new(NormKind::Layer, hidden, 1e-5).init(&b);
        let attention = ParallelAttentionConfig::new(hidden, heads, heads, hidden / heads);
        let up = ColumnParallelLinearConfig::new(hidden, 4 * hidden);
        let down = RowParallelLinearConfig::new(4 * hidden, hidden);
        let block = |_, b: ModelBuilder| {
            Ok(Block {
                attention_norm: norm(b.child("attention_norm")),
                attention: attention.init(&b.child("attention"))?,
                mlp_norm: norm(b.child("mlp_norm")),
                up: up.init(&b.child("up"))?,
                down: down.init(&b.child("down"))?,
            })
        };
        let tokens = VocabParallelEmbeddingConfig::new(vocabulary, hidden);
        let tokens = stages.first("tokens").map(|b| tokens.init(&b));
        let positions = LearnedPositionsConfig::new(config.context, hidden);
        let output = OutputLayerConfig::new(vocabulary, hidden);
        let output = stages.last("output").map(|b| output.init(&b));
        let loss = VocabParallelCrossEntropy::new(vocabulary, tensor);
        Ok(Self {
            tokens: tokens.transpose()?,
            positions: stages.first("positions").map(|b| positions.init(&b)),
            blocks: stages.layers("blocks", block)?,
            norm: stages.last("norm").map(norm),
            output: output.transpose()?,
            loss: loss.with_ignore(Some(IGNORE.into())),
            tensor: tensor.clone(),
            sequence_multiple: root.sequence_multiple(),
            config: config.clone(),
        })
    }

    /// Called on the first stage. //*
    fn embed(&self, tokens: Tokens, format: &BatchFormat<'_>) -> Tensor<3> {
        let x = on_stage(&self.tokens, "the embedding").forward(tokens);
        on_stage(&self.positions, "the positions").forward_with_format(x, format)
    }

    /// The logits `[batch, seq, padded vocabulary / tensor]` of this rank, on the last stage. //*
    fn head(&self, x: Tensor<3>) -> Tensor<3> {
        let x = on_stage(&self.norm, "the last norm").forward(x);
        on_stage(&self.output, "the output layer").forward(x, None)
    }
}

/// The methods that the trainer, `verify` and generation call. //*
impl LanguageModel for ParallelGpt {
    type Cache = RecomputePrefix;

    /// Returns the residual stream `[batch, seq, hidden]` after a stage.
    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let mut format = tokens.format();
        let x = input.unwrap_or_else(|| self.embed(tokens, &format));
        let blocks = self.blocks.of_stage(stage);
        blocks.fold(x, |x, (i, block)| block.forward(x, format.layer(i)))
    }

    /// Returns the loss of each token: the trainer divides by the tokens of all ranks.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.loss.losses(self.head(hidden), targets)
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        let logits = collective::gather(self.head(hidden), 2, &self.tensor);
        logits.narrow(2, 0, self.config.vocabulary)
    }

    fn sequence_multiple(&self) -> usize {
        self.sequence_multiple
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn context(&self) -> usize {
        self.config.context
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        let (config, hidden) = (&self.config, self.config.hidden);
        let weights = 12 * config.layers * hidden * hidden + config.vocabulary * hidden;
        // Half of the attention, because no query attends to a later key.
        (6 * weights + 6 * config.layers * seq * hidden) as f64
    }
}

impl Block {
    /// `context`: whole rows, packed documents or a cache. //*
    fn forward(&self, x: Tensor<3>, context: AttentionContext<'_>) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let x = x + self.attention.forward_with_context(normed, None, context); //*
        let up = self.up.forward(self.mlp_norm.forward(x.clone()));
        x + self.down.forward(Activation::Gelu.forward(up)) //*
    }
}
