//! A batch norm, whose running states the ranks average.

use burn::tensor::DType;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::optim::AdamWConfig;
use burn_megatron_learner::MegatronStrategy;
use tempfile::tempdir;

use crate::model::{Item, Mlp, Training, difference, threads};

fn sharded(stage: ZeroStage) -> MegatronStrategy<Mlp> {
    let optimizer = AdamWConfig::default();
    threads(2).optimizer(optimizer).zero_stage(stage)
}

/// Both ranks get the batches of a single device, so their weights, running states and losses equal the device's.
#[test]
fn ranks_with_equal_batches_train_what_one_device_does() {
    let items: Vec<_> = (0..8).map(Item::new).collect();
    let one = Training {
        items: items.clone(),
        norm: true,
        ..Training::default()
    };
    let two = Training {
        items: [items.clone(), items].concat(),
        ..one.clone()
    };
    let expected = one.weights(None);
    let found = two.weights(Some(threads(2)));
    let difference = difference(&expected, &found);
    assert!(difference <= 1e-10, "{difference:e}");
}

/// Rank 0 has no second batch. From ZeRO-2 on it runs one that does not count.
#[test]
fn every_stage_of_sharding_has_the_same_running_states() {
    let training = Training {
        items: (0..9).map(Item::new).collect(),
        norm: true,
        ..Training::default()
    };
    let expected = training.weights(Some(sharded(ZeroStage::Replicated)));
    assert!(expected.iter().all(|value| value.is_finite()));
    for stage in ZeroStage::ALL {
        let found = training.weights(Some(sharded(stage)));
        assert_eq!(found, expected, "ZeRO-{stage}");
    }
}

#[test]
fn running_states_are_resumed() {
    let whole = Training {
        // Burn restores the state of an optimizer in f32.
        dtype: DType::F32,
        epochs: 4,
        norm: true,
        ..Training::default()
    };
    let folder = tempdir().unwrap();
    let shards =
        |name: &str| sharded(ZeroStage::Parameters).checkpoints(folder.path().join(name), 4);
    for in_shards in [false, true] {
        let strategy = |name: &str| match in_shards {
            true => shards(name),
            false => threads(2),
        };
        let wanted = whole.weights(Some(strategy("whole")));
        let records = folder.path().join(format!("records-{in_shards}"));
        let first = Training {
            epochs: 2,
            saves: !in_shards,
            ..whole.clone()
        };
        first.run(&records, Some(strategy("parts")));
        let rest = Training {
            resume: Some(2),
            saves: !in_shards,
            seed: 7,
            ..whole.clone()
        };
        let resumed = rest.run(&records, Some(strategy("parts")));
        assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
        assert_eq!(resumed.model.weights(), wanted, "in shards: {in_shards}");
    }
}
