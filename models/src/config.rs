//! The sizes and choices of a transformer.

use burn::tensor::{DType, Device};
use burn_megatron::choice::{ChoiceError, Choices, Chosen, Operation};
use burn_megatron::kernels::rope::RopeConfig;
use burn_megatron::mesh::{Axis, divisors_near, split_evenly};
use burn_megatron::nn::{Activation, BuildError, NormConfig, NormKind, Vocabulary, why_unfused};
use serde::{Deserialize, Serialize};

use crate::{RotaryScaling, scaling};

/// How the model knows where a token stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Positions {
    /// A learned vector per position, added to the embedding.
    Learned,
    /// Queries and keys are turned by an angle that grows with the position.
    Rotary {
        /// The base of the angles; 10,000 in Llama 2.
        base: f64,
        /// How the frequencies are stretched for longer sequences.
        #[serde(default)]
        scaling: RotaryScaling,
    },
}

impl Positions {
    /// Rotary positions as Llama 2 has them.
    pub fn rotary(base: f64) -> Self {
        Self::Rotary {
            base,
            scaling: RotaryScaling::None,
        }
    }
}

/// The largest size of a model, so that products of two of them can be counted.
const MOST: usize = 1 << 30;

/// The most blocks: each takes time to build, however small it is.
const MOST_LAYERS: usize = 1 << 14;

/// The widest head: each pair of its features has a frequency of rotary positions.
const MOST_HEAD_WIDTH: usize = 1 << 16;

/// The most parameters of a model, so that their bytes can be counted whatever is kept of each.
const MOST_PARAMETERS: u128 = 1 << 50;

/// Configuration of a [`Transformer`](crate::Transformer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransformerConfig {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The vocabulary is padded to a multiple of this times the tensor size.
    pub vocabulary_divisible_by: usize,
    /// The longest sequence.
    pub context: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Groups of heads that share keys and values; as many as heads where not given.
    pub groups: Option<usize>,
    /// Features of a head; `hidden / heads` where not given.
    pub head_width: Option<usize>,
    /// Features inside of the MLP. Where not given `4 hidden`, or for a gated activation
    /// `8/3 hidden`, down to a multiple of 64 (at least 64).
    pub mlp_width: Option<usize>,
    /// The normalisation.
    pub norm: NormKind,
    /// Added to the variance.
    pub norm_epsilon: f64,
    /// Whether the weights of the norms are kept as their distances from 1, so that weight decay
    /// pulls them there.
    pub norm_zero_centered: bool,
    /// The nonlinearity of the MLP.
    pub activation: Activation,
    /// How positions enter.
    pub positions: Positions,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether the projections to queries, keys and values have biases; as the others where not given.
    pub qkv_bias: Option<bool>,
    /// Whether the queries and the keys of each head are normalised (RMSNorm), as in Qwen 3.
    pub qk_norm: bool,
    /// How many tokens attention sees, the query's own included, as in Mistral; all before it where not
    /// given.
    pub window: Option<usize>,
    /// Whether the output layer uses the embedding's weight.
    pub tied: bool,
    /// Dropout of the embedding and of each block's two outputs.
    pub dropout: f64,
    /// Dropout of the attention probabilities.
    pub attention_dropout: f64,
    /// Standard deviation of the initial weights; those before the residual stream are divided by
    /// `sqrt(2 layers)`, as in GPT-2.
    pub init_std: f64,
    /// Label smoothing of the loss.
    pub label_smoothing: f64,
    /// Weight of the squared log-sum-exp in the loss.
    pub z_loss: f64,
}

impl Default for TransformerConfig {
    /// A small GPT-2 over bytes.
    fn default() -> Self {
        Self::gpt2()
    }
}

impl TransformerConfig {
    /// A small GPT-2 over bytes: LayerNorm, GELU, learned positions, tied output.
    pub fn gpt2() -> Self {
        Self {
            vocabulary: 256,
            vocabulary_divisible_by: 1,
            context: 128,
            hidden: 128,
            layers: 4,
            heads: 4,
            groups: None,
            head_width: None,
            mlp_width: None,
            norm: NormKind::Layer,
            norm_epsilon: 1e-5,
            norm_zero_centered: false,
            activation: Activation::GeluTanh,
            positions: Positions::Learned,
            bias: true,
            qkv_bias: None,
            qk_norm: false,
            window: None,
            tied: true,
            dropout: 0.0,
            attention_dropout: 0.0,
            init_std: 0.02,
            label_smoothing: 0.0,
            z_loss: 0.0,
        }
    }

