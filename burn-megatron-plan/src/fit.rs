//! The memory of a rank from formulas: state by ZeRO stage, activations by schedule.

use super::memory::MemoryByKind;
use super::model_profile::ModelProfile;
use super::profile::LayerProfile;
use super::{BlockProfile, GridElements, Recompute};
#[cfg(doc)]
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ZeroStage;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::pipeline::schedule::{ActionKind, Schedule};

/// The share of device memory that the allocator cannot use: 8 % of the memory stays free.
const SLACK: f64 = 0.08;

/// Returns `memory` with the slack of the allocator added.
pub fn with_slack(memory: MemoryByKind) -> MemoryByKind {
    let slack = memory.total() as f64 * SLACK / (1.0 - SLACK);
    MemoryByKind {
        slack: slack as u64,
        ..memory
    }
}

/// Bytes of state per parameter element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// Bytes of a parameter in the type of the model. If the master weight has another type, it is a separate copy.
    pub parameter: u64,
    /// Bytes of a gradient.
    pub gradient: u64,
    /// Bytes of the master weight and the moments.
    pub optimizer: u64,
}

/// Returns the state of `elements` parameters, sharded over `shards` ranks. With 16-bit parameters, ZeRO-0 to ZeRO-3
/// need `18`, `6 + 12 / d`, `2 + 16 / d` and `18 / d` bytes per parameter (Rajbhandari et al. 2020, arXiv:1910.02054).
///
/// ```
/// use burn_megatron::data_parallel::ZeroStage;
/// use burn_megatron_plan::fit::{StateBytes, state};
///
/// let bytes = StateBytes { parameter: 2, gradient: 4, optimizer: 12 };
/// assert_eq!(state(1000, 8, ZeroStage::Replicated, bytes).total(), 18_000);
/// assert_eq!(state(1000, 8, ZeroStage::Parameters, bytes).total(), 18_000 / 8);
/// ```
pub fn state(elements: u64, shards: u64, stage: ZeroStage, bytes: StateBytes) -> MemoryByKind {
    let shard = elements.div_ceil(shards);
    let from = |first: ZeroStage| if stage >= first { shard } else { elements };
    MemoryByKind {
        parameters: from(ZeroStage::Parameters) * bytes.parameter,
        gradients: from(ZeroStage::Gradients) * bytes.gradient,
        optimizer: from(ZeroStage::Optimizer) * bytes.optimizer,
        ..MemoryByKind::default()
    }
}

/// Returns the bytes that a layer keeps for its backward.
///
/// Selective recomputation does not keep the outputs of norms and activations. Full recomputation keeps only the first
/// tensor, the input of the layer. If the input is on the host, nothing is kept.
pub fn kept_bytes(layer: &LayerProfile, recompute: Recompute) -> u64 {
    let is_cheap = |name: &str| name.ends_with("norm") || name.ends_with("activation");
    match recompute {
        Recompute::None => layer.saved_bytes(),
        Recompute::Selective => {
            let kept = layer.saved.iter().filter(|tensor| !is_cheap(&tensor.name));
            kept.map(|tensor| tensor.bytes).sum()
        }
        Recompute::Full => input_bytes(layer),
        Recompute::FullOffloaded => 0,
    }
}

/// Returns the bytes of the input of a layer, which is the first tensor that the layer keeps.
pub fn input_bytes(layer: &LayerProfile) -> u64 {
    layer.saved.first().map_or(0, |input| input.bytes)
}

/// Returns the bytes of the largest layer input, which may be in transfer to or from the host. 0 without offload.
fn transferred_bytes(model: &ModelProfile, recompute: Recompute) -> u64 {
    let inputs = model.kinds.iter().map(|block| input_bytes(&block.layer));
    match recompute {
        Recompute::FullOffloaded => inputs.max().unwrap_or(0),
        _ => 0,
    }
}

