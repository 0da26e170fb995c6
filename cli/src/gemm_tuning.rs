//! The algorithms of cuBLASLt, timed for the products of linear layers: `burn-megatron-bench gemm --tune`.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::kernels::gemm::algorithms::{GemmAlgorithms, GemmTiming, time_algorithms};
use burn_megatron::kernels::gemm::gelu::{check_gelu_epilogues, gelu_gradient, linear_gelu};
use burn_megatron::kernels::gemm::{accumulate_weight_gradient_at, linear};

use crate::error::Error;

/// Runs of an algorithm in its turn, so that launching them is a small part of the time.
const RUNS: usize = 10;

/// Times `candidates` algorithms of each product of the layers of these sizes (rows, inputs and outputs), `rounds` times
/// each in turn, and returns the fastest of each product.
///
/// # Errors
/// A device without cuBLASLt, or one that fails.
pub fn tune(
    (device, dtype): (&Device, DType),
    sizes: &[[usize; 3]],
    (candidates, rounds): (usize, usize),
) -> Result<GemmAlgorithms, Error> {
    let timing = GemmTiming {
        candidates,
        rounds,
        runs: RUNS,
    };
    let mut synced = Ok(());
    let work = || {
        for sizes in sizes {
            products(*sizes, (device, dtype));
        }
        synced = device.sync();
    };
    let timed = time_algorithms(device, timing, work);
    let timed = timed.map_err(|reason| format!("gemm --tune: {reason}"))?;
    synced?;
    Ok(timed)
}

/// All products of a layer that a training step has: with and without a bias, written over or added to the gradients of a
/// micro-batch before, and with GELU after the layer where there is such an epilogue.
fn products([rows, inputs, outputs]: [usize; 3], on: (&Device, DType)) {
    let random = |sizes: [usize; 2]| Tensor::<2>::random(sizes, Distribution::Default, on);
    let (x, weight, dy) = (
        random([rows, inputs]),
        random([inputs, outputs]),
        random([rows, outputs]),
    );
    let bias = random([1, outputs]).reshape([outputs]);
    for bias in [None, Some(bias.clone())] {
        drop(linear(x.clone(), weight.clone(), bias));
    }
    drop(linear(dy.clone(), weight.clone().transpose(), None));
    let mut flat = Tensor::<1>::zeros([inputs * outputs], (on.0, DType::F32));
    for add in [false, true] {
        flat = accumulate_weight_gradient_at(x.clone(), dy.clone(), flat, 0, add);
    }
    let (device, dtype) = on;
    if check_gelu_epilogues(device, dtype, [inputs, outputs]).is_ok() {
        for bias in [None, Some(bias)] {
            drop(linear_gelu(x.clone(), weight.clone(), bias));
        }
        // Of the layer after it, which has as many outputs as this has inputs.
        let after = random([outputs, inputs]);
        for with_bias in [false, true] {
            drop(gelu_gradient(
                x.clone(),
                after.clone(),
                dy.clone(),
                with_bias,
            ));
        }
    }
}
