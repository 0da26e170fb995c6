//! Settings of data parallelism: sharding, precision, buckets and overlap.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::{DataParallelConfigError, OffloadError};
use super::precision::{Moments, Precision};
use crate::mesh::{ParallelConfig, ZeroStage};

/// Settings of a [`DistributedDataParallel`](super::DistributedDataParallel).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallelConfig {
    /// The ZeRO stage, which selects the sharded state. 0: nothing is sharded. 1: the optimizer state is sharded. 2:
    /// gradients are sharded, too. 3: parameters are sharded, too. See Rajbhandari et al. 2020 (arXiv:1910.02054).
    #[schemars(extend("flag" = "zero-stage", "resume" = "order_of_sums"))]
    pub zero_stage: ZeroStage,
    /// Hybrid sharding (HSDP): the number of ranks in a shard group. A shard group consists of consecutive ranks of the
    /// data axis. The shard groups are replicas of each other. `None`: all ranks are in one shard group.
    #[schemars(extend("flag" = "hsdp", "resume" = "order_of_sums", "needs" = "zero_stage > 0"))]
    pub hsdp: Option<usize>,
    /// Whether replicated gradients are reduced hierarchically: a reduce-scatter within each node, an all-reduce
    /// between nodes, and an all-gather within each node. Requires [`ranks_per_node`](ParallelConfig::ranks_per_node).
    /// Each node must have the same number of ranks of the data axis. If false, one all-reduce over all ranks reduces
    /// the gradients.
    #[schemars(extend("resume" = "order_of_sums", "needs" = "zero_stage = 0"))]
    pub hierarchical_reduce: bool,
    /// The dtype in which the model computes.
    #[schemars(extend("flag" = "precision"))]
    pub precision: Precision,
    /// The number of elements at which a gradient bucket is full. The default is 40 million or 1 million per rank,
    /// whichever is larger.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub bucket_size: Option<usize>,
    /// Whether bucket sizes are padded to multiples of 65,536 elements, for full bandwidth on large networks.
    #[schemars(extend("resume" = "order_of_sums"))]
    pub pad_buckets: bool,
    /// Whether a bucket is reduced as soon as all of its gradients are final, while the backward continues. If false,
    /// ZeRO stages 0 and 1 reduce the buckets after the backward. ZeRO stages 2 and 3 then reduce each full bucket
    /// immediately and wait for the result, so that the bucket can be freed.
    #[schemars(extend("resume" = "may_differ"))]
    pub overlap_grad_reduce: bool,
    /// Whether the all-gather of the updated parameters overlaps with the next forward. The forward waits for each
    /// bucket when it first uses the bucket.
    #[schemars(extend("resume" = "may_differ", "needs" = "zero_stage = 1 or zero_stage = 2"))]
    pub overlap_param_gather: bool,
    /// Whether the weights of FP8 layers are stored in FP8, instead of the dtype of the model. Weights with a
    /// per-tensor scale are also gathered in FP8. Weights with block scales are gathered in the dtype of the model, one
    /// bucket at a time, and quantized on every rank. Master weights are f32 and sharded. The weights of experts are
    /// not stored in FP8.
    #[schemars(extend("resume" = "may_differ", "follows" = "fp8.recipe set"))]
    pub fp8_param_gather: bool,
    /// Whether gradients are sent in the 16-bit dtype of the model. They are still summed in f32.
    #[schemars(extend("needs" = "zero_stage > 0", "follows" = "precision = bf16 or precision = f16"))]
    pub reduce_in_16_bits: bool,
    /// Whether parameters stay unsharded between forward and backward. This uses more memory and saves one all-gather
    /// per FSDP unit (FSDP: `reshard_after_forward = false`).
    #[schemars(extend("resume" = "may_differ", "needs" = "zero_stage = 3"))]
    pub keep_gathered: bool,
    /// The dtype of the optimizer's moments.
    pub moments: Moments,
    /// Whether the gradients of each bucket are checked before the bucket is reduced. A gradient that is not finite is
    /// then reported with its parameter and rank.
    #[schemars(extend("resume" = "may_differ"))]
    pub check_gradients: bool,
    /// The maximum gradient norm of a bucket on one rank. A bucket whose norm is larger is treated as not finite.
    pub gradient_limit: Option<f64>,
    /// Whether parameters and gradients keep their memory addresses from step to step, as CUDA graphs require. Gradient
    /// buffers are then not freed, but filled with zeros before the first micro-batch. Gathered parameters are copied
    /// to their static address. Requires `zero_stage` 0 to 2. This field is not serialized. In a recipe, the setting
    /// `cuda_graph` determines it.
    #[serde(skip)]
    pub static_buffers: bool,
    /// The number of optimizer state tensors per parameter, from which the planned memory is computed. It is 2 for
    /// AdamW. This field is not serialized. In a recipe, the optimizer determines it.
    #[serde(skip, default = "adam_moments")]
    pub state_tensors: u8,
    /// Patterns of parameter paths. Parameters whose path matches a pattern are frozen. The syntax is the same as in a
    /// [parameter group](crate::optim::ParameterGroup). This field is not serialized. In a recipe, it is set in
    /// `[train]`.
    #[serde(skip)]
    pub freeze: Vec<String>,
    /// The training state that is stored in host memory. This field is not serialized. In a recipe, it is set in
    /// `[memory.offload]`.
    #[serde(skip)]
    pub offload: OffloadConfig,
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        Self {
            zero_stage: ZeroStage::Replicated,
            hsdp: None,
            hierarchical_reduce: false,
            precision: Precision::F32,
            bucket_size: None,
            pad_buckets: false,
            overlap_grad_reduce: true,
            overlap_param_gather: false,
            fp8_param_gather: false,
            reduce_in_16_bits: false,
            keep_gathered: false,
            moments: Moments::F32,
            check_gradients: true,
            gradient_limit: None,
            static_buffers: false,
            state_tensors: adam_moments(),
            freeze: vec![],
            offload: OffloadConfig::default(),
        }
    }
}

