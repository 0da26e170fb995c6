//! Sequence parallelism with exchanges in chunks that overlap the matrix products (`--tp-comm-overlap` of
//! Megatron-LM).
//!
//! The tokens of a sequence are split into chunks. A chunk is gathered while the product of the previous chunk is
//! computed, or reduce-scattered while the product of the next chunk is computed. If the forward of a product
//! gathers, its backward reduce-scatters, and vice versa. The number of bytes is the same as without chunks.
//!
//! | product | forward | gradient of the input | gradient of the weight |
//! |---|---|---|---|
//! | column-parallel | gathers the input, chunk by chunk | reduce-scatters the gradient | gathers the input again |
//! | row-parallel | reduce-scatters the output | gathers the output gradient | uses the gathered output gradient |

mod chunks;
mod exchange;
mod function;
mod num_splits;

pub(crate) use chunks::TpCommOverlapGroup;
pub use num_splits::{NumSplitsError, check, exposed, num_splits, refuses_fp8, sequence_multiple};
