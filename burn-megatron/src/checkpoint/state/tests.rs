//! Tests of write items as pure values: each element is written once, from the correct place, and evenly. Also
//! tests of type conversions.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;
use proptest::prelude::*;

use super::check::fits;
use super::{RunState, WriteItem, write_items};
use crate::checkpoint::{ElementType, local_shards};
use crate::comm;
use crate::data_parallel::layout::MAX_ELEMENTS;
use crate::data_parallel::layout::{BucketRules, BufferLayout, ParameterSize};
use crate::mesh::{Axis, Coordinates, Grid, Mesh, ParallelConfig};
use crate::nn::{MeshRank, ParameterEntry, Placement, Placements, Section};
use crate::optim::{LossScalerState, SpikeWindow, StepCount};

fn entry(path: &str, shape: &[usize], placement: Placement) -> ParameterEntry {
    ParameterEntry {
        placements: (Axis::Tensor, placement).into(),
        ..ParameterEntry::replicated(path, shape.to_vec())
    }
}

/// A padded embedding, joint queries, keys and values with two groups, a row split, and small and large
/// replicated parameters.
fn model(ranks: usize) -> Vec<ParameterEntry> {
    let groups = ranks.min(2);
    let sections = [(8, ranks), (4, groups), (4, groups)]
        .map(|(size, parts)| Section { size, parts })
        .to_vec();
    let mut embedding = entry("embedding", &[13, 6], Placement::split(0, 16, ranks));
    embedding.pipeline_copies = vec![0, 1];
    vec![
        embedding,
        entry("qkv", &[5, 16], Placement::Split { dim: 1, sections }),
        entry("down", &[8, 7], Placement::split(0, 8, ranks)),
        entry("norm", &[5], Placement::Replicated),
        entry("bias", &[3], Placement::Replicated),
        entry("positions", &[4099, 7], Placement::Replicated),
    ]
}

