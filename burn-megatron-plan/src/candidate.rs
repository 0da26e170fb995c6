//! A candidate of a search: a parallel layout and the other settings that determine the cost of a training step.

use std::fmt;

use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::{ParallelConfig, ZeroStage};

use super::Recompute;

/// A candidate of a search: a parallel layout and the other settings that determine the cost of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The parallel layout, including the size of its data axis.
    pub layout: ParallelConfig,
    /// The number of samples in a micro-batch.
    pub micro_batch: usize,
    /// The number of micro-batches that a data-parallel replica computes in a step.
    pub micro_batches: usize,
    /// The kind of activation recomputation.
    pub recompute: Recompute,
    /// The share of the optimizer state that is offloaded to the host, from 0 to 1.
    pub offload: f64,
}

impl Candidate {
    /// Returns the data-parallel settings of the candidate: the `given` settings with the sharding of the layout. With
    /// ZeRO-1 and ZeRO-2, parameters are gathered during the next forward.
    pub fn sharing(&self, given: &DataParallelConfig) -> DataParallelConfig {
        let stage = self.layout.zero_stage;
        let gathers = matches!(stage, ZeroStage::Optimizer | ZeroStage::Gradients);
        let shards = self.layout.hsdp.unwrap_or(self.layout.data_parallel_size()) > 1;
        DataParallelConfig {
            zero_stage: stage,
            hsdp: self.layout.hsdp,
            hierarchical_reduce: given.hierarchical_reduce && stage == ZeroStage::Replicated,
            overlap_param_gather: gathers && shards,
            reduce_in_16_bits: given.reduce_in_16_bits && stage != ZeroStage::Replicated && shards,
            keep_gathered: given.keep_gathered && stage == ZeroStage::Parameters,
            ..given.clone()
        }
    }
}

/// Formats a candidate as text, for example `tp4-pp8-dp2-sp/interleaved/v5 ZeRO-1 mb 1`.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = &self.layout;
        let mut sizes = vec![];
        let mut axis = |name: &str, size: usize| {
            if size > 1 {
                sizes.push(format!("{name}{size}"));
            }
        };
        axis("tp", layout.tensor);
        axis("cp", layout.context);
        axis("pp", layout.pipeline);
        axis("ep", layout.expert);
        if layout.expert_tensor_size() != layout.tensor {
            sizes.push(format!("etp{}", layout.expert_tensor_size()));
        }
        sizes.push(format!("dp{}", layout.data_size()));
        write!(f, "{}", sizes.join("-"))?;
        if layout.sequence_parallel {
            write!(f, "-sp")?;
        }
        if let Some(method) = layout.tp_comm_overlap {
            write!(f, "-tp{method}")?;
        }
        if let Some(splits) = layout.tp_comm_overlap_num_splits {
            write!(f, "{splits}")?;
        }
        if layout.overlap_moe_expert_parallel_comm {
            write!(f, "-epoverlap")?;
        }
        if let Some(schedule) = &layout.schedule {
            write!(f, "/{schedule}")?;
        }
        if let Some(stages) = layout.virtual_stages {
            write!(f, "/v{stages}")?;
        }
        if layout.zero_stage != ZeroStage::Replicated {
            write!(f, " ZeRO-{}", layout.zero_stage)?;
        }
        if let Some(ranks) = layout.hsdp {
            write!(f, " hsdp {ranks}")?;
        }
        write!(f, " mb {}", self.micro_batch)?;
        if self.recompute != Recompute::None {
            write!(f, " recompute {}", self.recompute.name())?;
        }
        if self.offload > 0.0 {
            write!(f, " offload {}", self.offload)?;
        }
        Ok(())
    }
}
