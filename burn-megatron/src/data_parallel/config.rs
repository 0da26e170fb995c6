//! How the ranks of the data axis share parameters, gradients and the optimizer.

use burn::tensor::{DType, FloatDType};
use serde::{Deserialize, Serialize};

use super::memory::ZeroStage;

/// Settings of a [`DistributedDataParallel`](super::DistributedDataParallel).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallelConfig {
    /// What is sharded: 0 nothing, 1 the optimizer, 2 its gradients too, 3 the parameters as well
    /// (Rajbhandari et al. 2020, arXiv:1910.02054).
    pub zero_stage: ZeroStage,
    /// Neighbours on the data axis that share one sharded copy; the other ranks hold the same
    /// (hybrid sharding). All ranks of the axis share one where not given.
    pub hsdp: Option<usize>,
    /// The type that the model computes in.
    pub precision: Precision,
    /// Elements at which a bucket of gradients is full; the larger of 40 million and 1 million per
    /// rank where not given.
    pub bucket_size: Option<usize>,
    /// Whether buckets end at multiples of 65 536 elements, which large fabrics like.
    pub pad_buckets: bool,
    /// Whether a bucket is summed as soon as its last gradient is final, while backward goes on.
    /// Without, stages 0 and 1 sum when backward is over; the others must sum in between, to free the
    /// bucket, and wait for it there.
    pub overlap_grad_reduce: bool,
    /// Whether parameters are gathered while the next forward begins: each bucket is waited for
    /// where it is first needed.
    pub overlap_param_gather: bool,
    /// Whether weights of 8-bit layers are gathered after a step as what the layers multiply with, and
    /// kept so, instead of in the type of the model. Those with one scale travel in 8 bits; those with
    /// block scales in the type of the model, one bucket at a time, and are quantised where they arrive.
    /// Masters stay in f32, a shard on each rank.
    pub fp8_param_gather: bool,
    /// Whether gradients travel in the model's 16 bits; they are added up in f32 all the same.
    pub reduce_in_16_bits: bool,
    /// Whether parameters that were gathered for a forward are kept for its backward: more memory,
    /// one collective less.
    pub keep_gathered: bool,
    /// The type of the optimizer's moments.
    pub moments: Moments,
    /// Whether each bucket is looked at before it is summed, so that a gradient that is not finite
    /// is known by its parameter and its rank.
    pub check_gradients: bool,
    /// The norm above which a bucket of this rank's gradients counts as not finite.
    pub gradient_limit: Option<f64>,
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        Self {
            zero_stage: ZeroStage::Replicated,
            hsdp: None,
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
        }
    }
}

/// The type that parameters have in forward and backward. Gradients are added up, and the
/// optimizer steps, in f32 whatever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The type that the module was built in, which is f32 for most.
    #[default]
    F32,
    /// 16 bits with the range of f32.
    Bf16,
    /// 16 bits with a small range: it needs loss scaling.
    F16,
}

impl Precision {
    /// The type of a parameter that was built in `own`.
    pub fn of(self, own: DType) -> DType {
        self.float().map_or(own, DType::from)
    }

    /// The type, where it is not the one that the module was built in.
    pub fn float(self) -> Option<FloatDType> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
        }
    }
}

/// The type of the optimizer's moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Moments {
    /// 4 bytes each.
    #[default]
    F32,
    /// 2 bytes each.
    Bf16,
}

