//! The reference: every expert processes every token, with a weight of 0 if it was not chosen.

use std::collections::BTreeMap;

use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Tensor, TensorData};

use super::{
    BATCH, EXPERTS, HIDDEN, MoeMlpConfig, Outcome, SEQ, ScoreFunction, WIDTH, input, loss_weight,
};
use crate::nn::Activation;
use crate::nn::tests::{leaf, values, wave};

const TOKENS: usize = BATCH * SEQ;

/// The parameters of a [`MoeMlp`](super::MoeMlp) on one rank, in the order of its table.
pub struct Dense<'a> {
    config: &'a MoeMlpConfig,
    parameters: Vec<(&'static str, Vec<usize>, Tensor<1>)>,
}

/// Returns the best experts of each token, found one by one.
pub fn choose(scores: &[f64], k: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = vec![];
    for _ in 0..k {
        let mut best: Option<usize> = None;
        for expert in (0..scores.len()).filter(|expert| !chosen.contains(expert)) {
            if best.is_none_or(|best| scores[expert] > scores[best]) {
                best = Some(expert);
            }
        }
        chosen.extend(best);
    }
    chosen
}

impl<'a> Dense<'a> {
    pub fn new(config: &'a MoeMlpConfig) -> Self {
        let gated = config.activation.is_gated();
        let (up, router) = (if gated { 2 * WIDTH } else { WIDTH }, &config.router);
        let experts = router.experts;
        let mut shapes = vec![("router.gate", vec![HIDDEN, experts])];
        if router.bias {
            shapes.push(("router.bias", vec![experts]));
        }
        shapes.push(("experts.up", vec![experts, HIDDEN, up]));
        if config.bias {
            shapes.push(("experts.up_bias", vec![experts, up]));
        }
        shapes.push(("experts.down", vec![experts, WIDTH, HIDDEN]));
        if config.bias {
            shapes.push(("experts.down_bias", vec![experts, HIDDEN]));
        }
        if let Some(shared) = &config.shared {
            let up = if gated {
                2 * shared.width
            } else {
                shared.width
            };
            shapes.push(("shared.mlp.up.weight", vec![HIDDEN, up]));
            shapes.push(("shared.mlp.down.weight", vec![shared.width, HIDDEN]));
            if shared.gate {
                shapes.push(("shared.gate", vec![HIDDEN, 1]));
            }
        }
        let parameters = shapes
            .into_iter()
            .enumerate()
            .map(|(index, (path, shape))| {
                let values = wave([shape.iter().product()], index as f64 + 1.0);
                (path, shape, leaf(values))
            });
        Self {
            config,
            parameters: parameters.collect(),
        }
    }

    fn parameter<const D: usize>(&self, path: &str) -> Option<Tensor<D>> {
        let mut found = self.parameters.iter();
        let (_, shape, values) = found.find(|(found, ..)| *found == path)?;
        Some(
            values
                .clone()
                .reshape(<[usize; D]>::try_from(shape.clone()).unwrap()),
        )
    }

