//! Implements the model traits for [`TransformerConfig`].

use burn::tensor::{DType, Device};
use burn_megatron::kernel_selection::{
    KernelChoiceError, KernelChoices, KernelSelection, Operation,
};
use burn_megatron::kernels::attention::Heads;
use burn_megatron::kernels::rope::RopeConfig;
use burn_megatron::mesh::{ContextExchange, LayoutError, ParallelConfig};
use burn_megatron::model::{
    ConfigDifference, ModelConfig, RoundingSizes, StageBuilder, check_without_experts,
    compare_settings,
};
use burn_megatron::nn::context::ExchangeProblem;
use burn_megatron::nn::{BuildError, MultiLatentAttentionConfig, Vocabulary};

use crate::difference::plain;
use crate::{Mixer, MoeConfig, StandardMixer, Transformer, TransformerConfig};

impl ModelConfig for TransformerConfig {
    type Model = Transformer;

    fn layers(&self) -> usize {
        self.layers
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn layer_kind(&self, number: usize) -> usize {
        let layer = self.layer(number);
        let window = StandardMixer::window(&layer.mixer).unwrap_or(0);
        2 * window + usize::from(layer.has_experts())
    }

    fn depends_on_micro_batches(&self) -> bool {
        self.moe
            .as_ref()
            .is_some_and(MoeConfig::depends_on_micro_batches)
    }

    fn splits_sequences(&self, layout: &ParallelConfig) -> bool {
        layout.sequence_parallel || self.moe.is_some() && layout.tensor > 1
    }

    fn context_exchange(
        &self,
        layout: &ParallelConfig,
    ) -> Result<Option<ContextExchange>, BuildError> {
        if !layout.shares_sequences() {
            return Ok(None);
        }
        let refused = |path: &str, message| BuildError::Config {
            path: path.into(),
            message,
        };
        if layout.hybrid_tokens().is_some() {
            let unfused = self.unfused_attention();
            let (what, part) = match (&self.mla, &self.moe, &unfused) {
                (Some(_), ..) => ("latent attention", "mla"),
                (_, Some(_), _) => ("experts", "moe"),
                (.., Some(reason)) => (reason.as_str(), "attention"),
                _ => {
                    let exchange = layout.context_exchange.unwrap_or(ContextExchange::Ring);
                    return Ok(Some(exchange));
                }
            };
            let error = LayoutError::HybridContext {
                setting: what.into(),
                expected:
                    "fused attention of heads with keys and values of their own, and no experts"
                        .into(),
            };
            return Err(refused(&format!("blocks.0.{part}"), error.to_string()));
        }
        if self.mla.is_some() {
            let exchange = MultiLatentAttentionConfig::context_exchange(layout);
            return exchange.map_err(|message| refused("blocks.0.mla", message));
        }
        let width = self.width_of_heads();
        let heads = Heads {
            heads: self.heads / layout.tensor,
            groups: (self.groups() / layout.tensor).max(1),
            width,
        };
        let problem = ExchangeProblem::of_layout(layout, heads, self.context, 2);
        let fused = self.unfused_attention().is_none();
        let resolved = problem.resolve(layout.context_exchange, fused);
        let resolved = resolved.map_err(|message| refused("blocks.0.attention", message));
        resolved.map(Some)
    }

    /// Builds the pipeline stages. If the builder [enables FP8](burn_megatron::nn::ModelBuilder::with_fp8), the
    /// attention projections, the MLP layers and the experts are computed in FP8. The first and last
    /// [`first_last_bf16`](burn_megatron::nn::fp8::Fp8Config::first_last_bf16) blocks of the model are not.
    fn build(&self, stages: &StageBuilder) -> Result<Transformer, BuildError> {
        Transformer::with_layers(self, |number| self.layer(number), stages)
    }

    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        self.check(layout.tensor, layout.sequence_parallel)?;
        self.context_exchange(layout)?;
        match &self.moe {
            Some(moe) => moe.check(self, layout),
            None => check_without_experts(layout),
        }
    }

    fn check_kernels(
        &self,
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<KernelSelection, KernelChoiceError> {
        let mut chosen = KernelSelection::new(choices, device, dtype)?;
        if let Some(reason) = self.unfused_attention() {
            chosen.keep_unfused(Operation::Attention, reason)?;
        }
        Ok(chosen)
    }

    fn describe(&self) -> String {
        let Self {
            layers,
            hidden,
            heads,
            context,
            ..
        } = self;
        let [layers, heads] = [(layers, "layer"), (heads, "head")].map(|(number, noun)| {
            let plural = if *number == 1 { "" } else { "s" };
            format!("{number} {noun}{plural}")
        });
        format!("{layers}, hidden {hidden}, {heads}, context {context}")
    }

    fn local_logits(&self, layout: &ParallelConfig) -> usize {
        let tensor = layout.tensor;
        let vocabulary = Vocabulary::padded(self.vocabulary, self.vocabulary_divisible_by, tensor);
        vocabulary.padded / tensor
    }

    /// Returns the size of the RoPE tables in bytes: two f32 values per position and pair of features. Returns 0 for
    /// learned positions.
    fn table_bytes(&self) -> u128 {
        let width = self.width_of_heads();
        let tables = [self.rope(width), self.local_rope(width)];
        let bytes = |table: &RopeConfig| 2 * 4 * table.rows() as u128 * (table.width / 2) as u128;
        tables.iter().flatten().map(bytes).sum()
    }

    fn rounding_sizes(&self) -> RoundingSizes {
        let (head, mlp) = (self.width_of_heads(), self.mlp_width());
        let value = self.mla.as_ref().map_or(head, |mla| mla.value_width);
        RoundingSizes {
            longest_sum: mlp.max(self.vocabulary),
            split_widths: vec![head * self.heads, value * self.groups(), mlp],
            kv_groups: self.groups(),
            experts: self.moe.is_some(),
            latents: self.mla.is_some(),
            ..RoundingSizes::default()
        }
    }

    /// Compares two configurations. Settings that affect only training or the parallel layout are ignored: dropout,
    /// initialization, loss terms and the padding of the vocabulary. `context` is compared only with learned positions.
    /// A missing setting is equal to its default value.
    fn differences(&self, other: &Self) -> Vec<ConfigDifference> {
        compare_settings(&plain(self), &plain(other))
    }
}
