//! Compares the outcome of a step that the device computes with the same numbers computed on the host.

use super::*;
use crate::adamw::outcome::{columns, elements, statistics_dtype};
use crate::adamw::update::StepScalars;

/// The number of columns per rank. Two loss columns follow the named columns.
const COLUMNS: usize = columns::COUNT + 2;

/// Returns the statistics of three ranks with 5003 tokens in total.
fn rows() -> Vec<[f64; COLUMNS]> {
    vec![
        [4.0, 9.0, 1.0, 4.0, 904.0, 2.5, 3.0],
        [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [6.0, 4.0, 9.0, 0.0, 3.0, 1.0, 0.5],
    ]
}

fn rule(clip: f64) -> OutcomeRule {
    let element = |row: usize, column: usize| SumOrder::Element(row * COLUMNS + column);
    let squares =
        [1, 2].map(|column| SumOrder::InOrder((0..3).map(|row| element(row, column)).collect()));
    OutcomeRule {
        columns: COLUMNS,
        losses: columns::COUNT,
        squares: SumOrder::Pairwise(squares.to_vec()).into(),
        rounds_norm: true,
        limit: 6.5,
        clip,
        loss_scales: [1024.0, 512.0, 2048.0],
        steps: [numbers(3), numbers(2)],
    }
}

fn tensor(values: Vec<f64>, device: &Device) -> Tensor<1> {
    let length = values.len();
    let options = (device, statistics_dtype(device));
    Tensor::from_data(
        TensorData::new(values, [length]).convert_dtype(options.1),
        options,
    )
}

fn outcome(rows: &[[f64; COLUMNS]], before: f64, rule: OutcomeRule, device: &Device) -> Vec<f64> {
    let mut earlier = vec![0.0; elements::COUNT];
    earlier[elements::KIND] = before;
    let statistics = tensor(rows.concat(), device);
    doubles(&step_outcome(statistics, tensor(earlier, device), rule))
}

/// Returns the expected elements of the outcome, from the formula in the module documentation.
fn expected(before: f64, clip: f64) -> [f64; elements::COUNT] {
    let scale = [1024.0, 512.0, 2048.0][before as usize];
    let unclipped = 1.0 / 5003.0 / scale;
    let norm = 25f64.sqrt() * unclipped;
    let step: f64 = if before == 0.0 { 3.0 } else { 2.0 };
    let corrected = |beta: f64| 1.0 - beta.powf(step);
    [
        elements::TAKEN,
        unclipped * if norm > clip { clip / norm } else { 1.0 },
        0.03 / corrected(0.9),
        unclipped,
        1.0 / corrected(0.95).sqrt(),
        0.03 * 0.1,
        norm,
    ]
}

#[test]
fn an_outcome_follows_from_the_statistics_and_the_outcome_before() {
    for (device, _) in devices() {
        for before in [elements::TAKEN, elements::NOT_FINITE, elements::NO_TARGETS] {
            for clip in [1.0, 1e-7] {
                let found = outcome(&rows(), before, rule(clip), &device);
                for (found, expected) in found.iter().zip(expected(before, clip)) {
                    let off = (found - expected).abs();
                    assert!(
                        off <= 1e-6 * expected,
                        "{found} for {expected} on {device:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_step_is_skipped_for_what_any_rank_has() {
    // Each case has a row, a column, a value, and the expected outcome.
    let cases = [
        (1, columns::LARGEST, 6.5, elements::TAKEN),
        (1, columns::LARGEST, 6.6, elements::NOT_FINITE),
        (2, columns::LARGEST, f64::NAN, elements::NOT_FINITE),
        (2, columns::LARGEST, f64::INFINITY, elements::NOT_FINITE),
        (0, columns::SQUARES, f64::NAN, elements::NOT_FINITE),
        (1, columns::SQUARES + 1, f64::INFINITY, elements::NOT_FINITE),
        (2, columns::COUNT, f64::NAN, elements::NOT_FINITE),
        (
            0,
            columns::COUNT + 1,
            f64::NEG_INFINITY,
            elements::NOT_FINITE,
        ),
        (0, columns::COUNT + 1, -7.0, elements::TAKEN),
    ];
    for (device, _) in devices() {
        for (row, column, value, kind) in cases {
            let mut rows = rows();
            rows[row][column] = value;
            let found = outcome(&rows, 0.0, rule(1.0), &device);
            let what = format!("{value} in row {row}, column {column} on {device:?}");
            assert_eq!(found[elements::KIND], kind, "{what}");
            // Without targets, the outcome is `NO_TARGETS` whatever the other columns are.
            for row in &mut rows {
                (row[columns::TOKENS_HIGH], row[columns::TOKENS_LOW]) = (0.0, 0.0);
            }
            let found = outcome(&rows, 0.0, rule(1.0), &device);
            assert_eq!(found[elements::KIND], elements::NO_TARGETS, "{what}");
        }
        let infinite = OutcomeRule {
            limit: f64::INFINITY,
            ..rule(1.0)
        };
        let mut rows = rows();
        rows[0][columns::LARGEST] = f64::INFINITY;
        let found = outcome(&rows, 0.0, infinite, &device);
        assert_eq!(found[elements::KIND], elements::NOT_FINITE, "{device:?}");
    }
}

fn words(buffers: AdamWBuffers, copy: Option<Tensor<1>>) -> Vec<Vec<u8>> {
    let AdamWBuffers {
        master,
        first,
        second,
    } = buffers;
    let all = [master, first, second].into_iter().chain(copy);
    all.map(|x| x.into_data().as_bytes().to_vec()).collect()
}

#[test]
fn a_step_by_an_outcome_has_the_bits_of_one_by_its_numbers() {
    for (device, has) in devices() {
        let small = [DType::F16, DType::BF16];
        for dtype in small.into_iter().filter(|dtype| has.contains(dtype)) {
            for decay in decays(500, &device) {
                let buffers = || buffers(500, &device, DType::F32, DType::F32);
                let gradient = || flat(500, 0.7, &device, dtype);
                let model = || Some(Tensor::empty([500], (&device, dtype)));
                let step = numbers(7);
                let StepScalars {
                    size,
                    root,
                    decay: rate,
                    scale,
                    ..
                } = StepScalars::new(&step, true);
                let mut known = vec![elements::TAKEN, scale, size, 1.0, root, rate, 1.0];
                let by = |known: &Vec<f64>, gradient: Tensor<1>| {
                    let outcome = tensor(known.clone(), &device);
                    // The learning rate and the step number come from the outcome, not from this step.
                    let step = numbers(1);
                    let (stepped, copy) =
                        adamw_with_outcome(buffers(), gradient, &decay, &step, outcome, model());
                    words(stepped, copy)
                };
                let (stepped, copy) = adamw(buffers(), gradient(), &decay, &step, model());
                assert!(
                    by(&known, gradient()) == words(stepped, copy),
                    "{decay:?} on {device:?}"
                );
                let copy = buffers().master.cast(dtype);
                let unchanged = words(buffers(), Some(copy));
                for kind in [elements::NOT_FINITE, elements::NO_TARGETS] {
                    known[elements::KIND] = kind;
                    known[elements::FACTOR] = f64::NAN;
                    let skipped = by(&known, gradient().mul_scalar(f32::NAN));
                    assert!(skipped == unchanged, "{decay:?} on {device:?}");
                }
            }
        }
    }
}

/// Returns segments of several lengths, with gaps of zeros between them. One segment is longer than a chunk, and one is
/// empty.
fn segments() -> Vec<std::ops::Range<usize>> {
    vec![
        0..1,
        64..64 + 8192 * 2 + 100,
        16576..16576,
        16576..16640,
        17024..17030,
    ]
}

#[test]
fn each_segment_has_the_sum_of_its_squares() {
    for (device, has) in devices() {
        for dtype in has {
            let mut values = Input::wave([17088], 0.3).values;
            for (at, value) in values.iter_mut().enumerate() {
                let lies_in = |range: &std::ops::Range<usize>| range.contains(&at);
                if !segments().iter().any(lies_in) {
                    *value = 0.0;
                }
            }
            let x = TensorData::new(values, [17088]).convert_dtype(dtype);
            let values: Vec<f64> = x.clone().convert_dtype(DType::F64).try_into_vec().unwrap();
            let x = Tensor::<1>::from_data(x, (&device, dtype));
            let table = Segments::new(segments());
            let largest =
                largest_sums_of_squares(x.clone(), &table, tensor(vec![0.0; 7], &device), 2);
            let of =
                |range: std::ops::Range<usize>| values[range].iter().map(|x| x * x).sum::<f64>();
            let sums: Vec<f64> = segments().into_iter().map(of).collect();
            let total: f64 = sums.iter().sum();
            let expected: Vec<f64> = [total, 0.0].into_iter().chain(sums).collect();
            for (found, expected) in doubles(&largest).iter().zip(&expected) {
                let off = (found - expected).abs();
                assert!(
                    off <= 1e-5 * expected,
                    "{found} for {expected}: {dtype:?} on {device:?}"
                );
            }
            // Smaller sums do not change the result. NaN stays NaN.
            let before = doubles(&largest);
            let half = x.clone().mul_scalar(0.5);
            let same = largest_sums_of_squares(half.clone(), &table, largest, 2);
            assert_eq!(doubles(&same), before, "{dtype:?} on {device:?}");
            let nan = x.slice_fill(70..71, f32::NAN);
            let poisoned = largest_sums_of_squares(nan, &table, same, 2);
            let poisoned = largest_sums_of_squares(half, &table, poisoned, 2);
            for (at, (found, before)) in doubles(&poisoned).iter().zip(&before).enumerate() {
                let expected = [0, 3].contains(&at);
                assert_eq!(found.is_nan(), expected, "{at}: {dtype:?} on {device:?}");
                assert!(expected || found == before, "{at}: {dtype:?} on {device:?}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let refused =
        |work: &dyn Fn() -> Tensor<1>| message(std::panic::AssertUnwindSafe(|| drop(work())));
    let zeros = |length: usize| tensor(vec![0.0; length], &device);
    let error = refused(&|| step_outcome(zeros(8), zeros(7), rule(1.0)));
    assert!(
        error.contains("8 statistics in rows of 7 columns"),
        "{error}"
    );
    let error = refused(&|| step_outcome(zeros(7), zeros(6), rule(1.0)));
    assert!(
        error.contains("the previous outcome has 6 elements: expected 7"),
        "{error}"
    );
    let table = Segments::new(vec![0..3, 64..70]);
    let error = refused(&|| largest_sums_of_squares(zeros(64), &table, zeros(3), 1));
    assert!(
        error.contains("64 elements has a segment up to 70"),
        "{error}"
    );
    let error = refused(&|| largest_sums_of_squares(zeros(70), &table, zeros(2), 1));
    assert!(error.contains("3 results"), "{error}");
}
