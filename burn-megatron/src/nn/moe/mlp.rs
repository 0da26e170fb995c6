//! The MoE layer, which replaces the MLP of a transformer block by a mixture of experts.

use std::sync::Arc;

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::permutation::MAX_EXPERTS;
use burn_megatron_kernels::moe::statistics::count_experts;
use parking_lot::Mutex;

use super::capacity::Capacity;
use super::choice::RouterChoice;
use super::dispatch::{Dispatcher, DispatcherKind, Exchanges, Fp8DispatchScales, Meanwhile};
use super::experts::{Experts, ExpertsConfig};
use super::loss_kind::RouterLossKind;
use super::losses::{LayerLosses, RouterLoss, attach};
use super::routed_tokens::{RankTokens, RoutedTokens};
use super::router::{Router, RouterConfig, Routing};
use super::routers::{RegisteredRouter, ReportedLayer};
use super::shared::{SharedExperts, SharedExpertsConfig};
use super::step::{RankLoad, RouterPass, RouterStep};
use super::token_part::TokenPart;
use crate::collective::Comm;
use crate::mesh::ParallelConfig;
use crate::nn::{
    Activation, BuildError, Init, ModelBuilder, Norm, RecomputeModule, RecomputeRegion, Residual,
    ScheduleNodes,
};

/// Configuration of a [`MoeMlp`].
#[derive(Config, Debug)]
pub struct MoeMlpConfig {
    /// The configuration of the router, which includes the number of features per token and the number of experts.
    pub router: RouterConfig,
    /// The number of intermediate features of one expert, counted after the activation.
    pub width: usize,
    /// The activation function of the experts.
    pub activation: Activation,
    /// Whether the experts have biases. Shared experts never have biases.
    #[config(default = false)]
    pub bias: bool,
    /// The initializer of the weights of the first layer of the experts.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The initializer of the weights of the second layer of the experts.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
    /// The dispatcher, which exchanges tokens with the ranks of their experts.
    #[config(default = "DispatcherKind::AllToAll")]
    pub dispatcher: DispatcherKind,
    /// The dtype of the scales if the flex dispatcher sends tokens in FP8. With `None`, tokens are sent in the dtype of
    /// the model. Results are always sent in the dtype of the model.
    pub fp8_dispatch: Option<Fp8DispatchScales>,
    /// The capacity of the experts. With `None` no token is dropped.
    pub capacity: Option<Capacity>,
    /// The configuration of the shared experts, an MLP that processes every token.
    pub shared: Option<SharedExpertsConfig>,
    /// The auxiliary losses that balance the load of the experts.
    #[config(default = "vec![]")]
    pub losses: Vec<RouterLoss>,
}

/// A mixture-of-experts (MoE) layer: a router, the experts, and a dispatcher that exchanges tokens between ranks. It
/// replaces a [`ParallelMlp`](crate::nn::ParallelMlp).
///
/// Each rank routes its own tokens. The experts are split over the expert axis, and the intermediate features of each
/// expert over the expert-tensor axis. The ranks of these axes process different samples or different parts of the
/// sequence. Without sequence parallelism, all tensor ranks have the same tokens. In this case each tensor rank routes
/// a part of the sequence, and the results are all-gathered.
///
/// Without tensor and context parallelism, the gradients of experts are bit-identical on 1, 2 and 4 expert ranks of one
/// node.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::Activation;
/// use burn_megatron::nn::moe::{MoeMlpConfig, RouterConfig};
/// use burn_megatron::prelude::*;
///
/// // Two data-parallel ranks share 4 experts. Each token chooses 2 experts.
/// let layout = ParallelConfig::new().with_data(2).with_expert(2);
/// let config = MoeMlpConfig::new(RouterConfig::new(8, 4, 2), 6, Activation::SwiGlu);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let moe = config.init(&ModelBuilder::new(&groups, &Device::flex()))?;
///     let y = moe.forward(Tensor::ones([1, 4, 8], &Device::flex()));
///     Ok::<_, AnyError>((moe.experts.up.val().dims(), y.dims()))
/// })?;
/// assert_eq!(shapes, [([2, 8, 2 * 6], [1, 4, 8]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct MoeMlp {
    /// The router, which selects the experts.
    pub router: Router,
    /// This rank's experts.
    pub experts: Experts,
    /// The shared experts, which process every token.
    pub shared: Option<SharedExperts>,
    #[module(skip)]
    dispatcher: Arc<dyn Dispatcher>,
    #[module(skip)]
    capacity: Option<Capacity>,
    #[module(skip)]
    losses: Arc<LayerLosses>,
    #[module(skip)]
    path: String,
    /// The tensor ranks, if all tensor ranks have the same tokens.
    #[module(skip)]
    replicated: Option<Comm>,
    #[module(skip)]
    region: RecomputeRegion,
}

