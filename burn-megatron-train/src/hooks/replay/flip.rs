//! Injects bit flips into tensors, for tests.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};
use burn_megatron::fingerprint::{Corruption, host_data};
use burn_megatron_comm_testing::fault_injection::{BitFlip, FaultPlan, FlipTarget};

/// Returns a function that flips the bits of activations and gradients which the plan lists for a rank.
pub(super) fn corruption(faults: Arc<FaultPlan>, rank: usize) -> Box<Corruption> {
    Box::new(move |is_gradient, tensor| {
        let target = match is_gradient {
            true => FlipTarget::Gradient,
            false => FlipTarget::Activation,
        };
        let flip = faults.next_tensor(rank, target)?;
        flip_dispatch(tensor, flip);
        Some(format!("{flip} triggers on rank {rank}"))
    })
}

/// Returns a copy of a tensor with one bit flipped; the same tensor if it has no elements.
pub(super) fn flipped<const D: usize>(x: Tensor<D>, flip: BitFlip) -> Tensor<D> {
    let (device, dtype) = (x.device(), x.dtype());
    Tensor::from_data(flipped_data(host_data(x), flip), (&device, dtype))
}

/// Flips a bit of a tensor with any number of dims.
fn flip_dispatch(tensor: &mut DispatchTensor, flip: BitFlip) {
    let x = Tensor::<1>::from_dispatch(tensor.clone());
    let (device, dtype) = (x.device(), x.dtype());
    let data = flipped_data(host_data(x), flip);
    macro_rules! of_rank {
        ($($rank:literal),*) => {
            match data.rank() {
                $($rank => Tensor::<$rank>::from_data(data, (&device, dtype)).into_dispatch(),)*
                rank => unreachable!("no operation has a tensor of {rank} dimensions"),
            }
        };
    }
    *tensor = of_rank!(1, 2, 3, 4, 5, 6);
}

fn flipped_data(data: TensorData, flip: BitFlip) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    let mut bytes = bytes.to_vec();
    flip.apply(&mut bytes, dtype.size());
    TensorData::from_bytes_vec(bytes, shape, dtype)
}
