//! Tests which collectives run again with recomputation.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_megatron::comm::{Call, Communicator, ParallelContext, Rank, World};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeMethod, RecomputeModule};
use burn_megatron_comm_testing::Intercept;
use burn_megatron_models::TransformerConfig;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::ModelSubject;

use crate::recompute::{LAYERS, case};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The number of collectives by name.
type Calls = Arc<Mutex<BTreeMap<&'static str, usize>>>;

/// Counts the collectives that a rank calls.
fn counting(inner: Arc<dyn Communicator>, calls: Calls) -> Arc<dyn Communicator> {
    Intercept::over(inner, move |inner, call, input| {
        let name = match &call {
            Call::AllReduce(_) => "all-reduce",
            Call::AllGather => "all-gather",
            Call::ReduceScatter(_) => "reduce-scatter",
            Call::AllToAll { .. } => "all-to-all",
            _ => "other",
        };
        *calls.lock().unwrap().entry(name).or_default() += 1;
        inner.start(call, input)
    })
}

/// Returns the collectives of a step on the first rank.
fn collectives(
    layout: &ParallelConfig,
    model: &TransformerConfig,
    recompute: &RecomputeConfig,
) -> BTreeMap<&'static str, usize> {
    let samples = ModelSubject {
        samples: 2 * layout.data_size(),
        ..ModelSubject::new(model.clone())
    };
    let config = TrainConfig {
        steps: 1,
        warmup_steps: 0,
        micro_batch_size: 2,
        global_batch_size: 2 * layout.data_size(),
        ..TrainConfig::default()
    };
    let run = |rank: Rank| -> Result<_, AnyError> {
        let calls = Calls::default();
        let world = counting(rank.communicator(), calls.clone());
        let groups = ParallelContext::from_world(layout, world)?;
        let device = Device::flex();
        let builder = ModelBuilder::new(&groups, &device).with_recompute(recompute)?;
        let model = model.init_with(builder)?;
        let mut trainer = Trainer::new(model, &groups, &device, &config)?;
        calls.lock().unwrap().clear();
        trainer.step(&samples, &mut NoopObserver)?;
        let calls = calls.lock().unwrap().clone();
        Ok(calls)
    };
    let ranks = World::threads(layout.world_size().unwrap()).unwrap();
    ranks.run(run).unwrap().swap_remove(0)
}

/// Compares with docs/src/memory.md for each layer.
#[test]
fn collectives_that_run_again_are_counted() {
    use RecomputeModule::{Activation, CoreAttention, MlaUpProjection, Mlp, Moe, Norm};
    let full = RecomputeConfig::full(RecomputeMethod::Uniform, 1);
    let selective = |modules: &[RecomputeModule]| RecomputeConfig::selective(modules.to_vec());
    let attention = RecomputeConfig {
        patterns: vec!["blocks.*.attention".into()],
        ..selective(&[])
    };
    type More = &'static [(&'static str, usize)];
    let cases: [(&str, &str, RecomputeConfig, More); 17] = [
        ("tp2", "gpt", full.clone(), &[("all-reduce", 2)]),
        ("tp2", "gpt", selective(&[Mlp]), &[]),
        ("tp2", "gpt", attention.clone(), &[]),
        (
            "tp2",
            "gpt",
            selective(&[Norm, Activation, CoreAttention]),
            &[],
        ),
        (
            "tp2 sp",
            "gpt",
            full.clone(),
            &[("all-gather", 2), ("reduce-scatter", 2)],
        ),
        ("tp2 sp", "gpt", selective(&[Mlp]), &[("all-gather", 1)]),
        (
            "tp2 sp",
            "gpt",
            selective(&[Norm, Mlp]),
            &[("all-gather", 1)],
        ),
        ("tp2 sp", "gpt", attention, &[("all-gather", 1)]),
        // Two chunks are transferred in each exchange. The region ends with the sum, which is not recomputed.
        ("tp2 ring", "gpt", full.clone(), &[("all-to-all", 8)]),
        ("tp2 ring", "gpt", selective(&[Mlp]), &[("all-to-all", 2)]),
        (
            "tp2 sp",
            "gpt",
            selective(&[Norm, Activation, CoreAttention]),
            &[],
        ),
        ("cp2", "llama", selective(&[Norm, Activation, Mlp]), &[]),
        (
            "cp2",
            "llama",
            selective(&[CoreAttention]),
            &[("all-to-all", 1)],
        ),
        (
            "ep2",
            "experts",
            selective(&[Moe]),
            &[("all-to-all", 3), ("all-gather", 1)],
        ),
        ("tp2", "latent", selective(&[MlaUpProjection]), &[]),
        (
            "tp2 sp",
            "latent",
            selective(&[MlaUpProjection]),
            &[("all-gather", 2)],
        ),
        (
            "cp2",
            "latent",
            selective(&[MlaUpProjection]),
            &[("all-gather", 1)],
        ),
    ];
    for (layout, model, recompute, more) in cases {
        let case = case(&[("layout", layout), ("model", model)]);
        // Router losses have their own collectives.
        let mut model = case.model();
        if let Some(moe) = &mut model.moe {
            moe.losses.clear();
        }
        let count = |recompute| collectives(&case.layout(), &model, recompute);
        let (mut kept, found) = (count(&RecomputeConfig::default()), count(&recompute));
        for (name, calls) in more {
            *kept.entry(name).or_default() += LAYERS * calls;
        }
        assert_eq!(found, kept, "{layout}, {model:?}, {recompute:?}");
    }
}
