//! Fused linear cross-entropy: the output layer and the cross-entropy loss, computed in chunks of tokens.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};
use burn_megatron_kernels::soft_cap::{soft_cap, soft_cap_slope};
use burn_megatron_kernels::{Function, apply};

use super::fused::{FusedLoss, FusedLosses};
use super::output_gradients::{OutputGradients, computed};
use super::{
    ComponentsCell, LogitsShape, LossComponents, LossFactor, LossTerm, Losses, SummedLosses,
    TokenLosses, VocabParallelCrossEntropy, flat_targets,
};
use crate::nn::arithmetic::{FloatArithmetic, NeededGradients, rows};
use crate::nn::forward_context::is_tracked;
use crate::nn::hook::Pass;
use crate::nn::input_layout::InputLayout;
use crate::nn::weight::{HookedWeight, Weight};
use crate::nn::wide::wide;
use crate::nn::{OutputLayer, VocabParallelEmbedding};

/// Fused linear cross-entropy: computes an [`OutputLayer`] and the [`VocabParallelCrossEntropy`] of its logits, in
/// chunks of tokens. Only the logits of one chunk are in memory at the same time.
///
/// [`sums`](Self::sums) takes the factor of the loss as an argument. It can therefore overwrite the logits with their
/// gradient in the forward pass. With several chunks, the forward pass also computes the gradients of the hidden states
/// and of the weight (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989). These gradients are kept until the backward
/// pass. The gradient of the hidden states is `[tokens, hidden]` in the dtype of the model. The weight gradient is
/// `[vocabulary / tensor, hidden]` in f32 (in f64 for an f64 model), and is summed over the chunks in order.
///
/// [`losses`](Self::losses) returns the loss of each token. The gradient of these losses need not be known in the
/// forward pass. The backward pass of the losses computes the logits of each chunk again.
///
/// With a single chunk, or with an unfused loss, the gradients of the hidden states and of the weight are computed in
/// the backward pass, as in an [`OutputLayer`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_megatron::nn::{
///     LinearCrossEntropy, OutputLayerConfig, VocabParallelCrossEntropy, Vocabulary,
/// };
/// use burn_megatron::prelude::*;
///
/// let (groups, device) = (ParallelContext::single(), Device::flex());
/// let vocabulary = Vocabulary { tokens: 8, padded: 8 };
/// let output = OutputLayerConfig::new(vocabulary, 6).init(&ModelBuilder::new(&groups, &device))?;
/// let loss = VocabParallelCrossEntropy::new(vocabulary, groups.tensor());
/// // The logits of at most 2 tokens are in memory at once.
/// let loss = LinearCrossEntropy::new(loss, Some(2));
/// let x = Tensor::<3>::zeros([1, 4, 6], &device);
/// let targets = Tensor::<2, Int>::from_data([[0, 3, 5, 7]], &device);
/// let losses = loss.losses(x, &output, None, targets).objective;
/// assert!((losses.mean().into_scalar::<f32>() - 8f32.ln()).abs() < 1e-5);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy {
    loss: VocabParallelCrossEntropy,
    chunk_size: Option<usize>,
    soft_cap: Option<f64>,
}

impl LinearCrossEntropy {
    /// Creates the loss, which is computed in chunks of `chunk_size` tokens. See [`LogitsShape::tokens_per_chunk`] for
    /// the default size.
    pub fn new(loss: VocabParallelCrossEntropy, chunk_size: Option<usize>) -> Self {
        Self {
            loss,
            chunk_size,
            soft_cap: None,
        }
    }

    /// Sets the soft cap `c`: the loss uses `c tanh(z / c)` instead of the logits `z`, as in Gemma 2.
    pub fn with_soft_cap(mut self, soft_cap: Option<f64>) -> Self {
        self.soft_cap = soft_cap;
        self
    }

