//! A linear layer that every rank of the tensor axis holds whole.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::arithmetic::LinearKernels;
use super::fp8::{Fp8Layer, SplitOperands};
use super::input_layout::InputLayout;
use super::linear::{LinearOperands, linear};
use super::{BuildError, Init, ModelBuilder, ParameterSpec};
use crate::mesh::Axis;

/// Configuration of a [`ReplicatedLinear`].
#[derive(Config, Debug)]
pub struct ReplicatedLinearConfig {
    /// Input features.
    pub input: usize,
    /// Output features.
    pub output: usize,
    /// The initial values of the weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
}

impl ReplicatedLinearConfig {
    /// Builds the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if an 8-bit layer with this path exists.
    pub fn init(&self, builder: &ModelBuilder) -> Result<ReplicatedLinear, BuildError> {
        let split = builder.sequence_parallel();
        let weight = ParameterSpec::new([self.input, self.output], self.init)
            .with_sum_over(split.then_some(Axis::Tensor));
        Ok(ReplicatedLinear {
            weight: builder.parameter("weight", weight),
            kernels: builder.linear_kernels(),
            fp8: builder.fp8_layer(SplitOperands {
                input: split,
                gradient: split,
            })?,
        })
    }
}

/// `y = x W` with the same `W` on every rank of the tensor axis.
///
/// Under sequence parallelism each rank multiplies its part of the sequence, so that the gradient of the weight is summed
/// over the tensor axis. Otherwise every rank has the same input, and what follows must give every rank the gradient of
/// the whole output: [`collective::copy`](crate::collective::copy) does.
#[derive(Module, Debug)]
pub struct ReplicatedLinear {
    /// `[in, out]`
    pub weight: Param<Tensor<2>>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    kernels: LinearKernels,
}

impl ReplicatedLinear {
    /// `[batch, seq, in]` to `[batch, seq, out]`; `seq / tensor` tokens under sequence parallelism.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let operands = LinearOperands {
            fp8: self.fp8.as_ref(),
            ..LinearOperands::new(&self.weight, InputLayout::Local, self.kernels)
        };
        linear(x, operands)
    }
}
