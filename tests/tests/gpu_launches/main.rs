//! Tests the numbers of kernel launches of operations and layers. The counts are exact. A change that lowers a count
//! must update it here.
#![cfg(all(
    any(feature = "cuda", feature = "wgpu"),
    feature = "tracing",
    not(feature = "fusion")
))]

use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::kernels::activation::{Activation, ActivationOptions, activate};
use burn_megatron::kernels::adamw::{AdamWBuffers, AdamWStep, Decay, adamw, sum_of_squares};
use burn_megatron::kernels::attention::{
    AttentionOptions, EngineKind, Heads, flash_attention_packed, flash_attention_packed_with,
    select_engine,
};
use burn_megatron::kernels::column_sum::column_sum;
use burn_megatron::kernels::cross_entropy::{CrossEntropyOptions, cross_entropy};
use burn_megatron::kernels::dropout::{Draw, bias_dropout_add};
use burn_megatron::kernels::embedding::{SortedLookups, accumulate_rows};
use burn_megatron::kernels::gradient::{FlatGradients, Place};
use burn_megatron::kernels::norm::{NormKind, NormOptions, add_normalise, layer_norm, rms_norm};
use burn_megatron::kernels::rope::{
    Positions, RopeConfig, RopeOptions, RopeTable, Scaling, rotate,
};
use burn_megatron::kernels::softmax::{Mask, Sink, masked_softmax};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::{ModelBuilder, ParallelModule};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::{small_gpt, small_llama};

mod count;

use count::{count, device, flat, launches, launches_in};

const ROWS: usize = 8;
const WIDTH: usize = 64;

fn rows(x: &Tensor<1>) -> Tensor<2> {
    x.clone().reshape([ROWS as i32, -1])
}

#[test]
fn each_operation_launches_as_few_kernels_as_it_can() {
    let (n, w) = (ROWS * WIDTH, WIDTH);
    let norm = NormOptions::new(1e-5);
    let none = ActivationOptions::default;
    let device = device();
    let targets = Tensor::<1, Int>::zeros([ROWS], &device);
    let config = RopeConfig {
        width: 16,
        max_positions: ROWS,
        base: 1e4,
        scaling: Scaling::None,
    };
    let table = RopeTable::new(&config, &device, DType::F32).unwrap();
    let heads = Heads {
        heads: 4,
        groups: 2,
        width: 16,
    };
    let causal = AttentionOptions {
        causal: true,
        ..AttentionOptions::default()
    };
    let draw = Draw {
        probability: 0.1,
        key: 1,
        position: 0,
        first: 0,
        run: n,
        pitch: n as u64,
    };
    let counted = [
        // A backward pass over rows has a second kernel, which sums the results of the cubes.
        (
            "layer norm",
            launches(&[n, w, w], |x| {
                flat(layer_norm(
                    rows(&x[0]),
                    x[1].clone(),
                    Some(x[2].clone()),
                    norm,
                ))
            }),
            [1, 2],
        ),
        (
            "rms norm",
            launches(&[n, w], |x| flat(rms_norm(rows(&x[0]), x[1].clone(), norm))),
            [1, 2],
        ),
        (
            "add and rms norm",
            launches(&[n, n, w], |x| {
                let (weight, kind) = (x[2].clone().into(), NormKind::Rms);
                flat(add_normalise(kind, rows(&x[0]), None, rows(&x[1]), weight, None, norm).0)
            }),
            [1, 2],
        ),
        (
            "bias, add and layer norm",
            launches(&[n, n, w, w, w], |x| {
                let parameter = |i: usize| x[i].clone().into();
                let (kind, residual) = (NormKind::Layer, rows(&x[1]));
                let [x_bias, bias] = [Some(parameter(4)), Some(parameter(3))];
                let weight = parameter(2);
                flat(add_normalise(kind, rows(&x[0]), x_bias, residual, weight, bias, norm).0)
            }),
            [1, 2],
        ),
        (
            "gelu",
            launches(&[n], |x| {
                flat(activate(rows(&x[0]), None, None, Activation::Gelu, none()))
            }),
            [1, 1],
        ),
        (
            "bias and swiglu",
            launches(&[n, w], |x| {
                let bias = Some(x[1].clone());
                flat(activate(
                    rows(&x[0]),
                    bias,
                    None,
                    Activation::SwiGlu,
                    none(),
                ))
            }),
            [1, 2],
        ),
        (
            "causal softmax",
            launches(&[4 * n], |x| {
                let scores = x[0].clone().reshape([1, 4, 8, 64]);
                flat(masked_softmax(scores, 0.25, &Mask::Causal, Sink::None))
            }),
            [1, 1],
        ),
        (
            "bias, dropout and residual",
            launches(&[n, n, w], |x| {
                let (bias, residual) = (Some(x[2].clone()), Some(rows(&x[1])));
                flat(bias_dropout_add(rows(&x[0]), bias, residual, Some(draw)))
            }),
            [1, 2],
        ),
        (
            "rotary positions",
            launches(&[n], |x| {
                let tokens = x[0].clone().reshape([1, 8, 4, 16]);
                flat(rotate(
                    tokens,
                    &table,
                    &Positions::From(0),
                    &RopeOptions::default(),
                ))
            }),
            [1, 1],
        ),
        (
            "cross entropy",
            launches(&[n], |x| {
                cross_entropy(
                    rows(&x[0]),
                    targets.clone(),
                    &CrossEntropyOptions::default(),
                )
            }),
            [2, 1],
        ),
        (
            "attention",
            launches(&[2 * n], |x| {
                let qkv = x[0].clone().reshape([1, 8, 128]);
                flat(flash_attention_packed(qkv, heads, None, &causal))
            }),
            [1, 3],
        ),
    ];
    for (name, found, expected) in counted {
        assert_eq!(found, expected, "{name}: forward and backward");
    }
}

