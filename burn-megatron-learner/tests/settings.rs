//! Clipping, precision, frozen parameters, runs that end early, and the overlap of the reduction with the backward.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor};
use burn::train::Interrupter;
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{AdamWConfig, OptimizerConfig, SgdConfig};
use burn_megatron::prelude::AnyError;
use tempfile::tempdir;

use crate::model::{HIDDEN, Mlp, Training, difference, threads};

#[test]
fn clipping_is_by_the_norm_of_all_ranks() {
    let training = Training::default();
    // Unlike AdamW, the length of a step is the length of the gradient.
    let sgd = |ranks| threads(ranks).optimizer(OptimizerConfig::Sgd(SgdConfig::default()));
    let free = training.weights(Some(sgd(2)));
    assert_eq!(training.weights(Some(sgd(2).clip(1e9))), free);
    let clipped = training.weights(Some(sgd(2).clip(0.1)));
    assert!(difference(&clipped, &free) > 1e-4);
    let one = training.on_one_device(2).weights(Some(sgd(1).clip(0.1)));
    assert!(difference(&clipped, &one) <= 1e-10);
}

#[test]
fn a_model_computes_in_16_bits() {
    let training = Training {
        dtype: DType::F32,
        scaled: true,
        epochs: 4,
        ..Training::default()
    };
    let wide = training.weights(Some(threads(2)));
    for precision in [Precision::Bf16, Precision::F16] {
        let narrow = training.weights(Some(threads(2).precision(precision)));
        let difference = difference(&wide, &narrow);
        assert!(
            difference > 0.0 && difference < 5e-2,
            "{precision:?}: {difference}"
        );
    }
}

#[test]
fn frozen_parameters_stay() {
    let training = Training::default();
    let run = |training: &Training, strategy| {
        let folder = tempdir().unwrap();
        let model = Mlp::new(training.dtype, 1).with_frozen_bias();
        let before = model.weights();
        let result = training.run_model(model, folder.path(), strategy);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        (before, result.model.weights())
    };
    let (_, one) = run(&training.on_one_device(2), None);
    let (before, many) = run(&training, Some(threads(2)));
    assert!(difference(&one, &many) <= 1e-10);
    let same = before.iter().zip(&many).filter(|(a, b)| a == b).count();
    assert_eq!(same, HIDDEN, "the elements of the bias");
}

#[test]
fn the_groups_of_a_schedule_are_those_of_burn() {
    let plain = Training::default();
    let training = Training {
        bias_rate: Some(0.1),
        ..plain.clone()
    };
    let one = training.on_one_device(2).weights(None);
    let many = training.weights(Some(threads(2)));
    assert!(difference(&one, &many) <= 1e-10);
    assert!(difference(&many, &plain.weights(Some(threads(2)))) > 1e-2);
    let sharded = threads(2).optimizer(AdamWConfig::default());
    let folder = tempdir().unwrap();
    let refused = training.run(folder.path(), Some(sharded));
    let error = refused.error.unwrap().to_string();
    assert!(
        error.contains("does not support a learning rate scheduler with groups"),
        "{error}"
    );
}

#[test]
fn a_run_ends_early_on_all_ranks() {
    let two_epochs = Training::default();
    let many = Training {
        epochs: 50,
        ..two_epochs.clone()
    };
    let stopped = Training {
        stops_early: true,
        ..many.clone()
    };
    let stopped = stopped.weights(Some(threads(2)));
    assert_eq!(stopped, two_epochs.weights(Some(threads(2))));
    // One rank is interrupted before its third step.
    let (interrupter, calls) = (Interrupter::new(), AtomicUsize::new(0));
    let many = Training {
        interrupter: Some(interrupter.clone()),
        ..many
    };
    let interrupted = threads(2).weight(move |_| {
        if calls.fetch_add(1, Ordering::Relaxed) == 4 {
            interrupter.stop(Some("by hand"));
        }
        1
    });
    let folder = tempdir().unwrap();
    let result = many.run(folder.path(), Some(interrupted));
    assert!(result.error.is_none());
    let reason = result.interrupted.unwrap().reason;
    assert_eq!(reason.as_deref(), Some("by hand"));
}

/// With `is_last` the buckets of a step are reduced before its backward returns.
#[test]
fn the_last_backward_of_a_step_starts_the_reductions() {
    let calls = World::threads(2)
        .unwrap()
        .run(|rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(&ParallelConfig::new().with_data(2), &rank)?;
            let device = Device::flex();
            let module = LinearConfig::new(4, 4).init(&device.clone().autodiff());
            let module = ParallelModule::replicated(module);
            let config = DataParallelConfig {
                bucket_size: Some(1),
                ..DataParallelConfig::default()
            };
            let ddp = DistributedDataParallel::with(module, &groups, &config)?;
            let own = device.clone().autodiff();
            let mut started = vec![];
            for is_last in [false, true] {
                let before = rank.recent_calls().len();
                ddp.forward_and_backward(&device, 1.0, is_last, |linear| {
                    linear
                        .forward(Tensor::<2>::ones([1, 4], &own))
                        .sum()
                        .backward()
                });
                started.push(rank.recent_calls().len() - before);
            }
            Ok(started)
        });
    // The calls of the weight and of the bias.
    assert_eq!(calls.unwrap(), [[0, 2], [0, 2]]);
}
