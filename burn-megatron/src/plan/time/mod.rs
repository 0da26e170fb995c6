//! The time of a step: of its layers, the pipeline, the data axis and the optimizer.
//!
//! A step is `m` micro-batches through the pipeline, timed by the [simulator](crate::pipeline::schedule::simulate) with the
//! times of each stage, then what is waited for of gradients and parameters, then the optimizer. The terms are those of an
//! alpha-beta and roofline model: an operation takes the longer of its computation and its memory traffic.

mod data;
mod layer;
mod part;

pub use data::DataExchange;
pub use layer::{ComputeTypes, DeviceRates, LayerSeconds};
pub use part::{PartSeconds, StepPart};

use super::link::sent_bytes;
use super::model_profile::ModelProfile;
use super::profile::{ExchangeKind, TrainingPass};
use super::{AxisBytes, BlockProfile, MeshLinks, Recompute};
use crate::mesh::stages::StageLayout;
use crate::mesh::{Axis, Grid};
use crate::pipeline::schedule::StageTimes;

/// The time of a step of one layout.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEstimate {
    /// Seconds of a step.
    pub seconds: f64,
    /// The same by part, of the rank that computes the longest.
    pub parts: PartSeconds,
    /// The share of the pipeline's time in which its ranks do not compute, from 0 to 1.
    pub bubble: f64,
    /// The bytes that the rank that sends the most sends.
    pub bytes: AxisBytes,
}

/// The seconds of one micro-batch in each layer of a model.
#[derive(Clone, Debug)]
pub struct ModelSeconds {
    embedding: LayerSeconds,
    kinds: Vec<LayerSeconds>,
    output: LayerSeconds,
}

/// The seconds of one micro-batch by stage and by rank.
#[derive(Clone, Debug)]
pub struct PipelineSeconds {
    /// By stage.
    pub stages: Vec<LayerSeconds>,
    /// By stage, of a message to the next.
    pub transfer: f64,
    /// By rank, the sum over its stages.
    pub ranks: Vec<LayerSeconds>,
}

impl ModelSeconds {
    /// The seconds of each layer. The embedding and the output layer are never recomputed.
    pub fn new(
        model: &ModelProfile,
        rates: &DeviceRates<'_>,
        links: &MeshLinks<'_>,
        recompute: Recompute,
    ) -> Self {
        let end = |block: &BlockProfile| rates.layer(&block.layer, links, Recompute::None);
        let kinds = model.kinds.iter();
        Self {
            embedding: end(&model.embedding),
            kinds: kinds
                .map(|block| rates.layer(&block.layer, links, recompute))
                .collect(),
            output: end(&model.output),
        }
    }

    /// The seconds of all layers of the model together.
    pub fn whole(&self, model: &ModelProfile) -> f64 {
        let whole = StageLayout {
            embedding: true,
            layers: 0..model.layers.len(),
            loss: true,
        };
        self.stage(model, &whole).total().total()
    }

    fn stage(&self, model: &ModelProfile, stage: &StageLayout) -> LayerSeconds {
        let mut sum = LayerSeconds::default();
        sum.add(&self.embedding, stage.embedding as usize);
        for (kind, n) in self.kinds.iter().zip(model.counts(stage)) {
            sum.add(kind, n);
        }
        sum.add(&self.output, stage.loss as usize);
        sum
    }

    /// The seconds of the stages of a pipeline; `rank_of` is where a stage lies.
    pub fn pipeline(
        &self,
        model: &ModelProfile,
        stages: &[StageLayout],
        ranks: usize,
        rank_of: impl Fn(usize) -> usize,
        (rates, links): (&DeviceRates<'_>, &MeshLinks<'_>),
    ) -> PipelineSeconds {
        let of_stages: Vec<_> = stages.iter().map(|s| self.stage(model, s)).collect();
        let mut of_ranks = vec![LayerSeconds::default(); ranks];
        for (stage, seconds) in of_stages.iter().enumerate() {
            of_ranks[rank_of(stage)].add(seconds, 1);
        }
        let group = links.group(Grid::Dense, Axis::Pipeline.into());
        let transfer = if ranks > 1 {
            let bytes = model.message_bytes() as f64;
            group.seconds(rates.hardware(), ExchangeKind::SendReceive, bytes)
        } else {
            0.0
        };
        PipelineSeconds {
            stages: of_stages,
            transfer,
            ranks: of_ranks,
        }
    }
}

