//! The benchmarked operations, in the order of the tables.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron::kernel_selection::Operation;
use burn_megatron::kernels::activation::{Activation, ActivationOptions};
use burn_megatron::kernels::adamw::{AdamWBuffers, AdamWStep, Decay};
use burn_megatron::kernels::attention::{
    AttentionOptions, Heads, composed, flash_attention_packed_with,
};
use burn_megatron::kernels::cross_entropy::CrossEntropyOptions;
use burn_megatron::kernels::dropout::Draw;
use burn_megatron::kernels::norm::{NormKind, NormOptions};
use burn_megatron::kernels::rope::{Pairing, Positions, RopeOptions};
use burn_megatron::kernels::softmax::{Mask, Sink};

use super::{Inputs, KernelBenchmark, OperationFn, Shape};

const NORM: NormOptions = NormOptions {
    epsilon: 1e-5,
    zero_centered: false,
};

/// Returns two forms of a call to an operation: its kernel and its composition.
macro_rules! forms {
    ($module:ident::$name:ident, $inputs:ident => $call:expr) => {{
        fn fused($inputs: &mut Inputs) -> Tensor<1> {
            use burn_megatron::kernels::$module::$name;
            $call
        }
        fn composed($inputs: &mut Inputs) -> Tensor<1> {
            use burn_megatron::kernels::$module::composed::$name;
            $call
        }
        [fused as OperationFn, composed as OperationFn]
    }};
}

/// Returns a benchmark that supports every size, with a single leaf of `rows * width` elements.
fn subject(name: &'static str, operation: Operation, forms: [OperationFn; 2]) -> KernelBenchmark {
    let [fused, composed] = forms;
    KernelBenchmark {
        name,
        operation,
        leaves: |shape| vec![shape.elements()],
        written: 0,
        f32_from: usize::MAX,
        takes: |_| true,
        fused,
        composed,
        traffic: [|shape| 2 * shape.elements(), |shape| 3 * shape.elements()],
        f32_traffic: |_| 0,
    }
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}

/// Returns all benchmarks.
pub fn subjects() -> Vec<KernelBenchmark> {
    let mut all = norms();
    all.extend(activations());
    all.extend(of_scores());
    all.extend(element_wise());
    all.extend(of_the_step());
    all
}

fn norms() -> Vec<KernelBenchmark> {
    let layer = forms!(norm::layer_norm, x =>
        flat(layer_norm(x.rows(0), x.leaf(1), Some(x.leaf(2)), NORM)));
    let rms = forms!(norm::rms_norm, x => flat(rms_norm(x.rows(0), x.leaf(1), NORM)));
    let add = forms!(norm::add_normalise, x => {
        #[allow(clippy::useless_conversion, reason = "the fused form has a parameter")]
        let (x, residual, weight) = (x.rows(0), x.rows(1), x.leaf(2).into());
        let (y, sum) = add_normalise(NormKind::Rms, x, None, residual, weight, None, NORM);
        Tensor::cat(vec![flat(y.narrow(0, 0, 1)), flat(sum.narrow(0, 0, 1))], 0)
    });
    vec![
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.width, s.width],
            ..subject("layer-norm", Operation::Norm, layer)
        },
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.width],
            ..subject("rms-norm", Operation::Norm, rms)
        },
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.elements(), s.width],
            traffic: [|s| 4 * s.elements(), |_| 0],
            ..subject("add-rms-norm", Operation::Norm, add)
        },
    ]
}

/// Returns both forms of an activation, without bias and without row weights.
macro_rules! activate {
    ($kind:ident) => {
        forms!(activation::activate, x =>
            flat(activate(x.rows(0), None, None, Activation::$kind, ActivationOptions::default())))
    };
}

fn activations() -> Vec<KernelBenchmark> {
    let plain = |name, forms| subject(name, Operation::Activation, forms);
    let biased = forms!(activation::activate, x => {
        let options = ActivationOptions::default();
        flat(activate(x.rows(0), Some(x.leaf(1)), None, Activation::GeluTanh, options))
    });
    let gated = |name, forms| KernelBenchmark {
        leaves: |s| vec![2 * s.elements()],
        traffic: [|s| 3 * s.elements(), |s| 5 * s.elements()],
        ..subject(name, Operation::Activation, forms)
    };
    vec![
        plain("gelu", activate!(Gelu)),
        plain("gelu-tanh", activate!(GeluTanh)),
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.width],
            ..plain("bias-gelu-tanh", biased)
        },
        plain("squared-relu", activate!(SquaredRelu)),
        gated("swi-glu", activate!(SwiGlu)),
        gated("ge-glu", activate!(GeGlu)),
        gated("quick-ge-glu", activate!(QuickGeGlu)),
    ]
}

/// Returns the heads of causal attention at a size.
pub fn heads(shape: &Shape) -> Heads {
    let (heads, width) = shape.heads();
    Heads {
        heads,
        groups: heads,
        width,
    }
}

fn causal() -> AttentionOptions {
    AttentionOptions {
        causal: true,
        ..AttentionOptions::default()
    }
}

