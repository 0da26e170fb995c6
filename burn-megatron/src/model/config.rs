//! The configuration of a model, from which every rank builds its part.

use std::fmt::Debug;

use burn::tensor::{DType, Device};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{LanguageModel, StageBuilder};
use crate::comm::ParallelContext;
use crate::kernel_selection::{KernelChoiceError, KernelChoices, KernelSelection};
use crate::mesh::{ContextExchange, LayoutError, ParallelConfig};
use crate::nn::{BuildError, ModelBuilder, ParallelModule};
use crate::pipeline::split::StageLayout;
use crate::pipeline::{stages_of, stages_on_rank};

/// The configuration of a model. It holds the sizes of the model and builds the pipeline stages of each rank. Each
/// model family has its own configuration type. A recipe sets the fields of this type in `[model]`.
///
/// Derive `Serialize` and `Deserialize` with `#[serde(default, deny_unknown_fields)]`, so that a recipe can omit
/// settings, and a misspelt setting is an error. Derive [`JsonSchema`], so that each setting has a command line flag.
/// The help text of the flag is the doc comment of the field.
pub trait ModelConfig:
    Clone
    + Debug
    + Default
    + PartialEq
    + Serialize
    + DeserializeOwned
    + JsonSchema
    + Send
    + Sync
    + 'static
{
    /// The module of the model.
    type Model: LanguageModel;

    /// Returns the number of layers, which a pipeline distributes over its stages.
    fn layers(&self) -> usize;

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the maximum sequence length, in tokens.
    fn context(&self) -> usize;

    /// Returns the kind of a layer: a number that is equal for layers with the same modules and shapes. If several
    /// pipeline ranks have layers of the same kinds, the planner runs only one of these ranks. By default each layer
    /// has its own kind.
    fn layer_kind(&self, number: usize) -> usize {
        number
    }

    /// Whether the gradients of a step depend on how its samples are divided into micro-batches. This is the case for
    /// most router losses. `verify` then runs the reference on one rank with the same micro-batches as the parallel
    /// layout. The default is `false`.
    fn depends_on_micro_batches(&self) -> bool {
        false
    }

    /// Whether the layout splits sequences over the tensor ranks. The number of tensor ranks must then divide the
    /// sequence length. By default, layouts with sequence parallelism split sequences.
    fn splits_sequences(&self, layout: &ParallelConfig) -> bool {
        layout.sequence_parallel
    }

    /// Returns the method for exchanging keys and values between the context-parallel ranks of the layout. The default
    /// `None` is for models that ignore the positions of a rank's tokens in the sequence
    /// ([`Tokens::shard`](crate::nn::Tokens::shard)). With `None`, layouts with several context ranks are invalid, even
    /// if [`check_layout`](Self::check_layout) accepts them.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the method does not support the number of attention heads.
    fn context_exchange(
        &self,
        layout: &ParallelConfig,
    ) -> Result<Option<ContextExchange>, BuildError> {
        let _ = layout;
        Ok(None)
    }

    /// Builds the modules of the pipeline stages on this rank.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the sizes are inconsistent or the layout does not support them.
    fn build(&self, stages: &StageBuilder) -> Result<Self::Model, BuildError>;

    /// Checks that the sizes are consistent and that the layout supports them, before memory is allocated. The default
    /// is for a model without parallel layers: it returns an error only for tensor, sequence, context and expert
    /// parallelism.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for the first invalid size.
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        check_context(self, layout)?;
        if layout.tensor == 1 {
            return check_without_experts(layout);
        }
        Err(without_axis("tensor", layout.tensor))
    }

    /// Checks that the requested kernels support this model and device, before memory is allocated.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError`] for the first kernel that is not supported.
    fn check_kernels(
        &self,
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<KernelSelection, KernelChoiceError> {
        KernelSelection::new(choices, device, dtype)
    }

    /// Returns a short description of the sizes of the model, which a run prints at its start.
    fn describe(&self) -> String {
        format!("{} layers, context {}", self.layers(), self.context())
    }

    /// Returns the number of logits per token on one rank. The number is used to estimate the memory of the logits
    /// before a run.
    fn local_logits(&self, layout: &ParallelConfig) -> usize {
        self.vocabulary().div_ceil(layout.tensor)
    }

    /// Returns the total size of the constant tables on each rank in bytes, such as the table of rotary position
    /// embeddings.
    fn table_bytes(&self) -> u128 {
        0
    }

    /// Returns the sizes from which `verify` computes its tolerances for dtypes with less precision than `f64`.
    fn rounding_sizes(&self) -> RoundingSizes {
        RoundingSizes {
            longest_sum: self.vocabulary(),
            ..RoundingSizes::default()
        }
    }

    /// Returns the settings that differ between this model and `other`. Settings that change neither the weights nor
    /// the computation are not included.
    fn differences(&self, other: &Self) -> Vec<ConfigDifference> {
        compare_settings(self, other)
    }

    /// Builds this rank's part of the model in the layout of `ctx`, with its parameter table. The parameters are `f32`
    /// on `device` and are initialized with seed 0. Use [`init_with`](Self::init_with) for other settings.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the sizes are inconsistent or the layout does not support them.
    fn init(
        &self,
        ctx: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Self::Model>, BuildError> {
        self.init_with(ModelBuilder::new(ctx, device))
    }

    /// Builds this rank's part of the model with the seed, the dtype and the kernels of `builder`.
    ///
    /// # Errors
    ///
    /// The errors of [`init`](Self::init).
    fn init_with(&self, builder: ModelBuilder) -> Result<ParallelModule<Self::Model>, BuildError> {
        let ctx = builder.groups();
        let layers = self.layers();
        let stages = stages_on_rank(ctx.config(), ctx.pipeline().rank(), layers);
        let stages = stages.map_err(|error| builder.error(error.to_string()))?;
        check_context(self, ctx.config())?;
        check_recompute(&builder, layers)?;
        self.init_stages(builder, &stages)
    }

    /// Builds the stages of one pipeline rank. Each stage is given by its number and its layout.
    ///
    /// # Errors
    ///
    /// The errors of [`init`](Self::init).
    fn init_stages(
        &self,
        builder: ModelBuilder,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Self::Model>, BuildError> {
        let stages = StageBuilder::new(builder, stages);
        let model = self.build(&stages)?;
        stages.finish(model)
    }
}

/// Checks the recomputation settings against the number of layers in each pipeline stage.
fn check_recompute(builder: &ModelBuilder, layers: usize) -> Result<(), BuildError> {
    let recompute = builder.recompute();
    if recompute.config().is_on() {
        let stages = stages_of(builder.groups().config(), layers);
        let stages = stages.map_err(|error| builder.error(error.to_string()))?;
        let stages: Vec<_> = stages.iter().map(|stage| stage.layers.len()).collect();
        recompute.config().check_stages(&stages)?;
    }
    Ok(())
}

/// Checks that the model supports context parallelism, if the layout has several context ranks or hybrid context
/// parallelism.
///
/// # Errors
///
/// The error of [`ModelConfig::context_exchange`], or a [`BuildError`] if `context_exchange` returns `None`.
pub fn check_context<C: ModelConfig>(
    config: &C,
    layout: &ParallelConfig,
) -> Result<(), BuildError> {
    if !layout.shares_sequences() || config.context_exchange(layout)?.is_some() {
        return Ok(());
    }
    if layout.hybrid_tokens().is_some() {
        let error = LayoutError::HybridContext {
            setting: "a model without context-parallel layers".into(),
            expected: "a model with context-parallel attention".into(),
        };
        return Err(BuildError::Config {
            path: "model".into(),
            message: error.to_string(),
        });
    }
    Err(without_axis("context", layout.context))
}

fn without_axis(axis: &str, size: usize) -> BuildError {
    BuildError::Config {
        path: "model".into(),
        message: format!(
            "invalid {axis} = {size}: expected 1, because this model has no {axis}-parallel layers"
        ),
    }
}

/// Checks that the layout does not split experts. Call it for a model without experts.
///
/// # Errors
///
/// [`BuildError::Config`] if there are several expert ranks, or if the expert-tensor size is set.
pub fn check_without_experts(layout: &ParallelConfig) -> Result<(), BuildError> {
    if layout.expert == 1 && layout.expert_tensor.is_none() {
        return Ok(());
    }
    Err(BuildError::Config {
        path: "model".into(),
        message: "invalid expert or expert_tensor: expected expert = 1 and no expert_tensor, because this model has no \
                  experts"
            .into(),
    })
}

/// The sizes of a model that determine its rounding errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundingSizes {
    /// The number of sequential operations in each layer, in forward and backward, that round their results.
    pub values_per_layer: usize,
    /// The length of the longest sum over features or classes: the maximum number of terms.
    pub longest_sum: usize,
    /// The feature sizes that are split over the tensor ranks.
    pub split_widths: Vec<usize>,
    /// The number of KV groups (grouped-query attention). If there are more tensor ranks than groups, the groups are
    /// replicated.
    pub kv_groups: usize,
    /// Whether the model has experts. A matmul of an expert can have rows from several ranks.
    pub experts: bool,
    /// Whether the model has latent attention, in which context ranks compute keys and values from the latents of all
    /// tokens.
    pub latents: bool,
}

impl Default for RoundingSizes {
    fn default() -> Self {
        Self {
            // Attention: norm, projection, rotary positions, scores, probabilities, heads, projection, dropout,
            // sum. MLP: norm, projection, activation, projection, dropout, sum.
            values_per_layer: 2 * 15,
            longest_sum: 1,
            split_widths: vec![],
            kv_groups: usize::MAX,
            experts: false,
            latents: false,
        }
    }
}

/// A setting that has different values in two model configurations.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigDifference {
    /// The key of the setting in the table `[model]` of a recipe.
    pub setting: String,
    /// The value of the setting in the first model.
    pub own: Value,
    /// The value of the setting in the second model.
    pub other: Value,
}

/// Returns the settings that have different values in two configurations.
pub fn compare_settings<C: Serialize>(own: &C, other: &C) -> Vec<ConfigDifference> {
    let (own, other) = (json!(own), json!(other));
    let settings = own.as_object().into_iter().flatten();
    let differing = settings.filter_map(|(setting, own)| {
        let other = &other[setting];
        (!alike(own, other)).then(|| ConfigDifference {
            setting: setting.clone(),
            own: own.clone(),
            other: other.clone(),
        })
    });
    differing.collect()
}

/// Whether two values are equal. Floats may differ in their last bits, as after a round trip through text.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * a.abs(),
            _ => a == b,
        },
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, value)| b.get(key).is_some_and(|other| alike(value, other));
            a.len() == b.len() && a.iter().all(same)
        }
        (a, b) => a == b,
    }
}
