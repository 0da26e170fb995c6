//! The strategy on a GPU (CUDA or wgpu) trains the same as on the CPU.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

// Its other users are in main.rs.
#[allow(dead_code)]
mod model;

use burn::module::Module;
use burn::tensor::{DType, Device};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::device::DeviceKind;
use burn_megatron::optim::{AdamWConfig, OptimizerConfig, SgdConfig};
use burn_megatron_learner::MegatronStrategy;
use tempfile::tempdir;

use model::{Mlp, Training, difference, threads};

fn devices() -> Vec<Device> {
    let kind = if cfg!(feature = "cuda") {
        DeviceKind::Cuda
    } else {
        DeviceKind::Wgpu
    };
    kind.devices().unwrap_or_else(|error| panic!("{error}"))
}

fn training() -> Training {
    Training {
        dtype: DType::F32,
        ..Training::default()
    }
}

/// Compares the weights with the weights of a run on the CPU.
fn check(name: &str, change: impl Fn(MegatronStrategy<Mlp>) -> MegatronStrategy<Mlp>) {
    let cpu = training().weights(Some(change(threads(2))));
    let folder = tempdir().unwrap();
    let strategy = change(threads(2).devices(devices()));
    let result = training().run(folder.path(), Some(strategy));
    assert!(result.error.is_none(), "{name}: {}", result.error.unwrap());
    assert_eq!(result.model.devices(), devices()[..1], "{name}");
    let difference = difference(&cpu, &result.model.weights());
    assert!(difference <= 1e-4, "{name}: {difference:e}");
}

#[test]
fn the_optimizer_of_the_learner_steps_on_the_device() {
    check("the Learner's", |strategy| strategy.clip(1.0));
}

#[test]
fn shards_are_stepped_on_the_device() {
    let configs = [
        OptimizerConfig::AdamW(AdamWConfig::default()),
        OptimizerConfig::Sgd(SgdConfig::default()),
    ];
    for config in configs {
        for stage in [ZeroStage::Replicated, ZeroStage::Parameters] {
            check(&format!("{config} {stage}"), |strategy| {
                strategy.optimizer(config.clone()).zero_stage(stage)
            });
        }
    }
}

/// The ranks share a device, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE.
#[cfg(feature = "cuda")]
#[test]
fn ranks_reduce_over_nccl() {
    use burn_megatron::comm::Engine;
    use burn_megatron_comm_testing::join_as_threads;

    if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_err() && devices().len() < 2 {
        println!("skipped: one device, and NCCL_MULTI_RANK_GPU_ENABLE=1 is not set");
        return;
    }
    let sharded = |strategy: MegatronStrategy<Mlp>| {
        let strategy = strategy.optimizer(AdamWConfig::default());
        strategy.zero_stage(ZeroStage::Parameters)
    };
    let changes: [fn(MegatronStrategy<Mlp>) -> MegatronStrategy<Mlp>; 2] =
        [|strategy| strategy, sharded];
    for change in changes {
        let cpu = training().weights(Some(change(threads(2))));
        let over_nccl = join_as_threads(2, |launch| {
            let strategy = MegatronStrategy::processes(launch).devices(devices());
            let strategy = strategy.world(|world| world.engine(Engine::Nccl));
            training().weights(Some(change(strategy)))
        });
        for found in over_nccl {
            assert!(difference(&cpu, &found) <= 1e-4);
        }
    }
}
