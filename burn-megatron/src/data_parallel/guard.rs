//! Gradients that are not what they should be, by name.

use std::fmt;

use burn::tensor::Tensor;
use burn_megatron_kernels::adamw::sum_of_squares;

use super::plan::Plan;

/// A gradient of this rank that was not finite, or too large, before it was summed.
#[derive(Clone, Debug, PartialEq)]
pub struct Culprit {
    /// The parameter.
    pub path: String,
    /// The world rank.
    pub rank: usize,
    /// The norm of its gradient, or that of its bucket's where no single one is too large; not
    /// finite where an element is not.
    pub norm: f64,
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, rank, norm } = self;
        match norm.is_finite() {
            true => write!(
                f,
                "the gradient of {path} on rank {rank} has the norm {norm:.3e}"
            ),
            false => write!(f, "the gradient of {path} on rank {rank} is not finite"),
        }
    }
}

/// Looks at a bucket before it is summed.
pub(super) fn culprit(number: usize, flat: &Tensor<1>, plan: &Plan) -> Option<Culprit> {
    let config = &plan.config;
    if !config.check_gradients && config.gradient_limit.is_none() {
        return None;
    }
    let limit = config.gradient_limit.unwrap_or(f64::INFINITY);
    let is_bad = |norm: f64| !norm.is_finite() || norm > limit;
    let whole = norm(flat.clone());
    if !is_bad(whole) {
        return None;
    }
    let parameters = plan.layout.bucket(number).parameters.iter();
    let norms = parameters.map(|placed| {
        let norm = norm(flat.clone().slice([placed.range.clone()]));
        (placed.index, norm)
    });
    // What is not finite comes first, then what is largest.
    let rank = |norm: f64| {
        if norm.is_finite() {
            norm
        } else {
            f64::INFINITY
        }
    };
    let (index, found) = norms.max_by(|a, b| rank(a.1).total_cmp(&rank(b.1)))?;
    Some(Culprit {
        path: plan.parameters[index].path.clone(),
        rank: plan.axes.data.group().world_rank(),
        norm: if is_bad(found) { found } else { whole },
    })
}

fn norm(x: Tensor<1>) -> f64 {
    match x.dims()[0] {
        0 => 0.0,
        _ => sum_of_squares(x).into_scalar::<f64>().sqrt(),
    }
}
