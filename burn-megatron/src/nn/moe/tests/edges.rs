//! Loads that are as uneven as they can be.

use super::*;

const EP: [Sizes; 3] = [ONE, [1, 4, 1, 1], [2, 2, 2, 1]];

/// Every token with these choices.
fn check_choices(experts: usize, of_token: &[i64], what: &str) {
    let k = of_token.len();
    let choices: Vec<i64> = of_token.repeat(BATCH * SEQ);
    let config = config(RouterConfig::new(HIDDEN, experts, k)).with_bias(true);
    let expected = Dense::new(&config).run(Some(&choices));
    for dispatcher in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
        let config = config.clone().with_dispatcher(dispatcher);
        for sizes in EP
            .into_iter()
            .filter(|sizes| experts.is_multiple_of(sizes[1]))
        {
            let run = Run {
                choices: Some(choices.clone()),
                ..Run::default()
            };
            let found = run.on(sizes, &config);
            found.assert_near(&expected, &format!("{what}, {dispatcher:?} on {sizes:?}"));
        }
    }
}

#[test]
fn all_tokens_to_one_expert() {
    // Three of four ranks have no rows, and idle experts a gradient of zeros.
    check_choices(EXPERTS, &[2], "one of four");
    check_choices(EXPERTS, &[3, 1], "two of four");
}

#[test]
fn every_expert_and_one_expert() {
    check_choices(EXPERTS, &[0, 1, 2, 3], "k = E");
    check_choices(1, &[0], "E = 1");
    check(&config(RouterConfig::new(HIDDEN, EXPERTS, 1)), &EP, "k = 1");
    let sigmoid = RouterConfig::new(HIDDEN, EXPERTS, 1).with_score(ScoreFunction::Sigmoid);
    check(&config(sigmoid), &EP[1..2], "k = 1, sigmoid");
}

#[test]
fn ties_go_to_the_smaller_index_and_invalid_scores_last() {
    let equal = ops::top_k(wave([1, EXPERTS], 0.0).mul_scalar(0.0), 3, None);
    assert_eq!(ops::read(equal), [0, 1, 2]);
    let scores =
        Tensor::<2>::from_floats([[f32::NAN, -1.0, f32::NEG_INFINITY, 0.0]], &Device::flex());
    assert_eq!(ops::read(ops::top_k(scores, 4, None)), [3, 1, 0, 2]);
}

#[test]
fn a_router_without_gradients_or_tokens_of_other_types() {
    let ctx = ParallelContext::single();
    for dtype in [DType::F32, DType::BF16] {
        let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, dtype);
        let moe = config(router()).with_bias(true).init(&builder).unwrap();
        let y = moe.forward(input().cast(dtype));
        assert_eq!((y.dims(), y.dtype()), ([BATCH, SEQ, HIDDEN], dtype));
        let routing = moe
            .router
            .forward(input().cast(dtype).reshape([-1, HIDDEN as i32]), None);
        assert_eq!(routing.weights.dtype(), DType::F32);
    }
}

/// The derivative of each score function at fixed choices, also where scores underflow.
#[test]
fn weights_have_the_gradient_of_finite_differences() {
    use ScoreFunction::*;
    let z = [1.0, -2.0, 0.0, 3.0, 0.5, -0.5, 0.25, 1.5];
    let choices = ints(&[3, 0, 3, 0], [2, 2]);
    let weights = |z: Tensor<2>, score| {
        let weights =
            ops::router_weights(z.clone(), Tensor::from_inner(choices.clone()), score, 2.5);
        let factors: Tensor<2> = Tensor::from_inner(wave([2, 2], 1.0));
        (weights * factors).sum()
    };
    for score in [Softmax, PreSoftmax, Sigmoid, SqrtSoftplus] {
        let at = |z: &[f64]| {
            let data = TensorData::new(z.to_vec(), [2, EXPERTS]);
            Tensor::<2>::from_data(data, (&Device::flex().autodiff(), DType::F64)).require_grad()
        };
        let leaf = at(&z);
        let gradients = weights(leaf.clone(), score).backward();
        let found = values(leaf.grad(&gradients).unwrap());
        let difference = |i: usize| {
            let step = 1e-6;
            let moved = |by: f64| {
                let mut z = z;
                z[i] += by;
                values(weights(at(&z), score).inner())[0]
            };
            (moved(step) - moved(-step)) / (2.0 * step)
        };
        let expected: Vec<f64> = (0..z.len()).map(difference).collect();
        assert_near(&format!("{score:?}"), &found, &expected, 1e-8);
    }
    let low = Tensor::<2>::full([2, EXPERTS], -1000.0, &Device::flex().autodiff()).require_grad();
    let gradients = weights(low.clone().cast(DType::F64), SqrtSoftplus).backward();
    let found = values(low.grad(&gradients).unwrap());
    assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
}
