//! The constant state of a wrapped module on one rank: layout, parameters, groups, settings and memory pool.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::flat::{self, Ranges};

use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::layout::{BufferLayout, ParameterSlice};
use super::memory::{MemoryPlan, MemoryRules};
use super::memory_usage::{MemoryCategory, MemoryUsage, TrackedTensor};
use super::offload::OffloadPlan;
use super::sharding_groups::ShardingGroups;
use crate::collective::{buffer_dtype, from_buffer, start_all_gather, to_buffer, to_device};
use crate::comm::{self, BufferPool};
use crate::mesh::{Grid, ZeroStage};
use crate::nn::fp8::WeightQuantizer;

/// The layout of one rank's parameters in buckets, and their sharding. It is constant during training.
#[derive(Debug)]
pub(crate) struct ShardingPlan {
    pub layout: BufferLayout,
    /// The elements of each bucket that belong to no parameter.
    pub gaps: Vec<Ranges>,
    pub parameters: Vec<ParameterInfo>,
    /// The groups of each grid that has parameters on this rank. The dense groups always exist.
    pub dense: ShardingGroups,
    pub expert: Option<ShardingGroups>,
    pub config: DataParallelConfig,
    /// The buckets whose master weights and moments are on the host.
    pub offload: OffloadPlan,
    pub device: Device,
    pub pool: Arc<BufferPool>,
    pub usage: MemoryUsage,
}

/// A parameter of this rank.
#[derive(Clone, Debug)]
pub(crate) struct ParameterInfo {
    pub path: String,
    /// The shape of this rank's part of the parameter.
    pub shape: Vec<usize>,
    /// The dtype in which the model computes with the parameter.
    pub model_dtype: DType,
    /// The dtype of the master weight and of the gradient sums.
    pub main_dtype: DType,
    /// The quantizer of an FP8 weight.
    pub quantizer: Option<Arc<dyn WeightQuantizer>>,
}

/// The format of the parameters of a bucket between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterFormat {
    /// The dtype of the model.
    Float,
    /// FP8 with per-tensor scales. Codes are gathered.
    Fp8PerTensor,
    /// FP8 with block scales. Values are gathered and quantized on every rank.
    Fp8Blockwise,
}

impl ShardingPlan {
    /// Returns the memory of this rank, computed from the layout.
    pub fn memory(&self) -> Result<MemoryPlan, DataParallelError> {
        let rules = MemoryRules {
            offloaded: self.offload.buckets,
            summed: self.reduces_over_ranks(),
            ..MemoryRules::of(&self.config)
        };
        Ok(MemoryPlan::new(&self.layout, &rules)?)
    }

    /// Returns the memory of this rank if the parameters are frozen.
    pub fn frozen_memory(&self) -> Result<MemoryPlan, DataParallelError> {
        let rules = MemoryRules::of(&self.config);
        Ok(MemoryPlan::of_frozen(&self.layout, &rules)?)
    }

    /// Whether the master weights and moments of a bucket are on the host.
    pub fn is_offloaded(&self, bucket: usize) -> bool {
        bucket < self.offload.buckets
    }

    /// Returns the device of the master weights and moments of a bucket.
    pub fn state_device(&self, bucket: usize) -> Device {
        if self.is_offloaded(bucket) {
            Device::flex()
        } else {
            self.device.clone()
        }
    }

    /// Whether the model computes with copies of the master weights of a bucket. FP8 weights are not considered.
    pub fn copies_masters(&self, bucket: usize) -> bool {
        let (model, main) = self.model_and_main_dtypes(bucket);
        model != main || self.is_offloaded(bucket)
    }

    /// Returns the groups over which a bucket is reduced and sharded: the groups of its grid.
    pub fn groups(&self, bucket: usize) -> &ShardingGroups {
        self.groups_of(self.grid(bucket))
    }

    /// Returns the grid of the parameters of a bucket.
    pub fn grid(&self, bucket: usize) -> Grid {
        self.layout.buffer_of(bucket).key.grid
    }

    /// Whether the gradients of any bucket are summed over several ranks.
    pub fn reduces_over_ranks(&self) -> bool {
        self.all_groups().any(|(_, groups)| groups.data.size() > 1)
    }

    /// Returns the groups of each grid that has parameters on this rank.
    pub fn all_groups(&self) -> impl Iterator<Item = (Grid, &ShardingGroups)> {
        let expert = self.expert.iter().map(|groups| (Grid::Expert, groups));
        std::iter::once((Grid::Dense, &self.dense)).chain(expert)
    }

    /// Returns the groups of a grid that has parameters on this rank.
    pub fn groups_of(&self, grid: Grid) -> &ShardingGroups {
        match (grid, &self.expert) {
            (Grid::Dense, _) => &self.dense,
            (Grid::Expert, Some(expert)) => expert,
            (Grid::Expert, None) => unreachable!("no parameter lies in the expert grid"),
        }
    }

