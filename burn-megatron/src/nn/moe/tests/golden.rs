//! Values for `T = 4` tokens, `E = 4` experts and `k = 2`, computed in f64 independently of this code.

use super::*;
use crate::nn::anchored_value;
use crate::nn::moe::routed_tokens::RankTokens;

const LOGITS: [f64; 16] = [
    2.0, 1.0, 0.0, -1.0, //
    1.0, 2.0, 0.0, 0.5, //
    0.0, 3.0, 1.0, -2.0, //
    1.5, 1.0, 0.5, 0.0,
];

/// Returns a router whose logits are its input.
fn identity(config: RouterConfig) -> Router {
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let mut router = config.init(&builder).unwrap();
    router.gate = router
        .gate
        .map(|gate| Tensor::<2>::eye(4, &gate.device()).cast(DType::F64));
    router
}

fn logits() -> Tensor<2> {
    let data = TensorData::new(LOGITS.to_vec(), [4, 4]);
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

fn routed(score: ScoreFunction, factor: f64) -> Routing {
    let config = RouterConfig::new(4, 4, 2)
        .with_score(score)
        .with_factor(factor);
    identity(config).forward(logits().unsqueeze(), None, &RoutedTokens::rows([1, 4]))
}

#[track_caller]
fn assert_golden(found: Tensor<2>, expected: &[f64]) {
    let found = values(found);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 6e-8, "{found} is not {expected}");
    }
}

#[test]
fn choices_and_weights() {
    let softmax = routed(ScoreFunction::Softmax, 1.0);
    assert_eq!(read(softmax.indices), [0, 1, 1, 0, 1, 2, 0, 1]);
    let weights = [
        0.7310586, 0.2689414, 0.7310586, 0.2689414, 0.8807971, 0.1192029, 0.6224593, 0.3775407,
    ];
    assert_golden(softmax.weights, &weights);
    let weights = [
        0.6439143, 0.2368828, 0.5792585, 0.2130973, 0.8390245, 0.1135496, 0.4550542, 0.2760043,
    ];
    assert_golden(routed(ScoreFunction::PreSoftmax, 1.0).weights, &weights);
    let sigmoid = routed(ScoreFunction::Sigmoid, 2.5).weights;
    assert_golden(sigmoid.clone().narrow(0, 0, 1), &[1.3661228, 1.1338772]);
    assert_golden(sigmoid.narrow(0, 2, 1), &[1.4144625, 1.0855375]);
}

#[test]
fn replayed_choices_have_the_weights_of_the_present_logits() {
    let router = identity(RouterConfig::new(4, 4, 2));
    let choices = ints(&[2, 3, 0, 3, 0, 3, 2, 3], [4, 2]);
    let tokens = RoutedTokens::rows([1, 4]);
    let routing = router.forward(logits().unsqueeze(), Some(choices), &tokens);
    assert_golden(routing.weights.narrow(0, 0, 1), &[0.7310586, 0.2689414]);
    assert_eq!(values(anchored_value(&router.gate, &logits())).len(), 16);
}

fn drop(keep: KeepPolicy, factor: f64, pad: bool) -> Routing {
    let capacity = Capacity { factor, keep, pad };
    let own = RankTokens::all([1, 4], 1);
    capacity.apply(routed(ScoreFunction::Softmax, 1.0), &own)
}

#[test]
fn dropped_choices() {
    // Each expert has two tokens.
    let weights = drop(KeepPolicy::LargestWeights, 1.0, false).indices;
    assert_eq!(read(weights), [0, -1, 1, -1, 1, 2, 0, -1]);
    let first = drop(KeepPolicy::First, 1.0, false).indices;
    assert_eq!(read(first), [0, 1, 1, 0, -1, 2, -1, -1]);
}
