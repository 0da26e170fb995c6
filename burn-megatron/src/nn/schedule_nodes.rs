//! Schedule nodes: the parts of the forward pass of a micro-batch, which are separated by exchanges between ranks.
//!
//! A layer in which ranks exchange rows (the features of tokens) splits its forward pass into nodes. The forward pass
//! of a [`MoeMlp`](super::moe::MoeMlp) ends a node when rows are sent, and begins a node when rows arrive. The autodiff
//! graph is cut at these points, as between pipeline stages, so that the backward pass of a micro-batch also runs node
//! by node.
//!
//! The forward pass of one micro-batch runs together with the backward pass of another micro-batch. During each
//! exchange of one pass, the engine runs a node of the other pass. Each pass therefore hides the exchanges of the other
//! pass (Megatron-LM's combined 1F1B; DualPipe, arXiv:2412.19437). In the diagram, `A` is attention, router and
//! permutation, `E` are the experts, and `D` and `C` are dispatch and combine. A prime marks the backward pass:
//!
//! ```text
//! compute   A     E' W'    E     A' W'
//! exchange    C'  D     D'    C     C' of the layer before
//! ```
//!
//! `W'` are the weight gradients of linear layers and experts. The input gradients of a node are computed first, and
//! the exchange of these gradients is started. The weight gradients of the node are computed during this exchange. In
//! the last node, which has the loss, weight gradients are computed before the exchange. The first weight gradient
//! after `A'` is held back until the row counts of the next dispatch are exchanged. If no weight gradient is held back,
//! as in the first layer, the row counts are exchanged during `E'`, and only `W'` overlaps with the exchange of the
//! rows. Exchanging the row counts during `E'` in all layers would delay the exchange of the rows unnecessarily. All
//! other operations, such as dense layers or burn-nn modules, belong to the surrounding node.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{Device, Gradients, Tensor};
use parking_lot::Mutex;

use super::forward_context::{is_tracked, outside_forward, set_anchor};
use super::gradient_slot::{GradientSlot, backward_root};
use super::hook::{Deferred, DeferringSink};
use super::unsaved::identity;

/// An exchange of rows between the ranks of a group. The backward pass exchanges the gradients of the rows.
pub(crate) trait Exchange: fmt::Debug + Send + Sync + 'static {
    /// Starts to send the rows, which are not tracked by autodiff. The handle returns the rows that arrive.
    fn start(&self, rows: Vec<Tensor<2>>) -> PendingExchange;

    /// Starts to send back the gradients of the rows that have arrived. Rows without a gradient are not sent.
    fn start_backward(&self, gradients: Vec<Option<Tensor<2>>>) -> PendingExchange;

    /// Returns whether the row counts of another exchange may follow this exchange.
    fn precedes_counts(&self) -> bool;
}

/// Waits for an exchange that has started.
pub(crate) type PendingExchange = Box<dyn FnOnce() -> Vec<Option<Tensor<2>>> + Send>;

/// The schedule nodes that have run so far in the forward pass of a micro-batch.
///
/// The pipeline engine passes this value to [`Stage::forward_nodes`](crate::pipeline::engine::Stage::forward_nodes).
/// The model passes the value to its MoE layers, in [`Tokens`](super::Tokens). After such a layer, the model may use
/// the output of the layer. It must not use tensors that autodiff tracked before the layer.
#[derive(Clone)]
pub struct ScheduleNodes(Arc<Mutex<NodesSoFar>>);

struct NodesSoFar {
    cuts: Vec<Cut>,
    /// The anchor of the current node.
    anchor: Tensor<1>,
    /// The backward pass of another micro-batch. One of its nodes runs during each exchange.
    beside: Option<BackwardNodes>,
}

impl fmt::Debug for ScheduleNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScheduleNodes({})", self.0.lock().cuts.len())
    }
}

/// The boundary between two nodes.
pub(crate) struct Cut {
    exchange: Arc<dyn Exchange>,
    /// The root of the backward of the node that ends.
    root: Tensor<1>,
    exchanged: Vec<Option<Crossing>>,
    carried: Vec<Option<Crossing>>,
}

