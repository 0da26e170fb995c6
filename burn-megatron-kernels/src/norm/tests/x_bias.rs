//! Tests of norms of the sum of `x`, its bias and a residual.

use super::*;

/// Returns `x`, a residual, a weight, a bias and a bias of `x`.
fn biased_leaves(count: usize, width: usize) -> Vec<Input> {
    let mut inputs = leaves(count, width, 2);
    inputs.push(Input::wave([width], 0.85));
    inputs
}

/// Returns the bias of the norm, or `None` for RMSNorm.
fn bias(kind: NormKind, t: &[Tensor<1>]) -> Option<Tensor<1>> {
    (kind == NormKind::Layer).then(|| t[3].clone())
}

fn fused(kind: NormKind, t: &[Tensor<1>], residual: Tensor<2>) -> [Tensor<2>; 2] {
    let (x, x_bias) = (rows(&t[0], width_of(t)), t[4].clone().into());
    let (weight, bias) = (t[2].clone().into(), bias(kind, t).map(Into::into));
    add_normalise(kind, x, Some(x_bias), residual, weight, bias, OPTIONS).into()
}

fn unfused(kind: NormKind, t: &[Tensor<1>]) -> [Tensor<2>; 2] {
    let [x, residual] = [&t[0], &t[1]].map(|x| rows(x, width_of(t)));
    let (weight, x_bias) = (t[2].clone(), Some(t[4].clone()));
    composed::add_normalise(kind, x, x_bias, residual, weight, bias(kind, t), OPTIONS).into()
}

/// The numbers of rows and the widths. The cases are rows of a plane, rows of a cube, and rows that are read twice.
const WIDTHS: [(usize, usize); 7] = [
    (37, 7),
    (5, 33),
    (40, 96),
    (3, 1000),
    (3, 2048),
    (2, 4097),
    (3, 20_000),
];

#[test]
fn the_norm_of_a_biased_sum_equals_the_composed_one() {
    for (count, width) in WIDTHS {
        for kind in [NormKind::Layer, NormKind::Rms] {
            let name = format!("{kind:?} norm of {width}, with a bias of x");
            let inputs = biased_leaves(count, width);
            compare_within(
                4.0,
                &name,
                &inputs,
                |t| {
                    let [y, sum] = fused(kind, t, rows(&t[1], width));
                    both(y, sum)
                },
                |t| {
                    let [y, sum] = unfused(kind, t);
                    both(y, sum)
                },
            );
            compare_within(
                4.0,
                &format!("{name} and a wide residual"),
                &inputs,
                |t| {
                    let [y, sum] = fused(kind, t, widened(rows(&t[1], width)));
                    both(y, sum)
                },
                |t| {
                    let [y, sum] = unfused(kind, t);
                    both(y, sum)
                },
            );
        }
    }
}

#[test]
fn its_gradients_are_those_of_differences() {
    let inputs = biased_leaves(3, 9);
    for kind in [NormKind::Layer, NormKind::Rms] {
        assert_gradients("a norm with a bias of x", &inputs, |t| {
            let [y, sum] = fused(kind, t, rows(&t[1], 9));
            both(y, sum)
        });
    }
}

#[test]
fn either_output_alone_has_all_gradients() {
    let inputs = biased_leaves(12, 24);
    for used in [0, 1] {
        let one = |outputs: [Tensor<2>; 2]| flat(outputs[used].clone());
        compare_within(
            4.0,
            "one output of a norm with a bias of x",
            &inputs,
            |t| one(fused(NormKind::Layer, t, rows(&t[1], 24))),
            |t| one(unfused(NormKind::Layer, t)),
        );
    }
}

/// On the CPU, the fused operation has the same bits as `bias_dropout_add` followed by a norm, for outputs and
/// gradients.
#[test]
fn on_the_cpu_the_bits_are_those_of_two_operations() {
    let inputs = biased_leaves(60, 24);
    let two = |t: &[Tensor<1>]| {
        let [x, residual] = [&t[0], &t[1]].map(|x| rows(x, 24));
        let sum = crate::dropout::bias_dropout_add(x, Some(t[4].clone()), Some(residual), None);
        let y = layer_norm(sum.clone(), t[2].clone(), Some(t[3].clone()), OPTIONS);
        both(y, sum)
    };
    let one = |t: &[Tensor<1>]| {
        let [y, sum] = fused(NormKind::Layer, t, rows(&t[1], 24));
        both(y, sum)
    };
    for dtype in [DType::F64, DType::F32] {
        let expected = evaluate(&inputs, &Device::flex(), dtype, dtype, &two);
        let actual = evaluate(&inputs, &Device::flex(), dtype, dtype, &one);
        assert_eq!(actual.output, expected.output);
        assert_eq!(actual.gradients, expected.gradients);
    }
}

#[test]
fn a_bias_of_another_type_has_a_gradient_of_its_own() {
    for (device, dtypes) in devices() {
        for dtype in dtypes.into_iter().filter(|dtype| dtype.size() == 2) {
            let device = device.clone().autodiff();
            let ones = |dtype| Tensor::<1>::ones([8], (&device, dtype));
            let x = Tensor::<2>::ones([2, 8], (&device, dtype));
            let x_bias = ones(DType::F32).require_grad();
            let weight = ones(dtype).require_grad();
            let (y, sum) = add_normalise(
                NormKind::Rms,
                x.clone(),
                Some(x_bias.clone().into()),
                x,
                weight.clone().into(),
                None,
                OPTIONS,
            );
            assert_eq!((y.dtype(), sum.dtype()), (dtype, dtype));
            let gradients = (y + sum).sum().backward();
            let of_bias = x_bias.grad(&gradients).unwrap();
            assert_eq!(of_bias.dtype(), DType::F32);
            // The norm of a row of equal elements is a row of ones, so the gradient of its input is close to 0.
            let expected = Tensor::<1>::ones([8], &device.clone().inner()) * 2.0;
            let tolerance = burn::tensor::Tolerance::<f32>::rel_abs(1e-2, 1e-2);
            of_bias
                .into_data()
                .assert_approx_eq(&expected.into_data(), tolerance);
            assert_eq!(weight.grad(&gradients).unwrap().dtype(), dtype);
        }
    }
}
