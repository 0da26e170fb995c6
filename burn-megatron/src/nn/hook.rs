//! Parameter hooks, which control how a parameter enters the autodiff graph and where its gradient goes.
//!
//! Under a [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) a parameter is a plain tensor.
//! It enters the graph through an operation that is anchored to the input of the layer (the *anchor*). The backward
//! of this operation runs right after the backward of the last use of the parameter, when the gradient is final. It
//! passes the gradient to a [`GradientSink`], and Burn's `Gradients` do not contain it. A bucket can therefore be
//! reduced while the backward continues, and no autodiff leaf is shared.
//!
//! The hook also supplies the value. A sink may hold the parameters in another form (sharded, in another type, or not
//! gathered yet); it returns the value from [`GradientSink::value`]. The module then holds only the shape.
//!
//! The layers of this crate set the anchor with [`anchored_value`]. Other modules use the anchor of the wrapper, set
//! with [`with_anchor`], and may set closer anchors at block boundaries. Without a wrapper a module has no hooks.

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

/// The flat value of a parameter, as returned by its sink.
pub struct ParameterValue {
    /// The elements of the parameter, flat.
    pub flat: Tensor<1>,
    /// A handle that is kept alive while the value is in use.
    pub keep: KeepAlive,
}

/// A handle that lives as long as a value is in use.
pub type KeepAlive = Option<Arc<dyn Any + Send + Sync>>;

/// Supplies the values of parameters and receives their gradients, one per use.
pub trait GradientSink: Send + Sync + 'static {
    /// Returns the value of parameter `index` of the table, or `None` if the module holds the value.
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        let _ = (index, pass);
        None
    }

    /// Returns a weight that the sink holds in 8 bits. [`value`](Self::value) returns it as floats.
    fn quantized(&self, index: usize, pass: Pass) -> Option<Arc<QuantizedWeight>> {
        let _ = (index, pass);
        None
    }

    /// Returns the path of parameter `index` of the table for reports, if it is available.
    fn path(&self, index: usize) -> Option<String> {
        let _ = index;
        None
    }

    /// Announces that parameter `index` of the table has entered a graph, so that one more gradient follows.
    fn expect(&self, index: usize);

    /// Receives the flat gradient of one use, as a plain tensor.
    fn accumulate(&self, index: usize, gradient: Tensor<1>);

    /// Receives the gradients of several parameters that one operation computes together, one use of each parameter.
    /// See [`GradientBuffer::accumulate`].
    fn accumulate_into(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        for (index, gradient) in parameters.iter().zip(compute(None)) {
            self.accumulate(*index, gradient);
        }
    }

    /// Receives a weight gradient that has not been computed yet. A [`DeferringSink`] stores it while deferring is
    /// on. Another sink computes it immediately, flat.
    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.accumulate(index, gradient(None));
    }
}

/// A deferred weight gradient, with the index of its parameter.
pub type Deferred = (usize, WeightGradientFn);

/// A sink that can defer weight gradients, so that a backward computes only input gradients.
pub trait DeferringSink: GradientSink {
    /// Turns deferring on or off. While it is off, weight gradients are computed immediately.
    fn set_deferring(&self, deferring: bool);

    /// Returns the gradients deferred since the last call.
    fn take_deferred(&self) -> Vec<Deferred>;

    /// Assigns parameters that enter a graph from now on to this pipeline stage.
    fn begin_stage(&self, stage: usize) {
        let _ = stage;
    }

    /// Ends the forwards of this stage for the current step. A gradient with no outstanding use is then final, and
    /// its reduction can start. The pipeline engine calls this when the schedule [reduces the stage's
    /// gradients](crate::pipeline::schedule::ActionKind::ReduceGradients).
    fn close_stage(&self, stage: usize) {
        let _ = stage;
    }
}

/// Returns the value of `param` for an operation whose backward does not need it, such as a lookup. The value is not
/// kept alive until the backward.
pub(crate) fn forward_only_value<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    without_saving(|| param.val())
}

