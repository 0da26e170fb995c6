//! Formulas for the memory of a rank: the training state for each ZeRO stage, and the activations for each pipeline
//! schedule.

use super::memory::MemoryByKind;
use super::model_profile::ModelProfile;
use super::profile::LayerProfile;
use super::{BlockProfile, GridElements, Recompute};
#[cfg(doc)]
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ZeroStage;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::pipeline::schedule::{ActionKind, Schedule};

/// The share of device memory that the allocator cannot use because of fragmentation.
const SLACK: f64 = 0.08;

/// Adds the memory that the allocator wastes. It is 8 % of the resulting total memory.
pub fn with_slack(memory: MemoryByKind) -> MemoryByKind {
    let slack = memory.total() as f64 * SLACK / (1.0 - SLACK);
    MemoryByKind {
        slack: slack as u64,
        ..memory
    }
}

/// The number of bytes of training state per parameter element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// Bytes of a parameter element in the dtype of the model.
    pub parameter: u64,
    /// Bytes of a gradient element.
    pub gradient: u64,
    /// Bytes of the optimizer state per element: the moments, and the master weight if it is a separate copy.
    pub optimizer: u64,
}

/// Returns the memory of the training state of `elements` parameter elements, sharded over `shards` ranks. With 16-bit
/// parameters and `d` shards, ZeRO-0 to ZeRO-3 need `18`, `6 + 12 / d`, `2 + 16 / d` and `18 / d` bytes per parameter.
/// See Rajbhandari et al. 2020, arXiv:1910.02054.
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

/// Returns the number of bytes that a layer keeps in device memory for its backward.
///
/// With selective recomputation, the outputs of norms and activation functions are not kept. With full recomputation,
/// only the input of the layer is kept. If the input is offloaded to the host, nothing is kept.
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

/// Returns the size of the input of a layer in bytes. The input is the first saved tensor of the layer.
pub fn input_bytes(layer: &LayerProfile) -> u64 {
    layer.saved.first().map_or(0, |input| input.bytes)
}

/// Returns the size in bytes of the largest layer input, which may be in transfer to or from the host. Returns 0
/// without activation offload.
fn transferred_bytes(model: &ModelProfile, recompute: Recompute) -> u64 {
    let inputs = model.kinds.iter().map(|block| input_bytes(&block.layer));
    match recompute {
        Recompute::FullOffloaded => inputs.max().unwrap_or(0),
        _ => 0,
    }
}

/// Returns the number of activation bytes of a micro-batch that are on the host between its forward and its backward in
/// a pipeline stage. These are all layer inputs except the last one.
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

/// Returns the peak number of activation bytes of a pipeline rank over the schedule. A micro-batch keeps `bytes[s]`
/// bytes in stage `s` from its forward to the end of its backward. Without a schedule, the rank has all stages and one
/// micro-batch in flight.
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

/// Returns the number of bytes that a micro-batch keeps in a pipeline stage from its forward to its backward.
pub fn stage_bytes(model: &ModelProfile, stage: &StageLayout, recompute: Recompute) -> u64 {
    let blocks = model.kinds.iter().zip(model.counts(stage));
    let layers = blocks.map(|(block, n)| n as u64 * kept_bytes(&block.layer, recompute));
    let end = |block: &BlockProfile, has: bool| has as u64 * block.layer.saved_bytes();
    layers.sum::<u64>()
        + transferred_bytes(model, recompute) * u64::from(!stage.layers.is_empty())
        + end(&model.embedding, stage.embedding)
        + end(&model.output, stage.loss)
}

/// Returns the memory that a rank needs in addition to its training state. `activations` is the number of activation
/// bytes of all micro-batches in flight. The result includes the temporary tensors and the recomputed tensors of one
/// layer. It also includes the input of a layer that is loaded from the host.
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

/// The numbers of parameter elements on a rank, from which the sizes of its buffers follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankElements {
    /// The number of elements of all parameters of the rank.
    pub parameters: GridElements,
    /// The number of elements of the embedding or the output layer, whichever is larger, if they are on the rank.
    /// ZeRO-3 gathers each of them as a separate unit.
    pub end: u64,
    /// The number of elements of the largest layer.
    pub layer: u64,
}

impl RankElements {
    /// Returns the numbers of elements of a rank with the given pipeline stages.
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

    /// Returns the number of elements of two adjacent ZeRO-3 units. A unit is a layer, the embedding or the output
    /// layer.
    fn units(&self) -> u64 {
        self.layer + self.layer.max(self.end)
    }

    /// Returns the number of elements of two adjacent gradient buckets of at least `size` elements.
    fn buckets(&self, size: u64) -> u64 {
        let all = self.parameters.dense + self.parameters.expert;
        (size + size.max(self.end)).min(all)
    }
}

/// Returns the number of elements of a gradient bucket: see [`DataParallelConfig::bucket_size`].
fn bucket_size(ranks: usize) -> u64 {
    40_000_000.max(1_000_000 * ranks as u64)
}

/// Returns the memory of the training state of a rank, including its
/// [buffers](burn_megatron::data_parallel::MemoryPlan::buffers). `shards` contains the numbers of ranks over which the
/// dense parameters and the expert parameters are sharded.
///
/// With ZeRO-2, the buffers hold the gradients of two adjacent buckets. With ZeRO-3, they hold the gradients and the
/// gathered parameters of two adjacent units. A unit is a layer, the embedding or the output layer.
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

    /// The number of chunks in flight of an interleaved schedule is `2 (p - 1) + (v - 1) p + 1` on the first rank, and
    /// two fewer on each following rank. With 1F1B, rank `r` has `p - r` chunks in flight.
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