    /// Returns the loss terms that are added to the cross-entropy.
    pub fn terms(&self) -> &'static [LossTerm] {
        self.loss.terms()
    }

    /// Returns the loss of each token, given the hidden states `x`. `x` and `embedding` are the arguments of
    /// [`OutputLayer::forward`]. `targets` is `[batch, seq]`.
    ///
    /// # Panics
    ///
    /// See [`OutputLayer::forward`].
    pub fn losses(
        &self,
        x: Tensor<3>,
        output: &OutputLayer,
        embedding: Option<&VocabParallelEmbedding>,
        targets: Tensor<2, Int>,
    ) -> Losses {
        let shape = targets.dims();
        let losses = self.of_tokens(x, output, embedding, targets, None);
        Losses::of_tokens(losses, shape)
    }

    /// Returns the sums of the [losses](Self::losses) over the tokens. Before the backward pass, the caller must
    /// multiply the summed objective by `factor`. A different factor also gives correct gradients, but may lose small
    /// values in f16.
    ///
    /// # Panics
    ///
    /// See [`OutputLayer::forward`].
    pub fn sums(
        &self,
        x: Tensor<3>,
        output: &OutputLayer,
        embedding: Option<&VocabParallelEmbedding>,
        targets: Tensor<2, Int>,
        factor: &LossFactor,
    ) -> SummedLosses {
        let factor = Some(factor.clone());
        let (objective, parts) = self.of_tokens(x, output, embedding, targets, factor);
        SummedLosses::new(objective, &parts)
    }

    /// Returns the losses `[tokens]` and the parts of the losses. If `factor` is given, returns the sum `[1]` instead
    /// of the losses.
    fn of_tokens(
        &self,
        x: Tensor<3>,
        output: &OutputLayer,
        embedding: Option<&VocabParallelEmbedding>,
        targets: Tensor<2, Int>,
        factor: Option<LossFactor>,
    ) -> TokenLosses {
        let Some(rows) = self.rows_per_chunk(&x, targets.dims()) else {
            let logits = capped(output.forward(x, embedding), self.soft_cap);
            return self.loss.of_tokens(logits, targets, factor);
        };
        self.chunked(x, output, embedding, targets, (rows, factor))
    }

    /// Returns the number of tokens of a chunk, or `None` if there is only one chunk.
    fn rows_per_chunk(&self, x: &Tensor<3>, [batch, seq]: [usize; 2]) -> Option<usize> {
        let [_, _, hidden] = x.dims();
        let logits = LogitsShape {
            tokens: batch * seq,
            width: self.loss.vocabulary.padded / self.loss.comm.size(),
            hidden,
            size: x.dtype().size(),
        };
        let chunk = logits.tokens_per_chunk(self.chunk_size);
        Some(chunk).filter(|chunk| self.loss.fused && *chunk < logits.tokens)
    }

    /// Computes the losses in chunks.
    fn chunked(
        &self,
        x: Tensor<3>,
        output: &OutputLayer,
        embedding: Option<&VocabParallelEmbedding>,
        targets: Tensor<2, Int>,
        (rows_per_chunk, factor): (usize, Option<LossFactor>),
    ) -> TokenLosses {
        let shape = targets.dims();
        let weight = Weight::of(output.weight_of(embedding), &x);
        let cell = ComponentsCell::default();
        let function = ChunkedLoss {
            loss: self.loss.rows_loss(),
            soft_cap: self.soft_cap,
            targets: flat_targets(targets, &x.device()),
            shape,
            weight_shape: weight.tensor.dims(),
            dtype: x.dtype(),
            rows_per_chunk,
            factor,
            components: cell.clone(),
            input: output.input(),
            needed: NeededGradients {
                input: is_tracked(&x),
                weight: weight.trains(),
            },
            hooked: weight.hooked,
            arithmetic: FloatArithmetic {
                kernels: output.kernels,
                transposed: true,
            },
        };
        let inputs = vec![x.into_dispatch(), weight.tensor.into_dispatch()];
        let objective = apply(inputs, function);
        (objective, self.loss.parts(&cell, shape))
    }
}

/// Maps hidden states `[batch, seq, hidden]` and a weight `[width, hidden]` to losses.
#[derive(Debug)]
struct ChunkedLoss {
    loss: FusedLoss,
    soft_cap: Option<f64>,
    /// `[tokens]`
    targets: Tensor<1, Int>,
    /// The batch and sequence sizes of the targets.
    shape: [usize; 2],
    /// The shape of this rank's weight.
    weight_shape: [usize; 2],
    dtype: DType,
    rows_per_chunk: usize,
    /// The factor of the sum of the losses, if it is known. The output is then the sum.
    factor: Option<LossFactor>,
    components: ComponentsCell,
    input: InputLayout,
    needed: NeededGradients,
    /// The hook that supplies the weight to the backward pass and receives its gradient. With `None` the autodiff graph
    /// does both.
    hooked: Option<HookedWeight>,
    arithmetic: FloatArithmetic,
}

/// A chunk of consecutive tokens.
pub(super) struct Chunk {
    pub first: usize,
    /// The hidden states: `[rows, hidden]`.
    pub x: Tensor<2>,
    pub targets: Tensor<1, Int>,
}

impl ChunkedLoss {
    /// Returns the chunks of the hidden states `[tokens, hidden]`.
    fn chunks(&self, x: &Tensor<2>) -> impl Iterator<Item = Chunk> {
        let tokens = x.dims()[0];
        (0..tokens).step_by(self.rows_per_chunk).map(move |first| {
            let rows = self.rows_per_chunk.min(tokens - first);
            Chunk {
                first,
                x: x.clone().narrow(0, first, rows),
                targets: self.targets.clone().narrow(0, first, rows),
            }
        })
    }

    /// Returns the logits of a chunk, with the soft cap.
    fn logits(&self, chunk: &Chunk, weight: &Tensor<2>) -> Tensor<2> {
        let weight = weight.clone().transpose();
        let logits = self.arithmetic.product(chunk.x.clone(), weight, None);
        capped(logits, self.soft_cap)
    }

    /// Returns the slopes of the soft cap at these logits, if there is a soft cap. Call this function before the
    /// gradient overwrites the logits.
    fn slopes(&self, logits: &Tensor<2>) -> Option<Tensor<2>> {
        let slopes = |cap| soft_cap_slope(logits.clone(), cap);
        self.soft_cap.map(slopes)
    }

