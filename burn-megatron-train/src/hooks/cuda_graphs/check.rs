//! The settings that conflict with CUDA graphs.

use burn::tensor::Device;

use crate::TrainConfig;
use crate::config::ConfigError;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DistributedDataParallel, OffloadConfig, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::DropoutPosition;
use burn_megatron::optim::LossScale;

/// Checks the settings and the layout, before anything is built.
pub(crate) fn check(config: &TrainConfig, layout: &ParallelConfig) -> Result<(), ConfigError> {
    let axes = [
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
        ("context", layout.context),
        ("expert", layout.expert),
    ];
    let expected = "1, because a graph has no collectives; any data size is supported";
    let is_split = |(name, size)| (size > 1, format!("{name} = {size}"), expected);
    first_refused(axes.map(is_split))?;
    let data = &config.data_parallel;
    first_refused([
        (
            data.zero_stage == ZeroStage::Parameters,
            "zero_stage = 3",
            "0 to 2, because a graph cannot gather parameters",
        ),
        (
            data.offload != OffloadConfig::default(),
            "memory.offload",
            "none, because the addresses of the host's optimizer state change",
        ),
        (
            matches!(config.loss_scale(), LossScale::Dynamic(_)),
            "a dynamic loss scale",
            "bf16, or loss_scale = 1, because a graph repeats the scale",
        ),
        (
            config.measures_logits().is_some(),
            config.measures_logits().unwrap_or_default(),
            "none, because the host keeps the largest logits",
        ),
        (
            config.check_replay_every.is_some(),
            "check_replay",
            "none, because it reads the output of each layer",
        ),
        (
            cfg!(feature = "fusion"),
            "the feature fusion",
            "a build without it, because it moves tensors",
        ),
    ])
}

/// Checks the model.
pub(super) fn check_model<M: LanguageModel>(
    ddp: &DistributedDataParallel<M>,
) -> Result<(), ConfigError> {
    first_refused([
        (
            !ddp.config().static_buffers,
            "a model that was wrapped without static_buffers",
            "DataParallelConfig::static_buffers",
        ),
        (
            !ddp.fp8().layers().is_empty(),
            "fp8",
            "no FP8 layers, because the host keeps their magnitudes",
        ),
        (
            !ddp.routers().layers().is_empty(),
            "experts",
            "a dense model, because the host reads the number of tokens of each expert",
        ),
        (
            ddp.module().further_depths() > 0,
            "multi-token prediction",
            "a model without it",
        ),
        (
            ddp.recompute().config().offload.bytes > 0,
            "offload of activations",
            "none, because the host waits for the tensors that it has moved",
        ),
    ])
}

/// Checks the device and the ranks, and the random numbers that the graph would repeat.
pub(crate) fn check_device(
    groups: &ParallelContext,
    device: &Device,
    position: &DropoutPosition,
) -> Result<(), ConfigError> {
    let device = format!("{:?}", device.clone().inner());
    let world = groups.world();
    first_refused([
        (
            position.is_used(),
            "dropout".into(),
            "0, because a graph repeats its masks",
        ),
        (
            !device.contains("Cuda"),
            format!("device {device}"),
            "a CUDA device",
        ),
        (
            world.size() > 1 && world.on_device().is_none(),
            format!("{} ranks without NCCL", world.size()),
            "one rank, or the engine nccl, in which each rank is a process",
        ),
    ])
}

fn first_refused<S: Into<String>, const N: usize>(
    refused: [(bool, S, &str); N],
) -> Result<(), ConfigError> {
    match refused.into_iter().find(|(is_set, ..)| *is_set) {
        None => Ok(()),
        Some((_, setting, expected)) => Err(ConfigError::WithCudaGraph {
            setting: setting.into(),
            expected: expected.into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::data_parallel::{DataParallelConfig, Precision};
    use burn_megatron::nn::{Dropout, ModelBuilder};
    use insta::assert_snapshot;

    fn error(config: &TrainConfig, layout: &ParallelConfig) -> String {
        let checked = check(config, layout);
        checked.map_or_else(|error| error.to_string(), |()| "accepted".into())
    }

    #[test]
    fn what_a_graph_cannot_have_is_refused_with_what_fits() {
        let with = |change: fn(&mut TrainConfig)| {
            let mut config = TrainConfig {
                cuda_graph: true,
                ..TrainConfig::default()
            };
            change(&mut config);
            error(&config, &ParallelConfig::new().with_data(2))
        };
        assert_eq!(with(|_| ()), "accepted");
        assert_snapshot!(
            with(|config| config.data_parallel.zero_stage = ZeroStage::Parameters),
            @"cuda_graph conflicts with zero_stage = 3: expected 0 to 2, because a graph cannot gather parameters"
        );
        assert_snapshot!(
            with(|config| config.data_parallel.precision = Precision::F16),
            @"cuda_graph conflicts with a dynamic loss scale: expected bf16, or loss_scale = 1, because a graph \
              repeats the scale"
        );
        let measured = with(|config| config.log_max_attention_logit = true);
        assert!(
            measured.contains("with log_max_attention_logit:"),
            "{measured}"
        );
        let replayed = with(|config| config.check_replay_every = Some(5));
        assert!(replayed.contains("with check_replay:"), "{replayed}");
        let config = TrainConfig {
            cuda_graph: true,
            data_parallel: DataParallelConfig::default(),
            ..TrainConfig::default()
        };
        let tensor = error(&config, &ParallelConfig::new().with_tensor(2));
        assert!(
            tensor.starts_with("cuda_graph conflicts with tensor = 2: expected 1"),
            "{tensor}"
        );
    }

    #[test]
    fn dropout_and_other_devices_are_refused() {
        let groups = ParallelContext::single();
        let device = Device::flex();
        let checked = |probability: f64| {
            let builder = ModelBuilder::new(&groups, &device);
            Dropout::new(probability, &builder.child("dropout")).unwrap();
            let checked = check_device(&groups, &device, builder.position());
            checked.unwrap_err().to_string()
        };
        let expected =
            "cuda_graph conflicts with dropout: expected 0, because a graph repeats its masks";
        assert_eq!(checked(0.1), expected);
        let error = checked(0.0);
        assert!(error.ends_with("expected a CUDA device"), "{error}");
    }
}
