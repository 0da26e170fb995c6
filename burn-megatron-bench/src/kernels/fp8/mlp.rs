//! The forward and the backward of an MLP without biases, `y = gelu(x up) down`, of width 4 inside.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_megatron::kernels::activation::{Activation, ActivationOptions, activate};
use burn_megatron::kernels::apply;
use burn_megatron::kernels::fp8::{Accumulation, Format, Fp8Matrix, accumulate_at, multiply};
use burn_megatron::kernels::gemm;
use burn_megatron_cli::internal::{Seed, Shape};

use super::recipe::{BothLayouts, ScalingRecipe};
use crate::kernels::pairs::{TimedPair, draw, with_sums, zeros};

/// Inner width over outer width.
const INSIDE: usize = 4;

/// Matrices of both layers, `x` and the gradient of `y`.
#[derive(Clone)]
struct Mlp {
    x: Tensor<2>,
    up: Tensor<2>,
    down: Tensor<2>,
    dy: Tensor<2>,
}

/// The arithmetic of a linear layer.
trait LinearArithmetic {
    /// The tensors that the backward needs.
    type Saved;

    /// `x w`.
    fn forward(&self, x: &Tensor<2>, weight: &Tensor<2>) -> (Tensor<2>, Self::Saved);

    /// `dy w^T`, and the sums with `x^T dy` added from `offset` on.
    fn backward(
        &self,
        saved: Self::Saved,
        dy: &Tensor<2>,
        sums: Tensor<1>,
        offset: usize,
    ) -> (Tensor<2>, Tensor<1>);
}

/// In the type of the matrices.
#[derive(Clone)]
struct Plain;

/// In 8 bits: `x`, the weight and the gradient are each quantised once, both usage, as in a step of one
/// micro-batch: with more of them weights are quantised for all at once.
#[derive(Clone)]
struct EightBits {
    recipe: ScalingRecipe,
    scale: Tensor<1>,
}

impl LinearArithmetic for Plain {
    type Saved = (Tensor<2>, Tensor<2>);

    fn forward(&self, x: &Tensor<2>, weight: &Tensor<2>) -> (Tensor<2>, Self::Saved) {
        let y = gemm::linear(x.clone(), weight.clone(), None);
        (y, (x.clone(), weight.clone()))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        dy: &Tensor<2>,
        sums: Tensor<1>,
        offset: usize,
    ) -> (Tensor<2>, Tensor<1>) {
        let dx = gemm::linear(dy.clone(), weight.transpose(), None);
        let dw = gemm::accumulate_weight_gradient_at(x, dy.clone(), sums, offset, true);
        (dx, dw)
    }
}

impl EightBits {
    fn both(&self, x: &Tensor<2>, format: Format, square: bool) -> BothLayouts {
        let quantized = self.recipe.quantize(x.clone(), format, square, &self.scale);
        BothLayouts::of(quantized)
    }
}

impl LinearArithmetic for EightBits {
    type Saved = (Fp8Matrix, Fp8Matrix);

    fn forward(&self, x: &Tensor<2>, weight: &Tensor<2>) -> (Tensor<2>, Self::Saved) {
        let dtype = FloatDType::from(x.dtype());
        let x = self.both(x, Format::E4M3, false);
        let weight = self.both(weight, Format::E4M3, true);
        let fast = Accumulation::Fast;
        let y = multiply(&x.rowwise, &weight.columnwise, None, dtype, fast);
        (y, (x.columnwise, weight.rowwise))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        dy: &Tensor<2>,
        sums: Tensor<1>,
        offset: usize,
    ) -> (Tensor<2>, Tensor<1>) {
        let dtype = FloatDType::from(dy.dtype());
        let dy = self.both(dy, self.recipe.of_gradients(), false);
        let dx = multiply(&dy.rowwise, &weight, None, dtype, Accumulation::Exact);
        (dx, accumulate_at(&x, &dy.columnwise, sums, offset, true))
    }
}

impl Mlp {
    /// The gradient of `x`, and the sums with those of the weights.
    fn step(&self, arithmetic: &impl LinearArithmetic, sums: Tensor<1>) -> (Tensor<2>, Tensor<1>) {
        let (inside, of_up) = arithmetic.forward(&self.x, &self.up);
        let inside = Tensor::from_inner(inside).require_grad();
        let options = ActivationOptions::default();
        let active = activate(inside.clone(), None, None, Activation::GeluTanh, options);
        let (y, of_down) = arithmetic.forward(&active.clone().inner(), &self.down);
        drop(y);
        let half = self.up.shape().num_elements();
        let (gradient, sums) = arithmetic.backward(of_down, &self.dy, sums, half);
        let len = gradient.shape().num_elements();
        let seed = Seed(gradient.reshape([len]));
        let loss: Tensor<1> = apply(vec![active.into_dispatch()], seed);
        let Some(gradient) = inside.grad(&loss.backward()) else {
            unreachable!("the activation has a gradient")
        };
        arithmetic.backward(of_up, &gradient, sums, 0)
    }
}

