//! Detection of gradients that are not finite or too large, per parameter.

use std::fmt;

use burn::tensor::Tensor;
use burn_megatron_kernels::adamw::sum_of_squares;

use super::sharding_plan::ShardingPlan;

/// A gradient of this rank that was not finite or exceeded `gradient_limit` before it was reduced.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidGradient {
    /// The path of the parameter.
    pub path: String,
    /// The world rank that computed it.
    pub rank: usize,
    /// The norm of the gradient, or of its bucket's gradient where no single parameter exceeds the limit;
    /// not finite if an element is not.
    pub norm: f64,
}

impl fmt::Display for InvalidGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, rank, norm } = self;
        if norm.is_finite() {
            write!(
                f,
                "the gradient of {path} on rank {rank} has the norm {norm:.3e}"
            )
        } else {
            write!(f, "the gradient of {path} on rank {rank} is not finite")
        }
    }
}

/// Checks the norm of a bucket before it is reduced; returns its worst gradient where it is invalid.
pub(super) fn find_invalid(
    number: usize,
    buffer: &Tensor<1>,
    plan: &ShardingPlan,
) -> Option<InvalidGradient> {
    let config = &plan.config;
    if !config.check_gradients && config.gradient_limit.is_none() {
        return None;
    }
    let limit = config.gradient_limit.unwrap_or(f64::INFINITY);
    let is_invalid = |norm: f64| !norm.is_finite() || norm > limit;
    let bucket_norm = norm(buffer.clone());
    if !is_invalid(bucket_norm) {
        return None;
    }
    let parameters = plan.layout.bucket(number).parameters.iter();
    let norms = parameters.map(|parameter| {
        let norm = norm(buffer.clone().slice([parameter.range.clone()]));
        (parameter.index, norm)
    });
    // A norm that is not finite is worse than any other.
    let severity = |norm: f64| {
        if norm.is_finite() {
            norm
        } else {
            f64::INFINITY
        }
    };
    let (index, found) = norms.max_by(|a, b| severity(a.1).total_cmp(&severity(b.1)))?;
    Some(InvalidGradient {
        path: plan.parameters[index].path.clone(),
        rank: plan.dense.data.group().world_rank(),
        norm: if is_invalid(found) {
            found
        } else {
            bucket_norm
        },
    })
}

fn norm(x: Tensor<1>) -> f64 {
    match x.dims()[0] {
        0 => 0.0,
        _ => sum_of_squares(x).into_scalar::<f64>().sqrt(),
    }
}
