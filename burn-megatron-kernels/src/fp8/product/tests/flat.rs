//! Tests of FP8 matrix multiplications that are written into a flat buffer.

use super::*;

/// Returns the types of a flat buffer that a device supports.
fn wide(has: &[DType]) -> Vec<DType> {
    let wide = [DType::F32, DType::F64].into_iter();
    wide.filter(|dtype| has.contains(dtype)).collect()
}

/// The number of elements in the buffer after the result.
const BEHIND: usize = 5;

#[test]
fn products_go_to_any_offset_and_leave_the_rest() {
    for (device, has) in devices() {
        for kind in ScalesKind::ALL {
            for [m, n, depth] in SIZES {
                let draw = |seed| TestValues {
                    format: Format::E4M3,
                    kind,
                    exact: true,
                    seed,
                };
                let (a, b) = (
                    draw(3).matrix(m, depth, &device),
                    draw(4).matrix(n, depth, &device),
                );
                let (sums, _) = product(&a, &b);
                for (offset, add) in [(0, true), (0, false), (3, true), (4, false), (64, true)] {
                    for dtype in wide(&has) {
                        let len = offset + m * n + BEHIND;
                        let before: Vec<f64> = (0..len).map(|i| i as f64 / 4.0).collect();
                        let data = TensorData::new(before.clone(), [len]).convert_dtype(dtype);
                        let flat = Tensor::from_data(data, (&device, dtype));
                        let after = accumulate_at(&a.matrix, &b.matrix, flat, offset, add);
                        assert_eq!(after.dtype(), dtype);
                        let mut expected = before;
                        for (into, sum) in expected[offset..].iter_mut().zip(&sums) {
                            *into = if add { *into + sum } else { *sum };
                        }
                        assert_eq!(
                            doubles(after),
                            expected,
                            "{kind:?} [{m}, {n}, {depth}] at {offset}, {add}, {dtype:?} {device:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_over_nothing_is_zero() {
    for (device, has) in devices() {
        for dtype in wide(&has) {
            for (sizes, add, expected) in [
                ([2, 2, 0], false, [7.0, 0.0, 0.0, 0.0, 0.0, 7.0]),
                ([2, 2, 0], true, [7.0; 6]),
                ([0, 2, 3], false, [7.0; 6]),
                ([2, 0, 3], true, [7.0; 6]),
            ] {
                let [m, n, depth] = sizes;
                let draw = TestValues {
                    format: Format::E4M3,
                    kind: ScalesKind::Mx,
                    exact: true,
                    seed: 1,
                };
                let (a, b) = (
                    draw.matrix(m, depth, &device).matrix,
                    draw.matrix(n, depth, &device).matrix,
                );
                let flat = Tensor::<1>::full([6], 7.0, (&device, dtype));
                let after = accumulate_at(&a, &b, flat, 1, add);
                assert_eq!(doubles(after), expected, "{sizes:?}, {add}");
            }
        }
    }
}

#[test]
fn a_shared_buffer_is_not_modified() {
    for (device, _) in devices() {
        let draw = TestValues {
            format: Format::E4M3,
            kind: ScalesKind::Tensor,
            exact: true,
            seed: 1,
        };
        let (a, b) = (
            draw.matrix(16, 32, &device).matrix,
            draw.matrix(16, 32, &device).matrix,
        );
        let held = Tensor::<1>::ones([256], &device);
        let after = accumulate_at(&a, &b, held.clone(), 0, true);
        assert_eq!(doubles(held), vec![1.0; 256]);
        assert_ne!(doubles(after), vec![1.0; 256]);
    }
}
