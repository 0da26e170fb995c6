//! Estimates the time of a training step: its layers, the pipeline, data-parallel communication and the optimizer.
//!
//! The [simulator](burn_megatron::pipeline::schedule::simulate) computes the time of all micro-batches in the pipeline
//! from the times of each stage. The time to wait for gradients and parameters, and the time of the optimizer, are
//! added. Operations follow a roofline model: an operation takes its compute time or its memory time, whichever is
//! longer. Communication follows an alpha-beta model (latency plus bytes divided by bandwidth).

mod data;
mod layer;
mod part;

pub use data::{DataExchange, StateSharing};
pub use layer::{ComputeTypes, DeviceRates, LayerSeconds};
pub use part::{PartSeconds, StepPart};

use super::fit;
use super::hardware::Hardware;
use super::link::sent_bytes;
use super::model_profile::ModelProfile;
use super::profile::TrainingPass;
use super::{AxisBytes, BlockProfile, MeshLinks, Recompute};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::mesh::{Axis, Grid};
use burn_megatron::pipeline::schedule::StageTimes;

/// The estimated time of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEstimate {
    /// The time of a step, in seconds.
    pub seconds: f64,
    /// The time of each part of the step in seconds, for the rank with the longest compute time.
    pub parts: PartSeconds,
    /// The pipeline bubble: the share of time in which pipeline ranks do not compute, from 0 to 1.
    pub bubble: f64,
    /// The number of bytes that a rank sends in a step, for the rank that sends the most.
    pub bytes: AxisBytes,
}

/// The estimated time of one micro-batch in each layer of a model.
#[derive(Clone, Debug)]
pub struct ModelSeconds {
    embedding: LayerSeconds,
    kinds: Vec<LayerSeconds>,
    output: LayerSeconds,
}

/// The estimated time of one micro-batch, for each pipeline stage and for each pipeline rank.
#[derive(Clone, Debug)]
pub struct PipelineSeconds {
    /// The time of each stage.
    pub stages: Vec<LayerSeconds>,
    /// The time of a message from a stage to the next stage, in seconds.
    pub transfer: f64,
    /// The time of each pipeline rank, which is the sum over its stages.
    pub ranks: Vec<LayerSeconds>,
}

impl ModelSeconds {
    /// Estimates the time of each layer, without recomputation.
    pub fn new(model: &ModelProfile, rates: &DeviceRates<'_>, links: &MeshLinks<'_>) -> Self {
        let of = |block: &BlockProfile| rates.layer(&block.layer, links);
        Self {
            embedding: of(&model.embedding),
            kinds: model.kinds.iter().map(of).collect(),
            output: of(&model.output),
        }
    }

    /// Adds the time of recomputation to all layers except the embedding and the output layer.
    pub fn recomputed(
        &self,
        recompute: Recompute,
        model: &ModelProfile,
        hardware: &Hardware,
    ) -> Self {
        let transfer = |block: &BlockProfile| match (recompute, hardware.host) {
            (Recompute::FullOffloaded, Some(host)) => {
                fit::input_bytes(&block.layer) as f64 / host.link
            }
            _ => 0.0,
        };
        let kinds = self.kinds.iter().zip(&model.kinds);
        let kinds = kinds.map(|(seconds, block)| {
            let seconds = seconds.recomputed(recompute);
            seconds.offloaded(transfer(block))
        });
        Self {
            kinds: kinds.collect(),
            ..self.clone()
        }
    }

