//! Updates the exponential moving average of the weights after each step, and evaluates with it.

use burn::tensor::Tensor;

use super::{StepContext, StepHook, StepUpdate};
use crate::{TrainConfig, TrainError};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{EmaConfig, ParallelOptimizer};

/// The name of the hook.
pub(super) const NAME: &str = "ema";

/// The hook of [`ema`](TrainConfig::ema). The optimizer stores the average, because the average is sharded and saved
/// like optimizer state.
pub(crate) struct AverageWeights {
    config: EmaConfig,
    /// The trained weights, stored during an evaluation with the average.
    weights: Option<Vec<Tensor<1>>>,
}

impl AverageWeights {
    /// Creates the hook. The average starts with the current weights.
    pub fn new<M: LanguageModel>(
        config: &TrainConfig,
        optimizer: &mut ParallelOptimizer,
        ddp: &DistributedDataParallel<M>,
    ) -> Option<Self> {
        let config = config.ema?;
        optimizer.average_with(&config, ddp);
        let weights = None;
        Some(Self { config, weights })
    }
}

impl<M: LanguageModel> StepHook<M> for AverageWeights {
    fn name(&self) -> &str {
        NAME
    }

    fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        if update.launches
            && let Some(average) = context.optimizer.average()
        {
            let taken = update.by_outcome.then(|| update.taken());
            average.update(taken.as_ref(), context.ddp);
        }
        Ok(())
    }

    fn before_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let average = context.optimizer.average().filter(|_| self.config.evaluate);
        let Some(average) = average else { return };
        let average = average.buckets().to_vec();
        let shards = 0..context.ddp.shards().len();
        self.weights = Some(
            shards
                .map(|bucket| context.ddp.master_shard(bucket))
                .collect(),
        );
        context.ddp.replace_masters(average);
    }

    fn after_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        if let Some(weights) = self.weights.take() {
            context.ddp.replace_masters(weights);
        }
    }

    /// Starts a new average if only weights were loaded. A complete checkpoint restores the average with the optimizer
    /// state.
    fn load_state(
        &mut self,
        context: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        if state.is_none()
            && let Some(average) = context.optimizer.average()
        {
            average.reset(context.ddp);
        }
        Ok(())
    }

    fn removed(&mut self, context: &mut StepContext<'_, M>) {
        context.optimizer.drop_average();
    }
}
