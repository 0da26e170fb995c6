//! Tests that a GPU (CUDA or wgpu) computes the same results as the CPU.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

/// On CUDA these tests are in this binary, so that they also run on the emulated GPU. On wgpu they are in `main`.
#[cfg(feature = "cuda")]
mod devices;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::collective::{self, Comm};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::kernel_selection::{AttentionChoice, KernelChoice, KernelChoices};
use burn_megatron::kernels::philox::Stream;
use burn_megatron::kernels::{Function, apply};
use burn_megatron::mesh::{AxisRank, ParallelConfig};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, QkClipConfig, global_norm};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::{gpu, small_gpt, small_llama, without_dropout};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};

type RankError = Box<dyn std::error::Error + Send + Sync>;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

/// Returns the largest difference divided by the largest expected value.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // NaN never passes.
    let apart = apart.fold(0.0f32, |max, x| if x <= max { max } else { x });
    match apart {
        0.0 => 0.0,
        apart => apart / largest,
    }
}

/// The tolerance of f32 sums in a different order.
const CLOSE: f32 = 1e-4;

/// The tolerance after Burn's products, which round their factors to 10 bits (TF32) on CUDA.
const PRODUCTS: f32 = if cfg!(feature = "cuda") { 5e-3 } else { CLOSE };

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let apart = difference(found, expected);
    assert!(apart < tolerance, "{what}: off by {apart:e}");
}

/// Computes `tanh(x w)` and saves its output.
#[derive(Debug)]
struct TanhProduct;

impl Function for TanhProduct {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let [x, w] = [&inputs[0], &inputs[1]].map(|t| Tensor::<2>::from_dispatch(t.clone()));
        let y = x.matmul(w).tanh();
        let saved = inputs.into_iter().chain([y.clone().into_dispatch()]);
        (y.into_dispatch(), saved.collect())
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let [x, w, y] = [0, 1, 2].map(|i| Tensor::<2>::from_dispatch(saved[i].clone()));
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let inside = gradient.clone() - gradient * y.clone() * y;
        vec![
            needed[0].then(|| inside.clone().matmul(w.transpose()).into_dispatch()),
            needed[1].then(|| x.transpose().matmul(inside).into_dispatch()),
        ]
    }
}

/// Returns the output of [`TanhProduct`], and the gradients of its inputs.
fn tanh_product(device: &Device) -> [Vec<f32>; 3] {
    let device = device.clone().autodiff();
    let wave = |shape: [usize; 2], phase: f32| {
        let values: Vec<f32> = (0..shape[0] * shape[1])
            .map(|i| (phase + 0.7 * i as f32).sin())
            .collect();
        Tensor::<2>::from_data(TensorData::new(values, shape), &device)
    };
    let (x, w) = (
        wave([5, 33], 0.0).require_grad(),
        wave([33, 7], 1.0).require_grad(),
    );
    let y: Tensor<2> = apply(
        vec![x.clone().into_dispatch(), w.clone().into_dispatch()],
        TanhProduct,
    );
    let gradients = (y.clone() * wave([5, 7], 2.0)).sum().backward();
    let [dx, dw] = [&x, &w].map(|input| values(input.grad(&gradients).unwrap()));
    [values(y.inner()), dx, dw]
}

#[test]
fn a_function_with_its_own_backward() {
    let expected = tanh_product(&Device::flex());
    for (i, (found, expected)) in tanh_product(&gpu()).iter().zip(&expected).enumerate() {
        assert!(expected.iter().any(|x| x.abs() > 0.1));
        assert_close(["y", "dx", "dw"][i], found, expected, PRODUCTS);
    }
}

/// Returns `1, 2, ..` on rank 0, and a hundred times these numbers on rank 1. f32 represents all sums exactly.
fn counted(shape: [usize; 2], rank: usize, device: &Device) -> Tensor<2> {
    let count = (1..=shape[0] * shape[1]).map(|i| i as f32 * [1.0, 100.0][rank]);
    Tensor::from_data(TensorData::new(count.collect::<Vec<_>>(), shape), device)
}

type Collective = fn(Tensor<2>, &Comm) -> Tensor<2>;

/// Returns the result of each of two ranks, and the gradient of its input.
fn both_ways(collective: Collective, device: &Device) -> Vec<[Vec<f32>; 2]> {
    let device = device.clone().autodiff();
    let run = |rank: burn_megatron::comm::Rank| {
        let comm = rank.communicator();
        let x = counted([2, 4], comm.rank(), &device).require_grad();
        let y = collective(x.clone(), &comm);
        let weights = counted(y.dims(), comm.rank(), &device);
        let gradients = (y.clone() * weights).sum().backward();
        Ok::<_, RankError>([values(y.inner()), values(x.grad(&gradients).unwrap())])
    };
    World::threads(2).unwrap().run(run).unwrap()
}

