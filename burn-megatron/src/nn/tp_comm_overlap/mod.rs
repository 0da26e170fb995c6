//! Overlap of the collectives of sequence parallelism with the matmuls, chunk by chunk (`--tp-comm-overlap` of
//! Megatron-LM).
//!
//! The tokens of a sequence are split into chunks. A chunk is all-gathered while the matmul of the previous chunk is
//! computed, or reduce-scattered while the matmul of the next chunk is computed. If the forward pass of a layer
//! all-gathers, its backward pass reduce-scatters, and vice versa. The number of bytes sent is the same as without
//! chunks.
//!
//! | layer | forward pass | gradient of the input | gradient of the weight |
//! |---|---|---|---|
//! | column-parallel | all-gathers the input | reduce-scatters the gradient | all-gathers the input again |
//! | row-parallel | reduce-scatters the output | all-gathers the output gradient | uses the gathered output gradient |

mod chunks;
mod exchange;
mod function;
mod num_splits;

pub(crate) use chunks::TpCommOverlapGroup;
pub use num_splits::{NumSplitsError, check, exposed, num_splits, refuses_fp8, sequence_multiple};
