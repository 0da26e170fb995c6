//! Tests the gradients of router losses that are added to the model loss, in every layout.

use burn::tensor::activation::{sigmoid, softmax};
use insta::assert_snapshot;

use super::dense::choose;
use super::*;
use crate::nn::moe::routed_tokens::RankTokens;
use crate::nn::moe::step::RouterPass;
use crate::nn::tests::leaf;

const LOSS_SCALE: f64 = 8.0;

pub fn loss(kind: RouterLossKind, coefficient: f64) -> RouterLoss {
    RouterLoss { kind, coefficient }
}

/// Returns the row ranges of the micro-batches of a batch, with `rows` rows each.
fn micro_batches(rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let tokens = rows * SEQ;
    (0..BATCH / rows).map(move |index| index * tokens..(index + 1) * tokens)
}

/// Returns the sum of `counted tokens x loss / coefficient` over micro-batches.
fn reference(kind: RouterLossKind, logits: &Tensor<2>, sigmoids: bool, rows: usize) -> Tensor<1> {
    reference_of([SEQ; BATCH], kind, logits, sigmoids, rows)
}

/// Returns the sum for the first tokens of each row. The other tokens are padding, which only counts in the model
/// loss.
pub fn reference_of(
    lengths: [usize; BATCH],
    kind: RouterLossKind,
    logits: &Tensor<2>,
    sigmoids: bool,
    rows: usize,
) -> Tensor<1> {
    let sequences = micro_batches(1);
    let ranges: Vec<_> = match kind {
        RouterLossKind::Balance | RouterLossKind::ZLoss => micro_batches(rows).collect(),
        RouterLossKind::SequenceBalance => sequences.collect(),
        RouterLossKind::GlobalBalance => micro_batches(BATCH).collect(),
    };
    let parts = ranges.into_iter().map(|range| {
        let counted = range.len() as f64;
        let is_real = |token: &usize| token % SEQ < lengths[token / SEQ];
        let real: Vec<i64> = range.filter(is_real).map(|token| token as i64).collect();
        let tokens = real.len() as f64;
        let z = logits
            .clone()
            .select(0, Tensor::from_data(&real[..], &logits.device()));
        if kind == RouterLossKind::ZLoss {
            return z.exp().sum_dim(1).log().square().mean().mul_scalar(counted);
        }
        let mut counts = vec![0.0; EXPERTS];
        for row in values(z.clone().inner()).chunks(EXPERTS) {
            choose(row, 2)
                .into_iter()
                .for_each(|expert| counts[expert] += 1.0);
        }
        let scores = if sigmoids {
            let scores = sigmoid(z);
            scores.clone() / scores.sum_dim(1)
        } else {
            softmax(z, 1)
        };
        let counts = TensorData::new(counts, [1, EXPERTS]);
        let counts = Tensor::from_data(counts, (&Device::flex().autodiff(), DType::F64));
        let sum = (scores.sum_dim(0) * counts).sum();
        // The loss is multiplied by the counted tokens of the micro-batch.
        sum.mul_scalar(counted * EXPERTS as f64 / (2.0 * tokens * tokens))
    });
    parts.reduce(|sum, part| sum + part).unwrap()
}

fn check_losses(losses: &[RouterLoss], score: ScoreFunction, layouts: &[Sizes]) {
    let config = config(router().with_score(score)).with_losses(losses.to_vec());
    for sizes in layouts {
        let data = sizes[1..].iter().product::<usize>() / sizes[0];
        let dense = Dense::new(&config);
        let expected = dense.run_with(|x| {
            let weights = dense.router_weights(x.clone());
            let logits = dense.logits(x.clone());
            let of = |loss: &RouterLoss| {
                let sigmoids = score == ScoreFunction::Sigmoid;
                let value = reference(loss.kind, &logits, sigmoids, BATCH / data);
                // The model loss is multiplied by the loss scale when its backward pass starts, but not here.
                value.mul_scalar(loss.coefficient * LOSS_SCALE)
            };
            let more = losses.iter().map(of).reduce(|sum, part| sum + part);
            (dense.mixture(x, weights), more)
        });
        let run = Run {
            loss_scale: Some(LOSS_SCALE),
            ..Run::default()
        };
        let mut found = run.on(*sizes, &config);
        let what = format!("{losses:?}, {score:?} on {sizes:?}");
        let logits = dense.logits(leaf(input().reshape([BATCH * SEQ, HIDDEN])));
        let mut sorted = losses.to_vec();
        sorted.sort_by_key(|loss| loss.kind);
        let means: Vec<f64> = sorted
            .iter()
            .map(|loss| {
                let sigmoids = score == ScoreFunction::Sigmoid;
                let sum = reference(loss.kind, &logits, sigmoids, BATCH / data);
                loss.coefficient * values(sum)[0] / (BATCH * SEQ) as f64
            })
            .collect();
        assert_near(&format!("{what}: losses"), &found.losses, &means, 1e-12);
        found.losses.clear();
        found.assert_near(&expected, &what);
    }
}

