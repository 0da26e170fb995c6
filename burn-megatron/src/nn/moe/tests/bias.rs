//! Tests the expert bias and the expert load, from which the bias is updated.

use super::*;
use crate::nn::moe::routers::reduced_reports;

fn bias(values: &[f64]) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

#[test]
fn it_moves_by_the_sign_of_what_misses_to_the_mean() {
    let expert_bias = ExpertBias::new(4, 0.5, &Device::flex());
    let of = |value: Tensor<1>| values(value.cast(DType::F64));
    expert_bias.update(bias(&[3.0, 4.0, 1.0, 0.0]), bias(&[1.0]));
    assert_eq!(of(expert_bias.value()), [-0.5, -0.5, 0.5, 0.5]);
    expert_bias.update(bias(&[3.0, 4.0, 1.0, 0.0]), bias(&[0.0]));
    assert_eq!(of(expert_bias.value()), [-0.5, -0.5, 0.5, 0.5]);
    expert_bias.update(bias(&[2.0, 5.0, 2.0, -1.0]), bias(&[1.0]));
    assert_eq!(of(expert_bias.value()), [-0.5, -1.0, 0.5, 1.0]);
    assert_eq!(expert_bias.value().dtype(), DType::F32);
}

#[test]
fn it_changes_the_choice_and_no_weight() {
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let config = router()
        .with_score(ScoreFunction::Sigmoid)
        .with_bias_update_rate(Some(0.0));
    let router = config.init(&builder).unwrap();
    let before = router.forward(input(), None, &whole());
    // Experts 3 and 2 have the largest scores.
    router
        .expert_bias()
        .unwrap()
        .set(bias(&[0.0, 0.0, 5.0, 10.0]));
    let after = router.forward(input(), None, &whole());
    assert_eq!(read(after.indices.clone()), [3, 2].repeat(BATCH * SEQ));
    let replayed = router.forward(input(), Some(after.indices), &whole());
    after
        .weights
        .into_data()
        .assert_eq(&replayed.weights.into_data(), true);
    before
        .logits
        .into_data()
        .assert_eq(&after.logits.into_data(), true);
}

/// A training step reports the load of the complete batch, even for recomputed layers, and without dropped tokens.
#[test]
fn the_load_is_that_of_all_ranks() {
    let tight = Capacity {
        factor: 0.5,
        keep: KeepPolicy::First,
        pad: false,
    };
    let pairs = (2 * BATCH * SEQ) as f64;
    for sizes in [ONE, [1, 4, 1, 1], [2, 2, 2, 1]] {
        for recompute in [false, true] {
            let run = Run {
                loss_scale: Some(1.0),
                recompute,
                ..Run::default()
            };
            let found = run.on(sizes, &config(router()));
            let expected = Run {
                recompute: false,
                ..run.clone()
            }
            .on(ONE, &config(router()));
            assert_eq!(found.load, expected.load, "{sizes:?}");
            assert_eq!(found.load[..EXPERTS].iter().sum::<f64>(), pairs);
            assert_eq!(found.load[EXPERTS], pairs);
            let dropping = run.on(sizes, &config(router()).with_capacity(Some(tight)));
            assert!(dropping.load[..EXPERTS].iter().sum::<f64>() <= 0.5 * pairs);
            assert_eq!(dropping.load[EXPERTS], pairs);
        }
    }
}

#[test]
fn an_evaluation_counts_nothing() {
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let moe = config(router()).init(&builder).unwrap();
    let step = RouterStep::new(1.0.into());
    let with = MoeForward {
        choices: None,
        tokens: None,
        step: Some(&step),
        nodes: None,
    };
    moe.forward_with(input(), with);
    assert!(step.loads().is_empty());
}

/// Without a trainer, [`Routers::end_step`] ends a step.
#[test]
fn a_step_moves_the_biases_of_all_ranks_alike() {
    let config = config(
        router()
            .with_score(ScoreFunction::Sigmoid)
            .with_bias_update_rate(Some(0.25)),
    );
    let biases = |sizes: Sizes| {
        let config = config.clone();
        let ranks = sizes[1..].iter().product();
        let rank = move |rank: crate::comm::Rank| {
            let ctx = ParallelContext::from_world(&layout(sizes), rank.communicator())?;
            let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, DType::F64);
            let module = config.init(&builder.child("moe"))?;
            let model = builder.finish(Wrapper { moe: module })?;
            let x = Tensor::<3>::from_inner(part(input(), ctx.mesh_rank(), &Run::default()))
                .require_grad();
            // The second taken step undoes the first one.
            for taken in [true, false, true, true] {
                let step = RouterStep::new(1.0.into());
                let with = MoeForward {
                    choices: None,
                    tokens: None,
                    step: Some(&step),
                    nodes: None,
                };
                model.module.moe.forward_with(x.clone(), with);
                model.routers.end_step(&step, &ctx, taken);
                let layers = model.routers.layers();
                let all = reduced_reports(&step, &layers, &Device::flex(), ctx.stage());
                assert_eq!(values(all)[EXPERTS], (2 * BATCH * SEQ) as f64);
            }
            let biases = model.routers.expert_biases();
            assert_eq!(biases[0].0, "moe.router.expert_bias");
            Ok::<_, AnyError>(values(biases[0].1.value().cast(DType::F64)))
        };
        World::threads(ranks).unwrap().run(rank).unwrap()
    };
    let expected = biases(ONE).remove(0);
    assert!(expected.iter().any(|bias| *bias != 0.0));
    for sizes in [[1, 4, 1, 1], [2, 2, 2, 1], [1, 1, 1, 2]] {
        for found in biases(sizes) {
            assert_eq!(found, expected, "{sizes:?}");
        }
    }
}
