//! Compares the order of scales with a direct transcription of cuBLASLt's documentation.

use super::*;

const ROWS: [usize; 9] = [0, 1, 31, 32, 33, 127, 128, 129, 300];
const DEPTHS: [usize; 9] = [0, 1, 32, 33, 128, 129, 512, 513, 1000];

fn cases(kind: ScalesKind, check: impl Fn(usize, usize, &Fp8Matrix)) {
    for (device, _) in devices() {
        for [rows, depth] in ROWS.map(|rows| DEPTHS.map(|depth| [rows, depth])).concat() {
            let draw = TestValues {
                format: Format::E4M3,
                kind,
                exact: false,
                seed: 5,
            };
            check(rows, depth, &draw.matrix(rows, depth, &device).matrix);
        }
    }
}

fn floats(matrix: &Fp8Matrix) -> Vec<f32> {
    let scales = Tensor::<1>::from_dispatch(library_scales(matrix));
    scales.into_data().try_into_vec().unwrap()
}

/// Returns the block scales in the order of the matrix, and the number of blocks per row.
fn blocks(matrix: &Fp8Matrix) -> (Vec<f32>, usize) {
    let Scales::Blocks { scales, .. } = &matrix.scales else {
        panic!("the matrix has blocks")
    };
    let columns = scales.dims()[1];
    (scales.clone().into_data().try_into_vec().unwrap(), columns)
}

#[test]
fn one_scale_stays_as_it_is() {
    cases(ScalesKind::Tensor, |_, _, matrix| {
        let Scales::Tensor(scale) = &matrix.scales else {
            panic!("the matrix has one scale")
        };
        let scale: Vec<f32> = scale.clone().into_data().try_into_vec().unwrap();
        assert_eq!(floats(matrix), scale);
    });
}

#[test]
fn scales_of_rows_are_ordered_column_by_column() {
    cases(ScalesKind::Rows, |rows, depth, matrix| {
        let arranged = floats(matrix);
        let (scales, columns) = blocks(matrix);
        assert_eq!(arranged.len(), rows * depth.div_ceil(128));
        for row in 0..rows {
            for block in 0..depth.div_ceil(128) {
                // "M-major": the elements of one block of the depth are contiguous.
                let given = arranged[block * rows + row];
                assert_eq!(given, scales[row * columns + block], "[{rows}, {depth}]");
            }
        }
    });
}

#[test]
fn scales_of_squares_are_padded_to_columns_of_a_multiple_of_four() {
    cases(ScalesKind::Squares, |rows, depth, matrix| {
        let mut arranged = floats(matrix);
        let (scales, columns) = blocks(matrix);
        let (high, deep) = (rows.div_ceil(128), depth.div_ceil(128));
        let stride = deep.div_ceil(4) * 4;
        assert_eq!(arranged.len(), high * stride);
        for block in 0..high {
            for at in 0..deep {
                let given = std::mem::take(&mut arranged[block * stride + at]);
                assert_eq!(given, scales[block * columns + at], "[{rows}, {depth}]");
            }
        }
        // The remaining elements are padding.
        assert!(arranged.iter().all(|left| *left == 0.0));
    });
}

#[test]
fn scales_of_mxfp8_are_tiled() {
    cases(ScalesKind::Mx, |rows, depth, matrix| {
        let Scales::Mx(scales) = &matrix.scales else {
            panic!("the matrix is MXFP8")
        };
        let words: Vec<u32> = scales.clone().into_data().try_into_vec().unwrap();
        let scales: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let pitch = 4 * mx_words(depth);
        let arranged = Tensor::<1, Int>::from_dispatch(library_scales(matrix));
        let words: Vec<u32> = arranged.into_data().try_into_vec().unwrap();
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let inner_tiles = depth.div_ceil(32).div_ceil(4);
        assert_eq!(bytes.len(), rows.div_ceil(128) * inner_tiles * 512);
        for outer in 0..rows {
            for inner in 0..depth.div_ceil(32) {
                let tile = outer / 128 * inner_tiles + inner / 4;
                let within = (outer % 32) * 16 + (outer % 128) / 32 * 4 + inner % 4;
                let given = std::mem::take(&mut bytes[tile * 512 + within]);
                assert_eq!(given, scales[outer * pitch + inner], "[{rows}, {depth}]");
            }
        }
        assert!(bytes.iter().all(|left| *left == 0));
    });
}
