//! Tests layers on one rank against Burn's layers, and against their formulas in Burn's operations.

use burn::module::Param;
use burn::tensor::activation::{gelu_approximate, sigmoid};
use burn::tensor::{DType, Device, Gradients, Int, Tensor};

use burn_megatron_kernels::rope::{Positions, RopeOptions, rotate};

use super::{assert_close, assert_near, autodiff, leaf, values, wave};
use crate::comm::ParallelContext;
use crate::nn::*;

fn builder() -> ModelBuilder {
    ModelBuilder::with(&ParallelContext::single(), &autodiff(), 1, DType::F64)
}

/// Returns the gradients of `sum(y * w)` for weights `w` that all differ.
pub fn backward<const D: usize>(y: &Tensor<D>) -> Gradients {
    (y.clone() * Tensor::from_inner(wave(y.dims(), 9.0)))
        .sum()
        .backward()
}

pub fn gradient<const D: usize>(x: &Tensor<D>, gradients: &Gradients) -> Vec<f64> {
    values(x.grad(gradients).expect("a gradient"))
}

/// Checks that the output and the gradient of the input are the same.
#[track_caller]
fn assert_same(
    what: &str,
    ours: impl Fn(Tensor<3>) -> Tensor<3>,
    theirs: impl Fn(Tensor<3>) -> Tensor<3>,
) {
    let both = |f: &dyn Fn(Tensor<3>) -> Tensor<3>| {
        let x = leaf(wave([2, 5, 6], 0.5).mul_scalar(2.0));
        let y = f(x.clone());
        let gradients = backward(&y);
        (values(y.inner()), gradient(&x, &gradients))
    };
    let (ours, theirs) = (both(&ours), both(&theirs));
    assert_close(what, &ours.0, &theirs.0);
    assert_close(&format!("gradient of {what}"), &ours.1, &theirs.1);
}

#[test]
fn both_linear_layers_are_the_plain_one_to_the_bit() {
    let (weight, bias) = (wave([6, 4], 1.0), wave([4], 2.0));
    let reference = burn::nn::Linear {
        weight: Param::from_tensor(leaf(weight.clone())),
        bias: Some(Param::from_tensor(leaf(bias.clone()))),
    };
    let mut column = ColumnParallelLinearConfig::new(6, 4)
        .init(&builder())
        .unwrap();
    let mut row = RowParallelLinearConfig::new(6, 4).init(&builder()).unwrap();
    column.weight = Param::from_tensor(leaf(weight.clone()));
    column.bias = Some(Param::from_tensor(leaf(bias.clone())));
    row.weight = Param::from_tensor(leaf(weight));
    row.bias = Some(Param::from_tensor(leaf(bias)));

    let run = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>,
               w: &Param<Tensor<2>>,
               b: &Option<Param<Tensor<1>>>| {
        let x = leaf(wave([2, 5, 6], 0.5));
        let y = forward(x.clone());
        let gradients = backward(&y);
        let bias = gradient(&b.as_ref().unwrap().val(), &gradients);
        let all = [
            gradient(&x, &gradients),
            gradient(&w.val(), &gradients),
            bias,
        ];
        (values(y.inner()), all)
    };
    let (y, expected) = run(
        &|x| reference.forward(x),
        &reference.weight,
        &reference.bias,
    );
    for (found, gradients) in [
        run(&|x| column.forward(x), &column.weight, &column.bias),
        run(&|x| row.forward(x), &row.weight, &row.bias),
    ] {
        assert_eq!(found, y);
        for (found, expected) in gradients.iter().zip(&expected) {
            assert_close("gradient", found, expected);
        }
    }
}

