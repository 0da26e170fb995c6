//! Dropout with masks that do not depend on the parallel layout.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron_kernels::dropout::{self, Draw};

use super::dropout_position::BatchPosition;
use super::dropout_rows::{RowRun, row_runs};
use super::forward_context::is_training;
use super::residual::Branch;
use super::{AxisRank, Bias, BuildError, DropoutPosition, ModelBuilder, Residual};
use crate::kernel_selection::Operation;

/// Sets elements to zero with probability `p` during training, and scales the others by `1 / (1 - p)`.
///
/// The mask is drawn from Philox counters (see [`DropoutPosition`]). Ranks with the same elements draw the same mask.
/// Ranks with different elements draw different parts of one mask.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{ActivationLayout, Dropout};
/// use burn_megatron::prelude::*;
///
/// let device = Device::flex().autodiff();
/// let builder = ModelBuilder::new(&ParallelContext::single(), &device);
/// let dropout = Dropout::new(0.5, &builder)?;
/// let draw = |step| {
///     builder.position().set(step, 0);
///     let x = Tensor::<2>::ones([4, 64], &device);
///     dropout.forward(x, ActivationLayout::Whole).into_data()
/// };
/// // The mask is a function of the step, so a repeated forward draws the same mask.
/// assert_eq!(draw(3), draw(3));
/// assert_ne!(draw(3), draw(4));
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct Dropout {
    probability: f64,
    #[module(skip)]
    key: u64,
    #[module(skip)]
    position: DropoutPosition,
    #[module(skip)]
    fused: bool,
}

/// The distribution of an activation over the ranks of the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationLayout {
    /// Every rank has the complete activation.
    Whole,
    /// Each rank has an equal part of `dim`. `dim` must not be the batch (dim 0).
    SplitAlong {
        /// The split dimension.
        dim: usize,
        /// The part of this rank.
        place: AxisRank,
    },
}

/// Rows of a mask. Draws are counted from the first sample of the input.
pub(super) struct MaskRows {
    /// The first draw of each row, or `None` for padding, which may use any draws.
    pub starts: Vec<Option<u64>>,
    /// The number of draws per sample.
    pub per_sample: u64,
}

impl Dropout {
    /// Builds dropout with `probability` in `[0, 1)` and the random stream of `builder`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the probability is out of range.
    pub fn new(probability: f64, builder: &ModelBuilder) -> Result<Self, BuildError> {
        if !(0.0..1.0).contains(&probability) {
            return Err(builder.error(format!(
                "invalid dropout probability {probability}: expected at least 0 and below 1"
            )));
        }
        let (key, position) = (builder.stream_key(), builder.position().clone());
        if probability > 0.0 {
            position.set_used();
        }
        Ok(Self {
            probability,
            key,
            position,
            fused: builder.is_fused(Operation::Dropout),
        })
    }

