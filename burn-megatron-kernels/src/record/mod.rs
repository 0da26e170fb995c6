//! Records the operations of a model on the shapes of tensors, without computing values, so that the memory of the
//! model can be planned.
//!
//! [`record`] runs a closure on a recording device (Burn's capture device), which computes nothing and allocates no
//! memory. It records every operation on tensors of this device in order: Burn's operations, and the kernels of this
//! crate with the shapes that they declare. For each call of a [`Function`](crate::Function), it also records the
//! start, the end, and the tensors that the forward pass saves. The device has no autodiff. [`backward`] runs the
//! backward pass of a recorded call.
//!
//! Each thread has its own recording. [`ShapeSettings`] sets properties that cannot be computed from the shapes of
//! tensors, such as the number of tokens per expert.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic;
use std::sync::{Arc, Once};

use burn::backend::DispatchTensor;
use burn::tensor::{Device, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use burn_router::RouterClient;

mod device;
mod replay;
#[cfg(test)]
mod tests;

use crate::function::SharedFunction;
use device::Primitive;
pub use device::{in_place, tensor_id};
pub(crate) use device::{launch_on_shapes, run_function};
pub use replay::Replay;

/// Properties of a model that cannot be computed from the shapes of tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShapeSettings {
    /// The load imbalance of the experts: the number of rows on the rank with the most rows, divided by the average
    /// number of rows per rank. It must be at least 1.
    pub expert_imbalance: f64,
}

impl Default for ShapeSettings {
    /// Returns the settings for balanced experts.
    fn default() -> Self {
        Self {
            expert_imbalance: 1.0,
        }
    }
}

/// A recorded call of a [`Function`](crate::Function).
#[derive(Clone, Debug)]
pub struct RecordedCall {
    /// The name of the type that implements the function.
    pub name: String,
    /// The inputs of the call.
    pub inputs: Vec<TensorIr>,
    /// The tensors that the forward pass saves for the backward pass.
    pub saved: Vec<TensorIr>,
    /// The outputs of the call.
    pub outputs: Vec<TensorIr>,
    /// The gradients of the outputs and of the inputs. `None` if [`backward`] was not called for this call.
    pub gradients: Option<RecordedGradients>,
    /// The function that a [`Replay`] calls.
    function: SharedFunction,
}

/// The gradients of the outputs and inputs of a [`RecordedCall`].
#[derive(Clone, Debug)]
pub struct RecordedGradients {
    /// The gradients of the outputs, which are created at the start of the backward pass.
    pub outputs: Vec<TensorIr>,
    /// The gradients of the inputs. `None` for an input whose gradient the backward pass does not return.
    pub inputs: Vec<Option<TensorIr>>,
}

/// A step of a [`Recording`]. A variant with a number refers to the call with this index in [`Recording::calls`].
#[derive(Clone, Debug)]
pub enum RecordedStep {
    /// An operation of Burn, or a kernel of this crate.
    Operation(OperationIr),
    /// The start of the forward pass of a call. The steps up to [`ForwardEnd`](Self::ForwardEnd) belong to the call.
    Forward(usize),
    /// The end of the forward pass of a call.
    ForwardEnd(usize),
    /// The start of the backward pass of a call.
    Backward(usize),
    /// The end of the backward pass of a call.
    BackwardEnd(usize),
    /// A value that was added with [`note`].
    Note(Note),
}

/// A value of any type that [`note`] adds to the recorded steps.
pub type Note = Arc<dyn Any + Send + Sync>;

/// The result of [`record`]: the recorded steps, calls and values.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The recorded steps in order.
    pub steps: Vec<RecordedStep>,
    /// The recorded calls of functions.
    pub calls: Vec<RecordedCall>,
    /// The values of tensors that were created on the host, such as parameters that were moved to the recording device.
    pub values: BTreeMap<TensorId, TensorData>,
}

/// The error of [`record`]: the reason why operations could not be recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The thread is already recording. A thread can have only one recording at a time.
    #[error("this thread is already recording operations: expected one recording at a time")]
    Nested,
    /// The recorded operations do not form a valid graph.
    #[error("the operations cannot be recorded: {0}")]
    Graph(String),
    /// An operation cannot be recorded on shapes alone, because it reads values or uses a backend directly.
    #[error("{operation} cannot be recorded from shapes alone: {reason}")]
    NoShapes {
        /// The name of the operation.
        operation: String,
        /// The error message of the operation.
        reason: String,
    },
}

