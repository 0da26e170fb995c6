//! Ranks that fail, steps that are skipped, and settings that are rejected.

use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::{DType, Device};
use burn_megatron::data_parallel::{Precision, ZeroStage};
use burn_megatron::optim::AdamWConfig;
use burn_megatron_learner::MegatronStrategy;
use tempfile::tempdir;

use crate::model::{Item, Mlp, Training, threads};

/// Returns the error of a run.
fn error(training: &Training, strategy: MegatronStrategy<Mlp>) -> String {
    let folder = tempdir().unwrap();
    let result = training.run(folder.path(), Some(strategy));
    result.error.expect("the run must fail").to_string()
}

#[test]
fn a_rank_that_fails_ends_the_run_with_its_error() {
    let mut training = Training::default();
    // The item is in the part of rank 1.
    training.items[12] = Item::refused();
    let error = error(&training, threads(2));
    assert!(
        error.contains("rank 1 failed: panicked: this batch is refused"),
        "{error}"
    );
}

#[test]
fn a_step_is_skipped_on_all_ranks_if_a_gradient_is_not_finite_on_one() {
    let mut training = Training {
        epochs: 1,
        ..Training::default()
    };
    let clean = training.weights(Some(threads(2)));
    // The item is in the second and last step of rank 1.
    training.items[15] = Item::with_target(f64::INFINITY);
    let skipped = training.weights(Some(threads(2)));
    assert!(skipped.iter().all(|weight| weight.is_finite()));
    assert_ne!(skipped, clean);
    training.items = [0, 1, 2, 3, 8, 9, 10, 11].map(Item::new).to_vec();
    assert_eq!(
        training.weights(Some(threads(2))),
        skipped,
        "the first step alone"
    );
    training.items[7] = Item::with_target(f64::INFINITY);
    training.epochs = 60;
    let error = error(&training, threads(2));
    assert!(
        error.contains("the last 50 steps were all skipped"),
        "{error}"
    );
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let training = Training::default();
    let refused = |strategy, text: &str| {
        let error = error(&training, strategy);
        assert!(error.contains(text), "{error}");
    };
    refused(
        threads(2).zero_stage(ZeroStage::Gradients),
        "zero_stage = 2 requires an optimizer of this library",
    );
    refused(threads(17), "the training data have 16 items for 17 ranks");
    refused(
        threads(2).clip(0.0),
        "invalid clip = 0: expected a norm above 0",
    );
    refused(
        threads(2).checkpoints("/nowhere", 1),
        "sharded checkpoints require .optimizer(..)",
    );
    let unsaved = threads(2).element_wise(|_| SgdConfig::new().build(), vec![]);
    refused(
        unsaved.checkpoints("/nowhere", 1),
        "the optimizer of this strategy keeps its state to itself",
    );
    let resumed = Training {
        resume: Some(1),
        ..Training::default()
    };
    let strategy = threads(2).optimizer(AdamWConfig::default());
    let unsaved = error(&resumed, strategy);
    assert!(
        unsaved.contains("resuming from epoch 1 requires .checkpoints(folder)"),
        "{unsaved}"
    );
    let narrow = Training {
        dtype: DType::F32,
        ..Training::default()
    };
    let unscaled = error(&narrow, threads(2).precision(Precision::F16));
    assert!(
        unscaled.contains("the loss scale is 65536, but"),
        "{unscaled}"
    );
}

#[test]
fn a_model_without_gradients_is_refused() {
    let folder = tempdir().unwrap();
    let plain = Mlp::on(&Device::flex(), DType::F64, 1).no_grad();
    let result = Training::default().run_model(plain, folder.path(), Some(threads(2)));
    let error = result.error.unwrap().to_string();
    assert!(
        error.contains("no parameter of the model requires a gradient"),
        "{error}"
    );
}
