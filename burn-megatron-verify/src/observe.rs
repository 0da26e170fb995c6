//! Runs one rank of a training run in a layout, and assembles the full weights and gradients from all ranks.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};

use super::{Layout, RankError, Subject, VerifyOptions};
use burn_megatron::collective::{Comm, to_buffer};
use burn_megatron::comm::{CommError, ParallelContext};
use burn_megatron::data_parallel::freeze;
use burn_megatron::nn::moe::Routers;
use burn_megatron::nn::{MeshRank, ParameterTable};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, StepGradients, Trainer};

/// The results of a training run as seen by one rank. Weights and gradients are full tensors, which are assembled from
/// all ranks.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The paths of the parameters. The lists of weights and gradients have the same order. Trained parameters come
    /// first. Frozen parameters and expert biases follow, and have no gradients.
    pub paths: Vec<String>,
    /// The full parameters before the first step, including frozen parameters and expert biases.
    pub initial_weights: Vec<Vec<f64>>,
    /// The mean loss per token of each step.
    pub losses: Vec<f64>,
    /// The full gradients of the first step.
    pub gradients: Vec<Vec<f64>>,
    /// The full gradients of the last step.
    pub last_gradients: Vec<Vec<f64>>,
    /// The gradient norm of each step before clipping, as reported by the trainer.
    pub gradient_norms: Vec<f64>,
    /// The full parameters after the last step, including frozen parameters and expert biases. They are the values that
    /// a checkpoint would contain.
    pub final_weights: Vec<Vec<f64>>,
    /// The paths of parameters whose replicas are not bit-equal.
    pub unequal_replicas: Vec<String>,
}

pub(super) fn observe<S: Subject>(
    subject: &S,
    layout: &Layout,
    groups: &ParallelContext,
    options: &VerifyOptions,
) -> Result<Observation, RankError> {
    let device = Device::flex();
    let mut model = subject.build(groups, &device)?;
    freeze(&mut model.table, &options.train.data_parallel.freeze)?;
    let weights = AssembledParameters::from_module(&model.module, &model.table, groups)?;
    let all = model.table.entries().iter().zip(weights.full);
    let (frozen, trained): (Vec<_>, Vec<_>) = all.partition(|(entry, _)| entry.frozen);
    let parameters = trained.into_iter().chain(frozen);
    let parameters = parameters.map(|(entry, values)| (entry.path.clone(), values));
    let (parameters, initial): (Vec<_>, Vec<_>) = parameters.unzip();
    let (biases, initial_biases) = expert_biases(&model.routers);
    let observation = Observation {
        paths: [parameters, biases].concat(),
        initial_weights: [initial, initial_biases].concat(),
        losses: vec![],
        gradients: vec![],
        last_gradients: vec![],
        gradient_norms: vec![],
        final_weights: vec![],
        unequal_replicas: weights.unequal,
    };
    let config = options.train_config(subject, layout);
    let ddp = subject.wrap(model, groups, &config.data_parallel)?;
    let mut trainer = Trainer::from_wrapped(ddp, &device, &config)?;
    if options.train.cuda_graph {
        trainer = trainer.with_graphs_on_host()?;
    }
    let data = subject.data(groups);
    let mut observer = GradientObserver {
        observation,
        groups,
        options,
    };
    for _ in 0..options.steps {
        let metrics = trainer.step(&*data, &mut observer)?;
        let objective = metrics.minimised.objective.unwrap_or(metrics.loss);
        observer.observation.losses.push(objective);
        let norms = &mut observer.observation.gradient_norms;
        norms.push(metrics.gradient_norm);
    }
    let mut observation = observer.observation;
    let ddp = trainer.model();
    // A stage may have only frozen parameters.
    assert!(
        observation.gradients.is_empty() == ddp.table().entries().is_empty()
            && observation.gradients.len() == observation.last_gradients.len(),
        "the gradients of the first and of the last step are observed"
    );
    let parts = ddp.parameters().into_iter().map(elements).collect();
    let weights = AssembledParameters::new(parts, ddp.table(), groups)?;
    observation.unequal_replicas.extend(weights.unequal);
    let parts = ddp.frozen_parameters().into_iter().map(elements).collect();
    let frozen = ddp.frozen_table().cloned().unwrap_or_default();
    let frozen = AssembledParameters::new(parts, &frozen, groups)?;
    let (_, final_biases) = expert_biases(ddp.routers());
    observation.final_weights = [weights.full, frozen.full, final_biases].concat();
    observation.unequal_replicas.extend(frozen.unequal);
    Ok(observation)
}

