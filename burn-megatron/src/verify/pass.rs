//! Forward and backward of all micro-batches of a step, on one stage or in a pipeline.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};

use super::observe::{elements, f64s};
use super::{Layout, Options, RankError, StageCall, Subject};
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::data_parallel::{DistributedDataParallel, Gradients};
use crate::nn::{BuildError, ParallelModule, Position};
use crate::pipeline::engine::{Engine, Output, PutOff, Stage};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::split::StageLayout;

/// What a rank does in every step.
pub(super) struct Plan {
    /// The samples of this rank.
    own: Range<usize>,
    micro_batch: usize,
    sequence_parallel: bool,
    pipeline: Option<(Schedule, Vec<StageLayout>)>,
    defer_embedding_wgrad: Option<usize>,
    /// Of what passes between the layers.
    dtype: DType,
}

pub(super) struct Pass {
    /// Mean over all tokens.
    pub loss: f64,
    pub input_gradient: Vec<f64>,
    pub gradients: Gradients,
}

impl Plan {
    pub fn new<S: Subject>(
        subject: &S,
        layout: &Layout,
        groups: &Groups,
        options: &Options,
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
        groups: &Groups,
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
        groups: &Groups,
        step: usize,
    ) -> Result<Pass, RankError> {
        let offsets = Offsets::new(self.dtype);
        let loss = match &self.pipeline {
            None => self.whole(subject, ddp, step, &offsets),
            Some((schedule, _)) => {
                let (device, sink) = (Device::flex(), ddp.sink());
                let engine = Engine::new(schedule, groups.pipeline(), &device, &*sink)?;
                let stages = Stages {
                    plan: self,
                    subject,
                    model: ddp.module(),
                    position: ddp.position(),
                    step,
                    offsets: &offsets,
                };
                let put_off = self.put_off(subject, ddp)?;
                engine.with_put_off(put_off).run(&stages)?.loss
            }
        };
        let gradients = ddp.reduce(subject.tokens(step, self.own.clone()))?;
        ddp.fp8().end_step(ddp.groups())?;
        let tokens = gradients.tokens as f64;
        let (pipeline, data) = (groups.pipeline(), groups.data());
        // One rank of the pipeline has the loss, one the input; the others add zeros.
        let loss = sum(vec![loss], pipeline)?;
        let loss = sum(loss, data)?[0] / tokens;
        let [seq, hidden] = subject.input_shape();
        let input_gradient = offsets.gradient(self.own.len() * seq * hidden);
        let input_gradient = sum(input_gradient, pipeline)?;
        let input_gradient = f64s(data.all_gather(Buffer::from(input_gradient))?);
        Ok(Pass {
            loss,
            input_gradient: input_gradient.into_iter().map(|x| x / tokens).collect(),
            gradients,
        })
    }

    /// What the last stage puts off, on its rank.
    fn put_off<S: Subject>(
        &self,
        subject: &S,
        ddp: &DistributedDataParallel<S::Model>,
    ) -> Result<Option<PutOff>, RankError> {
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
        let index = index.ok_or(
            "defer_embedding_wgrad puts off the gradient of the output weight, and the subject names none \
             (`Subject::output_weight`)",
        )?;
        Ok(Some(PutOff { index, limit }))
    }

    fn whole<S: Subject>(
        &self,
        subject: &S,
        ddp: &DistributedDataParallel<S::Model>,
        step: usize,
        offsets: &Offsets,
    ) -> f64 {
        let device = Device::flex().autodiff();
        let micro_batches = self.own.len() / self.micro_batch;
        let losses = (0..micro_batches).map(|micro_batch| {
            let samples = self.samples(micro_batch);
            ddp.position().set(step as u64, samples.start as u64);
            let offset = offsets.add(micro_batch, samples.len(), subject.input_shape());
            let sum = ddp.forward(&device, |model| subject.loss(model, step, samples, offset));
            let loss = sum.clone().into_scalar::<f64>();
            let mut leaves = match micro_batch + 1 == micro_batches {
                true => ddp.backward_last(sum),
                false => ddp.backward(sum),
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

/// Leaves added to the input, and then their gradients, by micro-batch.
struct Offsets {
    dtype: DType,
    leaves: RefCell<BTreeMap<usize, (Tensor<3>, Vec<f64>)>>,
}

impl Offsets {
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

    /// The gradients of all micro-batches one after the other; zeros where there are none.
    fn gradient(self, len: usize) -> Vec<f64> {
        let all = self.leaves.into_inner().into_values();
        let mut gradient: Vec<f64> = all.flat_map(|(_, gradient)| gradient).collect();
        gradient.resize(len, 0.0);
        gradient
    }
}

/// The stages of a subject, as the engine runs them.
struct Stages<'a, S: Subject> {
    plan: &'a Plan,
    subject: &'a S,
    model: &'a S::Model,
    position: &'a Position,
    step: usize,
    offsets: &'a Offsets,
}

impl<S: Subject> Stage for Stages<'_, S> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> Output {
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
