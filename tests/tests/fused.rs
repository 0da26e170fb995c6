//! Tests that a model computes the same with and without fused kernels.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices, Operation};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, global_norm};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::tolerance::CLOSE;
use burn_megatron_tests::{small_gpt, small_llama, without_dropout};

const SAMPLES: usize = 3;
const STEPS: usize = 4;

/// The tolerance in f64, relative to the largest value: 64 ulp. Differences of four ulp occur.
const IN_F64: f64 = 64.0 * f64::EPSILON;

/// The results of training.
#[derive(Debug, Default)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// The gradients of the first step.
    gradients: Vec<Vec<f64>>,
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().unwrap()
}

/// Trains on two micro-batches, so that weight gradients are accumulated.
fn train(config: &TransformerConfig, choices: &KernelChoices, dtype: DType) -> Trained {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let scope = ModelBuilder::with(&groups, &device, 3, dtype);
    let model = config
        .init_with(scope.with_kernels(choices).unwrap())
        .unwrap();
    let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
    // Burn's AdamW rounds its settings to f32. These numbers are exact in f32.
    let settings = AdamWConfig {
        beta1: 0.5,
        beta2: 0.5,
        epsilon: 1.0 / 131_072.0,
        weight_decay: 0.125,
        ..AdamWConfig::default()
    };
    let mut optimizer = ParallelAdamW::new(&settings, &ddp).unwrap();
    let mut trained = Trained::default();
    for step in 0..STEPS {
        let mut sum = 0.0;
        for micro_batch in 0..2 {
            ddp.position()
                .set(step as u64, (micro_batch * SAMPLES) as u64);
            let tokens = |key: usize| {
                let count = SAMPLES * config.context;
                let token = |i: usize| (i * i * 7 + key * 13 + step + micro_batch * 5) as i64;
                let token = |i| token(i) % config.vocabulary as i64;
                let data: Vec<_> = (0..count).map(token).collect();
                let data = TensorData::new(data, [SAMPLES, config.context]);
                Tensor::<2, Int>::from_data(data, &device.clone().autodiff())
            };
            let loss = ddp.forward(&device, |model| model.losses(tokens(1), tokens(2)).sum());
            sum += values(loss.clone().inner())[0];
            ddp.backward(loss);
        }
        let mut gradients = ddp.reduce((2 * SAMPLES * config.context) as u64).unwrap();
        let norm = global_norm(&gradients, &ddp).unwrap();
        trained.losses.push(sum);
        trained.norms.push(norm);
        if step == 0 {
            trained.gradients = ddp
                .full_gradients(&gradients)
                .into_iter()
                .map(values)
                .collect();
        }
        gradients.scale(0.5 / norm);
        optimizer.step(0.01, &mut ddp, gradients);
    }
    trained
}

#[track_caller]
fn assert_same(what: &str, a: &Trained, b: &Trained, tolerance: f64) {
    let near = |what: &str, a: &[f64], b: &[f64]| {
        let largest = b.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs() / largest);
        println!("{what}: {:.1e} apart", apart.fold(0.0, f64::max));
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= tolerance * largest, "{what}: {a} and {b}");
        }
    };
    near(&format!("{what}: losses"), &a.losses, &b.losses);
    near(&format!("{what}: norms"), &a.norms, &b.norms);
    assert_eq!(a.gradients.len(), b.gradients.len());
    for (i, (a, b)) in a.gradients.iter().zip(&b.gradients).enumerate() {
        near(&format!("{what}: gradient {i}"), a, b);
    }
}

fn models() -> [(&'static str, TransformerConfig); 4] {
    let smoothed = TransformerConfig {
        label_smoothing: 0.1,
        z_loss: 1e-2,
        norm_zero_centered: true,
        ..without_dropout(small_llama()).config
    };
    [
        ("GPT with dropout", small_gpt().config),
        ("GPT", without_dropout(small_gpt()).config),
        ("Llama with dropout", small_llama().config),
        ("Llama with other losses and norms", smoothed),
    ]
}

#[test]
fn all_kernels_together_change_nothing() {
    let (fused, unfused) = (
        KernelChoices::default(),
        KernelChoices::all(KernelChoice::Unfused),
    );
    for (name, config) in models() {
        for (dtype, tolerance) in [(DType::F64, IN_F64), (DType::F32, CLOSE)] {
            let [a, b] = [&fused, &unfused].map(|choices| train(&config, choices, dtype));
            assert!(a.losses.iter().all(|loss| loss.is_finite()));
            assert_same(&format!("{name} in {dtype:?}"), &a, &b, tolerance);
        }
    }
}

#[test]
fn each_kernel_alone_changes_nothing() {
    let unfused = KernelChoices::all(KernelChoice::Unfused);
    for (name, config) in models() {
        let expected = train(&config, &unfused, DType::F64);
        for operation in Operation::ALL.iter().copied() {
            let mut choices = unfused.clone();
            choices.choose(operation, KernelChoice::Auto);
            let found = train(&config, &choices, DType::F64);
            assert_same(
                &format!("{name}, {}", operation.name()),
                &found,
                &expected,
                IN_F64,
            );
        }
    }
}

#[test]
fn a_requested_kernel_that_the_model_cannot_use_is_an_error() {
    let scope = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let scope = scope
        .with_kernels(&KernelChoices::all(KernelChoice::Fused))
        .unwrap();
    let error = small_gpt().config.init_with(scope).unwrap_err();
    insta::assert_snapshot!(
        error,
        @"kernels: attention cannot be fused: the attention's dropout acts on its probabilities; \
          use auto or unfused"
    );
}