fn packed(x: &Inputs) -> Tensor<3> {
    x.rows(0).unsqueeze_dim(0)
}

fn fused_attention(x: &mut Inputs) -> Tensor<1> {
    let engine = Arc::clone(&x.attention);
    let heads = heads(&x.shape);
    flat(flash_attention_packed_with(
        engine,
        packed(x),
        heads,
        None,
        &causal(),
    ))
}

fn composed_attention(x: &mut Inputs) -> Tensor<1> {
    let heads = heads(&x.shape);
    flat(composed::flash_attention_packed(
        packed(x),
        heads,
        None,
        &causal(),
    ))
}

fn of_scores() -> Vec<KernelBenchmark> {
    let softmax = forms!(softmax::masked_softmax, x => {
        let [rows, width] = x.rows(0).dims();
        let scores = x.leaf(0).reshape([1, 1, rows, width]);
        flat(masked_softmax(scores, 0.125, &Mask::None, Sink::None))
    });
    let loss = forms!(cross_entropy::cross_entropy, x =>
        cross_entropy(x.rows(0), x.targets.clone(), &CrossEntropyOptions::default()));
    vec![
        subject("softmax", Operation::Softmax, softmax),
        KernelBenchmark {
            leaves: |s| vec![3 * s.elements()],
            // The composition stores the scores, and the kernels support only narrow heads.
            takes: |s| s.heads().0 * s.rows * s.rows <= 1 << 31 && s.heads().1 <= 256,
            traffic: [|s| 4 * s.elements(), |s| 8 * s.elements()],
            ..subject(
                "causal-attention",
                Operation::Attention,
                [fused_attention, composed_attention],
            )
        },
        KernelBenchmark {
            traffic: [|s| s.elements(), |s| 2 * s.elements()],
            ..subject("cross-entropy", Operation::Loss, loss)
        },
    ]
}

fn element_wise() -> Vec<KernelBenchmark> {
    let dropout = forms!(dropout::bias_dropout_add, x => {
        let draw = Draw {
            probability: 0.1,
            key: 1,
            position: 0,
            first: 0,
            run: x.shape.elements(),
            pitch: x.shape.elements() as u64,
        };
        flat(bias_dropout_add(x.rows(0), Some(x.leaf(2)), Some(x.rows(1)), Some(draw)))
    });
    let rope = forms!(rope::rotate, x => {
        let (heads, width) = x.shape.heads();
        let tokens = x.leaf(0).reshape([1, x.shape.rows, heads, width]);
        let options = RopeOptions { pairing: Pairing::Halves, first: 0, heads: None };
        flat(rotate(tokens, &x.table, &Positions::From(0), &options))
    });
    vec![
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.elements(), s.width],
            traffic: [|s| 3 * s.elements(), |s| 2 * s.elements()],
            ..subject("bias-dropout-add", Operation::Dropout, dropout)
        },
        KernelBenchmark {
            traffic: [|s| 2 * s.elements(), |s| 2 * s.elements()],
            ..subject("rope", Operation::Rope, rope)
        },
    ]
}

fn of_the_step() -> Vec<KernelBenchmark> {
    let adamw = forms!(adamw::adamw, x => {
        let buffers = AdamWBuffers {
            master: x.take(0),
            first: x.take(1),
            second: x.take(2),
        };
        let step = AdamWStep {
            rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            step: 10,
            gradient_scale: 1.0,
        };
        adamw(buffers, x.leaf(3), &Decay::All, &step, None).0.master
    });
    let squares = forms!(adamw::sum_of_squares, x => sum_of_squares(x.leaf(0)));
    let linear = forms!(gemm::linear, x => {
        let weight = x.leaf(1).reshape([x.shape.width, x.shape.width]);
        flat(linear(x.rows(0), weight, Some(x.leaf(2))))
    });
    let weight_gradient = forms!(gemm::accumulate_weight_gradient, x => {
        let into = x.leaf(2).reshape([x.shape.width, x.shape.width]);
        flat(accumulate_weight_gradient(x.rows(0), x.rows(1), into))
    });
    let product = |name, forms| KernelBenchmark {
        takes: |s| s.width <= 8192,
        ..subject(name, Operation::Linear, forms)
    };
    vec![
        KernelBenchmark {
            leaves: |s| vec![s.elements(); 4],
            written: 3,
            f32_from: 0,
            traffic: [|_| 0, |_| 0],
            f32_traffic: |s| 7 * s.elements(),
            ..subject("adamw", Operation::Optimizer, adamw)
        },
        KernelBenchmark {
            traffic: [|s| s.elements(), |_| 0],
            ..subject("sum-of-squares", Operation::Optimizer, squares)
        },
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.width * s.width, s.width],
            traffic: [|s| 2 * s.elements() + s.width * s.width, |_| 0],
            ..product("linear", linear)
        },
        KernelBenchmark {
            leaves: |s| vec![s.elements(), s.elements(), s.width * s.width],
            f32_from: 2,
            traffic: [|s| 2 * s.elements(), |_| 0],
            f32_traffic: |s| 2 * s.width * s.width,
            ..product("weight-gradient", weight_gradient)
        },
    ]
}
