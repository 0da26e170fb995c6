use super::*;
use crate::profile::{BlockInput, LayerProfile, SavedTensor};
use burn_megatron::pipeline::schedule::{ScheduleConfig, ScheduleKind, generate};

const NONE: ActivationOffload = ActivationOffload {
    bytes: 0,
    prefetch: 1,
};

/// Returns a stage that keeps `bytes` bytes of a micro-batch. Its backward needs no additional memory.
fn stage(bytes: u64) -> StageProfile {
    let layer = LayerProfile {
        saved: vec![SavedTensor {
            name: "x".into(),
            bytes,
        }],
        ..LayerProfile::default()
    };
    StageProfile {
        layers: vec![(layer, 1)],
        forward_bytes: bytes,
        backward_bytes: bytes,
        ..StageProfile::default()
    }
}

fn activations(kind: ScheduleKind, ranks: usize, stages: usize, micro_batches: usize) -> Vec<u64> {
    let config = ScheduleConfig::new(kind, ranks, micro_batches).with_virtual_stages(stages);
    let schedule = generate(&config).unwrap();
    let profiles = (0..schedule.stages()).map(|_| stage(1)).collect();
    let states = vec![MemoryPlan::default(); ranks];
    let report = MemoryReport::new(
        &schedule,
        profiles,
        states,
        ZeroStage::Replicated,
        1.0,
        (NONE, 0),
    );
    report
        .ranks
        .iter()
        .map(|rank| rank.peak.activations)
        .collect()
}

/// Narayanan et al. 2021, arXiv:2104.04473: with 1F1B, rank `r` of `p` has `p - r` micro-batches in flight. With an
/// interleaved schedule, it has `2 (p - r - 1) + (v - 1) p + 1` chunks in flight.
#[test]
fn chunks_in_flight_are_those_of_the_schedule() {
    let one = activations(ScheduleKind::OneFOneB, 8, 1, 32);
    assert_eq!(one, [8, 7, 6, 5, 4, 3, 2, 1]);
    let interleaved = activations(ScheduleKind::Interleaved { group: None }, 8, 5, 128);
    assert_eq!(interleaved, [47, 45, 43, 41, 39, 37, 35, 33]);
    let interleaved = activations(ScheduleKind::Interleaved { group: None }, 4, 2, 8);
    assert_eq!(interleaved, [11, 9, 7, 5]);
}

/// Stage 1 needs more memory than stage 0. Its rank has the peak, although rank 0 has more micro-batches in flight.
#[test]
fn the_peak_is_of_bytes_not_of_counts() {
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 4);
    let schedule = generate(&config).unwrap();
    let states = vec![
        MemoryPlan {
            parameters: 10,
            buffers: 5,
            ..MemoryPlan::default()
        };
        2
    ];
    let stages = vec![stage(1), stage(100)];
    let report = MemoryReport::new(
        &schedule,
        stages,
        states,
        ZeroStage::Gradients,
        1.1,
        (NONE, 0),
    );
    let (rank, fullest) = report.fullest();
    assert_eq!(rank, 1);
    let expected = MemoryByKind {
        parameters: 10,
        buffers: 5,
        activations: 100,
        slack: 10,
        ..MemoryByKind::default()
    };
    assert_eq!(fullest.peak, expected);
    assert_eq!(report.ranks[0].peak.total(), 10 + 5 + 2);
    assert!(!report.to_string().contains("on the host"));
}

/// If a forward runs together with a backward, the backward releases a layer before the forward keeps the next layer.
#[test]
fn a_pair_keeps_one_micro_batch_and_one_layer_more() {
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 1, 4).with_pairs(true);
    let schedule = generate(&config).unwrap();
    let mut of_four_layers = stage(10);
    of_four_layers.layers[0].1 = 4;
    (of_four_layers.forward_bytes, of_four_layers.backward_bytes) = (41, 43);
    let peak_of = |stage: StageProfile| {
        let states = vec![MemoryPlan::default()];
        let zero_stage = ZeroStage::Replicated;
        let report = MemoryReport::new(&schedule, vec![stage], states, zero_stage, 1.0, (NONE, 0));
        let rank = &report.ranks[0];
        assert_eq!(rank.samples.len(), schedule.actions(0).len());
        assert_eq!(rank.samples.last().unwrap().after.total(), 0);
        rank.peak.total()
    };
    assert_eq!(peak_of(of_four_layers.clone()), 50);
    // With one layer, the tensors of the forward and the backward are in memory at the same time.
    assert_eq!(peak_of(stage(100)), 200);
    // The loss needs more memory than a layer.
    of_four_layers.backward_bytes = 70;
    assert_eq!(peak_of(of_four_layers), 70);
}

