//! Records the operations of a model on shapes without values, so that its memory can be planned.
//!
//! [`record`] gives a body a device on which nothing is computed or allocated (Burn's capture device). Every operation
//! on its tensors is recorded in order: Burn's operations, and the kernels of this crate with the shapes that they
//! declare. Calls of a [`Function`](crate::Function) are recorded around them, with the tensors that the forward saves.
//! The device has no autodiff. [`backward`] runs the backward of a recorded call.
//!
//! Each thread has its own recording. [`ShapeSettings`] provides properties that shapes do not
//! determine, such as the number of tokens of an expert.

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

/// The properties that shapes do not determine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShapeSettings {
    /// The number of rows of the experts on the fullest rank, divided by the average over ranks; at
    /// least 1.
    pub expert_imbalance: f64,
}

impl Default for ShapeSettings {
    /// Returns the settings of balanced experts.
    fn default() -> Self {
        Self {
            expert_imbalance: 1.0,
        }
    }
}

/// A call of a [`Function`](crate::Function).
#[derive(Clone, Debug)]
pub struct RecordedCall {
    /// The name of the function's type.
    pub name: String,
    /// The inputs of the call.
    pub inputs: Vec<TensorIr>,
    /// The tensors that the forward saves for the backward.
    pub saved: Vec<TensorIr>,
    /// The outputs of the call.
    pub outputs: Vec<TensorIr>,
    /// The gradients of the outputs and of the inputs, if [`backward`] was called.
    pub gradients: Option<RecordedGradients>,
    /// The function that a [`Replay`] calls.
    function: SharedFunction,
}

/// The gradients of a [`RecordedCall`].
#[derive(Clone, Debug)]
pub struct RecordedGradients {
    /// The gradients of the outputs, created for the call.
    pub outputs: Vec<TensorIr>,
    /// The gradients of the inputs, if the backward returns them.
    pub inputs: Vec<Option<TensorIr>>,
}

/// A recorded step. Calls are given by their index in [`Recording::calls`].
#[derive(Clone, Debug)]
pub enum RecordedStep {
    /// An operation.
    Operation(OperationIr),
    /// The start of a call's forward. The steps up to its end belong to it.
    Forward(usize),
    /// The end of a call's forward.
    ForwardEnd(usize),
    /// The start of a call's backward.
    Backward(usize),
    /// The end of a call's backward.
    BackwardEnd(usize),
    /// A [`note`] of a caller.
    Note(Note),
}

/// A value that a caller of [`note`] adds to the recorded steps.
pub type Note = Arc<dyn Any + Send + Sync>;

/// The steps recorded on a device.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The steps in order.
    pub steps: Vec<RecordedStep>,
    /// The calls of functions.
    pub calls: Vec<RecordedCall>,
    /// Tensors that were created from values, such as parameters that were moved to the device.
    pub values: BTreeMap<TensorId, TensorData>,
}

/// The reason why operations cannot be recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The thread is already recording.
    #[error("this thread is already recording operations: expected one recording at a time")]
    Nested,
    /// The operations do not form a graph.
    #[error("the operations cannot be recorded: {0}")]
    Graph(String),
    /// An operation cannot run without values: it reads values, or uses a backend directly.
    #[error("{operation} has no form on shapes alone: {reason}")]
    NoShapes {
        /// The operation.
        operation: String,
        /// The message of the operation.
        reason: String,
    },
}

/// The recorder of a thread.
struct Recorder {
    settings: ShapeSettings,
    /// A tensor of the device, which has the client that records operations.
    handle: Primitive,
    events: Vec<RecordedStep>,
    calls: Vec<RecordedCall>,
    /// For each call, the data for its backward.
    backwards: Vec<Option<(SharedFunction, Vec<DispatchTensor>)>>,
    /// The functions that contain the current operation, outermost first.
    inside: Vec<usize>,
    /// The type of the last function that was entered, even if it panicked.
    last: Option<String>,
    /// The first tensor that is not a constant. Older tensors are constants.
    first_variable: Option<TensorId>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Stops recording, even if the body unwinds.
struct Stop;

impl Drop for Stop {
    fn drop(&mut self) {
        CURRENT.replace(None);
    }
}

/// Runs `body` on a device that records. The tensors of the device must not leave the body.
///
/// # Errors
///
/// Returns [`RecordError`], with the name of an operation that cannot run without values.
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

/// Hides the messages of panics inside recordings, which become errors with the same text.
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

/// Marks every existing tensor as a constant, for which [`backward`] computes no gradient. The
/// parameters of a model are constants, because they enter the graph through an operation or get
/// their gradients through a hook.
pub fn begin_variables() {
    with(|recorder| recorder.first_variable = Some(recorder.handle.client.create_empty_handle()));
}

/// Returns whether this thread is recording.
pub fn is_recording() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Returns whether this thread is recording outside of any function. Operations are then recorded
/// for a backward.
pub fn is_recording_calls() -> bool {
    CURRENT.with_borrow(|current| matches!(current, Some(it) if it.inside.is_empty()))
}

/// Returns the properties that shapes do not determine, or `None` if this thread is not recording.
pub fn shape_settings() -> Option<ShapeSettings> {
    CURRENT.with_borrow(|current| current.as_ref().map(|it| it.settings))
}

/// Adds a value to the recorded operations. Does nothing if this thread is not recording.
pub fn note(value: impl Any + Send + Sync) {
    with(|recorder| recorder.push(RecordedStep::Note(Arc::new(value))));
}

/// Returns the number of calls recorded so far.
pub fn calls() -> usize {
    with(|recorder| recorder.calls.len()).unwrap_or_default()
}

/// Runs the backward of a call once, with gradients of all of its outputs.
///
/// `needed` selects the inputs whose gradients are computed. [Constants](begin_variables) never
/// have a gradient.
pub fn backward(call: usize, needed: &[bool]) {
    device::run_backward(call, needed);
}

/// Runs `body`, which is a forward inside a backward, and then the backward of each of its calls in
/// reverse order.
pub fn second_pass(body: impl FnOnce()) {
    let outer = with(|recorder| (std::mem::take(&mut recorder.inside), recorder.calls.len()));
    body();
    let Some((outer, first)) = outer else {
        return;
    };
    backward_since(first);
    with(|recorder| recorder.inside = outer);
}

/// Runs the backward of each call in reverse order, down to call `first`, with gradients of all inputs.
pub fn backward_since(first: usize) {
    for call in (first..calls()).rev() {
        let inputs = with(|recorder| recorder.calls[call].inputs.len()).unwrap_or_default();
        backward(call, &vec![true; inputs]);
    }
}

fn with<T>(change: impl FnOnce(&mut Recorder) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| current.as_mut().map(change))
}