/// Settings that do not fit each other or the mesh.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DataParallelConfigError {
    /// The sharding groups do not fill the data axis.
    #[error(
        "hsdp = {hsdp} does not cut the {ranks} ranks of the data axis into equal groups; {fits} do"
    )]
    Hsdp {
        /// Ranks of a group.
        hsdp: usize,
        /// Ranks of the axis.
        ranks: usize,
        /// What would fit.
        fits: String,
    },
    /// A setting that would do nothing.
    #[error("{name} {about}, and zero_stage = {stage} does not; {fits}")]
    Idle {
        /// The setting.
        name: &'static str,
        /// What it is about.
        about: &'static str,
        /// The stage.
        stage: ZeroStage,
        /// What would fit.
        fits: &'static str,
    },
    /// A 16-bit setting of a model that is not.
    #[error(
        "reduce_in_16_bits is about 16-bit models, and precision = f32; use bf16 or f16, or leave it out"
    )]
    Wide,
    /// Nothing is gathered, as each copy lies on one rank.
    #[error(
        "fp8_param_gather gathers weights from the ranks that share a copy, and here each has one of its \
         own: the data axis has {ranks} ranks and hsdp = {}; share copies, or leave it out",
        hsdp.unwrap_or(*ranks)
    )]
    NotShared {
        /// Ranks of the data axis.
        ranks: usize,
        /// Ranks of a sharding group, where it is given.
        hsdp: Option<usize>,
    },
    /// 8-bit weights of a model that has none.
    #[error(
        "fp8_param_gather gathers the weights of 8-bit layers, and the model has none; choose an 8-bit \
         recipe, or leave it out"
    )]
    NoFp8Weights,
    /// An 8-bit weight that is no matrix of the model.
    #[error(
        "an 8-bit layer calls its weight {path}, and the model has no matrix there; with fp8_param_gather \
         a layer must be built with the path that it has in the model"
    )]
    NoSuchWeight {
        /// The path.
        path: String,
    },
    /// A number that must be above zero.
    #[error("{name} = {value} is not right; it must be above 0")]
    NotPositive {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl DataParallelConfig {
    /// Checks the settings for a data axis of `ranks` ranks.
    ///
    /// # Errors
    ///
    /// [`DataParallelConfigError`] for the first one that does not fit.
    pub fn check(&self, ranks: usize) -> Result<(), DataParallelConfigError> {
        let stage = self.zero_stage;
        let idle = |name, about, fits| {
            Err(DataParallelConfigError::Idle {
                name,
                about,
                stage,
                fits,
            })
        };
        if let Some(hsdp) = self.hsdp {
            if stage == ZeroStage::Replicated {
                return idle(
                    "hsdp",
                    "shards within groups",
                    "use 1, 2 or 3, or leave it out",
                );
            }
            if hsdp == 0 || !ranks.is_multiple_of(hsdp) {
                let fits = (1..=ranks).filter(|n| ranks.is_multiple_of(*n));
                let fits: Vec<_> = fits.map(|n| n.to_string()).collect();
                let fits = fits.join(", ");
                return Err(DataParallelConfigError::Hsdp { hsdp, ranks, fits });
            }
        }
        if self.overlap_param_gather
            && !matches!(stage, ZeroStage::Optimizer | ZeroStage::Gradients)
        {
            return idle(
                "overlap_param_gather",
                "gathers parameters after a sharded step",
                "1 and 2 do (3 always gathers ahead)",
            );
        }
        if self.keep_gathered && stage != ZeroStage::Parameters {
            return idle(
                "keep_gathered",
                "keeps gathered parameters",
                "3 gathers them",
            );
        }
        if self.fp8_param_gather {
            self.check_fp8_param_gather(ranks)?;
        }
        if self.reduce_in_16_bits && self.precision == Precision::F32 {
            return Err(DataParallelConfigError::Wide);
        }
        if self.reduce_in_16_bits && stage == ZeroStage::Replicated {
            return idle(
                "reduce_in_16_bits",
                "scatters sums of gradients",
                "1, 2 and 3 do",
            );
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

    fn check_fp8_param_gather(&self, ranks: usize) -> Result<(), DataParallelConfigError> {
        let idle = |about, fits| {
            Err(DataParallelConfigError::Idle {
                name: "fp8_param_gather",
                about,
                stage: self.zero_stage,
                fits,
            })
        };
        let hsdp = self.hsdp;
        match (self.zero_stage, self.shard_ranks(ranks)) {
            (ZeroStage::Replicated, _) => {
                idle("gathers weights after a sharded step", "1 and 2 do")
            }
            (ZeroStage::Parameters, _) => idle(
                "keeps whole weights in 8 bits from step to step",
                "it gathers them for one block at a time, whose layers quantise them; use 1 or 2, or \
                 leave it out",
            ),
            (_, 1) => Err(DataParallelConfigError::NotShared { ranks, hsdp }),
            _ => Ok(()),
        }
    }

    /// The ranks that share one sharded copy, of `ranks` on the data axis.
    pub fn shard_ranks(&self, ranks: usize) -> usize {
        match self.zero_stage {
            ZeroStage::Replicated => 1,
            _ => self.hsdp.unwrap_or(ranks),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn groups_must_fill_the_axis() {
        let config = DataParallelConfig {
            hsdp: Some(3),
            ..stage(2)
        };
        assert_eq!(
            message(&config, 4),
            "hsdp = 3 does not cut the 4 ranks of the data axis into equal groups; 1, 2, 4 do"
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
    fn what_would_do_nothing_is_refused() {
        let hybrid = DataParallelConfig {
            hsdp: Some(2),
            ..stage(0)
        };
        assert_eq!(
            message(&hybrid, 4),
            "hsdp shards within groups, and zero_stage = 0 does not; use 1, 2 or 3, or leave it out"
        );
        let narrow = |number, precision| DataParallelConfig {
            reduce_in_16_bits: true,
            precision,
            ..stage(number)
        };
        assert_eq!(
            message(&narrow(0, Precision::Bf16), 4),
            "reduce_in_16_bits scatters sums of gradients, and zero_stage = 0 does not; 1, 2 and 3 do"
        );
        assert_eq!(
            message(&narrow(1, Precision::F32), 4),
            "reduce_in_16_bits is about 16-bit models, and precision = f32; use bf16 or f16, or \
             leave it out"
        );
        assert_eq!(narrow(1, Precision::F16).check(4), Ok(()));
        let in_8_bits = |number, hsdp| DataParallelConfig {
            fp8_param_gather: true,
            hsdp,
            ..stage(number)
        };
        assert_eq!(
            message(&in_8_bits(0, None), 4),
            "fp8_param_gather gathers weights after a sharded step, and zero_stage = 0 does not; 1 and 2 \
             do"
        );
        assert_eq!(
            message(&in_8_bits(3, None), 4),
            "fp8_param_gather keeps whole weights in 8 bits from step to step, and zero_stage = 3 does \
             not; it gathers them for one block at a time, whose layers quantise them; use 1 or 2, or \
             leave it out"
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
            let start = "keep_gathered keeps gathered parameters, and zero_stage = ";
            assert!(message(&keeping, 4).starts_with(start));
        }
        for number in [0, 3] {
            let ahead = DataParallelConfig {
                overlap_param_gather: true,
                ..stage(number)
            };
            let end = "does not; 1 and 2 do (3 always gathers ahead)";
            assert!(message(&ahead, 4).ends_with(end));
        }
    }
}
