//! Detects gradients that are not finite or too large, and finds the parameters to which they belong.

use std::fmt;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::adamw::outcome::statistics_dtype;
use burn_megatron_kernels::adamw::{Segments, largest_sums_of_squares};

use super::config::DataParallelConfig;
use super::layout::BufferLayout;
use super::segments::ShardSegment;
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::ShardingPlan;
use crate::mesh::{Grid, ZeroStage};

/// An invalid gradient: before the gradient was reduced, it was not finite or exceeded `gradient_limit`.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidGradient {
    /// The path of the parameter.
    pub path: String,
    /// The world rank that computed the gradient.
    pub rank: usize,
    /// The norm of the gradient. If no single parameter exceeds the limit, it is the norm of the bucket. The norm is
    /// not finite if an element is not finite.
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

/// Measures the gradients of each bucket before the bucket is reduced. The measurements stay on the device.
///
/// The measurements of a step are one tensor, `[1 + parameters]`, in the [dtype of
/// statistics](statistics_dtype). The first element is the largest sum of squares of a bucket. The other
/// elements are the sums of squares of the parameters, ordered by bucket. If a bucket is reduced several times
/// in a step, the maximum is kept.
#[derive(Debug)]
pub(crate) struct GradientCheck {
    /// The elements of each bucket's parameters.
    buckets: Vec<Segments>,
    /// The index of each bucket's first parameter in the measurements.
    first: Vec<usize>,
    limit: f64,
    device: Device,
}

impl GradientCheck {
    /// Creates the check, or returns `None` if the settings do not enable it.
    pub fn new(
        layout: &BufferLayout,
        config: &DataParallelConfig,
        device: &Device,
    ) -> Option<Self> {
        if !config.check_gradients && config.gradient_limit.is_none() {
            return None;
        }
        let (mut buckets, mut first) = (vec![], vec![]);
        let mut next = 1;
        for number in 0..layout.bucket_count() {
            let parameters = layout.bucket(number).parameters.iter();
            let ranges = parameters.map(|parameter| parameter.range.clone());
            let segments = Segments::new(ranges.collect());
            first.push(next);
            next += segments.len();
            buckets.push(segments);
        }
        Some(Self {
            buckets,
            first,
            limit: config.gradient_limit.unwrap_or(f64::INFINITY),
            device: device.clone(),
        })
    }

    /// Adds the measurements of a bucket to the measurements of the step.
    pub fn measure(&self, number: usize, buffer: Tensor<1>, step: Option<Tensor<1>>) -> Tensor<1> {
        let step = step.unwrap_or_else(|| self.nothing());
        largest_sums_of_squares(buffer, &self.buckets[number], step, self.first[number])
    }

    /// Returns the measurements of a step before the first reduction.
    fn nothing(&self) -> Tensor<1> {
        let parameters: usize = self.buckets.iter().map(Segments::len).sum();
        let dtype = statistics_dtype(&self.device);
        Tensor::zeros([1 + parameters], (&self.device, dtype))
    }

    /// Returns a tensor per grid, with one element per measurement. The element of a parameter is 1 if this rank counts
    /// the parameter in the gradient norm. All other elements are 0. The product with the measurements gives the
    /// squares of the reduced gradients.
    ///
    /// Returns `None` if the reduced gradients can differ from the measured gradients: with several ranks, with several
    /// reductions per step, or if this rank counts only a part of a parameter.
    pub fn shares(
        &self,
        plan: &ShardingPlan,
        unique: &[ShardSegment],
    ) -> Option<Vec<(Grid, Tensor<1>)>> {
        let is_whole = |segment: &ShardSegment| segment.mask.is_none();
        if plan.reduces_over_ranks()
            || plan.stage() >= ZeroStage::Gradients
            || !unique.iter().all(is_whole)
        {
            return None;
        }
        let of_grid = |(grid, _): (Grid, &ShardingGroups)| {
            let mut shares = vec![0f32; self.nothing().dims()[0]];
            let of_grid = unique.iter().filter(|at| plan.grid(at.bucket) == grid);
            for ShardSegment { bucket, index, .. } in of_grid {
                shares[self.first[*bucket] + plan.position(*bucket, *index)] = 1.0;
            }
            let options = (&self.device, statistics_dtype(&self.device));
            (grid, Tensor::from_data(&shares[..], options))
        };
        Some(plan.all_groups().map(of_grid).collect())
    }

    /// Returns the largest valid sum of squares of a bucket. Its square root does not exceed the limit.
    pub fn largest_valid(&self) -> f64 {
        let in_f64 = statistics_dtype(&self.device) == DType::F64;
        let below = |square: f64| match in_f64 {
            true => square.next_down(),
            false => f64::from((square as f32).next_down()),
        };
        let square = self.limit * self.limit;
        let mut square = if in_f64 {
            square
        } else {
            f64::from(square as f32)
        };
        while square.is_finite() && square.sqrt() > self.limit {
            square = below(square);
        }
        square
    }

    /// Returns the worst gradient of each invalid bucket, from the measurements of a step.
    pub fn invalid(&self, measured: &[f64], plan: &ShardingPlan) -> Vec<InvalidGradient> {
        let is_invalid = |norm: f64| !norm.is_finite() || norm > self.limit;
        if !is_invalid(measured[0].sqrt()) {
            return vec![];
        }
        let worst_of = |number: usize| {
            let parameters = &plan.layout.bucket(number).parameters;
            let squares = &measured[self.first[number]..][..parameters.len()];
            let bucket_norm = squares.iter().sum::<f64>().sqrt();
            let norms = squares.iter().map(|square| square.sqrt());
            let worst = parameters.iter().zip(norms);
            let (parameter, norm) = worst.max_by(|a, b| severity(a.1).total_cmp(&severity(b.1)))?;
            let gradient = InvalidGradient {
                path: plan.parameters[parameter.index].path.clone(),
                rank: plan.dense.data.group().world_rank(),
                norm: if is_invalid(norm) { norm } else { bucket_norm },
            };
            Some((gradient, bucket_norm))
        };
        let buckets: Vec<_> = (0..self.buckets.len()).filter_map(worst_of).collect();
        let invalid = buckets.iter().filter(|(_, norm)| is_invalid(*norm));
        let invalid: Vec<_> = invalid.map(|(gradient, _)| gradient.clone()).collect();
        if !invalid.is_empty() {
            return invalid;
        }
        // The sum over the bucket exceeded the limit only because of rounding.
        let worst = buckets.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        worst.into_iter().map(|(gradient, _)| gradient).collect()
    }
}

/// Returns a sort key of a norm. A norm that is not finite is the most severe.
fn severity(norm: f64) -> f64 {
    if norm.is_finite() {
        norm
    } else {
        f64::INFINITY
    }
}
