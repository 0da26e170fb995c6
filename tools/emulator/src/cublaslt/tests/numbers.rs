//! Tests the results of products.

use super::*;
use crate::cublaslt::scales::ScaleMode;

/// Fills the factors of a call with numbers, and returns them as rows of `A` and columns of `B`.
pub(super) fn fill(call: &Call, seed: &mut u64) -> [Vec<Vec<f64>>; 2] {
    let Product { m, n, k, a, b, .. } = call.product;
    let mut side = |address: u64, matrix: rules::Matrix, outer: usize, rows_are_outer: bool| {
        let mut numbers = vec![vec![0.0; k]; outer];
        for (at, row) in numbers.iter_mut().enumerate() {
            for (k, number) in row.iter_mut().enumerate() {
                let (row, column) = if rows_are_outer { (at, k) } else { (k, at) };
                let place = (column * matrix.leading + row) * matrix.element.bytes();
                *number = put(matrix.element, address + place as u64, seed);
            }
        }
        numbers
    };
    [
        side(call.a, a, m, !a.transposed),
        side(call.b, b, n, b.transposed),
    ]
}

fn address(call: &Call, row: usize, column: usize) -> u64 {
    let d = call.product.d;
    call.d + ((column * d.leading + row) * d.element.bytes()) as u64
}

