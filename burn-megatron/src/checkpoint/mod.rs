//! Checkpoints that any layout can load, and tensors of whole models from elsewhere.
//!
//! Nothing here depends on how a run is laid out: a tensor has a key, such as
//! `model/blocks.0.mlp.up.weight`, and the shape that it has in the whole model. Ranks write and read
//! [boxes](Slice) of it; [`held`] says which ones a rank has.

mod error;
mod held;
mod slice;
mod source;
mod weights;

pub use error::CheckpointError;
pub use held::{Held, held};
pub use slice::{Run, Slice};
pub use source::{ElementType, TensorMeta, TensorSource};
pub use weights::{Leniency, MODEL, load_weights};
