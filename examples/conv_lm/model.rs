//! A language model of gated causal convolutions (Dauphin et al. 2017, arXiv:1612.08083), from burn-nn modules.
//! Shapes: `[batch, seq, hidden]`.

use burn::module::Module;
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor};
use burn_megatron::model::{
    LanguageModel, RecomputePrefix, StageBuilder, StageLayers, Tokens, on_stage,
};
use burn_megatron::nn::{BuildError, Losses, VocabParallelCrossEntropy, Vocabulary, recompute};
use burn_megatron_data::IGNORE;

use crate::config::ConvLmConfig;

/// The model, or the stages of one pipeline rank: modules at its ends are `None` where the rank does not have them.
#[derive(Module, Debug)]
pub struct ConvLm {
    embedding: Option<Embedding>,
    blocks: StageLayers<Block>,
    norm: Option<LayerNorm>,
    output: Option<Linear>,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
    #[module(skip)]
    config: ConvLmConfig,
}

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    conv: Conv1d,
}

impl ConvLm {
    pub fn new(config: &ConvLmConfig, stages: &StageBuilder) -> Result<Self, BuildError> {
        let (vocabulary, hidden) = (config.vocabulary, config.hidden);
        let embedding = EmbeddingConfig::new(vocabulary, hidden);
        let norm = LayerNormConfig::new(hidden);
        let conv = Conv1dConfig::new(hidden, 2 * hidden, config.kernel.get());
        let output = LinearConfig::new(hidden, vocabulary);
        let logits = Vocabulary::padded(vocabulary, 1, 1);
        let loss = VocabParallelCrossEntropy::new(logits, stages.root().groups().tensor());
        Ok(Self {
            embedding: stages
                .first("embedding")
                .map(|builder| builder.replicated(|device| embedding.init(device))),
            blocks: stages.layers("blocks", |_, builder| {
                Ok(Block {
                    norm: builder.child("norm").replicated(|device| norm.init(device)),
                    conv: builder.child("conv").replicated(|device| conv.init(device)),
                })
            })?,
            norm: stages
                .last("norm")
                .map(|builder| builder.replicated(|device| norm.init(device))),
            output: stages
                .last("output")
                .map(|builder| builder.replicated(|device| output.init(device))),
            loss: loss.with_ignore(Some(IGNORE.into())),
            config: config.clone(),
        })
    }
}

impl Block {
    /// `x + a * sigmoid(b)`, where the convolution returns `a` and `b`.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let kernel = self.conv.kernel_size;
        let features = self.norm.forward(x.clone()).swap_dims(1, 2);
        let [batch, hidden, _] = features.dims();
        let options = (&features.device(), features.dtype());
        // Zeros before the first token, so that no token sees a later one.
        let before = Tensor::zeros([batch, hidden, kernel - 1], options);
        let y = self.conv.forward(Tensor::cat(vec![before, features], 2));
        let [a, b] = y.chunk(2, 1).try_into().expect("two halves");
        x + (a * sigmoid(b)).swap_dims(1, 2)
    }
}

impl LanguageModel for ConvLm {
    type Cache = RecomputePrefix;

    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let embed = || on_stage(&self.embedding, "the embedding").forward(tokens.ids);
        let blocks = self.blocks.of_stage(stage);
        blocks.fold(input.unwrap_or_else(embed), |x, (_, block)| {
            // Burn's layers save their weights for the backward. Recomputed, they are freed after the forward, so that
            // ZeRO-3 has those of a few layers at once.
            let block = block.clone();
            recompute(x, move |x| block.forward(x))
        })
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        let x = on_stage(&self.norm, "the last norm").forward(hidden);
        on_stage(&self.output, "the output layer").forward(x)
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.loss.losses(self.logits_of(hidden), targets)
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn context(&self) -> usize {
        self.config.context
    }

    fn flops_per_token(&self, _seq: usize) -> f64 {
        let ConvLmConfig {
            vocabulary,
            hidden,
            layers,
            kernel,
            ..
        } = self.config;
        6.0 * (layers * kernel.get() * hidden * 2 * hidden + hidden * vocabulary) as f64
    }
}
