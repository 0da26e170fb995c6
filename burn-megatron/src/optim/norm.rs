//! The global gradient norm. Each element of the model is counted once.

use burn::module::Module;
use burn::tensor::{Bool, DType, Device, Tensor};
use burn_megatron_kernels::adamw::{composed, sum_of_squares_of};

use crate::comm::{CommError, ParallelContext, ReduceOp};
use crate::data_parallel::{DistributedDataParallel, Gradients, ShardingGroups};
use crate::kernel_selection::Operation;
use crate::mesh::Grid;

/// Returns the 2-norm of the gradient of the complete model. The norm is the same on every rank. Collective: call on
/// all ranks.
///
/// Each rank of a data-parallel group sums the squares of its partition of every bucket, in f64 on the CPU. The norm of
/// f32 gradients is rounded to f32. Therefore the norm is bitwise independent of the buckets and the sharding, with one
/// exception: about one sum in a hundred million lies on a rounding boundary. A replicated parameter, or a replicated
/// section of a parameter, is counted only on the first rank that holds it. A parameter of several pipeline stages is
/// counted on the first of these stages.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn global_norm<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<f64, CommError> {
    let _span = tracing::debug_span!("gradient_norm").entered();
    let squares = |grid| squares(gradients, ddp, grid).map_or(0.0, Tensor::into_scalar::<f64>);
    let norm = sum_over_model(squares, ddp)?.sqrt();
    let norm = if rounds_norm(gradients, ddp) {
        f64::from(norm as f32)
    } else {
        norm
    };
    Ok(norm * gradients.factor())
}

/// Whether the norm is rounded to f32. It is the same on every rank.
pub(super) fn rounds_norm<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> bool {
    let mut dtypes: Vec<_> = gradients.sums().map(|sum| sum.dtype()).collect();
    if dtypes.is_empty() {
        // All parameters of this rank are frozen.
        dtypes = ddp.frozen_dtypes();
    }
    !dtypes.contains(&DType::F64)
}

/// Returns the sum of squares, `[1]`, of the elements of a grid that this rank counts, or `None` if it counts no
/// element. The sum is in f64 on the CPU.
pub(super) fn squares<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
    grid: Grid,
) -> Option<Tensor<1>> {
    let fused = ddp.kernels().is_fused(Operation::Optimizer);
    let values = unique_values(gradients, ddp, grid);
    let mut parts: Vec<_> = values.map(|(value, _)| value).collect();
    let device = parts.first()?.device();
    let in_f64 = device == Device::flex();
    Some(match (fused, in_f64) {
        (true, true) => {
            // The sum has the widest dtype of the parts.
            parts.push(Tensor::empty([0], (&device, DType::F64)));
            sum_of_squares_of(&parts)
        }
        (true, false) => sum_of_squares_of(&parts),
        (false, true) => {
            let wide = parts.into_iter().map(|part| part.cast(DType::F64));
            composed::sum_of_squares_of(&wide.collect::<Vec<_>>())
        }
        (false, false) => composed::sum_of_squares_of(&parts),
    })
}

/// Returns the number of zeros in the gradient of the complete model. The number is the same on every rank. Collective:
/// call on all ranks.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn count_zeros<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<u64, CommError> {
    let zeros = |(part, mask): (Tensor<1>, &Option<Tensor<1, Bool>>)| {
        let elements = match mask {
            Some(mask) => mask.clone().int().sum().into_scalar::<f64>(),
            None => part.dims()[0] as f64,
        };
        let is_nonzero = part.equal_elem(0.0).bool_not();
        elements - is_nonzero.int().sum().into_scalar::<f64>()
    };
    let zeros = |grid| unique_values(gradients, ddp, grid).map(zeros).sum();
    Ok(sum_over_model(zeros, ddp)?.round() as u64)
}

/// Returns the gradient sums of the segments of a grid that this rank accounts for. If a mask is given, it
/// selects the elements that count, and the other elements are zero.
fn unique_values<'a, M: Module>(
    gradients: &'a Gradients,
    ddp: &'a DistributedDataParallel<M>,
    grid: Grid,
) -> impl Iterator<Item = (Tensor<1>, &'a Option<Tensor<1, Bool>>)> {
    let sums: Vec<_> = gradients.sums().collect();
    let segments = ddp.unique_segments().iter();
    let of_grid = segments.filter(move |segment| ddp.shards()[segment.bucket].grid == grid);
    of_grid.map(move |segment| {
        let part = sums[segment.bucket].clone().slice([segment.range.clone()]);
        let part = match &segment.mask {
            Some(mask) => part.mask_fill(mask.clone().bool_not(), 0.0),
            None => part,
        };
        (part, &segment.mask)
    })
}

/// Returns the sum over all ranks of `own(grid)`, over all grids.
fn sum_over_model<M: Module>(
    own: impl Fn(Grid) -> f64,
    ddp: &DistributedDataParallel<M>,
) -> Result<f64, CommError> {
    let sum_of = |(grid, groups)| sum_over_stage(own(grid), groups);
    let over_stage: f64 = ddp.sharding_groups().map(sum_of).sum::<Result<_, _>>()?;
    let pipeline = ddp.groups().pipeline();
    pipeline.all_reduce_scalar(over_stage, ReduceOp::Sum)
}

/// Returns the sum of `own` over the ranks of a stage, in a fixed order of the partitions in the data-parallel
/// group.
fn sum_over_stage(own: f64, groups: &ShardingGroups) -> Result<f64, CommError> {
    let by_rank: Vec<f64> = groups.data.all_gather(vec![own].into())?.into_vec();
    let mut parts = vec![0.0; by_rank.len()];
    for (rank, value) in by_rank.into_iter().enumerate() {
        parts[groups.partition_index(rank)] = value;
    }
    let over_data: f64 = parts.into_iter().sum();
    groups.model.all_reduce_scalar(over_data, ReduceOp::Sum)
}

/// Whether `is_finite` is true on every rank of the world. Collective: call on all ranks.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn all_finite(is_finite: bool, groups: &ParallelContext) -> Result<bool, CommError> {
    let own = u8::from(is_finite);
    Ok(groups.world().all_reduce_scalar(own, ReduceOp::Min)? == 1)
}