/// Optional arguments of the forward pass of a [`MoeMlp`].
#[derive(Clone, Debug, Default)]
pub struct MoeForward<'a> {
    /// The expert choices `[batch * seq, k]` that replace the choices of the router, for example the choices of an
    /// earlier forward pass.
    pub choices: Option<Tensor<2, Int>>,
    /// The padding and the positions of the tokens of the input, over all tensor ranks. `None` means that the rows have
    /// no padding. A model whose batches may have padding must set this field, so that padding is not routed.
    pub tokens: Option<RoutedTokens>,
    /// The state of the training step, to which the router adds its losses and its load.
    pub step: Option<&'a RouterStep>,
    /// The schedule nodes into which the forward pass is divided. A node ends at each exchange of the layer: see
    /// [`forward_normalized`](MoeMlp::forward_normalized). Without nodes, the forward pass is a single autodiff graph.
    pub nodes: Option<&'a ScheduleNodes>,
}

impl MoeMlpConfig {
    /// Checks that the settings are consistent and fit the parallel layout. No memory is allocated.
    ///
    /// # Errors
    ///
    /// A message with the invalid setting and the valid values, in these cases:
    ///
    /// - there are too many experts;
    /// - a setting of the router, the capacity or the losses is invalid;
    /// - the dispatcher does not support a setting.
    ///
    /// Padding to the capacity requires the all-to-all dispatcher, and dispatch in FP8 requires the flex dispatcher.
    /// The all-gather dispatcher does not support overlap with another micro-batch.
    pub fn check(&self, layout: &ParallelConfig) -> Result<(), String> {
        let experts = self.router.experts;
        let expert_tensor = layout.expert_tensor_size();
        if experts.saturating_mul(expert_tensor) > MAX_EXPERTS {
            return Err(format!(
                "{experts} experts with expert_tensor = {expert_tensor}: expected a product of at most {MAX_EXPERTS}"
            ));
        }
        let capacity = self.capacity.as_ref();
        let dispatcher = self.dispatcher.name();
        if self.dispatcher != DispatcherKind::AllToAll && capacity.is_some_and(|c| c.pad) {
            return Err(format!(
                "padding to the capacity conflicts with the {dispatcher} dispatcher: expected the all-to-all \
                 dispatcher, or no padding"
            ));
        }
        if self.fp8_dispatch.is_some() && self.dispatcher != DispatcherKind::Flex {
            return Err(format!(
                "fp8_dispatch conflicts with the {dispatcher} dispatcher: expected the flex dispatcher, or no \
                 fp8_dispatch"
            ));
        }
        if self.dispatcher == DispatcherKind::AllGather && layout.overlap_moe_expert_parallel_comm {
            return Err(
                "overlap_moe_expert_parallel_comm conflicts with the all-gather dispatcher, whose gradients are summed \
                 as they arrive: expected the all-to-all or the flex dispatcher, or no overlap"
                    .into(),
            );
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
                    "a {:?} loss conflicts with Sinkhorn choices, which are already balanced: expected no such loss, \
                     or choices by scores",
                    loss.kind
                ));
            }
            if capacity.is_some() {
                return Err(
                    "a capacity conflicts with Sinkhorn choices: expected no capacity, or choices by scores".into(),
                );
            }
        }
        self.router.check()?;
        let k = self.router.experts_per_token;
        capacity.map_or(Ok(()), |capacity| capacity.check(k, experts))
    }

    /// Builds this rank's part of the layer. This call is collective: make it on all ranks of the pipeline stage.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if [`check`](Self::check) fails, or if a size cannot be split over the ranks.
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
                stage: builder.stage,
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
    /// Applies the layer to `[batch, seq, hidden]` and returns the same shape. Under sequence parallelism the shape
    /// is `[batch, seq / tensor, hidden]`.
    ///
    /// This call is collective: make it on all ranks of the expert and expert-tensor axes. With shared experts it is
    /// also collective over the tensor axis.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward_with(x, MoeForward::default())
    }

    /// Applies the layer with the optional arguments `with`, such as given expert choices or a training step. This
    /// method does not divide the layer into schedule nodes. After the call, the caller may therefore still use tensors
    /// that were computed before the layer.
    ///
    /// This call is collective over the same ranks as [`forward`](Self::forward). With router losses it is also
    /// collective over the tensor, context and data axes. If autodiff records the forward pass and sequence parallelism
    /// is off, the sequence length must be a multiple of the number of tensor ranks.
    pub fn forward_with(&self, x: Tensor<3>, with: MoeForward<'_>) -> Tensor<3> {
        if self.region.is_active() {
            return self.region.run(x, self.body(with));
        }
        let with = MoeForward {
            nodes: None,
            ..with
        };
        self.output(x, None, with).0
    }

    /// Adds the pending branch of `x` to the residual stream, normalizes the sum with `norm`, and applies the layer to
    /// the normalized values. Also returns the sum, which is the new residual stream. The norm is recomputed only if
    /// the complete layer is recomputed ([`Moe`](RecomputeModule::Moe)), because the router also reads the output of
    /// the norm.
    ///
    /// With [schedule nodes](MoeForward::nodes), a node ends when rows are sent, and the next node begins when the rows
    /// arrive. The first node contains the router, the shared experts and the permutation. The second node contains the
    /// experts. The third node contains all operations after the results arrive. Tensors that autodiff tracked before
    /// the call must not be used afterwards. Use the returned tensors instead. A recomputed layer belongs to a single
    /// node.
    pub fn forward_normalized(
        &self,
        norm: &Norm,
        x: Residual,
        with: MoeForward<'_>,
    ) -> (Tensor<3>, Tensor<3>) {
        if self.region.is_active() {
            return norm.run_in(&self.region, x, self.body(with));
        }
        let (normal, stream) = norm.forward_add(x);
        match self.output(normal, Some(stream), with) {
            (y, Some(stream)) => (y, stream),
            (_, None) => unreachable!("the stream is carried"),
        }
    }

    /// Returns the forward pass as the body of a recomputed region.
    fn body(&self, with: MoeForward<'_>) -> impl Fn(Tensor<3>) -> Tensor<3> + use<> {
        let (moe, choices, step) = (self.clone(), with.choices, with.step.cloned());
        let tokens = with.tokens;
        move |x| {
            let with = MoeForward {
                choices: choices.clone(),
                tokens: tokens.clone(),
                step: step.as_ref(),
                nodes: None,
            };
            moe.output(x, None, with).0
        }
    }

    /// Returns the output for `x`, and the residual stream in the node of the output.
    fn output(
        &self,
        x: Tensor<3>,
        stream: Option<Tensor<3>>,
        with: MoeForward<'_>,
    ) -> (Tensor<3>, Option<Tensor<3>>) {
        let comm = self.replicated.as_ref();
        let [batch, seq, _] = x.dims();
        let tokens = with.tokens.clone().unwrap_or_else(|| {
            let parts = match comm {
                Some(_) => 1,
                None => self.router.place().size,
            };
            RoutedTokens::rows([batch, seq * parts])
        });
        let part = comm.map(|comm| TokenPart::of(&x, comm));
        let (own, choices) = match &part {
            None => (x.clone(), with.choices),
            Some(part) => {
                let choices = with.choices.map(|choices| part.choices(choices));
                (part.tokens(x.clone()), choices)
            }
        };
        let with = MoeForward { choices, ..with };
        let (y, shared, stream) = self.forward_part((own, &tokens), with, (x, stream));
        let y = match &part {
            None => y,
            Some(part) => part.gather(y),
        };
        match shared {
            Some(shared) => (y + shared, stream),
            None => (y, stream),
        }
    }

    /// Returns the sum of the experts for each of this rank's tokens, the output of the shared experts for `whole`,
    /// and the stream.
    fn forward_part(
        &self,
        (x, routed): (Tensor<3>, &RoutedTokens),
        with: MoeForward<'_>,
        (whole, stream): (Tensor<3>, Option<Tensor<3>>),
    ) -> (Tensor<3>, Option<Tensor<3>>, Option<Tensor<3>>) {
        let shape = x.dims();
        let [batch, seq, hidden] = shape;
        let tokens = x.clone().reshape([batch * seq, hidden]);
        let own = self.router.own(routed, &x);
        let routing = self.router.forward(x, with.choices, routed);
        let kept = match &self.capacity {
            Some(capacity) => capacity.apply(routing.clone(), &own),
            None => routing.clone(),
        };
        // The row counts are exchanged from here on.
        let started = self.dispatcher.start(&kept);
        let pass = with.step.zip(RouterPass::of(&routing.logits));
        if let Some((step, pass)) = pass
            && pass.reports()
        {
            step.record_load(&self.path, load(&kept, &own));
        }
        let loss = pass.and_then(|pass| self.losses.sum(&routing, &own, pass));
        let loss = loss.map(|loss| loss.reshape([1, 1, 1]));
        let shared = Arc::new(Mutex::new(None));
        let work = self.shared_into(&shared, whole);
        let meanwhile = match with.nodes {
            None => Some(work),
            Some(_) => {
                work();
                None
            }
        };
        let ready = shared.lock().take();
        let mut exchanges = Exchanges {
            nodes: with.nodes,
            meanwhile,
            // In this order their gradients are summed as in a single graph.
            carried: vec![stream, loss, ready],
        };
        let dispatched = started.dispatch(tokens, &mut exchanges);
        let y = dispatched.apply(|rows| self.experts.forward(rows), &mut exchanges);
        let [stream, loss, ready] = exchanges.into_carried();
        let shared = ready.or_else(|| shared.lock().take());
        let y = y.reshape(shape);
        let y = match (loss, with.step) {
            (Some(loss), Some(step)) => attach(y, loss.reshape([1]), step),
            _ => y,
        };
        (y, shared, stream)
    }

    /// Returns the work of the shared experts, which stores their output in `to`.
    fn shared_into(&self, to: &Arc<Mutex<Option<Tensor<3>>>>, x: Tensor<3>) -> Meanwhile {
        let (shared, to) = (self.shared.clone(), to.clone());
        Box::new(move || *to.lock() = shared.map(|shared| shared.forward(x)))
    }
}

fn load(kept: &Routing, own: &RankTokens) -> RankLoad {
    let ([_, experts], [_, k]) = (kept.logits.dims(), kept.weights.dims());
    RankLoad {
        tokens: count_experts(kept.indices.clone(), experts, 1).reshape([experts]),
        pairs: (own.count * k) as u64,
    }
}
