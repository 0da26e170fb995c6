//! Runs a layout on one rank, and assembles the full weights and gradients.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};

use super::pass::StepPlan;
use super::{Layout, RankError, Subject, VerifyOptions};
use crate::collective::{Comm, to_buffer};
use crate::comm::{Buffer, CommError, ParallelContext};
use crate::data_parallel::InvalidGradient;
use crate::nn::{AxisRank, ParameterTable};
use crate::optim::{ParallelAdamW, global_norm};

/// The results of a run on one rank, with assembled weights and gradients.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The paths of the parameters, in the order of the lists below.
    pub paths: Vec<String>,
    /// Full parameters before the first step.
    pub initial_weights: Vec<Vec<f64>>,
    /// Mean loss per token of each step.
    pub losses: Vec<f64>,
    /// The gradient of the full input in the first step: `[samples, seq, hidden]`.
    pub input_gradient: Vec<f64>,
    /// Full gradients of the first step.
    pub gradients: Vec<Vec<f64>>,
    /// Full gradients of the last step.
    pub last_gradients: Vec<Vec<f64>>,
    /// The gradient norm of each step, before clipping.
    pub gradient_norms: Vec<f64>,
    /// Full parameters after the last step.
    pub final_weights: Vec<Vec<f64>>,
    /// Parameters with replicas that are not bit-equal.
    pub unequal_replicas: Vec<String>,
}

pub(super) fn observe<S: Subject>(
    subject: &S,
    layout: &Layout,
    groups: &ParallelContext,
    options: &VerifyOptions,
) -> Result<Observation, RankError> {
    let device = Device::flex();
    let plan = StepPlan::new(subject, layout, groups, options)?;
    let model = plan.build(subject, groups, &device)?;
    let weights = AssembledParameters::from_module(&model.module, &model.table, groups)?;
    let mut ddp = subject.wrap(
        model,
        groups,
        &options.data_parallel_for(layout, subject.dtype()),
    )?;
    let mut optimizer = ParallelAdamW::new(&options.optimizer, &ddp)?;
    let mut observation = Observation {
        paths: ddp
            .table()
            .entries()
            .iter()
            .map(|entry| entry.path.clone())
            .collect(),
        initial_weights: weights.full,
        losses: vec![],
        input_gradient: vec![],
        gradients: vec![],
        last_gradients: vec![],
        gradient_norms: vec![],
        final_weights: vec![],
        unequal_replicas: weights.unequal,
    };
    for step in 0..options.steps {
        let pass = plan.pass(subject, &mut ddp, groups, step)?;
        let mut gradients = pass.gradients;
        check_limit(&gradients.invalid_gradients, options, step)?;
        let norm = global_norm(&gradients, &ddp)?;
        observation.losses.push(pass.loss);
        observation.gradient_norms.push(norm);
        if step == 0 || step + 1 == options.steps {
            let parts = ddp.full_gradients(&gradients).into_iter();
            let parts = parts.map(elements).collect();
            let assembled = AssembledParameters::new(parts, ddp.table(), groups)?;
            observation.unequal_replicas.extend(assembled.unequal);
            if step == 0 {
                observation.gradients = assembled.full.clone();
                observation.input_gradient = pass.input_gradient;
            }
            observation.last_gradients = assembled.full;
        }
        if norm > options.clip {
            gradients.scale(options.clip / norm);
        }
        optimizer.step(options.learning_rate, &mut ddp, gradients);
    }
    let parts = ddp.parameters().into_iter().map(elements).collect();
    let weights = AssembledParameters::new(parts, ddp.table(), groups)?;
    observation.final_weights = weights.full;
    observation.unequal_replicas.extend(weights.unequal);
    Ok(observation)
}

/// A training run skips a step with a gradient beyond the limit; here that is an error.
fn check_limit(
    invalid_gradients: &[InvalidGradient],
    options: &VerifyOptions,
    step: usize,
) -> Result<(), RankError> {
    match (
        options.data_parallel.gradient_limit,
        invalid_gradients.first(),
    ) {
        (Some(limit), Some(culprit)) => Err(format!(
            "gradient_limit = {limit} would skip step {step}, which cannot be compared: {culprit}"
        )
        .into()),
        _ => Ok(()),
    }
}

/// Full parameters, and the paths of those whose replicas are not equal.
struct AssembledParameters {
    full: Vec<Vec<f64>>,
    unequal: Vec<String>,
}

impl AssembledParameters {
    fn from_module<M: Module>(
        module: &M,
        table: &ParameterTable,
        groups: &ParallelContext,
    ) -> Result<Self, CommError> {
        let mut parts = CollectElements::default();
        module.visit(&mut parts);
        Self::new(parts.0, table, groups)
    }

    fn new(
        parts: Vec<Vec<f64>>,
        table: &ParameterTable,
        groups: &ParallelContext,
    ) -> Result<Self, CommError> {
        let size = groups.place().size;
        let (mut full, mut unequal) = (vec![], vec![]);
        for (part, entry) in parts.into_iter().zip(table.entries()) {
            let peers = gather_shards(&part, groups.data())?;
            let all = gather_shards(&part, groups.tensor())?;
            let assembled = entry.placement.assemble(&entry.shape, &all);
            let same = |(index, part): (usize, &Vec<f64>)| {
                let expected =
                    entry
                        .placement
                        .part(&entry.shape, &assembled, AxisRank { index, size });
                bits(&expected) == bits(part)
            };
            let drifted = peers.iter().any(|peer| bits(peer) != bits(&part));
            if drifted || !all.iter().enumerate().all(same) {
                unequal.push(entry.path.clone());
            }
            full.push(assembled);
        }
        Ok(Self { full, unequal })
    }
}

/// The values of each rank of `comm`; all have the same length.
fn gather_shards(part: &[f64], comm: &Comm) -> Result<Vec<Vec<f64>>, CommError> {
    let all = f64s(comm.all_gather(Buffer::from(part.to_vec()))?);
    Ok(all.chunks(part.len().max(1)).map(<[f64]>::to_vec).collect())
}

fn bits(values: &[f64]) -> Vec<u64> {
    // Zeros may have either sign.
    values.iter().map(|x| (x + 0.0).to_bits()).collect()
}

#[derive(Default)]
struct CollectElements(Vec<Vec<f64>>);

impl ModuleVisitor for CollectElements {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        self.0.push(elements(if tensor.is_autodiff() {
            tensor.inner()
        } else {
            tensor
        }));
    }
}

pub(super) fn elements<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    f64s(to_buffer(tensor.cast(DType::F64)))
}

pub(super) fn f64s(buffer: Buffer) -> Vec<f64> {
    match buffer {
        Buffer::F64(values) => values,
        other => unreachable!("expected f64, got {}", other.dtype()),
    }
}