/// Returns the bytes of a micro-batch that are on the host from its forward to its backward in a stage: all inputs
/// except the last one.
pub fn host_bytes(model: &ModelProfile, stage: &StageLayout, recompute: Recompute) -> u64 {
    if recompute != Recompute::FullOffloaded {
        return 0;
    }
    let blocks = model.kinds.iter().zip(model.counts(stage));
    let inputs = blocks.map(|(block, n)| n as u64 * input_bytes(&block.layer));
    inputs
        .sum::<u64>()
        .saturating_sub(transferred_bytes(model, recompute))
}

/// Returns the peak number of bytes that a rank keeps. A micro-batch in stage `s` keeps `bytes[s]` from its forward to
/// the end of its backward. Without a schedule, all stages are on the rank and one micro-batch is in flight.
pub fn in_flight(schedule: Option<&Schedule>, rank: usize, bytes: &[u64]) -> u64 {
    let Some(schedule) = schedule else {
        return bytes.iter().sum();
    };
    let (mut now, mut peak) = (0, 0);
    for action in schedule.actions(rank) {
        match action.kind {
            kind if kind.is_forward() => now += bytes[action.stage],
            ActionKind::Backward | ActionKind::WeightGradient => now -= bytes[action.stage],
            _ => {}
        }
        peak = peak.max(now);
    }
    peak
}

/// Returns the bytes that a micro-batch keeps in a stage from its forward to its backward.
pub fn stage_bytes(model: &ModelProfile, stage: &StageLayout, recompute: Recompute) -> u64 {
    let blocks = model.kinds.iter().zip(model.counts(stage));
    let layers = blocks.map(|(block, n)| n as u64 * kept_bytes(&block.layer, recompute));
    let end = |block: &BlockProfile, has: bool| has as u64 * block.layer.saved_bytes();
    layers.sum::<u64>()
        + transferred_bytes(model, recompute) * u64::from(!stage.layers.is_empty())
        + end(&model.embedding, stage.embedding)
        + end(&model.output, stage.loss)
}

/// Returns the memory that a rank holds in addition to its state. `activations` is the number of bytes of all
/// micro-batches in flight. Temporary tensors, including recomputed tensors, count for one layer. If the input of a
/// layer comes from the host, the input is included.
pub fn working(
    model: &ModelProfile,
    recompute: Recompute,
    activations: u64,
    has_loss: bool,
) -> MemoryByKind {
    let kinds = || model.kinds.iter().map(|block| &block.layer);
    let again = kinds().map(|layer| layer.saved_bytes() - kept_bytes(layer, recompute));
    MemoryByKind {
        activations,
        logits: has_loss as u64 * model.output.layer.backward_bytes,
        transient: again.max().unwrap_or(0)
            + kinds().map(|layer| layer.backward_bytes).max().unwrap_or(0),
        ..MemoryByKind::default()
    }
}

/// The numbers of parameter elements on a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankElements {
    /// All parameters of the rank.
    pub parameters: GridElements,
    /// The larger of the embedding and the output layer, if they are on the rank. Each is gathered as a separate unit.
    pub end: u64,
    /// The largest layer.
    pub layer: u64,
}

impl RankElements {
    /// Returns the elements of a rank with these stages.
    pub fn new<'a>(
        model: &ModelProfile,
        stages: impl IntoIterator<Item = &'a StageLayout> + Clone,
    ) -> Self {
        let elements = |block: &BlockProfile| block.parameters.dense + block.parameters.expert;
        let has = |end: fn(&StageLayout) -> bool| stages.clone().into_iter().any(end);
        let ends = [
            (&model.embedding, has(|stage| stage.embedding)),
            (&model.output, has(|stage| stage.loss)),
        ];
        let ends = ends.into_iter().filter(|(_, is_here)| *is_here);
        Self {
            parameters: model.parameters(stages.clone()),
            end: ends.map(|(end, _)| elements(end)).max().unwrap_or(0),
            layer: model.kinds.iter().map(elements).max().unwrap_or(0),
        }
    }

    /// Returns the elements of two adjacent units. A unit is a layer, the embedding or the output layer.
    fn units(&self) -> u64 {
        self.layer + self.layer.max(self.end)
    }

    /// Returns the elements of two adjacent buckets of at least `size` elements.
    fn buckets(&self, size: u64) -> u64 {
        let all = self.parameters.dense + self.parameters.expert;
        (size + size.max(self.end)).min(all)
    }
}

