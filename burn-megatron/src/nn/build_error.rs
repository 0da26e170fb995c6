//! The error type of building a model.

use super::fp8::Fp8Error;
use super::{RecomputeError, TableError};
use crate::comm::CommError;
use crate::kernel_selection::KernelChoiceError;
use crate::mesh::MeshError;

/// An error that occurs while a model is built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BuildError {
    /// A size cannot be split over the mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The configuration of a layer is invalid.
    #[error("{path}: {message}")]
    Config {
        /// The path of the layer.
        path: String,
        /// The given value and the expected value.
        message: String,
    },
    /// A requested kernel is not available.
    #[error(transparent)]
    Kernels(#[from] KernelChoiceError),
    /// The FP8 layers could not be built.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// The settings of activation recomputation are invalid.
    #[error(transparent)]
    Recompute(#[from] RecomputeError),
    /// The declared parameters do not match the module.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A process group could not be created.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for BuildError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