/// A tracked tensor that crosses a cut.
struct Crossing {
    /// The slot that holds the gradient after the backward of the later node.
    after: GradientSlot,
    /// The slot that takes the gradient for the backward of the earlier node.
    before: GradientSlot,
}

impl Crossing {
    fn of<const D: usize>(x: &Tensor<D>) -> Option<Self> {
        is_tracked(x).then(|| Self {
            after: GradientSlot::default(),
            before: GradientSlot::default(),
        })
    }
}

impl ScheduleNodes {
    /// Starts the first node, whose parameters are anchored to `anchor`. `beside` is the backward pass whose nodes run
    /// during exchanges.
    pub(crate) fn new(anchor: Tensor<1>, beside: Option<BackwardNodes>) -> Self {
        Self(Arc::new(Mutex::new(NodesSoFar {
            cuts: vec![],
            anchor,
            beside,
        })))
    }

    /// Ends the last node. Returns the anchor of the last node, the cuts before the node, and the rest of the other
    /// backward pass.
    pub(crate) fn finish(&self) -> (Tensor<1>, Vec<Cut>, Option<BackwardNodes>) {
        let mut so_far = self.0.lock();
        let cuts = mem::take(&mut so_far.cuts);
        (so_far.anchor.clone(), cuts, so_far.beside.take())
    }

    /// Ends a node by exchanging `rows`, and begins the next node with the rows that arrive. `carried` holds the
    /// other tracked tensors that later nodes use. All of them become tensors of the next node.
    pub(crate) fn cross(
        &self,
        rows: Vec<Tensor<2>>,
        exchange: impl Exchange,
        carried: &mut [Option<Tensor<3>>],
    ) -> Vec<Tensor<2>> {
        let exchanged: Vec<_> = rows.iter().map(Crossing::of).collect();
        let crossing = |x: &Option<Tensor<3>>| x.as_ref().and_then(Crossing::of);
        let of_carried: Vec<_> = carried.iter().map(crossing).collect();
        let root = {
            let outputs = rows.iter().cloned().map(Tensor::into_dispatch);
            let kept = carried.iter().flatten().cloned().map(Tensor::into_dispatch);
            let is_kept = of_carried
                .iter()
                .zip(carried.iter())
                .filter(|(_, x)| x.is_some());
            let slots = exchanged
                .iter()
                .chain(is_kept.map(|(crossing, _)| crossing))
                .map(|crossing| crossing.as_ref().map(|crossing| crossing.before.clone()));
            let outputs = outputs.chain(kept).collect();
            backward_root(slots.collect(), outputs, self.anchor())
        };
        let pending = exchange.start(rows.into_iter().map(Tensor::inner).collect());
        let holds = exchange.precedes_counts();
        self.with_beside(|beside| beside.run_node(holds));
        let anchor = new_anchor(&root.device());
        let enter =
            |(x, crossing): (Tensor<2>, &Option<Crossing>)| entered(x, crossing.as_ref(), &anchor);
        let arrived = pending().into_iter().flatten();
        let arrived = arrived.zip(&exchanged).map(enter).collect();
        for (x, crossing) in carried.iter_mut().zip(&of_carried) {
            let carried = x.take().map(Tensor::inner);
            *x = carried.map(|x| entered(x, crossing.as_ref(), &anchor));
        }
        set_anchor(&anchor);
        let mut so_far = self.0.lock();
        so_far.anchor = anchor;
        so_far.cuts.push(Cut {
            exchange: Arc::new(exchange),
            root,
            exchanged,
            carried: of_carried,
        });
        arrived
    }

    fn anchor(&self) -> Tensor<1> {
        self.0.lock().anchor.clone()
    }

    /// Runs a part of the other backward pass while the row counts of the next [`cross`](Self::cross) are exchanged.
    pub(crate) fn cover_counts(&self) {
        self.with_beside(BackwardNodes::cover_counts);
    }

    /// Runs a part of the other backward pass, without holding the lock.
    fn with_beside(&self, run: impl FnOnce(&mut BackwardNodes)) {
        let beside = self.0.lock().beside.take();
        if let Some(mut beside) = beside {
            outside_forward(|| run(&mut beside));
            self.0.lock().beside = Some(beside);
        }
    }
}

