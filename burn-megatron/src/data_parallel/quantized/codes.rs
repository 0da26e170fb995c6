//! FP8 weights with a per-tensor scale: the master weights are encoded, the codes are gathered, and both copies of the
//! weights are computed from the codes.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::fp8::{self, Fp8Matrix};

use super::Fp8Weights;
use crate::collective::{self, CollectiveOp, start_all_gather_packed_coalesced};
use crate::comm::ReduceOp;
use crate::data_parallel::layout::BucketParameter;
use crate::data_parallel::memory_usage::MemoryCategory;
use crate::data_parallel::sharding_groups::ShardingGroups;
use crate::data_parallel::sharding_plan::ShardingPlan;
use crate::nn::fp8::QuantizedWeight;

/// The number of FP8 codes per 32-bit word.
const CODES_PER_WORD: usize = 4;

/// Starts to gather the codes of some buckets of one grid. Each bucket is given with this rank's master shard.
/// All buckets share one amax reduction and one gather call. Collective: call on all ranks of the stage.
pub(in crate::data_parallel) fn start(
    groups: &ShardingGroups,
    masters: &[(usize, Tensor<1>)],
    plan: &ShardingPlan,
) -> Vec<Fp8Weights> {
    let mut all_scales = scales(groups, masters, plan).into_iter();
    let mut descales = vec![];
    let encode_bucket = |(number, master): &(usize, Tensor<1>)| {
        let count = plan.layout.bucket(*number).parameters.len();
        let scales: Vec<_> = all_scales.by_ref().take(count).collect();
        let words = encode(*number, master, &scales, plan);
        descales.push(scales.into_iter().map(Tensor::recip).collect::<Vec<_>>());
        words
    };
    let words: Vec<_> = masters.iter().map(encode_bucket).collect();
    let pending = start_all_gather_packed_coalesced(words, &groups.shard).into_iter();
    let gathering = |((pending, descales), (number, _)): ((_, _), &(usize, Tensor<1>))| {
        let bytes = plan.elements(*number);
        let allocation = plan.usage.track(MemoryCategory::Buffers, bytes);
        Fp8Weights::GatheringCodes(Box::new(pending), allocation, descales)
    };
    pending.zip(descales).zip(masters).map(gathering).collect()
}

/// Returns the scale of each weight, `[1]`, in the order of the buckets.
fn scales(
    groups: &ShardingGroups,
    masters: &[(usize, Tensor<1>)],
    plan: &ShardingPlan,
) -> Vec<Tensor<1>> {
    let by_weight: Vec<_> = masters
        .iter()
        .flat_map(|(number, master)| amaxes(*number, master, plan))
        .collect();
    if by_weight.is_empty() {
        return vec![];
    }
    let amaxes = Tensor::cat(by_weight, 0);
    // Not all engines propagate NaN in a maximum. Infinity gives the same scale.
    let local = amaxes.clone().mask_fill(amaxes.is_nan(), f32::INFINITY);
    let largest = [&groups.data, &groups.tensor]
        .into_iter()
        .fold(local, |amax, comm| {
            collective::start(amax, &CollectiveOp::AllReduce(ReduceOp::Max), comm).wait()
        });
    let weights = masters
        .iter()
        .flat_map(|(number, _)| &plan.layout.bucket(*number).parameters);
    let scale = |(position, parameter): (usize, &BucketParameter)| {
        plan.quantizer(parameter.index)
            .scale(largest.clone().narrow(0, position, 1))
    };
    weights.enumerate().map(scale).collect()
}

/// Returns the amax of each weight in this rank's master shard of a bucket, `[1]` in f32. It is 0 for an empty
/// slice.
fn amaxes(number: usize, master: &Tensor<1>, plan: &ShardingPlan) -> Vec<Tensor<1>> {
    let zero = || Tensor::zeros([1], (&plan.device, DType::F32));
    let parameters = &plan.layout.bucket(number).parameters;
    let mut amaxes: Vec<_> = parameters.iter().map(|_| None).collect();
    for slice in plan.shard_slices(number) {
        let len = slice.local_range.len();
        let values = master.clone().slice([slice.local_range]).reshape([1, len]);
        amaxes[plan.position(number, slice.index)] = Some(fp8::amax(values));
    }
    let amax = |amax: Option<_>| amax.unwrap_or_else(zero);
    amaxes.into_iter().map(amax).collect()
}

/// Returns the packed codes of this rank's master shard of a bucket, with zeros between the weights.
fn encode(
    number: usize,
    master: &Tensor<1>,
    scales: &[Tensor<1>],
    plan: &ShardingPlan,
) -> Tensor<1, Int> {
    let shard_words = plan.shard_range(number).len() / CODES_PER_WORD;
    let (mut parts, mut end) = (vec![], 0);
    let zeros = |words| Tensor::<1, Int>::zeros([words], (&plan.device, DType::U32));
    for slice in plan.shard_slices(number) {
        let begin = slice.local_range.start / CODES_PER_WORD;
        if begin > end {
            parts.push(zeros(begin - end));
        }
        let values: Tensor<1> = master
            .clone()
            .slice([slice.local_range])
            .cast(FloatDType::F32);
        let scale = scales[plan.position(number, slice.index)].clone();
        let codes = fp8::encode(values * scale, plan.quantizer(slice.index).format());
        end = begin + codes.dims()[0];
        parts.push(codes);
    }
    if shard_words > end || parts.is_empty() {
        parts.push(zeros(shard_words - end));
    }
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

/// Returns both copies of each weight of a bucket, from its gathered codes.
pub(super) fn weights(
    number: usize,
    words: &Tensor<1, Int>,
    descales: Vec<Tensor<1>>,
    plan: &ShardingPlan,
) -> Vec<QuantizedWeight> {
    let parameters = plan.layout.bucket(number).parameters.iter();
    let weight = |(parameter, descale): (&BucketParameter, Tensor<1>)| {
        let range =
            parameter.range.start / CODES_PER_WORD..parameter.range.end.div_ceil(CODES_PER_WORD);
        let codes = words.clone().slice([range]);
        let format = plan.quantizer(parameter.index).format();
        let rowwise = Fp8Matrix::from_flat(codes, plan.matrix(parameter.index), descale, format);
        let columnwise = rowwise.transposed();
        QuantizedWeight {
            rowwise,
            columnwise,
        }
    };
    parameters.zip(descales).map(weight).collect()
}