/// The flat buckets of a rank, with `value` for each element of the complete parameters.
fn buckets(
    layout: &BufferLayout,
    entries: &[ParameterEntry],
    rank: &MeshRank,
) -> Vec<Vec<Option<usize>>> {
    let mut buckets: Vec<_> = layout
        .buckets()
        .map(|(_, _, bucket)| vec![None; bucket.padded()])
        .collect();
    for (index, entry) in entries.iter().enumerate() {
        let whole: Vec<_> = (0..entry.len()).map(Some).collect();
        let part = entry.part(&whole, rank);
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
    /// The number of ranks of one sharding group.
    shard: usize,
    bucket: usize,
}

impl TestMesh {
    /// A rank of a pipeline with two stages.
    fn rank(&self, tensor: usize, data: usize, pipeline: usize) -> MeshRank {
        let config = ParallelConfig::new()
            .with_tensor(self.tensor)
            .with_pipeline(2);
        let mesh = Mesh::new(&config, 2 * self.tensor * self.data).unwrap();
        let rank = mesh.rank_at(Coordinates {
            tensor,
            data,
            pipeline,
            ..Coordinates::default()
        });
        MeshRank::new(mesh.into(), rank)
    }

    fn layout(&self, entries: &[ParameterEntry]) -> BufferLayout {
        let rank = self.rank(0, 0, 0);
        let size = |entry: &ParameterEntry| ParameterSize {
            elements: entry.local_shape(&rank).iter().product(),
            parameter: comm::DType::F32,
            gradient: comm::DType::F32,
            grid: entry.grid,
            shared: entry.is_tied(),
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

    /// The range of a bucket that a rank optimizes, and the range that it writes.
    fn ranges(&self, data: usize, elements: usize) -> (Range<usize>, Range<usize>) {
        let nth = |number, len| number * len..(number + 1) * len;
        let replicas = self.data / self.shard;
        let part = data % self.shard * replicas + data / self.shard;
        (
            nth(data % self.shard, elements / self.shard),
            nth(part, elements / self.data),
        )
    }

    /// The items of each rank of the first or the last stage, with its index on the data axis.
    fn written(
        &self,
        entries: &[ParameterEntry],
        first: bool,
    ) -> Vec<(MeshRank, usize, Vec<WriteItem>)> {
        let layout = self.layout(entries);
        let mut written = vec![];
        for tensor in 0..self.tensor {
            for data in 0..self.data {
                let rank = self.rank(tensor, data, usize::from(!first));
                let of = |bucket| self.ranges(data, layout.bucket(bucket).padded());
                let items = write_items(&layout, entries, &rank, of);
                written.push((rank, data, items));
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
        for (rank, data, items) in ranks.written(&entries, true) {
            let buckets = buckets(&layout, &entries, &rank);
            for item in items {
                let (own, _) = ranks.ranges(data, buckets[item.bucket].len());
                let range = &buckets[item.bucket][own][item.source.clone()];
                let entry = &entries[item.index];
                let whole = item.shard.global.runs(&entry.shape);
                let whole = whole.iter().flat_map(|run| run.in_tensor..run.in_tensor + run.len);
                let runs = item.shard.local.runs(&entry.local_shape(&rank));
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
        let elements = |items: &[WriteItem]| {
            items
                .iter()
                .map(|item| item.shard.global.len())
                .sum::<usize>()
        };
        let shares: Vec<_> = written.iter().map(|(.., items)| elements(items)).collect();
        assert_eq!(shares.iter().sum::<usize>(), all);
        let most = *shares.iter().max().unwrap() as f64;
        assert!(most / (all as f64 / 8.0) < 1.06, "{shares:?}");
    }
}

/// Experts split over two axes of the expert grid, with replicas on the ranks of its data axis.
fn experts(config: &ParallelConfig, ranks: usize) -> (Vec<ParameterEntry>, Vec<MeshRank>) {
    let mesh = Arc::new(Mesh::new(config, ranks).unwrap());
    let [expert, tensor] =
        [Axis::Expert, Axis::ExpertTensor].map(|axis| mesh.size(Grid::Expert, axis));
    let in_grid = |entry| ParameterEntry {
        grid: Grid::Expert,
        sum_over: Grid::Expert.data_axes(),
        ..entry
    };
    // Two sections over the tensor ranks, the second with replicas. The experts are padded from 7 to 8.
    let sections = [(8, tensor), (4, 1)].map(|(size, parts)| Section { size, parts });
    let mut up = in_grid(entry("up", &[7, 3, 12], Placement::Replicated));
    up.placements = Placements::from((Axis::Expert, Placement::split(0, 8, expert))).with(
        Axis::ExpertTensor,
        Placement::Split {
            dim: 2,
            sections: sections.to_vec(),
        },
    );
    let mut bias = in_grid(entry("bias", &[7, 5], Placement::Replicated));
    bias.placements = (Axis::Expert, Placement::split(0, 8, expert)).into();
    let entries = vec![
        up,
        bias,
        in_grid(entry("scale", &[9], Placement::Replicated)),
    ];
    for entry in &entries {
        entry.check(&mesh).unwrap();
    }
    let ranks = (0..ranks).map(|rank| MeshRank::new(mesh.clone(), rank));
    (entries, ranks.collect())
}

#[test]
fn a_parameter_split_over_two_axes_is_saved_once_and_loaded_by_another_mesh() {
    let config = ParallelConfig::new().with_expert_tensor(2).with_expert(2);
    let (entries, ranks) = experts(&config, 8);
    let mut saved: Vec<_> = entries
        .iter()
        .map(|entry| vec![None; entry.len()])
        .collect();
    for rank in &ranks {
        let size = |entry: &ParameterEntry| ParameterSize {
            elements: entry.local_shape(rank).iter().product(),
            parameter: comm::DType::F32,
            gradient: comm::DType::F32,
            grid: Grid::Expert,
            shared: false,
            unit: 0,
            quantized_bytes: None,
        };
        let sizes: Vec<_> = entries.iter().map(size).collect();
        let data = rank.on(Grid::Expert, Axis::Data);
        let layout = BufferLayout::new(&sizes, &BucketRules::sharded(data.size)).unwrap();
        let buckets = buckets(&layout, &entries, rank);
        let ranges = |bucket: usize| {
            let (all, part) = (buckets[bucket].len(), buckets[bucket].len() / data.size);
            (0..all, part * data.index..part * (data.index + 1))
        };
        for item in write_items(&layout, &entries, rank, ranges) {
            let entry = &entries[item.index];
            let values = &buckets[item.bucket][item.source.clone()];
            let local = item.shard.local.runs(&entry.local_shape(rank));
            let local = local
                .iter()
                .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
            let global = item.shard.global.runs(&entry.shape);
            let global = global
                .iter()
                .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
            for (from, to) in local.zip(global) {
                let value = values[from - item.local_start];
                assert_eq!(
                    saved[item.index][to].replace(value),
                    None,
                    "{} twice",
                    entry.path
                );
            }
        }
    }
    let whole =
        |entry: &ParameterEntry| (0..entry.len()).map(|i| Some(Some(i))).collect::<Vec<_>>();
    assert_eq!(saved, entries.iter().map(whole).collect::<Vec<_>>());

    let config = ParallelConfig::new().with_expert_tensor(1).with_expert(4);
    let (entries, ranks) = experts(&config, 4);
    for rank in &ranks {
        for (entry, saved) in entries.iter().zip(&saved) {
            let (shape, saved) = (entry.local_shape(rank), saved.iter().copied().flatten());
            let saved: Vec<Option<usize>> = saved.collect();
            let mut loaded = vec![None; shape.iter().product()];
            for shard in local_shards(entry, rank, 0..loaded.len()) {
                let global = shard.global.runs(&entry.shape);
                let global = global
                    .iter()
                    .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
                let local = shard.local.runs(&shape);
                let local = local
                    .iter()
                    .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
                for (from, to) in global.zip(local) {
                    loaded[to] = saved[from];
                }
            }
            assert_eq!(loaded, entry.part(&saved, rank), "{}", entry.path);
        }
    }
}

/// A large parameter is never in memory completely.
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
    let len: usize = items.iter().map(|item| item.shard.global.len()).sum();
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
            spikes: 1,
        },
        samples: 72,
        seed: u64::MAX,
        loss_scaler: Some(LossScalerState {
            scale: 0.1 + 0.2,
            good_steps: 3,
            overflows: 1,
        }),
        spikes: Some(SpikeWindow::default()),
        hooks: [("own".to_owned(), 7.into())].into(),
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