/// Returns the value of `param` for a layer with the input `x`, anchored to `x`.
pub fn anchored_value<const D: usize, const E: usize>(
    param: &Param<Tensor<D>>,
    x: &Tensor<E>,
) -> Tensor<D> {
    with_anchor(x, || param.val())
}

/// Returns the vector `param` for a fused operation on `x`. See [`fused_value`].
pub(super) fn fused_parameter<const E: usize>(
    param: &Param<Tensor<1>>,
    x: &Tensor<E>,
) -> Parameter {
    let (value, destination) = fused_value(param, x);
    Parameter { value, destination }
}

/// Returns the vector `param` for an operation on `x` that computes its gradient but does not read its value. The
/// value is a placeholder, and the gradient must already be [announced](HookHandle::expect). Returns `None` if the
/// gradient goes through the graph.
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

/// Returns `x` as a tracked tensor in a recorded forward, even if it depends only on frozen parameters. Recomputed
/// blocks and products of trained parameters expect tracked inputs.
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

/// Returns the value of `param` for a fused operation on `x`, and the destination of its gradient.
///
/// The operation passes the gradient to the destination. Without a hook, or if `x` is not tracked, there is no
/// destination and the gradient goes through the graph.
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

/// A sink for the backward of an operation. It keeps the value alive until then.
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

/// The hook of one parameter, attached by [`Module::apply_reparameterization`]. The hook of a frozen parameter only
/// supplies the value: the parameter is a constant of the graph.
#[derive(Module, Debug)]
pub struct ParameterHook {
    #[module(skip)]
    exit: HookHandle,
    frozen: bool,
}

/// The sink of a hook, and the index of the parameter in the table of the sink.
#[derive(Clone)]
pub(super) struct HookHandle {
    pub index: usize,
    pub sink: Arc<dyn GradientSink>,
}

impl HookHandle {
    /// Returns the destination of the gradient for the backward of an operation. It keeps `keep` alive.
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

    /// Records that a layer reads the parameter, if fingerprints are taken.
    pub fn note(&self) {
        fingerprint::note_parameter(|| self.sink.path(self.index));
    }

    /// Announces a gradient, unless a first pass has already announced it.
    pub fn expect(&self) {
        if forward_context::mode() != ForwardMode::SecondPass {
            self.sink.expect(self.index);
        }
    }

    /// Announces the gradient of a use that is not recorded. Only the first pass of a recomputed block has such a
    /// gradient.
    pub fn expect_unrecorded(&self) {
        if forward_context::mode() == ForwardMode::FirstPass {
            self.expect();
        }
    }

    /// Returns the value for the current pass.
    pub fn value<const D: usize>(&self, base: Tensor<D>) -> (Tensor<D>, KeepAlive) {
        self.value_in(base, forward_context::pass())
    }

    /// Returns the value with the shape of `base`. If the sink has no value, returns `base`.
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
    /// Creates the hook of parameter `index`.
    pub fn new(index: usize, sink: Arc<dyn GradientSink>) -> Self {
        Self {
            exit: HookHandle { index, sink },
            frozen: false,
        }
    }

    /// Creates the hook of parameter `index` of a sink of frozen parameters.
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

    /// Returns the handle for an operation that passes the gradient to the sink itself, instead of through
    /// [`Self::apply`].
    pub(super) fn handle(&self) -> &HookHandle {
        &self.exit
    }
}

/// Attaches a hook to each parameter of a module, numbered in module order.
#[cfg(test)]
pub(crate) fn attach_hooks<M: Module>(module: M, sink: Arc<dyn GradientSink>) -> M {
    let mut next = 0;
    let hook = move || {
        next += 1;
        ParameterHook::new(next - 1, sink.clone())
    };
    attach_each(module, hook)
}

/// Attaches the hook returned by `next` to each parameter of a module, in module order.
pub fn attach_each<M: Module>(module: M, next: impl FnMut() -> ParameterHook) -> M {
    module.apply_reparameterization(HookAttacher(next))
}

/// Removes the hooks of a module. Its parameters become the tensors that the module holds, which are placeholders if
/// the sink has the values. Burn's mappers keep the hook of a parameter that they replace.
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
                // Keeps the value alive until the backward.
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
