//! Tests that the conformance suite passes with the engines of `burn-megatron-comm`, and detects the defects of other
//! engines.

mod defects;

use std::sync::{Arc, Mutex};

use burn_megatron_comm::{
    Buffer, Call, CommError, Communicator, DType, ReduceOp, SingleRank, World, WorldError,
};
use burn_megatron_test_support::TIMEOUT;
use insta::assert_snapshot;

use crate::conformance::{
    ConformanceError, ConformanceOptions, ConformanceReport, MismatchCase, cases, run,
    run_mismatch_case,
};

/// Returns options that are small enough for an unoptimized build.
fn small() -> ConformanceOptions {
    ConformanceOptions {
        programs: 200,
        steps: 20,
        sizes: vec![0, 1, 7, 1000],
        long: 40_000,
        fixed_order: true,
        ..ConformanceOptions::default()
    }
}

fn on_threads(
    ranks: usize,
    options: &ConformanceOptions,
) -> Result<Vec<ConformanceReport>, WorldError> {
    let world = World::threads(ranks)?.compute_threads(1);
    world.run(|rank| run(&rank.communicator(), options, &mut |_| {}))
}

/// Returns the number of checks of each test case, which is the same on every rank.
fn counts(reports: &[ConformanceReport]) -> Vec<(&'static str, u64)> {
    let of = |report: &ConformanceReport| -> Vec<_> {
        let cases = report.cases.iter();
        cases.map(|case| (case.name, case.checks)).collect()
    };
    let first = of(&reports[0]);
    assert!(reports.iter().all(|report| of(report) == first));
    first
}

#[test]
fn threads_keep_every_promise() {
    for ranks in [1, 2, 3, 4, 6] {
        let reports = on_threads(ranks, &small()).unwrap();
        assert_eq!(reports.len(), ranks);
        let counts = counts(&reports);
        assert!(counts.iter().map(|(name, _)| *name).eq(cases()));
        for (name, checks) in counts {
            // A barrier of one rank waits for no other rank.
            assert!(
                checks > 0 || (name, ranks) == ("barrier", 1),
                "{name} of {ranks}"
            );
        }
    }
}

/// Compares the reference implementation with results that were computed by hand.
#[test]
fn the_model_computes_what_is_written() {
    use crate::conformance::model::expected;
    use half::{bf16, f16};
    let get = |call: Call, inputs: Vec<Buffer>| {
        let parts: Vec<_> = inputs
            .into_iter()
            .map(|input| (call.clone(), input))
            .collect();
        expected(&parts, 1, true).buffer
    };
    let sum = |inputs| get(Call::AllReduce(ReduceOp::Sum), inputs);
    let brain = |x: f32| Buffer::from(vec![bf16::from_f32(x)]);
    let four = || [256.0, 1.0, 1.0, 1.0].map(brain).to_vec();
    // Ties round to even: 259 to 260, and 64.75 to 65.
    assert_eq!(sum(four()), brain(260.0));
    assert_eq!(get(Call::AllReduce(ReduceOp::Average), four()), brain(65.0));
    let half = || Buffer::from(vec![f16::from_f32(60_000.0)]);
    assert_eq!(
        get(Call::AllReduce(ReduceOp::Average), vec![half(); 2]),
        half()
    );
    assert_eq!(sum(vec![vec![200u8].into(); 2]), vec![144u8].into());
    // The tree adds neighbors first, and then pairs of sums. The last value has no partner and moves up a level.
    let values = [1.0e8f32, 1.0, -1.0e8, 0.3, 1.0e-3];
    let tree = ((values[0] + values[1]) + (values[2] + values[3])) + values[4];
    assert_ne!(tree, values.iter().sum::<f32>());
    assert_eq!(
        sum(values.map(|x| vec![x].into()).to_vec()),
        vec![tree].into()
    );
    let two = |call: Call| get(call, vec![vec![1i32, 2].into(), vec![3i32, -4].into()]);
    assert_eq!(two(Call::AllGather), vec![1i32, 2, 3, -4].into());
    assert_eq!(two(Call::ReduceScatter(ReduceOp::Min)), vec![-4i32].into());
    assert_eq!(two(Call::AllReduce(ReduceOp::Max)), vec![3i32, 2].into());
    assert_eq!(two(Call::Broadcast { root: 0 }), vec![1i32, 2].into());
    assert_eq!(two(Call::Barrier), Buffer::empty(DType::U8));
    let exchange = |send: [usize; 2], receive: [usize; 2]| Call::AllToAll {
        send: send.to_vec(),
        receive: receive.to_vec(),
    };
    let parts = [
        (exchange([1, 2], [1, 0]), vec![1u8, 2, 3].into()),
        (exchange([0, 1], [2, 1]), vec![4u8].into()),
    ];
    assert_eq!(expected(&parts, 1, true).buffer, vec![2u8, 3, 4].into());
    for bad in 0..3 {
        let value = |rank: usize| if rank == bad { f32::NAN } else { rank as f32 };
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let inputs = (0..3).map(|rank| vec![value(rank)].into()).collect();
            let result = Vec::<f32>::try_from(get(Call::AllReduce(op), inputs)).unwrap();
            assert!(result[0].is_nan());
        }
    }
}