const LAYOUTS: [Sizes; 4] = [ONE, [1, 2, 1, 1], [2, 2, 2, 1], [2, 2, 1, 2]];

#[test]
fn each_loss_adds_its_gradient() {
    use RouterLossKind::*;
    for kind in [Balance, SequenceBalance, GlobalBalance, ZLoss] {
        check_losses(&[loss(kind, 0.3)], ScoreFunction::Softmax, &LAYOUTS);
    }
    check_losses(
        &[loss(Balance, 0.3)],
        ScoreFunction::Sigmoid,
        &LAYOUTS[1..3],
    );
}

#[test]
fn several_losses_at_once() {
    use RouterLossKind::*;
    let losses = [
        loss(ZLoss, 0.01),
        loss(Balance, 0.2),
        loss(SequenceBalance, 0.1),
    ];
    check_losses(&losses, ScoreFunction::PreSoftmax, &LAYOUTS[1..3]);
}

fn run_of(kind: RouterLossKind, sizes: Sizes, run: &Run) -> Outcome {
    run.on(sizes, &config(router()).with_losses(vec![loss(kind, 1.0)]))
}

#[test]
fn the_global_loss_is_that_of_a_micro_batch_if_all_ranks_read_the_same() {
    let run = Run {
        loss_scale: Some(1.0),
        same_samples: true,
        factor: Some(0.0),
        ..Run::default()
    };
    let sizes = [2, 2, 2, 2];
    let micro = run_of(RouterLossKind::Balance, sizes, &run);
    let global = run_of(RouterLossKind::GlobalBalance, sizes, &run);
    global.assert_near(&micro, "global");
    assert!(micro.gradient("router.gate").iter().any(|x| x.abs() > 1e-3));
}

#[test]
fn an_even_load_has_the_coefficient_as_its_loss() {
    // All experts are chosen equally often, with equal scores.
    let choices: Vec<i64> = (0..2 * BATCH * SEQ).map(|i| (i % EXPERTS) as i64).collect();
    let logits = Tensor::<2>::zeros([BATCH * SEQ, EXPERTS], &Device::flex().autodiff());
    let logits = logits.cast(DType::F64).require_grad();
    let routing = Routing {
        weights: logits.clone().narrow(1, 0, 2),
        logits,
        indices: ints(&choices, [BATCH * SEQ, 2]),
        rows_per_expert: None,
    };
    use RouterLossKind::*;
    let kinds = [Balance, SequenceBalance, GlobalBalance].map(|kind| loss(kind, 0.7));
    let ctx = ParallelContext::single();
    let layer = super::super::losses::LayerLosses::new(&kinds, &router(), "moe", &ctx).unwrap();
    let step = RouterStep::new(1.0.into()).of_micro_batch(10);
    let _ = layer.sum(
        &routing,
        &RankTokens::all([BATCH, SEQ], 1),
        (&step, RouterPass::Recorded),
    );
    for (key, sum) in step.losses() {
        assert_near(&format!("{key:?}"), &values(sum), &[7.0], 1e-12);
    }
}

#[test]
fn recomputation_attaches_and_reports_them_once() {
    let run = |recompute| Run {
        loss_scale: Some(1.0),
        recompute,
        ..Run::default()
    };
    for kind in [RouterLossKind::Balance, RouterLossKind::GlobalBalance] {
        let sizes = [2, 2, 2, 1];
        let expected = run_of(kind, sizes, &run(false));
        let found = run_of(kind, sizes, &run(true));
        assert_eq!(found.parameters, expected.parameters, "{kind:?}");
        assert_eq!(found.losses, expected.losses, "{kind:?}");
        assert_eq!(found.load, expected.load, "{kind:?}");
    }
}