    /// Returns the time of all layers of the model in seconds. If the layout runs a forward together with the backward
    /// of another micro-batch, the overlap is included.
    pub fn whole(&self, model: &ModelProfile) -> f64 {
        let whole = StageLayout {
            embedding: true,
            layers: 0..model.layers.len(),
            loss: true,
        };
        self.stage(model, &whole).in_pairs().total()
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

    /// Returns the times of the stages and ranks of a pipeline. `rank_of` returns the rank of a stage.
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
    /// Returns the times of all stages in the format of the pipeline simulator.
    pub fn stage_times(&self) -> StageTimes {
        let of = |seconds: fn(&LayerSeconds) -> f64| self.stages.iter().map(seconds).collect();
        StageTimes {
            forward: of(|stage| stage.forward.total()),
            paired_forward: of(|stage| {
                let hidden = stage.hidden - stage.hidden_alone;
                (stage.forward.total() - hidden).max(0.0)
            }),
            input_gradient: of(|stage| stage.input_gradient.total() - stage.hidden_alone),
            weight_gradient: of(|stage| stage.weight_gradient.total()),
            transfer: vec![self.transfer; self.stages.len()],
        }
    }

    /// Returns the index of the rank with the longest compute time, and this time in seconds.
    pub fn busiest(&self) -> (usize, f64) {
        let ranks = self.ranks.iter().enumerate();
        let seconds = ranks.map(|(rank, seconds)| (rank, seconds.total().total()));
        let longest = seconds.max_by(|one, two| one.1.total_cmp(&two.1));
        longest.unwrap_or_default()
    }

    /// Returns the mean over the ranks.
    fn mean(&self, of: fn(&LayerSeconds) -> PartSeconds) -> PartSeconds {
        let mut sum = PartSeconds::default();
        self.ranks.iter().for_each(|rank| sum += of(rank));
        sum * (1.0 / self.ranks.len() as f64)
    }

    /// Returns the time of each part for the rank that computes the longest. If ranks share CPU cores, returns the mean
    /// over the ranks, because shared cores are never idle.
    fn least(&self, rates: &DeviceRates<'_>, of: fn(&LayerSeconds) -> PartSeconds) -> PartSeconds {
        match rates.hides() {
            true => of(&self.ranks[self.busiest().0]),
            false => self.mean(of),
        }
    }

    /// Returns the time that a step spends in its layers, for the rank that computes the longest. If ranks share CPU
    /// cores, returns the mean over the ranks.
    fn in_layers(&self, rates: &DeviceRates<'_>, micro_batches: usize) -> PartSeconds {
        let mut seconds = self.least(rates, LayerSeconds::in_pairs) * micro_batches as f64;
        seconds[StepPart::Expert] += self.alone();
        seconds
    }

    /// Returns the time for which a rank waits for communication in the first forward and the last backward. These two
    /// do not run together with another micro-batch. Returns 0 with pipeline parallelism, because the pipeline
    /// simulator includes this time.
    fn alone(&self) -> f64 {
        match &self.ranks[..] {
            [only] => only.hidden - only.hidden_alone,
            _ => 0.0,
        }
    }

    /// Returns a lower bound of the time of `micro_batches` micro-batches, in seconds. Without pipeline parallelism, it
    /// equals the time of the layers.
    pub fn bound(&self, rates: &DeviceRates<'_>, micro_batches: usize) -> f64 {
        self.in_layers(rates, micro_batches).total()
    }

    /// Returns the time of the forward and the backward of one micro-batch through all stages, in seconds. The
    /// transfers between ranks are included. Every schedule takes at least this time. [`bound`](Self::bound) does not
    /// include transfers, so this bound can be larger if there are many stages.
    pub fn path(&self, rank_of: impl Fn(usize) -> usize) -> f64 {
        let StageTimes {
            forward,
            paired_forward,
            input_gradient,
            ..
        } = self.stage_times();
        let forward = forward.iter().zip(&paired_forward);
        let forward: f64 = forward.map(|(alone, paired)| alone.min(*paired)).sum();
        let hops = (1..self.stages.len()).filter(|stage| rank_of(*stage) != rank_of(stage - 1));
        forward + input_gradient.iter().sum::<f64>() + 2.0 * hops.count() as f64 * self.transfer
    }

    /// Corrects the simulated time `total` of `micro_batches` micro-batches if the ranks share CPU cores. While a rank
    /// waits, other ranks use its share of the cores. The corrected time is the time of all computation on all cores,
    /// or the time of the longest path with a whole core per action, whichever is longer.
    pub fn on_cores(
        &self,
        total: f64,
        micro_batches: usize,
        hardware: &Hardware,
        devices: usize,
    ) -> f64 {
        match hardware.cores {
            None => total,
            Some(cores) => {
                let path = total * (cores as f64 / devices as f64).min(1.0);
                path.max(self.mean(LayerSeconds::total).total() * micro_batches as f64)
            }
        }
    }

    /// Returns the estimate of a whole training step. `total` is the time of `micro_batches` micro-batches in the
    /// pipeline, in seconds.
    pub fn step(
        &self,
        total: f64,
        micro_batches: usize,
        data: &DataExchange,
        bytes: AxisBytes,
        rates: &DeviceRates<'_>,
    ) -> StepEstimate {
        let mut parts = self.in_layers(rates, micro_batches);
        let busy = self.mean(LayerSeconds::in_pairs).total() * micro_batches as f64 + self.alone();
        parts[StepPart::Bubble] += total - parts.total();
        parts[StepPart::Data] += data.waited;
        parts[StepPart::Optimizer] += data.optimizer;
        StepEstimate {
            seconds: parts.total(),
            parts,
            bubble: (1.0 - busy / total).max(0.0),
            bytes,
        }
    }
}

/// Returns the number of bytes that a rank with the given pipeline stages sends in a step, in its layers and to other
/// stages.
pub fn layer_bytes(
    model: &ModelProfile,
    stages: &[&StageLayout],
    pipeline: usize,
    micro_batches: usize,
    recompute: Recompute,
) -> AxisBytes {
    let mut bytes = AxisBytes::default();
    let (forward, backward) = (TrainingPass::Forward, TrainingPass::Backward);
    let again = if recompute.is_full() { 2 } else { 1 };
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

#[cfg(test)]
mod tests {
    use super::super::profile::{Exchange, GroupPart, LayerProfile, Product};
    use super::*;
    use burn_megatron::mesh::{Mesh, ParallelConfig};

    fn on_cores(cores: usize) -> Hardware {
        Hardware {
            cores: Some(cores),
            ..Hardware::named("H100").unwrap()
        }
    }

    /// While a rank waits, other ranks use its share of the cores.
    #[test]
    fn a_bubble_costs_nothing_on_shared_cores() {
        let rank = |seconds| LayerSeconds {
            forward: PartSeconds::of(StepPart::Products, seconds),
            ..LayerSeconds::default()
        };
        let seconds = PipelineSeconds {
            stages: vec![],
            transfer: 0.0,
            ranks: vec![rank(1.0), rank(3.0)],
        };
        // Four micro-batches, for which a pipeline needs 14 seconds without shared cores.
        let total = |hardware: &Hardware| seconds.on_cores(14.0, 4, hardware, 2);
        assert_eq!(total(&Hardware::named("H100").unwrap()), 14.0);
        assert_eq!(total(&on_cores(2)), 14.0);
        // All computation takes longer than the longest path with one core per action.
        assert_eq!(total(&on_cores(1)), 8.0);
        let types = ComputeTypes {
            products: "bf16".into(),
            attention: "bf16".into(),
            operand_bytes: 2.0,
            parameter_bytes: 2.0,
        };
        let one = on_cores(1);
        let rates = DeviceRates::new(&one, &types).unwrap();
        assert_eq!(seconds.bound(&rates, 1), 2.0);
        let step = seconds.step(
            8.0,
            4,
            &DataExchange::default(),
            AxisBytes::default(),
            &rates,
        );
        assert_eq!((step.seconds, step.bubble), (8.0, 0.0));
    }

    /// A collective that could overlap with weight gradients does not overlap if the cores that compute also copy its
    /// messages.
    #[test]
    fn nothing_is_hidden_on_shared_cores() {
        let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2), 2).unwrap();
        let layer = LayerProfile {
            products: vec![Product {
                batch: 1,
                m: 8192,
                n: 8192,
                k: 8192,
            }],
            exchanges: vec![Exchange {
                kind: ExchangeKind::AllReduce,
                grid: Grid::Dense,
                axes: Axis::Tensor.into(),
                part: GroupPart::Whole,
                ranks: 2,
                bytes: 1 << 20,
                pass: TrainingPass::Backward,
            }],
            ..LayerProfile::default()
        };
        let types = ComputeTypes {
            products: "bf16".into(),
            attention: "bf16".into(),
            operand_bytes: 2.0,
            parameter_bytes: 2.0,
        };
        let waited = |hardware: &Hardware| {
            let rates = DeviceRates::new(hardware, &types).unwrap();
            let seconds = rates.layer(&layer, &MeshLinks::new(&mesh, hardware));
            seconds.input_gradient[StepPart::Tensor]
        };
        assert_eq!(waited(&Hardware::named("H100").unwrap()), 0.0);
        assert!(waited(&on_cores(2)) > 1e-6);
    }

