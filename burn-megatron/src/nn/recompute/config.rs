//! Settings of activation recomputation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActivationOffload, RecomputeError, RecomputeLayers, RecomputeMethod};
use crate::glob::Glob;

/// The granularity of activation recomputation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecomputeGranularity {
    /// No recomputation. All activations are kept from the forward pass to the backward pass.
    #[default]
    None,
    /// Full recomputation of whole layers.
    Full,
    /// Selective recomputation of parts of layers, which [`modules`](RecomputeConfig::modules) and
    /// [`patterns`](RecomputeConfig::patterns) select.
    Selective,
}

/// A part of a layer whose activations can be recomputed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeModule {
    /// The output of the norm before a linear layer. The linear layer recomputes this output from the residual stream.
    Norm,
    /// The output of the activation function of an MLP. The following linear layer recomputes this output.
    Activation,
    /// The MLP. It is recomputed from its normalized input.
    Mlp,
    /// The MoE layer with its router. It is recomputed from its normalized input.
    Moe,
    /// The shared experts of an MoE layer.
    SharedExperts,
    /// Attention after the QKV projection. Unfused attention recomputes the scores. Fused attention recomputes the
    /// output and its softmax statistics.
    CoreAttention,
    /// The queries, keys and values of latent attention, which are recomputed from their latents. The output of
    /// attention and its softmax statistics are kept.
    #[serde(rename = "mla_up_proj")]
    MlaUpProjection,
}

impl RecomputeModule {
    /// All modules.
    pub const ALL: [Self; 7] = [
        Self::Norm,
        Self::Activation,
        Self::Mlp,
        Self::Moe,
        Self::SharedExperts,
        Self::CoreAttention,
        Self::MlaUpProjection,
    ];

    /// Returns the name of the part, as it is written in [`RecomputeConfig::modules`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Mlp => "mlp",
            Self::Moe => "moe",
            Self::SharedExperts => "shared_experts",
            Self::CoreAttention => "core_attention",
            Self::MlaUpProjection => "mla_up_proj",
        }
    }
}

/// Configuration of activation recomputation, which selects the activations that the backward pass recomputes instead
/// of keeping them in memory. Results are bit-identical for all settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecomputeConfig {
    /// The granularity of recomputation.
    pub granularity: RecomputeGranularity,
    /// The method that selects the layers that are recomputed with granularity [`full`](RecomputeGranularity::Full). By
    /// default all layers are recomputed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub method: Option<RecomputeMethod>,
    /// The number of layers for [`method`](Self::method), with granularity [`full`](RecomputeGranularity::Full). The
    /// default is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub layers: Option<RecomputeLayers>,
    /// The names of the parts of layers that are recomputed with granularity
    /// [`selective`](RecomputeGranularity::Selective).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("follows" = "granularity"))]
    pub modules: Vec<RecomputeModule>,
    /// Patterns for the paths of the modules that are recomputed with granularity
    /// [`selective`](RecomputeGranularity::Selective). `*` matches any text within one component of a path, and `**`
    /// matches any number of components.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("follows" = "granularity"))]
    pub patterns: Vec<String>,
    /// The number of micro-batches in flight that are not recomputed and keep all activations. Let `w` be the maximum
    /// number of micro-batches that the pipeline schedule has in flight in a stage. Out of each `w` consecutive
    /// micro-batches, the first `micro_batches` micro-batches are not recomputed. By default all micro-batches are
    /// recomputed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub micro_batches: Option<usize>,
    /// The settings of offloading the inputs of recomputed blocks to the host. This field is not serialized as part of
    /// this struct. In a recipe, these settings are in the table `[memory.offload]`.
    #[serde(skip)]
    pub offload: ActivationOffload,
}