/// Returns the output, and the gradients of input, weight and bias of a norm.
fn norm(kind: NormKind, dtype: DType) -> Vec<Vec<f64>> {
    let cast = |x: Tensor<1>| leaf(x.cast(dtype));
    let mut layer = NormConfig::new(kind, 6, 1e-3).init(&builder());
    layer.weight = Param::from_tensor(cast(wave([6], 1.0)));
    layer.bias = layer.bias.map(|_| Param::from_tensor(cast(wave([6], 2.0))));
    let x = leaf(wave([2, 5, 6], 0.5).cast(dtype));
    let y = layer.forward(x.clone());
    let gradients = (y.clone() * Tensor::from_inner(wave([2, 5, 6], 9.0).cast(dtype)))
        .sum()
        .backward();
    let mut all = vec![
        values(y.inner()),
        gradient(&x, &gradients),
        gradient(&layer.weight.val(), &gradients),
    ];
    all.extend(layer.bias.map(|bias| gradient(&bias.val(), &gradients)));
    all
}

#[test]
fn layer_norm_is_burns() {
    let mut reference = burn::nn::LayerNormConfig::new(6)
        .with_epsilon(1e-3)
        .init(&autodiff());
    reference.gamma = Param::from_tensor(leaf(wave([6], 1.0)));
    reference.beta = Some(Param::from_tensor(leaf(wave([6], 2.0))));
    let x = leaf(wave([2, 5, 6], 0.5));
    let y = reference.forward(x.clone());
    let gradients = backward(&y);
    let expected = [
        values(y.inner()),
        gradient(&x, &gradients),
        gradient(&reference.gamma.val(), &gradients),
        gradient(&reference.beta.unwrap().val(), &gradients),
    ];
    let found = norm(NormKind::Layer, DType::F64);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_close("LayerNorm", found, expected);
    }
}

/// Burn's RMSNorm always computes in f32. The formula in f64 is a more precise reference.
#[test]
fn rms_norm_is_burns_and_follows_its_formula() {
    let formula = |x: Tensor<3>, weight: Tensor<1>| {
        let square: Tensor<3> = (x.clone() * x.clone()).mean_dim(2);
        x / square.add_scalar(1e-3).sqrt() * weight.unsqueeze()
    };
    let mut layer = burn::nn::RmsNormConfig::new(6)
        .with_epsilon(1e-3)
        .init(&autodiff());
    layer.gamma = Param::from_tensor(leaf(wave([6], 1.0)));
    let found = norm(NormKind::Rms, DType::F64);
    assert_eq!(found.len(), 3);
    let references: [(&dyn Fn(Tensor<3>) -> Tensor<3>, f64); 2] = [
        (&|x| formula(x, layer.gamma.val()), 1e-12),
        (&|x| layer.forward(x), 1e-6),
    ];
    for (reference, tolerance) in references {
        let x = leaf(wave([2, 5, 6], 0.5));
        let y = reference(x.clone());
        let gradients = backward(&y);
        let weight = gradient(&layer.gamma.val(), &gradients);
        let expected = [values(y.inner()), gradient(&x, &gradients), weight];
        for (found, expected) in found.iter().zip(&expected) {
            assert_near("RMSNorm", found, expected, tolerance);
        }
    }
}

#[test]
fn norms_in_f32_are_near_those_in_f64() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        for (found, expected) in norm(kind, DType::F32).iter().zip(&norm(kind, DType::F64)) {
            assert_near("norm in f32", found, expected, 1e-5);
        }
    }
}

#[test]
fn activations_follow_their_formulas() {
    for fused in [true, false] {
        activations(fused);
    }
}

