//! Settings of activation recomputation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActivationOffload, RecomputeError, RecomputeLayers, RecomputeMethod};
use crate::glob::Glob;

/// The extent of activation recomputation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecomputeGranularity {
    /// No recomputation: all activations are kept from the forward to the backward.
    #[default]
    None,
    /// Full recomputation of whole layers.
    Full,
    /// Selective recomputation of parts of layers: [`modules`](RecomputeConfig::modules) and
    /// [`patterns`](RecomputeConfig::patterns).
    Selective,
}

/// A part of a layer that can be recomputed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeModule {
    /// The output of the norm before a linear layer. The layer recomputes it from the residual stream.
    Norm,
    /// The output of the activation of an MLP. The following layer recomputes it.
    Activation,
    /// The MLP, starting with its normalized input.
    Mlp,
    /// The mixture of experts with its router, starting with its normalized input.
    Moe,
    /// The shared experts of a mixture of experts.
    SharedExperts,
    /// Attention after the projections: the scores, or the rescaled output and its statistics.
    CoreAttention,
    /// The queries, keys and values of latent attention, starting with their latents. The output of attention and its
    /// statistics are kept.
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

    /// Returns the name of the module in [`RecomputeConfig::modules`].
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

/// Settings of activation recomputation: which activations the backward recomputes instead of keeping them. Results
/// are bit-identical for all settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecomputeConfig {
    /// The extent of recomputation.
    pub granularity: RecomputeGranularity,
    /// Which layers are recomputed with granularity [`full`](RecomputeGranularity::Full). By default all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub method: Option<RecomputeMethod>,
    /// The number of layers with granularity [`full`](RecomputeGranularity::Full). By default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub layers: Option<RecomputeLayers>,
    /// The names of the parts of layers that are recomputed, with granularity
    /// [`selective`](RecomputeGranularity::Selective).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("follows" = "granularity"))]
    pub modules: Vec<RecomputeModule>,
    /// Patterns for the paths of modules that are recomputed, with granularity
    /// [`selective`](RecomputeGranularity::Selective). `*` matches within a component, and `**` matches any
    /// components.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("follows" = "granularity"))]
    pub patterns: Vec<String>,
    /// The number of micro-batches in flight that keep all activations. Let `w` be the maximum number of
    /// micro-batches that the schedule has in flight in the stage. Of each `w` consecutive micro-batches, the first
    /// `micro_batches` are not recomputed. By default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("follows" = "granularity"))]
    pub micro_batches: Option<usize>,
    /// Which inputs of recomputed blocks are kept on the host. It is not serialized here: in a recipe it is
    /// `[memory.offload]`.
    #[serde(skip)]
    pub offload: ActivationOffload,
}

impl RecomputeConfig {
    /// Creates settings that recompute the given parts of layers.
    ///
    /// ```
    /// use burn_megatron::nn::{RecomputeConfig, RecomputeMethod, RecomputeModule};
    ///
    /// // Keep the inputs of norms and activations instead of their outputs.
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

    /// Returns whether anything is recomputed.
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

    /// Checks that all settings are valid and have an effect, without a model.
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
                "granularity = \"full\", or modules or patterns besides \"norm\", \"activation\" and \"mla_up_proj\", \
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

    /// Checks the numbers of layers against the pipeline stages. `stages` has the number of layers of each stage.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] if `layers` is larger than every stage, if its list has not one entry per stage,
    /// or if an entry is larger than its stage.
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

    /// Checks [`micro_batches`](Self::micro_batches) against the maximum number of micro-batches in flight in each
    /// stage.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Setting`] if no micro-batch of any stage would be recomputed.
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

    /// Checks the settings together with
    /// [`overlap_moe_expert_parallel_comm`](crate::mesh::ParallelConfig::overlap_moe_expert_parallel_comm). A
    /// recomputed block runs without interruption, so no exchange can overlap it.
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

    /// Returns the settings as one line, for the header of a run.
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
