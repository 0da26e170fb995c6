//! Tests that every optimizer computes the same results in every layout as on one rank, and resumes in every layout.

use burn_megatron::checkpoint::{Checkpoint, TensorSlice, TensorSource};
use burn_megatron::data_parallel::{DataParallelConfig, Precision};
use burn_megatron::optim::{
    AdagradConfig, AdamConfig, AdanConfig, EmaConfig, GroupOptimizer, LionConfig, MuonConfig,
    MuonScale, OptimizerConfig, ParameterGroup, RmsPropConfig, SgdConfig,
};
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::tolerance::{CLOSE, assert_near};
use burn_megatron_tests::{small_gpt, small_gpt_oss, small_llama, small_olmoe, without_dropout};
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::{Layout, VerifyOptions, verify};

use super::resume::run::{Case, Folder, assert_same};

/// Returns each optimizer with the settings that give the largest state.
fn element_wise() -> Vec<OptimizerConfig> {
    vec![
        OptimizerConfig::Sgd(SgdConfig {
            dampening: 0.1,
            nesterov: true,
            weight_decay: 0.1,
            ..SgdConfig::default()
        }),
        OptimizerConfig::Adam(AdamConfig {
            amsgrad: true,
            epsilon: 1e-4,
            weight_decay: 0.1,
            ..AdamConfig::default()
        }),
        OptimizerConfig::Adan(AdanConfig {
            epsilon: 1e-4,
            ..AdanConfig::default()
        }),
        OptimizerConfig::Lion(LionConfig::default()),
        OptimizerConfig::RmsProp(RmsPropConfig {
            momentum: 0.9,
            centered: true,
            epsilon: 1e-4,
            ..RmsPropConfig::default()
        }),
        OptimizerConfig::Adagrad(AdagradConfig {
            lr_decay: 0.1,
            epsilon: 1e-4,
            ..AdagradConfig::default()
        }),
    ]
}

fn muon() -> OptimizerConfig {
    OptimizerConfig::Muon(MuonConfig::default())
}