/// Returns a new scalar that requires a gradient. Parameters of a schedule node attach to it in the autodiff graph.
pub fn new_anchor(device: &Device) -> Tensor<1> {
    Tensor::zeros([1], &device.clone().inner().autodiff()).require_grad()
}

/// Converts a tensor without autodiff to a tensor in the graph of the node with this anchor.
fn entered<const D: usize>(
    x: Tensor<D>,
    crossing: Option<&Crossing>,
    anchor: &Tensor<1>,
) -> Tensor<D> {
    match crossing {
        Some(crossing) => {
            // Unlike a leaf, this operation does not keep its tensor until the backward pass.
            let inputs = vec![x.into_dispatch(), anchor.clone().into_dispatch()];
            let slot = crossing.after.clone();
            identity("NodeInput", inputs, move |gradient| {
                slot.set(gradient);
                vec![None, None]
            })
        }
        None => Tensor::from_inner(x),
    }
}

/// The weight gradients that a backward pass leaves to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftWgrads {
    None,
    /// The gradients of one weight, given by its index in the parameter table.
    Of(usize),
    All,
}

/// The backward pass of a micro-batch, which runs node by node, starting with the last node.
pub(crate) struct BackwardNodes {
    cuts: Vec<Cut>,
    /// The root of the next node.
    root: Option<Tensor<1>>,
    /// Whether no node has run yet.
    is_last: bool,
    /// Waits for the gradients of the next node.
    arriving: Option<Box<dyn FnOnce() + Send>>,
    sink: Arc<dyn DeferringSink>,
    leaves: LeftWgrads,
    left: Vec<Deferred>,
    /// A node whose input gradients have been computed: its gradients, and its pending weight gradients.
    begun: Option<(Gradients, Vec<Deferred>)>,
    /// Weight gradients of the previous node, held for the exchange of row counts.
    held: Vec<Deferred>,
    /// The gradients of the leaves of the first node, once it has run.
    gradients: Option<Gradients>,
    runs: Vec<NodeRun>,
}

/// The start and the end of nodes that ran without interruption.
pub(crate) type NodeRun = [Instant; 2];

/// The results of a finished backward pass.
pub(crate) struct BackwardEnd {
    /// The gradients of the leaves of the first node.
    pub gradients: Gradients,
    pub left: Vec<Deferred>,
    /// The runs of nodes, in order. The forward pass ran between them.
    pub runs: Vec<NodeRun>,
}

impl BackwardNodes {
    /// Creates the backward pass that starts at `root`, the root of the last node.
    pub fn new(
        root: Tensor<1>,
        cuts: Vec<Cut>,
        sink: Arc<dyn DeferringSink>,
        leaves: LeftWgrads,
    ) -> Self {
        Self {
            cuts,
            root: Some(root),
            is_last: true,
            arriving: None,
            sink,
            leaves,
            left: vec![],
            begun: None,
            held: vec![],
            gradients: None,
            runs: vec![],
        }
    }

    /// Computes gradients while row counts are exchanged, without delaying the exchange of the rows. If weight
    /// gradients of the previous node are held back, these are computed. Otherwise the input gradients of the next node
    /// are computed. [`run_node`](Self::run_node) then computes the weight gradients of that node. Does nothing if only
    /// the first node is left, because the first node leaves no work for later.
    pub fn cover_counts(&mut self) {
        if !self.held.is_empty() {
            self.timed(Self::compute_held);
        } else if self.root.is_some() && !self.cuts.is_empty() {
            self.timed(Self::begin);
        }
    }

    /// Runs the next node, or the rest of a node that has begun. Does nothing after the first node. If `holds` is true,
    /// the gradients of one weight are held back for [`cover_counts`](Self::cover_counts).
    pub fn run_node(&mut self, holds: bool) {
        if self.root.is_some() || self.begun.is_some() {
            self.timed(|nodes| nodes.run(holds));
        }
    }

    fn timed(&mut self, run: impl FnOnce(&mut Self)) {
        let _span = tracing::trace_span!("backward_node").entered();
        let start = Instant::now();
        run(self);
        self.runs.push([start, Instant::now()]);
    }

