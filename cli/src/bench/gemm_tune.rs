//! `bench gemm --tune`: the algorithms of cuBLASLt, timed for the products of linear layers.

use std::path::Path;
use std::process::ExitCode;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::atomic_file::replace_file;
use burn_megatron::kernels::gemm::algorithms::{GemmAlgorithms, GemmTiming, time_algorithms};
use burn_megatron::kernels::gemm::gelu::{check_gelu_epilogues, gelu_gradient, linear_gelu};
use burn_megatron::kernels::gemm::{accumulate_weight_gradient_at, linear};

use super::gemm::{GemmBenchArgs, LinearSizes};
use crate::error::Error;
use crate::numbers::count;

/// Runs of an algorithm in its turn, so that launching them is a small part of the time.
const RUNS: usize = 10;

/// Times the candidates of each product, prints a table and writes the fastest.
pub fn run(args: &GemmBenchArgs, path: &Path) -> Result<ExitCode, Error> {
    let device = args.device.checked()?;
    let dtype = DType::from(args.dtype);
    let timing = GemmTiming {
        candidates: args.candidates,
        rounds: args.repeats,
        runs: RUNS,
    };
    let mut synced = Ok(());
    let work = || {
        for LinearSizes(sizes) in &args.sizes {
            products(*sizes, (&device, dtype));
        }
        synced = device.sync();
    };
    let timed = time_algorithms(&device, timing, work);
    let timed = timed.map_err(|reason| format!("bench gemm --tune: {reason}"))?;
    synced?;
    print(&timed);
    replace_file(path, &serde_json::to_vec_pretty(&timed)?)?;
    println!(
        "{} written to {}: kernels.gemm_algorithms in a recipe, or --kernels gemm_algorithms={}",
        count(timed.products.len(), "product"),
        path.display(),
        path.display()
    );
    Ok(ExitCode::SUCCESS)
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

fn print(timed: &GemmAlgorithms) {
    println!("{}", timed.library);
    println!("heuristic us   fastest us   candidate of   product");
    for (product, chosen) in &timed.products {
        let times = &chosen.microseconds;
        println!(
            "{:12.2} {:12.2} {:>11} {:<2}   {product}",
            times[0],
            times[chosen.candidate],
            chosen.candidate,
            times.len(),
        );
    }
}
