//! Observes the inputs and results of function calls.
//!
//! [`observed`] passes an observer the calls that its body makes on this thread, and the backward of these calls on any
//! thread. Without an observer, no tensor is read or kept.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::Gradients;

/// An observer of function calls, which may change their results.
pub trait CallObserver: Send + Sync + 'static {
    /// Receives the tensors that a forward is about to read. With a call number `forward`, receives
    /// the gradients that the backward of that call is about to read. Returns a number that the
    /// observer gets back with the result.
    fn inputs(&self, forward: Option<u64>, tensors: &[&DispatchTensor]) -> u64;

    /// Receives the outputs of a forward, and may change them. Returns the call number, which the
    /// observer gets back in the backward.
    fn outputs(&self, function: &str, inputs: u64, outputs: &mut [DispatchTensor]) -> u64;

    /// Receives the gradients of the inputs of the call `forward`, computed by its backward.
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

/// Restores the outer observer, even if the body unwinds.
struct Restore(Option<Arc<dyn CallObserver>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.replace(self.0.take());
    }
}

/// Runs `body` with `observer` as the observer of its function calls, in place of an outer
/// observer.
pub fn observed<T>(observer: Arc<dyn CallObserver>, body: impl FnOnce() -> T) -> T {
    let _restore = Restore(CURRENT.replace(Some(observer)));
    body()
}

/// A forward that is observed.
pub(super) struct ObservedForward {
    observer: Arc<dyn CallObserver>,
    inputs: u64,
}

impl ObservedForward {
    /// Starts a forward of these inputs. Returns `None` without an observer.
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

/// A call whose forward was observed, kept for its backward.
#[derive(Clone)]
pub(super) struct ObservedCall {
    observer: Arc<dyn CallObserver>,
    forward: u64,
}

impl ObservedCall {
    /// Runs the backward of the call.
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