impl PipelineSeconds {
    /// The times that the simulator takes.
    pub fn stage_times(&self) -> StageTimes {
        let of = |part: fn(&LayerSeconds) -> PartSeconds| {
            let stages = self.stages.iter();
            stages.map(|stage| part(stage).total()).collect()
        };
        StageTimes {
            forward: of(|stage| stage.forward),
            input_gradient: of(|stage| stage.input_gradient),
            weight_gradient: of(|stage| stage.weight_gradient),
            transfer: vec![self.transfer; self.stages.len()],
        }
    }

    /// The rank that computes the longest, and its seconds.
    pub fn busiest(&self) -> (usize, f64) {
        let ranks = self.ranks.iter().enumerate();
        let seconds = ranks.map(|(rank, seconds)| (rank, seconds.total().total()));
        let longest = seconds.max_by(|one, two| one.1.total_cmp(&two.1));
        longest.unwrap_or_default()
    }

    /// The seconds of all ranks.
    fn busy(&self) -> f64 {
        let ranks = self.ranks.iter();
        ranks.map(|rank| rank.total().total()).sum()
    }

    /// The step of `micro_batches` micro-batches that the pipeline needs `total` seconds for.
    pub fn step(
        &self,
        total: f64,
        micro_batches: usize,
        data: &DataExchange,
        bytes: AxisBytes,
    ) -> StepEstimate {
        let (rank, busy) = self.busiest();
        let times = micro_batches as f64;
        let mut parts = self.ranks[rank].total() * times;
        parts[StepPart::Bubble] += total - busy * times;
        parts[StepPart::Data] += data.waited;
        parts[StepPart::Optimizer] += data.optimizer;
        let ranks = self.ranks.len() as f64;
        StepEstimate {
            seconds: parts.total(),
            parts,
            bubble: (1.0 - times * self.busy() / (ranks * total)).max(0.0),
            bytes,
        }
    }
}

/// The bytes that the rank of these stages sends in the layers of a step, and to other stages.
pub fn layer_bytes(
    model: &ModelProfile,
    stages: &[&StageLayout],
    pipeline: usize,
    micro_batches: usize,
    recompute: Recompute,
) -> AxisBytes {
    let mut bytes = AxisBytes::default();
    let (forward, backward) = (TrainingPass::Forward, TrainingPass::Backward);
    let again = if recompute == Recompute::Full { 2 } else { 1 };
    for stage in stages {
        let mut add = |block: &BlockProfile, forwards: usize, n: usize| {
            let times = (n * micro_batches) as f64;
            layer::add_sent(
                &mut bytes,
                &block.layer,
                &[forward],
                forwards as f64 * times,
            );
            layer::add_sent(&mut bytes, &block.layer, &[backward], times);
        };
        add(&model.embedding, 1, stage.embedding as usize);
        add(&model.output, 1, stage.loss as usize);
        for (block, n) in model.kinds.iter().zip(model.counts(stage)) {
            add(block, again, n);
        }
    }
    if pipeline > 1 {
        let messages = stages.iter().map(|stage| {
            let (forward, backward) = (!stage.loss as usize, !stage.embedding as usize);
            forward + backward
        });
        let messages = messages.sum::<usize>() * micro_batches;
        let message = sent_bytes(
            ExchangeKind::SendReceive,
            model.message_bytes() as f64,
            pipeline,
        );
        bytes.add(Axis::Pipeline.into(), messages as f64 * message);
    }
    bytes
}
