//! Tests an MLP with a GELU epilogue against the same MLP without it, on a device that emulates the epilogues.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};

use super::case::{Case, TestTensor, elements, replicated};
use super::{autodiff, leaf, values, wave};
use crate::comm::ParallelContext;
use crate::kernel_selection::{EpilogueFusion, KernelChoice, KernelChoices};
use crate::nn::hook::{GradientSink, attach_hooks};
use crate::nn::lora::LoraConfig;
use crate::nn::*;

const HIDDEN: usize = 12;

fn config(activation: Activation, bias: bool) -> ParallelMlpConfig {
    ParallelMlpConfig::new(HIDDEN, 24, activation)
        .with_bias(bias)
        .with_init(Init::Normal(0.5))
        .with_output_init(Init::Normal(0.5))
}

#[test]
fn epilogues_on_several_ranks_are_those_on_one() {
    for sequence_parallel in [false, true] {
        let config = config(Activation::GeluTanh, true);
        let tokens = || TestTensor {
            shape: [2, 8, HIDDEN],
            placement: if sequence_parallel {
                &|n| Placement::split(1, 8, n)
            } else {
                &replicated
            },
        };
        let case = Case {
            input: tokens(),
            output: tokens(),
            build: &|builder| {
                let builder = builder.with_sequence_parallel(sequence_parallel);
                let mut mlp = config.init(&builder)?;
                mlp.epilogues = true;
                Ok(mlp)
            },
            forward: &|layer: &ParallelMlp, x| layer.forward(x),
        };
        case.check(&format!("sequence parallel {sequence_parallel}"));
    }
}

/// The sums of the gradients that the hooks of each parameter receive, and the numbers of announced gradients.
#[derive(Default)]
struct Sums(Mutex<[Vec<f64>; 4]>, Mutex<[usize; 4]>);

impl GradientSink for Sums {
    fn expect(&self, index: usize) {
        self.1.lock().unwrap()[index] += 1;
    }

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        self.1.lock().unwrap()[index] -= 1;
        let sum = &mut self.0.lock().unwrap()[index];
        let gradient = values(gradient);
        sum.resize(gradient.len(), 0.0);
        sum.iter_mut()
            .zip(gradient)
            .for_each(|(sum, own)| *sum += own);
    }
}

/// Returns the output, and the gradients of the input and the parameters.
fn run(epilogues: bool, bias: bool, hooked: bool) -> Vec<Vec<f64>> {
    let context = ParallelContext::single();
    let builder = ModelBuilder::with(&context, &autodiff(), 7, DType::F64);
    let builder = builder
        .with_kernels(&KernelChoices::all(KernelChoice::Fused))
        .unwrap();
    let mut mlp = config(Activation::GeluTanh, bias).init(&builder).unwrap();
    mlp.epilogues = epilogues;
    // The biases of the builder are 0.
    mlp.up.bias = bias.then(|| Param::from_tensor(leaf(wave([24], 0.4))));
    let sums = Arc::new(Sums::default());
    if hooked {
        mlp = attach_hooks(mlp.valid(), sums.clone());
    }
    let x = leaf(wave([2, 5, HIDDEN], 0.7));
    let y = mlp.forward(x.clone());
    let weight = Tensor::from_inner(wave([2, 5, HIDDEN], 4.0));
    let gradients = (y.clone() * weight).sum().backward();
    let of_parameters = if hooked {
        assert_eq!(
            *sums.1.lock().unwrap(),
            [0; 4],
            "each gradient arrived once"
        );
        let sums = sums.0.lock().unwrap().clone();
        sums.into_iter().filter(|sum| !sum.is_empty()).collect()
    } else {
        elements(&mlp, Some(&gradients))
    };
    let own = vec![values(y.inner()), values(x.grad(&gradients).unwrap())];
    [own, of_parameters].concat()
}

#[test]
fn an_mlp_with_epilogues_is_the_same_mlp() {
    for bias in [true, false] {
        for hooked in [false, true] {
            let [found, expected] = [true, false].map(|epilogues| run(epilogues, bias, hooked));
            assert_eq!(found.len(), if bias { 6 } else { 4 });
            for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("{which}, bias {bias}, hooks {hooked}");
                assert!(expected.iter().any(|x| x.abs() > 0.1), "{what}");
                super::assert_close(&what, found, expected);
            }
        }
    }
}

#[test]
fn what_has_no_epilogues_is_refused() {
    let choices = KernelChoices {
        epilogue_fusion: EpilogueFusion::On,
        ..KernelChoices::default()
    };
    let context = ParallelContext::single();
    let outline = |dtype| {
        let builder = ModelBuilder::with(&context, &autodiff(), 7, dtype).outline();
        builder.with_kernels(&choices).unwrap()
    };
    let gelu = config(Activation::GeluTanh, true);
    assert!(gelu.init(&outline(DType::F32)).unwrap().epilogues);
    let refused = |config: &ParallelMlpConfig, builder: ModelBuilder, reason: &str| {
        let error = config.init(&builder.child("mlp")).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        let switch = "mlp: kernels.epilogue_fusion: ";
        assert!(error.starts_with(switch), "{error}");
        assert!(error.ends_with("; or remove epilogue_fusion"), "{error}");
    };
    let exact = config(Activation::Gelu, true);
    refused(
        &exact,
        outline(DType::F32),
        "requires the activation GeluTanh, but this MLP has Gelu",
    );
    refused(
        &gelu,
        outline(DType::F64),
        "the fused epilogues require F32, F16 or BF16, got F64",
    );
    let narrow = ParallelMlpConfig {
        width: 20,
        ..gelu.clone()
    };
    refused(
        &narrow,
        outline(DType::F32),
        "is 20: expected a multiple of 8, as 16 or 24",
    );
    let builder = ModelBuilder::new(&context, &autodiff());
    let builder = builder.with_kernels(&choices).unwrap();
    refused(&gelu, builder, "the fused epilogues require a CUDA device");
    let all = LoraConfig {
        target_modules: vec!["all-linear".into()],
        ..LoraConfig::default()
    };
    let lora = outline(DType::F32).with_lora(Some(&all)).unwrap();
    refused(&gelu, lora, "it conflicts with layers with adapters (lora)");
    let recompute = RecomputeConfig::selective([RecomputeModule::Activation]);
    let recompute = outline(DType::F32).with_recompute(&recompute).unwrap();
    refused(
        &gelu,
        recompute,
        "cannot recompute \"activation\": recompute \"mlp\", or whole layers",
    );
    let unfused = KernelChoices {
        activation: KernelChoice::Unfused,
        ..choices
    };
    let builder = ModelBuilder::new(&context, &autodiff());
    let error = builder.with_kernels(&unfused).unwrap_err().to_string();
    insta::assert_snapshot!(
        error,
        @"kernels: epilogue_fusion requires fused activation, but activation is unfused (requested): set activation = \
          fused, or remove epilogue_fusion"
    );
}
