//! A GPT in plain Burn, as a user has it before. Shapes: `[batch, seq, hidden]`.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::config::GptConfig;

#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    output: Linear,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Attention {
    qkv: Linear,
    output: Linear,
    heads: usize,
}

impl Gpt {
    pub fn new(config: &GptConfig, device: &Device) -> Self {
        let hidden = config.hidden;
        let norm = || LayerNormConfig::new(hidden).init(device);
        let linear = |input, output| LinearConfig::new(input, output).init(device);
        let block = |_| Block {
            attention_norm: norm(),
            attention: Attention {
                qkv: linear(hidden, 3 * hidden),
                output: linear(hidden, hidden),
                heads: config.heads,
            },
            mlp_norm: norm(),
            up: linear(hidden, 4 * hidden),
            down: linear(4 * hidden, hidden),
        };
        Self {
            tokens: EmbeddingConfig::new(config.vocabulary, hidden).init(device),
            positions: EmbeddingConfig::new(config.context, hidden).init(device),
            blocks: (0..config.layers).map(block).collect(),
            norm: norm(),
            output: LinearConfig::new(hidden, config.vocabulary)
                .with_bias(false)
                .init(device),
        }
    }

    /// Returns the mean loss over all tokens.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, seq] = tokens.dims();
        let positions = Tensor::<1, Int>::arange(0..seq as i64, &tokens.device());
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions.unsqueeze());
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits = self.output.forward(self.norm.forward(x));
        let vocabulary = logits.dims()[2];
        let logits = logits.reshape([batch * seq, vocabulary]);
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, targets.reshape([batch * seq]))
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let x = x + self.attention.forward(normed);
        let up = self.up.forward(self.mlp_norm.forward(x.clone()));
        x + self.down.forward(gelu(up))
    }
}

impl Attention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let width = hidden / self.heads;
        let qkv = self.qkv.forward(x);
        let part = |i: usize| {
            let part = qkv.clone().narrow(2, i * hidden, hidden);
            part.reshape([batch, seq, self.heads, width])
                .swap_dims(1, 2)
        };
        let (q, k, v) = (part(0), part(1), part(2));
        let scores = q.matmul(k.swap_dims(2, 3)) / (width as f64).sqrt();
        let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &scores.device());
        let scores = scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let out = softmax(scores, 3).matmul(v).swap_dims(1, 2);
        self.output.forward(out.reshape([batch, seq, hidden]))
    }
}
