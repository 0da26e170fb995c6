//! A mixture of experts in the place of an MLP.

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::permutation::MAX_EXPERTS;

use super::capacity::Capacity;
use super::dispatch::{Dispatcher, DispatcherKind};
use super::experts::{Experts, ExpertsConfig};
use super::losses::{LayerLosses, RouterLoss, RouterLosses};
use super::router::{Router, RouterConfig};
use super::shared::{SharedExperts, SharedExpertsConfig};
use crate::mesh::ParallelConfig;
use crate::nn::{Activation, BuildError, Init, ModelBuilder};

/// Configuration of a [`MoeMlp`].
#[derive(Config, Debug)]
pub struct MoeMlpConfig {
    /// The router, with the features of a token and the number of experts.
    pub router: RouterConfig,
    /// Intermediate features of one expert, after the activation.
    pub width: usize,
    /// The nonlinearity of the experts.
    pub activation: Activation,
    /// Whether the experts have biases; shared experts have none.
    #[config(default = false)]
    pub bias: bool,
    /// Initial values of the first weights of the experts.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// Initial values of the second weights of the experts.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
    /// How tokens reach their experts.
    #[config(default = "DispatcherKind::AllToAll")]
    pub dispatcher: DispatcherKind,
    /// The most tokens of an expert; by default none is dropped.
    pub capacity: Option<Capacity>,
    /// An MLP for every token beside those of the experts.
    pub shared: Option<SharedExpertsConfig>,
    /// Losses that keep the load of the experts even.
    #[config(default = "vec![]")]
    pub losses: Vec<RouterLoss>,
}

/// A router, experts, and the dispatcher between them; in the place of a [`ParallelMlp`](crate::nn::ParallelMlp).
///
/// Each rank routes its own tokens. The experts are split over the expert axis and their width over the
/// expert-tensor axis, whose ranks read different samples or, under sequence parallelism, different parts of the
/// sequence.
#[derive(Module, Debug)]
pub struct MoeMlp {
    /// Chooses the experts.
    pub router: Router,
    /// This rank's experts.
    pub experts: Experts,
    /// The MLP of every token.
    pub shared: Option<SharedExperts>,
    #[module(skip)]
    dispatcher: Arc<dyn Dispatcher>,
    #[module(skip)]
    capacity: Option<Capacity>,
    #[module(skip)]
    losses: Arc<LayerLosses>,
}

/// What a forward of a [`MoeMlp`] is given besides its input.
#[derive(Clone, Debug, Default)]
pub struct MoeForward<'a> {
    /// Choices `[batch * seq, k]` instead of the router's, such as those of an earlier forward.
    pub choices: Option<Tensor<2, Int>>,
    /// Adds the losses of the router to those of the micro-batch; without it there are none.
    pub losses: Option<&'a RouterLosses>,
}

impl MoeMlpConfig {
    /// Checks the settings against each other and the layout, before anything is allocated.
    ///
    /// # Errors
    ///
    /// What does not fit, and what would: a tensor axis of several ranks without sequence parallelism, whose ranks
    /// have the same tokens; more experts than are sorted at once; padding to the capacity with another dispatcher
    /// than the all-to-all; invalid settings of the router, the capacity or the losses.
    pub fn check(&self, layout: &ParallelConfig) -> Result<(), String> {
        let (experts, tensor) = (self.router.experts, layout.tensor);
        if tensor > 1 && !layout.sequence_parallel {
            return Err(format!(
                "experts with tensor = {tensor} and sequence_parallel = false: each token would be sent {tensor} \
                 times; expected sequence_parallel = true, or tensor = 1"
            ));
        }
        let expert_tensor = layout.expert_tensor_size();
        if experts.saturating_mul(expert_tensor) > MAX_EXPERTS {
            return Err(format!(
                "{experts} experts with expert_tensor = {expert_tensor}: expected a product of at most {MAX_EXPERTS}"
            ));
        }
        let capacity = self.capacity.as_ref();
        capacity.map_or(Ok(()), Capacity::check)?;
        if self.dispatcher == DispatcherKind::AllGather && capacity.is_some_and(|c| c.pad) {
            return Err(
                "padding to the capacity with the all-gather dispatcher: expected the all-to-all dispatcher, or no \
                 padding"
                    .into(),
            );
        }
        LayerLosses::check(&self.losses)?;
        self.router.check()
    }

    /// Builds this rank's part. Collective: call on all ranks of the pipeline stage.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for what [`check`](Self::check) refuses, and for sizes that cannot be split over the ranks.
    pub fn init(&self, builder: &ModelBuilder) -> Result<MoeMlp, BuildError> {
        let layout = builder.groups().config();
        self.check(layout)
            .map_err(|message| builder.error(message))?;
        let RouterConfig {
            hidden, experts, ..
        } = self.router;
        let (groups, path) = (builder.groups(), builder.path());
        let config = ExpertsConfig::new(hidden, self.width, experts, self.activation)
            .with_bias(self.bias)
            .with_init(self.init)
            .with_output_init(self.output_init);
        let shared = self.shared.as_ref().map(|shared| {
            let mlp = shared.mlp(hidden, self.activation);
            let mlp = mlp.with_init(self.init).with_output_init(self.output_init);
            shared.init(mlp, &builder.child("shared"))
        });
        Ok(MoeMlp {
            router: self.router.init(&builder.child("router"))?,
            experts: config.init(&builder.child("experts"))?,
            shared: shared.transpose()?,
            dispatcher: self.dispatcher.init(experts, groups)?.into(),
            capacity: self.capacity,
            losses: LayerLosses::new(&self.losses, &self.router, path, groups)?.into(),
        })
    }
}

impl MoeMlp {
    /// `[batch, seq, hidden]` to the same; `[batch, seq / tensor, hidden]` under sequence parallelism.
    ///
    /// Collective: call on all ranks of expert x expert-tensor, and of the tensor axis with shared experts.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward_with(x, MoeForward::default())
    }

    /// [`forward`](Self::forward) with given choices, or with the losses of the router.
    ///
    /// Collective as `forward`; with losses also over the tensor, context and data axes.
    pub fn forward_with(&self, x: Tensor<3>, with: MoeForward<'_>) -> Tensor<3> {
        let shape = x.dims();
        let [batch, seq, hidden] = shape;
        let tokens = x.clone().reshape([batch * seq, hidden]);
        let routing = self.router.forward(tokens.clone(), with.choices);
        let kept = match &self.capacity {
            Some(capacity) => capacity.apply(routing.clone()),
            None => routing.clone(),
        };
        let dispatched = self.dispatcher.dispatch(tokens, &kept);
        let shared = self.shared.as_ref().map(|shared| shared.forward(x));
        let y = dispatched.apply(|rows| self.experts.forward(rows));
        let y = y.reshape(shape);
        let y = match shared {
            Some(shared) => y + shared,
            None => y,
        };
        match with.losses {
            Some(losses) => self.losses.attach(y, &routing, batch, losses),
            None => y,
        }
    }
}