/// The state of the recording of a thread.
struct Recorder {
    settings: ShapeSettings,
    /// A tensor of the recording device. It holds the client that records operations.
    handle: Primitive,
    events: Vec<RecordedStep>,
    calls: Vec<RecordedCall>,
    /// For each call, the function and the saved tensors for the backward pass.
    backwards: Vec<Option<(SharedFunction, Vec<DispatchTensor>)>>,
    /// The calls that contain the current operation, outermost first.
    inside: Vec<usize>,
    /// The name of the last function that was entered, even if it panicked.
    last: Option<String>,
    /// The first tensor that is not a constant. Older tensors are constants.
    first_variable: Option<TensorId>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Stops the recording when it is dropped, even if the body panics.
struct Stop;

impl Drop for Stop {
    fn drop(&mut self) {
        CURRENT.replace(None);
    }
}

/// Runs `body` on a recording device and returns its result and the recording. Tensors of the recording device must not
/// be used after `body` returns.
///
/// # Errors
///
/// Returns [`RecordError`] if an operation cannot be recorded. If an operation needs values, the error contains the
/// name of the operation.
pub fn record<T>(
    settings: ShapeSettings,
    body: impl FnOnce(&Device) -> T,
) -> Result<(T, Recording), RecordError> {
    if is_recording() {
        return Err(RecordError::Nested);
    }
    hide_panics();
    device::capture(settings, body)
}

/// Hides the messages of panics inside recordings. These panics become errors with the same text.
fn hide_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| panic::set_hook(outside_recordings(panic::take_hook())));
}

type PanicHook = Box<dyn Fn(&panic::PanicHookInfo<'_>) + Sync + Send>;

/// Returns a hook that is not called for panics inside recordings.
fn outside_recordings(hook: PanicHook) -> PanicHook {
    Box::new(move |panic| {
        // The recorder may be borrowed at the point of the panic.
        let is_recording = CURRENT.try_with(|current| match current.try_borrow() {
            Ok(current) => current.is_some(),
            Err(_) => true,
        });
        if !is_recording.unwrap_or(false) {
            hook(panic);
        }
    })
}

/// Marks all existing tensors of the recording as constants. [`backward`] computes no gradients of constants. The
/// parameters of a model are also constants in a recording, because an operation passes them into the graph, or a hook
/// receives their gradients.
pub fn begin_variables() {
    with(|recorder| recorder.first_variable = Some(recorder.handle.client.create_empty_handle()));
}

/// Returns whether this thread is recording.
pub fn is_recording() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Returns whether this thread records function calls. It does if it is recording and is not inside the forward or
/// backward pass of a [`Function`](crate::Function).
pub fn is_recording_calls() -> bool {
    CURRENT.with_borrow(|current| matches!(current, Some(it) if it.inside.is_empty()))
}

/// Returns the settings of the recording, or `None` if this thread is not recording.
pub fn shape_settings() -> Option<ShapeSettings> {
    CURRENT.with_borrow(|current| current.as_ref().map(|it| it.settings))
}

/// Adds a value to the recorded steps. Does nothing if this thread is not recording.
pub fn note(value: impl Any + Send + Sync) {
    with(|recorder| recorder.push(RecordedStep::Note(Arc::new(value))));
}

/// Returns the number of function calls that this thread has recorded so far.
pub fn calls() -> usize {
    with(|recorder| recorder.calls.len()).unwrap_or_default()
}

/// Runs the backward pass of the recorded call with index `call`, with a gradient for each output of the call. The
/// backward pass of a call can run only once.
///
/// `needed` selects the inputs whose gradients are computed. [Constants](begin_variables) never have a gradient.
pub fn backward(call: usize, needed: &[bool]) {
    device::run_backward(call, needed);
}

/// Runs `body`, and then the backward passes of the calls that `body` has recorded, in reverse order. Use it in a
/// backward pass that reruns a part of the forward pass, as with activation checkpointing.
pub fn second_pass(body: impl FnOnce()) {
    let outer = with(|recorder| (std::mem::take(&mut recorder.inside), recorder.calls.len()));
    body();
    let Some((outer, first)) = outer else {
        return;
    };
    backward_since(first);
    with(|recorder| recorder.inside = outer);
}

/// Runs the backward passes of all recorded calls whose index is at least `first`, in reverse order. It computes the
/// gradients of all inputs.
pub fn backward_since(first: usize) {
    for call in (first..calls()).rev() {
        let inputs = with(|recorder| recorder.calls[call].inputs.len()).unwrap_or_default();
        backward(call, &vec![true; inputs]);
    }
}

fn with<T>(change: impl FnOnce(&mut Recorder) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| current.as_mut().map(change))
}
