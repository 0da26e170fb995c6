//! Tests that `check_device` finds and names wrong computations of a device. The device is the CPU in f32, and also a
//! GPU in builds with GPU support.

use std::cell::Cell;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig,
};
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::activation::gelu;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::kernels::{Function, apply};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::nn::ModelBuilder;
use burn_megatron_verify::devices::{
    Batch, DeviceCheckError, DeviceOptions, DeviceReport, Oracle, ReplayMode, check_device,
};

use burn_megatron_models::Transformer;
use burn_megatron_tests::{small_gpt, without_dropout};

/// A fault of a kernel. It does not occur on the CPU in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The last column is the last column of the previous row.
    WrongKernel,
    /// The output of one row is NaN.
    NotANumber,
    /// Products are summed in bf16.
    SumsInBf16,
    /// The gradient of the weight is missing a factor.
    WrongBackward,
    /// The second of two successive calls is wrong, as when memory is reused too early. The fault occurs in every
    /// layer.
    SecondInARow,
}

thread_local! {
    /// Whether the last product of this thread was in f32.
    static AFTER_F32: Cell<bool> = const { Cell::new(false) };
}

/// Rounds f32 to the 8 bits of bf16 with Dekker's split, since not every device supports bf16.
fn in_bf16(x: Tensor<2>) -> Tensor<2> {
    let large = x.clone() * 65537.0;
    large.clone() - (large - x)
}

/// Computes `x w`, with a fault in f32.
#[derive(Clone, Copy, Debug)]
struct Product(Option<Fault>);

impl Function for Product {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let [x, w] = [0, 1].map(|i| Tensor::<2>::from_dispatch(inputs[i].clone()));
        let fault = self.0.filter(|_| x.dtype() != DType::F64);
        let [rows, columns] = [x.dims()[0], w.dims()[1]];
        let second = AFTER_F32.replace(x.dtype() != DType::F64);
        let y = match fault {
            Some(Fault::SumsInBf16) => {
                let one = |k: usize| x.clone().narrow(1, k, 1).matmul(w.clone().narrow(0, k, 1));
                (1..w.dims()[0]).fold(one(0), |sum, k| in_bf16(sum + one(k)))
            }
            _ => x.matmul(w),
        };
        let y = match fault {
            Some(Fault::WrongKernel) => {
                let last = y.clone().slice([0..rows - 1, columns - 1..columns]);
                y.slice_assign([1..rows, columns - 1..columns], last)
            }
            Some(Fault::SecondInARow) if second => y * 1.5,
            Some(Fault::NotANumber) => {
                let row = y.clone().narrow(0, 0, 1);
                y.slice_assign([0..1, 0..columns], row * f32::NAN)
            }
            _ => y,
        };
        (y.into_dispatch(), inputs)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let [x, w] = [0, 1].map(|i| Tensor::<2>::from_dispatch(saved[i].clone()));
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let is_wrong = self.0 == Some(Fault::WrongBackward) && x.dtype() != DType::F64;
        let factor = if is_wrong { 0.5 } else { 1.0 };
        let of_weight = x.transpose().matmul(gradient.clone()) * factor;
        vec![
            needed[0].then(|| gradient.matmul(w.transpose()).into_dispatch()),
            needed[1].then(|| of_weight.into_dispatch()),
        ]
    }
}

/// A layer with a custom kernel.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    weight: Param<Tensor<2>>,
    out: Linear,
    dropout: Dropout,
    #[module(skip)]
    fault: Option<Fault>,
}

impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let normed = self.norm.forward(x.clone()).into_dispatch();
        let up: Tensor<2> = apply(
            vec![normed, self.weight.val().into_dispatch()],
            Product(self.fault),
        );
        x + self.dropout.forward(self.out.forward(up.tanh()))
    }
}

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Layer>,
    batch_norm: BatchNorm,
    head: Linear,
}

const WIDTH: usize = 64;
const TOKENS: usize = 11;