#[test]
fn what_is_on_the_host_is_shown_beside_the_total() {
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 1, 1);
    let schedule = generate(&config).unwrap();
    let states = vec![MemoryPlan {
        optimizer: 8,
        host_optimizer: 4096,
        ..MemoryPlan::default()
    }];
    let report = MemoryReport::new(
        &schedule,
        vec![stage(1)],
        states,
        ZeroStage::Replicated,
        1.0,
        (NONE, 0),
    );
    let text = report.to_string();
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split("  ").collect())
        .collect();
    let cells = |line: usize| -> Vec<&str> {
        let cells = lines[line].iter().map(|cell| cell.trim());
        cells.filter(|cell| !cell.is_empty()).collect()
    };
    let (head, row) = (cells(0), cells(1));
    let at = head.iter().position(|cell| *cell == "on the host").unwrap();
    assert_eq!(row[at], "4.00 KiB");
    let peak = report.fullest().1.peak;
    assert_eq!((peak.optimizer, peak.total() < 4096), (8, true));
}

/// The tensor of each receive that is posted ahead is allocated from the start of the step.
#[test]
fn receives_ahead_have_their_memory() {
    let schedule = generate(&ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 4)).unwrap();
    let peaks = |ahead| {
        let mut stages = vec![stage(100), stage(100)];
        stages[1].input_bytes = 5;
        stages[0].layers[0].0.output_bytes = 5;
        let states = vec![MemoryPlan::default(); 2];
        let kept = (NONE, ahead);
        let report = MemoryReport::new(&schedule, stages, states, ZeroStage::Replicated, 1.0, kept);
        let before = report.ranks.iter().map(|rank| rank.samples[0].before);
        let before = before.map(|memory| memory.activations).collect::<Vec<_>>();
        let peaks = report.ranks.iter().map(|rank| rank.peak.activations);
        (before, peaks.collect::<Vec<_>>())
    };
    let (before, without) = peaks(0);
    assert_eq!(before, [0, 0]);
    for ahead in [1, 2] {
        let (before, peaks) = peaks(ahead);
        assert_eq!(before, [5 * ahead as u64; 2], "{ahead}");
        // At its peak, a rank has not yet received the last tensors.
        let expected = without.iter().map(|peak| peak + 5 * ahead as u64);
        assert_eq!(peaks, expected.collect::<Vec<_>>(), "{ahead}");
    }
    // At most the receives in the schedule are posted.
    assert_eq!(peaks(usize::MAX).0, [20, 20]);
}

fn inputs<const N: usize>(bytes: [u64; N]) -> Vec<BlockInput> {
    let input = |bytes| BlockInput {
        bytes,
        is_shared: false,
    };
    bytes.map(input).into()
}

/// A stage has two micro-batches. Each keeps 10 bytes, which include inputs of 1, 2 and 4 bytes. The backward needs the
/// last input first, so it stays on the device.
#[test]
fn inputs_on_the_host_are_not_on_the_device() {
    let schedule = generate(&ScheduleConfig::new(ScheduleKind::GPipe, 1, 2)).unwrap();
    let stages = vec![StageProfile {
        offloadable: inputs([1, 2, 4]),
        ..stage(10)
    }];
    let peak = |stages: &[StageProfile], bytes, prefetch| {
        let states = vec![MemoryPlan::default()];
        let offload = ActivationOffload { bytes, prefetch };
        let stage = ZeroStage::Replicated;
        let report =
            MemoryReport::new(&schedule, stages.to_vec(), states, stage, 1.0, (offload, 0));
        let rank = &report.ranks[0];
        (rank.peak.total(), rank.host_activations)
    };
    assert_eq!(peak(&stages, 0, 1), (20, 0));
    // In addition to the kept tensors, the largest input is in transfer.
    assert_eq!(peak(&stages, 100, 1), (20 - 6 + 4, 6));
    assert_eq!(peak(&stages, 100, 0), (20 - 14 + 4, 14));
    assert_eq!(peak(&stages, 100, 3), (20, 0));
    // The byte limit leaves room only for the first input of the second micro-batch.
    assert_eq!(peak(&stages, 4, 1), (20 - 4 + 4, 4));
    // Offloading an input that another operation keeps on the device frees nothing.
    let mut shared = stages.clone();
    shared[0].offloadable[0].is_shared = true;
    assert_eq!(peak(&shared, 100, 1), (20 - 4 + 4, 6));
}

#[test]
fn a_picture_has_every_rank_kind_and_the_limit() {
    let schedule = generate(&ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 4)).unwrap();
    let state = MemoryPlan {
        parameters: 10,
        ..MemoryPlan::default()
    };
    let stages = vec![stage(1), stage(100)];
    let report = MemoryReport::new(
        &schedule,
        stages,
        vec![state; 2],
        ZeroStage::Gradients,
        1.0,
        (NONE, 0),
    );
    let without = report.svg("A step", None).unwrap();
    let svg = report.svg("A step", Some(200)).unwrap();
    for text in [
        "A step",
        "rank 0",
        "rank 1",
        "parameters",
        "activations",
        "110 B",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(!svg.contains("optimizer") && !svg.contains("NaN"));
    assert_eq!(
        svg.matches("polyline").count(),
        without.matches("polyline").count() + 2
    );
}