fn assert_pass(subject: &TransformerSubject, layouts: &[Layout], optimizer: OptimizerConfig) {
    let name = optimizer.name();
    let options = VerifyOptions {
        train: TrainConfig {
            optimizer,
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    let report = verify(subject, layouts, &options).unwrap();
    println!("{name}\n{report}");
    assert!(report.passes(), "{name}\n{report}");
}

fn layouts(names: &[&str]) -> Vec<Layout> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

#[test]
fn element_wise_rules_do_not_see_the_layout() {
    let layouts = layouts(&[
        "tp2-sp-dp2-mb1-z1",
        "dp4-mb1-z2-hsdp2",
        "tp2-pp2-dp2-mb1-z3/1f1b",
    ]);
    for optimizer in element_wise() {
        assert_pass(&without_dropout(small_llama()), &layouts, optimizer);
    }
}

#[test]
fn muon_does_not_see_the_layout() {
    assert_pass(&small_llama(), &Layout::standard(), muon());
    // A model with biases, learned positions, and a tied embedding.
    let original = OptimizerConfig::Muon(MuonConfig {
        scale: MuonScale::Original,
        nesterov: false,
        groups: vec![ParameterGroup {
            pattern: "blocks.*.mlp.up.weight".into(),
            optimizer: Some(GroupOptimizer::AdamW),
            learning_rate: Some(0.5),
            weight_decay: Some(0.5),
        }],
        ..MuonConfig::default()
    });
    assert_pass(&small_gpt(), &Layout::standard(), original);
}

/// Tests fewer groups of keys than ranks, shards that begin within a row, and ranks without a matrix.
#[test]
fn muon_on_uneven_shards() {
    let layouts = layouts(&[
        "tp4-dp1-mb4",
        "dp3-mb1-z1",
        "dp3-mb2-z3",
        "tp4-dp3-mb1-z2",
        "dp4-mb3-z3-hsdp2",
    ]);
    let mut subject = without_dropout(small_llama());
    subject.config.layers = 1;
    subject.config.groups = Some(1);
    subject.samples = 12;
    assert_pass(&subject, &layouts, muon());
}

/// Each expert is a matrix. Expert ranks, and tensor ranks within them, have parts of the matrix.
#[test]
fn muon_of_experts_does_not_see_the_layout() {
    let layouts = layouts(&["tp1-ep4-dp4-mb1-z1", "tp2-sp-ep2-etp2-dp2-mb2-z2"]);
    assert_pass(&without_dropout(small_olmoe()), &layouts, muon());
}

#[test]
fn a_run_goes_on_with_the_state_of_its_optimizer() {
    let folder = Folder::new();
    for optimizer in element_wise().into_iter().chain([muon()]) {
        let name = optimizer.name();
        let mut case = Case::llama("dp3-mb2-z3");
        case.train.optimizer = optimizer;
        // The average of the weights is passed on too.
        case.train.ema = Some(EmaConfig {
            decay: 0.5,
            evaluate: false,
        });
        // In f64, rounding of the state would be visible.
        case.train.data_parallel.precision = Precision::F64;
        let [whole, half] = ["whole", "half"].map(|end| folder.join(&format!("{name}-{end}")));
        let uninterrupted = case.run(None, 4, Some(&whole));
        case.run(None, 2, Some(&half));
        for layout in ["tp2-sp-dp2-mb3", "tp1-mb4", "tp2-pp2-dp2-mb1-z1/1f1b"] {
            let passed = folder.join(&format!("{name}-{}", layout.replace('/', "-")));
            let next = case.layout(layout).pass_on(&half, &passed);
            assert_same(&format!("{name} {layout}"), &half, &passed);
            assert_near(layout, next, uninterrupted[0].steps[2].loss, CLOSE);
        }
        let resumed = case.run(Some(&half), 4, Some(&half));
        for (rank, whole) in uninterrupted.iter().enumerate() {
            assert!(
                resumed[rank].weights == whole.weights,
                "{name}: rank {rank}"
            );
        }
        assert_same(name, &whole, &half);
    }
}

#[test]
fn the_state_of_experts_is_passed_on() {
    let folder = Folder::new();
    let mut case = Case::experts("tp1-mb4");
    case.train.optimizer = muon();
    let from = folder.join("from");
    case.run(None, 2, Some(&from));
    let same = case.pass_on(&from, &folder.join("same"));
    for layout in ["tp1-ep4-dp4-mb1-z1", "tp2-sp-ep2-etp1-dp2-mb2-z3"] {
        let to = folder.join(layout);
        let next = case.layout(layout).pass_on(&from, &to);
        assert_same(layout, &from, &to);
        assert_near(layout, next, same, CLOSE);
    }
}

/// Frozen parameters have no state, keep their values, and are saved and resumed with the other parameters.
#[test]
fn frozen_parameters_are_not_trained_in_any_layout() {
    let freeze = ["embedding.**", "blocks.0.**"].map(String::from).to_vec();
    let options = VerifyOptions {
        train: TrainConfig {
            data_parallel: DataParallelConfig {
                freeze: freeze.clone(),
                ..DataParallelConfig::default()
            },
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    let layouts = layouts(&["tp2-sp-dp2-mb1-z1", "dp2-mb1-z3", "tp2-pp2-dp2-mb1-z2/1f1b"]);
    // A model with biases that a norm of the next block adds.
    let report = verify(&small_gpt_oss(), &layouts, &options).unwrap();
    assert!(report.passes(), "{report}");

    let folder = Folder::new();
    let mut case = Case::llama("dp3-mb2-z3");
    case.train.freeze = freeze;
    let [first, second] = [1, 3].map(|steps| {
        let into = folder.join(&format!("{steps}"));
        case.run(None, steps, Some(&into));
        into
    });
    let keys = |path: &std::path::Path| Checkpoint::open(path).unwrap().keys();
    let own = keys(&second);
    assert!(
        own.contains(&"model/blocks.0.mlp.up.weight".to_string()),
        "{own:?}"
    );
    assert!(
        own.contains(&"adamw.first/blocks.1.mlp.up.weight".to_string()),
        "{own:?}"
    );
    assert!(
        !own.contains(&"adamw.first/blocks.0.mlp.up.weight".to_string()),
        "{own:?}"
    );
    let read = |path: &std::path::Path, key: &str| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let shape = checkpoint.tensor(key).unwrap().shape;
        checkpoint.read(key, &TensorSlice::whole(&shape)).unwrap()
    };
    for (key, same) in [
        ("model/embedding.weight", true),
        ("model/blocks.0.mlp.up.weight", true),
        ("model/blocks.1.mlp.up.weight", false),
    ] {
        assert_eq!(read(&first, key) == read(&second, key), same, "{key}");
    }
    for layout in ["tp2-sp-dp2-mb3", "pp2-dp2-mb2-z2/1f1b"] {
        let to = folder.join(&layout.replace('/', "-"));
        case.layout(layout).pass_on(&second, &to);
        assert_same(layout, &second, &to);
    }
    case.train.freeze = vec!["blocks.0.mpl.**".into()];
    let error = case
        .on_ranks(|groups| case.trainer(groups).map(drop))
        .unwrap_err();
    assert!(
        error
            .contains("the freeze pattern `blocks.0.mpl.**` matches no parameter; the nearest are"),
        "{error}"
    );
    case.train.freeze = vec!["**".into()];
    let error = case
        .on_ranks(|groups| case.trainer(groups).map(drop))
        .unwrap_err();
    assert!(
        error.contains("freeze leaves no parameter that is trained"),
        "{error}"
    );
}
