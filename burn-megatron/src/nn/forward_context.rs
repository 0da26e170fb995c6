//! Thread-local context that determines how parameters enter the autodiff graph in the current forward pass.
//!
//! A layer reads its parameters with [`Param::val`](burn::module::Param::val), which takes no arguments. The
//! parameter hook reads its other inputs from the [`ForwardContext`] of the thread. Only a [`ForwardContextGuard`]
//! changes the context:
//!
//! | entered by | changes |
//! |---|---|
//! | the data-parallel wrapper and the pipeline engine, for each forward pass | the anchor |
//! | a layer, for its own parameters ([`with_anchor`]) | the anchor |
//! | the first pass of a recomputed block ([`recompute_first_pass`]) | the anchor (removed) and the mode |
//! | the second pass of a recomputed block, in the backward pass ([`recompute_second_pass`]) | the anchor and the mode |
//! | an operation whose backward does not need the parameter value ([`without_saving`]) | whether the value is saved |
//! | a backward pass that leaves the gradients of lookups to its caller ([`deferring_lookups`]) | the deferred lookups |
//! | the removal of the hooks of a module ([`detaching`]) | whether hooks supply values |
//!
//! A backward pass that runs [during](outside_forward) a forward pass has its own context, [`ForwardContext::NONE`].
//! When a [node](super::schedule_nodes) of the forward pass ends, the anchor becomes the anchor of the next node for
//! the rest of the current scope ([`set_anchor`]).
//!
//! - **Lifetime**: each of these functions enters the context, calls its body, and restores the outer context when
//!   the body returns or unwinds. Outside all of them the context is [`ForwardContext::NONE`].
//! - **Nesting**: the inner context inherits the fields of the outer context, except for the fields that it changes.
//! - **Threads**: each rank is a thread with its own context. A new thread that is started inside a body begins with
//!   [`ForwardContext::NONE`]. A backward pass may run on any thread, because it takes no anchor from the context. The
//!   second pass of a recomputed block enters its own context.

use std::cell::RefCell;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::record;

use super::deferred_lookups::DeferredLookups;

/// The direction of a pass through a model. The direction determines which parameters are needed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The forward pass, from the input to the loss.
    Forward,
    /// The backward pass, from the loss to the input.
    Backward,
}

/// The recording mode of a forward pass. It determines when a parameter hook announces a gradient to its sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardMode {
    /// The forward pass is recorded on the graph. A gradient follows if there is an anchor.
    Recorded,
    /// The first pass of a recomputed block, which is not recorded. The gradient follows from the second pass.
    FirstPass,
    /// The second pass of a recomputed block, inside the backward pass. Its gradients have already been announced.
    SecondPass,
}

/// The state that the hooks of this thread read. See the [module](self) documentation.
#[derive(Clone)]
struct ForwardContext {
    /// The tracked tensor to which parameters are anchored.
    anchor: Option<DispatchTensor>,
    /// Whether the operation that uses a parameter saves it for its backward pass.
    saved: bool,
    mode: ForwardMode,
    /// Whether hooks are being removed.
    is_detaching: bool,
    /// The lookups whose gradients are deferred.
    deferred_lookups: Option<DeferredLookups>,
}

impl ForwardContext {
    /// The context outside any forward pass, in which no parameter is anchored.
    const NONE: Self = Self {
        anchor: None,
        saved: true,
        mode: ForwardMode::Recorded,
        is_detaching: false,
        deferred_lookups: None,
    };
}

thread_local! {
    static CURRENT: RefCell<ForwardContext> = const { RefCell::new(ForwardContext::NONE) };
}

/// The scope of a [`ForwardContext`]. Restores the outer context when dropped, even if the body panics.
///
/// The guards of a thread must be dropped in reverse order. No function returns a guard, so that this order is
/// ensured.
struct ForwardContextGuard {
    outer: ForwardContext,
}