    pub fn stage(&self) -> ZeroStage {
        self.config.zero_stage
    }

    pub fn buckets(&self) -> usize {
        self.layout.bucket_count()
    }

    /// Returns the number of elements of a bucket, including padding.
    pub fn elements(&self, bucket: usize) -> usize {
        self.layout.bucket(bucket).padded()
    }

    /// Returns the dtype in which the optimizer returns the parameters of a bucket to the model, and the dtype of their
    /// master weights. They are equal for FP8 weights, which are quantized from the master weights.
    pub fn model_and_main_dtypes(&self, bucket: usize) -> (DType, DType) {
        let dtypes = |first: &ParameterInfo| match first.quantizer {
            None => (first.model_dtype, first.main_dtype),
            Some(_) => (first.main_dtype, first.main_dtype),
        };
        self.first_parameter(bucket)
            .map_or((DType::F32, DType::F32), dtypes)
    }

    /// Returns the dtype in which the model computes with the parameters of a bucket. FP8 is not considered.
    pub fn compute_dtype(&self, bucket: usize) -> DType {
        self.first_parameter(bucket)
            .map_or(DType::F32, |first| first.model_dtype)
    }

    /// Returns the format of the parameters of a bucket.
    pub fn parameter_format(&self, bucket: usize) -> ParameterFormat {
        let quantizer = self
            .first_parameter(bucket)
            .and_then(|first| first.quantizer.as_deref());
        match quantizer {
            None => ParameterFormat::Float,
            Some(quantizer) if quantizer.has_one_scale() => ParameterFormat::Fp8PerTensor,
            Some(_) => ParameterFormat::Fp8Blockwise,
        }
    }

    /// Returns the first parameter of a bucket. All parameters of a bucket have the same dtypes and format.
    fn first_parameter(&self, bucket: usize) -> Option<&ParameterInfo> {
        let first = self.layout.bucket(bucket).parameters.first();
        first.map(|parameter| &self.parameters[parameter.index])
    }

    /// Returns the quantizer of an FP8 weight.
    pub fn quantizer(&self, index: usize) -> &dyn WeightQuantizer {
        match &self.parameters[index].quantizer {
            Some(quantizer) => &**quantizer,
            None => unreachable!("parameter {index} is not an FP8 weight"),
        }
    }

    /// Returns the number of rows and columns of an FP8 weight.
    pub fn matrix(&self, index: usize) -> [usize; 2] {
        match self.parameters[index].shape[..] {
            [rows, columns] => [rows, columns],
            _ => unreachable!("FP8 weight {index} is a matrix"),
        }
    }

    /// Returns the position of a parameter in its bucket.
    pub fn position(&self, bucket: usize, index: usize) -> usize {
        let mut parameters = self.layout.bucket(bucket).parameters.iter();
        match parameters.position(|parameter| parameter.index == index) {
            Some(position) => position,
            None => unreachable!("parameter {index} lies in bucket {bucket}"),
        }
    }

    /// Returns the range of this rank's shard of a bucket.
    pub fn shard_range(&self, bucket: usize) -> Range<usize> {
        self.groups(bucket).shard_range(self.elements(bucket))
    }

    /// Returns the parameter slices in this rank's shard of a bucket.
    pub fn shard_slices(&self, bucket: usize) -> Vec<ParameterSlice> {
        self.layout.bucket(bucket).slices(self.shard_range(bucket))
    }

    /// Returns the bucket of a parameter, and its range in the bucket.
    pub fn location(&self, index: usize) -> (usize, Range<usize>) {
        match self.layout.find(index) {
            Some(location) => (location.bucket, location.range.clone()),
            None => unreachable!("parameter {index} is not in the table"),
        }
    }

    /// Returns an uninitialized flat tensor.
    pub fn uninitialized(&self, elements: usize, dtype: DType) -> Tensor<1> {
        match buffer_dtype(dtype).filter(|_| is_cpu(&self.device)) {
            Some(comm_dtype) => {
                let buffer = self.pool.take(comm_dtype, elements);
                from_buffer(buffer, [elements], &self.device, dtype)
            }
            None => Tensor::empty([elements], (&self.device, dtype)),
        }
    }

    /// Returns a flat tensor of zeros.
    pub fn zeros(&self, elements: usize, dtype: DType) -> Tensor<1> {
        match buffer_dtype(dtype).filter(|_| is_cpu(&self.device)) {
            Some(comm_dtype) => {
                let buffer = self.pool.take_zeroed(comm_dtype, elements);
                from_buffer(buffer, [elements], &self.device, dtype)
            }
            None => Tensor::zeros([elements], (&self.device, dtype)),
        }
    }

    /// Copies a tensor or view to new memory.
    pub fn copy(&self, x: Tensor<1>) -> Tensor<1> {
        let memory = self.uninitialized(x.dims()[0], x.dtype());
        flat::accumulate(memory, 0, x, false)
    }

