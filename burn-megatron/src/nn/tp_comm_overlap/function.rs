//! A linear layer whose collectives are split into chunks. It supports any arithmetic that multiplies rows
//! independently of each other.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::column_sum::bias_gradient;
use burn_megatron_kernels::gradient::FlatGradients;

use super::TpCommOverlapGroup;
use super::exchange::{GatherInChunks, ReduceScatterInChunks};
use crate::collective::PendingTensor;
use crate::nn::arithmetic::{NeededGradients, SavedInput, WeightSource, rows};
use crate::nn::forward_context;
use crate::nn::hook::Pass;
use crate::nn::linear_function::{LinearFunction, tensor};

impl LinearFunction {
    /// Returns the output, or `None` if the collective is not split into chunks.
    pub(in crate::nn) fn forward_in_chunks(
        &self,
        inputs: &[DispatchTensor],
    ) -> Option<DispatchTensor> {
        let (group, is_sum) = self.input.in_chunks()?;
        let (x, weight) = (tensor::<3>(&inputs[0]), tensor::<2>(&inputs[1]));
        let y = if is_sum {
            let addend = inputs.get(2).map(tensor);
            self.reduced_output(x, weight, addend, group)
        } else {
            let bias = inputs.get(2).map(tensor);
            self.output_of_gathered(x, weight, bias, group)
        };
        Some(y.into_dispatch())
    }

    /// Multiplies the gathered input of all ranks: `[batch, part, in]` to `[batch, seq, out]`.
    fn output_of_gathered(
        &self,
        x: Tensor<3>,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
        group: &TpCommOverlapGroup,
    ) -> Tensor<3> {
        let chunks = group.chunks(x.dims(), x.dtype());
        let mut outputs = vec![];
        GatherInChunks::start(x, chunks, &group.comm).each(|index, x| {
            outputs.push((index, self.chunk_output(x, &weight, bias.clone())));
        });
        chunks.join(outputs)
    }

    /// Returns this rank's part of the sum of the matmuls of all ranks: `[batch, seq, in]` to `[batch, part, out]`.
    fn reduced_output(
        &self,
        x: Tensor<3>,
        weight: Tensor<2>,
        addend: Option<Tensor<3>>,
        group: &TpCommOverlapGroup,
    ) -> Tensor<3> {
        let ([batch, seq, _], out) = (x.dims(), weight.dims()[1]);
        let chunks = group.chunks_of_whole([batch, seq, out], x.dtype());
        if group.ends_region && forward_context::is_second_pass() {
            let part = seq / group.comm.size();
            return Tensor::zeros([batch, part, out], (&x.device(), x.dtype()));
        }
        let sum = ReduceScatterInChunks::of(chunks, &group.comm, |index| {
            let y = self.chunk_output(chunks.rows(&x, index), &weight, None);
            match &addend {
                Some(addend) => y + chunks.rows(addend, index),
                None => y,
            }
        });
        sum.finish()
    }

    fn chunk_output(&self, x: Tensor<2>, weight: &Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        let weight = WeightSource::Graph(weight.clone());
        self.arithmetic.output(x, weight, bias).0
    }

    /// Returns the gradients. `x` is the input, if the weight has a gradient.
    pub(in crate::nn) fn backward_in_chunks(
        &self,
        x: Option<Tensor<3>>,
        weight: WeightSource<'_>,
        dy: Tensor<3>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let Some((group, is_sum)) = self.input.in_chunks() else {
            unreachable!("the exchange is in chunks")
        };
        let weight = needed[0].then(|| weight.value(Pass::Backward));
        if is_sum {
            self.backward_of_reduced(x, weight, dy, needed, group)
        } else {
            self.backward_of_gathered(x, weight, dy, needed, group)
        }
    }

    /// Reduce-scatters the input gradient, and gathers the input for the weight gradient. Each collective overlaps with
    /// its own matmul, so that it is also hidden if the weight gradient is deferred.
    fn backward_of_gathered(
        &self,
        x: Option<Tensor<3>>,
        weight: Option<Tensor<2>>,
        dy: Tensor<3>,
        needed: &[bool],
        group: &TpCommOverlapGroup,
    ) -> Vec<Option<DispatchTensor>> {
        let gathered = x.map(|x| {
            let chunks = group.chunks(x.dims(), x.dtype());
            (GatherInChunks::start(x, chunks, &group.comm), chunks)
        });
        let input_gradient = weight.map(|weight| {
            let ([batch, seq, _], width) = (dy.dims(), weight.dims()[0]);
            let chunks = group.chunks_of_whole([batch, seq, width], dy.dtype());
            ReduceScatterInChunks::of(chunks, &group.comm, |index| {
                self.chunk_input_gradient(chunks.rows(&dy, index), &weight)
            })
        });
        let of_chunks = dy.clone();
        let out = dy.dims()[2];
        let weight_gradient = gathered.and_then(|(x, chunks)| {
            let operands = move |index, x| (x, chunks.rows(&of_chunks, index));
            self.weight_gradient_in_chunks(out, x, operands)
        });
        let dtype = (needed.get(2) == Some(&true)).then_some(dy.dtype());
        let bias_gradient = bias_gradient(rows(dy).into_dispatch(), dtype, self.bias.as_ref());
        let input_gradient = input_gradient.map(ReduceScatterInChunks::finish);
        let mut gradients = vec![input_gradient.map(Tensor::into_dispatch), weight_gradient];
        gradients.extend((needed.len() == 3).then_some(bias_gradient));
        gradients
    }

