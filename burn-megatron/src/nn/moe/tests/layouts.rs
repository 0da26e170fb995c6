//! Tests that every layout computes the result of one rank.

use insta::assert_snapshot;

use super::*;
use crate::nn::Init;

const LAYOUTS: [Sizes; 8] = [
    ONE,
    [1, 2, 1, 1],
    [1, 4, 1, 1],
    [2, 2, 1, 1],
    [2, 2, 2, 1],
    [2, 1, 2, 1],
    [1, 2, 1, 2],
    [2, 4, 1, 2],
];
/// Layouts in which every axis splits something, and experts have replicas.
const FEW: [Sizes; 3] = [ONE, [2, 2, 2, 1], [1, 2, 1, 2]];

#[test]
fn tokens_reach_their_experts_in_every_layout() {
    check(&config(router()), &LAYOUTS, "all-to-all");
}

#[test]
fn every_rank_gathers_the_tokens_of_all() {
    let config = config(router()).with_dispatcher(DispatcherKind::AllGather);
    check(&config, &LAYOUTS, "all-gather");
}

#[test]
fn biases_and_shared_experts() {
    let shared = SharedExpertsConfig::new(4).with_gate(true);
    for dispatcher in DISPATCHERS {
        let config = config(router().with_bias(true))
            .with_bias(true)
            .with_shared(Some(shared.clone()))
            .with_dispatcher(dispatcher);
        check(&config, &FEW, &format!("biases, {dispatcher:?}"));
    }
    let mut config = config(router()).with_shared(Some(shared.with_gate(false)));
    config.activation = Activation::SquaredRelu;
    check(&config, &FEW[..2], "no gates");
}

#[test]
fn every_score_function() {
    use ScoreFunction::*;
    for score in [PreSoftmax, Sigmoid, SqrtSoftplus] {
        let config = config(router().with_score(score).with_factor(2.5));
        check(&config, &FEW[..2], &format!("{score:?}"));
    }
}

#[test]
fn gradients_of_experts_have_the_same_bits_in_every_split_over_ranks() {
    let run = |expert| Run::default().on([1, expert, 1, 1], &config(router()));
    let one = run(1);
    for expert in [2, 4] {
        let many = run(expert);
        for path in ["experts.up", "experts.down"] {
            assert_eq!(
                many.gradient(path),
                one.gradient(path),
                "{path}, expert {expert}"
            );
        }
        assert_eq!(many.output, one.output, "expert {expert}");
    }
}

#[test]
fn a_recomputed_layer_has_the_gradients_of_a_recorded_one() {
    let recomputed = Run {
        recompute: true,
        ..Run::default()
    };
    let sizes = [2, 2, 2, 1];
    let (found, expected) = (
        recomputed.on(sizes, &config(router())),
        Run::default().on(sizes, &config(router())),
    );
    assert_eq!(found.parameters, expected.parameters);
    assert_eq!(found.input_gradient, expected.input_gradient);
}

#[test]
fn initial_values_do_not_depend_on_the_layout() {
    let values_of = |sizes: Sizes| {
        let rank = |rank: crate::comm::Rank| {
            let ctx = ParallelContext::from_world(&layout(sizes), rank.communicator())?;
            let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, DType::F64);
            let moe = config(router())
                .with_init(Init::Normal(1.0))
                .init(&builder.child("moe"))?;
            let model = builder.finish(Wrapper { moe })?;
            let up = values(model.module.moe.experts.up.val());
            Ok::<_, AnyError>((ctx.mesh_rank().clone(), model.table, up))
        };
        let all = World::threads(sizes[1..].iter().product())
            .unwrap()
            .run(rank)
            .unwrap();
        let mut entries = all[0].1.entries().iter();
        let entry = entries
            .find(|entry| entry.path.ends_with("experts.up"))
            .unwrap();
        let parts = all.iter().map(|(rank, _, up)| (rank.clone(), &up[..]));
        entry.assemble(parts)
    };
    let one = values_of(ONE);
    assert_eq!(values_of([2, 2, 2, 1]), one);
    assert_eq!(values_of([1, 4, 1, 1]), one);
}