    /// All-to-alls of expert parallelism overlap with the computation of the other micro-batch that runs at the same
    /// time.
    #[test]
    fn pairs_hide_the_exchanges_of_experts() {
        let types = ComputeTypes {
            products: "bf16".into(),
            attention: "bf16".into(),
            operand_bytes: 2.0,
            parameter_bytes: 2.0,
        };
        let exchange = |pass| Exchange {
            kind: ExchangeKind::AllToAll,
            grid: Grid::Expert,
            axes: Axis::Expert.into(),
            part: GroupPart::Whole,
            ranks: 2,
            bytes: 1 << 24,
            pass,
        };
        let seconds = |hardware: &Hardware, size: u64, overlap: bool| {
            let layout = ParallelConfig::new().with_data(2).with_expert(2);
            let layout = layout.with_overlap_moe_expert_parallel_comm(overlap);
            let mesh = Mesh::new(&layout, 2).unwrap();
            let layer = LayerProfile {
                products: vec![Product {
                    batch: 1,
                    m: size,
                    n: size,
                    k: size,
                }],
                exchanges: [TrainingPass::Forward, TrainingPass::Backward]
                    .map(exchange)
                    .into(),
                ..LayerProfile::default()
            };
            let rates = DeviceRates::new(hardware, &types).unwrap();
            let layer = rates.layer(&layer, &MeshLinks::new(&mesh, hardware));
            let pipeline = PipelineSeconds {
                stages: vec![layer],
                transfer: 0.0,
                ranks: vec![layer],
            };
            let total = pipeline.bound(&rates, 4);
            let step = pipeline.step(
                total,
                4,
                &DataExchange::default(),
                AxisBytes::default(),
                &rates,
            );
            assert!((step.seconds - total).abs() < 1e-12 && step.bubble < 1e-9);
            (layer, step.parts[StepPart::Expert], pipeline.stage_times())
        };
        let h100 = Hardware::named("H100").unwrap();
        let (plain, waited, times) = seconds(&h100, 8192, false);
        let exchanged = plain.total()[StepPart::Expert];
        assert!(exchanged > 0.0 && plain.hidden == 0.0);
        assert!((waited - 4.0 * exchanged).abs() < 1e-12);
        assert_eq!(times.paired_forward, times.forward);
        // The first forward and the last backward run alone. The communication of the last backward overlaps with its
        // weight gradients.
        let (pairs, waited, times) = seconds(&h100, 8192, true);
        assert!((pairs.hidden - exchanged).abs() < 1e-12);
        assert!((pairs.hidden_alone - exchanged / 2.0).abs() < 1e-12);
        assert!((waited - exchanged / 2.0).abs() < 1e-12);
        let hidden = |alone: f64, paired: f64| (alone - paired - exchanged / 2.0).abs() < 1e-12;
        assert!(hidden(times.forward[0], times.paired_forward[0]));
        assert!(hidden(
            pairs.input_gradient.total(),
            times.input_gradient[0]
        ));
        // Short matrix multiplications hide communication only for the time that they take.
        let (short, ..) = seconds(&h100, 64, true);
        let computed = short.total().total() - short.total()[StepPart::Expert];
        assert!((short.hidden - computed).abs() < 1e-15 && 0.0 < computed && computed < exchanged);
        assert_eq!(seconds(&on_cores(2), 8192, true).0.hidden, 0.0);
    }
}
