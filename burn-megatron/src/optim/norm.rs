//! The norm of all gradients, each element of the model counted once.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::adamw::{composed, sum_of_squares_of};

use crate::choice::Operation;
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::data_parallel::{ChosenElements, DistributedDataParallel, Gradients};

/// The 2-norm of the whole model's gradient, the same on every rank.
///
/// On the data axis each rank counts its part of every bucket. Where a device can, they are added up
/// in f64, and the norm of gradients in f32 is rounded to f32: it has the same bits however the buckets
/// are cut and sharded, but for one sum in some hundred million that lies at the edge. A replicated parameter is
/// counted on the first rank of the tensor axis only, a shared section on the first rank that holds
/// it, a parameter at both ends of the pipeline on the first stage. Every rank must come.
///
/// # Errors
///
/// [`CommError`] when a rank is missing.
pub fn global_norm<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<f64, CommError> {
    let _span = tracing::debug_span!("gradient_norm").entered();
    let parts: Vec<_> = counted(gradients, ddp).collect();
    let fused = ddp.kernels().is_fused(Operation::Optimizer);
    let norm = over_model(squares(parts, fused), ddp)?.sqrt();
    let is_f64 = gradients.sums().any(|sum| sum.dtype() == DType::F64);
    let norm = if is_f64 { norm } else { f64::from(norm as f32) };
    Ok(norm * gradients.factor())
}

/// The sum of the squares of all elements, in f64 on a device that has it.
fn squares(mut parts: Vec<Tensor<1>>, fused: bool) -> f64 {
    let Some(first) = parts.first() else {
        return 0.0;
    };
    let device = first.device();
    let in_f64 = device == Device::flex();
    let sum = match (fused, in_f64) {
        (true, true) => {
            // The type of the sum is the widest one of the parts.
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

/// How many elements of the whole model's gradient are zero, the same on every rank; every rank must
/// come.
///
/// # Errors
///
/// [`CommError`] when a rank is missing.
pub fn count_zeros<M: Module>(
    gradients: &Gradients,
    ddp: &DistributedDataParallel<M>,
) -> Result<u64, CommError> {
    let mut elements = 0.0;
    let mut others = 0.0;
    for (part, stretch) in counted(gradients, ddp).zip(ddp.counted()) {
        elements += match &stretch.chosen {
            ChosenElements::Some(mask) => mask.clone().int().sum().into_scalar::<f64>(),
            ChosenElements::All | ChosenElements::None => part.dims()[0] as f64,
        };
        let not_zero = part.equal_elem(0.0).bool_not();
        others += not_zero.int().sum().into_scalar::<f64>();
    }
    Ok(over_model(elements - others, ddp)?.round() as u64)
}

/// The stretches of the gradients that this rank counts, as sums over the tokens; elements that it
/// does not count are zero.
fn counted<'a, M: Module>(
    gradients: &'a Gradients,
    ddp: &'a DistributedDataParallel<M>,
) -> impl Iterator<Item = Tensor<1>> + 'a {
    let sums: Vec<_> = gradients.sums().collect();
    ddp.counted().iter().map(move |stretch| {
        let part = sums[stretch.bucket].clone().slice([stretch.range.clone()]);
        match &stretch.chosen {
            ChosenElements::Some(mask) => part.mask_fill(mask.clone().bool_not(), 0.0),
            ChosenElements::All | ChosenElements::None => part,
        }
    })
}

/// The sum over the ranks that count different elements.
fn over_model<M: Module>(own: f64, ddp: &DistributedDataParallel<M>) -> Result<f64, CommError> {
    let (groups, axes) = (ddp.groups(), &ddp.plan().axes);
    let of_ranks = match axes.data.all_gather(Buffer::from(vec![own]))? {
        Buffer::F64(parts) => parts,
        other => unreachable!("f64 went in, {} came out", other.dtype()),
    };
    let mut parts = vec![0.0; of_ranks.len()];
    for (rank, value) in of_ranks.into_iter().enumerate() {
        parts[axes.part_of(rank)] = value;
    }
    let of_data: f64 = parts.into_iter().sum();
    sum(sum(of_data, groups.tensor())?, groups.pipeline())
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
