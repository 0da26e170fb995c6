//! Checks the sizes of a transformer before any memory is allocated.

use burn_megatron::mesh::{Axis, divisors_near, split_evenly};
use burn_megatron::nn::{BuildError, Vocabulary};

use super::{MAX_SIZE, MlaConfig, MoeConfig, Positions, TransformerConfig, refused, scaling};

/// The maximum number of blocks, because each block takes time to build.
const MAX_LAYERS: usize = 1 << 14;

/// The maximum width of a head, because each pair of features has a rotary frequency.
const MAX_HEAD_WIDTH: usize = 1 << 16;

/// The maximum number of parameters, so that their size in bytes does not overflow.
const MAX_PARAMETERS: u128 = 1 << 50;

impl TransformerConfig {
    /// Checks that the sizes of the model are valid and can be split over `tensor` tensor-parallel ranks. Nothing is
    /// allocated.
    ///
    /// Returns the width of an attention head.
    ///
    /// ```
    /// use burn_megatron_models::TransformerConfig;
    ///
    /// // A small Llama with 4 heads.
    /// let config = TransformerConfig { hidden: 32, layers: 2, ..TransformerConfig::llama() };
    /// assert_eq!(config.check(2, false)?, 8);
    /// let error = config.check(8, false).unwrap_err();
    /// assert!(error.to_string().contains("heads 4"));
    /// # Ok::<(), burn_megatron::nn::BuildError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BuildError`] for the first invalid size.
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
            ("mtp.layers", self.mtp.as_ref().map_or(1, |mtp| mtp.layers)),
        ];
        let of_experts = self.moe.iter().flat_map(MoeConfig::sizes);
        let of_latents = self.mla.iter().flat_map(MlaConfig::sizes);
        let sizes = sizes.into_iter().chain(of_latents).chain(of_experts);
        let sizes: Vec<_> = sizes.collect();
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(refused(format!("invalid {name} = 0: expected at least 1")));
        }
        if let Some((name, size)) = sizes.iter().find(|(_, size)| *size > MAX_SIZE) {
            return Err(refused(format!(
                "invalid {name} = {size}: expected at most {MAX_SIZE}"
            )));
        }
        if self.layers > MAX_LAYERS {
            return Err(refused(format!(
                "invalid layers = {}: expected at most {MAX_LAYERS}",
                self.layers
            )));
        }
        split_evenly("heads", self.heads, Axis::Tensor, tensor)?;
        if !self.heads.is_multiple_of(self.groups()) {
            return Err(refused(format!(
                "{} heads are not divisible by {} key-value groups: expected {} groups",
                self.heads,
                self.groups(),
                divisors_near(self.heads, self.groups(), |n| tensor.is_multiple_of(n)
                    || n.is_multiple_of(tensor)),
            )));
        }
        if !tensor.is_multiple_of(self.groups()) {
            split_evenly("key-value groups", self.groups(), Axis::Tensor, tensor)?;
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
                    "invalid {name} = {rate}: expected at least 0 and below 1"
                )));
            }
        }
        self.check_numbers()?;
        self.check_layers()?;
        if let Some(mtp) = &self.mtp {
            mtp.check(self)?;
        }
        let head_width = match &self.mla {
            Some(mla) => {
                mla.check(self)?;
                mla.head_width()
            }
            None => self.check_head_width(tensor)?,
        };
        let parameters = self.count_parameters(head_width, vocabulary.padded);
        if parameters > MAX_PARAMETERS {
            return Err(refused(format!(
                "these sizes give {parameters} parameters: expected at most {MAX_PARAMETERS}; reduce hidden, \
                 layers, mlp_width, heads, head_width, vocabulary or context"
            )));
        }
        let rope = self.rope(head_width);
        rope.as_ref().map_or(Ok(()), scaling::check)?;
        scaling::check_dynamic(&self.positions, self.context)?;
        Ok(head_width)
    }

    /// Checks the floating-point settings in f32, because most values are computed in f32.
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
                    "invalid {name} = {value}: expected {what} in f32"
                )));
            }
        }
        Ok(())
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
                let fits = if heads.is_empty() {
                    "set head_width".into()
                } else {
                    format!("expected {heads} heads, or set head_width")
                };
                return Err(refused(format!(
                    "hidden = {} is not divisible by {} heads: {fits}",
                    self.hidden, self.heads,
                )));
            }
        };
        let rotary = matches!(self.positions, Positions::Rotary { .. });
        if width == 0 || rotary && !width.is_multiple_of(2) {
            let fits = if rotary {
                "an even number above 0"
            } else {
                "a number above 0"
            };
            return Err(refused(format!(
                "invalid head_width = {width}: expected {fits}"
            )));
        }
        if width > MAX_HEAD_WIDTH {
            return Err(refused(format!(
                "invalid head_width = {width}: expected at most {MAX_HEAD_WIDTH}; use more heads"
            )));
        }
        Ok(width)
    }

    /// Counts the elements of all matrices, which are nearly all parameters.
    fn count_parameters(&self, head_width: usize, vocabulary: usize) -> u128 {
        let [hidden, layers, vocabulary] =
            [self.hidden, self.layers, vocabulary].map(|n| n as u128);
        let attention = match &self.mla {
            Some(mla) => mla.columns(self.heads),
            None => 2 * (self.heads + self.groups()) as u128 * head_width as u128,
        };
        let routers = self
            .moe
            .iter()
            .map(|moe| moe.blocks(self.layers) * moe.experts);
        let mlps = (0..self.layers).map(|number| self.mlp_of(number));
        let mlps = mlps.sum::<u128>() + routers.sum::<usize>() as u128;
        let learned = match self.positions {
            Positions::Learned => self.context as u128,
            Positions::Rotary { .. } => 0,
        };
        let ends = if self.tied { 1 } else { 2 };
        // Each MTP module has a projection, and a block with the same sizes as the last block.
        let depths = self.mtp.as_ref().map_or(0, |mtp| mtp.layers as u128);
        let further = depths * (attention + self.mlp_of(self.layers - 1) + 2 * hidden);
        hidden * (layers * attention + mlps + further + ends * vocabulary + learned)
    }

    /// Returns the number of parameters of the MLP or the experts of block `number`, divided by `hidden`. Routers are
    /// not counted.
    fn mlp_of(&self, number: usize) -> u128 {
        let matrices = if self.activation.is_gated() { 3 } else { 2 };
        let moe = self.moe.as_ref().filter(|moe| moe.is_in(number));
        matrices * moe.map_or(self.mlp_width() as u128, |moe| moe.columns(self))
    }
}
