//! Write items as pure values: each element once, from the right place, evenly; and which types convert.

use std::ops::Range;

use burn::tensor::DType;
use proptest::prelude::*;

use super::check::fits;
use super::write_items::MAX_ELEMENTS;
use super::{RunState, WriteItem, write_items};
use crate::checkpoint::ElementType;
use crate::comm;
use crate::data_parallel::layout::{BucketRules, BufferLayout, ParameterSize};
use crate::mesh::AxisRank;
use crate::nn::{ParameterEntry, Placement, Section};
use crate::optim::{LossScalerState, StepCount};

fn entry(path: &str, shape: &[usize], placement: Placement) -> ParameterEntry {
    ParameterEntry {
        path: path.into(),
        shape: shape.to_vec(),
        placement,
        sum_over_tensor: false,
        decay: true,
        tied_across_pipeline: false,
        stage: 0,
    }
}

/// Padded embedding, joint queries, keys and values with two groups, a row split, small and large
/// replicated parameters.
fn model(ranks: usize) -> Vec<ParameterEntry> {
    let groups = ranks.min(2);
    let sections = [(8, ranks), (4, groups), (4, groups)]
        .map(|(size, parts)| Section { size, parts })
        .to_vec();
    let mut embedding = entry("embedding", &[13, 6], Placement::split(0, 16, ranks));
    embedding.tied_across_pipeline = true;
    vec![
        embedding,
        entry("qkv", &[5, 16], Placement::Split { dim: 1, sections }),
        entry("down", &[8, 7], Placement::split(0, 8, ranks)),
        entry("norm", &[5], Placement::Replicated),
        entry("bias", &[3], Placement::Replicated),
        entry("positions", &[4099, 7], Placement::Replicated),
    ]
}

/// The flat buckets of a rank, with `value` for each element of the whole parameters.
fn buckets(
    layout: &BufferLayout,
    entries: &[ParameterEntry],
    place: AxisRank,
) -> Vec<Vec<Option<usize>>> {
    let mut buckets: Vec<_> = layout
        .buckets()
        .map(|(_, _, bucket)| vec![None; bucket.padded()])
        .collect();
    for (index, entry) in entries.iter().enumerate() {
        let whole: Vec<_> = (0..entry.len()).map(Some).collect();
        let part = entry.placement.part(&entry.shape, &whole, place);
        let at = layout.find(index).unwrap();
        buckets[at.bucket][at.range.clone()].copy_from_slice(&part);
    }
    buckets
}

/// A mesh of ranks that share a model.
#[derive(Clone, Copy, Debug)]
struct TestMesh {
    tensor: usize,
    data: usize,
    /// TestMesh of one sharding group.
    shard: usize,
    bucket: usize,
}

impl TestMesh {
    fn layout(&self, entries: &[ParameterEntry]) -> BufferLayout {
        let place = AxisRank {
            index: 0,
            size: self.tensor,
        };
        let size = |entry: &ParameterEntry| ParameterSize {
            elements: entry.local_shape(place).iter().product(),
            parameter: comm::DType::F32,
            gradient: comm::DType::F32,
            expert: false,
            shared: entry.tied_across_pipeline,
            unit: 0,
            quantized_bytes: None,
        };
        let sizes: Vec<_> = entries.iter().map(size).collect();
        let rules = BucketRules {
            size: Some(self.bucket),
            ..BucketRules::sharded(self.data)
        };
        BufferLayout::new(&sizes, &rules).unwrap()
    }

    /// The range that a rank optimizes of a bucket, and the one that it writes.
    fn ranges(&self, data: usize, elements: usize) -> (Range<usize>, Range<usize>) {
        let nth = |number, len| number * len..(number + 1) * len;
        let replicas = self.data / self.shard;
        let part = data % self.shard * replicas + data / self.shard;
        (
            nth(data % self.shard, elements / self.shard),
            nth(part, elements / self.data),
        )
    }

    /// The items of each rank, with its place on the tensor and the data axis.
    fn written(
        &self,
        entries: &[ParameterEntry],
        first: bool,
    ) -> Vec<(AxisRank, usize, Vec<WriteItem>)> {
        let layout = self.layout(entries);
        let mut written = vec![];
        for index in 0..self.tensor {
            let place = AxisRank {
                index,
                size: self.tensor,
            };
            for data in 0..self.data {
                let of = |bucket| self.ranges(data, layout.bucket(bucket).padded());
                written.push((place, data, write_items(&layout, entries, place, first, of)));
            }
        }
        written
    }
}

fn meshes() -> impl Strategy<Value = TestMesh> {
    let sizes = (
        prop::sample::select(vec![1usize, 2, 4]),
        prop::sample::select(vec![
            (1usize, 1usize),
            (2, 1),
            (2, 2),
            (3, 3),
            (4, 1),
            (4, 2),
            (6, 2),
        ]),
        prop::sample::select(vec![1usize, 40, 3000, 1 << 20]),
    );
    sizes.prop_map(|(tensor, (data, shard), bucket)| TestMesh {
        tensor,
        data,
        shard,
        bucket,
    })
}