impl Net {
    fn new(fault: Option<Fault>) -> Self {
        let device = Device::flex();
        let layer = |number: usize| Layer {
            norm: LayerNormConfig::new(WIDTH).init(&device),
            weight: Param::from_tensor(Tensor::random(
                [WIDTH, WIDTH],
                Distribution::Normal(0.0, 0.2),
                &device,
            )),
            out: LinearConfig::new(WIDTH, WIDTH).init(&device),
            dropout: DropoutConfig::new(0.5).init(),
            fault: fault.filter(|fault| number == 1 || *fault == Fault::SecondInARow),
        };
        Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(&device),
            layers: (0..3).map(layer).collect(),
            batch_norm: BatchNormConfig::new(WIDTH).init(&device),
            head: LinearConfig::new(WIDTH, TOKENS).init(&device),
        }
    }

    fn loss(&self, (tokens, targets): &(Tensor<2, Int>, Tensor<1, Int>)) -> Tensor<1> {
        let [rows, seq] = tokens.dims();
        let x = self.embedding.forward(tokens.clone());
        let x = x.reshape([rows * seq, WIDTH]);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        let x = self
            .batch_norm
            .forward(x.unsqueeze_dim::<3>(2))
            .squeeze_dim::<2>(2);
        let logits = log_softmax(self.head.forward(x), 1);
        let targets = targets.clone().unsqueeze_dim::<2>(1);
        logits.gather(1, targets).mean().neg()
    }
}

fn batch() -> (Tensor<2, Int>, Tensor<1, Int>) {
    let device = Device::flex();
    let numbers = |factor: i64| {
        let of = |at| (at * factor + 3) % TOKENS as i64;
        (0..24).map(of).collect::<Vec<_>>()
    };
    let tokens = Tensor::<1, Int>::from_ints(&numbers(7)[..], &device).reshape([3, 8]);
    (tokens, Tensor::from_ints(&numbers(5)[..], &device))
}

fn devices() -> Vec<Device> {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    return vec![Device::flex(), burn_megatron_tests::gpu()];
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    vec![Device::flex()]
}

fn check(fault: Option<Fault>) -> DeviceReport {
    let options = DeviceOptions::default();
    let report = check_device(&Net::new(fault), &batch(), Net::loss, &devices(), &options);
    let report = report.unwrap();
    println!("{fault:?}\n{report}");
    report
}

#[test]
fn a_module_passes_without_a_fault() {
    let report = check(None);
    assert!(report.passes(), "{report}");
    for run in &report.runs {
        assert_eq!(run.not_observed, None);
        assert!(run.operations > 20);
        // The embedding, the head, the norm of the batch, and 5 gradients per layer.
        assert_eq!(run.gradients.len(), 1 + 2 + 2 + 3 * 5);
    }
}

#[test]
fn a_wrong_kernel_and_a_layer_that_is_not_a_number_are_named() {
    for fault in [Fault::WrongKernel, Fault::NotANumber, Fault::SumsInBf16] {
        for run in check(Some(fault)).runs {
            let first = run.first.as_ref().unwrap();
            assert_eq!(
                (&first.module[..], first.mode),
                ("layers.1", ReplayMode::Single)
            );
            assert_eq!(first.operation, "Product");
            assert_eq!(first.shape, [24, WIDTH]);
            assert!(!run.passes() && first.relative > 5.0 * first.bound, "{run}");
        }
    }
}

#[test]
fn what_is_wrong_only_in_a_row_is_named_too() {
    for run in check(Some(Fault::SecondInARow)).runs {
        let first = run.first.as_ref().unwrap();
        assert_eq!(
            (&first.module[..], first.mode),
            ("layers.1", ReplayMode::Sequence)
        );
        assert_eq!(first.operation, "Product", "{run}");
    }
}

/// The forward pass is correct.
#[test]
fn a_wrong_backward_is_named_by_its_gradient() {
    for run in check(Some(Fault::WrongBackward)).runs {
        assert_eq!(run.first, None);
        let wrong: Vec<_> = run.wrong_gradients().map(|it| &it.path[..]).collect();
        assert_eq!(wrong, ["layers.1.weight"]);
        assert_eq!(run.first_wrong_gradient().unwrap().path, "layers.1.weight");
    }
}

