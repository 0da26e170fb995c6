//! FP8 weights with block scales: their values are gathered and quantized on every rank.

use burn::tensor::{FloatDType, Tensor};

use super::Fp8Weights;
use crate::collective::start_all_gather;
use crate::data_parallel::layout::BucketParameter;
use crate::data_parallel::memory_usage::MemoryCategory;
use crate::data_parallel::sharding_plan::ShardingPlan;
use crate::mesh::ZeroStage;
use crate::nn::fp8::QuantizedWeight;

/// Starts to gather the values of a bucket in the dtype of the model, from this rank's master shard.
/// Collective: call on all ranks of the shard group.
pub(in crate::data_parallel) fn start(
    number: usize,
    master: &Tensor<1>,
    plan: &ShardingPlan,
) -> Fp8Weights {
    let dtype = plan.compute_dtype(number);
    let shard = if master.dtype() == dtype {
        plan.copy(master.clone())
    } else {
        master.clone().cast(FloatDType::from(dtype))
    };
    // Values reuse the memory of the gradient buffer, and count in the same category.
    let category = if plan.stage() >= ZeroStage::Gradients {
        MemoryCategory::Buffers
    } else {
        MemoryCategory::Gradients
    };
    let bytes = plan.elements(number) * dtype.size();
    let allocation = plan.usage.track(category, bytes);
    let pending = start_all_gather(shard, 0, &plan.groups(number).shard);
    Fp8Weights::GatheringValues(Box::new(pending), allocation)
}

/// Returns both copies of each weight of a bucket, from its gathered values.
pub(super) fn weights(
    number: usize,
    values: &Tensor<1>,
    plan: &ShardingPlan,
) -> Vec<QuantizedWeight> {
    let weight = |parameter: &BucketParameter| {
        let flat = values.clone().slice([parameter.range.clone()]);
        let matrix = flat.reshape(plan.matrix(parameter.index));
        plan.quantizer(parameter.index).quantize(matrix)
    };
    let parameters = plan.layout.bucket(number).parameters.iter();
    parameters.map(weight).collect()
}

/// Releases the values of a bucket. They return to the pool if they have the dtype of the gradients, which
/// reuse the memory. Otherwise they are freed, because the pool would hold them in addition to the gradients.
pub(super) fn discard(number: usize, values: Tensor<1>, plan: &ShardingPlan) {
    let (_, main) = plan.model_and_main_dtypes(number);
    if values.dtype() == main {
        plan.recycle(values);
    }
}
