use std::collections::BTreeMap;

use burn_megatron::model::ModelConfig;
use burn_megatron::nn::moe::{RouterLoss, RouterLossKind};
use burn_megatron_verify::{
    Layout, ModelSubject, Observation, VerifyOptions, observe_layout, verify,
};
use insta::assert_snapshot;

use super::*;

fn small() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 19,
        context: 8,
        hidden: 16,
        layers: 4,
        mlp_width: Some(12),
        init_std: 0.2,
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            ..MoeConfig::default()
        }),
        ..TransformerConfig::mixtral()
    }
}

fn with(change: impl FnOnce(&mut MoeConfig)) -> TransformerConfig {
    let mut config = small();
    change(config.moe.as_mut().unwrap());
    config
}

fn assert_passes(config: TransformerConfig, layouts: &[&str]) {
    let layouts: Vec<Layout> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    let options = VerifyOptions {
        same_micro_batches: true,
        ..VerifyOptions::default()
    };
    let report = verify(&ModelSubject::new(config), &layouts, &options).unwrap();
    assert!(report.passes(), "\n{report}");
}

#[test]
fn experts_on_several_ranks_compute_what_one_rank_does() {
    let layouts = [
        "tp1-ep2-dp2-mb2",
        "tp1-ep4-dp4-mb1",
        "tp2-sp-ep2-etp1-dp2-mb2",
        "tp2-sp-ep2-dp2-mb2",
        "tp2-ep2-etp1-dp2-mb2",
        "tp1-ep2-pp2-dp2-mb2/1f1b",
        "tp1-ep2-dp4-mb1-z1",
        "tp1-ep2-dp4-mb1-z3",
    ];
    assert_passes(small(), &layouts);
}

#[test]
fn losses_shared_experts_and_dense_blocks() {
    use RouterLossKind::*;
    let kinds = [Balance, SequenceBalance, GlobalBalance, ZLoss];
    let config = with(|moe| {
        moe.first_dense = 1;
        moe.every = 2;
        moe.shared_width = Some(8);
        moe.shared_gate = true;
        moe.score = ScoreFunction::Sigmoid;
        moe.factor = 2.5;
        let loss = |kind| RouterLoss {
            kind,
            coefficient: 0.05,
        };
        moe.losses = kinds.map(loss).into();
    });
    let layouts = ["tp2-sp-ep2-etp1-dp1-mb8", "tp2-sp-ep2-etp1-dp1-mb2"];
    assert_passes(config.clone(), &layouts);
    // With data parallelism, the counts cover micro-batches that differ from the micro-batches on one rank.
    let local = with(|moe| {
        *moe = config.moe.clone().unwrap();
        moe.losses.retain(|loss| loss.kind != GlobalBalance);
    });
    assert_passes(local, &["tp1-ep2-dp2-mb2", "tp1-ep2-pp2-dp2-mb2/zb-h1"]);
}

/// The expert biases are bit-equal on all data-parallel ranks in every layout, because they depend only on integers.
#[test]
fn twenty_steps_move_the_expert_biases_alike() {
    let config = with(|moe| {
        moe.score = ScoreFunction::Sigmoid;
        moe.bias_update_rate = Some(0.02);
    });
    let options = VerifyOptions {
        steps: 20,
        ..VerifyOptions::default()
    };
    let subject = ModelSubject::new(config);
    let biases = |layout: &str| {
        let observed = observe_layout(&subject, &layout.parse().unwrap(), &options).unwrap();
        let of_rank = |rank: Observation| {
            let all = rank.paths.into_iter().zip(rank.final_weights);
            all.filter(|(path, _)| path.ends_with("expert_bias"))
        };
        let all: BTreeMap<_, _> = observed.into_iter().flat_map(of_rank).collect();
        assert_eq!(all.len(), 4);
        all
    };
    let expected = biases("tp1-mb2");
    let far = |bias: &Vec<f64>| bias.iter().any(|bias| bias.abs() > 0.03);
    assert!(expected.values().any(far), "{expected:?}");
    for layout in [
        "tp1-dp4-mb1",
        "tp1-ep4-dp4-mb2",
        "tp2-sp-ep2-etp1-pp2-dp1-mb4/1f1b",
    ] {
        assert_eq!(biases(layout), expected, "{layout}");
    }
}

#[test]
fn blocks_with_experts() {
    let of = |change: fn(&mut MoeConfig)| {
        let moe = with(change).moe.unwrap();
        (0..6)
            .filter(|number| moe.is_in(*number))
            .collect::<Vec<_>>()
    };
    assert_eq!(of(|_| ()), [0, 1, 2, 3, 4, 5]);
    assert_eq!(of(|moe| moe.every = 2), [0, 2, 4]);
    assert_eq!(of(|moe| moe.first_dense = 3), [3, 4, 5]);
}

#[test]
fn a_layout_that_does_not_fit_says_what_would() {
    let refused = |config: TransformerConfig, layout: ParallelConfig| {
        config.check_layout(&layout).unwrap_err().to_string()
    };
    let layout = ParallelConfig::new;
    assert_snapshot!(
        refused(small(), layout().with_expert(3)),
        @"experts 4 cannot be split over expert = 3: expected expert = 1, 2, 4"
    );
    let odd = TransformerConfig {
        context: 9,
        ..small()
    };
    assert_snapshot!(
        refused(odd, layout().with_tensor(2)),
        @"context 9 cannot be split over tensor = 2: expected tensor = 1, 3, 9"
    );
    let dense = "model: invalid expert or expert_tensor: expected expert = 1 and no expert_tensor, because this model \
                 has no experts";
    assert_eq!(
        refused(TransformerConfig::llama(), layout().with_expert(2)),
        dense
    );
    assert_snapshot!(
        refused(with(|moe| moe.experts = 0), layout()),
        @"model: invalid moe.experts = 0: expected at least 1"
    );
}
