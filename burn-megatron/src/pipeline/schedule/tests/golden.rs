//! Orders computed by hand or taken from Megatron-LM, and live activations.

use super::super::generate::interleaved_table;
use super::super::{ActionKind, ScheduleConfig, ScheduleKind, validate, warm_up};
use super::{INTERLEAVED, computations, interleaved, schedule};

/// The order of (micro-batch, chunk) for two ranks, 5 micro-batches, groups of 3, two chunks.
#[test]
fn the_table_of_an_interleaved_schedule() {
    let (micro_batches, places): (Vec<_>, Vec<_>) = interleaved_table(5, 2, 3).into_iter().unzip();
    assert_eq!(micro_batches, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]);
    assert_eq!(places, [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]);
}

/// Every row of p = 4, v = 2, m = 8, N = 4, as `Fmicro-batch.chunk`.
#[test]
fn an_interleaved_schedule_row_by_row() {
    let rows = [
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 \
         B3.1 F6.1 B0.0 F7.1 B1.0 B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 B0.1 F5.0 B1.1 F6.0 B2.1 F7.0 B3.1 F4.1 \
         B0.0 F5.1 B1.0 F6.1 B2.0 F7.1 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4.0 B2.1 F5.0 B3.1 F6.0 B0.0 F7.0 \
         B1.0 F4.1 B2.0 F5.1 B3.0 F6.1 B4.1 F7.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0",
        "F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 \
         B2.0 F7.0 B3.0 F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4.0 B5.0 B6.0 B7.0",
    ];
    let schedule = schedule(INTERLEAVED, 4, 8);
    for (rank, row) in rows.into_iter().enumerate() {
        let actions = computations(&schedule, rank);
        let written: Vec<_> = actions
            .iter()
            .map(|action| {
                let place = action.stage / 4;
                format!("{}{}.{place}", action.kind.code(), action.micro_batch)
            })
            .collect();
        assert_eq!(written.join(" "), row, "rank {rank}");
    }
}

/// With sends and receives: after one forward each, two adjacent ranks of 1F1B would otherwise both send.
#[test]
fn sends_and_receives_of_two_ranks() {
    assert_eq!(
        schedule(ScheduleKind::OneFOneB, 2, 3).to_csv(),
        "F 0 0,SF 0 0,F 0 1,SF 0 1,RB 0 0,B 0 0,F 0 2,RG 0,SF 0 2,RB 0 1,B 0 1,RB 0 2,B 0 2\n\
         RF 1 0,F 1 0,B 1 0,RF 1 1,SB 1 0,F 1 1,B 1 1,RF 1 2,SB 1 1,F 1 2,RG 1,B 1 2,SB 1 2\n"
    );
    // The turn of the V sends nothing.
    let turn = schedule(ScheduleKind::ZbV, 2, 1).to_csv();
    assert_eq!(
        turn,
        "F 0 0,RG 0,SF 0 0,RF 3 0,F 3 0,RG 3,I 3 0,SB 3 0,W 3 0,RB 0 0,I 0 0,W 0 0\n\
         RF 1 0,F 1 0,RG 1,F 2 0,RG 2,SF 2 0,RB 2 0,I 2 0,W 2 0,I 1 0,SB 1 0,W 1 0\n"
    );
}

#[test]
fn zb_h1_defers_as_many_weight_gradients_as_there_are_earlier_ranks() {
    let schedule = schedule(ScheduleKind::ZbH1, 2, 4);
    let row = |rank| {
        let names = computations(&schedule, rank).into_iter();
        let names = names.map(|one| format!("{}{}", one.kind.code(), one.micro_batch));
        names.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row(0), "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3");
    assert_eq!(row(1), "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3");
}

/// The number of forwards before the first backward, minus one.
#[test]
fn warm_ups() {
    let cases: [(_, usize, usize, usize, &[usize]); 11] = [
        (ScheduleKind::OneFOneB, 8, 1, 32, &[7, 6, 5, 4, 3, 2, 1, 0]),
        (INTERLEAVED, 8, 2, 32, &[22, 20, 18, 16, 14, 12, 10, 8]),
        (INTERLEAVED, 8, 4, 32, &[38, 36, 34, 32, 30, 28, 26, 24]),
        (ScheduleKind::OneFOneB, 4, 1, 8, &[3, 2, 1, 0]),
        (INTERLEAVED, 4, 2, 8, &[10, 8, 6, 4]),
        (ScheduleKind::OneFOneB, 8, 1, 1, &[1, 1, 1, 1, 1, 1, 1, 0]),
        (ScheduleKind::OneFOneB, 8, 1, 8, &[7, 6, 5, 4, 3, 2, 1, 0]),
        (ScheduleKind::EagerOneFOneB, 4, 1, 8, &[6, 4, 2, 0]),
        (ScheduleKind::EagerOneFOneB, 4, 1, 5, &[5, 4, 2, 0]),
        (ScheduleKind::ZbH1, 4, 1, 8, &[3, 2, 1, 0]),
        (ScheduleKind::GPipe, 2, 1, 3, &[3, 3]),
    ];
    for (kind, p, v, m, expected) in cases {
        check_warm_up(kind, p, v, m, expected);
    }
    let grouped = |group| ScheduleKind::Interleaved { group: Some(group) };
    check_warm_up(grouped(6), 4, 2, 10, &[12, 10, 8, 6]);
    check_warm_up(grouped(10), 4, 2, 10, &[16, 14, 12, 10]);
    check_warm_up(grouped(3), 2, 2, 5, &[5, 3]);
    let config = ScheduleConfig::new(ScheduleKind::ZbV, 4, 8);
    assert_eq!(warm_up(&config, 0), None);
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 4, 8);
    assert_eq!(warm_up(&config, 4), None);
}

