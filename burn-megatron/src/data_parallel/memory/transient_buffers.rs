//! The temporary buffers of a step.

use std::collections::BTreeMap;

use super::rules::{MemoryRules, element_bytes};
use crate::comm::DType;
use crate::data_parallel::layout::{Bucket, BufferLayout, FlatBuffer};
use crate::mesh::ZeroStage;

/// Returns the [`buffers`](super::MemoryPlan::buffers) of a plan, in bytes.
pub(super) fn transient_buffers(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    match rules.stage {
        ZeroStage::Replicated => 0,
        ZeroStage::Optimizer | ZeroStage::Gradients if rules.static_buffers => {
            step_buffers(layout, rules).max(gathered(layout))
        }
        ZeroStage::Optimizer => step_buffers(layout, rules),
        ZeroStage::Gradients => step_buffers(layout, rules).max(gradients_in_flight(layout, rules)),
        ZeroStage::Parameters => gathered_units(layout) + gradients_in_flight(layout, rules),
    }
}

/// Returns the size of the buffers of the optimizer step: a shard, or the FP8 codes that are gathered after it.
fn step_buffers(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    largest_shard(layout, rules).max(codes_in_flight(layout))
}

/// Returns the size of all gathered parameters.
fn gathered(layout: &BufferLayout) -> u128 {
    let bytes = |buffer: &FlatBuffer| buffer.elements as u128 * element_bytes(buffer.key.parameter);
    layout.buffers.iter().map(bytes).sum()
}

/// Returns the size of all buckets that are gathered as FP8 codes.
fn codes_in_flight(layout: &BufferLayout) -> u128 {
    let codes = layout
        .buffers
        .iter()
        .filter(|buffer| buffer.key.quantized && buffer.key.parameter == DType::U8);
    codes.map(|buffer| buffer.elements as u128).sum()
}

/// Returns the size of the rank's shard of the largest bucket. FP8 buckets do not count, because their master weights
/// are stepped in place.
fn largest_shard(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    let bytes = |(_, buffer, bucket): (usize, &FlatBuffer, &Bucket)| {
        let shards = rules.shards.unwrap_or(bucket.shards) as u128;
        bytes(bucket, buffer.key.parameter) / shards
    };
    let floats = layout
        .buckets()
        .filter(|(_, buffer, _)| !buffer.key.quantized);
    floats.map(bytes).max().unwrap_or(0)
}

/// Returns the size of two adjacent buckets of each buffer and all shared buckets. With hybrid sharding it
/// includes the rank's shard of the previous bucket, which is summed over the replicas.
fn gradients_in_flight(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    let in_flight = |buffer: &FlatBuffer| {
        let (shared, others): (Vec<&Bucket>, Vec<_>) =
            buffer.buckets.iter().partition(|bucket| bucket.shared);
        let bytes = |bucket: &Bucket| bytes(bucket, buffer.key.gradient);
        let sizes: Vec<_> = others.into_iter().map(bytes).collect();
        let largest = sizes.iter().max().copied().unwrap_or(0);
        let over_replicas = rules.shards.map_or(0, |shards| largest / shards as u128);
        let shared: u128 = shared.into_iter().map(bytes).sum();
        largest_adjacent_pair(&sizes) + over_replicas + shared
    };
    layout.buffers.iter().map(in_flight).sum()
}

/// Returns the size of the largest pair of adjacent units of the model, in the order of the parameter table. A shared
/// unit is used again at the end.
pub(super) fn gathered_units(layout: &BufferLayout) -> u128 {
    let mut unit_bytes: BTreeMap<usize, u128> = BTreeMap::new();
    let (mut parameters, mut shared) = (vec![], vec![]);
    for (_, buffer, bucket) in layout.buckets() {
        *unit_bytes.entry(bucket.unit).or_default() += bytes(bucket, buffer.key.parameter);
        parameters.extend(
            bucket
                .parameters
                .iter()
                .map(|parameter| (parameter.index, bucket.unit)),
        );
        shared.extend(bucket.shared.then_some(bucket.unit));
    }
    parameters.sort();
    let mut order: Vec<_> = parameters
        .into_iter()
        .map(|(_, unit)| unit)
        .chain(shared)
        .collect();
    order.dedup();
    let sizes: Vec<_> = order.iter().map(|unit| unit_bytes[unit]).collect();
    largest_adjacent_pair(&sizes)
}

/// Returns the largest sum of two adjacent sizes, or the only size.
fn largest_adjacent_pair(sizes: &[u128]) -> u128 {
    match sizes {
        [only] => *only,
        sizes => sizes
            .windows(2)
            .map(|pair| pair[0] + pair[1])
            .max()
            .unwrap_or(0),
    }
}

fn bytes(bucket: &Bucket, dtype: DType) -> u128 {
    bucket.padded() as u128 * element_bytes(dtype)
}