    /// Computes the logits of each chunk again, for any gradient `[tokens]` of the losses.
    fn recompute(&self, saved: Vec<DispatchTensor>, upstream: Tensor<1>) -> OutputGradients {
        let mut saved = saved.into_iter();
        let mut next = || match saved.next() {
            Some(tensor) => tensor,
            None => unreachable!("the forward saved it"),
        };
        let x = rows(self.input.gathered(Tensor::from_dispatch(next())).wait());
        let log_sum_exp = Tensor::<1>::from_dispatch(next());
        let weight = match &self.hooked {
            Some(hooked) => hooked.value(Pass::Backward),
            None => Tensor::from_dispatch(next()),
        };
        let mut gradients = OutputGradients::new(&x, &weight, self.needed);
        for chunk in self.chunks(&x) {
            let logits = self.logits(&chunk, &weight);
            let own = |x: &Tensor<1>| x.clone().narrow(0, chunk.first, logits.dims()[0]);
            let (lse, upstream) = (own(&log_sum_exp), own(&upstream));
            let slopes = self.slopes(&logits);
            let dy = self
                .loss
                .gradient(logits, chunk.targets.clone(), lse, upstream);
            let dy = before_cap(dy, slopes);
            gradients.add(chunk, dy, &weight, &self.arithmetic);
        }
        gradients
    }
}

impl Function for ChunkedLoss {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let weight = Tensor::<2>::from_dispatch(inputs[1].clone());
        let x = self
            .input
            .gathered(Tensor::from_dispatch(inputs[0].clone()));
        let x = rows(x.wait());
        let is_needed = self.needed.input || self.needed.weight;
        let known = self.factor.as_ref().filter(|_| is_needed);
        let mut gradients = known.map(|factor| {
            let dtype = wide(x.dtype());
            let upstream = factor.expanded(self.rows_per_chunk, &x.device(), dtype);
            (upstream, OutputGradients::new(&x, &weight, self.needed))
        });
        let (mut losses, mut sums) = (vec![], vec![]);
        for chunk in self.chunks(&x) {
            let logits = self.logits(&chunk, &weight);
            let targets = chunk.targets.clone();
            losses.push(match &mut gradients {
                Some((upstream, gradients)) => {
                    let upstream = upstream.clone().narrow(0, 0, logits.dims()[0]);
                    let slopes = self.slopes(&logits);
                    let (losses, dy) = self.loss.with_gradient(logits, targets, upstream);
                    let dy = before_cap(dy, slopes);
                    gradients.add(chunk, dy, &weight, &self.arithmetic);
                    losses
                }
                None => {
                    let (losses, log_sum_exp) = self.loss.forward(logits, targets);
                    sums.push(log_sum_exp);
                    losses
                }
            });
        }
        let losses = joined(losses, &self.components);
        let saved = match gradients {
            Some((_, gradients)) => gradients.into_saved(),
            None => {
                let log_sum_exp = Tensor::cat(sums, 0).into_dispatch();
                let mut saved = inputs;
                saved.insert(1, log_sum_exp);
                saved.truncate(if self.hooked.is_some() { 2 } else { 3 });
                saved
            }
        };
        let output = match self.factor {
            Some(_) => losses.sum(),
            None => losses,
        };
        (output.into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let upstream = Tensor::<1>::from_dispatch(gradient);
        let gradients = match &self.factor {
            Some(factor) => {
                OutputGradients::from_saved(saved, self.needed).scaled(factor.ratio(upstream))
            }
            None => self.recompute(saved, upstream),
        };
        let ([batch, seq], [_, hidden]) = (self.shape, self.weight_shape);
        let input = gradients.input.map(|dx| {
            let dx = dx.reshape([batch, seq, hidden]);
            self.input.reduced(dx)
        });
        let hook = self.hooked.as_ref().and_then(HookedWeight::taking);
        let weight = gradients.weight.and_then(|dw| match hook {
            Some(handle) => {
                handle.sink.accumulate_later(handle.index, computed(dw));
                None
            }
            None => Some(dw.reshape(self.weight_shape).cast(self.dtype)),
        });
        vec![
            input.map(|dx| dx.wait().into_dispatch()),
            weight.map(Tensor::<2>::into_dispatch),
        ]
    }
}

fn capped<const D: usize>(logits: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    match cap {
        Some(cap) => soft_cap(logits, cap),
        None => logits,
    }
}

/// Returns the gradient of the logits, given the gradient of the capped logits.
fn before_cap(dy: Tensor<2>, slopes: Option<Tensor<2>>) -> Tensor<2> {
    let Some(slopes) = slopes else {
        return dy;
    };
    let dtype = dy.dtype();
    (dy.cast::<DType>(slopes.dtype()) * slopes).cast(dtype)
}

/// Joins the losses of the chunks, and writes their components.
fn joined(chunks: Vec<FusedLosses>, components: &ComponentsCell) -> Tensor<1> {
    let (mut losses, mut parts) = (vec![], vec![]);
    for chunk in chunks {
        losses.push(chunk.loss);
        parts.extend(chunk.components);
    }
    components.put(LossComponents::joined(parts));
    Tensor::cat(losses, 0)
}
