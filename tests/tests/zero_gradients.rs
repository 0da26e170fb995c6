//! Tests `verify` of a model with a parameter whose gradient is zero in exact arithmetic: the key bias of Burn's
//! `MultiHeadAttention`, which softmax cancels.

use burn::module::Module;
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::model::{RecomputePrefix, StageBuilder, StageLayers, on_stage};
use burn_megatron::nn::Losses;
use burn_megatron::nn::{BuildError, VocabParallelCrossEntropy, Vocabulary};
use burn_megatron_data::IGNORE;
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{ModelSubject, Subject, VerifyOptions, VerifyReport, verify};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const HIDDEN: usize = 16;
const TOKENS: usize = 29;
const SEQ: usize = 8;

/// A model of Burn's modules.
#[derive(Module, Debug)]
struct Attentive {
    embedding: Option<Embedding>,
    blocks: StageLayers<MultiHeadAttention>,
    output: Option<Linear>,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
}

impl LanguageModel for Attentive {
    type Cache = RecomputePrefix;

    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let embed = || on_stage(&self.embedding, "the embedding").forward(tokens.ids);
        let blocks = self.blocks.of_stage(stage);
        blocks.fold(input.unwrap_or_else(embed), |x, (_, attention)| {
            let [batch, seq, _] = x.dims();
            let mask = generate_autoregressive_mask(batch, seq, &x.device());
            let input = MhaInput::self_attn(x.clone()).mask_attn(mask);
            x + attention.forward(input).context
        })
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        on_stage(&self.output, "the output layer").forward(hidden)
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.loss.losses(self.logits_of(hidden), targets)
    }

    fn vocabulary(&self) -> usize {
        TOKENS
    }

    fn context(&self) -> usize {
        SEQ
    }

    fn flops_per_token(&self, _: usize) -> f64 {
        1.0
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
struct AttentiveConfig {
    /// Whether the key bias starts at zero, so that its values are only the sum of its updates.
    zero_bias: bool,
}

impl ModelConfig for AttentiveConfig {
    type Model = Attentive;

    fn layers(&self) -> usize {
        2
    }

    fn vocabulary(&self) -> usize {
        TOKENS
    }

    fn context(&self) -> usize {
        SEQ
    }

    fn build(&self, stages: &StageBuilder) -> Result<Attentive, BuildError> {
        let logits = Vocabulary::padded(TOKENS, 1, 1);
        let loss = VocabParallelCrossEntropy::new(logits, stages.root().groups().tensor());
        let attention = MultiHeadAttentionConfig::new(HIDDEN, 2).with_dropout(0.0);
        let attention = |device: &Device| {
            let mut attention = attention.init(device);
            if self.zero_bias {
                let bias = attention.key.bias.take();
                attention.key.bias = bias.map(|bias| bias.map(|bias| bias.zeros_like()));
            }
            attention
        };
        Ok(Attentive {
            embedding: stages.first("embedding").map(|builder| {
                builder.replicated(|device| EmbeddingConfig::new(TOKENS, HIDDEN).init(device))
            }),
            blocks: stages.layers("blocks", |_, builder| Ok(builder.replicated(attention)))?,
            output: stages.last("output").map(|builder| {
                builder.replicated(|device| LinearConfig::new(HIDDEN, TOKENS).init(device))
            }),
            loss: loss.with_ignore(Some(IGNORE.into())),
        })
    }
}

fn run(subject: &impl Subject) -> VerifyReport {
    let layouts = ["dp2-mb2", "dp4-mb1-z3", "pp2-dp2-mb1/1f1b"].map(|name| name.parse().unwrap());
    verify(subject, &layouts, &VerifyOptions::default()).unwrap()
}

#[test]
fn a_gradient_that_is_zero_in_exact_arithmetic_passes() {
    for zero_bias in [false, true] {
        let report = run(&ModelSubject::new(AttentiveConfig { zero_bias }));
        assert!(report.passes(), "{report}");
    }
}

/// Each rank keeps its own gradients.
#[test]
fn a_missing_sum_of_the_same_model_fails() {
    let model = ModelSubject::new(AttentiveConfig { zero_bias: true });
    let report = run(&Tampered::groups(model, |groups| {
        let data = CorruptedComm::wrap(groups.data(), Corruption::Skip);
        groups.clone().with_data(data)
    }));
    for (layout, comparison) in report.rows() {
        let failing = comparison.failing(VerifyOptions::default().tolerance);
        let wrong = ["parameter grad", "last grad", "final weights"];
        assert!(
            wrong.iter().all(|column| failing.contains(column)),
            "{layout}\n{report}"
        );
    }
}
