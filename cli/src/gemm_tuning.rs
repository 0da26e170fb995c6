//! Times the algorithms of cuBLASLt for the matrix multiplications of linear layers: `burn-megatron-bench gemm --tune`.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::kernels::gemm::algorithms::{GemmAlgorithms, GemmTiming, time_algorithms};
use burn_megatron::kernels::gemm::gelu::{check_gelu_epilogues, gelu_gradient, linear_gelu};
use burn_megatron::kernels::gemm::{accumulate_weight_gradient_at, linear};

use crate::error::Error;

/// The number of consecutive runs of an algorithm. With several runs, the launch is a small part of the time.
const RUNS: usize = 10;

/// Times up to `candidates` algorithms of each matrix multiplication, for layers of these sizes (rows, inputs and
/// outputs). Each algorithm is timed in `rounds` alternating rounds. Returns the fastest algorithm of each matrix
/// multiplication.
///
/// # Errors
/// Returns an error if the device has no cuBLASLt, or if the device fails.
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

/// Computes all matrix products of a layer in a training step. The products have a bias or not, and their gradients
/// are written or accumulated over micro-batches. If a GELU epilogue exists, GELU after the layer is included.
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
        // The weight of the next layer, whose outputs have the size of this layer's inputs.
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
