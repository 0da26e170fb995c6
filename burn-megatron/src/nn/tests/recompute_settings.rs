//! Tests that modules follow the recomputation settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, Tensor};

use super::recompute::{FillParameters, reduced};
use super::{autodiff, wave};
use crate::comm::ParallelContext;
use crate::data_parallel::{DataParallelConfig, DistributedDataParallel};
use crate::model::{StageBuilder, StageLayers};
use crate::nn::*;
use crate::pipeline::split::StageLayout;

const WIDTH: usize = 6;
const SAMPLES: usize = 4;

/// A user model of Burn layers that follows the settings.
#[derive(Module, Debug)]
struct Model {
    layers: StageLayers<Linear>,
    #[module(skip)]
    head: RecomputeRegion,
}

const LAYERS: usize = 4;

/// Returns the number of times that each layer and the head run in a forward and a backward pass, and the gradients.
fn followed(config: &RecomputeConfig) -> Result<([usize; LAYERS + 1], Vec<Vec<f64>>), BuildError> {
    let groups = ParallelContext::single();
    let builder = ModelBuilder::with(&groups, &Device::flex(), 5, DType::F64);
    let whole = StageLayout {
        embedding: true,
        layers: 0..LAYERS,
        loss: true,
    };
    let stages = StageBuilder::new(builder.with_recompute(config)?, &[(0, whole)]);
    let linear = |device: &Device| {
        let layer = LinearConfig::new(WIDTH, WIDTH).init(device);
        layer.map(&mut FillParameters(0.0, DType::F64))
    };
    let layers = stages.layers_in_runs("layers", |_, builder| Ok(builder.replicated(linear)))?;
    let head = stages.root().child("head").recompute_region(None);
    let model = stages.finish(Model { layers, head })?;
    model.recompute.check_whole_model()?;
    let config = DataParallelConfig::default();
    let mut ddp = DistributedDataParallel::with(model, &groups, &config).unwrap();
    let runs: Arc<[AtomicUsize; LAYERS + 1]> = Arc::default();
    let loss = ddp.forward(&autodiff(), |model| {
        let mut x = wave([SAMPLES, WIDTH], 1.0).autodiff();
        for run in model.layers.runs(0) {
            let (layers, runs) = (run.to_owned_layers(), runs.clone());
            x = run.region.run(x, move |x| {
                layers.iter().fold(x, |x, (index, layer)| {
                    runs[*index].fetch_add(1, Ordering::Relaxed);
                    gelu(layer.forward(x))
                })
            });
        }
        let runs = runs.clone();
        let head = move |x: Tensor<2>| {
            runs[LAYERS].fetch_add(1, Ordering::Relaxed);
            x.clone() * x
        };
        model.head.run(x, head).sum()
    });
    ddp.backward_last(loss);
    let runs = std::array::from_fn(|index| runs[index].load(Ordering::Relaxed));
    Ok((runs, reduced(&mut ddp)))
}

#[test]
fn a_module_of_a_user_follows_the_settings() {
    let (once, expected) = followed(&RecomputeConfig::default()).unwrap();
    assert_eq!(once, [1; LAYERS + 1]);
    let patterns = |patterns: &[&str]| RecomputeConfig {
        patterns: patterns.iter().map(ToString::to_string).collect(),
        ..RecomputeConfig::selective([])
    };
    let full = RecomputeConfig::full;
    for (config, runs) in [
        (full(RecomputeMethod::Uniform, 1), [2, 2, 2, 2, 1]),
        (full(RecomputeMethod::Uniform, 3), [2, 2, 2, 2, 1]),
        (full(RecomputeMethod::Block, 2), [2, 2, 1, 1, 1]),
        (patterns(&["layers.2", "head"]), [1, 1, 2, 1, 2]),
    ] {
        assert_eq!(followed(&config).unwrap(), (runs, expected.clone()));
    }
    let error = followed(&patterns(&["layers.9"])).unwrap_err().to_string();
    assert!(error.contains("layers.0"), "{error}");
    let named = RecomputeConfig::selective([RecomputeModule::Mlp]);
    let error = followed(&named).unwrap_err().to_string();
    insta::assert_snapshot!(
        error,
        @"mlp matches no module of this model that can be recomputed: expected none, because the model has no such \
          module"
    );
}

#[test]
fn a_model_that_calls_its_layers_one_by_one_refuses_to_recompute_whole_ones() {
    let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let full = RecomputeConfig::full(RecomputeMethod::Uniform, 1);
    let stages = StageBuilder::new(builder.with_recompute(&full).unwrap(), &[]);
    let error = stages.layers("layers", |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("one by one"), "{error}");
}
