//! Complete gradients and parameters, gathered over the data axis.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::DistributedDataParallel;
use crate::data_parallel::error::DataParallelError;
use crate::data_parallel::gradients::Gradients;
use crate::data_parallel::memory_usage::MemoryCategory;

impl<M: Module> DistributedDataParallel<M> {
    /// Creates gradients from given values instead of a [`backward`](Self::backward). `parts` are this rank's parts of
    /// the gradients, in the order of the parameter [`table`](Self::table). Each part has the shape `[elements]` and is
    /// a sum over `tokens` tokens.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::ElementCount`] if the size of a part differs from the size of its parameter.
    pub fn gradients_of(
        &self,
        parts: Vec<Tensor<1>>,
        tokens: u64,
    ) -> Result<Gradients, DataParallelError> {
        let plan = &self.buffers.plan;
        let check = |path: &str, found, expected| {
            let path = path.to_string();
            let error = DataParallelError::ElementCount {
                path,
                found,
                expected,
            };
            if found == expected {
                Ok(())
            } else {
                Err(error)
            }
        };
        for (part, parameter) in parts.iter().zip(&plan.parameters) {
            let expected = parameter.shape.iter().product();
            check(&parameter.path, part.dims()[0], expected)?;
        }
        check("the list of parameters", parts.len(), plan.parameters.len())?;
        let shard = |number: usize| {
            let (_, main) = plan.model_and_main_dtypes(number);
            let mut shard = plan.zeros(plan.shard_range(number).len(), main);
            for slice in plan.shard_slices(number) {
                let values = parts[slice.index].clone().slice([slice.parameter_range]);
                shard = flat::accumulate(shard, slice.local_range.start, values.cast(main), false);
            }
            plan.track(shard, MemoryCategory::Gradients)
        };
        let shards = (0..plan.buckets()).map(shard).collect();
        let mut gradients = Gradients::unscaled(shards);
        gradients.tokens = tokens;
        gradients.scale(1.0 / tokens.max(1) as f64);
        Ok(gradients)
    }

    /// Returns the gradient of each parameter, gathered over the data axis, in the order of the parameter
    /// [`table`](Self::table). Each tensor has the shape `[elements]` and is the gradient of this model-parallel rank's
    /// part of the parameter. Collective: call on all ranks of the data axis.
    pub fn full_gradients(&self, gradients: &Gradients) -> Vec<Tensor<1>> {
        self.full_gradients_times(gradients, gradients.factor())
    }

    /// Returns the gradient sum of each parameter, multiplied by `factor`. The sums are gathered as in
    /// [`Self::full_gradients`].
    pub fn full_gradients_times(&self, gradients: &Gradients, factor: f64) -> Vec<Tensor<1>> {
        let sums = self
            .buffers
            .plan
            .gather_parameters(gradients.sums().cloned());
        sums.into_iter().map(|sum| sum.mul_scalar(factor)).collect()
    }

    /// Returns the master weights of each parameter, gathered over the data axis, in the order of the parameter
    /// [`table`](Self::table). Each tensor has the shape `[elements]` and contains this model-parallel rank's part of
    /// the parameter. Collective: call on all ranks of the data axis.
    pub fn parameters(&self) -> Vec<Tensor<1>> {
        let plan = &self.buffers.plan;
        let masters = (0..plan.buckets()).map(|number| self.buffers.master_on_device(number));
        plan.gather_parameters(masters)
    }
}