    /// A small Llama over bytes: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases.
    pub fn llama() -> Self {
        Self {
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            positions: Positions::rotary(10_000.0),
            bias: false,
            tied: false,
            ..Self::gpt2()
        }
    }

    /// Checks every size against the others and against `tensor` ranks, before anything is built.
    ///
    /// Returns the width of a head.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for the first size that does not fit.
    pub fn check(&self, tensor: usize, sequence_parallel: bool) -> Result<usize, BuildError> {
        let sizes = [
            ("vocabulary", self.vocabulary),
            ("vocabulary_divisible_by", self.vocabulary_divisible_by),
            ("context", self.context),
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("groups", self.groups()),
            ("head_width", self.head_width.unwrap_or(1)),
            ("mlp_width", self.mlp_width.unwrap_or(1)),
            ("window", self.window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(refused(format!("{name} = 0 makes no model; 1 and more do")));
        }
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size > MOST) {
            return Err(refused(format!(
                "{name} = {size} makes a model that nothing holds; at most {MOST} does"
            )));
        }
        if self.layers > MOST_LAYERS {
            return Err(refused(format!(
                "layers = {} makes a model that nobody trains; at most {MOST_LAYERS} fit",
                self.layers
            )));
        }
        split_evenly("heads", self.heads, Axis::Tensor, tensor)?;
        if !self.heads.is_multiple_of(self.groups()) {
            return Err(refused(format!(
                "{} heads cannot share {} groups of keys and values; {} groups can serve them",
                self.heads,
                self.groups(),
                divisors_near(self.heads, self.groups(), |n| tensor.is_multiple_of(n)
                    || n.is_multiple_of(tensor)),
            )));
        }
        if !tensor.is_multiple_of(self.groups()) {
            split_evenly(
                "groups of keys and values",
                self.groups(),
                Axis::Tensor,
                tensor,
            )?;
        }
        split_evenly("MLP width", self.mlp_width(), Axis::Tensor, tensor)?;
        let vocabulary = Vocabulary::padded(self.vocabulary, self.vocabulary_divisible_by, tensor);
        split_evenly("padded vocabulary", vocabulary.padded, Axis::Tensor, tensor)?;
        if sequence_parallel {
            split_evenly("context", self.context, Axis::Tensor, tensor)?;
        }
        for (name, rate) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("label_smoothing", self.label_smoothing),
        ] {
            if !(0.0..1.0).contains(&rate) {
                return Err(refused(format!(
                    "{name} = {rate} makes no sense; at least 0 and below 1 does"
                )));
            }
        }
        self.check_numbers()?;
        let head_width = self.check_head_width(tensor)?;
        let parameters = self.count_parameters(head_width, vocabulary.padded);
        if parameters > MOST_PARAMETERS {
            return Err(refused(format!(
                "a model of these sizes has {parameters} parameters, and nothing holds it; at most \
                 {MOST_PARAMETERS} can be counted: make hidden, layers, mlp_width, heads, head_width, \
                 vocabulary or context smaller"
            )));
        }
        let rope = self.rope(head_width);
        rope.as_ref().map_or(Ok(()), scaling::check)?;
        Ok(head_width)
    }

    /// Checks the numbers that are no sizes; in f32, which most is computed in.
    fn check_numbers(&self) -> Result<(), BuildError> {
        let is_finite = |value: f64| (value as f32).is_finite();
        for (name, value, fits, what) in [
            (
                "norm_epsilon",
                self.norm_epsilon,
                self.norm_epsilon as f32 > 0.0 && is_finite(self.norm_epsilon),
                "above 0 and finite",
            ),
            (
                "z_loss",
                self.z_loss,
                self.z_loss >= 0.0 && is_finite(self.z_loss),
                "at least 0 and finite",
            ),
            (
                "init_std",
                self.init_std,
                self.init_std >= 0.0 && is_finite(self.init_std),
                "at least 0 and finite",
            ),
        ] {
            if !fits {
                return Err(refused(format!(
                    "{name} = {value} makes no model; it must be {what} in 32 bits"
                )));
            }
        }
        Ok(())
    }

    /// The weights of matrices, which is nearly all.
    fn count_parameters(&self, head_width: usize, vocabulary: usize) -> u128 {
        let [hidden, layers, vocabulary] =
            [self.hidden, self.layers, vocabulary].map(|n| n as u128);
        let attention = 2 * (self.heads + self.groups()) as u128 * head_width as u128;
        let mlp = self.mlp_width() as u128 * if self.activation.is_gated() { 3 } else { 2 };
        let learned = match self.positions {
            Positions::Learned => self.context as u128,
            Positions::Rotary { .. } => 0,
        };
        let ends = if self.tied { 1 } else { 2 };
        hidden * (layers * (attention + mlp) + ends * vocabulary + learned)
    }

    /// The table of rotary positions, where the model has them.
    pub(crate) fn rope(&self, head_width: usize) -> Option<RopeConfig> {
        match self.positions {
            Positions::Learned => None,
            Positions::Rotary { base, scaling } => Some(RopeConfig {
                width: head_width,
                max_positions: self.context,
                base,
                scaling: scaling.into(),
            }),
        }
    }

    /// Checks that the kernels which are asked for suit this model and the device, before anything is
    /// built.
    ///
    /// # Errors
    ///
    /// [`ChoiceError`] for the first that does not.
    pub fn check_kernels(
        &self,
        choices: &Choices,
        device: &Device,
        dtype: DType,
    ) -> Result<Chosen, ChoiceError> {
        let mut chosen = Chosen::new(choices, device, dtype)?;
        let head_width = self.head_width.unwrap_or(self.hidden / self.heads.max(1));
        if let Some(reason) = why_unfused(self.attention_dropout, head_width) {
            chosen.keep_unfused(Operation::Attention, reason)?;
        }
        Ok(chosen)
    }

    fn check_head_width(&self, tensor: usize) -> Result<usize, BuildError> {
        let width = match self.head_width {
            Some(width) => width,
            None if self.hidden.is_multiple_of(self.heads) => self.hidden / self.heads,
            None => {
                let rotary = self.positions != Positions::Learned;
                let heads = divisors_near(self.hidden, self.heads, |heads| {
                    heads.is_multiple_of(tensor)
                        && heads.is_multiple_of(self.groups.unwrap_or(1))
                        && !(rotary && (self.hidden / heads) % 2 == 1)
                });
                let fits = match heads.is_empty() {
                    true => "set head_width".into(),
                    false => format!("{heads} heads can, or set head_width"),
                };
                return Err(refused(format!(
                    "hidden {} cannot be shared by {} heads; {fits}",
                    self.hidden, self.heads,
                )));
            }
        };
        let rotary = matches!(self.positions, Positions::Rotary { .. });
        if width == 0 || rotary && !width.is_multiple_of(2) {
            let fits = if rotary {
                "an even one above 0"
            } else {
                "one above 0"
            };
            return Err(refused(format!(
                "a head width of {width} cannot be used; {fits} can"
            )));
        }
        if width > MOST_HEAD_WIDTH {
            return Err(refused(format!(
                "a head width of {width} cannot be used; at most {MOST_HEAD_WIDTH} can: more heads make \
                 narrower ones"
            )));
        }
        Ok(width)
    }

    /// Bytes of the table that rotary positions are read from on each rank: two numbers of 32 bits for each
    /// position and each pair of features; none for learned positions.
    pub fn rotary_bytes(&self) -> u128 {
        let width = self.head_width.unwrap_or(self.hidden / self.heads.max(1));
        match self.positions {
            Positions::Learned => 0,
            Positions::Rotary { .. } => 2 * 4 * self.context as u128 * (width / 2) as u128,
        }
    }

    pub(crate) fn norm(&self, sequence_parallel: bool) -> NormConfig {
        NormConfig {
            kind: self.norm,
            hidden: self.hidden,
            epsilon: self.norm_epsilon,
            zero_centered: self.norm_zero_centered,
            sequence_parallel,
        }
    }

    pub(crate) fn groups(&self) -> usize {
        self.groups.unwrap_or(self.heads)
    }

    pub(crate) fn mlp_width(&self) -> usize {
        self.mlp_width.unwrap_or(match self.activation.is_gated() {
            true => (self.hidden * 8 / 3 / 64 * 64).max(64),
            false => self.hidden * 4,
        })
    }
}

fn refused(message: String) -> BuildError {
    BuildError::Config {
        path: "model".into(),
        message,
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
