//! The one door by which gradients leave backward.
//!
//! Under a [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) a parameter
//! is a plain tensor that enters the graph through one operation, which hangs on the layer's input
//! (its *anchor*). The operation's backward runs right after the last use of the parameter, when
//! the gradient is final, and hands it to a [`GradientSink`]; nothing is kept in Burn's gradients.
//! So a bucket can be reduced while backward goes on, and no autodiff leaf is ever shared.
//!
//! Our layers name the anchor with [`value_at`]; an unmodified module takes the one that the
//! wrapper has put in place ([`with_anchor`]), and may set nearer ones at the borders of its blocks.
//! A module without a wrapper is an ordinary Burn module: the door is not there.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, Reparameterization};
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

/// Where gradients go when they are final for one use of a parameter.
pub trait GradientSink: Send + Sync + 'static {
    /// The parameter `index` of the table enters a graph: one gradient more will come.
    fn expect(&self, index: usize);

    /// Takes the gradient of one use, a plain tensor of the parameter's shape.
    fn accumulate(&self, index: usize, gradient: DispatchTensor);

    /// Takes a weight gradient that is still to be computed. A sink that can put it off does so
    /// while it is told to ([`DeferringSink`]); any other computes it at once.
    fn accumulate_later(&self, index: usize, gradient: LaterGradient) {
        self.accumulate(index, gradient(None));
    }
}

/// The computation of a weight gradient.
///
/// A sink may give it the sum of earlier gradients, flat and in the type that sums are kept in; the
/// result is then the new sum. Otherwise it is this gradient alone. The result has the parameter's
/// shape.
pub type LaterGradient = Box<dyn FnOnce(Option<Tensor<1>>) -> DispatchTensor + Send>;

/// A weight gradient that was put off, with the index of its parameter.
pub type Deferred = (usize, LaterGradient);

/// A sink that can put off weight gradients, so that a backward computes input gradients only.
pub trait DeferringSink: GradientSink {
    /// From now on weight gradients are put off, or computed at once.
    fn set_deferring(&self, deferring: bool);

    /// What was put off since the last call.
    fn take_deferred(&self) -> Vec<Deferred>;

    /// What enters a graph from now on belongs to this stage of a pipeline.
    fn begin_stage(&self, stage: usize) {
        let _ = stage;
    }

    /// No gradient of this stage will come any more in this step: its sum can begin.
    fn end_stage(&self, stage: usize) {
        let _ = stage;
    }
}

thread_local! {
    /// The tracked tensor on which parameters hang. A rank is a thread, so this is no global state
    /// between ranks.
    static ANCHOR: RefCell<Option<DispatchTensor>> = const { RefCell::new(None) };
}

/// Runs `body` with `anchor` as the tensor on which parameters hang.
///
/// `anchor` must lie on the path to the loss besides. An untracked tensor leaves the outer anchor
/// in place, as nothing can hang on it.
pub fn with_anchor<const D: usize, T>(anchor: &Tensor<D>, body: impl FnOnce() -> T) -> T {
    if !anchor.is_autodiff() || !anchor.is_tracked() {
        return body();
    }
    let outer = ANCHOR.replace(Some(anchor.clone().into_dispatch()));
    let _restore = Restore(outer);
    body()
}

/// Puts the outer anchor back, also when the body unwinds.
struct Restore(Option<DispatchTensor>);

impl Drop for Restore {
    fn drop(&mut self) {
        ANCHOR.set(self.0.take());
    }
}

/// The value of `param` for a layer with the input `x`.
pub fn value_at<const D: usize, const E: usize>(
    param: &Param<Tensor<D>>,
    x: &Tensor<E>,
) -> Tensor<D> {
    with_anchor(x, || param.val())
}

/// The door of one parameter, attached by [`Module::apply_reparameterization`].
#[derive(Module, Debug)]
pub struct Door {
    #[module(skip)]
    exit: Exit,
}

/// To which sink, and as which parameter.
#[derive(Clone)]
pub(super) struct Exit {
    pub index: usize,
    pub sink: Arc<dyn GradientSink>,
}

impl fmt::Debug for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "parameter {}", self.index)
    }
}

impl Door {
    /// The door of parameter `index`.
    pub fn new(index: usize, sink: Arc<dyn GradientSink>) -> Self {
        Self {
            exit: Exit { index, sink },
        }
    }

    /// For an operation that hands over the gradient itself, instead of through [`Self::apply`].
    pub(super) fn exit(&self) -> &Exit {
        &self.exit
    }
}

impl Reparameterization for Door {
    const NAME: &'static str = "gradient_door";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let Some(anchor) = ANCHOR.with_borrow(Clone::clone) else {
            return base;
        };
        self.exit.sink.expect(self.exit.index);
        apply(vec![base.into_dispatch(), anchor], self.exit.clone())
    }
}

impl Function for Exit {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.sink.accumulate(self.index, gradient);
        vec![None, None]
    }
}