    pub fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let logits = x.matmul(self.parameter("router.gate").unwrap());
        match self.parameter::<1>("router.bias") {
            Some(bias) => logits + bias.unsqueeze(),
            None => logits,
        }
    }

    /// Returns `[tokens, experts]`: 1 if the expert was chosen and kept the token.
    fn mask(&self, logits: &Tensor<2>, choices: Option<&[i64]>) -> Tensor<2> {
        let (experts, k) = (
            self.config.router.experts,
            self.config.router.experts_per_token,
        );
        let logits = values(logits.clone().inner());
        let mut mask = vec![0.0; TOKENS * experts];
        for (token, row) in logits.chunks(experts).enumerate() {
            let chosen = match choices {
                Some(choices) => {
                    let of_token = choices[token * k..(token + 1) * k].iter();
                    let of_token = of_token.filter(|expert| **expert >= 0);
                    of_token.map(|expert| *expert as usize).collect()
                }
                None => choose(row, k),
            };
            for expert in chosen {
                mask[token * experts + expert] = 1.0;
            }
        }
        tensor(mask, [TOKENS, experts])
    }

    fn weights(&self, z: Tensor<2>, mask: Tensor<2>) -> Tensor<2> {
        let router = &self.config.router;
        let over_chosen = |scores: Tensor<2>| {
            let kept = scores * mask.clone();
            match router.experts_per_token {
                1 => kept,
                _ => kept.clone() / kept.sum_dim(1),
            }
        };
        let weights = match router.score {
            ScoreFunction::Softmax if router.experts_per_token > 1 => over_chosen(z.exp()),
            ScoreFunction::Softmax | ScoreFunction::PreSoftmax => softmax(z, 1) * mask,
            ScoreFunction::Sigmoid => over_chosen(sigmoid(z)),
            ScoreFunction::SqrtSoftplus => over_chosen((z.exp() + 1.0).log().sqrt()),
        };
        weights * router.factor
    }

    fn activated(&self, x: Tensor<2>) -> Tensor<2> {
        match self.config.activation {
            Activation::SwiGlu => {
                let half = x.dims()[1] / 2;
                let gate = x.clone().narrow(1, 0, half);
                gate.clone() * sigmoid(gate) * x.narrow(1, half, half)
            }
            Activation::SquaredRelu => x.clone().clamp_min(0.0) * x,
            other => panic!("{other:?} has no reference"),
        }
    }

    fn expert(&self, x: &Tensor<2>, expert: usize) -> Tensor<2> {
        let weight = |path: &str| {
            let all = self.parameter::<3>(path).unwrap();
            all.narrow(0, expert, 1).squeeze_dim::<2>(0)
        };
        let biased = |x: Tensor<2>, path: &str| match self.parameter::<2>(path) {
            Some(bias) => x + bias.narrow(0, expert, 1),
            None => x,
        };
        let up = biased(x.clone().matmul(weight("experts.up")), "experts.up_bias");
        let down = self.activated(up).matmul(weight("experts.down"));
        biased(down, "experts.down_bias")
    }

    pub fn output(&self, x: Tensor<2>, mask: Tensor<2>) -> Tensor<2> {
        let weights = self.weights(self.logits(x.clone()), mask);
        let y = self.mixture(x.clone(), weights);
        let Some(up) = self.parameter::<2>("shared.mlp.up.weight") else {
            return y;
        };
        let down = self.parameter("shared.mlp.down.weight").unwrap();
        let shared = self.activated(x.clone().matmul(up)).matmul(down);
        match self.parameter::<2>("shared.gate") {
            Some(gate) => y + shared * sigmoid(x.matmul(gate)),
            None => y + shared,
        }
    }

    /// Runs the reference with given choices, or with the best experts.
    pub fn run(&self, choices: Option<&[i64]>) -> Outcome {
        self.run_with(|x| {
            let mask = self.mask(&self.logits(x.clone()), choices);
            (self.output(x, mask), None)
        })
    }

    /// Runs the reference. `forward` returns the output for `[tokens, hidden]`, and a term that is added to the loss.
    pub fn run_with(
        &self,
        forward: impl FnOnce(Tensor<2>) -> (Tensor<2>, Option<Tensor<1>>),
    ) -> Outcome {
        let x = leaf(input().reshape([TOKENS, HIDDEN]));
        let (y, more) = forward(x.clone());
        let weight: Tensor<2> = Tensor::from_inner(loss_weight().reshape([TOKENS, HIDDEN]));
        let mut loss = (y.clone() * weight).sum();
        if let Some(more) = more {
            loss = loss + more;
        }
        let gradients = loss.backward();
        let tokens = TOKENS as f64;
        let of_parameters = self.parameters.iter().map(|(path, _, tensor)| {
            let gradient = tensor.grad(&gradients).unwrap();
            (format!("moe.{path}"), values(gradient.div_scalar(tokens)))
        });
        let parameters: Vec<(String, Vec<f64>)> = of_parameters.collect();
        let all = parameters.iter().flat_map(|(_, gradient)| gradient);
        Outcome {
            output: values(y.inner()),
            input_gradient: values(x.grad(&gradients).unwrap()),
            norm: all.map(|x| x * x).sum::<f64>().sqrt(),
            parameters,
            losses: vec![],
            load: vec![],
            fp8: BTreeMap::new(),
        }
    }

    /// Returns the mask of the kept pairs of token and expert.
    pub fn mask_of(&self, kept: impl Fn(usize, usize) -> bool) -> Tensor<2> {
        let mask = (0..TOKENS * EXPERTS).map(|i| f64::from(kept(i / EXPERTS, i % EXPERTS)));
        tensor(mask.collect(), [TOKENS, EXPERTS])
    }

    /// Returns the weights of the best experts: `[tokens, experts]`.
    pub fn router_weights(&self, x: Tensor<2>) -> Tensor<2> {
        let logits = self.logits(x);
        let mask = self.mask(&logits, None);
        self.weights(logits, mask)
    }

    /// Returns the sum of all experts for `[tokens, hidden]` with these weights.
    pub fn mixture(&self, x: Tensor<2>, weights: Tensor<2>) -> Tensor<2> {
        let parts = (0..self.config.router.experts)
            .map(|expert| self.expert(&x, expert) * weights.clone().narrow(1, expert, 1));
        parts.reduce(|sum, part| sum + part).unwrap()
    }
}

fn tensor(values: Vec<f64>, shape: [usize; 2]) -> Tensor<2> {
    let options = (&Device::flex().autodiff(), burn::tensor::DType::F64);
    Tensor::from_data(TensorData::new(values, shape), options)
}
