//! What one rank sees of a run, with every part put together.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};

use super::pass::Plan;
use super::{Layout, Options, RankError, Subject};
use crate::collective::{Comm, to_buffer};
use crate::comm::{Buffer, CommError, Groups};
use crate::data_parallel::Culprit;
use crate::nn::{ParameterTable, Place};
use crate::optim::{ParallelAdamW, global_norm};

/// A run, as one rank sees it after everything has been put together.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The paths of the parameters, in the order of the lists below.
    pub paths: Vec<String>,
    /// Whole parameters before the first step.
    pub initial_weights: Vec<Vec<f64>>,
    /// Mean loss per token of each step.
    pub losses: Vec<f64>,
    /// The gradient of the whole input at the first step: `[samples, seq, hidden]`.
    pub input_gradient: Vec<f64>,
    /// Whole gradients of the first step.
    pub gradients: Vec<Vec<f64>>,
    /// Whole gradients of the last step.
    pub last_gradients: Vec<Vec<f64>>,
    /// The gradient norm of each step, before clipping.
    pub gradient_norms: Vec<f64>,
    /// Whole parameters after the last step.
    pub final_weights: Vec<Vec<f64>>,
    /// Parameters of which two ranks hold the same part with other bits.
    pub unequal_replicas: Vec<String>,
}

pub(super) fn observe<S: Subject>(
    subject: &S,
    layout: &Layout,
    groups: &Groups,
    options: &Options,
) -> Result<Observation, RankError> {
    let device = Device::flex();
    let plan = Plan::new(subject, layout, groups, options)?;
    let model = plan.build(subject, groups, &device)?;
    let weights = Assembled::of(&model.module, &model.table, groups)?;
    let mut ddp = subject.wrap(model, groups, &options.sharing(layout, subject.dtype()))?;
    let mut optimizer = ParallelAdamW::new(&options.optimizer, &ddp)?;
    let mut observation = Observation {
        paths: ddp
            .table()
            .entries()
            .iter()
            .map(|entry| entry.path.clone())
            .collect(),
        initial_weights: weights.whole,
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
        check_limit(&gradients.culprits, options, step)?;
        let norm = global_norm(&gradients, &ddp)?;
        observation.losses.push(pass.loss);
        observation.gradient_norms.push(norm);
        if step == 0 || step + 1 == options.steps {
            let parts = ddp.whole_gradients(&gradients).into_iter();
            let parts = parts.map(elements).collect();
            let assembled = Assembled::new(parts, ddp.table(), groups)?;
            observation.unequal_replicas.extend(assembled.unequal);
            if step == 0 {
                observation.gradients = assembled.whole.clone();
                observation.input_gradient = pass.input_gradient;
            }
            observation.last_gradients = assembled.whole;
        }
        if norm > options.clip {
            gradients.scale(options.clip / norm);
        }
        optimizer.step(options.learning_rate, &mut ddp, gradients);
    }
    let parts = ddp.parameters().into_iter().map(elements).collect();
    let weights = Assembled::new(parts, ddp.table(), groups)?;
    observation.final_weights = weights.whole;
    observation.unequal_replicas.extend(weights.unequal);
    Ok(observation)
}

/// A run skips a step with a gradient beyond the limit, if it was given one; here no step is skipped.
fn check_limit(culprits: &[Culprit], options: &Options, step: usize) -> Result<(), RankError> {
    match (options.data_parallel.gradient_limit, culprits.first()) {
        (Some(limit), Some(culprit)) => Err(format!(
            "gradient_limit = {limit} lets a run skip step {step}, which cannot be compared: {culprit}"
        )
        .into()),
        _ => Ok(()),
    }
}

/// Whole parameters, and the paths of those whose replicas are not equal.
struct Assembled {
    whole: Vec<Vec<f64>>,
    unequal: Vec<String>,
}

impl Assembled {
    fn of<M: Module>(
        module: &M,
        table: &ParameterTable,
        groups: &Groups,
    ) -> Result<Self, CommError> {
        let mut parts = Elements::default();
        module.visit(&mut parts);
        Self::new(parts.0, table, groups)
    }

    fn new(
        parts: Vec<Vec<f64>>,
        table: &ParameterTable,
        groups: &Groups,
    ) -> Result<Self, CommError> {
        let size = groups.place().size;
        let (mut whole, mut unequal) = (vec![], vec![]);
        for (part, entry) in parts.into_iter().zip(table.entries()) {
            let peers = parts_of_all(&part, groups.data())?;
            let all = parts_of_all(&part, groups.tensor())?;
            let assembled = entry.placement.assemble(&entry.shape, &all);
            let same = |(index, part): (usize, &Vec<f64>)| {
                let expected =
                    entry
                        .placement
                        .part(&entry.shape, &assembled, Place { index, size });
                bits(&expected) == bits(part)
            };
            let drifted = peers.iter().any(|peer| bits(peer) != bits(&part));
            if drifted || !all.iter().enumerate().all(same) {
                unequal.push(entry.path.clone());
            }
            whole.push(assembled);
        }
        Ok(Self { whole, unequal })
    }
}

/// What each rank of `comm` gives; all give as many elements.
fn parts_of_all(part: &[f64], comm: &Comm) -> Result<Vec<Vec<f64>>, CommError> {
    let all = f64s(comm.all_gather(Buffer::from(part.to_vec()))?);
    Ok(all.chunks(part.len().max(1)).map(<[f64]>::to_vec).collect())
}

fn bits(values: &[f64]) -> Vec<u64> {
    // A zero may come with either sign.
    values.iter().map(|x| (x + 0.0).to_bits()).collect()
}

#[derive(Default)]
struct Elements(Vec<Vec<f64>>);

impl ModuleVisitor for Elements {
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
        other => unreachable!("f64 went in, {} came out", other.dtype()),
    }
}
