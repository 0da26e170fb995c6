//! The optimizer of a run, selected by its settings.

use burn::module::Module;
use burn::tensor::{DType, Tensor};

use super::adamw::ParallelAdamW;
use super::average::{EmaConfig, WeightAverage};
use super::config::OptimizerConfig;
use super::element_wise::ElementWise;
use super::error::OptimizerError;
use super::groups::ParameterGroup;
use super::muon::ParallelMuon;
use super::rule_states::ResumableOptimizer;
use super::rules::RuleConfig;
use super::state::{OptimizerState, ShardOptimizer, StateKind};
use crate::data_parallel::{BucketShard, DistributedDataParallel, Gradients, Moments};

/// The optimizer of a run for the parameters of a model. [`OptimizerConfig`] selects the optimizer. A
/// `ParallelOptimizer` can also maintain a moving average of the weights.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::ParallelModule;
/// use burn_megatron::optim::{MuonConfig, ParallelOptimizer};
/// use burn_megatron::prelude::*;
///
/// let model = ParallelModule::replicated(LinearConfig::new(4, 1).init(&Device::flex()));
/// let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single())?;
/// let config = OptimizerConfig::Muon(MuonConfig::default());
/// let mut optimizer = ParallelOptimizer::new(&config, &ddp)?;
/// let device = Device::flex().autodiff();
/// let mut losses = vec![];
/// for _ in 0..2 {
///     let x = Tensor::<2>::ones([1, 4], &device);
///     let loss = ddp.forward(&device, |model| model.forward(x).sub_scalar(100.0).square().sum());
///     losses.push(loss.clone().into_scalar::<f32>());
///     ddp.backward_last(loss);
///     let gradients = ddp.reduce(1)?;
///     optimizer.step(1e-2, &mut ddp, gradients);
/// }
/// assert!(losses[1] < losses[0]);
/// # Ok::<(), AnyError>(())
/// ```
pub struct ParallelOptimizer {
    implementation: Implementation,
    average: Option<WeightAverage>,
}

enum Implementation {
    AdamW(ParallelAdamW),
    Muon(Box<ParallelMuon>),
    ElementWise(Box<dyn ShardOptimizer>),
}

impl ParallelOptimizer {
    /// Builds the optimizer for the parameters of a model. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid setting or group, or a group that matches no parameter of the model. Moments
    /// in bf16 and optimizer state in host memory are errors unless the optimizer is the fused AdamW.
    pub fn new<M: Module>(
        config: &OptimizerConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        config.check()?;
        if !config.is_adamw() && ddp.config().moments == Moments::Bf16 {
            return Err(OptimizerError::Moments);
        }
        let implementation = match config {
            OptimizerConfig::AdamW(config) => {
                Implementation::AdamW(ParallelAdamW::new(config, ddp)?)
            }
            OptimizerConfig::Muon(config) => {
                Implementation::Muon(Box::new(ParallelMuon::new(config, ddp)?))
            }
            OptimizerConfig::Sgd(config) => element_wise(config, &config.groups, ddp)?,
            OptimizerConfig::Adam(config) => element_wise(config, &config.groups, ddp)?,
            OptimizerConfig::Adan(config) => element_wise(config, &config.groups, ddp)?,
            OptimizerConfig::Lion(config) => element_wise(config, &config.groups, ddp)?,
            OptimizerConfig::RmsProp(config) => element_wise(config, &config.groups, ddp)?,
            OptimizerConfig::Adagrad(config) => element_wise(config, &config.groups, ddp)?,
        };
        Ok(Self {
            implementation,
            average: None,
        })
    }

    /// Starts a moving average of the weights. The caller updates it through [`average`](Self::average).
    pub fn average_with<M: Module>(
        &mut self,
        config: &EmaConfig,
        ddp: &DistributedDataParallel<M>,
    ) {
        self.average = Some(WeightAverage::new(config, ddp));
    }

    /// Removes the moving average of the weights.
    pub fn drop_average(&mut self) {
        self.average = None;
    }

    /// Returns the moving average of the weights, or `None` if there is no average.
    pub fn average(&mut self) -> Option<&mut WeightAverage> {
        self.average.as_mut()
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if a collective or an optimizer step on the host fails.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        match &mut self.implementation {
            Implementation::AdamW(adamw) => adamw.step(learning_rate, ddp, gradients),
            Implementation::Muon(muon) => muon.step(learning_rate, ddp, gradients),
            Implementation::ElementWise(optimizer) => {
                let _span = tracing::debug_span!("optimizer_step").entered();
                let factor = gradients.factor();
                ddp.step_device_buckets(gradients, |bucket| {
                    optimizer.step_bucket(learning_rate, factor, bucket)
                });
            }
        }
    }

    /// Updates the parameters with the fused AdamW if the step is taken. `outcome` is a tensor on the device from which
    /// the kernel reads whether the step is taken.
    ///
    /// # Panics
    ///
    /// Panics if the optimizer is not the fused AdamW.
    pub fn step_with_outcome<M: Module>(
        &mut self,
        outcome: &Tensor<1>,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let Implementation::AdamW(adamw) = &mut self.implementation else {
            unreachable!("only the fused AdamW reads an outcome")
        };
        adamw.step_with_outcome(outcome, ddp, gradients);
    }

    /// Sets the number of taken steps. Call it after steps whose outcome was only on the device.
    pub fn record_taken(&mut self, taken: u64) {
        if let Implementation::AdamW(adamw) = &mut self.implementation {
            adamw.record_taken(taken);
        }
    }

    /// Whether the optimizer is the fused AdamW.
    pub fn is_fused(&self) -> bool {
        matches!(&self.implementation, Implementation::AdamW(adamw) if adamw.is_fused())
    }

    fn state(&self) -> &dyn OptimizerState {
        match &self.implementation {
            Implementation::AdamW(adamw) => adamw,
            Implementation::Muon(muon) => &**muon,
            Implementation::ElementWise(optimizer) => &**optimizer,
        }
    }
}

impl OptimizerState for ParallelOptimizer {
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind> {
        let mut kinds = self.state().kinds(masters);
        kinds.extend(self.average.as_ref().map(|_| WeightAverage::kind(masters)));
        kinds
    }

    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>> {
        let mut tensors = self.state().tensors(bucket, shard);
        let average = self.average.as_ref();
        tensors.extend(average.map(|average| average.buckets()[bucket].clone()));
        tensors
    }

    fn restore(
        &mut self,
        bucket: usize,
        shard: &BucketShard,
        mut tensors: Vec<Tensor<1>>,
        steps: u64,
    ) {
        if let Some(average) = &mut self.average
            && let Some(own) = tensors.pop()
        {
            average.restore(bucket, own);
        }
        let state: &mut dyn OptimizerState = match &mut self.implementation {
            Implementation::AdamW(adamw) => adamw,
            Implementation::Muon(muon) => &mut **muon,
            Implementation::ElementWise(optimizer) => &mut **optimizer,
        };
        state.restore(bucket, shard, tensors, steps);
    }
}

/// Builds one of Burn's optimizers.
fn element_wise<C, M>(
    config: &C,
    groups: &[ParameterGroup],
    ddp: &DistributedDataParallel<M>,
) -> Result<Implementation, OptimizerError>
where
    C: RuleConfig,
    C::Rule: ResumableOptimizer + Send,
    M: Module,
{
    let optimizer = ElementWise::new(|decay| config.build(decay), groups, ddp)?;
    Ok(Implementation::ElementWise(Box::new(optimizer)))
}
