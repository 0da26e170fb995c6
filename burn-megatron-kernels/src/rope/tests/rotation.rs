use proptest::prelude::*;

use super::*;
use crate::testing::{assert_gradients, compare};

type Operation = fn(Tensor<4>, &RopeTable, &Positions, &RopeOptions) -> Tensor<4>;

const BOTH: [Pairing; 2] = [Pairing::Halves, Pairing::Interleaved];

/// A test case: the shape `[batch, seq, heads, features]`, the rotated part, and the positions.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: [usize; 4],
    width: usize,
    options: RopeOptions,
    each: bool,
}

impl Case {
    fn inputs(&self) -> Vec<Input> {
        vec![Input::wave(self.shape, 0.1)]
    }

    fn run(&self, operation: Operation, leaves: &[Tensor<1>]) -> Tensor<1> {
        let x = leaves[0].clone().reshape(self.shape);
        let [batch, seq, ..] = self.shape;
        let positions = if self.each {
            scattered(batch, seq, seq + 5, &x.device())
        } else {
            Positions::From(3)
        };
        let table = table(&x, self.width, seq + 5);
        operation(x, &table, &positions, &self.options).flatten(0, 3)
    }

    fn compare(&self) {
        compare(
            &format!("{self:?}"),
            &self.inputs(),
            |leaves| self.run(rotate, leaves),
            |leaves| self.run(composed::rotate, leaves),
        );
    }
}

fn case(shape: [usize; 4], width: usize) -> Case {
    Case {
        shape,
        width,
        options: RopeOptions::default(),
        each: false,
    }
}

/// The rotated widths use all vector sizes. There are features before and after the rotated part.
#[test]
fn all_widths_agree_with_the_composition() {
    for pairing in BOTH {
        for (features, first, width) in [
            (2, 0, 2),
            (7, 1, 6),
            (33, 0, 32),
            (40, 8, 24),
            (128, 0, 128),
            (1000, 500, 498),
        ] {
            for each in [false, true] {
                let options = RopeOptions {
                    pairing,
                    first,
                    heads: None,
                };
                Case {
                    options,
                    each,
                    ..case([2, 3, 2, features], width)
                }
                .compare();
            }
        }
    }
}

#[test]
fn a_very_wide_head_agrees_with_the_composition() {
    let options = RopeOptions {
        first: 1,
        ..Default::default()
    };
    Case {
        options,
        ..case([1, 2, 1, 4097], 4096)
    }
    .compare();
}

#[test]
fn only_the_first_heads_are_rotated() {
    for pairing in BOTH {
        for rotated in [0, 1, 4, 5, 6] {
            let options = RopeOptions {
                pairing,
                first: 4,
                heads: Some(rotated),
            };
            Case {
                options,
                each: true,
                ..case([2, 2, 6, 16], 8)
            }
            .compare();
        }
    }
}