    /// Applies dropout to a tensor of shape `[batch, ...]`. Tensors without autodiff are returned unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, layout: ActivationLayout) -> Tensor<D> {
        if let Some(rows) = self.rows(&x, layout) {
            return self.apply_rows(x, None, rows);
        }
        match self.draw(&x, layout) {
            Some(draw) => self.apply(x, None, None, Some(draw)),
            None => x,
        }
    }

    /// Applies [`forward`](Self::forward). If `rows` is given, it holds the draws of all rows (all dims except the
    /// last).
    pub(super) fn forward_rows<const D: usize>(
        &self,
        x: Tensor<D>,
        rows: Option<MaskRows>,
        layout: ActivationLayout,
    ) -> Tensor<D> {
        match rows {
            None => self.forward(x, layout),
            Some(rows) if self.drops(&x) => self.apply_rows(x, None, rows),
            Some(_) => x,
        }
    }

    /// Adds the output of a branch to the residual stream: `stream + dropout(x + bias)`. `x` and `stream` are
    /// `[batch, seq, hidden]`.
    ///
    /// If nothing is dropped, for example without autodiff, the following norm performs the addition.
    pub fn forward_add(
        &self,
        x: Tensor<3>,
        bias: Option<Bias>,
        stream: Tensor<3>,
        layout: ActivationLayout,
    ) -> Residual {
        if let Some(rows) = self.rows(&x, layout) {
            // Adding the bias once gives a single bias gradient, independent of the number of runs.
            let x = match bias {
                Some(bias) => x + bias.into_tensor().unsqueeze(),
                None => x,
            };
            return self.apply_rows(x, Some(stream), rows).into();
        }
        match (self.draw(&x, layout), bias) {
            // An unfused addition takes the bias from the graph.
            (None, bias) if bias.is_none() || self.fused => Residual {
                stream,
                branch: Some(Branch {
                    output: x,
                    bias: bias.map(Bias::into_branch),
                }),
                added_bias: None,
            },
            (draw, bias) => self.apply(x, bias, Some(stream), draw).into(),
        }
    }

    fn apply<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Bias>,
        residual: Option<Tensor<D>>,
        draw: Option<Draw>,
    ) -> Tensor<D> {
        if self.fused {
            let bias = bias.map(Bias::into_parameter);
            dropout::bias_dropout_add_with(x, bias, residual, draw)
        } else {
            let bias = bias.map(Bias::into_tensor);
            dropout::composed::bias_dropout_add(x, bias, residual, draw)
        }
    }

    fn drops<const D: usize>(&self, x: &Tensor<D>) -> bool {
        self.probability > 0.0 && is_training(x)
    }

    /// Returns the rows of `[batch, seq, ..]` under context parallelism, or `None` if nothing is dropped.
    fn rows<const D: usize>(&self, x: &Tensor<D>, layout: ActivationLayout) -> Option<MaskRows> {
        let shard = self.position.get().shard.filter(|_| self.drops(x))?;
        let [_, local] = shard.local_shape();
        let part = match layout {
            ActivationLayout::Whole => 0..local,
            ActivationLayout::SplitAlong { place, .. } => {
                let part = local / place.size;
                place.index * part..(place.index + 1) * part
            }
        };
        let width = x.dims()[D - 1] as u64;
        let tokens = shard.tokens().chunks(local.max(1));
        let start = |token: &usize| Some(shard.place(*token)? as u64 * width);
        Some(MaskRows {
            starts: tokens
                .flat_map(|row| row[part.clone()].iter().map(start))
                .collect(),
            per_sample: shard.row_of_places() as u64 * width,
        })
    }

    /// Computes `residual + dropout(x)`, one run of rows at a time.
    fn apply_rows<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Option<Tensor<D>>,
        rows: MaskRows,
    ) -> Tensor<D> {
        let (shape, position) = (x.dims(), self.position.get());
        let MaskRows { starts, per_sample } = rows;
        let flat = |x: Tensor<D>| x.reshape([starts.len(), shape[D - 1]]);
        let (x, residual) = (flat(x), residual.map(flat));
        let before = position.first_sample * per_sample;
        let mut at = 0;
        let run = |RowRun { first, step, count }: RowRun| {
            let draw = Draw {
                probability: self.probability,
                key: self.key,
                position: position.step,
                first: before + first,
                run: shape[D - 1],
                pitch: step,
            };
            let part = |x: &Tensor<2>| x.clone().narrow(0, at, count);
            let y = self.apply(part(&x), None, residual.as_ref().map(part), Some(draw));
            at += count;
            y
        };
        let parts: Vec<_> = row_runs(&starts).into_iter().map(run).collect();
        Tensor::cat(parts, 0).reshape(shape)
    }

    /// Returns the draws of this rank's part of the mask, or `None` if nothing is dropped.
    fn draw<const D: usize>(&self, x: &Tensor<D>, layout: ActivationLayout) -> Option<Draw> {
        if !self.drops(x) {
            return None;
        }
        let shape = x.dims();
        let BatchPosition {
            step, first_sample, ..
        } = self.position.get();
        let (dim, place) = match layout {
            ActivationLayout::Whole => (1, AxisRank { index: 0, size: 1 }),
            ActivationLayout::SplitAlong { dim, place } => (dim, place),
        };
        let outer: usize = shape[1..dim].iter().product();
        let run: usize = shape[dim..].iter().product();
        let sample = (outer * run * place.size) as u64;
        Some(Draw {
            probability: self.probability,
            key: self.key,
            position: step,
            first: first_sample * sample + (place.index * run) as u64,
            run,
            pitch: (run * place.size) as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::comm::ParallelContext;

    fn dropout(probability: f64) -> Dropout {
        let builder =
            ModelBuilder::new(&ParallelContext::single(), &Device::flex()).child("dropout");
        Dropout::new(probability, &builder).unwrap()
    }

    /// Returns the output for an input of ones. Dropped elements are 0.
    fn mask<const D: usize>(
        dropout: &Dropout,
        shape: [usize; D],
        layout: ActivationLayout,
    ) -> Tensor<D> {
        let ones = Tensor::<D>::ones(shape, &Device::flex().autodiff());
        dropout.forward(ones, layout).inner()
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn parts_of_a_split_make_up_the_whole_mask() {
        let dropout = dropout(0.3);
        dropout.position.set(5, 2);
        let shape = [3, 4, 6, 2];
        let whole = mask(&dropout, shape, ActivationLayout::Whole);
        for dim in 1..4 {
            for size in [1, 2] {
                let mut local = shape;
                local[dim] /= size;
                let part = |index| {
                    let layout = ActivationLayout::SplitAlong {
                        dim,
                        place: AxisRank { index, size },
                    };
                    mask(&dropout, local, layout)
                };
                let parts = Tensor::cat((0..size).map(part).collect(), dim);
                parts.into_data().assert_eq(&whole.to_data(), true);
            }
        }
    }

    #[test]
    fn a_micro_batch_draws_its_rows_of_the_batch() {
        let dropout = dropout(0.5);
        let whole = values(mask(&dropout, [4, 7, 3], ActivationLayout::Whole));
        dropout.position.set(0, 2);
        assert_eq!(
            values(mask(&dropout, [2, 7, 3], ActivationLayout::Whole)),
            whole[2 * 21..]
        );
        dropout.position.set(1, 2);
        assert_ne!(
            values(mask(&dropout, [2, 7, 3], ActivationLayout::Whole)),
            whole[2 * 21..]
        );
    }

    #[test]
    fn the_mean_stays_and_the_gradient_is_the_mask() {
        let dropout = dropout(0.25);
        let x = Tensor::<2>::ones([100, 1000], &Device::flex().autodiff()).require_grad();
        let y = dropout.forward(x.clone(), ActivationLayout::Whole);
        let mean = y.clone().mean().into_scalar::<f32>();
        // Five standard errors of a mean of 100,000 draws with variance 1/3.
        assert!((mean - 1.0).abs() < 0.01, "mean {mean}");
        let gradient = x.grad(&y.clone().sum().backward()).unwrap();
        gradient.into_data().assert_eq(&y.inner().into_data(), true);
    }

    #[test]
    fn evaluation_leaves_the_input_alone() {
        let x = Tensor::<2>::ones([2, 3], &Device::flex());
        let y = dropout(0.9).forward(x.clone(), ActivationLayout::Whole);
        y.into_data().assert_eq(&x.into_data(), true);
    }

    #[test]
    fn an_impossible_probability_is_refused() {
        let builder =
            ModelBuilder::new(&ParallelContext::single(), &Device::flex()).child("dropout");
        for probability in [-0.1, 1.0, f64::NAN] {
            let error = Dropout::new(probability, &builder).unwrap_err().to_string();
            assert!(
                error.starts_with("dropout: invalid dropout probability"),
                "{error}"
            );
        }
    }
}
