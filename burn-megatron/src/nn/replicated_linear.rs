//! A linear layer that is replicated on every rank of the tensor axis.

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
    /// The number of input features.
    pub input: usize,
    /// The number of output features.
    pub output: usize,
    /// The initializer of the weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
}

impl ReplicatedLinearConfig {
    /// Builds the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if an FP8 layer with this path exists.
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

/// A linear layer `y = x W` without a bias. The weight `W` is replicated on every rank of the tensor axis.
///
/// Under sequence parallelism each rank applies the layer to its part of the sequence, and the gradient of the weight
/// is summed over the tensor axis. Without sequence parallelism every rank has the same input. The operation after this
/// layer must then pass the gradient of the full output to every rank, as [`collective::copy`](crate::collective::copy)
/// does.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::ReplicatedLinearConfig;
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let layer = ReplicatedLinearConfig::new(8, 5).init(&builder)?;
/// assert_eq!(layer.forward(Tensor::ones([1, 4, 8], &Device::flex())).dims(), [1, 4, 5]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct ReplicatedLinear {
    /// The weight: `[in, out]`.
    pub weight: Param<Tensor<2>>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    kernels: LinearKernels,
}

impl ReplicatedLinear {
    /// Applies the layer to `[batch, seq, in]`. Returns `[batch, seq, out]`. Under sequence parallelism the sequence
    /// dimension is `seq / tensor`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let operands = LinearOperands {
            fp8: self.fp8.as_ref(),
            ..LinearOperands::new(&self.weight, InputLayout::Local, self.kernels)
        };
        linear(x, operands)
    }
}