/// The parameter is also NaN on the CPU.
#[test]
fn a_parameter_that_is_not_a_number_is_named() {
    let mut net = Net::new(None);
    let weight = net.layers[2].out.weight.val();
    let wrong = Tensor::full([1, 1], f32::NAN, &weight.device());
    net.layers[2].out.weight = Param::from_tensor(weight.slice_assign([3..4, 5..6], wrong));
    let options = DeviceOptions::default();
    let report = check_device(&net, &batch(), Net::loss, &devices(), &options).unwrap();
    for run in &report.runs {
        let first = run.first.as_ref().unwrap();
        assert_eq!(first.module, "layers.2.out", "{report}");
        assert!(first.reason.as_ref().unwrap().contains("not a number"));
    }
}

/// On CubeCL devices, the backward pass of GELU in Burn 0.22 uses the tanh approximation. The forward pass is exact.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
#[test]
fn the_backward_of_gelu_on_a_gpu_is_that_of_its_approximation() {
    let options = DeviceOptions::default();
    // The layer has no products, since their rounding is larger on CUDA.
    let layer = LayerNormConfig::new(6).init(&Device::flex());
    let loss = |layer: &LayerNorm, x: &Option<Tensor<2>>| {
        let y = layer.forward(x.clone().unwrap());
        gelu(y * 2.0).sum()
    };
    let report = check_device(&layer, &input(), loss, &devices(), &options).unwrap();
    let [cpu, gpu] = &report.runs[..] else {
        panic!("{report}")
    };
    assert!(cpu.passes() && gpu.first.is_none(), "{report}");
    let worst = gpu
        .wrong_gradients()
        .map(|it| it.relative)
        .fold(0.0, f64::max);
    assert!((1e-5..1e-2).contains(&worst), "{report}");
}

/// A softmax of scores, with a weight that is used twice.
#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
    #[module(skip)]
    reads_values: bool,
    #[module(skip)]
    draws: bool,
}

impl Tied {
    fn new() -> Self {
        let first = LinearConfig::new(6, 6).init(&Device::flex());
        Self {
            second: first.clone(),
            first,
            reads_values: false,
            draws: false,
        }
    }

    fn loss(&self, x: &Option<Tensor<2>>) -> Tensor<1> {
        let x = x.clone().unwrap();
        let scale = match self.reads_values {
            true => x.clone().sum().into_scalar::<f32>(),
            false => 1.0,
        };
        let x = match self.draws {
            true => x.random_like(Distribution::Default) + x,
            false => x,
        };
        let y = self.second.forward(softmax(self.first.forward(x), 1));
        (y.clone() * y).sum() * scale
    }
}

fn input() -> Option<Tensor<2>> {
    let values = Tensor::<1, Int>::arange(0..24, &Device::flex()).float();
    Some((values * 0.1).sin().reshape([4, 6]))
}

/// The gradient includes both uses, and is listed once.
#[test]
fn shared_parameters_are_one() {
    let options = DeviceOptions::default();
    let report = check_device(&Tied::new(), &input(), Tied::loss, &devices(), &options);
    let report = report.unwrap();
    assert!(report.passes(), "{report}");
    let paths = |at: usize| {
        let gradients = report.runs[at].gradients.iter();
        gradients.map(|it| it.path.clone()).collect::<Vec<_>>()
    };
    assert_eq!(paths(0), ["first.weight", "first.bias"]);
}

/// Each fused function is one operation, up to the loss, which keeps the targets.
#[test]
fn a_transformer_of_this_library_passes() {
    let config = without_dropout(small_gpt()).config;
    let model = World::threads(1).unwrap().run(|rank| {
        let groups = ParallelContext::new(&ParallelConfig::new(), &rank)?;
        let builder = ModelBuilder::with(&groups, &Device::flex(), 3, DType::F32);
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(config.init_with(builder)?.module)
    });
    let model = model.unwrap().remove(0);
    let tokens = Tensor::<1, Int>::arange(0..16, &Device::flex()).reshape([2, 8]);
    let batch = (tokens.clone(), tokens.add_scalar(1));
    let loss = |model: &Transformer, (tokens, targets): &(Tensor<2, Int>, Tensor<2, Int>)| {
        model
            .losses(Tokens::from(tokens.clone()), targets.clone())
            .mean()
    };
    let options = DeviceOptions::default();
    let report = check_device(&model, &batch, loss, &devices(), &options).unwrap();
    println!("{report}");
    assert!(report.passes(), "{report}");
    for run in &report.runs {
        let rest = run.not_observed.as_ref().unwrap();
        assert!(rest.contains("cross_entropy"), "{rest}");
        assert!(run.operations > 25 && run.gradients.len() > 10, "{report}");
    }
}

