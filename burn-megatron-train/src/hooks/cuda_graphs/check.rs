//! The settings that conflict with CUDA graphs.

use burn::tensor::Device;

use crate::TrainConfig;
use crate::config::ConfigError;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DistributedDataParallel, OffloadConfig, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::fp8::Fp8;
use burn_megatron::nn::moe::Routers;
use burn_megatron::nn::{DropoutPosition, ParallelModule, Recompute};
use burn_megatron::optim::LossScale;

/// Checks settings and layout, before anything is built.
pub(crate) fn check(config: &TrainConfig, layout: &ParallelConfig) -> Result<(), ConfigError> {
    if !config.cuda_graph {
        return Ok(());
    }
    let axis = |name: &str, size: usize| {
        let expected = "1, as a graph has no collectives; the data axis is free";
        (size > 1, format!("{name} = {size}"), expected)
    };
    let data = &config.data_parallel;
    let flag =
        |is_set: bool, name: &str, expected: &'static str| (is_set, name.to_owned(), expected);
    let refused = [
        axis("tensor", layout.tensor),
        axis("pipeline", layout.pipeline),
        axis("context", layout.context),
        axis("expert", layout.expert),
        flag(
            data.zero_stage == ZeroStage::Parameters,
            "zero_stage = 3",
            "0 to 2, as a graph cannot gather parameters",
        ),
        flag(
            data.offload != OffloadConfig::default(),
            "memory.offload",
            "none, as the address of what the host steps changes",
        ),
        flag(
            matches!(config.loss_scale(), LossScale::Dynamic(_)),
            "a dynamic loss scale",
            "bf16, or loss_scale = 1, as a graph repeats the scale",
        ),
        flag(
            config.measures_logits().is_some(),
            config.measures_logits().unwrap_or_default(),
            "none, as the host keeps the largest logits",
        ),
        flag(
            config.check_replay_every.is_some(),
            "check_replay",
            "none, as it reads what each layer returns",
        ),
        flag(
            cfg!(feature = "fusion"),
            "the feature fusion",
            "a build without it, as it moves tensors",
        ),
    ];
    first_refused(refused)
}

/// A model before or after it is wrapped.
pub(crate) struct ModelParts<'a> {
    pub fp8: &'a Fp8,
    pub routers: &'a Routers,
    pub recompute: &'a Recompute,
    pub further_depths: usize,
}

impl<'a> ModelParts<'a> {
    pub fn of<M: LanguageModel>(model: &'a ParallelModule<M>) -> Self {
        Self {
            fp8: &model.fp8,
            routers: &model.routers,
            recompute: &model.recompute,
            further_depths: model.module.further_depths(),
        }
    }

    pub fn of_wrapped<M: LanguageModel>(ddp: &'a DistributedDataParallel<M>) -> Self {
        Self {
            fp8: ddp.fp8(),
            routers: ddp.routers(),
            recompute: ddp.recompute(),
            further_depths: ddp.module().further_depths(),
        }
    }
}

/// Checks the model, before its parameters are laid out.
pub(crate) fn check_model(config: &TrainConfig, model: &ModelParts<'_>) -> Result<(), ConfigError> {
    if !config.cuda_graph {
        return Ok(());
    }
    let refused = [
        (
            !model.fp8.layers().is_empty(),
            "fp8",
            "no FP8 layers, as the host keeps their magnitudes",
        ),
        (
            !model.routers.layers().is_empty(),
            "experts",
            "a dense model, as the host reads how many tokens each expert has",
        ),
        (
            model.further_depths > 0,
            "multi-token prediction",
            "a model without it",
        ),
        (
            model.recompute.config().offload.bytes > 0,
            "offload of activations",
            "none, as the host waits for what it has moved",
        ),
    ];
    first_refused(refused.map(|(is_set, name, expected)| (is_set, name.into(), expected)))
}

/// Checks the device and the ranks, and what the device would repeat.
pub(crate) fn check_device(
    config: &TrainConfig,
    groups: &ParallelContext,
    device: &Device,
    position: &DropoutPosition,
) -> Result<(), ConfigError> {
    if !config.cuda_graph {
        return Ok(());
    }
    let device = format!("{:?}", device.clone().inner());
    let world = groups.world();
    let refused = [
        (
            position.is_used(),
            "dropout".into(),
            "0, as a graph repeats its masks",
        ),
        (
            !device.contains("Cuda"),
            format!("device {device}"),
            "a CUDA device",
        ),
        (
            world.size() > 1 && world.on_device().is_none(),
            format!("{} ranks without NCCL", world.size()),
            "one rank, or the engine nccl, by which each rank has a process of its own",
        ),
    ];
    first_refused(refused)
}

fn first_refused(
    refused: impl IntoIterator<Item = (bool, String, &'static str)>,
) -> Result<(), ConfigError> {
    match refused.into_iter().find(|(is_set, ..)| *is_set) {
        None => Ok(()),
        Some((_, setting, expected)) => Err(ConfigError::WithCudaGraph {
            setting,
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
            @"cuda_graph with zero_stage = 3: expected 0 to 2, as a graph cannot gather parameters"
        );
        assert_snapshot!(
            with(|config| config.data_parallel.precision = Precision::F16),
            @"cuda_graph with a dynamic loss scale: expected bf16, or loss_scale = 1, as a graph repeats the scale"
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
            tensor.starts_with("cuda_graph with tensor = 2: expected 1"),
            "{tensor}"
        );
    }

    #[test]
    fn dropout_and_other_devices_are_refused() {
        let groups = ParallelContext::single();
        let device = Device::flex();
        let config = TrainConfig {
            cuda_graph: true,
            ..TrainConfig::default()
        };
        let checked = |probability: f64| {
            let builder = ModelBuilder::new(&groups, &device);
            Dropout::new(probability, &builder.child("dropout")).unwrap();
            let checked = check_device(&config, &groups, &device, builder.position());
            checked.unwrap_err().to_string()
        };
        let expected = "cuda_graph with dropout: expected 0, as a graph repeats its masks";
        assert_eq!(checked(0.1), expected);
        let error = checked(0.0);
        assert!(error.ends_with("expected a CUDA device"), "{error}");
    }
}
