//! Tests that gathering the weights of FP8 layers in FP8 is bit-equal to gathering floats that the layers quantize.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, Precision, ZeroStage,
};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Config, Fp8Recipe};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, global_norm};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::inputs::tokens;
use burn_megatron_tests::{small_gpt, small_llama};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const STEPS: usize = 6;

/// The observations of a rank.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    losses: Vec<u64>,
    norms: Vec<u64>,
    masters: Vec<Vec<u32>>,
    states: String,
}

fn recipes() -> [Fp8Recipe; 4] {
    [
        Fp8Recipe::Delayed(DelayedScaling {
            history: 3,
            ..DelayedScaling::default()
        }),
        Fp8Recipe::Current(CurrentScaling::default()),
        Fp8Recipe::Blockwise(BlockScaling::default()),
        Fp8Recipe::MxFp8,
    ]
}

fn train(
    model: &TransformerConfig,
    mesh: &ParallelConfig,
    ranks: usize,
    recipe: Fp8Recipe,
    settings: &DataParallelConfig,
) -> Vec<Seen> {
    let fp8 = Fp8Config {
        recipe: Some(recipe),
        ..Fp8Config::default()
    };
    let run = |rank| {
        let groups = ParallelContext::new(mesh, &rank)?;
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, 3, DType::F32).with_fp8(&fp8)?;
        let built = model.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(built, &groups, settings)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        let (mut losses, mut norms) = (vec![], vec![]);
        let inputs = device.clone().autodiff();
        let data = groups.data().rank();
        for step in 0..STEPS {
            for micro_batch in 0..2 {
                ddp.position().set(step as u64, (2 * data) as u64);
                let key = (step * 10 + data) * 10 + micro_batch;
                let loss = ddp.forward(&device, |model_| {
                    let (x, y) = (
                        tokens(model, key, &inputs),
                        tokens(model, key + 5000, &inputs),
                    );
                    model_.losses(x, y).cast(DType::F32).sum()
                });
                losses.push(loss.clone().into_scalar::<f64>().to_bits());
                match micro_batch {
                    1 => ddp.backward_last(loss),
                    _ => ddp.backward(loss),
                };
            }
            let gradients = ddp.reduce((4 * model.context) as u64)?;
            norms.push(global_norm(&gradients, &ddp)?.to_bits());
            ddp.fp8().end_step(&groups)?;
            optimizer.step(0.01, &mut ddp, gradients);
        }
        ddp.check_replicas()?;
        let bits = |tensor: Tensor<1>| -> Vec<u32> {
            let values: Vec<f32> = tensor.into_data().try_into_vec().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        let (peak, planned) = (ddp.usage().peak(), ddp.memory_plan()?);
        assert_eq!(peak.parameters, planned.parameters);
        assert_eq!(peak.optimizer, planned.optimizer);
        assert_eq!(peak.gradients, planned.gradients);
        // From ZeRO-2 on, a second micro-batch adds its sums to the sums of the first micro-batch.
        let several_sums = settings.zero_stage > ZeroStage::Optimizer;
        assert!(several_sums || peak.buffers <= planned.buffers);
        Ok::<_, AnyError>(Seen {
            losses,
            norms,
            masters: ddp.parameters().into_iter().map(bits).collect(),
            states: format!("{:?}", ddp.fp8().states()),
        })
    };
    World::threads(ranks).unwrap().run(run).unwrap()
}

fn settings(number: u8, overlap_param_gather: bool) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage: ZeroStage::try_from(number).unwrap(),
        bucket_size: Some(1000),
        overlap_param_gather,
        ..DataParallelConfig::default()
    }
}

fn assert_same(
    model: &TransformerConfig,
    mesh: &ParallelConfig,
    ranks: usize,
    recipe: Fp8Recipe,
    settings: &DataParallelConfig,
) {
    let in_8_bits = DataParallelConfig {
        fp8_param_gather: true,
        ..settings.clone()
    };
    let with = train(model, mesh, ranks, recipe, &in_8_bits);
    let without = train(model, mesh, ranks, recipe, settings);
    for (rank, (with, without)) in with.iter().zip(&without).enumerate() {
        let name = format!("{recipe:?}, {settings:?}, rank {rank} of {ranks}");
        assert_eq!(with.losses, without.losses, "{name}: losses");
        assert_eq!(with.norms, without.norms, "{name}: norms");
        assert!(with.masters == without.masters, "{name}: weights");
        assert_eq!(with.states, without.states, "{name}: histories");
    }
}

#[test]
fn two_ranks_train_the_same_bits() {
    let mesh = ParallelConfig::new().with_data(2);
    for model in [small_gpt().config, small_llama().config] {
        for recipe in recipes() {
            for number in [1, 2] {
                for overlap in [false, true] {
                    assert_same(&model, &mesh, 2, recipe, &settings(number, overlap));
                }
            }
        }
    }
}

#[test]
fn four_ranks_in_two_groups_train_the_same_bits() {
    let mesh = ParallelConfig::new().with_data(4);
    for recipe in recipes() {
        let settings = DataParallelConfig {
            hsdp: Some(2),
            ..settings(1, true)
        };
        assert_same(&small_gpt().config, &mesh, 4, recipe, &settings);
    }
}

#[test]
fn tensor_ranks_train_the_same_bits() {
    let mesh = ParallelConfig::new()
        .with_tensor(2)
        .with_data(2)
        .with_sequence_parallel(true);
    for recipe in recipes() {
        for number in [1, 2] {
            assert_same(
                &small_llama().config,
                &mesh,
                4,
                recipe,
                &settings(number, true),
            );
        }
    }
}

#[test]
fn block_scales_train_the_same_bits_in_bf16() {
    let mesh = ParallelConfig::new().with_data(2);
    for recipe in [
        Fp8Recipe::Blockwise(BlockScaling::default()),
        Fp8Recipe::MxFp8,
    ] {
        let settings = DataParallelConfig {
            precision: Precision::Bf16,
            ..settings(1, true)
        };
        assert_same(&small_gpt().config, &mesh, 2, recipe, &settings);
    }
}
