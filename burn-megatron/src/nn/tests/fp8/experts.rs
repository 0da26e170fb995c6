//! Compares FP8 experts with a loop over the experts, with an [`Fp8Linear`] for each matmul.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, Reparameterizer};
use burn::nn::LinearConfig;
use burn::tensor::{Gradients, Tensor};
use burn_megatron_kernels::activation::{ActivationOptions, activate};
use burn_megatron_kernels::gradient::{FlatGradients, Place};

use super::*;
use crate::nn::hook::{Deferred, GradientSink, ParameterHook, WeightGradientFn};
use crate::nn::moe::{ExpertRows, Experts, ExpertsConfig};

const HIDDEN: usize = 16;
const WIDTH: usize = 24;
const EXPERTS: usize = 4;

/// The numbers of rows of each expert. The first case has odd numbers, 0, and more than a block of 32. In the second
/// case one expert has all rows. The third case has multiples of 32.
const GROUPS: [[usize; EXPERTS]; 3] = [[5, 0, 37, 1], [0, 43, 0, 0], [32, 64, 0, 32]];

fn weights(phase: f64) -> [Tensor<3>; 2] {
    [
        spread([EXPERTS, HIDDEN, 2 * WIDTH], phase),
        spread([EXPERTS, WIDTH, HIDDEN], phase + 1.0),
    ]
}

fn experts(builder: &ModelBuilder) -> Experts {
    let config = ExpertsConfig::new(HIDDEN, WIDTH, EXPERTS, Activation::SwiGlu);
    let mut experts = config.init(&builder.child("experts")).unwrap();
    let [up, down] = weights(1.0);
    experts.up = parameter(up);
    experts.down = parameter(down);
    experts
}

/// The inputs of a forward pass, and the gradient of its output.
struct Inputs {
    x: Tensor<2>,
    weights: Tensor<1>,
    dy: Tensor<2>,
    sizes: [usize; EXPERTS],
}

impl Inputs {
    fn new(sizes: [usize; EXPERTS], phase: f64) -> Self {
        let rows = sizes.iter().sum();
        Self {
            x: leaf(spread([rows, HIDDEN], phase)),
            weights: leaf(spread([rows], phase + 0.3)),
            dy: spread([rows, HIDDEN], phase + 0.7),
            sizes,
        }
    }

    /// Returns the output, and the gradients of the inputs and of the weights of both matmuls.
    fn results(
        &self,
        y: Tensor<2>,
        of_weights: impl Fn(&Gradients) -> [Vec<f32>; 2],
    ) -> [Vec<f32>; 5] {
        let gradients = (y.clone() * Tensor::from_inner(self.dy.clone()))
            .sum()
            .backward();
        let [up, down] = of_weights(&gradients);
        let [x, weights] = [
            floats(self.x.grad(&gradients).unwrap()),
            floats(self.weights.grad(&gradients).unwrap()),
        ];
        [floats(y.inner()), x, weights, up, down]
    }

    fn rows(&self) -> ExpertRows {
        ExpertRows {
            rows: self.x.clone(),
            weights: self.weights.clone(),
            group_sizes: self.sizes.to_vec(),
        }
    }
}

fn by_experts(experts: &Experts, inputs: &Inputs) -> [Vec<f32>; 5] {
    let y = experts.forward(inputs.rows());
    inputs.results(y, |gradients| {
        [&experts.up, &experts.down].map(|weight| floats(weight.val().grad(gradients).unwrap()))
    })
}

/// Returns the linear layers of each expert.
fn linears(fp8: &Fp8) -> Vec<[Fp8Linear; 2]> {
    let linear = |weights: &Tensor<3>, expert: usize, name: &str| {
        let [_, inputs, outputs] = weights.dims();
        let mut linear = LinearConfig::new(inputs, outputs)
            .with_bias(false)
            .init(&autodiff());
        let weight = weights.clone().narrow(0, expert, 1);
        linear.weight = parameter(weight.reshape([inputs, outputs]));
        Fp8Linear::from_linear(linear, &format!("experts.{name}.{expert}"), fp8).unwrap()
    };
    let [up, down] = weights(1.0);
    let both = |expert| [linear(&up, expert, "up"), linear(&down, expert, "down")];
    (0..EXPERTS).map(both).collect()
}

/// Applies a linear layer to these rows, which are padded with zero rows up to the required multiple. The summation
/// order of a matmul may depend on the number of rows.
fn product(linear: &Fp8Linear, x: Tensor<2>) -> Tensor<2> {
    let [rows, width] = x.dims();
    let multiple = linear.fp8().map_or(1, Fp8Layer::row_multiple);
    let zeros = [rows.next_multiple_of(multiple) - rows, width];
    let zeros = Tensor::zeros(zeros, &x.device());
    let x = Tensor::cat(vec![x, zeros], 0);
    linear.forward(x).narrow(0, 0, rows)
}

