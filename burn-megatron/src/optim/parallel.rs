//! The optimizer of a run, by its settings.

use burn::module::Module;
use burn::tensor::{DType, Tensor};

use super::OptimizerError;
use super::adamw::ParallelAdamW;
use super::config::OptimizerConfig;
use super::element_wise::ElementWise;
use super::muon::ParallelMuon;
use super::rules::RuleConfig;
use super::state::{OptimizerState, StateKind};
use crate::data_parallel::{
    BucketShard, BucketStep, DistributedDataParallel, Gradients, Moments, SteppedBucket,
};

/// An optimizer whose rule needs nothing but this rank's shards.
pub(crate) trait ShardOptimizer: OptimizerState + Send {
    /// Steps a bucket, with `factor` times its gradient.
    fn step_bucket(&mut self, rate: f64, factor: f64, bucket: BucketStep) -> SteppedBucket;
}

/// The optimizer that an [`OptimizerConfig`] names, over the parameters of a model.
pub struct ParallelOptimizer(Implementation);

enum Implementation {
    AdamW(ParallelAdamW),
    Muon(Box<ParallelMuon>),
    ElementWise(Box<dyn ShardOptimizer>),
}

impl ParallelOptimizer {
    /// The optimizer for the parameters of a model. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for an invalid setting or group, a group that matches no parameter of the model, and for
    /// moments in bf16 or state on the host with another optimizer than the fused AdamW.
    pub fn new<M: Module>(
        config: &OptimizerConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        config.check()?;
        if !config.is_adamw() && ddp.config().moments == Moments::Bf16 {
            return Err(OptimizerError::Moments);
        }
        Ok(Self(match config {
            OptimizerConfig::AdamW(config) => {
                Implementation::AdamW(ParallelAdamW::new(config, ddp)?)
            }
            OptimizerConfig::Muon(config) => {
                Implementation::Muon(Box::new(ParallelMuon::new(config, ddp)?))
            }
            OptimizerConfig::Sgd(config) => element_wise(config, ddp)?,
            OptimizerConfig::Adam(config) => element_wise(config, ddp)?,
            OptimizerConfig::Adan(config) => element_wise(config, ddp)?,
            OptimizerConfig::Lion(config) => element_wise(config, ddp)?,
            OptimizerConfig::RmsProp(config) => element_wise(config, ddp)?,
            OptimizerConfig::Adagrad(config) => element_wise(config, ddp)?,
        }))
    }

    /// Updates the parameters with the reduced gradients of one step. Collective: call on all ranks.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) if a collective or a step on the host fails.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        match &mut self.0 {
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

    /// The AdamW that can be stepped by an outcome on the device, if it is that.
    pub(crate) fn fused(&mut self) -> Option<&mut ParallelAdamW> {
        match &mut self.0 {
            Implementation::AdamW(adamw) if adamw.is_fused() => Some(adamw),
            _ => None,
        }
    }

    /// Whether it is the fused AdamW.
    pub(crate) fn is_fused(&self) -> bool {
        matches!(&self.0, Implementation::AdamW(adamw) if adamw.is_fused())
    }

    fn state(&self) -> &dyn OptimizerState {
        match &self.0 {
            Implementation::AdamW(adamw) => adamw,
            Implementation::Muon(muon) => &**muon,
            Implementation::ElementWise(optimizer) => &**optimizer,
        }
    }
}

impl OptimizerState for ParallelOptimizer {
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind> {
        self.state().kinds(masters)
    }

    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>> {
        self.state().tensors(bucket, shard)
    }

    fn restore(&mut self, bucket: usize, shard: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64) {
        match &mut self.0 {
            Implementation::AdamW(adamw) => {
                OptimizerState::restore(adamw, bucket, shard, tensors, steps);
            }
            Implementation::Muon(muon) => muon.restore(bucket, shard, tensors, steps),
            Implementation::ElementWise(optimizer) => {
                optimizer.restore(bucket, shard, tensors, steps);
            }
        }
    }
}

/// One of Burn's optimizers.
fn element_wise<C, M>(
    config: &C,
    ddp: &DistributedDataParallel<M>,
) -> Result<Implementation, OptimizerError>
where
    C: RuleConfig,
    C::Rule: Send,
    M: Module,
{
    let optimizer = ElementWise::new(|decay| config.build(decay), config.groups(), ddp)?;
    Ok(Implementation::ElementWise(Box::new(optimizer)))
}
