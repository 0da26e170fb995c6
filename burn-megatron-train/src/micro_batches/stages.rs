//! Runs the pipeline stages of a rank on the micro-batches of a step.

use std::cell::RefCell;

use burn::tensor::{Device, Tensor};

use super::upload::{DeviceBatch, further_tokens, tokens};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::fingerprint;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::nn::{BatchPosition, LossFactor, ScheduleNodes};
use burn_megatron::pipeline::engine::{ActionEvent, ShapeKey, Stage, StageOutput};
use burn_megatron_data::Batch;

/// The losses of micro-batches (`[1]` each) and the timed actions of this rank.
pub(crate) type RunLosses = (Vec<Tensor<1>>, Vec<ActionEvent>);

/// The losses of the micro-batches of a step, without autodiff: the objectives (`[1]` each), then the parts of each.
pub(crate) struct StepLosses {
    /// Empty on ranks without the last stage.
    pub losses: Vec<Tensor<1>>,
    /// The number of loss values on a rank with the last stage.
    pub count: usize,
}

/// The stages of this rank on the micro-batches of a step, for the pipeline engine.
pub(crate) struct TrainStages<'a, M> {
    pub ddp: &'a DistributedDataParallel<M>,
    /// The device, with autodiff.
    pub device: Device,
    pub batches: &'a [Batch],
    pub step: u64,
    pub first_micro_batch: usize,
    pub in_flight: &'a [usize],
    pub last: usize,
    /// The factor that the engine applies to the losses.
    pub loss_scale: LossFactor,
    /// The state of the routers in this step.
    pub router_step: RouterStep,
    /// The sums of the parts of the losses per micro-batch, read after the run.
    pub parts: RefCell<Vec<Option<Tensor<1>>>>,
}

impl<M: LanguageModel> Stage for TrainStages<'_, M> {
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        let batch = &self.batches[micro_batch];
        [batch.rows, batch.seq]
    }

    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        let uploaded = self.upload(stage, micro_batch);
        self.forward_in((stage, micro_batch), input, uploaded, None)
    }

    fn forward_nodes(
        &self,
        stage: usize,
        micro_batch: usize,
        input: Option<Tensor<3>>,
        nodes: &ScheduleNodes,
    ) -> StageOutput {
        let uploaded = self.upload(stage, micro_batch);
        self.forward_in((stage, micro_batch), input, uploaded, Some(nodes))
    }
}

impl<M: LanguageModel> TrainStages<'_, M> {
    fn upload(&self, stage: usize, micro_batch: usize) -> DeviceBatch {
        DeviceBatch::new(&self.batches[micro_batch], stage == self.last, &self.device)
    }

    /// Runs the forward of a stage on a micro-batch, split into schedule nodes if `nodes` is given.
    pub fn forward_in(
        &self,
        (stage, micro_batch): (usize, usize),
        input: Option<Tensor<3>>,
        uploaded: DeviceBatch,
        nodes: Option<&ScheduleNodes>,
    ) -> StageOutput {
        fingerprint::note_micro_batch(micro_batch);
        let (batch, model) = (&self.batches[micro_batch], self.ddp.module());
        let before = match &batch.shard {
            // The shard holds the place of each token in the global batch.
            Some(shard) if shard.is_in_global_batch() => 0,
            _ => (self.first_micro_batch + micro_batch) * batch.rows,
        };
        self.ddp.position().set_batch(BatchPosition {
            step: self.step,
            first_sample: before as u64,
            shard: batch.shard.clone(),
        });
        let recompute = self.ddp.recompute();
        recompute.begin_micro_batch(micro_batch, self.in_flight[stage]);
        let mut tokens = tokens(batch, uploaded.ids);
        tokens.nodes = nodes.cloned();
        tokens.router_step = Some(
            self.router_step
                .of_micro_batch(batch.counted_of_rows() as usize),
        );
        if stage == self.last {
            tokens.further = further_tokens(batch, &self.device);
        }
        let hidden = model.hidden(stage, input, tokens);
        let Some(targets) = uploaded.targets else {
            return StageOutput::Activation(hidden);
        };
        let losses = model.loss_sums_of(hidden, targets, &self.loss_scale);
        let parts = losses.parts.map(|parts| {
            if parts.is_autodiff() {
                parts.inner()
            } else {
                parts
            }
        });
        self.parts.borrow_mut().push(parts);
        StageOutput::Loss(losses.objective)
    }
}