fn by_linears(linears: &[[Fp8Linear; 2]], inputs: &Inputs) -> [Vec<f32>; 5] {
    let mut first = 0;
    let of_expert = |([up, down], rows): (&[Fp8Linear; 2], &usize)| {
        first += rows;
        (*rows > 0).then(|| {
            let x = inputs.x.clone().narrow(0, first - rows, *rows);
            let weights = inputs.weights.clone().narrow(0, first - rows, *rows);
            let (kind, options) = (Activation::SwiGlu.kernel(), ActivationOptions::default());
            let activated = activate(product(up, x), None, Some(weights), kind, options);
            product(down, activated)
        })
    };
    let parts = linears.iter().zip(&inputs.sizes).filter_map(of_expert);
    let y = Tensor::cat(parts.collect(), 0);
    inputs.results(y, |gradients| {
        [0, 1].map(|product| {
            let gradient = |linears: &[Fp8Linear; 2]| {
                let weight = linears[product].weight.val();
                match weight.grad(gradients) {
                    Some(gradient) => floats(gradient),
                    None => vec![0.0; weight.shape().num_elements()],
                }
            };
            linears.iter().flat_map(gradient).collect()
        })
    })
}

#[track_caller]
fn assert_same_bits(found: &[Vec<f32>; 5], expected: &[Vec<f32>; 5], what: &str) {
    let names = [
        "output",
        "dx",
        "gradient of the weights of rows",
        "dw up",
        "dw down",
    ];
    for ((found, expected), name) in found.iter().zip(expected).zip(names) {
        assert!(
            expected.iter().all(|value| value.is_finite()),
            "{what}: {name}"
        );
        assert_eq!(bits(found), bits(expected), "{what}: {name}");
    }
}

/// Runs three steps, because delayed scaling needs two steps for scales other than 1.
#[test]
fn each_expert_is_a_linear_layer_in_8_bits() {
    for recipe in recipes() {
        for save_activations in [true, false] {
            let config = Fp8Config {
                save_activations,
                ..config(recipe)
            };
            let groups = ParallelContext::single();
            let builder = builder(&groups, &config);
            let experts = experts(&builder);
            let fp8 = Fp8::new(&config).unwrap();
            let linears = linears(&fp8);
            for (step, sizes) in GROUPS.into_iter().enumerate() {
                let inputs = Inputs::new(sizes, step as f64);
                let what = format!("{recipe:?}, {save_activations}, {sizes:?}");
                let found = by_experts(&experts, &inputs);
                assert_same_bits(&found, &by_linears(&linears, &inputs), &what);
                for fp8 in [&builder.fp8(), &fp8] {
                    fp8.end_step_single_rank().unwrap();
                }
                assert_eq!(builder.fp8().states(), fp8.states(), "{what}");
            }
        }
    }
}

/// Only some experts have a recipe for a matmul.
#[test]
fn patterns_choose_experts() {
    let layers = |pattern: &str, recipe: Option<Fp8Recipe>| Fp8Layers {
        pattern: pattern.into(),
        recipe,
    };
    let config = Fp8Config {
        recipe: "current".parse().ok(),
        layers: vec![
            layers("experts.up.*", "mxfp8".parse().ok()),
            layers("experts.*.2", None),
        ],
        ..Fp8Config::default()
    };
    let groups = ParallelContext::single();
    let builder = builder(&groups, &config);
    let experts = experts(&builder);
    let fp8 = Fp8::new(&config).unwrap();
    let linears = linears(&fp8);
    for sizes in GROUPS {
        let inputs = Inputs::new(sizes, 0.5);
        let what = format!("{sizes:?}");
        let (found, expected) = (by_experts(&experts, &inputs), by_linears(&linears, &inputs));
        for (found, expected) in found.iter().zip(expected) {
            let [found, expected] = [found, &expected].map(|x| x.iter().map(|x| f64::from(*x)));
            let [found, expected]: [Vec<_>; 2] = [found.collect(), expected.collect()];
            super::super::assert_near(&what, &found, &expected, 1e-6);
        }
    }
    assert_eq!(builder.fp8().layers().len(), 2 * (EXPERTS - 1));
    builder.fp8().check_layers(&groups).unwrap();
    assert!(
        builder.fp8().weights().is_empty(),
        "no parameter is the weight of one expert"
    );
}

