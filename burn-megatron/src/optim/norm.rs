//! The norm of all gradients, each element of the model counted once.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron_kernels::adamw::{composed, sum_of_squares_of};

use crate::choice::Operation;
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::data_parallel::{DistributedDataParallel, Gradients, owned};

/// The 2-norm of the whole model's gradient, the same on every rank.
///
/// A replicated parameter is counted on the first rank of the tensor axis only, a shared section on
/// the first rank that holds it, a parameter at both ends of the pipeline on the first stage. Every
/// rank of the tensor and the pipeline axis must come.
///
/// # Errors
///
/// [`CommError`] when a rank is missing.
pub fn global_norm<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<f64, CommError> {
    let _span = tracing::debug_span!("gradient_norm").entered();
    let place = ddp.groups().place();
    let mut parts = vec![];
    let first_stage = ddp.groups().pipeline().rank() == 0;
    for (gradient, entry) in gradients.sums().iter().zip(ddp.table().entries()) {
        if entry.at_both_ends && !first_stage {
            continue;
        }
        let (shape, ranges) = owned(entry, place);
        for range in ranges {
            let part: Tensor<3> = match range.len() == shape[1] {
                true => gradient.clone().reshape(shape),
                false => gradient
                    .clone()
                    .reshape(shape)
                    .narrow(1, range.start, range.len()),
            };
            let len = part.shape().num_elements();
            parts.push(part.reshape([len]));
        }
    }
    let squares = match (
        parts.is_empty(),
        ddp.kernels().is_fused(Operation::Optimizer),
    ) {
        (true, _) => 0.0,
        (false, true) => sum_of_squares_of(&parts).into_scalar::<f64>(),
        (false, false) => composed::sum_of_squares_of(&parts).into_scalar::<f64>(),
    };
    let groups = ddp.groups();
    let of_stage = sum(squares, groups.tensor())?;
    Ok(sum(of_stage, groups.pipeline())?.sqrt() * gradients.factor())
}

fn sum(value: f64, comm: &Comm) -> Result<f64, CommError> {
    match comm.all_reduce(Buffer::from(vec![value]), ReduceOp::Sum)? {
        Buffer::F64(sum) => Ok(sum[0]),
        other => unreachable!("f64 went in, {} came out", other.dtype()),
    }
}

/// Whether `value` is finite on every rank of the world; every rank must come.
///
/// # Errors
///
/// [`CommError`] when a rank is missing.
pub fn all_finite(value: bool, groups: &Groups) -> Result<bool, CommError> {
    let flags = groups
        .world()
        .all_reduce(Buffer::from(vec![u8::from(value)]), ReduceOp::Min)?;
    Ok(flags == Buffer::from(vec![1u8]))
}
