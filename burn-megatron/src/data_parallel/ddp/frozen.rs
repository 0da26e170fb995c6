//! The frozen parameters of a wrapped module, which are not trained.

use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};

use super::DistributedDataParallel;
use crate::data_parallel::bucket_step::BucketShard;
use crate::data_parallel::error::DataParallelError;
use crate::data_parallel::layout::BufferLayout;
use crate::data_parallel::memory::MemoryPlan;
use crate::data_parallel::sharding_plan::main_dtype;
use crate::nn::ParameterTable;

impl<M: Module> DistributedDataParallel<M> {
    /// Returns all parameters in the order of the module: the trained parameters, which [`table`](Self::table)
    /// contains, and the frozen parameters.
    pub fn whole_table(&self) -> &ParameterTable {
        &self.whole
    }

    /// Returns the table of the frozen parameters, which are not trained. Returns `None` if no parameter is frozen.
    pub fn frozen_table(&self) -> Option<&ParameterTable> {
        self.buffers.frozen.as_ref().map(|frozen| &frozen.table)
    }

    /// Returns the value of each frozen parameter, gathered over the data axis. Each tensor has the shape `[elements]`
    /// and contains this model-parallel rank's part of the parameter. The tensors are in the order of
    /// [`frozen_table`](Self::frozen_table). Running states are averaged first. Collective: call on all ranks of the
    /// data axis.
    pub fn frozen_parameters(&self) -> Vec<Tensor<1>> {
        self.average_running_states();
        self.gathered_frozen_parameters()
    }

    /// Returns the values of [`frozen_parameters`](Self::frozen_parameters) without averaging the running states.
    pub(super) fn gathered_frozen_parameters(&self) -> Vec<Tensor<1>> {
        match &self.buffers.frozen {
            Some(frozen) => frozen.plan.gather_parameters(frozen.shards()),
            None => vec![],
        }
    }

    /// Returns the layout of the frozen parameters that are saved in checkpoints. Returns `None` if no frozen
    /// parameters are saved. The frozen parameters of a model with adapters are not saved in checkpoints, because they
    /// are loaded from another file.
    pub fn saved_frozen(&self) -> Option<&BufferLayout> {
        let frozen = self.buffers.frozen.as_ref();
        let frozen = frozen.filter(|_| self.saves_frozen);
        frozen.map(|frozen| &frozen.plan.layout)
    }

    /// Returns this rank's shard of each bucket of frozen parameters, and the values of the shard in the dtype in which
    /// checkpoints store them.
    pub fn frozen_shards(&self) -> Vec<(BucketShard, Tensor<1>)> {
        let Some(frozen) = &self.buffers.frozen else {
            return vec![];
        };
        let value = |(shard, value): (BucketShard, Tensor<1>)| {
            let wide = FloatDType::from(main_dtype(value.dtype()));
            (shard, value.cast(wide))
        };
        let shards = BucketShard::all(&frozen.plan).into_iter();
        shards.zip(frozen.shards()).map(value).collect()
    }

    /// Returns the dtype in which checkpoints store each frozen parameter. It is the dtype that the master weight would
    /// have.
    pub(crate) fn frozen_dtypes(&self) -> Vec<DType> {
        let frozen = self.buffers.frozen.iter();
        let parameters = frozen.flat_map(|frozen| &frozen.plan.parameters);
        let dtypes = parameters.map(|parameter| main_dtype(parameter.model_dtype));
        dtypes.collect()
    }

    /// Replaces the values of the frozen parameters, given this rank's [shards](Self::frozen_shards). The values are
    /// rounded to the dtype of the model. Collective: call on all ranks.
    pub fn replace_frozen(&mut self, shards: Vec<Tensor<1>>) {
        if let Some(frozen) = &self.buffers.frozen {
            let rounded = |(number, shard): (usize, Tensor<1>)| {
                let (model, _) = frozen.plan.model_and_main_dtypes(number);
                shard.cast(FloatDType::from(model))
            };
            let shards = shards.into_iter().enumerate().map(rounded).collect();
            let mut buckets = frozen.buckets();
            buckets.replace(shards);
            buckets.wait();
            drop(buckets);
            self.restore_running_states();
            self.fp8.invalidate_weights();
        }
    }

    /// Returns the memory of the frozen parameters, as computed from their layout.
    pub(super) fn frozen_memory(&self) -> Result<MemoryPlan, DataParallelError> {
        let frozen = self.buffers.frozen.as_ref();
        frozen.map_or(Ok(MemoryPlan::default()), |frozen| {
            frozen.plan.frozen_memory()
        })
    }
}
