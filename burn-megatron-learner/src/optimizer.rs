//! The optimizer that updates the weights: the optimizer of the `Learner`, or a sharded optimizer of this library.

use std::vec;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::train::{Learner, LearnerModel};
use burn_megatron::data_parallel::{DistributedDataParallel, Gradients};
use burn_megatron::optim::{ElementWise, OptimizerError, ParallelOptimizer};

use crate::error::LearnerError;

/// An optimizer that updates this rank's shards of the parameters of a model.
pub trait ShardedOptimizer<M: Module> {
    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    fn step(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    );

    /// Returns this optimizer as a [`ParallelOptimizer`] if sharded checkpoints contain its state, and `None`
    /// otherwise.
    fn as_saved(&mut self) -> Option<&mut ParallelOptimizer> {
        None
    }
}

impl<M: Module> ShardedOptimizer<M> for ParallelOptimizer {
    fn step(&mut self, rate: f64, ddp: &mut DistributedDataParallel<M>, gradients: Gradients) {
        ParallelOptimizer::step(self, rate, ddp, gradients);
    }

    fn as_saved(&mut self) -> Option<&mut ParallelOptimizer> {
        Some(self)
    }
}

impl<M: Module, O: Optimizer> ShardedOptimizer<M> for ElementWise<O> {
    fn step(&mut self, rate: f64, ddp: &mut DistributedDataParallel<M>, gradients: Gradients) {
        ElementWise::step(self, rate, ddp, gradients);
    }
}

/// A function that creates the optimizer of a rank.
pub(crate) type BuildOptimizer<M> = dyn Fn(&DistributedDataParallel<M>) -> Result<Box<dyn ShardedOptimizer<M>>, OptimizerError>
    + Send
    + Sync;

/// The optimizer that updates the weights of a rank.
pub(crate) enum Update<M: LearnerModel> {
    /// The optimizer of the `Learner`. The model of the `Learner` has a copy of the weights.
    OfLearner,
    Sharded(Box<dyn ShardedOptimizer<M>>),
}

impl<M: LearnerModel> Update<M> {
    /// Updates the weights with the current learning rate of the `Learner`. Collective: call on all ranks.
    pub fn step(
        &mut self,
        learner: &mut Learner<M>,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        match self {
            Self::OfLearner => {
                let values = ddp.full_gradients(&gradients);
                drop(gradients);
                learner.optimizer_step(by_parameter(&learner.model(), ddp, values));
                ddp.set_parameters(&learner.model());
            }
            Self::Sharded(optimizer) => {
                optimizer.step(learner.lr_current().base(), ddp, gradients);
            }
        }
    }

    pub fn as_saved(&mut self) -> Option<&mut ParallelOptimizer> {
        match self {
            Self::OfLearner => None,
            Self::Sharded(optimizer) => optimizer.as_saved(),
        }
    }
}

/// Converts gradients in the order of the parameter table to the gradient type of Burn's optimizers.
fn by_parameter<M: Module>(
    model: &M,
    ddp: &DistributedDataParallel<M>,
    values: Vec<Tensor<1>>,
) -> GradientsParams {
    let frozen: Vec<_> = ddp
        .whole_table()
        .entries()
        .iter()
        .map(|entry| entry.frozen)
        .collect();
    let mut registrar = Registrar {
        frozen: frozen.into_iter(),
        values: values.into_iter(),
        gradients: GradientsParams::new(),
    };
    model.visit(&mut registrar);
    registrar.gradients
}

struct Registrar {
    frozen: vec::IntoIter<bool>,
    values: vec::IntoIter<Tensor<1>>,
    gradients: GradientsParams,
}

impl ModuleVisitor for Registrar {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.frozen.next() == Some(true) {
            return;
        }
        if let Some(value) = self.values.next() {
            let shape: [usize; D] = param.lazy_shape().dims();
            self.gradients.register(param.id, value.reshape(shape));
        }
    }
}

/// Checks that the learning rate scheduler uses its base learning rate for every parameter.
pub(crate) fn check_one_rate<M: LearnerModel>(
    learner: &Learner<M>,
    ddp: &DistributedDataParallel<M>,
) -> Result<(), LearnerError> {
    let rates = learner.lr_current();
    let mut ids = ParameterIds(vec![]);
    learner.model().visit(&mut ids);
    let mut all = ids.0.iter().zip(ddp.whole_table().entries());
    let is_base = |(id, entry): (&_, &burn_megatron::nn::ParameterEntry)| {
        rates.lr_from_param(*id, Some(&entry.path)) == rates.base()
    };
    if all.all(is_base) {
        Ok(())
    } else {
        Err(LearnerError::LearningRateGroups)
    }
}

struct ParameterIds(Vec<burn::module::ParamId>);

impl ModuleVisitor for ParameterIds {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.id);
    }
}