/// Uses the engine that a model selects. On CUDA this is the tensor core engine.
#[test]
fn attention_in_16_bits_launches_as_few_kernels_as_it_can() {
    let (dtype, expected) = if cfg!(feature = "cuda") {
        (DType::BF16, EngineKind::Mma)
    } else {
        (DType::F16, EngineKind::Portable)
    };
    let heads = Heads {
        heads: 4,
        groups: 2,
        width: 16,
    };
    let causal = AttentionOptions {
        causal: true,
        ..AttentionOptions::default()
    };
    let selected = select_engine(&EngineKind::ALL, &device(), dtype, (heads, 16), None).unwrap();
    assert_eq!(selected.kind, expected, "{:?}", selected.skipped);
    let found = launches_in(dtype, &[2 * ROWS * WIDTH], |x| {
        let (engine, qkv) = (selected.engine.clone(), x[0].clone().reshape([1, 8, 128]));
        flat(flash_attention_packed_with(
            engine, qkv, heads, None, &causal,
        ))
    });
    assert_eq!(found, [1, 3]);
}

#[test]
fn the_optimizer_launches_one_kernel() {
    let device = device();
    let ones = || Tensor::<1>::ones([4096], &device);
    let buffers = AdamWBuffers {
        master: ones(),
        first: ones(),
        second: ones(),
    };
    let step = AdamWStep {
        rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        gradient_scale: 1.0,
    };
    let gradient = ones();
    let (_, launched) = count(|| adamw(buffers, gradient, &Decay::All, &step, None));
    assert_eq!(launched, 1, "AdamW");
    let (_, launched) = count(|| sum_of_squares(ones()));
    // One launch fills the buffer.
    assert_eq!(launched, 1 + 2, "the sum of squares, without the fill");
}

/// Returns a model with this number of layers.
fn model(
    config: &TransformerConfig,
    kernels: &KernelChoices,
    layers: usize,
) -> ParallelModule<Transformer> {
    let config = TransformerConfig {
        layers,
        dropout: 0.0,
        attention_dropout: 0.0,
        ..config.clone()
    };
    let device = device().autodiff();
    let scope = ModelBuilder::new(&ParallelContext::single(), &device);
    let scope = scope.with_kernels(kernels).unwrap();
    config.init_with(scope).unwrap()
}

/// Returns the launches of the forward and backward pass of a training step with this number of layers.
fn of_model(config: &TransformerConfig, kernels: &KernelChoices, layers: usize) -> usize {
    let model = model(config, kernels, layers).module;
    let device = device().autodiff();
    let tokens = Tensor::<2, Int>::zeros([2, config.context], &device);
    let step = || {
        let loss = model.losses(tokens.clone(), tokens.clone()).sum();
        loss.backward()
    };
    // The first step tunes the products.
    step();
    count(step).1
}

/// Returns the launches of one additional layer.
fn of_layer(config: &TransformerConfig, choice: KernelChoice) -> usize {
    let kernels = KernelChoices::all(choice);
    of_model(config, &kernels, 3) - of_model(config, &kernels, 2)
}

