//! The global norm of the gradients, in which each element of the model counts once.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::adamw::{composed, sum_of_squares_of};

use crate::choice::Operation;
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, ParallelContext, ReduceOp};
use crate::data_parallel::{DistributedDataParallel, ElementMask, Gradients};

/// The 2-norm of the whole model's gradient, the same on every rank.
///
/// On the data axis each rank sums its partition of every bucket, in f64 on devices that have it. The norm of
/// f32 gradients is rounded to f32, so it has the same bits whatever the buckets and the sharding, except for
/// about one sum in a hundred million on a rounding boundary. A replicated parameter counts on the first rank
/// of the tensor axis only, a replicated section on the first rank that holds it, a parameter tied across the
/// pipeline on the first stage. Collective: call on all ranks.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn global_norm<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<f64, CommError> {
    let _span = tracing::debug_span!("gradient_norm").entered();
    let parts: Vec<_> = unique_values(gradients, ddp).collect();
    let fused = ddp.kernels().is_fused(Operation::Optimizer);
    let norm = sum_over_model(sum_of_squares(parts, fused), ddp)?.sqrt();
    let is_f64 = gradients.sums().any(|sum| sum.dtype() == DType::F64);
    let norm = if is_f64 { norm } else { f64::from(norm as f32) };
    Ok(norm * gradients.factor())
}

/// The sum of the squares of all elements, in f64 on a device that has it.
fn sum_of_squares(mut parts: Vec<Tensor<1>>, fused: bool) -> f64 {
    let Some(first) = parts.first() else {
        return 0.0;
    };
    let device = first.device();
    let in_f64 = device == Device::flex();
    let sum = match (fused, in_f64) {
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
    };
    sum.into_scalar::<f64>()
}

/// The number of zeros in the whole model's gradient, the same on every rank. Collective: call on all ranks.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn count_zeros<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<u64, CommError> {
    let mut elements = 0.0;
    let mut nonzeros = 0.0;
    for (part, segment) in unique_values(gradients, ddp).zip(ddp.unique_segments()) {
        elements += match &segment.mask {
            ElementMask::Some(mask) => mask.clone().int().sum().into_scalar::<f64>(),
            ElementMask::All | ElementMask::None => part.dims()[0] as f64,
        };
        let is_nonzero = part.equal_elem(0.0).bool_not();
        nonzeros += is_nonzero.int().sum().into_scalar::<f64>();
    }
    Ok(sum_over_model(elements - nonzeros, ddp)?.round() as u64)
}

/// The gradient sums of the segments that this rank accounts for; elements that are not selected are zero.
fn unique_values<'a, M: Module>(
    gradients: &'a Gradients,
    ddp: &'a DistributedDataParallel<M>,
) -> impl Iterator<Item = Tensor<1>> + 'a {
    let sums: Vec<_> = gradients.sums().collect();
    ddp.unique_segments().iter().map(move |segment| {
        let part = sums[segment.bucket].clone().slice([segment.range.clone()]);
        match &segment.mask {
            ElementMask::Some(mask) => part.mask_fill(mask.clone().bool_not(), 0.0),
            ElementMask::All | ElementMask::None => part,
        }
    })
}

/// The sum of `own` over all ranks, in a fixed order of partitions on the data axis.
fn sum_over_model<M: Module>(own: f64, ddp: &DistributedDataParallel<M>) -> Result<f64, CommError> {
    let (groups, sharding) = (ddp.groups(), ddp.sharding_groups());
    let by_rank = match sharding.data.all_gather(Buffer::from(vec![own]))? {
        Buffer::F64(parts) => parts,
        other => unreachable!("a collective of f64 returned {}", other.dtype()),
    };
    let mut parts = vec![0.0; by_rank.len()];
    for (rank, value) in by_rank.into_iter().enumerate() {
        parts[sharding.partition_index(rank)] = value;
    }
    let over_data: f64 = parts.into_iter().sum();
    sum(sum(over_data, groups.tensor())?, groups.pipeline())
}

fn sum(value: f64, comm: &Comm) -> Result<f64, CommError> {
    match comm.all_reduce(Buffer::from(vec![value]), ReduceOp::Sum)? {
        Buffer::F64(sum) => Ok(sum[0]),
        other => unreachable!("a collective of f64 returned {}", other.dtype()),
    }
}

/// Whether `is_finite` holds on every rank of the world. Collective: call on all ranks.
///
/// # Errors
///
/// [`CommError`] if a collective fails.
pub fn all_finite(is_finite: bool, groups: &ParallelContext) -> Result<bool, CommError> {
    let flags = groups
        .world()
        .all_reduce(Buffer::from(vec![u8::from(is_finite)]), ReduceOp::Min)?;
    Ok(flags == Buffer::from(vec![1u8]))
}
