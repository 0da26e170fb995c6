//! A mixture of experts in the place of an MLP.

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::permutation::MAX_EXPERTS;
use burn_megatron_kernels::moe::statistics::count_experts;
use parking_lot::Mutex;

use super::capacity::Capacity;
use super::choice::RouterChoice;
use super::dispatch::{Dispatcher, DispatcherKind, Fp8DispatchScales, Meanwhile};
use super::experts::{Experts, ExpertsConfig};
use super::losses::{LayerLosses, RouterLoss, RouterLossKind};
use super::router::{Router, RouterConfig, Routing};
use super::routers::{RegisteredRouter, ReportedLayer};
use super::shared::{SharedExperts, SharedExpertsConfig};
use super::step::{RankLoad, RouterPass, RouterStep};
use super::token_part::TokenPart;
use crate::collective::Comm;
use crate::mesh::ParallelConfig;
use crate::nn::{
    Activation, BuildError, Init, ModelBuilder, Norm, RecomputeModule, RecomputeRegion, Residual,
};

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
    /// The scales of tokens that the flex dispatcher sends in 8 bits; by default they are sent in their own type. Results
    /// always are.
    pub fp8_dispatch: Option<Fp8DispatchScales>,
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
/// expert-tensor axis, whose ranks read different samples or have different parts of the sequence. Tensor ranks
/// without sequence parallelism have the same tokens: each takes a part of the sequence, and they gather the results.
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
    #[module(skip)]
    path: String,
    /// The tensor ranks, if they have the same tokens.
    #[module(skip)]
    replicated: Option<Comm>,
    #[module(skip)]
    region: RecomputeRegion,
}

/// What a forward of a [`MoeMlp`] is given besides its input.
#[derive(Clone, Debug, Default)]
pub struct MoeForward<'a> {
    /// Choices `[batch * seq, k]` instead of the router's, such as those of an earlier forward.
    pub choices: Option<Tensor<2, Int>>,
    /// The training step, to which the router adds its losses and its load.
    pub step: Option<&'a RouterStep>,
}

