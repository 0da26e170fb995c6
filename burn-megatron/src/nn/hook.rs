//! Parameter hooks: how a parameter enters the autodiff graph, and how its gradient leaves backward.
//!
//! Under a [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) a parameter
//! is a plain tensor that enters the graph through one operation, which is anchored to the layer's
//! input (the *anchor*). The backward of that operation runs right after that of the parameter's last
//! use, when the gradient is final, and passes it to a [`GradientSink`]; Burn's gradients hold nothing
//! of it. So a bucket is reduced while backward goes on, and no autodiff leaf is shared.
//!
//! The hook also supplies the value: a sink that holds the parameters itself (sharded, in another type,
//! or not gathered yet) returns it from [`GradientSink::value`]. The module then holds the shape only.
//!
//! Our layers set the anchor with [`anchored_value`]; an unmodified module uses the one that the wrapper sets
//! with [`with_anchor`], and may set closer ones at the boundaries of its blocks. Without a wrapper a
//! module is an ordinary Burn module without hooks.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;
pub use burn_megatron_kernels::gradient::WeightGradientFn;
use burn_megatron_kernels::gradient::{ComputeGradients, Destination, GradientBuffer, Parameter};

use super::forward_context::{self, ForwardMode, without_saving};
use super::fp8::QuantizedWeight;
use super::unsaved::identity;
use crate::fingerprint;

pub use super::forward_context::{Pass, with_anchor};

/// The value of a parameter, flat, as its sink returns it.
pub struct ParameterValue {
    /// `[elements]`
    pub flat: Tensor<1>,
    /// Kept alive as long as the value is in use.
    pub keep: KeepAlive,
}

/// Something that lives as long as a value is in use.
pub type KeepAlive = Option<Arc<dyn Any + Send + Sync>>;

/// Supplies the values of parameters and receives their gradients, one per use.
pub trait GradientSink: Send + Sync + 'static {
    /// The value of parameter `index` of the table, where the module itself does not hold it.
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        let _ = (index, pass);
        None
    }

    /// The value of a weight that the sink holds in 8 bits. [`value`](Self::value) returns it as floats.
    fn quantized(&self, index: usize, pass: Pass) -> Option<Arc<QuantizedWeight>> {
        let _ = (index, pass);
        None
    }

    /// The path of parameter `index` of the table, if the sink knows it; for reports.
    fn path(&self, index: usize) -> Option<String> {
        let _ = index;
        None
    }

    /// Announces that parameter `index` of the table entered a graph: one more gradient will follow.
    fn expect(&self, index: usize);

    /// Receives the gradient of one use, a plain tensor, flat.
    fn accumulate(&self, index: usize, gradient: Tensor<1>);

    /// Receives the gradients of one use each of parameters, which one operation computes together: see
    /// [`GradientBuffer::accumulate`].
    fn accumulate_into(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        for (index, gradient) in parameters.iter().zip(compute(None)) {
            self.accumulate(*index, gradient);
        }
    }

    /// Receives a weight gradient that is not computed yet. A [`DeferringSink`] stores it while
    /// deferring is on; any other sink computes it at once, flat.
    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.accumulate(index, gradient(None));
    }
}

/// A deferred weight gradient, with the index of its parameter.
pub type Deferred = (usize, WeightGradientFn);

/// A sink that can defer weight gradients, so that a backward computes input gradients only.
pub trait DeferringSink: GradientSink {
    /// Turns deferring on or off; while it is off, weight gradients are computed at once.
    fn set_deferring(&self, deferring: bool);

    /// Returns the gradients deferred since the last call.
    fn take_deferred(&self) -> Vec<Deferred>;

    /// Assigns what enters a graph from now on to this pipeline stage.
    fn begin_stage(&self, stage: usize) {
        let _ = stage;
    }

    /// Ends the forwards of this stage for the current step: a gradient with no outstanding use is final,
    /// and its reduction can start. The pipeline engine calls it where the schedule
    /// [reduces the stage's gradients](crate::pipeline::schedule::ActionKind::ReduceGradients).
    fn close_stage(&self, stage: usize) {
        let _ = stage;
    }
}

/// The value of `param` for an operation whose backward does not need it, such as a lookup: it is not
/// kept alive until then.
pub(crate) fn forward_only_value<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    without_saving(|| param.val())
}

