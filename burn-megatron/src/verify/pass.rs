//! Forward and backward of all micro-batches of a step, on a single stage or in a pipeline.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};

use super::observe::{elements, f64s};
use super::{Layout, RankError, StageCall, Subject, VerifyOptions};
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, ParallelContext, ReduceOp};
use crate::data_parallel::{DistributedDataParallel, Gradients};
use crate::nn::{BuildError, DropoutPosition, ParallelModule};
use crate::pipeline::engine::{DeferredWgrad, Engine, Stage, StageOutput};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::split::StageLayout;

/// The work of a rank in each step.
pub(super) struct StepPlan {
    /// The indices of the samples of this rank.
    own: Range<usize>,
    micro_batch: usize,
    sequence_parallel: bool,
    pipeline: Option<(Schedule, Vec<StageLayout>)>,
    defer_embedding_wgrad: Option<usize>,
    /// The compute type.
    dtype: DType,
}

pub(super) struct PassResult {
    /// The mean over all tokens.
    pub loss: f64,
    pub input_gradient: Vec<f64>,
    pub gradients: Gradients,
}

impl StepPlan {
    pub fn new<S: Subject>(
        subject: &S,
        layout: &Layout,
        groups: &ParallelContext,
        options: &VerifyOptions,
    ) -> Result<Self, RankError> {
        let own = layout.samples_of(groups.data().rank(), subject.samples());
        let pipeline = match layout.pipeline {
            1 => None,
            _ => {
                let schedule = layout.schedule(own.len())?;
                let stages = subject
                    .split()
                    .stages(subject.layers(), schedule.stages())?;
                Some((schedule, stages))
            }
        };
        Ok(Self {
            micro_batch: layout.micro_batch.unwrap_or(own.len()),
            own,
            sequence_parallel: layout.sequence_parallel,
            pipeline,
            defer_embedding_wgrad: options.defer_embedding_wgrad,
            dtype: subject.dtype(),
        })
    }

    pub fn build<S: Subject>(
        &self,
        subject: &S,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<S::Model>, BuildError> {
        match &self.pipeline {
            None => subject.build(groups, device, self.sequence_parallel),
            Some((schedule, layouts)) => {
                let own = schedule.stages_of(groups.pipeline().rank()).into_iter();
                let own: Vec<_> = own.map(|stage| (stage, layouts[stage].clone())).collect();
                subject.build_stages(groups, device, self.sequence_parallel, &own)
            }
        }
    }

    pub fn pass<S: Subject>(
        &self,
        subject: &S,
        ddp: &mut DistributedDataParallel<S::Model>,
        groups: &ParallelContext,
        step: usize,
    ) -> Result<PassResult, RankError> {
        let offsets = InputOffsets::new(self.dtype);
        let loss = match &self.pipeline {
            None => self.run_single_stage(subject, ddp, step, &offsets),
            Some((schedule, _)) => {
                let (device, sink) = (Device::flex(), ddp.sink());
                let engine = Engine::new(schedule, groups.pipeline(), &device, &*sink)?;
                let stages = VerifyStages {
                    plan: self,
                    subject,
                    model: ddp.module(),
                    position: ddp.position(),
                    step,
                    offsets: &offsets,
                };
                let deferred_wgrad = self.deferred_wgrad(subject, ddp)?;
                engine
                    .with_deferred_wgrad(deferred_wgrad)
                    .run(&stages)?
                    .loss
            }
        };
        let gradients = ddp.reduce(subject.tokens(step, self.own.clone()))?;
        ddp.fp8().end_step(ddp.groups())?;
        let tokens = gradients.tokens as f64;
        let (pipeline, data) = (groups.pipeline(), groups.data());
        // One pipeline rank has the loss, one the input gradient; the others have zeros.
        let loss = sum(sum(vec![loss], pipeline)?, data)?[0] / tokens;
        let [seq, hidden] = subject.input_shape();
        let own_input_gradient = sum(offsets.gradient(self.own.len() * seq * hidden), pipeline)?;
        let input_gradient = f64s(data.all_gather(Buffer::from(own_input_gradient))?);
        Ok(PassResult {
            loss,
            input_gradient: input_gradient.into_iter().map(|x| x / tokens).collect(),
            gradients,
        })
    }

    /// The weight gradient that the last stage defers, on its rank.
    fn deferred_wgrad<S: Subject>(
        &self,
        subject: &S,
        ddp: &DistributedDataParallel<S::Model>,
    ) -> Result<Option<DeferredWgrad>, RankError> {
        let Some((limit, (schedule, _))) = self.defer_embedding_wgrad.zip(self.pipeline.as_ref())
        else {
            return Ok(None);
        };
        let last = schedule.rank_of(schedule.stages() - 1);
        if ddp.groups().pipeline().rank() != last {
            return Ok(None);
        }
        let path = subject.output_weight(ddp.module());
        let index = path.and_then(|path| ddp.table().index(path));
        let index = index
            .ok_or("defer_embedding_wgrad needs `Subject::output_weight`, which returns None")?;
        Ok(Some(DeferredWgrad { index, limit }))
    }

    fn run_single_stage<S: Subject>(
        &self,
        subject: &S,
        ddp: &DistributedDataParallel<S::Model>,
        step: usize,
        offsets: &InputOffsets,
    ) -> f64 {
        let device = Device::flex().autodiff();
        let micro_batches = self.own.len() / self.micro_batch;
        let losses = (0..micro_batches).map(|micro_batch| {
            let samples = self.samples(micro_batch);
            ddp.position().set(step as u64, samples.start as u64);
            let offset = offsets.add(micro_batch, samples.len(), subject.input_shape());
            let sum = ddp.forward(&device, |model| subject.loss(model, step, samples, offset));
            let loss = sum.clone().into_scalar::<f64>();
            let mut leaves = if micro_batch + 1 == micro_batches {
                ddp.backward_last(sum)
            } else {
                ddp.backward(sum)
            };
            offsets.take(micro_batch, &mut leaves);
            loss
        });
        losses.sum()
    }

    fn stages(&self) -> usize {
        self.pipeline
            .as_ref()
            .map_or(1, |(schedule, _)| schedule.stages())
    }

    fn samples(&self, micro_batch: usize) -> Range<usize> {
        let first = self.own.start + micro_batch * self.micro_batch;
        first..first + self.micro_batch
    }
}

fn sum(values: Vec<f64>, comm: &Comm) -> Result<Vec<f64>, CommError> {
    Ok(f64s(comm.all_reduce(Buffer::from(values), ReduceOp::Sum)?))
}

/// The leaves that are added to the input, and their gradients, by micro-batch.
struct InputOffsets {
    dtype: DType,
    leaves: RefCell<BTreeMap<usize, (Tensor<3>, Vec<f64>)>>,
}

impl InputOffsets {
    fn new(dtype: DType) -> Self {
        let leaves = RefCell::default();
        Self { dtype, leaves }
    }

