//! What comes and goes within a step.

use std::collections::BTreeMap;

use super::{MemoryRules, ZeroStage};
use crate::comm::DType;
use crate::data_parallel::layout::{Bucket, BufferLayout, FlatBuffer};

/// The [`buffers`](super::MemoryPlan::buffers) of a plan.
pub(super) fn transient(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    match rules.stage {
        ZeroStage::Replicated => 0,
        ZeroStage::Optimizer => stepping(layout, rules),
        ZeroStage::Gradients => stepping(layout, rules).max(gradients_in_flight(layout)),
        ZeroStage::Parameters => gathered_parts(layout) + gradients_in_flight(layout),
    }
}

/// What the step takes: a shard, and when all are stepped the codes that are gathered.
fn stepping(layout: &BufferLayout, rules: &MemoryRules) -> u128 {
    largest_shard(layout, rules).max(codes_in_flight(layout))
}

/// The codes of all buckets whose codes are gathered.
fn codes_in_flight(layout: &BufferLayout) -> u128 {
    let codes = layout
        .buffers
        .iter()
        .filter(|buffer| buffer.key.quantized && buffer.key.parameter == DType::U8);
    codes.map(|buffer| buffer.elements as u128).sum()
}

/// The rank's shard of the bucket that has the most bytes; none where the master is what is stepped.
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

/// Two neighbouring buckets of each buffer, and all that are shared.
fn gradients_in_flight(layout: &BufferLayout) -> u128 {
    let of = |buffer: &FlatBuffer| {
        let (shared, own): (Vec<&Bucket>, Vec<_>) =
            buffer.buckets.iter().partition(|bucket| bucket.shared);
        let bytes = |bucket: &Bucket| bytes(bucket, buffer.key.gradient);
        let own: Vec<_> = own.into_iter().map(bytes).collect();
        largest_neighbours(&own) + shared.into_iter().map(bytes).sum::<u128>()
    };
    layout.buffers.iter().map(of).sum()
}

/// Two neighbouring parts of the model, in the order of the table. A shared part is used once more
/// after the last.
fn gathered_parts(layout: &BufferLayout) -> u128 {
    let mut of_part: BTreeMap<usize, u128> = BTreeMap::new();
    let (mut order, mut again) = (vec![], vec![]);
    for (_, buffer, bucket) in layout.buckets() {
        *of_part.entry(bucket.part).or_default() += bytes(bucket, buffer.key.parameter);
        order.extend(
            bucket
                .parameters
                .iter()
                .map(|placed| (placed.index, bucket.part)),
        );
        again.extend(bucket.shared.then_some(bucket.part));
    }
    order.sort();
    let mut order: Vec<_> = order
        .into_iter()
        .map(|(_, part)| part)
        .chain(again)
        .collect();
    order.dedup();
    let sizes: Vec<_> = order.iter().map(|part| of_part[part]).collect();
    largest_neighbours(&sizes)
}

/// The largest sum of two neighbours, or the only one.
fn largest_neighbours(sizes: &[u128]) -> u128 {
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
    bucket.padded() as u128 * size(dtype)
}

/// Bytes of an element.
pub(super) fn size(dtype: DType) -> u128 {
    dtype.size_of() as u128
}
