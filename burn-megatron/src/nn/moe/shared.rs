//! Shared experts: an MLP that processes every token. Its output is added to the output of the routed experts.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use crate::mesh::Axis;
use crate::nn::{
    Activation, BuildError, ModelBuilder, ParallelMlp, ParallelMlpConfig, ParameterSpec,
    RecomputeModule, RecomputeRegion, anchored_value,
};

/// Configuration of [`SharedExperts`].
#[derive(Config, Debug)]
pub struct SharedExpertsConfig {
    /// The total number of intermediate features of all shared experts, counted after the activation.
    pub width: usize,
    /// Whether the output for each token is multiplied by a gate, as in Qwen 2.
    #[config(default = false)]
    pub gate: bool,
}

/// The shared experts of an MoE layer: an MLP that is split over the tensor axis. With a gate, the output of the MLP is
/// multiplied by `sigmoid(x gate)`.
#[derive(Module, Debug)]
pub struct SharedExperts {
    /// The MLP.
    pub mlp: ParallelMlp,
    /// The weight of the gate: `[hidden, 1]`.
    pub gate: Option<Param<Tensor<2>>>,
    #[module(skip)]
    region: RecomputeRegion,
}

impl SharedExpertsConfig {
    pub(super) fn mlp(&self, hidden: usize, activation: Activation) -> ParallelMlpConfig {
        ParallelMlpConfig::new(hidden, self.width, activation).with_bias(false)
    }

    pub(super) fn init(
        &self,
        mlp: ParallelMlpConfig,
        builder: &ModelBuilder,
    ) -> Result<SharedExperts, BuildError> {
        let gate = ParameterSpec::new([mlp.hidden, 1], mlp.init)
            .with_sum_over(builder.sequence_parallel().then_some(Axis::Tensor));
        Ok(SharedExperts {
            mlp: mlp.init_in(RecomputeRegion::default(), &builder.child("mlp"))?,
            region: builder.recompute_region(Some(RecomputeModule::SharedExperts)),
            gate: self.gate.then(|| builder.parameter("gate", gate)),
        })
    }
}

impl SharedExperts {
    /// Applies the shared experts to `[batch, seq, hidden]` and returns the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        if !self.region.is_active() {
            return self.output(x);
        }
        let shared = self.clone();
        self.region.run(x, move |x| shared.output(x))
    }

    fn output(&self, x: Tensor<3>) -> Tensor<3> {
        let Some(gate) = &self.gate else {
            return self.mlp.forward(x);
        };
        let gate = anchored_value(gate, &x);
        let scale = sigmoid(x.clone().matmul(gate.unsqueeze()));
        self.mlp.forward(x) * scale
    }
}