/// Returns the error of building a layer.
fn refused(sizes: Sizes, config: &MoeMlpConfig) -> String {
    let rank = |rank: crate::comm::Rank| {
        let ctx = ParallelContext::from_world(&layout(sizes), rank.communicator())?;
        let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, DType::F64);
        let error = config.init(&builder.child("moe")).unwrap_err();
        Ok::<_, AnyError>(error.to_string())
    };
    let ranks = sizes[1..].iter().product();
    World::threads(ranks).unwrap().run(rank).unwrap().remove(0)
}

#[test]
fn a_layout_that_does_not_fit_says_what_would() {
    let three = config(RouterConfig::new(HIDDEN, 3, 2));
    assert_snapshot!(
        refused([1, 2, 1, 1], &three),
        @"experts 3 cannot be split over expert = 2: expected expert = 1, 3"
    );
    let mut odd = config(router());
    odd.width = 3;
    assert_snapshot!(
        refused([1, 1, 2, 1], &odd),
        @"expert width 3 cannot be split over expert-tensor = 2: expected expert-tensor = 1, 3"
    );
    assert_snapshot!(
        refused(ONE, &config(RouterConfig::new(HIDDEN, 4, 5))),
        @"moe: invalid experts_per_token = 5: expected 1 to the 4 experts"
    );
    let groups = ExpertGroups {
        groups: 2,
        chosen: 1,
        score: GroupScore::Max,
    };
    let limited = RouterConfig::new(HIDDEN, 4, 3).with_groups(Some(groups));
    let message = refused(ONE, &config(limited));
    let wanted = "top_k = 3 with 1 chosen groups of 2 experts: expected at most 2";
    assert!(message.ends_with(wanted), "{message}");
    assert_snapshot!(
        refused([1, 1, 2, 1], &config(RouterConfig::new(HIDDEN, 1026, 2))),
        @"moe: 1026 experts with expert_tensor = 2: expected a product of at most 2048"
    );
}

/// Tensor ranks without sequence parallelism have the same tokens.
#[test]
fn tensor_ranks_with_the_same_tokens_route_a_part_each() {
    let shared = SharedExpertsConfig::new(8).with_gate(true);
    let config = config(router()).with_shared(Some(shared));
    let dense = Dense::new(&config);
    let choices: Vec<i64> = (0..2 * BATCH * SEQ).map(|pair| (pair % 3) as i64).collect();
    for given in [None, Some(choices)] {
        let expected = dense.run(given.as_deref());
        for sizes in [[2, 1, 2, 1], [2, 2, 1, 1], [2, 2, 2, 1], [2, 4, 1, 1]] {
            for recompute in [false, true] {
                let run = Run {
                    choices: given.clone(),
                    replicated: true,
                    recompute,
                    ..Run::default()
                };
                run.on(sizes, &config)
                    .assert_near(&expected, &format!("{sizes:?}"));
            }
        }
    }
}

/// Tests batches as in generation, with one token or an odd number of tokens.
#[test]
fn tensor_ranks_share_any_number_of_tokens_outside_of_autodiff() {
    let config = config(router());
    let outputs = |sizes: Sizes| {
        let config = config.clone();
        let rank = move |rank: crate::comm::Rank| {
            let parallel = layout(sizes).with_sequence_parallel(false);
            let ctx = ParallelContext::from_world(&parallel, rank.communicator())?;
            let builder = ModelBuilder::with(&ctx, &Device::flex(), 7, DType::F64);
            let moe = config.init(&builder.child("moe"))?;
            let outputs = [[1, 1], [3, 1], [1, 5], [2, 3]].map(|[batch, seq]| {
                let x = input().narrow(0, 0, batch).narrow(1, 0, seq);
                values(moe.forward(x))
            });
            Ok::<_, AnyError>(outputs.concat())
        };
        let ranks = sizes[1..].iter().product();
        World::threads(ranks).unwrap().run(rank).unwrap()
    };
    let expected = outputs(ONE).remove(0);
    for sizes in [[2, 1, 2, 1], [4, 2, 2, 1]] {
        for found in outputs(sizes) {
            assert_near(&format!("{sizes:?}"), &found, &expected, 1e-12);
        }
    }
}
