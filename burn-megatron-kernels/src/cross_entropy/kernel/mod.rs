//! The CubeCL kernels. Statistics and gradient use one cube per row. Combining uses one unit per row.
//!
//! Rows of an odd width do not start at a vector boundary. Memory is still read in complete vectors
//! of a size that divides the total number of elements. The vectors at both ends of a row are
//! handled lane by lane.

// Kernels have no `is_multiple_of`, and a compile-time condition cannot be joined with a runtime
// condition.
#![allow(clippy::manual_is_multiple_of, clippy::collapsible_if)]

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::ignored;
use super::ops::LossOp;
use crate::cube::RowPlan;

mod aot_instances;
mod combine;
mod gradient;
mod loss_and_gradient;
mod statistics;

pub(crate) use aot_instances::aot_instances;
pub(super) use combine::combine;
pub(super) use gradient::gradient;
pub(super) use loss_and_gradient::loss_and_gradient;
pub(super) use statistics::statistics;

/// The number of vectors that a unit loads before it uses them, to keep enough loads in flight.
const LOADS_PER_STEP: usize = 4;

/// A target without a loss. Tokens are below 2^31.
const IGNORED_TARGET: u32 = u32::MAX;

/// A target outside the vocabulary.
const INVALID_TARGET: u32 = u32::MAX - 1;

/// Returns the token of a target, [`IGNORED_TARGET`] or [`INVALID_TARGET`].
#[cube]
fn token_of<I: Int>(target: I, tokens: u32, #[comptime] ignore: Option<i64>) -> u32 {
    let mut token = INVALID_TARGET.runtime();
    if target >= I::new(0) && target < I::cast_from(tokens) {
        token = u32::cast_from(target);
    }
    if comptime!(ignore.is_some()) {
        if target == I::new(comptime!(ignore.unwrap_or_default())) {
            token = IGNORED_TARGET.runtime();
        }
    }
    token
}

/// The launch of a kernel with one cube for each row of the logits.
struct LossLaunch {
    client: Client,
    rows: usize,
    width: usize,
    /// The largest vector size that divides the number of logits, and therefore the start of the
    /// memory too.
    vector: usize,
    plan: RowPlan,
    ignore: Option<i64>,
    types: [ElemType; 2],
}

impl LossLaunch {
    fn new(op: &LossOp, logits: &CubeTensor, targets: &CubeTensor) -> Self {
        let shape = logits.meta.shape();
        let client = logits.client.clone();
        let fits = |size: &usize| shape.num_elements().is_multiple_of(*size);
        let vector = client
            .io_optimized_vector_sizes(logits.dtype.size())
            .find(fits);
        Self {
            rows: shape[0],
            width: shape[1],
            vector: vector.unwrap_or(1),
            plan: RowPlan::new(&client, logits.dtype, shape[1]),
            ignore: ignored(op.vocabulary.ignore, targets.dtype),
            types: [logits.dtype, targets.dtype].map(dtype_to_storage_type),
            client,
        }
    }
}