    /// Copies a tensor from the host to the device.
    pub fn to_device(&self, x: Tensor<1>) -> Tensor<1> {
        if is_cpu(&self.device) {
            return self.copy(x);
        }
        to_device(x, &self.device)
    }

    /// Returns the memory of a tensor to the pool, if this is the only reference.
    pub fn recycle(&self, x: Tensor<1>) {
        if is_cpu(&self.device)
            && let Some(x) = if_unique(x)
        {
            self.pool.give(to_buffer(x));
        }
    }

    /// Fills the pool with the buffers that a step can need at once. Inputs of collectives return to the pool
    /// only after the slowest rank has read them, so the number of buffers depends on timing. This function
    /// reserves the maximum.
    pub fn reserve_pool(&self) {
        if !is_cpu(&self.device) {
            return;
        }
        let mut needed: BTreeMap<(&str, usize), (comm::DType, usize)> = BTreeMap::new();
        for bucket in 0..self.buckets() {
            for (dtype, elements, count, most) in self.peak_buffers(bucket) {
                if let Some(comm_dtype) = buffer_dtype(dtype) {
                    let (_, known) = needed
                        .entry((comm_dtype.name(), elements))
                        .or_insert((comm_dtype, 0));
                    *known = (*known + count).min(most);
                }
            }
        }
        for ((_, elements), (comm_dtype, count)) in needed {
            let taken: Vec<_> = (0..count)
                .map(|_| self.pool.take(comm_dtype, elements))
                .collect();
            taken.into_iter().for_each(|buffer| self.pool.give(buffer));
        }
    }

    /// Returns the buffers that a step needs at once for a bucket: dtype, elements and count. The last number
    /// is the maximum for all buckets of equal dtype and size together.
    fn peak_buffers(&self, bucket: usize) -> Vec<(DType, usize, usize, usize)> {
        let (whole, shard) = (self.elements(bucket), self.shard_range(bucket).len());
        let (model, main) = self.model_and_main_dtypes(bucket);
        let unlimited = usize::MAX;
        let mut buffers = match (self.stage(), self.groups(bucket).data.size()) {
            (_, 1) => return vec![(main, whole, 1, unlimited)],
            // All-reduce is not in place, and each rank computes a share of the sums.
            (ZeroStage::Replicated, ranks) => {
                return vec![
                    (main, whole, 2, unlimited),
                    (main, whole / ranks, 1, unlimited),
                ];
            }
            (ZeroStage::Optimizer, _) => vec![(main, whole, 1, unlimited)],
            // One bucket is filled, one bucket is reduced, and other ranks may still read two more buckets.
            (ZeroStage::Gradients, _) => vec![(main, whole, 2, 4)],
            (ZeroStage::Parameters, _) => vec![(main, whole, 2, 4), (model, whole, 2, 4)],
        };
        // The reduced shard, the stepped shard, and a shard that other ranks may still read.
        buffers.push((main, shard, 3, unlimited));
        if self.parameter_format(bucket) == ParameterFormat::Float {
            buffers.push((model, shard, 2, unlimited));
        }
        buffers
    }

    /// Gathers a bucket from the shards of the ranks. Collective: call on all ranks of the shard group.
    fn gather(&self, bucket: usize, shard: Tensor<1>) -> Tensor<1> {
        let comm = &self.groups(bucket).shard;
        match (comm.size(), self.elements(bucket)) {
            (1, _) | (_, 0) => shard,
            _ => start_all_gather(shard, 0, comm).wait(),
        }
    }

    /// Gathers every parameter from the shards of the buckets. Returns a tensor `[elements]` per parameter, in the
    /// order of the parameter table. Collective: call on all ranks of the shard groups.
    pub fn gather_parameters(&self, shards: impl Iterator<Item = Tensor<1>>) -> Vec<Tensor<1>> {
        let gather = |(bucket, shard)| self.gather(bucket, shard);
        let buckets: Vec<_> = shards.enumerate().map(gather).collect();
        let parameter = |index| {
            let (bucket, range) = self.location(index);
            buckets[bucket].clone().slice([range])
        };
        (0..self.parameters.len()).map(parameter).collect()
    }

    /// Counts the bytes of a tensor until it is dropped.
    pub fn track(&self, tensor: Tensor<1>, category: MemoryCategory) -> TrackedTensor {
        TrackedTensor::new(tensor, category, &self.usage)
    }
}

/// Returns the tensor if this is the only reference to its memory.
fn if_unique(x: Tensor<1>) -> Option<Tensor<1>> {
    let x = x.try_into_primitive::<Flex>().ok()?;
    x.is_unique().then(|| Tensor::from_primitive::<Flex>(x))
}

/// Returns the dtype of the master weight of a parameter that the model uses in dtype `model`.
pub(super) fn main_dtype(model: DType) -> DType {
    match model {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

fn is_cpu(device: &Device) -> bool {
    *device == Device::flex()
}