/// The value of `param` for a layer with the input `x`, anchored to `x`.
pub fn anchored_value<const D: usize, const E: usize>(
    param: &Param<Tensor<D>>,
    x: &Tensor<E>,
) -> Tensor<D> {
    with_anchor(x, || param.val())
}

/// The vector `param` for a fused operation on `x`: see [`fused_value`].
pub(super) fn fused_parameter<const E: usize>(
    param: &Param<Tensor<1>>,
    x: &Tensor<E>,
) -> Parameter {
    let (value, destination) = fused_value(param, x);
    Parameter { value, destination }
}

/// The vector `param` for an operation on `x` that computes its gradient and does not read it: the value is a
/// placeholder, and the gradient must be [announced](HookHandle::expect) already. None where the gradient goes through
/// the graph.
pub(super) fn gradient_parameter<const E: usize>(
    param: &Param<Tensor<1>>,
    x: &Tensor<E>,
) -> Option<Parameter> {
    let hook = ParameterHook::of(param)?;
    let is_recorded = x.is_autodiff() && x.is_tracked();
    let is_first_pass = forward_context::mode() == ForwardMode::FirstPass;
    (is_recorded || is_first_pass).then(|| Parameter {
        value: param.base(),
        destination: Some(hook.handle().destination(None)),
    })
}

/// `x` as a tensor that is tracked in a recorded forward, although it depends on frozen parameters only: recomputed
/// blocks and products of parameters that are trained expect such inputs.
pub(super) fn tracked<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match forward_context::anchor() {
        Some(anchor) if !forward_context::is_tracked(&x) => {
            identity("Entry", vec![x.into_dispatch(), anchor], |_| {
                vec![None, None]
            })
        }
        _ => x,
    }
}

/// The value of `param` for a fused operation on `x`, which passes the gradient to the sink itself.
///
/// Without a hook, or if `x` is not tracked, the gradient goes through the graph.
pub(super) fn fused_value<const D: usize, const E: usize>(
    param: &Param<Tensor<D>>,
    x: &Tensor<E>,
) -> (Tensor<D>, Option<Destination>) {
    let hook = ParameterHook::of(param);
    let Some(hook) = hook.filter(|_| forward_context::is_tracked(x)) else {
        return (anchored_value(param, x), None);
    };
    let handle = hook.handle();
    handle.expect();
    let (value, keep) = handle.value(param.base());
    let keep = keep.filter(|_| forward_context::saved());
    (value, Some(handle.destination(keep)))
}

/// A sink, for the backward of an operation, until which the value is kept alive.
struct SinkBuffer {
    sink: Arc<dyn GradientSink>,
    _keep: KeepAlive,
}

impl GradientBuffer for SinkBuffer {
    fn accumulate(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        self.sink.accumulate_into(parameters, compute);
    }

    fn accumulate_later(&self, parameter: usize, compute: WeightGradientFn) {
        self.sink.accumulate_later(parameter, compute);
    }
}

/// The hook of one parameter, attached by [`Module::apply_reparameterization`]. That of a frozen parameter supplies its
/// value only: the parameter is a constant of the graph.
#[derive(Module, Debug)]
pub struct ParameterHook {
    #[module(skip)]
    exit: HookHandle,
    frozen: bool,
}

/// The sink of a hook, and the index of its parameter there.
#[derive(Clone)]
pub(super) struct HookHandle {
    pub index: usize,
    pub sink: Arc<dyn GradientSink>,
}

impl HookHandle {
    /// Where the backward of an operation passes the gradient; until then `keep` is kept alive.
    fn destination(&self, keep: KeepAlive) -> Destination {
        let buffer = SinkBuffer {
            sink: self.sink.clone(),
            _keep: keep,
        };
        Destination {
            parameter: self.index,
            buffer: Arc::new(buffer),
        }
    }

    /// Notes that a layer reads the parameter, if fingerprints are taken.
    pub fn note(&self) {
        fingerprint::note_parameter(|| self.sink.path(self.index));
    }

    /// Announces a gradient, unless a first pass has announced it.
    pub fn expect(&self) {
        if forward_context::mode() != ForwardMode::SecondPass {
            self.sink.expect(self.index);
        }
    }

