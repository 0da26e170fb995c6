use burn::tensor::{DType, Device, IndexingUpdateOp, Int, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::cpu::wide;
use crate::gradient::Place;
use crate::testing::{Input, devices, tolerance};

fn wave<const D: usize>(shape: [usize; D], phase: f64, device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(Input::wave(shape.to_vec(), phase).values, shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

fn doubles<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    let data = x.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Returns test cases. A case consists of the ids of lookups in a table of 50 rows.
fn all_ids() -> Vec<(&'static str, Vec<i32>)> {
    let random = |i: usize| ((i * i * 7 + i * 13 + i / 11) % 50) as i32;
    let often = |i: usize| if i.is_multiple_of(3) { 17 } else { random(i) };
    vec![
        ("random", (0..333).map(random).collect()),
        ("all equal", vec![31; 700]),
        ("one often", (0..1500).map(often).collect()),
        ("one lookup", vec![8]),
        ("none", vec![]),
        ("the edges", vec![0, 49, 0, 49, 49]),
        ("one segment", vec![5; 128]),
        ("one more", vec![5; 129]),
    ]
}

const ROWS: usize = 50;

/// Returns the gradient of the table in f64, and the sum of the magnitudes of its terms.
fn exact(ids: &[i32], gradient: &[f64], rows: &Range<usize>, width: usize) -> (Vec<f64>, Vec<f64>) {
    let mut sums = (vec![0.0; rows.len() * width], vec![0.0; rows.len() * width]);
    for (lookup, id) in ids.iter().enumerate() {
        if !rows.contains(&(*id as usize)) {
            continue;
        }
        let row = (*id as usize - rows.start) * width;
        for column in 0..width {
            let value = gradient[lookup * width + column];
            sums.0[row + column] += value;
            sums.1[row + column] += value.abs();
        }
    }
    sums
}

fn target(flat: Tensor<1>, offset: usize, add: bool) -> FlatGradients {
    FlatGradients {
        flat,
        places: vec![Place { offset, add }],
    }
}

#[test]
fn the_rows_of_each_id_are_added_up() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for (name, ids) in all_ids() {
                // The complete table, and the shards of several ranks.
                for rows in [0..ROWS, 0..20, 20..ROWS, 40..41] {
                    for (width, offset) in [(8, 0), (40, 64), (33, 7)] {
                        check(name, &ids, rows.clone(), [width, offset], (&device, dtype));
                    }
                }
            }
        }
    }
}

fn check(
    name: &str,
    ids: &[i32],
    rows: Range<usize>,
    [width, offset]: [usize; 2],
    (device, dtype): (&Device, DType),
) {
    let what = format!("{name}, rows {rows:?} of {width} in {dtype:?} on {device:?}");
    let gradient = || wave([ids.len(), width], 0.3, device, dtype);
    let elements = rows.len() * width;
    let flat = || wave([offset + elements + 9], 0.7, device, wide(dtype));
    let before = doubles(flat());
    let lookups = Arc::new(SortedLookups::new(ids));
    let (sums, sizes) = exact(ids, &doubles(gradient()), &rows, width);
    let tolerance = tolerance(wide(dtype));
    for add in [false, true] {
        let run = || {
            accumulate_rows(
                gradient(),
                &lookups,
                rows.clone(),
                target(flat(), offset, add),
            )
        };
        let found = run();
        let again = run().into_data();
        found.clone().into_data().assert_eq(&again, true);
        let found = doubles(found);
        for (i, found) in found.iter().enumerate() {
            let (expected, size) = match i.checked_sub(offset).filter(|i| *i < elements) {
                Some(i) if add => (before[i + offset] + sums[i], sizes[i] + 2.0),
                Some(i) => (sums[i], sizes[i]),
                None => (before[i], 0.0),
            };
            assert!(
                (found - expected).abs() <= tolerance * size,
                "{what}, add {add}: element {i} is {found} and should be {expected}"
            );
        }
    }
}

#[test]
fn the_cpu_has_the_bits_of_sums_in_order() {
    let device = Device::flex();
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for (name, ids) in all_ids() {
            if ids.is_empty() {
                continue;
            }
            let gradient = wave([ids.len(), 40], 0.3, &device, dtype);
            let wide = wide(dtype);
            let indices = Tensor::<1, Int>::from_ints(ids.as_slice(), &device);
            let zeros = Tensor::<2>::zeros([ROWS, 40], (&device, wide));
            let values = gradient.clone().cast::<DType>(wide);
            let sum = zeros.select_assign(0, indices, values, IndexingUpdateOp::Add);
            let flat = || wave([ROWS * 40], 0.7, &device, wide);
            for add in [false, true] {
                let expected = flat::accumulate(flat(), 0, sum.clone().reshape([ROWS * 40]), add);
                let lookups = Arc::new(SortedLookups::new(&ids));
                let found =
                    accumulate_rows(gradient.clone(), &lookups, 0..ROWS, target(flat(), 0, add));
                assert_eq!(found.into_data(), expected.into_data(), "{name}, add {add}");
            }
        }
    }
}

#[test]
fn many_rows_are_shared_by_threads() {
    let device = Device::flex();
    let ids: Vec<i32> = (0..6000).map(|i| i * 7919 % 3001).collect();
    let gradient = wave([6000, 48], 0.3, &device, DType::F32);
    let lookups = Arc::new(SortedLookups::new(&ids));
    let flat = Tensor::zeros([3001 * 48], &device);
    let found = doubles(accumulate_rows(
        gradient.clone(),
        &lookups,
        0..3001,
        target(flat, 0, true),
    ));
    let (sums, _) = exact(&ids, &doubles(gradient), &(0..3001), 48);
    for (found, expected) in found.iter().zip(&sums) {
        assert!((found - expected).abs() < 1e-5);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::flex();
    let call = |count: usize, length: usize, dtype: DType| {
        let lookups = Arc::new(SortedLookups::new(&[1, 2, 0]));
        let gradient = Tensor::<2>::ones([count, 4], &device);
        let flat = Tensor::zeros([length], (&device, dtype));
        let work = || accumulate_rows(gradient, &lookups, 0..3, target(flat, 1, true));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let panic = panic.expect_err("the call must fail");
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    assert_snapshot!(
        call(2, 13, DType::F32),
        @"accumulate_rows: a gradient of 2 rows for 3 lookups: expected one row for each"
    );
    assert_snapshot!(
        call(3, 12, DType::F32),
        @"accumulate_rows: 12 elements from element 1 on reach past a flat buffer of 12: expected at least 13"
    );
    assert_snapshot!(
        call(3, 13, DType::F64),
        @"accumulate_rows: invalid type of the flat buffer = F64 with values in F32: expected F32, F16 or BF16, and \
          F64 for F64"
    );
}