#[test]
fn collectives_of_two_ranks_are_exact() {
    let device = gpu();
    let collectives: [(&str, Collective); 7] = [
        ("copy", collective::copy),
        ("reduce", collective::reduce),
        ("split", |x, comm| collective::split(x, 1, comm)),
        ("gather", |x, comm| collective::gather(x, 1, comm)),
        ("gather_sequence", |x, comm| {
            collective::gather_sequence(x, 1, comm)
        }),
        ("reduce_scatter_sequence", |x, comm| {
            collective::reduce_scatter_sequence(x, 1, comm)
        }),
        ("all_to_all", |x, comm| {
            collective::all_to_all(x, vec![1, 1], vec![1, 1], comm)
        }),
    ];
    for (name, collective) in collectives {
        let found = both_ways(collective, &device);
        assert_eq!(found, both_ways(collective, &Device::flex()), "{name}");
    }
    let sums = both_ways(collective::all_reduce, &device);
    let expected: Vec<f32> = (1..=8).map(|i| 101.0 * i as f32).collect();
    assert_eq!(sums, vec![[expected.clone(), expected]; 2]);
}

#[derive(Default)]
struct Weights(Vec<Vec<f32>>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(values(param.base()));
    }
}

fn weights<M: Module>(module: &M) -> Vec<Vec<f32>> {
    let mut weights = Weights::default();
    module.visit(&mut weights);
    weights.0
}

fn build(
    config: &TransformerConfig,
    groups: &ParallelContext,
    device: &Device,
    kernels: &KernelChoices,
) -> Result<DistributedDataParallel<Transformer>, RankError> {
    let scope = ModelBuilder::with(groups, device, 1, DType::F32).with_kernels(kernels)?;
    let model = config.init_with(scope)?;
    Ok(DistributedDataParallel::new(model, groups)?)
}

#[test]
fn initial_weights_are_bit_equal() {
    let weights = |device: &Device| {
        let (context, kernels) = (ParallelContext::single(), KernelChoices::default());
        let ddp = build(&small_gpt().config, &context, device, &kernels).unwrap();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        weights(&ddp.to_module())
            .into_iter()
            .map(bits)
            .collect::<Vec<_>>()
    };
    assert_eq!(weights(&gpu()), weights(&Device::flex()));
}

/// The results of a training step, collected from the ranks.
struct Step {
    loss: f32,
    norm: f64,
    paths: Vec<String>,
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<f32>>,
}

const SAMPLES: usize = 2;

/// Returns random tokens below `below`, one row per sample.
fn tokens(key: u64, config: &TransformerConfig, device: &Device) -> Tensor<2, Int> {
    let shape = [SAMPLES, config.context];
    let mut tokens = vec![];
    Stream::new(key, 0).words(0, shape[0] * shape[1], |_, word| {
        tokens.push((u64::from(word) % config.vocabulary as u64) as i32);
    });
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

fn step(
    config: &TransformerConfig,
    device: &Device,
    tensor: usize,
    sequence_parallel: bool,
    kernels: &KernelChoices,
) -> Step {
    let mesh = ParallelConfig::new()
        .with_tensor(tensor)
        .with_sequence_parallel(sequence_parallel);
    let run = |rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let mut ddp = build(config, &groups, device, kernels)?;
        let training = device.clone().autodiff();
        let (inputs, targets) = (tokens(5, config, &training), tokens(6, config, &training));
        let loss = ddp.forward(&training, |model| model.losses(inputs, targets).sum());
        let sum = values(loss.clone().inner())[0];
        ddp.backward(loss);
        let count = (SAMPLES * config.context) as u64;
        let gradients = ddp.reduce(count)?;
        let norm = global_norm(&gradients, &ddp)?;
        let parts = ddp.full_gradients(&gradients).into_iter().map(values);
        let parts = parts.collect::<Vec<_>>();
        let mut optimizer = ParallelAdamW::new(
            &AdamWConfig {
                epsilon: 1e-3,
                ..AdamWConfig::default()
            },
            &ddp,
        )?;
        optimizer.step(0.1, &mut ddp, gradients);
        let table = ddp.table().clone();
        Ok::<_, RankError>((
            sum / count as f32,
            norm,
            parts,
            weights(&ddp.to_module()),
            table,
        ))
    };
    let ranks = World::threads(tensor).unwrap().run(run).unwrap();
    let table = ranks[0].4.clone();
    let assembled = |parts: &dyn Fn(usize, usize) -> Vec<f32>| {
        let one = |(i, entry): (usize, &burn_megatron::nn::ParameterEntry)| {
            let parts: Vec<_> = (0..tensor).map(|rank| parts(rank, i)).collect();
            let place = |index| AxisRank {
                index,
                size: tensor,
            };
            let parts = parts.iter().enumerate();
            let parts = parts.map(|(rank, part)| (move |_| place(rank), &part[..]));
            entry.placements.assemble(&entry.shape, parts)
        };
        table
            .entries()
            .iter()
            .enumerate()
            .map(one)
            .collect::<Vec<_>>()
    };
    Step {
        loss: ranks[0].0,
        norm: ranks[0].1,
        paths: table
            .entries()
            .iter()
            .map(|entry| entry.path.clone())
            .collect(),
        gradients: assembled(&|rank, i| ranks[rank].2[i].clone()),
        weights: assembled(&|rank, i| ranks[rank].3[i].clone()),
    }
}