#[test]
fn the_global_loss_takes_the_mean_load_of_the_step_so_far() {
    let ctx = ParallelContext::single();
    let global = [loss(RouterLossKind::GlobalBalance, 1.0)];
    let layer = super::super::losses::LayerLosses::new(&global, &router(), "moe", &ctx).unwrap();
    let step = RouterStep::new(1.0.into());
    // Two micro-batches of one token: the first chooses experts 0 and 1, the second chooses experts 2 and 3.
    let routing = |choices: [i64; 2]| {
        let logits = Tensor::<2>::from_floats([[2.0, 1.0, 0.0, -1.0]], &Device::flex().autodiff());
        let logits = logits.cast(DType::F64).require_grad();
        Routing {
            weights: logits.clone().narrow(1, 0, 2),
            logits,
            indices: ints(&choices, [1, 2]),
            rows_per_expert: None,
        }
    };
    let mut before = 0.0;
    for (choices, expected) in [([0, 1], 2.0 * (0.6439143 + 0.2368828)), ([2, 3], 1.0)] {
        let step_of = step.of_micro_batch(1);
        let _ = layer.sum(
            &routing(choices),
            &RankTokens::all([1, 1], 1),
            (&step_of, RouterPass::Recorded),
        );
        let sum = values(step.losses().into_values().next().unwrap())[0];
        assert!((sum - before - expected).abs() < 1e-6, "{sum}");
        before = sum;
    }
}

#[test]
fn golden_losses() {
    let logits = [
        2.0, 1.0, 0.0, -1.0, 1.0, 2.0, 0.0, 0.5, 0.0, 3.0, 1.0, -2.0, 1.5, 1.0, 0.5, 0.0,
    ];
    let run = |kind, score| {
        let data = TensorData::new(logits.to_vec(), [4, 4]);
        let z =
            Tensor::<2>::from_data(data, (&Device::flex().autodiff(), DType::F64)).require_grad();
        let routing = Routing {
            logits: z.clone(),
            indices: ints(&[0, 1, 1, 0, 1, 2, 0, 1], [4, 2]),
            weights: z.clone().narrow(1, 0, 2),
            rows_per_expert: None,
        };
        let ctx = ParallelContext::single();
        let (config, kinds) = (router().with_score(score), [loss(kind, 1.0)]);
        let layer = super::super::losses::LayerLosses::new(&kinds, &config, "moe", &ctx).unwrap();
        let step = RouterStep::new(1.0.into()).of_micro_batch(1);
        let loss = layer.sum(
            &routing,
            &RankTokens::all([1, 4], 1),
            (&step, RouterPass::Recorded),
        );
        let y = super::super::losses::attach(Tensor::from_inner(input()), loss.unwrap(), &step);
        let gradients = y.sum().backward();
        let value = values(step.losses().into_values().next().unwrap())[0];
        (value, values(z.grad(&gradients).unwrap())[..4].to_vec())
    };
    for (kind, score, value, gradient) in [
        (
            RouterLossKind::Balance,
            ScoreFunction::Softmax,
            1.529086132,
            Some([0.0027030, 0.0306047, -0.0214203, -0.0118874]),
        ),
        (
            RouterLossKind::Balance,
            ScoreFunction::Sigmoid,
            1.211388432,
            None,
        ),
        (
            RouterLossKind::ZLoss,
            ScoreFunction::Softmax,
            6.938122580,
            Some([0.7856365, 0.2890195, 0.1063243, 0.0391145]),
        ),
    ] {
        let (found, found_gradient) = run(kind, score);
        assert!((found - value).abs() < 1e-9, "{kind:?}: {found}");
        for (found, expected) in found_gradient.iter().zip(gradient.into_iter().flatten()) {
            assert!((found - expected).abs() < 6e-8, "{kind:?}: {found}");
        }
    }
}

#[test]
fn invalid_losses_are_refused() {
    let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let refused = |losses: &[RouterLoss]| {
        let config = config(router()).with_losses(losses.to_vec());
        config.init(&builder.child("moe")).unwrap_err().to_string()
    };
    let balance = loss(RouterLossKind::Balance, 0.1);
    assert_snapshot!(
        refused(&[balance, balance]),
        @"moe: duplicate Balance: expected each loss once"
    );
    assert_snapshot!(
        refused(&[loss(RouterLossKind::ZLoss, f64::INFINITY)]),
        @"moe: invalid coefficient = inf of ZLoss: expected a finite number"
    );
}