/// GELU and its derivative, with the gradient of its bias, are epilogues of products. This saves three launches.
/// Adding the bias gradient to a bucket needs one of them again.
#[cfg(feature = "cuda")]
#[test]
fn an_epilogue_launches_nothing_for_an_activation() {
    let kernels = KernelChoices {
        epilogue_fusion: true.into(),
        ..KernelChoices::all(KernelChoice::Fused)
    };
    let gpt = small_gpt().config;
    let fused = KernelChoices::all(KernelChoice::Fused);
    let [found, expected] = [&kernels, &fused].map(|kernels| {
        let plain = |layers| of_model(&gpt, kernels, layers);
        let wrapped = |layers| of_wrapped_model(&gpt, kernels, layers);
        [plain(3) - plain(2), wrapped(3) - wrapped(2)]
    });
    let [plain, wrapped] = [0, 1].map(|way| expected[way] - found[way]);
    assert_eq!([plain, wrapped], [3, 2]);
}

#[test]
fn a_layer_launches_as_few_kernels_as_it_can() {
    let (gpt, llama) = (small_gpt().config, small_llama().config);
    let found = [
        of_layer(&gpt, KernelChoice::Fused),
        of_layer(&gpt, KernelChoice::Unfused),
        of_layer(&llama, KernelChoice::Fused),
        of_layer(&llama, KernelChoice::Unfused),
    ];
    // On CUDA, cuBLASLt computes products with their biases and sums, and its launches are not counted. Narrow
    // matrices have gaps between their rows on CUDA, which need copies.
    let expected = if cfg!(feature = "cuda") {
        [19, 197, 22, 201]
    } else {
        [28, 200, 26, 193]
    };
    assert_eq!(
        found, expected,
        "GPT fused and unfused, Llama fused and unfused"
    );
}

/// Returns the launches of a model under data parallelism, in a micro-batch after the first one.
fn of_wrapped_model(config: &TransformerConfig, kernels: &KernelChoices, layers: usize) -> usize {
    use burn_megatron::data_parallel::DistributedDataParallel;
    use burn_megatron::model::Tokens;

    let model = model(config, kernels, layers);
    let ddp = DistributedDataParallel::new(model, &ParallelContext::single()).unwrap();
    let device = device().autodiff();
    let ids = vec![0; 2 * config.context];
    let tokens = Tokens::new(&ids, [2, config.context], &device);
    let step = || {
        let targets = tokens.ids.clone();
        let loss = ddp.forward(&device, |model| model.losses(tokens.clone(), targets).sum());
        ddp.backward(loss)
    };
    // The first step tunes the products and fills the buckets.
    step();
    count(step).1
}

#[cfg(feature = "wgpu")]
#[test]
fn a_layer_under_data_parallelism_launches_nothing_to_accumulate_its_sums() {
    let found = [small_gpt().config, small_llama().config].map(|config| {
        let kernels = KernelChoices::all(KernelChoice::Fused);
        let of_model = |layers| of_wrapped_model(&config, &kernels, layers);
        of_model(3) - of_model(2)
    });
    // 12 launches are products, and 4 add a product to its bucket. cuBLASLt does both outside of CubeCL.
    assert_eq!(found, [32, 30], "GPT and Llama");
}

#[test]
fn a_sum_of_rows_and_the_gradient_of_an_embedding_are_two_launches() {
    let device = device();
    let x = Tensor::<2>::ones([300, 64], &device);
    let (_, launched) = count(|| column_sum(x.clone(), None));
    assert_eq!(launched, 2);
    for (ids, expected) in [((0..300).collect::<Vec<_>>(), 1), (vec![7; 300], 2)] {
        let lookups = SortedLookups::new(&ids).into();
        let target = |add| FlatGradients {
            flat: Tensor::zeros([300 * 64], &device),
            places: vec![Place { offset: 0, add }],
        };
        let added = target(true);
        let (_, launched) = count(|| accumulate_rows(x.clone(), &lookups, 0..300, added));
        assert_eq!(launched, expected, "{ids:?}");
        let written = target(false);
        let (_, launched) = count(|| accumulate_rows(x.clone(), &lookups, 0..300, written));
        assert_eq!(
            launched,
            expected + 1,
            "{ids:?}, with zeros for the other rows"
        );
    }
}