/// Treats each pair as a complex number, which is multiplied by a power of `e^(i frequency)`.
#[test]
fn a_rotation_is_a_product_of_complex_numbers() {
    let (shape, width, max) = ([2, 4, 3, 6], 6, 11);
    let input = Input::wave(shape, 0.3);
    let frequencies = config(width, max).frequencies().unwrap();
    for pairing in BOTH {
        let x = Tensor::<4>::from_data(
            TensorData::new(input.values.clone(), shape),
            (&Device::flex(), DType::F64),
        );
        let table = table(&x, width, max);
        let options = RopeOptions {
            pairing,
            ..Default::default()
        };
        let y = values(rotate(x, &table, &Positions::From(5), &options));
        for token in 0..8 {
            let position = 5 + token % 4;
            for head in 0..3 {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let base = (token * 3 + head) * width;
                    let (a, b) = match pairing {
                        Pairing::Halves => (base + i, base + i + width / 2),
                        Pairing::Interleaved => (base + 2 * i, base + 2 * i + 1),
                    };
                    let mut z = (input.values[a], input.values[b]);
                    let (s, c) = frequency.sin_cos();
                    for _ in 0..position {
                        z = (z.0 * c - z.1 * s, z.0 * s + z.1 * c);
                    }
                    assert!((y[a] - z.0).abs() < 1e-13, "{pairing:?} {token} {head} {i}");
                    assert!((y[b] - z.1).abs() < 1e-13, "{pairing:?} {token} {head} {i}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_differences() {
    for pairing in BOTH {
        let options = RopeOptions {
            pairing,
            first: 1,
            heads: Some(1),
        };
        let case = Case {
            options,
            each: true,
            ..case([1, 3, 2, 6], 4)
        };
        assert_gradients("rope", &case.inputs(), |leaves| case.run(rotate, leaves));
    }
}

/// The inputs are a slice of a joint projection, and a transposed tensor.
#[test]
fn strided_and_sliced_inputs_are_taken() {
    let run = |operation: Operation, leaves: &[Tensor<1>]| {
        let joint = leaves[0].clone().reshape([2, 3, 48]);
        let q = joint.clone().narrow(2, 16, 16).reshape([2, 3, 2, 8]);
        let t = joint
            .narrow(2, 32, 16)
            .reshape([2, 3, 2, 8])
            .swap_dims(1, 2);
        let rotated = |x: Tensor<4>| {
            let table = table(&x, 8, 9);
            operation(x, &table, &Positions::From(1), &RopeOptions::default()).flatten::<1>(0, 3)
        };
        Tensor::cat(vec![rotated(q), rotated(t)], 0)
    };
    compare(
        "strided",
        &[Input::wave([2, 3, 48], 0.2)],
        |leaves| run(rotate, leaves),
        |leaves| run(composed::rotate, leaves),
    );
}

#[test]
fn an_empty_batch_is_taken() {
    for (device, _) in devices() {
        let x = Tensor::<4>::zeros([0, 4, 2, 8], &device);
        let table = table(&x, 8, 4);
        let options = RopeOptions::default();
        for positions in [Positions::From(0), scattered(0, 4, 4, &device)] {
            assert_eq!(
                rotate(x.clone(), &table, &positions, &options).dims(),
                [0, 4, 2, 8]
            );
        }
    }
}

/// A tensor whose memory is shared is not modified. A tensor whose memory is not shared gives the same result.
#[test]
fn a_shared_tensor_is_not_written_to() {
    for (device, _) in devices() {
        let fresh = || {
            Tensor::<1, Int>::arange(0..960, &device)
                .float()
                .reshape([2, 5, 6, 16])
        };
        let options = RopeOptions {
            first: 4,
            heads: Some(4),
            ..Default::default()
        };
        let table = table(&fresh(), 8, 5);
        let rotated = |x| rotate(x, &table, &Positions::From(0), &options);
        let held = fresh();
        let before = held.to_data();
        let y = rotated(held.clone());
        held.to_data().assert_eq(&before, true);
        rotated(fresh()).into_data().assert_eq(&y.into_data(), true);
        // A slice shares the memory of the complete tensor.
        let slice = held.clone().narrow(0, 1, 1);
        rotated(slice);
        held.to_data().assert_eq(&before, true);
    }
}

/// Infinity and NaN affect only their own pair. Large values do not overflow in intermediate results.
#[test]
fn extreme_values_stay_in_their_pair() {
    for (device, _) in devices() {
        let values = [f32::INFINITY, 1.0, f32::NAN, 3.0e38, 2.0, 5.0, 7.0, 0.0];
        let x = Tensor::<1>::from_data(values, &device).reshape([1, 1, 1, 8]);
        let table = table(&x, 8, 4);
        let y = rotate(x, &table, &Positions::From(1), &RopeOptions::default());
        let y: Vec<f32> = y.into_data().try_into_vec().unwrap();
        assert!(y[0].is_infinite() && y[4].is_infinite(), "{y:?}");
        assert!(y[2].is_nan() && y[6].is_nan(), "{y:?}");
        assert!(
            [y[1], y[3], y[5], y[7]].iter().all(|y| y.is_finite()),
            "{y:?}"
        );
    }
}

/// Positions outside of the table are clamped to its ends, as documented.
#[test]
fn positions_of_tokens_are_clamped() {
    for (device, _) in devices() {
        let x = Tensor::<4>::ones([1, 3, 1, 4], &device);
        let table = table(&x, 4, 6);
        let at = |positions: [i32; 3]| {
            let each = Tensor::<1, Int>::from_data(positions, &device).reshape([1, 3]);
            let options = RopeOptions::default();
            rotate(x.clone(), &table, &Positions::Each(each), &options).into_data()
        };
        at([-7, 6, i32::MAX]).assert_eq(&at([0, 5, 5]), true);
        let wide = Tensor::<2, Int>::from_data(
            TensorData::new(vec![-(1i64 << 40), 6, 1 << 32], [1, 3]),
            (&Device::flex(), DType::I64),
        );
        if device == Device::flex() {
            let options = RopeOptions::default();
            let y = rotate(x.clone(), &table, &Positions::Each(wide), &options);
            y.into_data().assert_eq(&at([0, 5, 5]), true);
        }
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let x = Tensor::<1, Int>::arange(0..98_304, &Device::flex()).float() / 1e4;
            let x = x.reshape([2, 256, 3, 64]);
            let table = table(&x, 64, 256);
            rotate(x, &table, &Positions::From(0), &RopeOptions::default()).into_data()
        })
    };
    run(1).assert_eq(&run(3), true);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_shape_agrees_with_the_composition(
        (batch, seq, heads) in (1usize..3, 1usize..5, 1usize..6),
        half in 1usize..20,
        (first, after) in (0usize..9, 0usize..9),
        rotated in 0usize..6,
        interleaved: bool,
        each: bool,
    ) {
        let pairing = BOTH[usize::from(interleaved)];
        let options = RopeOptions { pairing, first, heads: Some(rotated.min(heads)) };
        let shape = [batch, seq, heads, first + 2 * half + after];
        Case { options, each, ..case(shape, 2 * half) }.compare();
    }
}
