//! Tests that the output and the gradients of a layer on one rank are bit-identical to the results of the formulas.

use burn::backend::DispatchTensor;
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::{Function, gemm};

use super::transcription::{Layer, Matrix};
use super::*;
use crate::nn::arithmetic::rows;
use crate::nn::layer_arithmetic::LayerArithmetic;
use crate::nn::linear_function::LinearFunction;

const BATCH: usize = 2;
/// Neither the sequence nor the number of tokens is a multiple of a block.
const SEQ: usize = 67;
const IN: usize = 144;
const OUT: usize = 40;
const SCALES: [f32; 3] = [3.7, 100.0, 900.0];

struct Data {
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Tensor<1>,
    dy: Tensor<3>,
}

impl Data {
    fn spread() -> Self {
        Self {
            x: spread([BATCH, SEQ, IN], 0.5),
            weight: spread([IN, OUT], 1.0),
            bias: spread([OUT], 2.0),
            dy: spread([BATCH, SEQ, OUT], 3.0),
        }
    }

    fn integers() -> Self {
        Self {
            x: integers([BATCH, SEQ, IN], 0.5),
            weight: integers([IN, OUT], 1.0),
            bias: integers([OUT], 2.0),
            dy: integers([BATCH, SEQ, OUT], 3.0),
        }
    }

    fn cast(self, dtype: DType) -> Self {
        Self {
            x: self.x.cast(dtype),
            weight: self.weight.cast(dtype),
            bias: self.bias.cast(dtype),
            dy: self.dy.cast(dtype),
        }
    }

    /// Runs the layer. Returns the output, and the gradients of input, weight and bias.
    fn run(&self, fp8: &Fp8Config, scales: [f32; 3]) -> [Vec<f32>; 4] {
        let dtype = self.x.dtype();
        let builder = ModelBuilder::with(&ParallelContext::single(), &autodiff(), 7, dtype);
        let builder = builder.with_fp8(fp8).unwrap();
        let mut layer = ColumnParallelLinearConfig::new(IN, OUT)
            .init(&builder.child("layer"))
            .unwrap();
        if !builder.fp8().states().is_empty() {
            let states = [("layer".to_string(), state(scales, 3))];
            builder.fp8().load(&states.into_iter().collect()).unwrap();
        }
        layer.weight = parameter(self.weight.clone());
        layer.bias = Some(parameter(self.bias.clone()));
        let x = leaf(self.x.clone());
        let y = layer.forward(x.clone());
        assert_eq!(y.dtype(), dtype);
        let gradients = backward(y.clone(), self.dy.clone());
        let bias = layer.bias.as_ref().unwrap();
        let weight_gradient = layer.weight.val().grad(&gradients).unwrap();
        assert_eq!(weight_gradient.dtype(), dtype);
        [
            floats(y.inner()),
            floats(x.grad(&gradients).unwrap()),
            floats(weight_gradient),
            floats(bias.val().grad(&gradients).unwrap()),
        ]
    }

    /// Computes the formulas.
    fn transcribed(&self, fp8: &Fp8Config, scales: [f32; 3]) -> Layer {
        Layer {
            x: Matrix::of(&self.x),
            weight: Matrix::of(&self.weight),
            dy: Matrix::of(&self.dy),
            recipe: fp8.recipe.unwrap(),
            format: fp8.format,
            scales,
        }
    }

    fn bias_gradient(&self) -> Vec<f32> {
        let sum: Tensor<2> = rows(self.dy.clone()).sum_dim(0);
        floats(sum)
    }
}

fn gemm_of([left, right]: &[Matrix; 2], bias: Option<Tensor<1>>, dtype: DType) -> Vec<f32> {
    // Sums of f64 results are in f64.
    let sums = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let [left, right] = [left, right].map(|factor| factor.tensor().cast(sums));
    let product = gemm::linear(left, right.transpose(), bias.map(|bias| bias.cast(sums)));
    floats(product.cast(dtype))
}

#[track_caller]
fn assert_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare with");
    let other = (0..found.len()).find(|i| found[*i].to_bits() != expected[*i].to_bits());
    if let Some(i) = other {
        panic!("{what}: element {i} is {}, not {}", found[i], expected[i]);
    }
}

/// Computes the same sums in the same order, from explicitly quantized operands.
#[test]
fn every_recipe_follows_its_formulas() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let data = Data::spread().cast(dtype);
        for recipe in recipes() {
            for save_activations in [false, true] {
                let fp8 = Fp8Config {
                    save_activations,
                    ..config(recipe)
                };
                let what = format!("{recipe:?}, {dtype:?}, saved in 8 bits {save_activations}");
                let [y, dx, dw, db] = data.run(&fp8, SCALES);
                let [output, input, weight] = data.transcribed(&fp8, SCALES).factors();
                let bias = data.bias.clone();
                assert_bits(
                    &format!("y: {what}"),
                    &y,
                    &gemm_of(&output, Some(bias), dtype),
                );
                assert_bits(&format!("dx: {what}"), &dx, &gemm_of(&input, None, dtype));
                assert_bits(&format!("dw: {what}"), &dw, &gemm_of(&weight, None, dtype));
                assert_bits(&format!("db: {what}"), &db, &data.bias_gradient());
            }
        }
    }
}

