//! Dropout with masks that do not depend on the layout.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron_kernels::dropout::{self, Draw};

use super::{BuildError, Place, Position, Scope};
use crate::choice::Operation;

/// Sets elements to zero with probability `p` while training, and scales the others by `1/(1-p)`.
///
/// The mask comes from Philox counters (see [`Position`]): ranks that hold the same elements draw
/// the same mask, ranks that hold different ones draw different parts of one mask.
#[derive(Module, Debug)]
pub struct Dropout {
    probability: f64,
    #[module(skip)]
    key: u64,
    #[module(skip)]
    position: Position,
    #[module(skip)]
    fused: bool,
}

/// How the input of [`Dropout::forward`] lies on the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Every rank has all of it.
    Whole,
    /// Each rank has an equal part of `dim`, which is not the batch (dim 0).
    SplitAlong {
        /// The dimension that is cut.
        dim: usize,
        /// Which part this rank has.
        place: Place,
    },
}

impl Dropout {
    /// Dropout with `probability` in `[0, 1)` and the random stream of `scope`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for another probability.
    pub fn new(probability: f64, scope: &Scope) -> Result<Self, BuildError> {
        if !(0.0..1.0).contains(&probability) {
            return Err(scope.error(format!(
                "a dropout probability of {probability} makes no sense; at least 0 and below 1 does"
            )));
        }
        let (key, position) = (scope.stream_key(), scope.position().clone());
        Ok(Self {
            probability,
            key,
            position,
            fused: scope.is_fused(Operation::Dropout),
        })
    }

    /// `[batch, ...]` to `[batch, ...]`; the identity outside of training (a plain tensor).
    pub fn forward<const D: usize>(&self, x: Tensor<D>, lies: Lies) -> Tensor<D> {
        match self.draw(&x, lies) {
            Some(draw) => self.apply(x, None, None, Some(draw)),
            None => x,
        }
    }

    /// `residual + dropout(x + bias)`, `[batch, ...]` each but the bias, which is of the last dim.
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Tensor<1>>,
        residual: Tensor<D>,
        lies: Lies,
    ) -> Tensor<D> {
        match (self.draw(&x, lies), bias) {
            (None, None) => residual + x,
            (draw, bias) => self.apply(x, bias, Some(residual), draw),
        }
    }

    /// Whether anything is dropped while training.
    pub fn is_on(&self) -> bool {
        self.probability > 0.0
    }

    fn apply<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Tensor<1>>,
        residual: Option<Tensor<D>>,
        draw: Option<Draw>,
    ) -> Tensor<D> {
        match self.fused {
            true => dropout::bias_dropout_add(x, bias, residual, draw),
            false => dropout::composed::bias_dropout_add(x, bias, residual, draw),
        }
    }

    /// Which draws this rank's part of the mask takes; none where nothing is dropped.
    fn draw<const D: usize>(&self, x: &Tensor<D>, lies: Lies) -> Option<Draw> {
        (self.is_on() && x.is_autodiff()).then(|| self.draw_for(x.dims(), lies))
    }

    fn draw_for<const D: usize>(&self, shape: [usize; D], lies: Lies) -> Draw {
        let (step, first_sample) = self.position.get();
        let (dim, place) = match lies {
            Lies::Whole => (1, Place { index: 0, size: 1 }),
            Lies::SplitAlong { dim, place } => (dim, place),
        };
        let outer: usize = shape[1..dim].iter().product();
        let run: usize = shape[dim..].iter().product();
        let sample = (outer * run * place.size) as u64;
        Draw {
            probability: self.probability,
            key: self.key,
            position: step,
            first: first_sample * sample + (place.index * run) as u64,
            run,
            pitch: (run * place.size) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::comm::Groups;

    fn dropout(probability: f64) -> Dropout {
        let scope = Scope::new(&Groups::single(), &Device::flex()).child("dropout");
        Dropout::new(probability, &scope).unwrap()
    }

    /// What an input of ones becomes: 0 where it is dropped.
    fn mask<const D: usize>(dropout: &Dropout, shape: [usize; D], lies: Lies) -> Tensor<D> {
        let ones = Tensor::<D>::ones(shape, &Device::flex().autodiff());
        dropout.forward(ones, lies).inner()
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn parts_of_a_split_make_up_the_whole_mask() {
        let dropout = dropout(0.3);
        dropout.position.set(5, 2);
        let shape = [3, 4, 6, 2];
        let whole = mask(&dropout, shape, Lies::Whole);
        for dim in 1..4 {
            for size in [1, 2] {
                let mut local = shape;
                local[dim] /= size;
                let part = |index| {
                    let lies = Lies::SplitAlong {
                        dim,
                        place: Place { index, size },
                    };
                    mask(&dropout, local, lies)
                };
                let parts = Tensor::cat((0..size).map(part).collect(), dim);
                parts.into_data().assert_eq(&whole.to_data(), true);
            }
        }
    }

    #[test]
    fn a_micro_batch_draws_its_rows_of_the_batch() {
        let dropout = dropout(0.5);
        let whole = values(mask(&dropout, [4, 7, 3], Lies::Whole));
        dropout.position.set(0, 2);
        assert_eq!(
            values(mask(&dropout, [2, 7, 3], Lies::Whole)),
            whole[2 * 21..]
        );
        dropout.position.set(1, 2);
        assert_ne!(
            values(mask(&dropout, [2, 7, 3], Lies::Whole)),
            whole[2 * 21..]
        );
    }

    #[test]
    fn the_mean_stays_and_the_gradient_is_the_mask() {
        let dropout = dropout(0.25);
        let x = Tensor::<2>::ones([100, 1000], &Device::flex().autodiff()).require_grad();
        let y = dropout.forward(x.clone(), Lies::Whole);
        let mean = y.clone().mean().into_scalar::<f32>();
        // Five standard errors of a mean of 100,000 draws with variance 1/3.
        assert!((mean - 1.0).abs() < 0.01, "mean {mean}");
        let gradient = x.grad(&y.clone().sum().backward()).unwrap();
        gradient.into_data().assert_eq(&y.inner().into_data(), true);
    }

    #[test]
    fn evaluation_leaves_the_input_alone() {
        let x = Tensor::<2>::ones([2, 3], &Device::flex());
        let y = dropout(0.9).forward(x.clone(), Lies::Whole);
        y.into_data().assert_eq(&x.into_data(), true);
    }

    #[test]
    fn an_impossible_probability_is_refused() {
        let scope = Scope::new(&Groups::single(), &Device::flex()).child("dropout");
        for probability in [-0.1, 1.0, f64::NAN] {
            let error = Dropout::new(probability, &scope).unwrap_err().to_string();
            assert!(
                error.starts_with("dropout: a dropout probability of"),
                "{error}"
            );
        }
    }
}
