//! From a recording of a stage's forward and backward to what its layers keep, and when.
//!
//! The forward of each operation that a tracked tensor enters is a node with the tensors that it saves: what
//! [`Function::forward`](burn_megatron_kernels::Function::forward) returned, or what Burn's operations keep.
//! The backward of the nodes runs in reverse. A storage lives from the operation that makes it to the last one that
//! uses it, the backward of the nodes that save it included; the bytes alive at each operation are the memory.

mod measure;
mod model;
mod operations;
mod repeat;
mod stage;
mod storage;
mod walk;

use std::any::Any;

use burn_megatron_kernels::record::{RecordedStep, Recording};

use super::profile::StageProfile;
use burn_megatron::mesh::Mesh;
use repeat::Repeat;
use walk::Walk;

pub use operations::name as operation_name;

pub(crate) use model::goes_by_place;
pub use model::{ProfileError, ProfileRequest, RankProfile, profile_rank};

/// A stage begins, or its backward, in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageNote {
    /// The forward of a stage.
    Forward,
    /// The next operation makes its input.
    Input,
    /// Its last part: norm, output layer and loss.
    Output,
    /// Its backward.
    Backward,
    /// It is over.
    End,
}

/// The next operation makes memory of the training state, such as a buffer of gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateNote;

/// Returns the profiles of the stages of a recording, in order. `repeats` has the layers that each stage repeats.
pub(crate) fn stages(recording: &Recording, mesh: &Mesh, repeats: &[Repeat]) -> Vec<StageProfile> {
    let mut walk = Walk::new(recording, mesh, repeats);
    for step in &recording.steps {
        walk.step(step);
    }
    walk.finished
}

/// The value of a note of this type.
fn note<T: Any>(step: &RecordedStep) -> Option<&T> {
    match step {
        RecordedStep::Note(note) => note.downcast_ref(),
        _ => None,
    }
}