    fn add(&self, micro_batch: usize, samples: usize, [seq, hidden]: [usize; 2]) -> Tensor<3> {
        let options = (&Device::flex().autodiff(), self.dtype);
        let offset = Tensor::zeros([samples, seq, hidden], options).require_grad();
        self.leaves
            .borrow_mut()
            .insert(micro_batch, (offset.clone(), vec![]));
        offset
    }

    fn take(&self, micro_batch: usize, leaves: &mut burn::tensor::Gradients) {
        if let Some((offset, gradient)) = self.leaves.borrow_mut().get_mut(&micro_batch) {
            *gradient = match offset.grad_remove(leaves) {
                Some(found) => elements(found),
                None => vec![0.0; offset.shape().num_elements()],
            };
        }
    }

    /// The concatenated gradients of all micro-batches; zeros if there are none.
    fn gradient(self, len: usize) -> Vec<f64> {
        let all = self.leaves.into_inner().into_values();
        let mut gradient: Vec<f64> = all.flat_map(|(_, gradient)| gradient).collect();
        gradient.resize(len, 0.0);
        gradient
    }
}

/// The stages of a subject, for the engine.
struct VerifyStages<'a, S: Subject> {
    plan: &'a StepPlan,
    subject: &'a S,
    model: &'a S::Model,
    position: &'a DropoutPosition,
    step: usize,
    offsets: &'a InputOffsets,
}

impl<S: Subject> Stage for VerifyStages<'_, S> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        let samples = self.plan.samples(micro_batch);
        self.position.set(self.step as u64, samples.start as u64);
        let offset = (stage == 0).then(|| {
            let shape = self.subject.input_shape();
            self.offsets.add(micro_batch, samples.len(), shape)
        });
        let step = self.step;
        let last = self.plan.stages() == stage + 1;
        let call = StageCall {
            stage,
            last,
            step,
            samples,
            input,
            offset,
        };
        self.subject.stage(self.model, call)
    }

    fn after_backward(
        &self,
        stage: usize,
        micro_batch: usize,
        leaves: &mut burn::tensor::Gradients,
    ) {
        if stage == 0 {
            self.offsets.take(micro_batch, leaves);
        }
    }
}