/// The launch that computes the activation of an MLP also quantizes it.
#[test]
fn an_activation_is_quantised_as_it_is_computed() {
    use burn_megatron::nn::fp8::Fp8Config;
    use burn_megatron::nn::{Activation, ParallelMlpConfig};
    let launches = |recipe: &str, save_activations| {
        let fp8 = Fp8Config {
            recipe: Some(recipe.parse().expect("a recipe")),
            save_activations,
            ..Fp8Config::default()
        };
        let scope = ModelBuilder::new(&ParallelContext::single(), &device());
        let scope = scope.with_kernels(&KernelChoices::all(KernelChoice::Fused));
        let scope = scope.expect("all are fused").with_fp8(&fp8);
        let mlp = ParallelMlpConfig::new(32, 64, Activation::GeluTanh);
        let mlp = mlp.init(&scope.expect("valid settings").child("mlp"));
        let mlp = mlp.expect("a valid layer");
        let x = Tensor::<3>::ones([1, 16, 32], &device());
        mlp.forward(x.clone());
        count(|| mlp.forward(x)).1
    };
    for (recipe, fewer) in [
        ("delayed", 1),
        ("blockwise", 1),
        ("mxfp8", 1),
        ("current", 0),
    ] {
        let [fused, plain] = [true, false].map(|saves| launches(recipe, saves));
        assert_eq!(fused + fewer, plain, "{recipe}");
    }
}

/// One launch computes the scales of all layers.
#[test]
fn a_step_in_8_bits_ends_with_one_launch() {
    use burn_megatron::nn::fp8::{Fp8, Fp8Config, Fp8LinearConfig};
    let config = Fp8Config {
        recipe: Some("delayed".parse().expect("a recipe")),
        ..Fp8Config::default()
    };
    let end = |device: &Device, counts: bool| {
        let fp8 = Fp8::new(&config).expect("valid settings");
        let paths = ["up", "down"];
        let layers = paths.map(|path| {
            // A bias would be initialized at random.
            let layer = Fp8LinearConfig::new(32, 32).with_bias(false);
            let layer = layer.init(path, &fp8, device);
            let mut layer = layer.expect("another path");
            let weight = Tensor::<2>::eye(32, device).mul_scalar(3.0);
            layer.weight = burn::module::Param::from_tensor(weight.require_grad());
            layer
        });
        let x = Tensor::<2>::ones([16, 32], device).require_grad();
        let layer = |x, layer: &burn_megatron::nn::fp8::Fp8Linear| layer.forward(x);
        for _ in 0..2 {
            layers.iter().fold(x.clone(), layer).sum().backward();
        }
        let launched = count(|| fp8.end_step_single_rank().expect("one rank")).1;
        assert!(!counts || launched == 1, "{launched} launches");
        fp8.states()
    };
    let found = end(&device().autodiff(), true);
    assert_eq!(found, end(&Device::flex().autodiff(), false));
    assert_eq!(found["down"].input.history[0], 3f32.to_bits());
}

#[test]
fn a_matrix_is_quantised_in_two_launches() {
    use burn_megatron::kernels::fp8::{self, Format, QuantizerUsage};
    // On CUDA, rows of other widths have gaps between them and are copied first.
    let x = Tensor::<2>::ones([200, 256], &device());
    let (amax, launched) = count(|| fp8::amax(x.clone()));
    assert_eq!(launched, 2);
    let options = fp8::CurrentScale::default();
    let (scale, launched) = count(|| fp8::current_scale(amax, Format::E4M3, options));
    assert_eq!(launched, 1);
    let blocks = |square| fp8::Scaling::Blocks {
        square,
        power_of_two: true,
    };
    for scaling in [
        fp8::Scaling::Tensor(scale),
        fp8::Scaling::Mx,
        blocks(false),
        blocks(true),
    ] {
        let quantized = || fp8::quantize(x.clone(), Format::E4M3, &scaling, QuantizerUsage::BOTH);
        let (quantized, launched) = count(quantized);
        assert_eq!(launched, 2, "{scaling:?}");
        let rowwise = quantized.rowwise.expect("requested");
        assert_eq!(count(|| fp8::dequantize(&rowwise)).1, 1);
        let log = fp8::empty_log(3, &device());
        let usage = QuantizerUsage::BOTH;
        let logged = || fp8::quantize_logged(x.clone(), Format::E4M3, &scaling, usage, log, 1);
        assert_eq!(count(logged).1, 2, "{scaling:?}, with a log");
    }
}