/// Returns the number of moments of Adam.
fn adam_moments() -> u8 {
    2
}

/// Settings of offloading: the training state that is stored in host memory instead of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadConfig {
    /// The fraction of the bytes of the optimizer state that is stored in host memory, from 0 to 1. See
    /// [`OffloadPlan`](super::OffloadPlan). A fraction above 0 requires the fused AdamW.
    pub optimizer: f64,
}

impl OffloadConfig {
    /// Checks the offload settings. `fp8_param_gather` is the value of [`DataParallelConfig::fp8_param_gather`].
    ///
    /// # Errors
    ///
    /// [`OffloadError`] for the first invalid setting.
    pub fn check(&self, fp8_param_gather: bool) -> Result<(), OffloadError> {
        let fraction = self.optimizer;
        if !(0.0..=1.0).contains(&fraction) {
            return Err(OffloadError::Fraction(fraction));
        }
        if fraction > 0.0 && fp8_param_gather {
            return Err(OffloadError::Fp8(fraction));
        }
        Ok(())
    }
}

/// The time at which sharded parameters are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterGather {
    /// Parameters are never gathered, because every rank has all parameters.
    Never,
    /// Parameters are gathered after the optimizer step.
    AfterStep,
    /// Parameters are gathered during the next forward. The forward waits for each bucket when it first uses the
    /// bucket.
    DuringForward,
    /// Each FSDP unit is gathered while the previous unit is used, in the forward and again in the backward.
    BeforeUse,
    /// Each FSDP unit is gathered while the previous unit is used in the forward. The gathered parameters are kept for
    /// the backward.
    BeforeForward,
}

impl DataParallelConfig {
    /// Returns the time at which sharded parameters are gathered.
    pub fn gathers(&self) -> ParameterGather {
        match self.zero_stage {
            ZeroStage::Replicated => ParameterGather::Never,
            ZeroStage::Parameters if self.keep_gathered => ParameterGather::BeforeForward,
            ZeroStage::Parameters => ParameterGather::BeforeUse,
            _ if self.overlap_param_gather => ParameterGather::DuringForward,
            _ => ParameterGather::AfterStep,
        }
    }