    /// Computes the input gradients of the next node, starts to send the gradients to the node before it, and then
    /// computes its weight gradients.
    fn run(&mut self, holds: bool) {
        self.begin();
        let Some((gradients, deferred)) = self.begun.take() else {
            return;
        };
        match self.cuts.pop() {
            Some(cut) => self.enter(cut),
            None => self.gradients = Some(gradients),
        }
        let leaves = |index| match self.leaves {
            LeftWgrads::All => true,
            LeftWgrads::Of(own) => own == index,
            LeftWgrads::None => false,
        };
        let (left, now): (Vec<_>, Vec<_>) =
            deferred.into_iter().partition(|(index, _)| leaves(*index));
        self.left.extend(left);
        // Holds all gradients of the weight, because their order is the order of their sum.
        let held = now.first().filter(|_| holds).map(|(index, _)| *index);
        let (held, now) = now.into_iter().partition(|(index, _)| held == Some(*index));
        self.held = held;
        self.accumulate(now);
    }

    fn compute_held(&mut self) {
        let held = mem::take(&mut self.held);
        self.accumulate(held);
    }

    fn accumulate(&self, deferred: Vec<Deferred>) {
        for (index, gradient) in deferred {
            self.sink.accumulate_later(index, gradient);
        }
    }

    /// Waits for the gradients of the next node and runs its backward pass without weight gradients, unless it has
    /// begun.
    fn begin(&mut self) {
        let Some(root) = self.root.take() else {
            return;
        };
        // The held gradients must precede other gradients of the same weight.
        self.compute_held();
        if let Some(arriving) = self.arriving.take() {
            arriving();
        }
        // Nothing is exchanged after the first node. In the last node a tied weight may have gradients of several
        // kinds, which must be summed in the order of one graph.
        let defers = !(self.is_last || self.cuts.is_empty()) || self.leaves != LeftWgrads::None;
        self.is_last = false;
        self.begun = Some(if defers {
            let deferring = DeferGuard::new(&*self.sink);
            let gradients = root.backward();
            (gradients, deferring.0.take_deferred())
        } else {
            (root.backward(), vec![])
        });
    }

    /// Passes the gradients at a cut to the node before it.
    fn enter(&mut self, cut: Cut) {
        for crossing in cut.carried.iter().flatten() {
            if let Some(gradient) = crossing.after.take() {
                crossing.before.set(gradient);
            }
        }
        let exchanged = cut.exchanged;
        let gradient = |crossing: &Option<Crossing>| {
            let gradient = crossing.as_ref()?.after.take()?;
            Some(Tensor::from_dispatch(gradient))
        };
        let gradients = exchanged.iter().map(gradient).collect();
        let slots: Vec<_> = exchanged
            .into_iter()
            .map(|crossing| Some(crossing?.before))
            .collect();
        let pending = cut.exchange.start_backward(gradients);
        self.arriving = Some(Box::new(move || {
            for (gradient, slot) in pending().into_iter().zip(slots) {
                if let (Some(gradient), Some(slot)) = (gradient, slot) {
                    slot.set(gradient.into_dispatch());
                }
            }
        }));
        self.root = Some(cut.root);
    }

    /// Runs the remaining nodes.
    pub fn finish(mut self) -> BackwardEnd {
        let start = Instant::now();
        loop {
            if let Some(gradients) = self.gradients.take() {
                self.compute_held();
                self.runs.push([start, Instant::now()]);
                return BackwardEnd {
                    gradients,
                    left: self.left,
                    runs: self.runs,
                };
            }
            self.run(false);
        }
    }
}

/// Defers weight gradients until it is dropped, even if a backward pass panics.
struct DeferGuard<'a>(&'a dyn DeferringSink);

impl<'a> DeferGuard<'a> {
    fn new(sink: &'a dyn DeferringSink) -> Self {
        sink.set_deferring(true);
        Self(sink)
    }
}

impl Drop for DeferGuard<'_> {
    fn drop(&mut self) {
        self.0.set_deferring(false);
    }
}
