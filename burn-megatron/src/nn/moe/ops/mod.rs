//! What the layers compute, composed of Burn's operations: the choice of experts, rows in the order of their
//! experts, products per expert. The bits of a result do not depend on how tokens are spread over ranks.

mod choice;
mod grouped;
mod row_map;

pub(super) use choice::{normalised, router_weights, scores, top_k};
pub(super) use grouped::grouped_matmul;
pub(super) use row_map::{RowLayout, RowMap, permute, permute_weights, read, unpermute};
