//! Parameter hooks. A hook controls how a parameter enters the autodiff graph, and which object receives its gradient.
//!
//! Under a [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) a parameter is not an autodiff
//! leaf. It enters the autodiff graph through an operation that depends on the input of the layer (the *anchor*). The
//! backward of this operation runs as soon as the gradient of the parameter is final, which is when the backward of all
//! operations that use the parameter has run. It passes the gradient to a [`GradientSink`], and Burn's `Gradients` do
//! not contain this gradient. A gradient bucket can therefore be reduced while the backward pass continues.
//!
//! The hook also supplies the value of the parameter. A sink may hold the parameters in a different form: sharded, in a
//! different dtype, or not gathered yet. [`GradientSink::value`] then returns the value, and the module holds only the
//! shape.
//!
//! The layers of this crate set the anchor with [`anchored_value`]. Other modules use the anchor that the data-parallel
//! wrapper sets with [`with_anchor`]. At block boundaries, such a module may set another anchor that is closer to its
//! parameters. Without a wrapper a module has no hooks.

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

/// The flattened value of a parameter, which [`GradientSink::value`] returns.
pub struct ParameterValue {
    /// The elements of the parameter as a 1-D tensor, in row-major order.
    pub flat: Tensor<1>,
    /// A handle that the caller must keep alive while it uses the value.
    pub keep: KeepAlive,
}

/// A handle that is dropped when a parameter value is no longer in use, so that its memory can be released.
pub type KeepAlive = Option<Arc<dyn Any + Send + Sync>>;

/// An object that supplies the values of parameters and receives their gradients. It receives one gradient for each use
/// of a parameter in a forward pass.
pub trait GradientSink: Send + Sync + 'static {
    /// Returns the value of parameter `index` of the parameter table, or `None` if the module holds the value.
    fn value(&self, index: usize, pass: Pass) -> Option<ParameterValue> {
        let _ = (index, pass);
        None
    }

    /// Returns the FP8 copies of a weight that the sink holds in FP8, or `None` for other parameters.
    /// [`value`](Self::value) returns the same weight as floats.
    fn quantized(&self, index: usize, pass: Pass) -> Option<Arc<QuantizedWeight>> {
        let _ = (index, pass);
        None
    }

    /// Returns the path of parameter `index` of the parameter table for reports, or `None` if the sink has no paths.
    fn path(&self, index: usize) -> Option<String> {
        let _ = index;
        None
    }

    /// Notifies the sink that parameter `index` of the parameter table was used in an autodiff graph. The sink will
    /// receive one more gradient for this parameter.
    fn expect(&self, index: usize);

    /// Receives the flattened gradient of parameter `index` from one of its uses in the forward pass. The tensor is not
    /// tracked by autodiff.
    fn accumulate(&self, index: usize, gradient: Tensor<1>);

    /// Receives the gradients of several parameters that one operation computes together. Each of these gradients comes
    /// from one use of its parameter in the forward pass. See [`GradientBuffer::accumulate`].
    fn accumulate_into(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        for (index, gradient) in parameters.iter().zip(compute(None)) {
            self.accumulate(*index, gradient);
        }
    }

    /// Receives a function that computes a weight gradient. While deferring is on, a [`DeferringSink`] stores this
    /// function for later. Every other sink computes the gradient immediately.
    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        self.accumulate(index, gradient(None));
    }
}

/// The index of a parameter, and the function that computes its deferred weight gradient.
pub type Deferred = (usize, WeightGradientFn);

/// A sink that can defer weight gradients, so that a backward pass computes only input gradients.
pub trait DeferringSink: GradientSink {
    /// Turns deferring on or off. While deferring is off, weight gradients are computed immediately.
    fn set_deferring(&self, deferring: bool);

    /// Returns the weight gradients that were deferred since the last call.
    fn take_deferred(&self) -> Vec<Deferred>;

    /// Begins pipeline stage `stage`: parameters that enter an autodiff graph from now on belong to this stage.
    fn begin_stage(&self, stage: usize) {
        let _ = stage;
    }

    /// Notifies the sink that this stage has no more forward passes in the current step. The gradient of a parameter is
    /// then final when the gradients of all its uses have been received, and the reduction of the gradient can start.
    /// The pipeline engine calls this method when the schedule [reduces the stage's
    /// gradients](crate::pipeline::schedule::ActionKind::ReduceGradients).
    fn close_stage(&self, stage: usize) {
        let _ = stage;
    }
}

/// Returns the value of `param` for an operation whose backward does not need the value, such as a lookup. The value is
/// not kept alive until the backward pass.
pub(crate) fn forward_only_value<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    without_saving(|| param.val())
}

/// Returns the value of `param` for a layer with the input `x`. In the autodiff graph the value is anchored to `x`. See
/// the [module](self) documentation.
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

/// Returns `x` as a tracked tensor in a recorded forward pass, even if it depends only on frozen parameters. Recomputed
/// blocks and matmuls with trained parameters expect tracked inputs.
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

/// The hook of one parameter, which [`Module::apply_reparameterization`] attaches. The hook of a frozen parameter only
/// supplies the value, and the parameter is a constant in the autodiff graph.
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

    /// Records that a layer reads the parameter, if a fingerprint of the step is being recorded.
    pub fn note(&self) {
        fingerprint::note_parameter(|| self.sink.path(self.index));
    }

    /// Notifies the sink that a gradient will follow, unless the first pass of a recomputed block has already done so.
    pub fn expect(&self) {
        if forward_context::mode() != ForwardMode::SecondPass {
            self.sink.expect(self.index);
        }
    }

    /// Notifies the sink that a gradient will follow for a use that autodiff does not record. This happens only in the
    /// first pass of a recomputed block.
    pub fn expect_unrecorded(&self) {
        if forward_context::mode() == ForwardMode::FirstPass {
            self.expect();
        }
    }

    /// Returns the value of the parameter for the current pass.
    pub fn value<const D: usize>(&self, base: Tensor<D>) -> (Tensor<D>, KeepAlive) {
        self.value_in(base, forward_context::pass())
    }

    /// Returns the value of the parameter, with the shape of `base`. If the sink has no value, returns `base`.
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
    /// Creates the hook of the trained parameter `index` of `sink`.
    pub fn new(index: usize, sink: Arc<dyn GradientSink>) -> Self {
        Self {
            exit: HookHandle { index, sink },
            frozen: false,
        }
    }

    /// Creates the hook of the frozen parameter `index` of `sink`.
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

/// Attaches a hook to each parameter of a module. `next` is called once per parameter, in module order, and returns the
/// hook.
pub fn attach_each<M: Module>(module: M, next: impl FnMut() -> ParameterHook) -> M {
    module.apply_reparameterization(HookAttacher(next))
}

/// Removes the hooks of a module. The parameters then have the values that the module holds. These are placeholders if
/// the sink supplies the values. Without this removal, Burn's mappers keep the hook of a parameter that they replace.
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
                // Keeps the value alive until the backward pass.
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