/// Holds the gradients of all parameters consecutively in one flat buffer, from [`OFFSET`] on.
struct Bucket {
    deferred: Mutex<Vec<Deferred>>,
    flat: Mutex<Option<Tensor<1>>>,
    offsets: [usize; 2],
    add: Mutex<[bool; 2]>,
}

const OFFSET: usize = 5;

impl GradientSink for Bucket {
    fn expect(&self, _: usize) {}

    fn accumulate(&self, index: usize, _: Tensor<1>) {
        panic!("the gradient of parameter {index} has a tensor of its own");
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.deferred.lock().unwrap().push((index, gradient));
    }
}

impl Bucket {
    /// Computes the deferred weight gradients of both matmuls.
    fn compute_deferred(&self) {
        let deferred = std::mem::take(&mut *self.deferred.lock().unwrap());
        let indices: Vec<_> = deferred.iter().map(|(index, _)| *index).collect();
        assert_eq!(indices, [1, 0]);
        for (index, compute) in deferred {
            let flat = self.flat.lock().unwrap().take().unwrap();
            let add = std::mem::replace(&mut self.add.lock().unwrap()[index], true);
            let offset = self.offsets[index];
            let places = vec![Place { offset, add }];
            let written = compute(Some(FlatGradients { flat, places }));
            *self.flat.lock().unwrap() = Some(written);
        }
    }
}

struct Attach(Arc<Bucket>, usize);

impl Reparameterizer for Attach {
    type Reparam = ParameterHook;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParameterHook>) {
        self.1 += 1;
        let param = param.map(Tensor::inner);
        (param, Some(ParameterHook::new(self.1 - 1, self.0.clone())))
    }
}

/// With and without FP8, the autodiff graph does not contain the weights, and weight gradients may be computed later.
/// The first use overwrites the buffer, even if an expert has no rows, and later uses add to the buffer. Weights are
/// quantized once, even if an evaluation uses them first.
#[test]
fn gradients_go_into_the_flat_buffer() {
    let plain = Fp8Config::default();
    for config in recipes().into_iter().map(config).chain([plain]) {
        let groups = ParallelContext::single();
        let lengths = [EXPERTS * HIDDEN * 2 * WIDTH, EXPERTS * WIDTH * HIDDEN];
        let offsets = [OFFSET, OFFSET + lengths[0] + 3];
        let buffer = Tensor::<1>::full(
            [offsets[1] + lengths[1] + 2],
            f32::NAN,
            &burn::tensor::Device::flex(),
        );
        let bucket = Arc::new(Bucket {
            deferred: Mutex::default(),
            flat: Mutex::new(Some(buffer)),
            offsets,
            add: Mutex::default(),
        });
        let of_graph = experts(&builder(&groups, &config));
        let hooked_builder = builder(&groups, &config);
        let hooked = experts(&hooked_builder).apply_reparameterization(Attach(bucket.clone(), 0));
        hooked_builder.fp8().cache_quantized_weights(true);
        let mut sums = lengths.map(|length| vec![0f32; length]);
        for (use_, sizes) in GROUPS.into_iter().enumerate() {
            let inputs = Inputs::new(sizes, use_ as f64);
            let expected = by_experts(&of_graph, &inputs);
            let evaluated = hooked.forward(ExpertRows {
                rows: inputs.x.clone().inner(),
                weights: inputs.weights.clone().inner(),
                group_sizes: sizes.to_vec(),
            });
            assert_eq!(bits(&floats(evaluated)), bits(&expected[0]), "{config:?}");
            let y = hooked.forward(inputs.rows());
            let found = inputs.results(y, |_| [vec![], vec![]]);
            bucket.compute_deferred();
            for index in 0..3 {
                assert_eq!(bits(&found[index]), bits(&expected[index]), "{config:?}");
            }
            for (sum, gradient) in sums.iter_mut().zip(&expected[3..]) {
                let added = sum.iter_mut().zip(gradient);
                added.for_each(|(sum, gradient)| *sum += gradient);
            }
        }
        let flat = floats(bucket.flat.lock().unwrap().take().unwrap());
        for ((offset, length), sum) in offsets.into_iter().zip(lengths).zip(&sums) {
            let found: Vec<f64> = flat[offset..][..length]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            let sum: Vec<f64> = sum.iter().map(|x| f64::from(*x)).collect();
            super::super::assert_near(&format!("{config:?}"), &found, &sum, 1e-6);
        }
        let outside = [&flat[..OFFSET], &flat[OFFSET + lengths[0]..offsets[1]]];
        assert!(outside.concat().iter().all(|value| value.is_nan()));
    }
}