    /// Gathers the output gradient, for the gradients of the input, the weight and the addend.
    fn backward_of_reduced(
        &self,
        x: Option<Tensor<3>>,
        weight: Option<Tensor<2>>,
        dy: Tensor<3>,
        needed: &[bool],
        group: &TpCommOverlapGroup,
    ) -> Vec<Option<DispatchTensor>> {
        let out = dy.dims()[2];
        let chunks = group.chunks(dy.dims(), dy.dtype());
        let gathered = GatherInChunks::start(dy, chunks, &group.comm);
        let needs_addend = needed.get(2) == Some(&true);
        let mut gradients = vec![None; needed.len()];
        if weight.is_none() && !needs_addend {
            // Only the matmul of the weight gradient can hide the collective.
            gradients[1] = x.and_then(|x| {
                let operands = move |index, dy| (chunks.rows(&x, index), dy);
                self.weight_gradient_in_chunks(out, gathered, operands)
            });
            return gradients;
        }
        let (mut of_input, mut of_output) = (vec![], vec![]);
        gathered.each(|index, dy| {
            if let Some(weight) = &weight {
                of_input.push((index, self.chunk_input_gradient(dy.clone(), weight)));
            }
            if x.is_some() || needs_addend {
                of_output.push((index, dy));
            }
        });
        let joined = |all: Vec<_>| (!all.is_empty()).then(|| chunks.join(all));
        let dy = joined(of_output);
        gradients[1] = x.zip(dy.clone()).and_then(|(x, dy)| {
            let x = SavedInput::Floats(PendingTensor::ready(x));
            let dy = self.arithmetic.gradient(rows(dy), ONLY_WEIGHT);
            self.pass_weight_gradient(out, move |target| dy.weight(x, &[], target))
        });
        gradients[0] = joined(of_input).map(Tensor::into_dispatch);
        if needs_addend {
            gradients[2] = dy.map(Tensor::into_dispatch);
        }
        gradients
    }

    fn chunk_input_gradient(&self, dy: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
        let needed = NeededGradients {
            input: true,
            weight: false,
        };
        let dy = self.arithmetic.gradient(dy, needed);
        dy.input(WeightSource::Graph(weight.clone()), &[])
    }

    /// Passes the weight gradient, summed over the gathered chunks, to the hook, or returns it without a hook.
    /// `operands` returns the rows of the input and of the output gradient, given the gathered rows of a chunk.
    fn weight_gradient_in_chunks(
        &self,
        out: usize,
        gathered: GatherInChunks,
        operands: impl Fn(usize, Tensor<2>) -> (Tensor<2>, Tensor<2>) + Send + 'static,
    ) -> Option<DispatchTensor> {
        let arithmetic = self.arithmetic.clone();
        self.pass_weight_gradient(out, move |target| {
            let (mut place, mut sum) = match target {
                Some(FlatGradients { flat, places }) => (Some(places[0]), Some(flat)),
                None => (None, None),
            };
            gathered.each(|index, rows| {
                let (x, dy) = operands(index, rows);
                let x = SavedInput::Floats(PendingTensor::ready(x.unsqueeze_dim(0)));
                let dy = arithmetic.gradient(dy, ONLY_WEIGHT);
                sum = Some(match (&mut place, sum.take()) {
                    (Some(place), Some(flat)) => {
                        let places = vec![*place];
                        // The following terms are added to this term.
                        place.add = true;
                        dy.weight(x, &[], Some(FlatGradients { flat, places }))
                    }
                    (_, Some(sum)) => sum + dy.weight(x, &[], None),
                    (_, None) => dy.weight(x, &[], None),
                });
            });
            sum.unwrap_or_else(|| unreachable!("there is at least one chunk"))
        })
    }
}

const ONLY_WEIGHT: NeededGradients = NeededGradients {
    input: false,
    weight: true,
};
