//! Tests extremely uneven loads.

use super::*;

const EP: [Sizes; 3] = [ONE, [1, 4, 1, 1], [2, 2, 2, 1]];

/// Checks a layer in which every token has these choices.
fn check_choices(experts: usize, of_token: &[i64], what: &str) {
    let k = of_token.len();
    let choices: Vec<i64> = of_token.repeat(BATCH * SEQ);
    let config = config(RouterConfig::new(HIDDEN, experts, k)).with_bias(true);
    let expected = Dense::new(&config).run(Some(&choices));
    for dispatcher in DISPATCHERS {
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
    // Three of four ranks have no rows, and idle experts have zero gradients.
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
fn a_router_without_gradients_or_tokens_of_other_types() {
    let ctx = ParallelContext::single();
    for dtype in [DType::F32, DType::BF16] {
        let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, dtype);
        let moe = config(router()).with_bias(true).init(&builder).unwrap();
        let y = moe.forward(input().cast(dtype));
        assert_eq!((y.dims(), y.dtype()), ([BATCH, SEQ, HIDDEN], dtype));
        let routing = moe.router.forward(input().cast(dtype), None, &whole());
        assert_eq!(routing.weights.dtype(), DType::F32);
    }
}
