//! Activation recomputation (gradient checkpointing).
//!
//! The first pass of a block runs in the forward pass. It is not recorded on the autodiff graph, and only its input is
//! saved. In the backward pass, a second pass runs the block again, records it, and runs its backward pass immediately
//! (Chen et al. 2016, arXiv:1604.06174). Recomputation costs an additional forward pass of the block. It frees the
//! memory of:
//!
//! - the activations inside the block;
//! - the gathered parameters of the block, under full sharding
//!   ([`ZeroStage::Parameters`](crate::data_parallel::ZeroStage::Parameters)). The modules of burn-nn save their
//!   weights in the graph. Without recomputation the parameters of every block would stay gathered from the forward
//!   pass to the backward pass. A recomputed block gathers its parameters again.

//!
//! [`RecomputeConfig`] selects the parts of a model that are recomputed. A module gets its region with
//! [`ModelBuilder::recompute_region`](super::ModelBuilder::recompute_region).

mod builder;
mod config;
mod discard;
mod error;
mod layers;
mod offload;
mod projections;
mod state;

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Gradients, Tensor};
use burn_megatron_kernels::{MultiFunction, apply_multi, record};

use super::gradient_slot::GradientSlot;
use super::schedule_nodes::new_anchor;
use super::{DropoutPosition, forward_context};
use offload::{ActivationStore, SavedInput};

pub use config::{RecomputeConfig, RecomputeGranularity, RecomputeModule};
pub(super) use discard::{SavesInput, apply_discarding};
pub use error::RecomputeError;
pub use layers::{LayerRun, RecomputeLayers, RecomputeMethod};
pub use offload::{ActivationOffload, ActivationUsage, OffloadNote};
pub use state::{Recompute, RecomputeRegion};

/// Returns `body(x)` and saves only `x`. The backward pass runs `body` again to recompute its activations.
///
/// `body` must own the module that it calls. Modules are cheap to clone:
///
/// ```
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use burn_megatron::nn::recompute;
///
/// fn forward(layers: &[Linear], mut x: Tensor<2>) -> Tensor<2> {
///     for layer in layers {
///         let layer = layer.clone();
///         x = recompute(x, move |x| layer.forward(x));
///     }
///     x
/// }
/// ```
///
/// Recomputation takes effect if this function is called in a forward pass of a
/// [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel), or inside
/// [`with_anchor`](super::hook::with_anchor). In other cases, such as an evaluation or a module without a wrapper, this
/// function only calls `body`.
///
/// Both passes must compute the same values:
///
/// - Both passes must draw the same random numbers. Inside [`recompute_at`], [`Dropout`](super::Dropout) draws the same
///   masks. The dropout of burn-nn draws different masks in the second pass, so the gradients would be wrong. Set the
///   probability of such a dropout to 0 inside a block.
/// - State that a forward pass updates, such as the running mean of a batch norm, is updated twice.
///
/// Blocks may be nested. Under full sharding, use one `body` for each element of the block list of the model, one
/// `body` for the layers before the list, and one for the layers after the list. The parameters that a `body` uses are
/// gathered together in the backward pass.
///
/// # Panics
///
/// If `body` uses a tracked tensor other than its input, because the gradient of this tensor would be lost. Parameters
/// of the wrapped module are not tracked, so `body` may use them. Pass other activations as part of `x`.
pub fn recompute<const D: usize, const E: usize>(
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
) -> Tensor<E> {
    let [y] = recompute_outputs(None, x, move |x| [body(x)]);
    y
}

/// Does the same as [`recompute`] for a body with several outputs, whose input may be kept on the host.
fn recompute_outputs<const D: usize, const E: usize, const K: usize>(
    store: Option<&Arc<ActivationStore>>,
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> [Tensor<E>; K] + Send + Sync + 'static,
) -> [Tensor<E>; K] {
    let Some(anchor) = forward_context::anchor() else {
        return body(x);
    };
    let autodiff = x.is_autodiff();
    let inputs = if forward_context::is_tracked(&x) {
        vec![x.into_dispatch()]
    } else {
        // In the first block of a model, parameters need a tracked input.
        vec![x.into_dispatch(), anchor]
    };
    // A second pass is part of the backward pass, so the input of a nested block is used immediately.
    let is_first = forward_context::mode() != forward_context::ForwardMode::SecondPass;
    let store = store.filter(|_| is_first);
    // A recording has only shapes.
    let is_noted = store.is_some() && record::is_recording();
    let block = RecomputedBlock {
        body,
        autodiff,
        offloaded: store.filter(|_| !is_noted).map(SavedInput::new),
        is_noted,
    };
    apply_multi(inputs, block)
}

/// Does the same as [`recompute`], and uses the same dropout masks in both passes. In the second pass, the
/// [`Dropout`](super::Dropout) layers that share `position` draw the masks of the first pass, even if the position has
/// changed in the meantime.
///
/// # Panics
///
/// See [`recompute`].
pub fn recompute_at<const D: usize, const E: usize>(
    position: &DropoutPosition,
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
) -> Tensor<E> {
    let [y] = recompute_in(None, position, x, move |x| [body(x)]);
    y
}