fn activations(fused: bool) {
    assert_same(
        "gelu",
        |x| Activation::Gelu.forward_biased(x, None, fused),
        burn::tensor::activation::gelu,
    );
    assert_same(
        "gelu of tanh",
        |x| Activation::GeluTanh.forward_biased(x, None, fused),
        |x| {
            let cube = x.clone() * x.clone() * x.clone();
            let inner = (x.clone() + cube.mul_scalar(0.044715))
                .mul_scalar((2.0 / std::f64::consts::PI).sqrt());
            x.mul_scalar(0.5) * inner.tanh().add_scalar(1.0)
        },
    );
    assert_same(
        "Burn's gelu of tanh",
        |x| Activation::GeluTanh.forward_biased(x, None, fused),
        gelu_approximate,
    );
    assert_same(
        "swiglu",
        |x| Activation::SwiGlu.forward_biased(x, None, fused),
        |x| {
            let (gate, value) = (x.clone().narrow(2, 0, 3), x.narrow(2, 3, 3));
            gate.clone() * sigmoid(gate) * value
        },
    );
}

/// The exponentials of extreme inputs overflow, but the outputs must be finite.
#[test]
fn activations_are_finite_far_out() {
    for activation in [Activation::Gelu, Activation::GeluTanh, Activation::SwiGlu] {
        let x: Tensor<3> = leaf(Tensor::from_data(
            [[[-1e4f64, -50.0, 50.0, 1e4, 1.0, 1.0, 1.0, 1.0]]],
            (&Device::flex(), DType::F64),
        ));
        let y = activation.forward(x.clone());
        let gradients = y.clone().sum().backward();
        let y = values(y.inner());
        assert!(
            y[..4]
                .iter()
                .zip([0.0, 0.0, 50.0, 1e4])
                .all(|(y, x)| (y - x).abs() < 1e-9),
            "{y:?}"
        );
        let slope = gradient(&x, &gradients);
        assert!(
            slope[..4]
                .iter()
                .zip([0.0, 0.0, 1.0, 1.0])
                .all(|(y, x)| (y - x).abs() < 1e-9),
            "{slope:?}"
        );
    }
}

#[test]
fn an_embedding_is_burns() {
    let weight = wave([10, 6], 1.0);
    let reference = burn::nn::Embedding {
        weight: Param::from_tensor(leaf(weight.clone())),
    };
    let vocabulary = Vocabulary {
        tokens: 10,
        padded: 10,
    };
    let mut layer = VocabParallelEmbeddingConfig::new(vocabulary, 6)
        .with_init(Init::Normal(1.0))
        .init(&builder())
        .unwrap();
    layer.weight = Param::from_tensor(leaf(weight));
    // Token 3 occurs three times, and token 1 never.
    let tokens = || Tensor::<2, Int>::from_data([[3, 0, 3], [9, 3, 2]], &autodiff());
    let (ours, theirs) = (layer.forward(tokens()), reference.forward(tokens()));
    let ours_gradient = gradient(&layer.weight.val(), &backward(&ours));
    let expected = gradient(&reference.weight.val(), &backward(&theirs));
    assert_eq!(values(ours.inner()), values(theirs.inner()));
    assert_close("gradient", &ours_gradient, &expected);
}

/// Burn rotates neighbouring features, and this crate rotates the halves. The results differ only in the feature
/// order.
#[test]
fn rotary_positions_are_burns_in_another_order() {
    let (seq, width) = (7, 8);
    let x = wave([2, 3, seq, width], 0.5).cast(DType::F32);
    let reference = burn::nn::RotaryEncodingConfig::new(16, width).init(&Device::flex());
    // Converts [.., pair, 2] to [.., 2, pair] and back.
    let order = |x: Tensor<4>, inner: usize| {
        let pairs: Tensor<5> = x.reshape([2, 3, seq, width / inner, inner]);
        pairs.swap_dims(3, 4).reshape([2, 3, seq, width])
    };
    let table = super::rotary(16, width, 10_000.0, DType::F32);
    // The kernel rotates `[batch, seq, heads, width]`.
    let turned = rotate(
        order(x.clone(), 2).swap_dims(1, 2),
        &table,
        &Positions::From(0),
        &RopeOptions::default(),
    );
    let ours = values(turned.swap_dims(1, 2));
    let theirs = values(order(reference.forward(x), 2));
    assert_near("turned", &ours, &theirs, 1e-6);
}