/// Returns the paths and the values of the expert biases.
fn expert_biases(routers: &Routers) -> (Vec<String>, Vec<Vec<f64>>) {
    let biases = routers.expert_biases().into_iter();
    let biases = biases.map(|(path, bias)| (path, elements(bias.value())));
    biases.unzip()
}

/// Assembles the gradients of the first and of the last step.
struct GradientObserver<'a> {
    observation: Observation,
    groups: &'a ParallelContext,
    options: &'a VerifyOptions,
}

impl Observer for GradientObserver<'_> {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        let (step, limit) = (
            gradients.step,
            self.options.train.data_parallel.gradient_limit,
        );
        // A training run skips a step if a gradient exceeds the limit. In `verify`, this is an error.
        if let (Some(limit), Some(culprit)) = (limit, gradients.invalid().first()) {
            return Err(format!(
                "gradient_limit = {limit} would skip step {step}, which cannot be compared: {culprit}"
            )
            .into());
        }
        if step > 1 && step < self.options.steps {
            return Ok(());
        }
        let parts = gradients.full().into_iter().map(elements).collect();
        let assembled = AssembledParameters::new(parts, gradients.table, self.groups)?;
        let observation = &mut self.observation;
        observation.unequal_replicas.extend(assembled.unequal);
        if step == 1 {
            observation.gradients = assembled.full.clone();
        }
        observation.last_gradients = assembled.full;
        Ok(())
    }

    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Full parameters, and the paths of the parameters whose replicas differ.
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
        let (mut full, mut unequal) = (vec![], vec![]);
        for (part, entry) in parts.into_iter().zip(table.entries()) {
            let data = groups.group(entry.grid, entry.grid.data_axes())?;
            let model = groups.group(entry.grid, entry.grid.model_axes())?;
            let peers = gather_shards(&part, &data)?;
            let all = gather_shards(&part, &model)?;
            let ranks = model.group().ranks().iter();
            let ranks: Vec<_> = ranks
                .map(|rank| groups.mesh_rank().with_rank(*rank))
                .collect();
            let parts = ranks.iter().cloned().zip(all.iter().map(Vec::as_slice));
            let assembled = entry.assemble(parts);
            let same = |(rank, part): (&MeshRank, &Vec<f64>)| {
                bits(&entry.part(&assembled, rank)) == bits(part)
            };
            let drifted = peers.iter().any(|peer| bits(peer) != bits(&part));
            if drifted || !ranks.iter().zip(&all).all(same) {
                unequal.push(entry.path.clone());
            }
            full.push(assembled);
        }
        Ok(Self { full, unequal })
    }
}

/// Returns the values of each rank of `comm`. All ranks have the same number of values.
fn gather_shards(part: &[f64], comm: &Comm) -> Result<Vec<Vec<f64>>, CommError> {
    let all: Vec<f64> = comm.all_gather(part.to_vec().into())?.into_vec();
    Ok(all.chunks(part.len().max(1)).map(<[f64]>::to_vec).collect())
}

fn bits(values: &[f64]) -> Vec<u64> {
    // Adding 0 makes +0 and -0 equal.
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

fn elements<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    to_buffer(tensor.cast(DType::F64)).into_vec()
}