impl RecomputeConfig {
    /// Creates settings that recompute the given parts of layers.
    ///
    /// ```
    /// use burn_megatron::nn::{RecomputeConfig, RecomputeMethod, RecomputeModule};
    ///
    /// // Keep the inputs of norms and activation functions instead of their outputs.
    /// let selective = RecomputeConfig::selective([RecomputeModule::Norm, RecomputeModule::Activation]);
    /// selective.check()?;
    /// // Recompute the first 8 layers of each stage. A stage needs at least 8 layers.
    /// let full = RecomputeConfig::full(RecomputeMethod::Block, 8);
    /// full.check_stages(&[16, 16])?;
    /// assert!(full.check_stages(&[4, 4]).is_err());
    /// # Ok::<(), burn_megatron::nn::RecomputeError>(())
    /// ```
    pub fn selective(modules: impl IntoIterator<Item = RecomputeModule>) -> Self {
        Self {
            granularity: RecomputeGranularity::Selective,
            modules: modules.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Creates settings that recompute `layers` layers of each stage.
    pub fn full(method: RecomputeMethod, layers: usize) -> Self {
        Self {
            granularity: RecomputeGranularity::Full,
            method: Some(method),
            layers: Some(RecomputeLayers::Each(layers)),
            ..Self::default()
        }
    }

    /// Returns whether any activations are recomputed.
    pub fn is_on(&self) -> bool {
        self.granularity != RecomputeGranularity::None
    }

    /// Returns whether blocks are recomputed from their own inputs.
    fn has_blocks(&self) -> bool {
        use RecomputeModule::{Activation, MlaUpProjection, Norm};
        let is_block =
            |module: &RecomputeModule| !matches!(module, Norm | Activation | MlaUpProjection);
        match self.granularity {
            RecomputeGranularity::None => false,
            RecomputeGranularity::Full => true,
            RecomputeGranularity::Selective => {
                !self.patterns.is_empty() || self.modules.iter().any(is_block)
            }
        }
    }

    /// Checks that all settings are valid and that each setting has an effect. No model is needed.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] or [`RecomputeError::Pattern`] for the first setting that is invalid or has no
    /// effect.
    pub fn check(&self) -> Result<(), RecomputeError> {
        use RecomputeGranularity::{Full, None, Selective};
        let of_full = self.method.is_some() || self.layers.is_some();
        let of_selective = !self.modules.is_empty() || !self.patterns.is_empty();
        let refuse = |name, expected: &str| Err(RecomputeError::setting(name, expected));
        if self.offload.bytes > 0 && !self.has_blocks() {
            return refuse(
                "offload of activations",
                "granularity = \"full\", or modules or patterns other than \"norm\", \"activation\" and \"mla_up_proj\", \
                 because the inputs of recomputed blocks are offloaded",
            );
        }
        if self.offload.bytes == 0 && self.offload != ActivationOffload::default() {
            return refuse("offload.prefetch", "offload.activations above 0");
        }
        match self.granularity {
            None if of_full => refuse("method or layers", "granularity = \"full\""),
            None if of_selective => refuse("modules or patterns", "granularity = \"selective\""),
            None if self.micro_batches.is_some() => {
                refuse("micro_batches", "granularity = \"full\" or \"selective\"")
            }
            Full if of_selective => refuse(
                "modules or patterns with granularity = \"full\"",
                "none, because whole layers are recomputed; or granularity = \"selective\"",
            ),
            Selective if of_full => refuse(
                "method or layers with granularity = \"selective\"",
                "neither; or granularity = \"full\"",
            ),
            Selective if !of_selective => refuse(
                "granularity = \"selective\" without modules and patterns",
                "at least one module or pattern",
            ),
            _ if self.micro_batches == Some(0) => refuse(
                "micro_batches = 0",
                "at least 1, or none to recompute every micro-batch",
            ),
            Full => match self.layers.clone().unwrap_or_default() {
                RecomputeLayers::Each(0) => refuse("layers = 0", "at least 1"),
                RecomputeLayers::PerStage(layers) if layers.iter().all(|layers| *layers == 0) => {
                    refuse("layers of 0 in every stage", "at least 1 in some stage")
                }
                _ => Ok(()),
            },
            Selective => {
                let mut modules = self.modules.clone();
                modules.sort_unstable();
                if let Some(twice) = modules.windows(2).find(|pair| pair[0] == pair[1]) {
                    let name = format!("modules with {:?} twice", twice[0].name());
                    return Err(RecomputeError::setting(name, "each once"));
                }
                self.globs().map(drop)
            }
            None => Ok(()),
        }
    }

    /// Checks that [`layers`](Self::layers) fits the pipeline stages. `stages` contains the number of layers of each
    /// stage.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] in these cases:
    ///
    /// - `layers` is larger than the number of layers of every stage;
    /// - `layers` is a list that does not have one entry per stage;
    /// - an entry of the list is larger than the number of layers of its stage.
    pub fn check_stages(&self, stages: &[usize]) -> Result<(), RecomputeError> {
        if self.granularity != RecomputeGranularity::Full {
            return Ok(());
        }
        let refuse = |name, expected| Err(RecomputeError::Setting { name, expected });
        match self.layers.clone().unwrap_or_default() {
            RecomputeLayers::Each(layers) => {
                let most = stages.iter().copied().max().unwrap_or(0);
                if layers > most {
                    return refuse(
                        format!("layers = {layers}"),
                        format!("at most {most}, the layers of the largest pipeline stage"),
                    );
                }
            }
            RecomputeLayers::PerStage(layers) if layers.len() != stages.len() => {
                return refuse(
                    format!("layers = {layers:?}"),
                    format!("{} numbers, one for each pipeline stage", stages.len()),
                );
            }
            RecomputeLayers::PerStage(layers) => {
                let mut pairs = layers.iter().zip(stages).enumerate();
                if let Some((stage, (of_stage, has))) = pairs.find(|(_, (n, has))| n > has) {
                    return refuse(
                        format!("layers = {layers:?} with {of_stage} in stage {stage}"),
                        format!("at most {has}, the layers of that stage"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks that [`micro_batches`](Self::micro_batches) fits the pipeline schedule. `stages` contains the maximum
    /// number of micro-batches in flight for each stage.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] if no stage would recompute any micro-batch.
    pub fn check_in_flight(&self, stages: &[usize]) -> Result<(), RecomputeError> {
        let most = stages.iter().copied().max().unwrap_or(0);
        match self.micro_batches {
            Some(kept) if kept >= most => Err(RecomputeError::Setting {
                name: format!("micro_batches = {kept}"),
                expected: format!(
                    "fewer than {most}, the maximum number of micro-batches that a stage has in flight, so that at \
                     least one is recomputed"
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Checks that the settings are compatible with
    /// [`overlap_moe_expert_parallel_comm`](crate::mesh::ParallelConfig::overlap_moe_expert_parallel_comm). A
    /// recomputed block cannot be divided into schedule nodes, so its exchanges cannot overlap with another
    /// micro-batch.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] if complete MoE layers are recomputed.
    pub fn check_moe_overlap(&self) -> Result<(), RecomputeError> {
        let beside = "with overlap_moe_expert_parallel_comm, which splits MoE layers into parts";
        let refuse = |name: &str, expected: &str| {
            Err(RecomputeError::setting(
                format!("{name} {beside}"),
                expected,
            ))
        };
        match self.granularity {
            RecomputeGranularity::Full => refuse(
                "granularity = \"full\"",
                "\"selective\" with modules other than \"moe\", or \"none\"",
            ),
            RecomputeGranularity::Selective if self.modules.contains(&RecomputeModule::Moe) => {
                refuse("modules with \"moe\"", "other modules")
            }
            _ => Ok(()),
        }
    }

    /// Returns the parsed patterns.
    pub(super) fn globs(&self) -> Result<Vec<Glob>, RecomputeError> {
        let glob = |pattern: &String| {
            Glob::parse(pattern).map_err(|fault| RecomputeError::Pattern {
                pattern: pattern.clone(),
                fault,
            })
        };
        self.patterns.iter().map(glob).collect()
    }

    /// Returns a one-line description of the settings, for the header of a run.
    pub fn describe(&self) -> String {
        let what = match (self.granularity, self.method.unwrap_or_default()) {
            (RecomputeGranularity::None, _) => return "nothing".into(),
            (RecomputeGranularity::Full, method) => {
                let layers = match self.layers.clone().unwrap_or_default() {
                    RecomputeLayers::Each(1) => "1 layer".into(),
                    RecomputeLayers::Each(layers) => format!("{layers} layers"),
                    RecomputeLayers::PerStage(layers) => format!("{layers:?} layers"),
                };
                match method {
                    RecomputeMethod::Uniform => format!("all layers, in runs of {layers}"),
                    RecomputeMethod::Block => format!("the first {layers} of each stage"),
                }
            }
            (RecomputeGranularity::Selective, _) => {
                let names = self.modules.iter().map(|module| module.name().to_string());
                let names: Vec<_> = names.chain(self.patterns.iter().cloned()).collect();
                names.join(", ")
            }
        };
        match self.micro_batches {
            Some(kept) => format!("{what}; except in {kept} of the micro-batches in flight"),
            None => what,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::RecomputeModule::{Activation, Norm};

    #[test]
    fn settings_without_effect_are_refused() {
        let full = RecomputeConfig::full(RecomputeMethod::Block, 2);
        let selective = RecomputeConfig::selective([Norm]);
        for valid in [&RecomputeConfig::default(), &full, &selective] {
            valid.check().unwrap();
        }
        let none = RecomputeGranularity::None;
        let cases = [
            (
                RecomputeConfig {
                    granularity: none,
                    ..full.clone()
                },
                "granularity = \"full\"",
            ),
            (
                RecomputeConfig {
                    granularity: none,
                    ..selective.clone()
                },
                "granularity = \"selective\"",
            ),
            (
                RecomputeConfig {
                    modules: vec![Norm],
                    ..full.clone()
                },
                "modules or patterns",
            ),
            (
                RecomputeConfig {
                    method: full.method,
                    ..selective.clone()
                },
                "method or layers",
            ),
            (
                RecomputeConfig::selective([]),
                "at least one module or pattern",
            ),
            (
                RecomputeConfig::selective([Norm, Activation, Norm]),
                "\"norm\" twice",
            ),
            (
                RecomputeConfig::full(RecomputeMethod::Block, 0),
                "at least 1",
            ),
            (
                RecomputeConfig {
                    micro_batches: Some(0),
                    ..full.clone()
                },
                "at least 1",
            ),
            (
                RecomputeConfig {
                    patterns: vec!["blocks.".into()],
                    ..selective
                },
                "empty component",
            ),
        ];
        for (config, wanted) in cases {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn more_layers_than_a_stage_has_are_refused() {
        let full = |layers| RecomputeConfig {
            layers: Some(layers),
            ..RecomputeConfig::full(RecomputeMethod::Block, 1)
        };
        full(RecomputeLayers::Each(3))
            .check_stages(&[2, 3])
            .unwrap();
        full(RecomputeLayers::PerStage(vec![2, 0]))
            .check_stages(&[2, 3])
            .unwrap();
        for (layers, wanted) in [
            (
                RecomputeLayers::Each(4),
                "invalid layers = 4: expected at most 3",
            ),
            (RecomputeLayers::PerStage(vec![1]), "expected 2 numbers"),
            (
                RecomputeLayers::PerStage(vec![3, 1]),
                "with 3 in stage 0: expected at most 2",
            ),
        ] {
            let error = full(layers).check_stages(&[2, 3]).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
