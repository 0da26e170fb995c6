//! Runs that are stopped and resumed.

use burn::tensor::DType;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::optim::{
    AdamWConfig, GroupOptimizer, MuonConfig, OptimizerConfig, ParameterGroup,
};
use burn_megatron_learner::newest_epoch;
use tempfile::tempdir;

use crate::model::{Training, difference, threads};

#[test]
fn burns_checkpoints_resume_to_the_bit() {
    let whole = Training {
        // Burn restores the state of an optimizer in f32.
        dtype: DType::F32,
        epochs: 4,
        ..Training::default()
    };
    let wanted = whole.weights(Some(threads(2)));
    let folder = tempdir().unwrap();
    let first = Training {
        epochs: 2,
        saves: true,
        ..whole.clone()
    };
    first.run(folder.path(), Some(threads(2)));
    let rest = Training {
        saves: true,
        resume: Some(2),
        seed: 7,
        ..whole
    };
    let resumed = rest.run(folder.path(), Some(threads(2)));
    assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
    assert_eq!(resumed.model.weights(), wanted);
}

/// Returns Muon for one of the matrices, and AdamW for the rest.
fn muon() -> OptimizerConfig {
    OptimizerConfig::Muon(MuonConfig {
        groups: vec![ParameterGroup {
            pattern: "up".into(),
            weight_decay: None,
            learning_rate: None,
            optimizer: Some(GroupOptimizer::Muon),
        }],
        ..MuonConfig::default()
    })
}

#[test]
fn shards_resume_with_another_number_of_ranks() {
    for optimizer in [AdamWConfig::default().into(), muon()] {
        shards_resume(optimizer);
    }
}

fn shards_resume(optimizer: OptimizerConfig) {
    let strategy = |ranks, folder: &std::path::Path| {
        let strategy = threads(ranks).optimizer(optimizer.clone());
        let strategy = strategy.zero_stage(ZeroStage::Parameters);
        strategy.checkpoints(folder, 4)
    };
    let whole = Training {
        epochs: 4,
        ..Training::default()
    };
    let folder = tempdir().unwrap();
    assert_eq!(newest_epoch(folder.path().join("whole")).unwrap(), None);
    let all = strategy(2, &folder.path().join("whole"));
    let wanted = whole.weights(Some(all));
    let parts = folder.path().join("parts");
    let first = Training {
        epochs: 2,
        ..whole.clone()
    };
    first.weights(Some(strategy(2, &parts)));
    assert_eq!(newest_epoch(&parts).unwrap(), Some(2));
    for ranks in [2, 1] {
        let batches = match ranks {
            1 => whole.on_one_device(2),
            _ => whole.clone(),
        };
        let rest = Training {
            resume: Some(2),
            seed: 7,
            ..batches
        };
        let resumed = rest.weights(Some(strategy(ranks, &parts)));
        let difference = difference(&wanted, &resumed);
        let limit = if ranks == 2 { 0.0 } else { 1e-10 };
        assert!(difference <= limit, "{ranks} ranks: {difference:e}");
    }
    let missing = Training {
        resume: Some(9),
        ..whole
    };
    let result = missing.run(folder.path(), Some(strategy(2, &parts)));
    let error = result.error.unwrap().to_string();
    assert!(error.contains("no checkpoint of epoch 9 in"), "{error}");
    assert!(error.contains("expected one of 1, 2, 3, 4"), "{error}");
}