/// The maximum difference is zero for sums of whole numbers that the type can represent. For other sums it is the
/// rounding error.
#[test]
fn bounds_are_those_of_rounding() {
    use crate::conformance::model::expected;
    let bounds = |values: [f32; 2], op| {
        let parts = values.map(|x| (Call::AllReduce(op), Buffer::from(vec![x])));
        expected(&parts, 0, false).bounds.map(|bounds| bounds[0])
    };
    assert_eq!(bounds([3.0, -5.0], ReduceOp::Sum), Some(0.0));
    let epsilon = f64::from(f32::EPSILON);
    assert_eq!(
        bounds([3.0, -5.5], ReduceOp::Sum),
        Some(2.0 * 8.5 * epsilon)
    );
    assert_eq!(
        bounds([3.0, 5.0], ReduceOp::Average),
        Some(3.0 * 8.0 / 2.0 * epsilon)
    );
    assert_eq!(bounds([3.0, 5.0], ReduceOp::Max), None);
    assert!(bounds([16_777_216.0, 1.0], ReduceOp::Sum).unwrap() > 1.0);
}

/// The buffers are so long that the ranks share the work of a reduction. The shares have different sizes.
#[test]
fn threads_share_long_reductions() {
    let options = ConformanceOptions {
        programs: 0,
        sizes: vec![20_011],
        long: 0,
        ..small()
    };
    on_threads(3, &options).unwrap();
}

#[test]
fn other_sums_are_within_rounding() {
    let options = ConformanceOptions {
        fixed_order: false,
        programs: 10,
        ..small()
    };
    on_threads(5, &options).unwrap();
}

#[test]
fn a_rank_alone_keeps_every_promise_but_messages() {
    let options = ConformanceOptions {
        self_messages: false,
        ..small()
    };
    let world: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let seen = Mutex::new(Vec::new());
    let report = run(&world, &options, &mut |name| {
        seen.lock().unwrap().push(name.to_owned());
    });
    let report = report.unwrap();
    assert!(
        seen.into_inner()
            .unwrap()
            .iter()
            .map(String::as_str)
            .eq(cases())
    );
    let silent = report.cases.iter().filter(|case| case.checks == 0);
    let silent: Vec<_> = silent.map(|case| case.name).collect();
    let messages = [
        "messages",
        "messages in order",
        "receives before sends",
        "dropped messages",
    ];
    assert_eq!(silent, [&messages[..], &["barrier"]].concat());
}

#[test]
fn lists_of_nothing_are_refused() {
    let world: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let no_types = ConformanceOptions {
        dtypes: vec![],
        ..small()
    };
    let error = run(&world, &no_types, &mut |_| {}).unwrap_err();
    assert_snapshot!(error, @"invalid conformance options: expected at least one of types, got none");
    let no_sizes = ConformanceOptions {
        sizes: vec![],
        ..small()
    };
    let error = run(&world, &no_sizes, &mut |_| {}).unwrap_err();
    assert_eq!(error, ConformanceError::Nothing("sizes"));
}

#[test]
fn every_mismatch_is_told() {
    for case in MismatchCase::ALL {
        assert_eq!(case.to_string().parse(), Ok(case));
        let world = World::threads(3).unwrap().deadline(TIMEOUT);
        let told = world
            .run(|rank| run_mismatch_case(&rank.communicator(), case))
            .unwrap();
        let is_mismatch =
            |told: &Option<CommError>| matches!(told, Some(CommError::Mismatch { .. }));
        match case {
            // The receiver gets the error. The sender has returned, and the rank in between makes no call.
            MismatchCase::MessageLength => {
                assert_eq!(told[..2], [None, None]);
                assert!(is_mismatch(&told[2]), "{told:?}");
            }
            _ => assert!(told.iter().all(is_mismatch), "{case}: {told:?}"),
        }
    }
    assert!(
        "size"
            .parse::<MismatchCase>()
            .unwrap_err()
            .to_string()
            .contains("message-length")
    );
    let alone: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let error = run_mismatch_case(&alone, MismatchCase::Root).unwrap_err();
    assert_snapshot!(error, @"root: the world has 1 ranks: expected at least 2");
}

#[test]
fn a_call_that_goes_through_is_no_mismatch() {
    // Ranks that do not communicate cannot detect a mismatch.
    let world = World::threads(2).unwrap();
    let result = world.run(|rank| {
        let blind: Arc<dyn Communicator> = Arc::new(defects::Blind(rank.communicator()));
        run_mismatch_case(&blind, MismatchCase::Length).map(drop)
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("expected a mismatch error"), "{error}");
}

#[test]
fn the_first_difference_is_named() {
    use crate::conformance::values::Expected;
    let difference = |found: Buffer, wanted: Buffer, bounds: Option<Vec<f64>>| {
        Expected {
            buffer: wanted,
            bounds,
        }
        .difference(&found)
    };
    let wanted = || Buffer::from(vec![1f32, 2.0, 3.0, f32::NAN]);
    assert_eq!(difference(wanted(), wanted(), None), None);
    let found = || Buffer::from(vec![1f32, 2.0, 3.5, 4.0]);
    assert_snapshot!(
        difference(found(), wanted(), None).unwrap(),
        @"element 2 of 4 is 3.5, expected 3.0"
    );
    // A number is not equal to NaN, whatever the bound.
    assert_snapshot!(
        difference(found(), wanted(), Some(vec![0.5; 4])).unwrap(),
        @"element 3 of 4 is 4.0, expected NaN within 5e-1"
    );
    let half_wrong = difference(found(), wanted(), Some(vec![0.4; 4])).unwrap();
    assert!(half_wrong.starts_with("element 2 of 4"), "{half_wrong}");
    // Zeros with different signs differ.
    assert!(difference(vec![0f32].into(), vec![-0f32].into(), None).is_some());
    assert_snapshot!(
        difference(vec![1i64].into(), vec![1i64, 2].into(), None).unwrap(),
        @"the result is 1 i64, expected 2 i64"
    );
    assert_snapshot!(
        difference(vec![1i32].into(), vec![1i64].into(), None).unwrap(),
        @"the result is 1 i32, expected 1 i64"
    );
}
