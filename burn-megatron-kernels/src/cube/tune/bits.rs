//! Tests that every split computes the same bits as the default split of the kernel. The tests use the public
//! functions.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron_test_support::skipped_in_part;

use super::{SPLITS, with_split};
use crate::activation::{Activation, ActivationOptions, activate};
use crate::dropout::{Draw, bias_dropout_add};
use crate::rope::{Pairing, Positions, RopeConfig, RopeOptions, RopeTable, Scaling, rotate};
use crate::testing::{Input, evaluate};

/// Sizes that need several cubes of the largest split and an incomplete last cube. They have loads of four, two and one
/// elements.
const SIZES: [[usize; 2]; 3] = [[9, 1000], [11, 514], [3, 1033]];

/// Asserts that outputs and gradients have the same bits in all splits. Each split compiles its own kernel, so each
/// case is tested in only one element type.
fn assert_bits(
    name: &str,
    dtype: DType,
    inputs: &[Input],
    operation: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    let device = Device::wgpu(Default::default());
    if !device.supports_dtype(dtype) {
        return skipped_in_part(format!("wgpu has no {dtype:?}"));
    }
    for (i, split) in SPLITS.into_iter().enumerate() {
        // Each split gets different inputs. Otherwise reused memory could hold results that a split fails to write.
        let scaled = |input: &Input| input.clone().scaled(1.0 + 0.1 * i as f64, 0.0);
        let inputs: Vec<_> = inputs.iter().map(scaled).collect();
        let [forced, own] = [Some(split), None].map(|split| {
            let run = || evaluate(&inputs, &device, dtype, dtype, &operation);
            let found = with_split(split, run);
            let all = core::iter::once(found.output).chain(found.gradients);
            all.flatten().map(f64::to_bits).collect::<Vec<_>>()
        });
        assert!(own.iter().any(|bits| *bits != 0));
        let differ = own
            .iter()
            .zip(&forced)
            .position(|(own, other)| own != other);
        assert_eq!((own.len(), differ), (forced.len(), None), "{name}, {split}");
    }
}

#[test]
fn activations() {
    let [four, two, one] = SIZES;
    for (kind, [rows, width], dtype) in [
        (Activation::SwiGlu, four, DType::F32),
        (Activation::SwiGlu, two, DType::F16),
        (Activation::QuickGeGlu, one, DType::F32),
        (Activation::Gelu, two, DType::F32),
        (Activation::GeluTanh, four, DType::F16),
        (Activation::SquaredRelu, one, DType::F32),
    ] {
        let wide = width * if kind.is_gated() { 2 } else { 1 };
        let x = Input::wave([rows, wide], 0.0);
        let options = ActivationOptions {
            clamp: (kind == Activation::QuickGeGlu).then_some(1.25),
            offset: 0.0,
        };
        assert_bits(
            &format!("{kind:?} of {rows} x {width}"),
            dtype,
            &[x],
            |leaves| {
                let x = leaves[0].clone().reshape([rows, wide]);
                activate(x, None, None, kind, options).flatten(0, 1)
            },
        );
    }
}

/// Tests the backward pass with bias and row weights, which uses a different kernel.
#[test]
fn activations_with_bias_and_weights() {
    let [rows, width] = SIZES[0];
    let inputs = [
        Input::wave([rows, 2 * width], 0.0),
        Input::wave([2 * width], 0.3),
        Input::wave([rows], 0.6),
    ];
    assert_bits("bias and weights", DType::F32, &inputs, |leaves| {
        let x = leaves[0].clone().reshape([rows, 2 * width]);
        let (bias, weight) = (Some(leaves[1].clone()), Some(leaves[2].clone()));
        let options = ActivationOptions::default();
        activate(x, bias, weight, Activation::SwiGlu, options).flatten(0, 1)
    });
}

#[test]
fn dropout() {
    let draw = |first, run, pitch| Draw {
        probability: 0.3,
        key: 0x0123_4567_89ab_cdef,
        position: 0x1_0000_0005,
        first,
        run,
        pitch,
    };
    let [four, two, one] = SIZES;
    // The masks of four elements use one Philox block at once. Other masks use the blocks of single elements.
    for ([rows, width], dtype, draw) in [
        (four, DType::F32, draw(8, four[0] * four[1], 0)),
        (two, DType::F16, draw((1 << 32) - 5, 7, 19)),
        (one, DType::F32, draw(4, 8, 24)),
    ] {
        let inputs = [
            Input::wave([rows, width], 0.1),
            Input::wave([width], 0.3),
            Input::wave([rows, width], 0.6),
        ];
        let rowed = |x: &Tensor<1>| x.clone().reshape([rows, width]);
        let name = format!("dropout of {rows} x {width}");
        assert_bits(&name, dtype, &inputs, |leaves| {
            let (bias, residual) = (Some(leaves[1].clone()), Some(rowed(&leaves[2])));
            bias_dropout_add(rowed(&leaves[0]), bias, residual, Some(draw)).flatten(0, 1)
        });
    }
    // Nothing is dropped. Without a bias, the backward pass uses the same kernel.
    let [rows, width] = four;
    let inputs = [Input::wave([rows, width], 0.1)];
    assert_bits("residual", DType::F32, &inputs, |leaves| {
        let x = leaves[0].clone().reshape([rows, width]);
        bias_dropout_add(x.clone(), None, Some(x), None).flatten(0, 1)
    });
}

/// Returns the positions of tokens `[2, seq]`, given for each token or only for the first token.
fn positions(seq: usize, each: bool, device: &Device) -> Positions {
    if !each {
        return Positions::From(3);
    }
    let values: Vec<i32> = (0..2 * seq).map(|i| (i * 7 % (seq + 5)) as i32).collect();
    let data = TensorData::new(values, [2, seq]);
    Positions::Each(Tensor::<2, Int>::from_data(data, &device.clone().inner()))
}

/// Tests the rotation into a new tensor, and in place if the backward pass rotates the gradient. A unit processes
/// groups of four, two and one heads. Some features and heads are copied.
#[test]
fn rope() {
    let seq = 37;
    for (pairing, [heads, turned, features], first, width, each, dtype) in [
        (Pairing::Halves, [8, 8, 32], 0, 32, true, DType::F32),
        (Pairing::Interleaved, [7, 6, 40], 8, 24, false, DType::F32),
        (Pairing::Interleaved, [4, 4, 32], 0, 32, true, DType::F16),
        (Pairing::Halves, [3, 3, 7], 1, 6, false, DType::F32),
    ] {
        let x = Input::wave([2, seq, heads, features], 0.1);
        let name = format!("{pairing:?}, {turned} of {heads} heads, each {each}");
        assert_bits(&name, dtype, &[x], |leaves| {
            let device = leaves[0].device();
            let config = RopeConfig {
                width,
                max_positions: seq + 5,
                base: 100.0,
                scaling: Scaling::None,
            };
            let table = RopeTable::new(&config, &device, dtype).unwrap();
            let options = RopeOptions {
                pairing,
                first,
                heads: Some(turned),
            };
            let x = leaves[0].clone().reshape([2, seq, heads, features]);
            rotate(x, &table, &positions(seq, each, &device), &options).flatten(0, 3)
        });
    }
}
