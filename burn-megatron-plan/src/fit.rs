//! The memory of a rank by formulas: state by ZeRO stage, activations by the schedule.

use super::memory::MemoryByKind;
use super::model_profile::ModelProfile;
use super::profile::LayerProfile;
use super::{BlockProfile, GridElements, Recompute};
#[cfg(doc)]
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ZeroStage;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::pipeline::schedule::{ActionKind, Schedule};

/// The share of the memory that the allocator cannot use: 8 % of a device stay free.
const SLACK: f64 = 0.08;

/// This memory with the slack that it needs.
pub fn with_slack(memory: MemoryByKind) -> MemoryByKind {
    let slack = memory.total() as f64 * SLACK / (1.0 - SLACK);
    MemoryByKind {
        slack: slack as u64,
        ..memory
    }
}

/// Bytes of state per element: of a parameter, its gradient, and its master weight and moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// Of a parameter in the type of the model; the master weight is one more copy if they differ.
    pub parameter: u64,
    /// Of a gradient.
    pub gradient: u64,
    /// Of master weight and moments.
    pub optimizer: u64,
}

/// The state of `elements` parameters, sharded over `shards` ranks: `18`, `6 + 12 / d`, `2 + 16 / d` and `18 / d` bytes each
/// in ZeRO-0 to 3 for 16-bit parameters (Rajbhandari et al. 2020, arXiv:1910.02054).
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

/// Bytes that a layer keeps for its backward. Selective recomputation keeps no output of a norm or an activation, full only
/// the first tensor: its input, unless that is on the host.
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

/// Bytes of the input of a layer, the first tensor that it keeps.
pub fn input_bytes(layer: &LayerProfile) -> u64 {
    layer.saved.first().map_or(0, |input| input.bytes)
}

/// Bytes of the largest input of a layer that is on its way to or from the host.
fn transferred_bytes(model: &ModelProfile, recompute: Recompute) -> u64 {
    let inputs = model.kinds.iter().map(|block| input_bytes(&block.layer));
    match recompute {
        Recompute::FullOffloaded => inputs.max().unwrap_or(0),
        _ => 0,
    }
}

/// Bytes of a micro-batch that are on the host from its forward to its backward in a stage: all inputs but the last one.
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

/// The most bytes that a rank keeps at once, where a micro-batch in stage `s` keeps `bytes[s]` from its forward to the end of
/// its backward. Without a schedule there is one stage.
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

/// Bytes that a micro-batch keeps in a stage from its forward to its backward.
pub fn stage_bytes(model: &ModelProfile, stage: &StageLayout, recompute: Recompute) -> u64 {
    let blocks = model.kinds.iter().zip(model.counts(stage));
    let layers = blocks.map(|(block, n)| n as u64 * kept_bytes(&block.layer, recompute));
    let end = |block: &BlockProfile, has: bool| has as u64 * block.layer.saved_bytes();
    layers.sum::<u64>()
        + transferred_bytes(model, recompute) * u64::from(!stage.layers.is_empty())
        + end(&model.embedding, stage.embedding)
        + end(&model.output, stage.loss)
}

/// Returns the memory that a rank holds in addition to its state, with `activations` bytes of all micro-batches in
/// flight: the temporary tensors of one layer, including recomputed ones; its input too, if that comes from the host.
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

/// The elements of a rank's parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankElements {
    /// All.
    pub parameters: GridElements,
    /// The largest unit that is gathered by itself at an end of the model: the embedding or the output layer.
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

    /// Two adjacent units of which each is a layer or an end.
    fn units(&self) -> u64 {
        self.layer + self.layer.max(self.end)
    }

    /// Two adjacent buckets of at least `size` elements.
    fn buckets(&self, size: u64) -> u64 {
        let all = self.parameters.dense + self.parameters.expert;
        (size + size.max(self.end)).min(all)
    }
}

/// Elements of a gradient bucket: [`DataParallelConfig::bucket_size`].
fn bucket_size(ranks: usize) -> u64 {
    40_000_000.max(1_000_000 * ranks as u64)
}

/// The state of a rank, sharded over so many ranks of the dense and the expert grid, and its
/// [buffers](burn_megatron::data_parallel::MemoryPlan::buffers): with ZeRO-2 the gradients of two adjacent buckets, with ZeRO-3 those of
/// two adjacent units and their gathered parameters.
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

    /// Chunks in flight: `2 (p - 1) + (v - 1) p + 1` on the first rank, two fewer on each other; `p - r` for 1F1B.
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
