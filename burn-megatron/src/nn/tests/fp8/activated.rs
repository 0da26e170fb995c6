//! Compares an MLP whose activation is quantized while it is computed with an MLP that saves the activation.

use burn::module::Module;

use super::*;
use crate::nn::hook::with_anchor;

/// Returns the output, the gradients of the input and of all parameters, and the states after a step.
fn run(fp8: &Fp8Config, activation: Activation, bias: bool) -> (Vec<Vec<u32>>, Vec<Fp8LayerState>) {
    let builder = builder(&ParallelContext::single(), fp8);
    let width = if activation.is_gated() { 2 * 20 } else { 20 };
    let config = ParallelMlpConfig::new(12, 20, activation).with_bias(bias);
    let mut mlp = config.init(&builder.child("mlp")).unwrap();
    mlp.up.weight = parameter(spread([12, width], 1.0));
    mlp.down.weight = parameter(spread([20, 12], 2.0));
    mlp.up.bias = bias.then(|| parameter(spread([width], 3.0)));
    let fp8 = builder.fp8();
    fp8.measure(true);
    let x = leaf(spread([2, 9, 12], 0.5));
    let y = mlp.forward_without_bias(x.clone()).0;
    let gradients = backward(y.clone(), spread([2, 9, 12], 4.0));
    let mut all = vec![floats(y.inner()), floats(x.grad(&gradients).unwrap())];
    for weight in [&mlp.up.weight, &mlp.down.weight] {
        all.push(floats(weight.val().grad(&gradients).unwrap()));
    }
    all.extend(
        mlp.up
            .bias
            .map(|bias| floats(bias.val().grad(&gradients).unwrap())),
    );
    let reports = fp8.report();
    assert_eq!(reports.len(), 6);
    all.extend(
        reports
            .iter()
            .map(|report| vec![report.amax as f32, report.snr_db as f32]),
    );
    fp8.end_step_single_rank().unwrap();
    let all = all.iter().map(|values| bits(values)).collect();
    (all, fp8.states().into_values().collect())
}

#[test]
fn a_fused_activation_changes_no_bit() {
    for recipe in recipes() {
        for (activation, bias) in [
            (Activation::GeluTanh, true),
            (Activation::SwiGlu, false),
            (Activation::GeGlu, true),
        ] {
            let [fused, plain] = [true, false].map(|save_activations| {
                let fp8 = Fp8Config {
                    save_activations,
                    ..config(recipe)
                };
                run(&fp8, activation, bias)
            });
            assert_eq!(fused, plain, "{recipe:?}, {activation:?}");
        }
    }
}

/// The cases are: only a bias has a gradient, no parameter has a gradient, and the second weight has no gradient.
#[test]
fn frozen_parameters_leave_the_others_as_they_are() {
    let fp8 = config((Fp8Recipe::MxFp8, Fp8Format::Hybrid));
    let builder = builder(&ParallelContext::single(), &fp8);
    let config = ParallelMlpConfig::new(12, 20, Activation::Gelu);
    let mlp = config.init(&builder.child("mlp")).unwrap();
    let x: Tensor<3> = spread([2, 9, 12], 0.5);
    let dy: Tensor<3> = spread([2, 9, 12], 4.0);
    let all = {
        let gradients = backward(mlp.forward(leaf(x.clone())), dy.clone());
        let of = |param: &Param<Tensor<2>>| floats(param.val().grad(&gradients).unwrap());
        let bias = mlp.up.bias.as_ref().unwrap().val();
        (of(&mlp.down.weight), floats(bias.grad(&gradients).unwrap()))
    };
    let bias_of = |mlp: &ParallelMlp, gradients: &burn::tensor::Gradients| {
        let bias = mlp.up.bias.as_ref().unwrap().val();
        floats(bias.grad(gradients).unwrap())
    };
    let untracked = Tensor::from_inner(x.clone());
    let mut only_bias = mlp.clone();
    only_bias.up.weight = only_bias.up.weight.set_require_grad(false);
    let gradients = backward(only_bias.forward(untracked), dy.clone());
    assert_eq!(bits(&bias_of(&only_bias, &gradients)), bits(&all.1));
    let down = only_bias.down.weight.val().grad(&gradients).unwrap();
    assert_eq!(bits(&floats(down)), bits(&all.0));

    let mut without_down = mlp.clone();
    without_down.down.weight = without_down.down.weight.set_require_grad(false);
    let gradients = backward(without_down.forward(leaf(x.clone())), dy);
    assert_eq!(bits(&bias_of(&without_down, &gradients)), bits(&all.1));
    assert!(without_down.down.weight.val().grad(&gradients).is_none());

    let y = floats(mlp.forward(leaf(x.clone())).inner());
    assert_eq!(bits(&floats(mlp.valid().forward(x.clone()))), bits(&y));
    let frozen = mlp.no_grad();
    let x = leaf(x);
    let recomputed = with_anchor(&x, || recompute(x.clone(), move |x| frozen.forward(x)));
    assert_eq!(bits(&floats(recomputed.inner())), bits(&y));
}