/// Asserts that the result is `expected`, within the rounding of its type.
pub(super) fn assert_near(call: &Call, expected: impl Fn(usize, usize) -> f64) {
    let d = call.product.d;
    let unit = match d.element {
        F64 => 1e-13,
        F32 => 2f64.powi(-23),
        F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    let cancelled = if d.element == F64 {
        0.0
    } else {
        2f64.powi(-22)
    };
    for column in 0..d.columns {
        for row in 0..d.rows {
            let found = read(d.element, address(call, row, column));
            let expected = expected(row, column);
            // A sum is rounded to f32 before a value is added. The addition may cancel the sum.
            let bound = unit * (expected.abs() + 1e-3) + cancelled;
            assert!(
                (found - expected).abs() <= bound,
                "{found} instead of {expected} at {row}, {column}"
            );
        }
    }
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn run(call: &Call, memory: &Memory) {
    assert_eq!(call.check(&algorithm(&call.product)), Ok(()));
    assert_eq!(call.run(memory), Ok(()));
}

/// Checks that every element of the result is filled, but not the gaps between its columns, with any factors.
#[test]
fn a_product_that_is_not_computed_is_filled() {
    for (types, name) in [
        ([BF16, BF16, BF16], "bf16"),
        ([BF16, BF16, F32], "f32"),
        ([F16, F16, F16], "f16"),
    ] {
        let asked = Asked::new(types, [5, 3, 4], [true, false], 2);
        let memory = Memory::default();
        let call = call(asked.check().unwrap(), &memory);
        assert_eq!(call.fill(&memory), Ok(()));
        let d = call.product.d;
        for column in 0..3 {
            let row = |row| read(d.element, address(&call, row, column));
            assert!((0..5).all(|at| row(at) == 1.0 / 1024.0), "{name}");
            // The last gap is not part of the matrix.
            assert!(column == 2 || (5..7).all(|at| row(at).is_nan()), "{name}");
        }
        let line = call.line();
        assert_eq!(line["product"], serde_json::json!([5, 3, 4]));
        assert_eq!(line["transposed"], serde_json::json!([true, false]));
        assert_eq!(line["types"][3], name);
        assert_eq!([&line["alpha"], &line["beta"]], [1.0, 0.0]);
        memory.free(call.a);
        assert!(call.fill(&memory).unwrap_err().contains('A'));
    }
}

#[test]
fn all_transpositions_types_and_gaps() {
    let mut seed = 1;
    for types in [
        [F32, F32, F32],
        [F16, F16, F16],
        [F16, F16, F32],
        [BF16, BF16, BF16],
        [BF16, BF16, F32],
        [F64, F64, F64],
    ] {
        for turned in [[false, false], [false, true], [true, false], [true, true]] {
            for (sizes, gap) in [([1, 1, 1], 0), ([5, 9, 7], 3), ([13, 16, 33], 0)] {
                let memory = Memory::default();
                let product = Asked::new(types, sizes, turned, gap).check().unwrap();
                let mut call = call(product, &memory);
                call.alpha = Scalar::Value(0.5);
                let [a, b] = fill(&call, &mut seed);
                run(&call, &memory);
                assert_near(&call, |row, column| 0.5 * dot(&a[row], &b[column]));
                // The gaps between the columns are unchanged.
                for row in sizes[0]..sizes[0] + gap {
                    assert!(read(types[2], address(&call, row, 0)).is_nan());
                }
            }
        }
    }
}

#[test]
fn the_old_result_is_added_and_not_read_for_nothing() {
    let (mut seed, memory) = (2, Memory::default());
    let product = Asked::new([BF16, BF16, F32], [6, 10, 12], [true, false], 2);
    let product = product.check().unwrap();
    let mut call = call(product, &memory);
    let [a, b] = fill(&call, &mut seed);
    // All bytes are initially NaN.
    run(&call, &memory);
    let first = |row: usize, column: usize| dot(&a[row], &b[column]);
    assert_near(&call, first);
    call.beta = Scalar::Value(-0.25);
    run(&call, &memory);
    assert_near(&call, |row, column| 0.75 * first(row, column));
    // `C` in other memory, with the same column for all columns.
    let c = memory.allocate(6 * 4, u64::MAX).unwrap();
    let column: Vec<f64> = (0..6).map(|row| put(F32, c + 4 * row, &mut seed)).collect();
    let mut apart = call;
    (apart.c, apart.product.c.leading) = (c, 0);
    run(&apart, &memory);
    assert_near(&apart, |row, at| first(row, at) - 0.25 * column[row]);
    // Scalars on the device, with beta 0.
    let scalars = memory.allocate(8, u64::MAX).unwrap();
    // SAFETY: the memory was just allocated.
    unsafe { (scalars as *mut [f32; 2]).write([2.0, 0.0]) };
    (call.alpha, call.beta) = (Scalar::At(scalars), Scalar::At(scalars + 4));
    run(&call, &memory);
    assert_near(&call, |row, column| 2.0 * first(row, column));
}

#[test]
fn a_bias_is_one_number_for_each_row() {
    let mut seed = 3;
    for [factor, result] in [
        [BF16, BF16],
        [F16, F32],
        [F32, F32],
        [E4M3, F16],
        [E4M3, BF16],
    ] {
        let memory = Memory::default();
        let asked = match factor {
            E4M3 => Asked::narrow(result),
            _ => Asked::new([factor, factor, result], [7, 5, 9], [false, false], 0),
        };
        let product = asked.with(of::EPILOGUE, 4).check().unwrap();
        assert_eq!(product.bias, Some(result));
        let mut call = call(product, &memory);
        let (m, bytes) = (product.m, result.bytes());
        call.bias = memory.allocate(m * bytes, u64::MAX).unwrap();
        let places = (0..m).map(|row| call.bias + (row * bytes) as u64);
        let bias: Vec<f64> = places.map(|place| put(result, place, &mut seed)).collect();
        let [a, b] = fill(&call, &mut seed);
        run(&call, &memory);
        assert_near(&call, |row, column| dot(&a[row], &b[column]) + bias[row]);
    }
}

/// Returns scales in the order of memory that the documentation draws, and the number of each element as
/// `[outer][k]`. Each scale is written separately.
fn scales(mode: ScaleMode, outer: usize, k: usize, seed: &mut u64) -> (Vec<u8>, Vec<Vec<f64>>) {
    let mut each = vec![vec![f64::NAN; k]; outer];
    let mut memory = vec![];
    let mut next =
        |bytes: &mut Vec<u8>, rows: std::ops::Range<usize>, along: std::ops::Range<usize>| {
            let value = draw(seed) as f32;
            bytes.extend(value.to_le_bytes());
            for row in rows {
                for at in along.clone().filter(|at| *at < k) {
                    if let Some(row) = each.get_mut(row) {
                        row[at] = value.into();
                    }
                }
            }
        };
    match mode {
        ScaleMode::Scalar => next(&mut memory, 0..outer, 0..k),
        ScaleMode::OuterVec => (0..outer).for_each(|row| next(&mut memory, row..row + 1, 0..k)),
        ScaleMode::Vec128 => {
            for first in (0..k).step_by(128) {
                for row in 0..outer {
                    next(&mut memory, row..row + 1, first..first + 128);
                }
            }
        }
        ScaleMode::Blocks => {
            for row in (0..outer).step_by(128) {
                let mut column = vec![];
                for first in (0..k).step_by(128) {
                    next(&mut column, row..row + 128, first..first + 128);
                }
                while column.len() % 16 != 0 {
                    column.extend(f32::NAN.to_le_bytes());
                }
                memory.extend(column);
            }
        }
        ScaleMode::Vec32 => {
            // Tiles of 512 bytes: 32 lines of 4 groups of 4.
            for row in (0..outer).step_by(128) {
                for first in (0..k).step_by(128) {
                    for line in 0..32 {
                        for group in 0..4 {
                            for part in 0..4 {
                                let exponent = (draw(seed) * 4.0) as i32;
                                memory.push((exponent + 127) as u8);
                                let at = first + part * 32;
                                for at in at..(at + 32).min(k) {
                                    if let Some(row) = each.get_mut(row + group * 32 + line) {
                                        row[at] = 2f64.powi(exponent);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    (memory, each)
}

#[test]
fn every_kind_of_scales() {
    use ScaleMode::{Blocks, OuterVec, Scalar as One, Vec32, Vec128};
    let mut seed = 4;
    let sizes = [144, 272, 400];
    for (modes, chip) in [
        ([One, One], CHIP),
        ([OuterVec, OuterVec], CHIP),
        ([Vec128, Vec128], CHIP),
        ([Vec128, Blocks], CHIP),
        ([Blocks, Vec128], CHIP),
        ([Vec32, Vec32], BLACKWELL),
    ] {
        for types in [[E4M3, E4M3, F32], [E5M2, E4M3, BF16], [E4M3, E5M2, F16]] {
            let memory = Memory::default();
            let numbered = |mode| (0..6).rfind(|number| ScaleMode::of(*number) == Some(mode));
            let [of_a, of_b] = modes.map(|mode| numbered(mode).unwrap() as u64);
            let asked = Asked::new(types, sizes, [true, false], 0)
                .with(of::A_SCALE_MODE, of_a)
                .with(of::B_SCALE_MODE, of_b)
                .on(chip);
            let product = asked.check().unwrap();
            assert_eq!(product.scales, Some(modes));
            let mut call = call(product, &memory);
            let [a, b] = fill(&call, &mut seed);
            let mut of_sides = vec![];
            for (which, outer) in [(0, product.m), (1, product.n)] {
                let (bytes, each) = scales(modes[which], outer, product.k, &mut seed);
                assert_eq!(bytes.len(), modes[which].bytes(outer, product.k));
                call.scales[which] = memory.allocate(bytes.len(), u64::MAX).unwrap();
                // SAFETY: the memory was just allocated with this length.
                unsafe { (call.scales[which] as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) };
                of_sides.push(each);
            }
            run(&call, &memory);
            let scaled = |numbers: &[Vec<f64>], scales: &[Vec<f64>]| -> Vec<Vec<f64>> {
                let row = |(row, scale): (&Vec<f64>, &Vec<f64>)| {
                    row.iter().zip(scale).map(|(x, s)| x * s).collect()
                };
                numbers.iter().zip(scales).map(row).collect()
            };
            let (a, b) = (scaled(&a, &of_sides[0]), scaled(&b, &of_sides[1]));
            assert_near(&call, |row, column| dot(&a[row], &b[column]));
        }
    }
}

#[test]
fn a_result_of_8_bits_has_a_scale() {
    let (mut seed, memory) = (5, Memory::default());
    let mut asked = Asked::narrow(E4M3);
    asked.layouts[2] = matrix(BF16, 32, 48, 32);
    let product = asked.check().unwrap();
    let mut call = call(product, &memory);
    call.c = memory.allocate(32 * 48 * 2, u64::MAX).unwrap();
    for place in 0..32 * 48 {
        put(BF16, call.c + 2 * place, &mut seed);
    }
    call.beta = Scalar::Value(2.0);
    let scales = memory.allocate(16, u64::MAX).unwrap();
    // SAFETY: the memory was just allocated.
    unsafe { (scales as *mut [f32; 4]).write([0.5, 2.0, 0.25, 100.0]) };
    call.scales = [0, 4, 8, 12].map(|offset| scales + offset);
    let [a, b] = fill(&call, &mut seed);
    run(&call, &memory);
    let mut largest = 0;
    for column in 0..48 {
        for row in 0..32 {
            let c = read(BF16, call.c + (column * 32 + row) * 2);
            let (row, column) = (row as usize, column as usize);
            let expected = 100.0 * (dot(&a[row], &b[column]) + 2.0 * 0.25 * c);
            // SAFETY: the address is inside the result.
            let code = unsafe { *(address(&call, row, column) as *const u8) };
            largest += usize::from(code & 0x7f == 0x7e);
            // SAFETY: the same as above.
            let found = unsafe { E4M3.load(address(&call, row, column)) };
            let near = expected.clamp(-448.0, 448.0);
            assert!(
                (found - near).abs() <= near.abs() / 16.0 + 0.01,
                "{found} {expected}"
            );
        }
    }
    assert!(largest > 0, "nothing was too large");
}

#[test]
fn what_is_worked_in_is_overwritten_and_nothing_else() {
    let (mut seed, memory) = (6, Memory::default());
    let product = Asked::new([F32, F32, F32], [4, 4, 4], [false, false], 0).check();
    let mut call = call(product.unwrap(), &memory);
    fill(&call, &mut seed);
    let workspace = memory.allocate(1024, u64::MAX).unwrap();
    // SAFETY: the memory was just allocated.
    let bytes = unsafe { std::slice::from_raw_parts_mut(workspace as *mut u8, 1024) };
    bytes.fill(7);
    (call.workspace, call.workspace_bytes) = (workspace + 256, 512);
    run(&call, &memory);
    assert!(
        bytes[..256]
            .iter()
            .chain(&bytes[768..])
            .all(|byte| *byte == 7)
    );
    assert!(bytes[256..768].iter().all(|byte| *byte == 0xff));
}

#[test]
fn memory_that_is_not_allocated_is_a_fault() {
    let memory = Memory::default();
    let asked = Asked::narrow(BF16).with(of::EPILOGUE, 4);
    let mut good = call(asked.check().unwrap(), &memory);
    let new = |bytes| memory.allocate(bytes, u64::MAX).unwrap();
    good.bias = new(64);
    good.scales = [4, 4, 0, 0].map(|bytes| if bytes > 0 { new(bytes) } else { 0 });
    assert_eq!(good.run(&memory), Ok(()));
    let outside = |call: Call| call.run(&memory).unwrap_err();
    let small = new(16);
    for (call, name) in [
        (Call { a: small, ..good }, "A has 2048 bytes at"),
        (Call { b: small, ..good }, "B has 3072 bytes at"),
        (Call { d: small, ..good }, "D has 3072 bytes at"),
        (
            Call {
                bias: small,
                ..good
            },
            "the bias has 64 bytes at",
        ),
        (
            Call {
                workspace: small,
                workspace_bytes: 17,
                ..good
            },
            "the workspace has 17 bytes at",
        ),
        (
            Call {
                alpha: Scalar::At(small + 16),
                ..good
            },
            "alpha has 4 bytes at",
        ),
        (
            Call {
                c: small,
                beta: Scalar::Value(1.0),
                ..good
            },
            "C has 3072 bytes at",
        ),
        (
            Call {
                scales: [good.scales[0], small + 16, 0, 0],
                ..good
            },
            "the scales of B has 4 bytes at",
        ),
    ] {
        let reason = outside(call);
        assert!(reason.starts_with(name), "{reason}");
    }
}