#[track_caller]
fn assert_steps_alike(
    config: &TransformerConfig,
    tensor: usize,
    sequence_parallel: bool,
    tolerance: f32,
) {
    assert_steps_alike_with(
        &KernelChoices::default(),
        config,
        tensor,
        sequence_parallel,
        tolerance,
    );
}

/// Compares steps like [`assert_steps_alike`], with these kernels on the GPU.
#[track_caller]
fn assert_steps_alike_with(
    kernels: &KernelChoices,
    config: &TransformerConfig,
    tensor: usize,
    sequence_parallel: bool,
    tolerance: f32,
) {
    let assert_close = |what: &str, found: &[f32], expected: &[f32]| {
        assert_close(what, found, expected, tolerance)
    };
    let expected = step(config, &Device::flex(), 1, false, &KernelChoices::default());
    let found = step(config, &gpu(), tensor, sequence_parallel, kernels);
    assert_close("loss", &[found.loss], &[expected.loss]);
    assert_close("norm", &[found.norm as f32], &[expected.norm as f32]);
    for (i, path) in expected.paths.iter().enumerate() {
        assert_close(
            &format!("gradient of {path}"),
            &found.gradients[i],
            &expected.gradients[i],
        );
        assert_close(path, &found.weights[i], &expected.weights[i]);
    }
}

/// Returns a GPT with fused attention.
fn gpt() -> TransformerConfig {
    TransformerConfig {
        attention_dropout: 0.0,
        ..small_gpt().config
    }
}

/// cuBLASLt computes GELU, its derivative and the gradient of its bias in f32, and rounds them once.
#[cfg(feature = "cuda")]
#[test]
fn a_step_with_gelu_as_an_epilogue() {
    let kernels = KernelChoices {
        epilogue_fusion: true.into(),
        ..KernelChoices::default()
    };
    for (tensor, sequence_parallel) in [(1, false), (2, true)] {
        assert_steps_alike_with(&kernels, &gpt(), tensor, sequence_parallel, CLOSE);
    }
}

#[test]
fn a_step_of_a_gpt_on_one_rank() {
    assert_steps_alike(&gpt(), 1, false, CLOSE);
}

#[test]
fn a_step_of_a_gpt_over_the_tensor_axis() {
    assert_steps_alike(&gpt(), 2, false, CLOSE);
}

#[test]
fn a_step_of_a_gpt_with_sequence_parallelism() {
    assert_steps_alike(&gpt(), 2, true, CLOSE);
}

/// Dropout of the probabilities: attention consists of Burn's operations.
#[test]
fn a_step_of_a_gpt_whose_attention_is_not_fused() {
    assert_steps_alike(&small_gpt().config, 2, false, PRODUCTS);
}

#[test]
fn a_step_of_a_llama_with_sequence_parallelism() {
    assert_steps_alike(&small_llama().config, 2, true, CLOSE);
}

/// Trains a Llama for three steps. Returns the largest logits and the parameters.
fn clipped(device: &Device, attention: KernelChoice) -> (Vec<f32>, Vec<Vec<f32>>) {
    let subject = without_dropout(small_llama());
    let config = TrainConfig {
        steps: 3,
        micro_batch_size: 2,
        global_batch_size: 4,
        warmup_steps: 0,
        learning_rate: 1e-2,
        optimizer: AdamWConfig {
            epsilon: 1e-3,
            ..AdamWConfig::default()
        }
        .into(),
        qk_clip: Some(QkClipConfig {
            threshold: 1e-3,
            alpha: 0.3,
        }),
        ..TrainConfig::default()
    };
    let kernels = KernelChoices {
        attention: AttentionChoice::Form(attention),
        ..KernelChoices::default()
    };
    let groups = ParallelContext::single();
    let scope = ModelBuilder::new(&groups, device);
    let model = subject
        .config
        .init_with(scope.with_kernels(&kernels).unwrap());
    let mut trainer = Trainer::new(model.unwrap(), &groups, device, &config).unwrap();
    let mut step = || trainer.step(&subject, &mut NoopObserver).unwrap();
    let logits = [(); 3].map(|()| step().max_attention_logit.unwrap() as f32);
    let parameters = trainer.model().parameters().into_iter().map(values);
    (logits.to_vec(), parameters.collect())
}

#[test]
fn attention_logits_are_measured_and_clipped() {
    for attention in [KernelChoice::Fused, KernelChoice::Unfused] {
        let (logits, expected) = clipped(&Device::flex(), attention);
        let (found, parameters) = clipped(&gpu(), attention);
        for (found, expected) in found.iter().zip(&logits) {
            assert_close("the largest logit", &[*found], &[*expected], PRODUCTS);
        }
        for (found, expected) in parameters.iter().zip(&expected) {
            assert_close("a parameter", found, expected, PRODUCTS);
        }
    }
}