    /// Announces the gradient of a use that is not recorded: there is one in the first pass of a
    /// recomputed block only.
    pub fn expect_unrecorded(&self) {
        if forward_context::mode() == ForwardMode::FirstPass {
            self.expect();
        }
    }

    /// The value for the current pass.
    pub fn value<const D: usize>(&self, base: Tensor<D>) -> (Tensor<D>, KeepAlive) {
        self.value_in(base, forward_context::pass())
    }

    /// The value, of the shape of `base`, which is the value itself where the sink has none.
    pub fn value_in<const D: usize>(&self, base: Tensor<D>, pass: Pass) -> (Tensor<D>, KeepAlive) {
        self.note();
        match self.sink.value(self.index, pass) {
            Some(ParameterValue { flat, keep }) => (flat.reshape(base.dims()), keep),
            None => (base, None),
        }
    }
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "parameter {}", self.index)
    }
}

impl ParameterHook {
    /// The hook of parameter `index`.
    pub fn new(index: usize, sink: Arc<dyn GradientSink>) -> Self {
        Self {
            exit: HookHandle { index, sink },
            frozen: false,
        }
    }

    /// The hook of parameter `index` of a sink of frozen parameters.
    pub fn frozen(index: usize, sink: Arc<dyn GradientSink>) -> Self {
        Self {
            frozen: true,
            ..Self::new(index, sink)
        }
    }

    /// Returns the hook of a trained parameter, if it has one.
    pub(in crate::nn) fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        let hook = param.reparameterization::<Self>();
        hook.filter(|hook| !hook.frozen)
    }

    /// Returns the hook of a frozen parameter, if it has one.
    pub(in crate::nn) fn of_frozen<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        let hook = param.reparameterization::<Self>();
        hook.filter(|hook| hook.frozen)
    }

    /// For an operation that passes the gradient to the sink itself, instead of through [`Self::apply`].
    pub(super) fn handle(&self) -> &HookHandle {
        &self.exit
    }
}

/// Attaches a hook to each parameter of a module, numbered in the order of the module.
#[cfg(test)]
pub(crate) fn attach_hooks<M: Module>(module: M, sink: Arc<dyn GradientSink>) -> M {
    let mut next = 0;
    let hook = move || {
        next += 1;
        ParameterHook::new(next - 1, sink.clone())
    };
    attach_each(module, hook)
}

/// Attaches to each parameter of a module, in their order, the hook that `next` returns.
pub fn attach_each<M: Module>(module: M, next: impl FnMut() -> ParameterHook) -> M {
    module.apply_reparameterization(HookAttacher(next))
}

/// A module without its hooks, whose parameters are what it holds itself: placeholders, where the sink has the values.
/// Burn's mappers keep the hook of a parameter that they replace.
pub(crate) fn detach_hooks<M: Module>(module: M) -> M {
    forward_context::detaching(|| module.materialize())
}

struct HookAttacher<F>(F);

impl<F: FnMut() -> ParameterHook> Reparameterizer for HookAttacher<F> {
    type Reparam = ParameterHook;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParameterHook>) {
        let hook = (self.0)();
        (param, Some(hook))
    }
}

impl Reparameterization for ParameterHook {
    const NAME: &'static str = "gradient_door";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if forward_context::is_detaching() {
            return base;
        }
        let (value, keep) = self.exit.value(base);
        let anchor = forward_context::anchor();
        if self.frozen {
            return match anchor {
                Some(_) => forward_context::constant(value),
                None => value,
            };
        }
        if anchor.is_some() || forward_context::mode() == ForwardMode::FirstPass {
            self.exit.expect();
        }
        let Some(anchor) = anchor else {
            return value;
        };
        let (handle, keep) = (self.exit.clone(), keep.filter(|_| forward_context::saved()));
        identity(
            "HookFunction",
            vec![value.into_dispatch(), anchor],
            move |gradient| {
                // Alive until now.
                let _kept = &keep;
                let gradient = Tensor::<D>::from_dispatch(gradient);
                let len = gradient.shape().num_elements();
                handle
                    .sink
                    .accumulate(handle.index, gradient.reshape([len]));
                vec![None, None]
            },
        )
    }
}