impl ForwardContextGuard {
    /// Enters a copy of the current context with a change.
    fn enter(change: impl FnOnce(&mut ForwardContext)) -> Self {
        let mut inner = CURRENT.with_borrow(Clone::clone);
        change(&mut inner);
        let outer = CURRENT.replace(inner);
        Self { outer }
    }
}

impl Drop for ForwardContextGuard {
    fn drop(&mut self) {
        CURRENT.replace(std::mem::replace(&mut self.outer, ForwardContext::NONE));
    }
}

/// Returns whether operations on `x` are recorded for a backward pass. They are recorded by autodiff, or on the device
/// of a [recording](burn_megatron_kernels::record), which has no autodiff.
pub(crate) fn is_tracked<const D: usize>(x: &Tensor<D>) -> bool {
    (x.is_autodiff() && x.is_tracked()) || record::is_recording_calls()
}

/// Returns whether layers compute as in training: with autodiff, tracked or not, or on the device of a recording.
pub(crate) fn is_training<const D: usize>(x: &Tensor<D>) -> bool {
    x.is_autodiff() || record::is_recording()
}

/// Converts a tensor without autodiff to a constant of a training forward pass.
pub(crate) fn constant<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if record::is_recording() {
        x
    } else {
        Tensor::from_inner(x)
    }
}

/// Runs `body` with its parameters anchored to `anchor`: in the autodiff graph, the parameters depend on this tensor.
///
/// The loss must depend on `anchor`. If autodiff does not track `anchor`, the anchor of the enclosing call remains in
/// effect.
pub fn with_anchor<const D: usize, T>(anchor: &Tensor<D>, body: impl FnOnce() -> T) -> T {
    if !is_tracked(anchor) {
        return body();
    }
    let anchor = anchor.clone().into_dispatch();
    let _guard = ForwardContextGuard::enter(|context| context.anchor = Some(anchor));
    body()
}

/// Runs `body` in the context outside any forward pass, for example a backward pass that runs during a forward pass.
pub(super) fn outside_forward<T>(body: impl FnOnce() -> T) -> T {
    let _guard = ForwardContextGuard::enter(|context| *context = ForwardContext::NONE);
    body()
}

/// Anchors parameters to `anchor` for the rest of the current scope. The graph before `anchor` belongs to another
/// node.
pub(super) fn set_anchor<const D: usize>(anchor: &Tensor<D>) {
    let anchor = anchor.clone().into_dispatch();
    CURRENT.with_borrow_mut(|context| context.anchor = Some(anchor));
}

/// Runs the first pass of a recomputed block, which is not recorded and [runs again](recompute_second_pass) in the
/// backward pass. Announces the gradients of the parameters that the block uses. Inside a second pass, the gradients
/// have already been announced.
pub(super) fn recompute_first_pass<T>(body: impl FnOnce() -> T) -> T {
    let _guard = ForwardContextGuard::enter(|context| {
        context.anchor = None;
        context.mode = match context.mode {
            ForwardMode::Recorded | ForwardMode::FirstPass => ForwardMode::FirstPass,
            ForwardMode::SecondPass => ForwardMode::SecondPass,
        };
    });
    body()
}

/// Runs the second pass of a recomputed block, inside the backward pass, with parameters anchored to `anchor`.
pub(super) fn recompute_second_pass<const D: usize, T>(
    anchor: &Tensor<D>,
    body: impl FnOnce() -> T,
) -> T {
    let _guard = ForwardContextGuard::enter(|context| context.mode = ForwardMode::SecondPass);
    with_anchor(anchor, body)
}

/// Runs `body`, an operation whose backward does not need the values of its parameters, such as a lookup. The values
/// are not kept alive until the backward pass.
pub(super) fn without_saving<T>(body: impl FnOnce() -> T) -> T {
    let _guard = ForwardContextGuard::enter(|context| context.saved = false);
    body()
}

/// Runs `body` with hooks that return the tensor that the module holds.
pub(super) fn detaching<T>(body: impl FnOnce() -> T) -> T {
    let _guard = ForwardContextGuard::enter(|context| context.is_detaching = true);
    body()
}