/// Values that cannot be recorded are reported, and the rest is compared.
#[test]
fn a_forward_that_reads_values_is_compared_without_its_operations() {
    let mut model = Tied::new();
    model.reads_values = true;
    let options = DeviceOptions::default();
    let report = check_device(&model, &input(), Tied::loss, &devices(), &options).unwrap();
    assert!(report.passes(), "{report}");
    for run in &report.runs {
        assert!(run.not_observed.is_some() && run.gradients.len() == 2);
    }
}

#[test]
fn what_cannot_be_compared_is_an_error() {
    let options = DeviceOptions::default();
    let mut model = Tied::new();
    model.draws = true;
    let check = |model: &Tied, options: &DeviceOptions| {
        check_device(model, &input(), Tied::loss, &[Device::flex()], options)
    };
    let error = check(&model, &options).unwrap_err();
    assert!(matches!(error, DeviceCheckError::Random { .. }), "{error}");
    let margin = DeviceOptions {
        margin: 0.0,
        ..options.clone()
    };
    assert!(matches!(
        check(&Tied::new(), &margin),
        Err(DeviceCheckError::Margin(_))
    ));

    // A module without parameters that creates tensors in f32.
    let f32_ones = |_: &Dropout, x: &Tensor<2>| {
        let ones = Tensor::<2>::ones(x.dims(), (&x.device(), DType::F32));
        (x.clone() + ones).sum()
    };
    let none = DropoutConfig::new(0.5).init();
    let x = input().unwrap();
    let error = check_device(&none, &x, f32_ones, &devices(), &options).unwrap_err();
    assert!(error.to_string().contains("Oracle::F32"), "{error}");
    let options = DeviceOptions {
        oracle: Oracle::F32,
        ..options
    };
    let report = check_device(&none, &x, f32_ones, &devices(), &options).unwrap();
    assert!(
        report.passes() && report.runs[0].gradients.is_empty(),
        "{report}"
    );
    // The model is unchanged.
    assert_eq!(x.on(&Device::flex(), None).dtype(), DType::F32);
}

/// Two successive norms whose output cancels. The mean of a normalized row is zero in exact arithmetic, and so is the
/// loss.
#[derive(Module, Debug)]
struct Norms {
    first: LayerNorm,
    second: LayerNorm,
}

#[test]
fn a_sum_that_is_zero_in_exact_arithmetic_passes_and_a_wrong_one_does_not() {
    let norm = || LayerNormConfig::new(64).init(&Device::flex());
    let norms = Norms {
        first: norm(),
        second: norm(),
    };
    let values = Tensor::<1, Int>::arange(0..8 * 64, &Device::flex()).float();
    let x = Some((values * 0.37).sin().reshape([8, 64]));
    let check = |error: f64| {
        let loss = |norms: &Norms, x: &Option<Tensor<2>>| {
            let y = norms.first.forward(x.clone().unwrap());
            let y = norms.second.forward(y);
            // An error on the device only.
            let error = if y.dtype() == DType::F64 { 0.0 } else { error };
            y.sum() + error
        };
        let options = DeviceOptions::default();
        check_device(&norms, &x, loss, &devices(), &options).unwrap()
    };
    let report = check(0.0);
    assert!(
        report.runs.iter().all(|run| run.loss[1].abs() < 1e-9),
        "{report}"
    );
    assert!(report.passes(), "{report}");
    for run in &check(1e-2).runs {
        assert!(run.loss_difference > 2.0 * run.bound, "{run}");
    }
}