proptest! {
    #[test]
    fn all_ranks_together_write_each_element_once_from_where_it_lies(ranks in meshes()) {
        let entries = model(ranks.tensor);
        let layout = ranks.layout(&entries);
        let mut times: Vec<_> = entries.iter().map(|entry| vec![0; entry.len()]).collect();
        for (place, data, items) in ranks.written(&entries, true) {
            let buckets = buckets(&layout, &entries, place);
            for item in items {
                let (own, _) = ranks.ranges(data, buckets[item.bucket].len());
                let range = &buckets[item.bucket][own][item.source.clone()];
                let entry = &entries[item.index];
                let whole = item.global.runs(&entry.shape);
                let whole = whole.iter().flat_map(|run| run.in_tensor..run.in_tensor + run.len);
                let runs = item.local.runs(&entry.local_shape(place));
                let found: Vec<_> = runs.iter().flat_map(|run| {
                    let at = run.in_tensor - item.local_start;
                    range[at..at + run.len].iter()
                }).copied().collect();
                let whole: Vec<_> = whole.map(Some).collect();
                prop_assert_eq!(&found, &whole, "{}", entry.path);
                found.into_iter().flatten().for_each(|element| times[item.index][element] += 1);
            }
        }
        for (entry, times) in entries.iter().zip(times) {
            prop_assert!(times.iter().all(|times| *times == 1), "{}: {times:?}", entry.path);
        }
    }
}

#[test]
fn the_last_rank_of_a_pipeline_leaves_what_the_first_one_has() {
    let ranks = TestMesh {
        tensor: 2,
        data: 2,
        shard: 1,
        bucket: 100,
    };
    let entries = model(2);
    for (_, _, items) in ranks.written(&entries, false) {
        assert!(items.iter().all(|item| item.index != 0));
    }
    let mut first = ranks.written(&entries, true).into_iter();
    assert!(first.any(|(_, _, items)| items.iter().any(|item| item.index == 0)));
}

/// With any sharding, the ranks of both axes write equal shares.
#[test]
fn the_work_is_shared_evenly() {
    let large = |path: &str| entry(path, &[512, 1024], Placement::split(1, 1024, 2));
    let mut entries: Vec<_> = ["a", "b", "c", "d"].map(large).to_vec();
    entries.push(entry("positions", &[512, 256], Placement::Replicated));
    entries.extend((0..8).map(|i| entry(&format!("norm{i}"), &[256], Placement::Replicated)));
    let all: usize = entries.iter().map(ParameterEntry::len).sum();
    for shard in [1, 2, 4] {
        let ranks = TestMesh {
            tensor: 2,
            data: 4,
            shard,
            bucket: 300_000,
        };
        let written = ranks.written(&entries, true);
        let elements =
            |items: &[WriteItem]| items.iter().map(|item| item.global.len()).sum::<usize>();
        let shares: Vec<_> = written.iter().map(|(.., items)| elements(items)).collect();
        assert_eq!(shares.iter().sum::<usize>(), all);
        let most = *shares.iter().max().unwrap() as f64;
        assert!(most / (all as f64 / 8.0) < 1.06, "{shares:?}");
    }
}

/// A large parameter is never in memory as a whole.
#[test]
fn write_items_are_bounded() {
    let entries = [entry("embedding", &[50, 24], Placement::Replicated)];
    let ranks = TestMesh {
        tensor: 1,
        data: 1,
        shard: 1,
        bucket: 1 << 30,
    };
    let (.., items) = ranks.written(&entries, true).swap_remove(0);
    assert!(items.iter().all(|item| item.source.len() <= MAX_ELEMENTS));
    let len: usize = items.iter().map(|item| item.global.len()).sum();
    assert_eq!(len, 50 * 24);
}

#[test]
fn types_fit_where_nothing_is_rounded() {
    use ElementType::{Bf16, F16, F32, F64, I32};
    let lossless = [
        (F64, DType::F64),
        (F32, DType::F64),
        (F32, DType::F32),
        (F16, DType::F16),
        (F16, DType::F32),
        (F16, DType::F64),
        (Bf16, DType::BF16),
        (Bf16, DType::F32),
        (Bf16, DType::F64),
    ];
    for from in [F64, F32, F16, Bf16] {
        for to in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            assert_eq!(
                fits(from, to, false),
                lossless.contains(&(from, to)),
                "{from:?} {to:?}"
            );
            assert!(fits(from, to, true));
        }
    }
    assert!(!fits(I32, DType::F32, true));
}

#[test]
fn the_state_of_a_run_comes_back_from_json() {
    let state = RunState {
        count: StepCount {
            taken: 7,
            skipped: 2,
            consecutive_skips: 1,
            without_targets: 0,
        },
        samples: 72,
        seed: u64::MAX,
        loss_scaler: Some(LossScalerState {
            scale: 0.1 + 0.2,
            good_steps: 3,
            overflows: 1,
        }),
    };
    let json = serde_json::to_value(&state).unwrap();
    assert_eq!(
        serde_json::from_value::<RunState>(json.clone()).unwrap(),
        state
    );
    let mut strange = json;
    strange["later"] = 1.into();
    let error = serde_json::from_value::<RunState>(strange).unwrap_err();
    assert!(
        error.to_string().contains("unknown field `later`"),
        "{error}"
    );
}
