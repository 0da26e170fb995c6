//! Observers of the inputs and results of [`Function`](super::Function) calls.
//!
//! [`observed`] runs a closure and reports the function calls of the closure to an observer. It reports forward passes
//! on the calling thread. It also reports the backward passes of these calls, on any thread. Without an observer, no
//! tensor is read or kept.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::Gradients;

/// An observer of [`Function`](super::Function) calls, which may also change the results of the calls.
pub trait CallObserver: Send + Sync + 'static {
    /// Receives the tensors that a forward or backward pass is about to read. In a forward pass, `forward` is `None`.
    /// In a backward pass, `forward` is the number that [`outputs`](Self::outputs) returned for the call, and `tensors`
    /// are the gradients of the outputs. Returns a number that identifies these inputs. [`outputs`](Self::outputs) or
    /// [`gradients`](Self::gradients) receives this number.
    fn inputs(&self, forward: Option<u64>, tensors: &[&DispatchTensor]) -> u64;

    /// Receives the outputs of a forward pass, and may change them. `inputs` is the number that
    /// [`inputs`](Self::inputs) returned. Returns a number that identifies the call. The backward pass of the call
    /// passes this number as `forward`.
    fn outputs(&self, function: &str, inputs: u64, outputs: &mut [DispatchTensor]) -> u64;

    /// Receives the gradients of the inputs after a backward pass, and may change them. `forward` is the number that
    /// [`outputs`](Self::outputs) returned for the call. `inputs` is the number that [`inputs`](Self::inputs) returned
    /// for this backward pass.
    fn gradients(
        &self,
        function: &str,
        forward: u64,
        inputs: u64,
        gradients: &mut [Option<DispatchTensor>],
    );
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn CallObserver>>> = const { RefCell::new(None) };
}

/// Restores the outer observer when it is dropped, even if the body panics.
struct Restore(Option<Arc<dyn CallObserver>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.replace(self.0.take());
    }
}

/// Runs `body` and reports its function calls to `observer`. If calls of `observed` are nested, only the innermost
/// observer receives the calls.
pub fn observed<T>(observer: Arc<dyn CallObserver>, body: impl FnOnce() -> T) -> T {
    let _restore = Restore(CURRENT.replace(Some(observer)));
    body()
}

/// A forward pass that is observed.
pub(super) struct ObservedForward {
    observer: Arc<dyn CallObserver>,
    inputs: u64,
}

impl ObservedForward {
    /// Starts the observation of a forward pass with these inputs. Returns `None` if there is no observer.
    pub fn begin(inputs: &[DispatchTensor]) -> Option<Self> {
        let observer = CURRENT.with_borrow(Clone::clone)?;
        let inputs = observer.inputs(None, &inputs.iter().collect::<Vec<_>>());
        Some(Self { observer, inputs })
    }

    pub fn end(self, function: &str, outputs: &mut [DispatchTensor]) -> ObservedCall {
        let Self { observer, inputs } = self;
        let forward = observer.outputs(function, inputs, outputs);
        ObservedCall { observer, forward }
    }
}

/// A call whose forward pass was observed. It is kept for the backward pass.
#[derive(Clone)]
pub(super) struct ObservedCall {
    observer: Arc<dyn CallObserver>,
    forward: u64,
}

impl ObservedCall {
    /// Runs the backward pass of the call.
    pub fn backward(
        &self,
        function: &str,
        of_outputs: Gradients,
        run: impl FnOnce(Gradients) -> Gradients,
    ) -> Gradients {
        let read: Vec<_> = of_outputs.iter().flatten().collect();
        let inputs = self.observer.inputs(Some(self.forward), &read);
        let mut gradients = run(of_outputs);
        self.observer
            .gradients(function, self.forward, inputs, &mut gradients);
        gradients
    }
}

impl fmt::Debug for ObservedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "observed call {}", self.forward)
    }
}