/// Returns the elements of a gradient bucket: see [`DataParallelConfig::bucket_size`].
fn bucket_size(ranks: usize) -> u64 {
    40_000_000.max(1_000_000 * ranks as u64)
}

/// Returns the state of a rank with its [buffers](burn_megatron::data_parallel::MemoryPlan::buffers). `shards` are the
/// numbers of ranks over which the dense and the expert grid are sharded.
///
/// With ZeRO-2, the buffers hold the gradients of two adjacent buckets. With ZeRO-3, they hold the gradients and the
/// gathered parameters of two adjacent units.
pub fn sharded_state(
    elements: &RankElements,
    shards: [usize; 2],
    stage: ZeroStage,
    bytes: StateBytes,
) -> MemoryByKind {
    let buffers = match stage {
        ZeroStage::Replicated | ZeroStage::Optimizer => 0,
        ZeroStage::Gradients => bytes.gradient * elements.buckets(bucket_size(shards[0])),
        ZeroStage::Parameters => (bytes.parameter + bytes.gradient) * elements.units(),
    };
    let GridElements { dense, expert } = elements.parameters;
    let grids = [dense, expert].into_iter().zip(shards);
    let sum = grids.map(|(elements, shards)| state(elements, shards as u64, stage, bytes));
    MemoryByKind {
        buffers,
        ..sum.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::pipeline::schedule::{ScheduleConfig, ScheduleKind, generate};

    #[test]
    fn state_per_parameter_is_the_known_one() {
        let bytes = StateBytes {
            parameter: 2,
            gradient: 4,
            optimizer: 12,
        };
        let stages = [
            ZeroStage::Optimizer,
            ZeroStage::Gradients,
            ZeroStage::Parameters,
        ];
        for (stage, expected) in stages.into_iter().zip([
            [18.0, 12.0, 7.5, 6.1875],
            [18.0, 10.0, 4.0, 2.25],
            [18.0, 9.0, 2.25, 0.28125],
        ]) {
            let found = [1, 2, 8, 64].map(|d| state(6400, d, stage, bytes).total() as f64 / 6400.0);
            assert_eq!(found, expected, "{stage}");
        }
    }

    /// Chunks in flight: `2 (p - 1) + (v - 1) p + 1` on the first rank, two fewer on each following rank. On rank `r`,
    /// 1F1B has `p - r` chunks.
    #[test]
    fn micro_batches_in_flight_are_those_of_the_schedule() {
        let peaks = |kind, ranks, virtual_stages, micro_batches| {
            let config = ScheduleConfig::new(kind, ranks, micro_batches);
            let schedule = generate(&config.with_virtual_stages(virtual_stages)).unwrap();
            let bytes = vec![1; ranks * virtual_stages];
            let of_rank = |rank| in_flight(Some(&schedule), rank, &bytes);
            (0..ranks).map(of_rank).collect::<Vec<_>>()
        };
        let interleaved = ScheduleKind::Interleaved { group: None };
        assert_eq!(
            peaks(interleaved, 8, 5, 128),
            [47, 45, 43, 41, 39, 37, 35, 33]
        );
        assert_eq!(peaks(interleaved, 4, 2, 8), [11, 9, 7, 5]);
        assert_eq!(
            peaks(ScheduleKind::OneFOneB, 8, 1, 32),
            [8, 7, 6, 5, 4, 3, 2, 1]
        );
        assert_eq!(in_flight(None, 0, &[7]), 7);
    }
}
