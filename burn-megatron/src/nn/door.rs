//! The one door by which gradients leave backward.
//!
//! Under a [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) a parameter
//! is a plain tensor that enters the graph through one operation, which hangs on the layer's input
//! (its *anchor*). The operation's backward runs right after the last use of the parameter, when
//! the gradient is final, and hands it to a [`GradientSink`]; nothing is kept in Burn's gradients.
//! So a bucket can be reduced while backward goes on, and no autodiff leaf is ever shared.
//!
//! The value comes in through the same door: a sink that keeps the parameters itself, sharded, in
//! another type or not here yet, gives it ([`GradientSink::value`]). What the module holds is then
//! only the shape.
//!
//! Our layers name the anchor with [`value_at`]; an unmodified module takes the one that the
//! wrapper has put in place ([`with_anchor`]), and may set nearer ones at the borders of its blocks.
//! A module without a wrapper is an ordinary Burn module: the door is not there.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, Reparameterization};
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

use super::fp8::QuantizedWeight;

/// The value of a parameter, flat, as its sink gives it.
pub struct Value {
    /// `[elements]`
    pub flat: Tensor<1>,
    /// What is to be kept as long as the value is in use.
    pub keep: Keep,
}

/// Something that lives as long as a value is in use.
pub type Keep = Option<Arc<dyn Any + Send + Sync>>;

/// In which direction a model is being run, which says what parameters are needed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// From the input to the loss.
    Forward,
    /// From the loss to the input.
    Backward,
}

/// Where parameters come from, and where gradients go when they are final for one use of one.
pub trait GradientSink: Send + Sync + 'static {
    /// The value of parameter `index` of the table, where the module itself does not hold it.
    fn value(&self, index: usize, pass: Pass) -> Option<Value> {
        let _ = (index, pass);
        None
    }

    /// The value of a weight that the sink keeps in 8 bits. [`value`](Self::value) gives it as floats.
    fn quantized(&self, index: usize, pass: Pass) -> Option<Arc<QuantizedWeight>> {
        let _ = (index, pass);
        None
    }

    /// The parameter `index` of the table enters a graph: one gradient more will come.
    fn expect(&self, index: usize);

    /// Takes the gradient of one use, a plain tensor of the parameter's shape.
    fn accumulate(&self, index: usize, gradient: DispatchTensor);

    /// Takes a weight gradient that is still to be computed. A sink that can put it off does so
    /// while it is told to ([`DeferringSink`]); any other computes it at once, and takes it flat.
    fn accumulate_later(&self, index: usize, gradient: LaterGradient) {
        self.accumulate(index, gradient(None).into_dispatch());
    }
}

/// The computation of a weight gradient.
///
/// A sink may give it the place where sums are kept; the result is then the whole buffer with this
/// gradient in it. Otherwise it is the gradient alone, flat.
pub type LaterGradient = Box<dyn FnOnce(Option<Place>) -> Tensor<1> + Send>;

/// A stretch of a flat buffer in which the gradients of a parameter are added up.
pub struct Place {
    /// `[length]`: the gradients of several parameters.
    pub flat: Tensor<1>,
    /// Where those of this parameter begin.
    pub offset: usize,
    /// Whether there are earlier gradients to add to; what is there is written over otherwise.
    pub add: bool,
}

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

    /// No forward of this stage will come any more in this step: a gradient that no use is open for
    /// is final, and its sum can begin.
    fn close_stage(&self, stage: usize) {
        let _ = stage;
    }
}

thread_local! {
    /// The tracked tensor on which parameters hang. A rank is a thread, so this is no global state
    /// between ranks.
    static ANCHOR: RefCell<Option<DispatchTensor>> = const { RefCell::new(None) };
    /// Whether the operation that a parameter goes into keeps it for its backward.
    static SAVED: Cell<bool> = const { Cell::new(true) };
    /// What a use of a parameter is.
    static USE: Cell<Use> = const { Cell::new(Use::Recorded) };
}

/// What is said to the sink when a parameter is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// A gradient will come where there is an anchor.
    Recorded,
    /// A gradient will come, though nothing is recorded: the forward will be run again.
    Promised,
    /// This is the run that was promised, or a part of it.
    Again,
}

/// Runs a forward that is recorded nowhere and run [again](again) in the backward: the gradients
/// of the parameters it uses are announced now, unless it is a part of a run that was announced.
pub(crate) fn promising<T>(body: impl FnOnce() -> T) -> T {
    let kind = match USE.get() {
        Use::Recorded | Use::Promised => Use::Promised,
        Use::Again => Use::Again,
    };
    let _restore = (Restore(ANCHOR.take()), RestoreUse(USE.replace(kind)));
    body()
}

/// Runs a forward for the second time, inside of the backward, with `anchor` as the tensor on which
/// parameters hang.
pub(crate) fn again<const D: usize, T>(anchor: &Tensor<D>, body: impl FnOnce() -> T) -> T {
    let _restore = RestoreUse(USE.replace(Use::Again));
    with_anchor(anchor, body)
}

/// What parameters hang on, where a recorded forward is under way.
pub(crate) fn anchor() -> Option<DispatchTensor> {
    ANCHOR.with_borrow(Clone::clone)
}

/// Puts the outer use back.
struct RestoreUse(Use);

impl Drop for RestoreUse {
    fn drop(&mut self) {
        USE.set(self.0);
    }
}

/// In which direction the model is being run on this thread.
pub(super) fn pass() -> Pass {
    match USE.get() {
        Use::Again => Pass::Backward,
        Use::Recorded | Use::Promised => Pass::Forward,
    }
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

/// The value of `param` for an operation that does not need it in its backward, such as a lookup: it
/// need not stay until then.
pub(crate) fn passing_value<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    struct Outer(bool);
    impl Drop for Outer {
        fn drop(&mut self) {
            SAVED.set(self.0);
        }
    }
    let _restore = Outer(SAVED.replace(false));
    param.val()
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

impl Exit {
    /// Announces a gradient.
    pub fn expect(&self) {
        if USE.get() != Use::Again {
            self.sink.expect(self.index);
        }
    }

    /// A use that is recorded nowhere: a gradient of it comes only where the run will come again.
    pub fn pass_by(&self) {
        if USE.get() == Use::Promised {
            self.expect();
        }
    }

    /// The value for the run that is under way.
    pub fn value<const D: usize>(&self, base: Tensor<D>) -> (Tensor<D>, Keep) {
        self.value_in(base, pass())
    }

    /// The value, of the shape of `base`, which is the value itself where the sink has none.
    pub fn value_in<const D: usize>(&self, base: Tensor<D>, pass: Pass) -> (Tensor<D>, Keep) {
        match self.sink.value(self.index, pass) {
            Some(Value { flat, keep }) => (flat.reshape(base.dims()), keep),
            None => (base, None),
        }
    }
}

/// Keeps a value alive until the backward of its door.
struct Leaving {
    exit: Exit,
    _keep: Keep,
}

impl fmt::Debug for Leaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.exit.fmt(f)
    }
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
        let (value, keep) = self.exit.value(base);
        let anchor = anchor();
        if anchor.is_some() || USE.get() == Use::Promised {
            self.exit.expect();
        }
        let Some(anchor) = anchor else {
            return value;
        };
        let leaving = Leaving {
            exit: self.exit.clone(),
            _keep: keep.filter(|_| SAVED.get()),
        };
        apply(vec![value.into_dispatch(), anchor], leaving)
    }
}

impl Function for Leaving {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.exit.sink.accumulate(self.exit.index, gradient);
        vec![None, None]
    }
}