pub fn pair(recipe: ScalingRecipe, shape: &Shape, device: &Device, dtype: DType) -> TimedPair {
    let Shape { rows, width } = *shape;
    let inside = INSIDE * width;
    let draw = |sizes| draw(sizes, device, dtype);
    let mlp = Mlp {
        x: draw([rows, width]),
        up: draw([width, inside]) / (width as f64).sqrt(),
        down: draw([inside, width]) / (inside as f64).sqrt(),
        dy: draw([rows, width]),
    };
    let eight = EightBits {
        recipe,
        scale: Tensor::ones([1], device),
    };
    let weights = 2 * width * inside;
    let sums = zeros(weights, device);
    let plain = mlp.clone();
    TimedPair {
        direction: "both",
        // x and dy, y and dx; weights; sums, read and written.
        bytes: (4 * shape.elements() + weights) * dtype.size() + 8 * weights,
        fused: with_sums(sums.clone(), move |sums| mlp.step(&eight, sums)),
        plain: Some(with_sums(sums, move |sums| plain.step(&Plain, sums))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubles<const D: usize>(x: Tensor<D>) -> Vec<f64> {
        let data = x.into_data().convert_dtype(DType::F64);
        data.try_into_vec().unwrap()
    }

    /// The share of noise in a result.
    fn noise<const D: usize>(noisy: Tensor<D>, clean: Tensor<D>) -> f64 {
        let pairs: Vec<_> = doubles(noisy).into_iter().zip(doubles(clean)).collect();
        let sum = |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(x, y)| f(*x, *y)).sum::<f64>();
        (sum(&|x, y| (x - y).powi(2)) / sum(&|_, y| y * y)).sqrt()
    }

    fn mlp() -> Mlp {
        let device = Device::flex();
        let draw = |sizes| draw(sizes, &device, DType::F32);
        Mlp {
            x: draw([48, 32]),
            up: draw([32, 128]) / 32f32.sqrt(),
            down: draw([128, 32]) / 128f32.sqrt(),
            dy: draw([48, 32]),
        }
    }

    fn sums() -> Tensor<1> {
        Tensor::zeros([2 * 32 * 128], &Device::flex())
    }

    #[test]
    fn the_plain_mlp_has_the_gradients_of_autodiff() {
        let mlp = mlp();
        let (dx, dw) = mlp.step(&Plain, sums());
        let [x, up, down] = [&mlp.x, &mlp.up, &mlp.down]
            .map(|leaf| Tensor::from_inner(leaf.clone()).require_grad());
        let inside = x.clone().matmul(up.clone());
        let options = ActivationOptions::default();
        let active = activate(inside, None, None, Activation::GeluTanh, options);
        let loss = (active.matmul(down.clone()) * Tensor::from_inner(mlp.dy)).sum();
        let gradients = loss.backward();
        let [of_x, of_up, of_down] = [x, up, down].map(|leaf| leaf.grad(&gradients).unwrap());
        let flat = |gradient: Tensor<2>| gradient.reshape([32 * 128]);
        let expected = Tensor::cat(vec![flat(of_up), flat(of_down)], 0);
        assert!(noise(dx, of_x) < 1e-5);
        assert!(noise(dw, expected) < 1e-5);
    }

    #[test]
    fn every_recipe_computes_the_mlp() {
        let (mlp, device) = (mlp(), Device::flex());
        let (dx, dw) = mlp.step(&Plain, sums());
        for recipe in [
            ScalingRecipe::Delayed,
            ScalingRecipe::Current,
            ScalingRecipe::Blocks,
            ScalingRecipe::Mx,
        ] {
            let scale = Tensor::ones([1], &device);
            let (dx8, dw8) = mlp.step(&EightBits { recipe, scale }, sums());
            let shares = [noise(dx8, dx.clone()), noise(dw8, dw.clone())];
            // Three bits of mantissa, or two of a gradient.
            assert!(
                shares.iter().all(|share| (1e-3..0.15).contains(share)),
                "{shares:?}"
            );
        }
    }
}
