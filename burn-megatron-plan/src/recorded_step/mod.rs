//! Computes the memory of the layers of a pipeline stage over time, from a recording of the forward and the backward.
//!
//! Each operation of the forward with an input that autodiff tracks is a node. A node contains the tensors that it
//! saves for the backward. For a custom function, [`Function::forward`](burn_megatron_kernels::Function::forward)
//! returns these tensors. For an operation of Burn, they are the tensors that the operation keeps. The backward of the
//! nodes runs in reverse order. A storage lives from the operation that creates it to the last operation that uses it,
//! including the backward of the nodes that save it. The memory at an operation is the total size of all storages that
//! are alive.

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

/// A mark in a recording: the start of a part of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageNote {
    /// The forward of a stage starts.
    Forward,
    /// The next operation creates the input of the stage.
    Input,
    /// The last part of the stage starts: norm, output layer and loss.
    Output,
    /// The backward of the stage starts.
    Backward,
    /// The stage is complete.
    End,
}

/// A mark in a recording: the next operation allocates memory of the training state, such as a gradient buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateNote;

/// Returns the profiles of the stages of a recording, in order. `repeats` are the layers that were left out of each
/// stage.
pub(crate) fn stages(recording: &Recording, mesh: &Mesh, repeats: &[Repeat]) -> Vec<StageProfile> {
    let mut walk = Walk::new(recording, mesh, repeats);
    for step in &recording.steps {
        walk.step(step);
    }
    walk.finished
}

/// Returns the value of a note of this type.
fn note<T: Any>(step: &RecordedStep) -> Option<&T> {
    match step {
        RecordedStep::Note(note) => note.downcast_ref(),
        _ => None,
    }
}
