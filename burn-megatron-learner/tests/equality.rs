//! Ranks train the same as one device on the batches of all ranks.

use burn::optim::SgdConfig;
use burn::tensor::DType;
use burn_megatron::data_parallel::{DataParallelConfig, ZeroStage};
use burn_megatron::optim::AdamWConfig;

use crate::model::{Item, Training, difference, threads};

/// Returns AdamW of this library with Burn's defaults (which are f32), without weight decay.
fn adamw() -> AdamWConfig {
    AdamWConfig {
        beta1: 0.9_f32.into(),
        beta2: 0.999_f32.into(),
        epsilon: 1e-5_f32.into(),
        weight_decay: 0.0,
        groups: vec![],
    }
}

#[test]
fn ranks_train_what_one_device_does_with_their_batches() {
    for (dtype, limit) in [(DType::F64, 1e-10), (DType::F32, 1e-6)] {
        let training = Training {
            dtype,
            ..Training::default()
        };
        for ranks in [1, 2, 4] {
            let one = training.on_one_device(ranks).weights(None);
            let many = training.weights(Some(threads(ranks)));
            let difference = difference(&one, &many);
            assert!(
                difference <= limit,
                "{dtype:?}, {ranks} ranks: {difference:e}"
            );
        }
    }
}

#[test]
fn uneven_parts_weigh_by_their_items() {
    // Rank 0 has batches of 4 and 1, rank 1 of 4 and 2.
    let items = (0..11).map(Item::new).collect();
    let training = Training {
        items,
        ..Training::default()
    };
    let one = training.on_one_device(2).weights(None);
    let many = training.weights(Some(threads(2)));
    assert!(difference(&one, &many) <= 1e-10);
    let equal = training.weights(Some(threads(2).weight(|_| 1)));
    assert!(difference(&one, &equal) > 1e-5, "weights have an effect");
}

/// Rank 0 has 4 items, rank 1 has 5, in batches of 4: rank 0 has no second batch.
#[test]
fn a_rank_may_run_out_of_batches() {
    let items = (0..9).map(Item::new).collect();
    let training = Training {
        items,
        ..Training::default()
    };
    let one = training.on_one_device(2).weights(None);
    let many = training.weights(Some(threads(2)));
    assert!(difference(&one, &many) <= 1e-10);
    let sharded = threads(2)
        .optimizer(adamw())
        .zero_stage(ZeroStage::Parameters);
    assert!(difference(&one, &training.weights(Some(sharded))) <= 1e-6);
}

#[test]
fn micro_batches_are_added_as_burn_does() {
    // 5 micro-batches per rank: the last step of an epoch has one.
    let items = (0..20).map(Item::new).collect();
    let training = Training {
        items,
        batch: 2,
        accumulation: Some(2),
        ..Training::default()
    };
    let one = training.on_one_device(2).weights(None);
    let many = training.weights(Some(threads(2)));
    assert!(difference(&one, &many) <= 1e-10);
}

#[test]
fn every_stage_of_sharding_trains_the_same() {
    let training = Training::default();
    let one = training.on_one_device(2).weights(None);
    let of_stage = |stage| {
        let stage = ZeroStage::try_from(stage).unwrap();
        let strategy = threads(2).optimizer(adamw()).zero_stage(stage);
        training.weights(Some(strategy))
    };
    let many = of_stage(0);
    // Burn computes the corrections of the moments in f32.
    let difference = difference(&one, &many);
    assert!(difference <= 1e-6, "{difference:e}");
    for stage in 1..4 {
        assert_eq!(of_stage(stage), many, "stage {stage}");
    }
}

#[test]
fn any_element_wise_optimizer_of_burn_is_sharded() {
    let training = Training::default();
    let build = |_| SgdConfig::new().build();
    let of_stage = |stage: u8| {
        let stage = ZeroStage::try_from(stage).unwrap();
        let strategy = threads(2).element_wise(build, vec![]).zero_stage(stage);
        training.weights(Some(strategy))
    };
    assert_eq!(of_stage(0), of_stage(2));
    assert_ne!(of_stage(0), training.weights(Some(threads(2))));
}

#[test]
fn buckets_are_reduced_in_any_size() {
    let training = Training::default();
    let config = DataParallelConfig {
        bucket_size: Some(1),
        ..DataParallelConfig::default()
    };
    let small = threads(2).data_parallel(config);
    assert_eq!(
        training.weights(Some(small)),
        training.weights(Some(threads(2)))
    );
}