#[track_caller]
fn check_warm_up(kind: ScheduleKind, p: usize, v: usize, m: usize, expected: &[usize]) {
    let config = ScheduleConfig::new(kind, p, m).with_virtual_stages(v);
    let schedule = super::generate(&config).expect("runs");
    for (rank, expected) in expected.iter().enumerate() {
        assert_eq!(warm_up(&config, rank), Some(*expected), "{config:?}");
        let actions = computations(&schedule, rank);
        let forward = actions
            .iter()
            .take_while(|action| action.kind == ActionKind::Forward);
        // In the steady state a forward precedes the first backward.
        let paired = usize::from(*expected < v * m);
        assert_eq!(
            forward.count(),
            expected + paired,
            "{config:?}, rank {rank}"
        );
    }
}

#[test]
fn live_activations() {
    let peaks = |schedule| validate(&schedule).expect("valid").peak_activations;
    assert_eq!(peaks(schedule(ScheduleKind::GPipe, 4, 8)), [8; 4]);
    assert_eq!(peaks(schedule(ScheduleKind::OneFOneB, 4, 8)), [4, 3, 2, 1]);
    assert_eq!(peaks(schedule(ScheduleKind::OneFOneB, 4, 2)), [2, 2, 2, 1]);
    assert_eq!(peaks(schedule(INTERLEAVED, 4, 8)), [11, 9, 7, 5]);
    assert_eq!(peaks(interleaved(4, 2, 10, 10)), [17, 15, 13, 11]);
    for p in [1, 2, 3, 4, 8] {
        for m in [2 * p, 2 * p + 1, 4 * p] {
            // The peak equals the first rank of 1F1B: p stages, or 2p stages of half the size.
            assert_eq!(peaks(schedule(ScheduleKind::ZbH1, p, m)), vec![p; p]);
            assert_eq!(peaks(schedule(ScheduleKind::ZbV, p, m)), vec![2 * p; p]);
            let dualpipe = peaks(schedule(ScheduleKind::DualPipeV, p, m));
            assert_eq!(dualpipe, vec![2 * p + 1; p]);
        }
    }
    let in_flight = |kind| schedule(kind, 4, 8).in_flight();
    assert_eq!(in_flight(ScheduleKind::OneFOneB), [4, 3, 2, 1]);
    assert_eq!(in_flight(ScheduleKind::GPipe), [8; 4]);
    assert_eq!(in_flight(ScheduleKind::ZbH1), [4; 4]);
    // The first four stages are the first chunks of the ranks.
    let interleaved = in_flight(INTERLEAVED);
    let pairs = (0..4).map(|rank| interleaved[rank] + interleaved[rank + 4]);
    assert!(
        pairs
            .zip([11, 9, 7, 5])
            .all(|(of_both, peak)| of_both >= peak)
    );
    let report = validate(&schedule(ScheduleKind::ZbH1, 4, 8)).expect("valid");
    assert_eq!(report.peak_until_input_gradient, [4, 3, 2, 1]);
}

#[test]
fn stages_of_ranks() {
    let straight = schedule(INTERLEAVED, 4, 8);
    assert_eq!(straight.stages_of(1), [1, 5]);
    assert_eq!((straight.rank_of(6), straight.stages()), (2, 8));
    for kind in [ScheduleKind::ZbV, ScheduleKind::DualPipeV] {
        let v = schedule(kind, 4, 8);
        let stages: Vec<_> = (0..4).map(|rank| v.stages_of(rank)).collect();
        assert_eq!(stages, [[0, 7], [1, 6], [2, 5], [3, 4]]);
        assert_eq!(v.peer(&"SF 3 0".parse().expect("action")), None);
        assert_eq!(v.peer(&"SF 4 0".parse().expect("action")), Some(2));
        assert_eq!(v.peer(&"SF 7 0".parse().expect("action")), None);
        assert_eq!(v.peer(&"SB 0 0".parse().expect("action")), None);
    }
}

/// The steps of DualPipeV for two ranks and four micro-batches, `.0` down the V and `.1` up.
#[test]
fn dualpipe_v_row_by_row() {
    let schedule = schedule(ScheduleKind::DualPipeV, 2, 4);
    let rows = [
        "F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 F3.0 B1.1 F2.1 B0.0 B2.1 F3.1 B1.0 B3.1 I2.0 W2.0 \
         I3.0 W3.0",
        "F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 F3.0 B1.1 F3.1 B1.0 B2.1 B2.0 I3.1 I3.0 W3.1 \
         W3.0",
    ];
    for (rank, row) in rows.into_iter().enumerate() {
        let actions = computations(&schedule, rank);
        let written: Vec<_> = actions
            .iter()
            .map(|action| {
                let place = usize::from(action.stage >= 2);
                format!("{}{}.{place}", action.kind.code(), action.micro_batch)
            })
            .collect();
        assert_eq!(written.join(" "), row, "rank {rank}");
    }
}