    /// Returns the name of a setting that has no effect because each shard group has a single rank. Returns `None` if
    /// there is no such setting.
    pub fn unused_sharding(&self, ranks: usize) -> Option<&'static str> {
        match (self.shard_ranks(ranks), self.gathers()) {
            (1, ParameterGather::DuringForward) => Some("overlap_param_gather"),
            (1, _) => self.reduce_in_16_bits.then_some("reduce_in_16_bits"),
            _ => None,
        }
    }

    /// Returns these settings with the [`zero_stage`](ParallelConfig::zero_stage) and the
    /// [`hsdp`](ParallelConfig::hsdp) of the layout filled in. If both these settings and the layout set a value, the
    /// two values must be equal.
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError::Contradiction`] if these settings and the layout have different values.
    pub fn in_layout(&self, layout: &ParallelConfig) -> Result<Self, DataParallelConfigError> {
        let contradiction = |name, own: String, layout: String| {
            Err(DataParallelConfigError::Contradiction { name, own, layout })
        };
        let zero_stage = match (self.zero_stage, layout.zero_stage) {
            (own, ZeroStage::Replicated) => own,
            (ZeroStage::Replicated, stage) => stage,
            (own, stage) if own == stage => own,
            (own, stage) => {
                return contradiction("zero_stage", own.to_string(), stage.to_string());
            }
        };
        let hsdp = match (self.hsdp, layout.hsdp) {
            (Some(own), Some(ranks)) if own != ranks => {
                return contradiction("hsdp", own.to_string(), ranks.to_string());
            }
            (own, ranks) => own.or(ranks),
        };
        Ok(Self {
            zero_stage,
            hsdp,
            ..self.clone()
        })
    }

    /// Checks the settings for a data axis of `ranks` ranks.
    ///
    /// ```
    /// use burn_megatron::data_parallel::{DataParallelConfig, ParameterGather, ZeroStage};
    ///
    /// let config = DataParallelConfig {
    ///     zero_stage: ZeroStage::Parameters,
    ///     hsdp: Some(2),
    ///     ..DataParallelConfig::default()
    /// };
    /// config.check(4)?;
    /// assert_eq!(config.shard_ranks(4), 2);
    /// assert_eq!(config.gathers(), ParameterGather::BeforeUse);
    /// // Shard groups of 2 ranks do not divide 3 ranks.
    /// assert!(config.check(3).is_err());
    /// # Ok::<(), burn_megatron::data_parallel::DataParallelConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError`] for the first invalid setting.
    pub fn check(&self, ranks: usize) -> Result<(), DataParallelConfigError> {
        let stage = self.zero_stage;
        let requires = |name, expected| {
            Err(DataParallelConfigError::RequiresZeroStage {
                name,
                expected,
                stage,
            })
        };
        if self.hsdp.is_some() && stage == ZeroStage::Replicated {
            return requires("hsdp", "1, 2 or 3");
        }
        self.check_hsdp(ranks)?;
        if self.hierarchical_reduce && stage != ZeroStage::Replicated {
            return Err(DataParallelConfigError::HierarchicalShards { stage });
        }
        if self.overlap_param_gather
            && !matches!(stage, ZeroStage::Optimizer | ZeroStage::Gradients)
        {
            return requires("overlap_param_gather", "1 or 2");
        }
        if self.keep_gathered && stage != ZeroStage::Parameters {
            return requires("keep_gathered", "3");
        }
        if self.fp8_param_gather {
            self.check_fp8_param_gather(ranks)?;
        }
        self.offload.check(self.fp8_param_gather)?;
        if self.reduce_in_16_bits && matches!(self.precision, Precision::F64 | Precision::F32) {
            return Err(DataParallelConfigError::NotHalfPrecision(self.precision));
        }
        if self.reduce_in_16_bits && stage == ZeroStage::Replicated {
            return requires("reduce_in_16_bits", "1, 2 or 3");
        }
        if self.bucket_size == Some(0) {
            let (name, value) = ("bucket_size", 0.0);
            return Err(DataParallelConfigError::NotPositive { name, value });
        }
        match self.gradient_limit {
            Some(value) if value.is_nan() || value <= 0.0 => {
                let name = "gradient_limit";
                Err(DataParallelConfigError::NotPositive { name, value })
            }
            _ => Ok(()),
        }
    }

    /// Checks that shard groups divide a data-parallel group of `ranks` ranks.
    pub(super) fn check_hsdp(&self, ranks: usize) -> Result<(), DataParallelConfigError> {
        let Some(hsdp) = self.hsdp.filter(|n| *n == 0 || !ranks.is_multiple_of(*n)) else {
            return Ok(());
        };
        let divisors: Vec<_> = (1..=ranks)
            .filter(|n| ranks.is_multiple_of(*n))
            .map(|n| n.to_string())
            .collect();
        Err(DataParallelConfigError::Hsdp {
            hsdp,
            ranks,
            divisors: divisors.join(", "),
        })
    }

    fn check_fp8_param_gather(&self, ranks: usize) -> Result<(), DataParallelConfigError> {
        let hsdp = self.hsdp;
        match (self.zero_stage, self.shard_ranks(ranks)) {
            (stage @ (ZeroStage::Replicated | ZeroStage::Parameters), _) => {
                Err(DataParallelConfigError::RequiresZeroStage {
                    name: "fp8_param_gather",
                    expected: "1 or 2",
                    stage,
                })
            }
            (_, 1) => Err(DataParallelConfigError::NothingToGather { ranks, hsdp }),
            _ => Ok(()),
        }
    }

    /// Returns the number of ranks in a shard group, for a data axis of `ranks` ranks. It is 1 if nothing is
    /// sharded.
    pub fn shard_ranks(&self, ranks: usize) -> usize {
        match self.zero_stage {
            ZeroStage::Replicated => 1,
            _ => self.hsdp.unwrap_or(ranks),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn message(config: &DataParallelConfig, ranks: usize) -> String {
        config.check(ranks).unwrap_err().to_string()
    }

    fn stage(number: u8) -> DataParallelConfig {
        DataParallelConfig {
            zero_stage: ZeroStage::try_from(number).unwrap(),
            ..DataParallelConfig::default()
        }
    }

    #[test]
    fn hsdp_must_divide_the_axis() {
        let config = DataParallelConfig {
            hsdp: Some(3),
            ..stage(2)
        };
        assert_snapshot!(
            message(&config, 4),
            @"invalid hsdp = 3: expected a divisor of the 4 ranks of the data axis (1, 2, 4)"
        );
        assert_eq!(config.check(6), Ok(()));
        for hsdp in [1, 2, 4] {
            let config = DataParallelConfig {
                hsdp: Some(hsdp),
                ..stage(3)
            };
            assert_eq!((config.check(4), config.shard_ranks(4)), (Ok(()), hsdp));
        }
    }

    #[test]
    fn the_layout_says_what_is_sharded() {
        let layout = ParallelConfig::new()
            .with_zero_stage(ZeroStage::Gradients)
            .with_hsdp(2);
        let own = DataParallelConfig {
            pad_buckets: true,
            ..stage(0)
        };
        let both = DataParallelConfig {
            zero_stage: ZeroStage::Gradients,
            hsdp: Some(2),
            ..own.clone()
        };
        assert_eq!(own.in_layout(&layout), Ok(both.clone()));
        assert_eq!(both.in_layout(&layout), Ok(both.clone()));
        assert_eq!(both.in_layout(&ParallelConfig::new()), Ok(both.clone()));
        let message = |config: &DataParallelConfig| {
            let error = config.in_layout(&layout).unwrap_err();
            error.to_string()
        };
        assert_snapshot!(
            message(&stage(1)),
            @"zero_stage = 1, but zero_stage = 2 in the layout: set it in one place"
        );
        let other = DataParallelConfig {
            hsdp: Some(4),
            ..both
        };
        assert_snapshot!(
            message(&other),
            @"hsdp = 4, but hsdp = 2 in the layout: set it in one place"
        );
    }

    #[test]
    fn settings_without_effect_are_refused() {
        let hybrid = DataParallelConfig {
            hsdp: Some(2),
            ..stage(0)
        };
        assert_snapshot!(
            message(&hybrid, 4),
            @"hsdp requires zero_stage = 1, 2 or 3, but zero_stage = 0; change the stage, or remove hsdp"
        );
        let narrow = |number, precision| DataParallelConfig {
            reduce_in_16_bits: true,
            precision,
            ..stage(number)
        };
        assert_snapshot!(
            message(&narrow(0, Precision::Bf16), 4),
            @"reduce_in_16_bits requires zero_stage = 1, 2 or 3, but zero_stage = 0; change the stage, or remove \
              reduce_in_16_bits"
        );
        assert_snapshot!(
            message(&narrow(1, Precision::F32), 4),
            @"reduce_in_16_bits requires precision = bf16 or f16, but precision = f32; change the precision, or remove \
              reduce_in_16_bits"
        );
        assert_eq!(narrow(1, Precision::F16).check(4), Ok(()));
        let in_8_bits = |number, hsdp| DataParallelConfig {
            fp8_param_gather: true,
            hsdp,
            ..stage(number)
        };
        assert_snapshot!(
            message(&in_8_bits(0, None), 4),
            @"fp8_param_gather requires zero_stage = 1 or 2, but zero_stage = 0; change the stage, or remove \
              fp8_param_gather"
        );
        assert_snapshot!(
            message(&in_8_bits(3, None), 4),
            @"fp8_param_gather requires zero_stage = 1 or 2, but zero_stage = 3; change the stage, or remove \
              fp8_param_gather"
        );
        for (config, ranks, end) in [
            (
                in_8_bits(1, None),
                1,
                "the data axis has 1 ranks and hsdp = 1",
            ),
            (
                in_8_bits(2, Some(1)),
                4,
                "the data axis has 4 ranks and hsdp = 1",
            ),
        ] {
            let message = message(&config, ranks);
            assert!(message.contains(end), "{message}");
        }
        assert_eq!(in_8_bits(2, Some(2)).check(4), Ok(()));
        for number in [0, 1, 2] {
            let keeping = DataParallelConfig {
                keep_gathered: true,
                ..stage(number)
            };
            let start = "keep_gathered requires zero_stage = 3, but zero_stage = ";
            assert!(message(&keeping, 4).starts_with(start));
        }
        for number in [0, 3] {
            let ahead = DataParallelConfig {
                overlap_param_gather: true,
                ..stage(number)
            };
            let start = "overlap_param_gather requires zero_stage = 1 or 2, but zero_stage = ";
            assert!(message(&ahead, 4).starts_with(start));
        }
    }
}
