//! Sequence parallelism whose exchanges travel under the products beside them, in chunks (`--tp-comm-overlap` of
//! Megatron-LM).
//!
//! The tokens of a sequence are split into chunks. A chunk is gathered while the product of the one before is computed, or
//! reduce-scattered while that of the next one is. Where a product's forward gathers, its backward reduce-scatters, and the
//! reverse. As many bytes are sent as without chunks.
//!
//! | product | forward | gradient of the input | gradient of the weight |
//! |---|---|---|---|
//! | column-parallel | gathers the input, chunk by chunk | reduce-scatters it | gathers the input again |
//! | row-parallel | reduce-scatters the output | gathers the gradient of the output | of what was gathered |

mod chunks;
mod exchange;
mod function;
mod num_splits;

pub(crate) use chunks::TpCommOverlapGroup;
pub use num_splits::{NumSplitsError, check, exposed, num_splits, refuses_fp8, sequence_multiple};
