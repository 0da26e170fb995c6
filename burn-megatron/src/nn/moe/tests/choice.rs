//! Tests expert selection by methods other than scores, and jitter.

use insta::assert_snapshot;

use super::*;
use crate::nn::DropoutPosition;
use crate::nn::moe::choice::{TokenPosition, sinkhorn};

const LAYOUTS: [Sizes; 3] = [ONE, [2, 2, 2, 1], [1, 2, 1, 2]];

#[test]
fn golden_sinkhorn() {
    let logits = [
        2.0, 1.0, 0.0, -1.0, 1.0, 2.0, 0.0, 0.5, 0.0, 3.0, 1.0, -2.0, 1.5, 1.0, 0.5, 0.0,
    ];
    let expected = [
        0.1334751, 0.0289096, 0.0509749, 0.0366428, 0.0358014, 0.0572968, 0.0371664, 0.1197360,
        0.0117686, 0.1391699, 0.0902746, 0.0087823, 0.0689549, 0.0246237, 0.0715840, 0.0848389,
    ];
    for (found, expected) in sinkhorn(&logits, 4).iter().zip(expected) {
        assert!((found - expected).abs() < 2e-7, "{found} is not {expected}");
    }
    // The exponentials of these logits overflow.
    let large: Vec<f64> = logits.iter().map(|z| z + 800.0).collect();
    for (found, expected) in sinkhorn(&large, 4).iter().zip(expected) {
        assert!((found - expected).abs() < 2e-7, "{found} is not {expected}");
    }
    assert_eq!(sinkhorn(&[f64::NAN; 4], 2).len(), 4);
}

/// Returns the choices of the batches of the data ranks, `rows` rows each, by an assignment of the tokens of each
/// batch.
fn assigned(dense: &Dense, rows: usize) -> Vec<i64> {
    assigned_of(dense, rows, [SEQ; BATCH])
}

/// Returns the choices for the first tokens of each row. The other tokens are padding and have no choice.
pub fn assigned_of(dense: &Dense, rows: usize, lengths: [usize; BATCH]) -> Vec<i64> {
    let x = input().reshape([BATCH * SEQ, HIDDEN]);
    let logits = values(dense.logits(Tensor::from_inner(x)).inner());
    let token_logits: Vec<_> = logits.chunks(EXPERTS).collect();
    let mut choices = vec![-1; 2 * BATCH * SEQ];
    for batch in 0..BATCH / rows {
        let rows = batch * rows..(batch + 1) * rows;
        let real: Vec<_> = rows
            .flat_map(|row| row * SEQ..row * SEQ + lengths[row])
            .collect();
        let logits: Vec<f64> = real
            .iter()
            .flat_map(|at| token_logits[*at])
            .copied()
            .collect();
        let assignment = sinkhorn(&logits, EXPERTS);
        for (token, assigned) in real.into_iter().zip(assignment.chunks(EXPERTS)) {
            let chosen = dense::choose(assigned, 2).into_iter();
            let own = choices[2 * token..].iter_mut();
            own.zip(chosen).for_each(|(to, expert)| *to = expert as i64);
        }
    }
    choices
}

#[test]
fn sinkhorn_assigns_the_tokens_of_a_micro_batch() {
    let config = config(
        router()
            .with_choice(RouterChoice::Sinkhorn)
            .with_score(ScoreFunction::PreSoftmax),
    );
    let dense = Dense::new(&config);
    for sizes in LAYOUTS {
        let data = sizes[1..].iter().product::<usize>() / sizes[0];
        let choices = assigned(&dense, BATCH / data);
        let found = Run::default().on(sizes, &config);
        found.assert_near(&dense.run(Some(&choices)), &format!("{sizes:?}"));
    }
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let evaluated = config
        .router
        .init(&builder)
        .unwrap()
        .forward(input(), None, &whole());
    let by_scores = config.router.clone().with_choice(RouterChoice::Scores);
    let by_scores = by_scores
        .init(&builder)
        .unwrap()
        .forward(input(), None, &whole());
    evaluated
        .indices
        .into_data()
        .assert_eq(&by_scores.indices.into_data(), true);
}

#[test]
fn experts_in_turn_are_equally_loaded() {
    let config = config(router().with_choice(RouterChoice::RoundRobin));
    let choices: Vec<i64> = (0..2 * BATCH * SEQ)
        .map(|pair| (pair % EXPERTS) as i64)
        .collect();
    let expected = Dense::new(&config).run(Some(&choices));
    for sizes in LAYOUTS {
        let found = Run::default().on(sizes, &config);
        found.assert_near(&expected, &format!("{sizes:?}"));
    }
}

#[test]
fn only_the_router_sees_the_jitter() {
    let config = config(router().with_jitter(0.3));
    let key = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64)
        .child("moe")
        .child("router")
        .stream_key();
    let position = DropoutPosition::default();
    position.set(STEP, 0);
    let place = AxisRank { index: 0, size: 1 };
    let factors = TokenPosition { position, place }.jitter([BATCH, SEQ, HIDDEN], 0.3, key);
    assert!(factors.iter().all(|factor| (0.7..1.3).contains(factor)));
    let mean = factors.iter().sum::<f32>() / factors.len() as f32;
    // The standard error of the mean of 120 random numbers is 0.016.
    assert!((mean - 1.0).abs() < 0.08, "{mean}");
    let factors = TensorData::new(factors, [BATCH * SEQ, HIDDEN]);
    let factors = Tensor::<2>::from_data(factors, (&Device::flex(), DType::F64));
    let dense = Dense::new(&config);
    let expected = dense.run_with(|x| {
        let weights = dense.router_weights(x.clone() * Tensor::from_inner(factors.clone()));
        (dense.mixture(x, weights), None)
    });
    for sizes in LAYOUTS {
        let found = Run::default().on(sizes, &config);
        found.assert_near(&expected, &format!("{sizes:?}"));
        let recomputed = Run {
            recompute: true,
            ..Run::default()
        };
        assert_eq!(recomputed.on(sizes, &config).parameters, found.parameters);
    }
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let refused =
        |config: MoeMlpConfig| config.init(&builder.child("moe")).unwrap_err().to_string();
    assert_snapshot!(
        refused(config(router().with_jitter(1.0))),
        @"moe: invalid jitter = 1: expected at least 0 and below 1"
    );
    assert_snapshot!(
        refused(config(router().with_bias_update_rate(Some(-1e-3)))),
        @"moe: invalid bias_update_rate = -0.001: expected a finite number of at least 0"
    );
    let sinkhorn = router().with_choice(RouterChoice::Sinkhorn);
    assert_snapshot!(
        refused(config(sinkhorn.clone().with_bias_update_rate(Some(1e-3)))),
        @"moe: groups and an expert bias conflict with Sinkhorn choices: expected choices by scores"
    );
    let balance = RouterLoss {
        kind: RouterLossKind::Balance,
        coefficient: 0.1,
    };
    assert_snapshot!(
        refused(config(sinkhorn).with_losses(vec![balance])),
        @"moe: a Balance loss conflicts with Sinkhorn choices, which are already balanced: expected no such loss, or \
          choices by scores"
    );
}