impl MoeMlpConfig {
    /// Checks the settings against each other and the layout, before anything is allocated.
    ///
    /// # Errors
    ///
    /// What does not fit, and what would: more experts than are sorted at once; padding to the capacity with another
    /// dispatcher than the all-to-all; a dispatch in 8 bits with another than the flex; invalid settings of the router,
    /// the capacity or the losses.
    pub fn check(&self, layout: &ParallelConfig) -> Result<(), String> {
        let experts = self.router.experts;
        let expert_tensor = layout.expert_tensor_size();
        if experts.saturating_mul(expert_tensor) > MAX_EXPERTS {
            return Err(format!(
                "{experts} experts with expert_tensor = {expert_tensor}: expected a product of at most {MAX_EXPERTS}"
            ));
        }
        let capacity = self.capacity.as_ref();
        capacity.map_or(Ok(()), Capacity::check)?;
        let dispatcher = self.dispatcher.name();
        if self.dispatcher != DispatcherKind::AllToAll && capacity.is_some_and(|c| c.pad) {
            return Err(format!(
                "padding to the capacity with the {dispatcher} dispatcher: expected the all-to-all dispatcher, or no \
                 padding"
            ));
        }
        if self.fp8_dispatch.is_some() && self.dispatcher != DispatcherKind::Flex {
            return Err(format!(
                "fp8_dispatch with the {dispatcher} dispatcher: expected the flex dispatcher, or no fp8_dispatch"
            ));
        }
        let ranks = layout.expert.saturating_mul(expert_tensor);
        if self.dispatcher == DispatcherKind::Flex && ranks > MAX_EXPERTS {
            return Err(format!(
                "expert = {} with expert_tensor = {expert_tensor} and the flex dispatcher: expected a product of at \
                 most {MAX_EXPERTS}",
                layout.expert
            ));
        }
        LayerLosses::check(&self.losses)?;
        let balances = |loss: &RouterLoss| loss.kind != RouterLossKind::ZLoss;
        if self.router.choice == RouterChoice::Sinkhorn {
            if let Some(loss) = self.losses.iter().find(|loss| balances(loss)) {
                return Err(format!(
                    "a {:?} loss with Sinkhorn choices, which are balanced already: expected none, or choices by \
                     scores",
                    loss.kind
                ));
            }
            if capacity.is_some() {
                return Err(
                    "a capacity with Sinkhorn choices: expected none, or choices by scores".into(),
                );
            }
        }
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
        if let Some(lora) = builder.lora_config()
            && let Some(target) = lora.targets().into_iter().find(|target| target.is_mlp())
        {
            return Err(builder.error(format!(
                "lora.target_modules has {target}, and experts cannot have adapters: expected some of q_proj, k_proj, \
                 v_proj and o_proj"
            )));
        }
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
        let router_builder = builder.child("router");
        let router = self.router.init(&router_builder)?;
        builder.routers().register(RegisteredRouter {
            reported: ReportedLayer {
                path: path.into(),
                stage: builder.stage(),
                experts,
                losses: self.losses.iter().map(|loss| loss.kind).collect(),
            },
            bias: router.expert_bias().cloned(),
            bias_path: router_builder.join("expert_bias"),
        });
        Ok(MoeMlp {
            router,
            experts: config.init(&builder.child("experts"))?,
            shared: shared.transpose()?,
            dispatcher: self
                .dispatcher
                .init(experts, self.fp8_dispatch, groups)?
                .into(),
            capacity: self.capacity,
            losses: LayerLosses::new(&self.losses, &self.router, path, groups)?.into(),
            path: path.into(),
            replicated: (builder.place().size > 1 && !builder.sequence_parallel())
                .then(|| groups.tensor().clone()),
            region: builder.recompute_region(Some(RecomputeModule::Moe)),
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

    /// [`forward`](Self::forward) with given choices, or as a part of a training step.
    ///
    /// Collective as `forward`; with losses also over the tensor, context and data axes. Tensor ranks without sequence
    /// parallelism need a sequence that their number divides, if it is recorded by autodiff.
    pub fn forward_with(&self, x: Tensor<3>, with: MoeForward<'_>) -> Tensor<3> {
        if !self.region.is_active() {
            return self.output(x, with);
        }
        self.region.run(x, self.body(with))
    }

    /// [`forward_with`](Self::forward_with) of a normalized residual stream, and the sum of the stream. Only a recomputed
    /// [`Moe`](RecomputeModule::Moe) computes the norm again, as the router reads it too.
    pub fn forward_normalized(
        &self,
        norm: &Norm,
        x: Residual,
        with: MoeForward<'_>,
    ) -> (Tensor<3>, Tensor<3>) {
        if !self.region.is_active() {
            let (normal, stream) = norm.forward_add(x);
            return (self.output(normal, with), stream);
        }
        self.region.run_normalized(norm, x, self.body(with))
    }

    /// The forward as the body of a recomputed region.
    fn body(&self, with: MoeForward<'_>) -> impl Fn(Tensor<3>) -> Tensor<3> + use<> {
        let (moe, choices, step) = (self.clone(), with.choices, with.step.cloned());
        move |x| {
            let with = MoeForward {
                choices: choices.clone(),
                step: step.as_ref(),
            };
            moe.output(x, with)
        }
    }

    fn output(&self, x: Tensor<3>, with: MoeForward<'_>) -> Tensor<3> {
        let (y, shared) = match &self.replicated {
            None => self.forward_part(x.clone(), with, x),
            Some(comm) => {
                let part = TokenPart::of(&x, comm);
                let with = MoeForward {
                    choices: with.choices.map(|choices| part.choices(choices)),
                    ..with
                };
                let (y, shared) = self.forward_part(part.tokens(x.clone()), with, x);
                (part.gather(y), shared)
            }
        };
        match shared {
            Some(shared) => y + shared,
            None => y,
        }
    }

    /// The sum of the experts of each of this rank's tokens, and the output of the shared experts for `whole`.
    fn forward_part(
        &self,
        x: Tensor<3>,
        with: MoeForward<'_>,
        whole: Tensor<3>,
    ) -> (Tensor<3>, Option<Tensor<3>>) {
        let shape = x.dims();
        let [batch, seq, hidden] = shape;
        let tokens = x.clone().reshape([batch * seq, hidden]);
        let routing = self.router.forward(x, with.choices);
        let kept = match &self.capacity {
            Some(capacity) => capacity.apply(routing.clone()),
            None => routing.clone(),
        };
        // The counts of rows travel from here on.
        let started = self.dispatcher.start(&kept);
        let pass = with.step.zip(RouterPass::of(&routing));
        if let Some((step, pass)) = pass
            && pass.reports()
        {
            step.record_load(&self.path, load(&kept));
        }
        let shared = Arc::new(Mutex::new(None));
        let dispatched = started.dispatch(tokens, self.shared_into(&shared, whole));
        let shared = shared.lock().take();
        let y = dispatched.apply(|rows| self.experts.forward(rows));
        let y = y.reshape(shape);
        let y = match pass {
            Some(pass) => self.losses.attach(y, &routing, batch, pass),
            None => y,
        };
        (y, shared)
    }

    /// The work of the shared experts, which puts their output into `to`.
    fn shared_into(&self, to: &Arc<Mutex<Option<Tensor<3>>>>, x: Tensor<3>) -> Meanwhile {
        let (shared, to) = (self.shared.clone(), to.clone());
        Box::new(move || *to.lock() = shared.map(|shared| shared.forward(x)))
    }
}

fn load(kept: &Routing) -> RankLoad {
    let ([_, experts], [tokens, k]) = (kept.logits.dims(), kept.weights.dims());
    RankLoad {
        tokens: count_experts(kept.indices.clone(), experts, 1).reshape([experts]),
        pairs: (tokens * k) as u64,
    }
}
