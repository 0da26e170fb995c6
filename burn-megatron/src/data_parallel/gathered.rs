//! Gradients and parameters as a whole, gathered over the data axis.

use burn::module::Module;
use burn::tensor::Tensor;

use super::sharding_plan::ShardingPlan;
use super::{DataParallelError, DistributedDataParallel, Gradients, replicas};
use crate::collective::start_all_gather;

impl<M: Module> DistributedDataParallel<M> {
    /// Gradients from given values, instead of a [`backward`](Self::backward): this rank's part of each
    /// parameter's gradient, `[elements]` in the order of the table, as a sum over `tokens`.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::ElementCount`] if the size of one is not that of its parameter.
    pub fn gradients_of(
        &self,
        parts: Vec<Tensor<1>>,
        tokens: u64,
    ) -> Result<Gradients, DataParallelError> {
        replicas::gradients_of(&self.buffers.plan, parts, tokens)
    }

    /// The gradient of each parameter, gathered over the data axis: `[elements]` of this model-parallel rank's
    /// part, in the order of the table. Collective: call on all ranks of the data axis.
    pub fn full_gradients(&self, gradients: &Gradients) -> Vec<Tensor<1>> {
        self.full_gradients_times(gradients, gradients.factor())
    }

    /// The sums of each parameter's gradient times `factor`, gathered as in [`Self::full_gradients`].
    pub fn full_gradients_times(&self, gradients: &Gradients, factor: f64) -> Vec<Tensor<1>> {
        let plan = &self.buffers.plan;
        let buckets: Vec<_> = gradients
            .sums()
            .enumerate()
            .map(|(number, sum)| self.gather(number, sum.clone()))
            .collect();
        let gradient = |index| {
            let (number, range) = plan.location(index);
            let sum: Tensor<1> = buckets[number].clone().slice([range]);
            sum.mul_scalar(factor)
        };
        (0..plan.parameters.len()).map(gradient).collect()
    }

    /// The master of each parameter, gathered over the data axis: `[elements]` of this model-parallel rank's
    /// part, in the order of the table. Collective: call on all ranks of the data axis.
    pub fn parameters(&self) -> Vec<Tensor<1>> {
        let plan = &self.buffers.plan;
        let gather = |number| self.gather(number, self.buffers.master_on_device(number));
        let buckets: Vec<_> = (0..plan.buckets()).map(gather).collect();
        let master = |index| {
            let (number, range) = plan.location(index);
            buckets[number].clone().slice([range])
        };
        (0..plan.parameters.len()).map(master).collect()
    }

    /// Gathers a bucket from the shards of the ranks.
    fn gather(&self, number: usize, shard: Tensor<1>) -> Tensor<1> {
        gather(&self.buffers.plan, number, shard)
    }
}

/// Gathers a bucket from the shards of the ranks.
pub(super) fn gather(plan: &ShardingPlan, number: usize, shard: Tensor<1>) -> Tensor<1> {
    let comm = &plan.groups(number).shard;
    match (comm.size(), plan.elements(number)) {
        (1, _) | (_, 0) => shard,
        _ => start_all_gather(shard, 0, comm).wait(),
    }
}
