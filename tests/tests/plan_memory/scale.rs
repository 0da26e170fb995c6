//! Tests the preparation of a run of 16,384 ranks on one rank: its mesh, its groups, its schedules and its plan.

use std::sync::Arc;
use std::time::Duration;

use burn_megatron::comm::{OfflineCommunicator, ParallelContext};
use burn_megatron::mesh::{Axis, Grid, Mesh, ParallelConfig, ScheduleKind};
use burn_megatron::pipeline::schedule::{StageTimes, simulate, validate};
use burn_megatron::pipeline::schedule_of;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_plan::memory::{MemoryRequest, plan_memory};
use burn_megatron_tests::heap::ThreadHeap;

use super::llama;
use super::requests::Settings;

const RANKS: usize = 16_384;
const MICRO_BATCHES: usize = 128;
/// The maximum memory of the whole preparation, in bytes.
const MEMORY: usize = 1 << 30;
/// The maximum CPU time. It was measured: see the page on the number of ranks. Other machines are slower.
const TIME: Duration = Duration::from_secs(60);

/// Returns Llama 3.1 405B in the published layout for this number of devices, with 128 layers instead of 126: tensor
/// 8, pipeline 16, data 128. Its weights take 1.6 TB.
fn dense() -> (TransformerConfig, ParallelConfig) {
    let config = TransformerConfig {
        vocabulary: 128_256,
        context: 8192,
        hidden: 16_384,
        layers: 128,
        heads: 128,
        groups: Some(8),
        mlp_width: Some(53_248),
        dropout: 0.0,
        ..llama()
    };
    let layout = ParallelConfig::new()
        .with_tensor(8)
        .with_sequence_parallel(true)
        .with_pipeline(16)
        .with_ranks_per_node(8);
    (config, layout)
}

/// Returns a model of the size of DeepSeek-V3: 256 experts, each split over 64 ranks.
fn experts() -> (TransformerConfig, ParallelConfig) {
    let config = TransformerConfig {
        context: 4096,
        hidden: 7168,
        layers: 64,
        moe: Some(MoeConfig {
            experts: 256,
            experts_per_token: 8,
            expert_width: Some(2048),
            first_dense: 3,
            ..MoeConfig::default()
        }),
        ..dense().0
    };
    let layout = ParallelConfig::new()
        .with_tensor(2)
        .with_sequence_parallel(true)
        .with_context(2)
        .with_pipeline(16)
        .with_expert(64)
        .with_expert_tensor(1);
    (config, layout)
}

/// Returns the CPU time of this thread. Other threads of the machine do not count.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid and points to a timespec.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs a part of the preparation, and prints its seconds and bytes.
fn measure<T>(heap: ThreadHeap, what: &str, part: impl FnOnce() -> T) -> T {
    let (before, began) = (heap.live(), processor_time());
    heap.reset_peak();
    let result = part();
    let mib = (heap.peak() - before) as f64 / f64::from(1 << 20);
    let seconds = (processor_time() - began).as_secs_f64();
    println!("{what}: {seconds:.3} s, {mib:.1} MiB");
    result
}

/// Returns the mesh after looking up the coordinates of each rank.
fn mesh(layout: &ParallelConfig) -> Mesh {
    let mesh = Mesh::new(layout, RANKS).unwrap();
    for rank in 0..RANKS {
        assert_eq!(mesh.rank_at(mesh.coordinates(rank)), rank);
        assert_eq!(mesh.expert_rank_at(mesh.expert_coordinates(rank)), rank);
    }
    mesh
}

/// Creates all groups of layers and of the data axis, as a rank of a running world does.
fn groups(mesh: &Mesh, rank: usize) {
    let world = Arc::new(OfflineCommunicator::world(RANKS, rank));
    let groups = ParallelContext::from_mesh(mesh.clone(), world).unwrap();
    let sets: [(Grid, &[Axis]); 7] = [
        (Grid::Dense, &[Axis::Tensor, Axis::Context]),
        (Grid::Dense, &[Axis::Context, Axis::Data]),
        (Grid::Dense, &[Axis::Tensor, Axis::Data]),
        (Grid::Dense, &[Axis::Tensor, Axis::Pipeline]),
        (Grid::Expert, &[Axis::Expert]),
        (Grid::Expert, &[Axis::Expert, Axis::ExpertTensor]),
        (Grid::Expert, &[Axis::Data]),
    ];
    for (grid, axes) in sets {
        let group = groups.group(grid, axes.to_vec()).unwrap();
        assert_eq!(group.group().world_rank(), rank);
        groups.node_groups(grid, axes.to_vec()).unwrap();
    }
}

/// Generates, validates and simulates every schedule of the pipeline.
fn schedules(layout: &ParallelConfig) {
    for kind in ScheduleKind::ALL {
        let layout = layout.clone().with_schedule(kind);
        let schedule = schedule_of(&layout, MICRO_BATCHES).unwrap();
        validate(&schedule).unwrap();
        let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.1);
        assert!(simulate(&schedule, &times).unwrap().total() > 0.0);
    }
}

fn plan(config: &TransformerConfig, layout: &ParallelConfig) {
    let settings = Settings::in_bf16_with_zero_1();
    let request = MemoryRequest {
        micro_batch_size: 1,
        micro_batches: MICRO_BATCHES,
        ..settings.memory(config, layout, RANKS)
    };
    let report = plan_memory(config, &request).unwrap();
    let largest = report.fullest().1.peak.total();
    assert!(largest > 1 << 30, "{largest} bytes on the fullest rank");
}

#[test]
fn a_rank_of_16384_needs_a_gibibyte_at_most_before_it_starts() {
    for (name, (config, layout)) in [("dense", dense()), ("experts", experts())] {
        let heap = ThreadHeap::begin();
        let began = processor_time();
        let mut peak = 0;
        let mut part = |what: &str, run: &mut dyn FnMut()| {
            measure(heap, &format!("{name}, {what}"), run);
            peak = peak.max(heap.peak());
        };
        let mut own = None;
        part("mesh", &mut || own = Some(mesh(&layout)));
        let own = own.unwrap();
        // The first rank, a middle rank and the last rank.
        for rank in [0, RANKS / 2 + 3, RANKS - 1] {
            part("groups", &mut || groups(&own, rank));
        }
        part("schedules", &mut || schedules(&layout));
        part("plan", &mut || plan(&config, &layout));
        let took = processor_time() - began;
        println!("{name}: {took:.1?}, {} bytes", peak);
        assert!(peak < MEMORY, "{name}: {peak} bytes");
        assert!(took < TIME, "{name}: {took:?}");
    }
}