/// Returns whether hooks are being removed.
pub(super) fn is_detaching() -> bool {
    CURRENT.with_borrow(|context| context.is_detaching)
}

/// Runs `backward` and defers the gradients of these lookups.
pub(super) fn deferring_lookups<T>(lookups: DeferredLookups, backward: impl FnOnce() -> T) -> T {
    let change = |context: &mut ForwardContext| context.deferred_lookups = Some(lookups);
    let _guard = ForwardContextGuard::enter(change);
    backward()
}

/// Returns the lookups whose gradients are deferred, if any.
pub(super) fn deferred_lookups() -> Option<DeferredLookups> {
    CURRENT.with_borrow(|context| context.deferred_lookups.clone())
}

/// Returns the current anchor, inside a recorded forward pass.
pub(super) fn anchor() -> Option<DispatchTensor> {
    CURRENT.with_borrow(|context| context.anchor.clone())
}

/// Returns whether the operation that uses a parameter saves it for its backward pass.
pub(super) fn saved() -> bool {
    CURRENT.with_borrow(|context| context.saved)
}

/// Returns the recording mode of the current forward pass.
pub(super) fn mode() -> ForwardMode {
    CURRENT.with_borrow(|context| context.mode)
}

/// Returns the direction in which the model runs on this thread.
pub(super) fn pass() -> Pass {
    match mode() {
        ForwardMode::SecondPass => Pass::Backward,
        ForwardMode::Recorded | ForwardMode::FirstPass => Pass::Forward,
    }
}

/// Returns whether the current computation is only recorded for the backward of a recomputed block, whose output has
/// already been computed. This is true in its second pass, except in a first pass nested inside.
pub(super) fn is_second_pass() -> bool {
    mode() == ForwardMode::SecondPass && anchor().is_some()
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, resume_unwind};

    use burn::tensor::Device;

    use super::*;

    /// Returns whether there is an anchor, whether parameters are saved, and the mode.
    fn current() -> (bool, bool, ForwardMode) {
        (anchor().is_some(), saved(), mode())
    }

    const NONE: (bool, bool, ForwardMode) = (false, true, ForwardMode::Recorded);

    fn tracked() -> Tensor<1> {
        Tensor::zeros([1], &Device::flex().autodiff()).require_grad()
    }

    #[test]
    fn an_inner_context_changes_its_own_fields_only() {
        with_anchor(&tracked(), || {
            without_saving(|| {
                assert_eq!(current(), (true, false, ForwardMode::Recorded));
                recompute_first_pass(|| {
                    assert_eq!(current(), (false, false, ForwardMode::FirstPass));
                    assert_eq!(pass(), Pass::Forward);
                });
                assert_eq!(current(), (true, false, ForwardMode::Recorded));
            });
            recompute_second_pass(&tracked(), || {
                assert_eq!(current(), (true, true, ForwardMode::SecondPass));
                // A recomputed block nested in a second pass.
                recompute_first_pass(|| {
                    assert_eq!(current(), (false, true, ForwardMode::SecondPass));
                    assert_eq!(pass(), Pass::Backward);
                });
            });
            assert_eq!(current(), (true, true, ForwardMode::Recorded));
        });
        assert_eq!(current(), NONE);
    }

    #[test]
    fn a_panic_restores_the_outer_context() {
        let unwound = catch_unwind(|| {
            recompute_second_pass(&tracked(), || {
                without_saving(|| resume_unwind(Box::new("a fault")))
            })
        });
        assert!(unwound.is_err());
        assert_eq!(current(), NONE);
    }

    #[test]
    fn another_thread_has_no_context() {
        with_anchor(&tracked(), || {
            let other = std::thread::spawn(current).join().unwrap();
            assert_eq!(other, NONE);
            assert_eq!(current(), (true, true, ForwardMode::Recorded));
        });
    }
}