/// Computes the sums with loops. The sums are exact in any order.
#[test]
fn exact_sums_are_those_of_loops() {
    let data = Data::integers();
    let scales = [2.0, 16.0, 0.5];
    let inexact = BlockScaling {
        power_of_two: false,
    };
    for recipe in recipes() {
        if recipe.0 == Fp8Recipe::Blockwise(inexact) {
            // The scale of a short block need not be a power of two.
            continue;
        }
        let fp8 = config(recipe);
        let [y, dx, dw, db] = data.run(&fp8, scales);
        let factors = data.transcribed(&fp8, scales).factors();
        let [output, input, weight] = factors.map(|[left, right]| left.times(&right).values);
        let bias = floats(data.bias.clone());
        let y_of = output.iter().enumerate().map(|(i, y)| y + bias[i % OUT]);
        assert_bits(&format!("y: {recipe:?}"), &y, &y_of.collect::<Vec<_>>());
        assert_bits(&format!("dx: {recipe:?}"), &dx, &input);
        assert_bits(&format!("dw: {recipe:?}"), &dw, &weight);
        assert_bits(&format!("db: {recipe:?}"), &db, &data.bias_gradient());
        // No code was rounded.
        let plain = Matrix::of(&data.x).times(&Matrix::of(&data.weight).transposed());
        assert_eq!(output, plain.values);
    }
}

/// With the test data, each recipe gives a different result, which also differs from the result without a recipe.
#[test]
fn the_recipes_differ() {
    let data = Data::spread();
    let mut outputs: Vec<_> = recipes()
        .into_iter()
        .map(|recipe| data.run(&config(recipe), SCALES))
        .collect();
    outputs.push(data.run(&Fp8Config::default(), SCALES));
    let distinct: std::collections::BTreeSet<_> = outputs
        .iter()
        .map(|of| {
            of.iter()
                .flat_map(|values| bits(values))
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(
        distinct.len(),
        10,
        "three recipes have the same formats in both settings"
    );
}

/// Returns the total size of the tensors that a forward pass saves, in bytes.
fn saved_bytes(save_activations: bool, recipe: Fp8Recipe, input: InputLayout) -> usize {
    let fp8 = Fp8::new(&Fp8Config {
        save_activations,
        ..config((recipe, Fp8Format::Hybrid))
    });
    let alone = ParallelContext::single();
    let layer = fp8.unwrap().layer(
        "layer",
        &Device::flex(),
        alone.tensor(),
        (SplitOperands::default(), WeightOwner::Layer),
    );
    let layer = layer.unwrap().unwrap();
    let whole = !matches!(input, InputLayout::SplitSequence(_));
    let function = LinearFunction {
        input,
        hooked: None,
        bias: None,
        arithmetic: LayerArithmetic::Fp8(Fp8Arithmetic::new(&layer, true, whole)),
    };
    let data = Data::spread();
    let inputs = vec![
        data.x.clone().into_dispatch(),
        data.weight.clone().into_dispatch(),
    ];
    let (_, saved) = function.forward(inputs);
    let bytes = |tensor: &DispatchTensor| {
        use burn::backend::TensorMetadata;
        tensor.shape().num_elements() * tensor.dtype().size()
    };
    // The weight is not counted, because the layer holds it in any case.
    saved.iter().map(bytes).sum::<usize>() - 4 * IN * OUT
}

#[test]
fn inputs_are_saved_in_8_bits_on_request() {
    let tokens = BATCH * SEQ;
    let padded = tokens.div_ceil(16) * 16;
    let whole = 4 * tokens * IN;
    let current = Fp8Recipe::Current(CurrentScaling::default());
    let blocks = Fp8Recipe::Blockwise(BlockScaling::default());
    let local = || InputLayout::Local;
    // The scales of the input and the weight are saved too.
    assert_eq!(saved_bytes(false, current, local()), whole + 8);
    assert_eq!(saved_bytes(false, blocks, local()), whole);
    assert_eq!(saved_bytes(false, Fp8Recipe::MxFp8, local()), whole);
    // The scales of the input and the weight.
    assert_eq!(saved_bytes(true, current, local()), padded * IN + 8);
    assert_eq!(saved_bytes(true, blocks, local()), padded * IN + 4 * 2 * IN);
    assert_eq!(
        saved_bytes(true, Fp8Recipe::MxFp8, local()),
        padded * IN + 4 * 2 * IN
    );
    let split = InputLayout::SplitSequence(ParallelContext::single().tensor().clone());
    assert_eq!(saved_bytes(true, current, split), whole + 8);
}

/// If the weight is frozen or the input needs no gradient, one matmul is skipped. The results of the other matmuls do
/// not change.
#[test]
fn what_is_not_needed_is_left_out() {
    let data = Data::spread();
    for recipe in recipes() {
        let all = data.run(&config(recipe), SCALES);
        let builder = builder(&ParallelContext::single(), &config(recipe));
        let mut layer = ColumnParallelLinearConfig::new(IN, OUT)
            .init(&builder.child("layer"))
            .unwrap();
        if !builder.fp8().states().is_empty() {
            let states = [("layer".to_string(), state(SCALES, 3))];
            builder.fp8().load(&states.into_iter().collect()).unwrap();
        }
        layer.weight = parameter(data.weight.clone());
        layer.bias = None;
        let x = Tensor::from_inner(data.x.clone());
        let gradients = backward(layer.forward(x), data.dy.clone());
        assert_bits(
            "weight",
            &floats(layer.weight.val().grad(&gradients).unwrap()),
            &all[2],
        );
        let frozen = layer.no_grad();
        let x = leaf(data.x.clone());
        let gradients = backward(frozen.forward(x.clone()), data.dy.clone());
        assert_bits("input", &floats(x.grad(&gradients).unwrap()), &all[1]);
        assert!(frozen.weight.val().grad(&gradients).is_none());
    }
}
