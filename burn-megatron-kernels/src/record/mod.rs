//! Records the operations of a model on shapes alone, so that its memory can be planned.
//!
//! [`record`] gives a body a device on which nothing is computed or allocated (Burn's capture device). Every operation
//! on its tensors is recorded in order: those of Burn, the kernels of this crate with the shapes that they declare, and
//! around them the calls of a [`Function`](crate::Function) with the tensors that its forward saves. The device has no
//! autodiff; [`backward`] runs the backward of a recorded call.
//!
//! A thread records for itself. What cannot be known from shapes, such as the tokens of an expert, a caller takes from
//! [`ShapeSettings`].

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

/// The properties that shapes alone do not determine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShapeSettings {
    /// The rows of the experts of the fullest rank, divided by those of an average rank; at least 1.
    pub expert_imbalance: f64,
}

impl Default for ShapeSettings {
    /// Balanced experts.
    fn default() -> Self {
        Self {
            expert_imbalance: 1.0,
        }
    }
}

/// A call of a [`Function`](crate::Function).
#[derive(Clone, Debug)]
pub struct RecordedCall {
    /// The name of its type.
    pub name: String,
    /// Its inputs.
    pub inputs: Vec<TensorIr>,
    /// The tensors that the forward saves for the backward.
    pub saved: Vec<TensorIr>,
    /// Its outputs.
    pub outputs: Vec<TensorIr>,
    /// The gradients of the outputs and of the inputs, if [`backward`] was called.
    pub gradients: Option<RecordedGradients>,
    /// The function that a [`Replay`] calls.
    function: SharedFunction,
}

/// The gradients of a [`RecordedCall`].
#[derive(Clone, Debug)]
pub struct RecordedGradients {
    /// Of its outputs, made for the call.
    pub outputs: Vec<TensorIr>,
    /// Of its inputs, where the backward returns them.
    pub inputs: Vec<Option<TensorIr>>,
}

/// Something that was recorded, in order. Calls are given by their index in [`Recording::calls`].
#[derive(Clone, Debug)]
pub enum RecordedStep {
    /// An operation.
    Operation(OperationIr),
    /// The forward of a call begins; what follows until its end is inside of it.
    Forward(usize),
    /// It ends.
    ForwardEnd(usize),
    /// The backward of a call begins.
    Backward(usize),
    /// It ends.
    BackwardEnd(usize),
    /// A [`note`] of a caller.
    Note(Note),
}

/// A value that a caller of [`note`] puts among the operations.
pub type Note = Arc<dyn Any + Send + Sync>;

/// All that happened on a recording device.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// In order.
    pub steps: Vec<RecordedStep>,
    /// The calls of functions.
    pub calls: Vec<RecordedCall>,
    /// The tensors that were given with values, such as parameters that were moved to the device.
    pub values: BTreeMap<TensorId, TensorData>,
}

/// Why something cannot be recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The thread records already.
    #[error("this thread records already: expected one recording at a time")]
    Nested,
    /// The operations do not form a graph.
    #[error("the operations cannot be recorded: {0}")]
    Graph(String),
    /// An operation has no form on shapes: it reads values, or uses a backend directly.
    #[error("{operation} has no form on shapes alone: {reason}")]
    NoShapes {
        /// The operation.
        operation: String,
        /// The message of the operation.
        reason: String,
    },
}

/// The record of a thread.
struct Recorder {
    settings: ShapeSettings,
    /// Any tensor of the device: it has the client by which operations are recorded.
    handle: Primitive,
    events: Vec<RecordedStep>,
    calls: Vec<RecordedCall>,
    /// Of each call, what its backward needs.
    backwards: Vec<Option<(SharedFunction, Vec<DispatchTensor>)>>,
    /// The functions around what is recorded now, outermost first.
    inside: Vec<usize>,
    /// The type of the last function that was entered, also after it panicked.
    last: Option<String>,
    /// Tensors that are older than this one are constants.
    first_variable: Option<TensorId>,
}

thread_local! {
    static CURRENT: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Stops recording also where the body unwinds.
struct Stop;

impl Drop for Stop {
    fn drop(&mut self) {
        CURRENT.replace(None);
    }
}

/// Runs `body` on a device that records; its tensors must not leave it.
///
/// # Errors
///
/// [`RecordError`], with the operation that has no form on shapes.
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

/// A hook that is not called for panics inside recordings.
fn outside_recordings(hook: PanicHook) -> PanicHook {
    Box::new(move |panic| {
        // The recorder may be borrowed where the panic began.
        let is_recording = CURRENT.try_with(|current| match current.try_borrow() {
            Ok(current) => current.is_some(),
            Err(_) => true,
        });
        if !is_recording.unwrap_or(false) {
            hook(panic);
        }
    })
}

/// Marks every tensor that exists now as a constant: [`backward`] computes no gradient of a constant. The parameters of a model
/// are constants, as they enter the graph through an operation or take their gradients through a hook.
pub fn begin_variables() {
    with(|recorder| recorder.first_variable = Some(recorder.handle.client.create_empty_handle()));
}

/// Whether this thread records.
pub fn is_recording() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Whether this thread records, outside of any function: an operation is recorded for a backward then.
pub fn is_recording_calls() -> bool {
    CURRENT.with_borrow(|current| matches!(current, Some(it) if it.inside.is_empty()))
}

/// Returns the properties that shapes alone do not determine, or `None` where nothing is recorded.
pub fn shape_settings() -> Option<ShapeSettings> {
    CURRENT.with_borrow(|current| current.as_ref().map(|it| it.settings))
}

/// Puts a value among the recorded operations; does nothing where nothing is recorded.
pub fn note(value: impl Any + Send + Sync) {
    with(|recorder| recorder.push(RecordedStep::Note(Arc::new(value))));
}

/// The calls recorded so far.
pub fn calls() -> usize {
    with(|recorder| recorder.calls.len()).unwrap_or_default()
}

/// Runs the backward of a call, once, for gradients of all of its outputs.
///
/// `needed` selects the inputs whose gradients are computed. [Constants](begin_variables) never have a gradient.
pub fn backward(call: usize, needed: &[bool]) {
    device::run_backward(call, needed);
}

/// Runs `body`, a forward inside of a backward, and then the backward of each of its calls, in reverse.
pub fn second_pass(body: impl FnOnce()) {
    let outer = with(|recorder| (std::mem::take(&mut recorder.inside), recorder.calls.len()));
    body();
    let Some((outer, first)) = outer else {
        return;
    };
    backward_since(first);
    with(|recorder| recorder.inside = outer);
}

/// Runs the backward of each call from this one on, in reverse, with gradients of all inputs.
pub fn backward_since(first: usize) {
    for call in (first..calls()).rev() {
        let inputs = with(|recorder| recorder.calls[call].inputs.len()).unwrap_or_default();
        backward(call, &vec![true; inputs]);
    }
}

fn with<T>(change: impl FnOnce(&mut Recorder) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| current.as_mut().map(change))
}