/// Does the same as [`recompute_at`] for a body with several outputs, whose input may be kept on the host.
fn recompute_in<const D: usize, const E: usize, const K: usize>(
    store: Option<&Arc<ActivationStore>>,
    position: &DropoutPosition,
    x: Tensor<D>,
    body: impl Fn(Tensor<D>) -> [Tensor<E>; K] + Send + Sync + 'static,
) -> [Tensor<E>; K] {
    let (position, current) = (position.clone(), position.get());
    recompute_outputs(store, x, move |x| position.at(current.clone(), || body(x)))
}

/// A recomputed block with an input of `D` dims and `K` outputs of `E` dims.
struct RecomputedBlock<const D: usize, const E: usize, const K: usize, F> {
    body: F,
    /// Whether the input has autodiff, tracked or not. Layers treat this as training.
    autodiff: bool,
    /// The saved input, if it may be kept on the host. Otherwise the graph keeps it.
    offloaded: Option<SavedInput<D>>,
    /// Whether a recording notes that the input may be on the host.
    is_noted: bool,
}

impl<const D: usize, const E: usize, const K: usize, F> RecomputedBlock<D, E, K, F>
where
    F: Fn(Tensor<D>) -> [Tensor<E>; K],
{
    /// Runs the second pass and its backward pass in a recording, which has no autodiff.
    fn backward_on_shapes(
        &self,
        x: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let x = input::<D>(x, self.autodiff);
        record::second_pass(|| {
            forward_context::recompute_second_pass(&x, || (self.body)(x.clone()));
        });
        let mut gradients = vec![None; needed.len()];
        gradients[0] = needed[0].then(|| x.empty_like().into_dispatch());
        gradients
    }
}

/// Returns an input with or without autodiff, as in a recorded forward pass, but on no graph.
fn input<const D: usize>(plain: DispatchTensor, autodiff: bool) -> Tensor<D> {
    let plain = Tensor::from_dispatch(plain);
    if autodiff {
        Tensor::from_inner(plain)
    } else {
        plain
    }
}

impl<const D: usize, const E: usize, const K: usize, F> MultiFunction
    for RecomputedBlock<D, E, K, F>
where
    F: Fn(Tensor<D>) -> [Tensor<E>; K] + Send + Sync + 'static,
{
    fn forward(
        &self,
        mut inputs: Vec<DispatchTensor>,
    ) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let x = inputs.swap_remove(0);
        let outputs =
            forward_context::recompute_first_pass(|| (self.body)(input(x.clone(), self.autodiff)));
        let output = |y: Tensor<E>| {
            assert!(
                !(y.is_autodiff() && y.is_tracked()),
                "a recomputed block uses a tracked tensor that is not its input, whose gradient would be \
                 lost: pass it as a part of the input, or do not recompute this block"
            );
            y.inner().into_dispatch()
        };
        let outputs = outputs.map(output).into();
        match &self.offloaded {
            Some(offloaded) => {
                offloaded.save(x);
                (outputs, vec![])
            }
            None => {
                if self.is_noted {
                    record::note(OffloadNote);
                }
                (outputs, vec![x])
            }
        }
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let _span = tracing::trace_span!("recompute").entered();
        if record::is_recording() {
            return self.backward_on_shapes(saved.swap_remove(0), needed);
        }
        let fetched = self.offloaded.as_ref().and_then(SavedInput::take);
        let fetched = fetched.unwrap_or_else(|| saved.swap_remove(0));
        let mut x = input::<D>(fetched, self.autodiff);
        if needed[0] {
            x = x.require_grad();
        }
        let anchor = new_anchor(&x.device());
        let outputs = forward_context::recompute_second_pass(&anchor, || (self.body)(x.clone()));
        let mut leaves = backward_of(outputs.into_iter().zip(gradients), &anchor);
        let mut gradients = vec![None; needed.len()];
        gradients[0] = needed[0].then(|| input_gradient(x, &mut leaves));
        gradients
    }
}

/// Returns the gradient of an input, which is zero if the second pass does not depend on it.
fn input_gradient<const D: usize>(x: Tensor<D>, leaves: &mut Gradients) -> DispatchTensor {
    let gradient = x.grad_remove(leaves);
    let gradient = gradient.unwrap_or_else(|| x.inner().zeros_like());
    gradient.into_dispatch()
}

/// Runs the backward of the outputs of a second pass that have a gradient.
fn backward_of<const D: usize>(
    outputs: impl Iterator<Item = (Tensor<D>, Option<DispatchTensor>)>,
    anchor: &Tensor<1>,
) -> Gradients {
    let root = |(y, gradient): (Tensor<D>, Option<DispatchTensor>)| {
        let slot = GradientSlot::default();
        slot.set(gradient?);
        Some(slot.backward_root(y, anchor.clone()))
    };
    match outputs.filter_map(root).reduce(|sum, root| sum + root) {
        Some(root) => root.backward(),
        None => unreachable!("the backward runs for an output with a gradient"),
    }
}

impl<const D: usize, const E: usize, const K: usize, F> fmt::Debug for RecomputedBlock<D, E, K, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a recomputed block from {D} to {E} dims")
    }
}
