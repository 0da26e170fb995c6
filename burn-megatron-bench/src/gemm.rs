//! `burn-megatron-bench gemm`: products on the CPU by each library that can be opened, or by the algorithms of cuBLASLt.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::atomic_file::replace_file;
use burn_megatron::device::DeviceKind;
use burn_megatron::kernels::gemm::algorithms::GemmAlgorithms;
use burn_megatron::kernels::gemm::{Blas, CpuGemm, accumulate_weight_gradient_at_by, linear_by};
use clap::Args;

use super::args::{BenchDtype, at_least_one};
use burn_megatron_cli::internal::{Error, count, tune};
use burn_megatron_cli::internal::{TimingConfig, Work, median, time_interleaved};

/// Flags of `gemm`.
#[derive(Args)]
pub struct GemmBenchArgs {
    /// Sizes of linear layers: rows x inputs x outputs.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ROWSxINxOUT",
        default_value = "1024x96x384,1024x256x1024,1024x768x768,1024x768x3072,1024x3072x768"
    )]
    pub sizes: Vec<LinearSizes>,
    /// Measured runs of each product, or of each algorithm with --tune; the median is reported.
    #[arg(long, value_name = "N", default_value_t = 15)]
    pub repeats: usize,
    /// Time the algorithms of cuBLASLt for the products of these layers instead, also with GELU as an epilogue, and write
    /// the fastest to this file, for kernels.gemm_algorithms of a recipe. Needs --device cuda.
    #[arg(long, value_name = "FILE.json")]
    pub tune: Option<PathBuf>,
    /// The algorithms of the heuristic that are timed for each product.
    #[arg(long, value_name = "N", default_value_t = 8, requires = "tune", value_parser = at_least_one)]
    pub candidates: usize,
    /// The device of --tune.
    #[arg(long, default_value_t = DeviceKind::Cpu, requires = "tune")]
    pub device: DeviceKind,
    /// The type of the factors of --tune.
    #[arg(long, value_enum, default_value_t = BenchDtype::Bf16, requires = "tune")]
    pub dtype: BenchDtype,
}

/// The sizes of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSizes(pub [usize; 3]);

impl FromStr for LinearSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes: Vec<usize> = text.split('x').flat_map(str::parse).collect();
        match sizes[..] {
            [rows, inputs, outputs] if rows * inputs * outputs > 0 => {
                Ok(Self([rows, inputs, outputs]))
            }
            _ => Err("expected three numbers above 0, as in 1024x768x3072".into()),
        }
    }
}

/// The three products of a linear layer in training.
#[derive(Clone, Copy)]
enum Product {
    Output,
    InputGradient,
    WeightGradient,
}

impl Product {
    const ALL: [Self; 3] = [Self::Output, Self::InputGradient, Self::WeightGradient];

    fn name(self) -> &'static str {
        match self {
            Self::Output => "y",
            Self::InputGradient => "dx",
            Self::WeightGradient => "dw",
        }
    }

    fn work(self, blas: Option<Blas>, [rows, inputs, outputs]: [usize; 3]) -> Work<'static> {
        let device = Device::flex();
        let random = move |sizes| Tensor::<2>::random(sizes, Distribution::Default, &device);
        let (x, weight) = (random([rows, inputs]), random([inputs, outputs]));
        let dy = random([rows, outputs]);
        let flat = Tensor::<1>::zeros([inputs * outputs], &Device::flex());
        match self {
            Self::Output => Box::new(move || {
                let (x, weight) = (x.clone(), weight.clone());
                Box::new(move || drop(linear_by(blas, x, weight, None)))
            }),
            Self::InputGradient => Box::new(move || {
                let (dy, weight) = (dy.clone(), weight.clone().transpose());
                Box::new(move || drop(linear_by(blas, dy, weight, None)))
            }),
            Self::WeightGradient => Box::new(move || {
                // Memory of its own, so that it is written in place.
                let (x, dy, flat) = (x.clone(), dy.clone(), flat.clone() + 0.0);
                let accumulate = accumulate_weight_gradient_at_by;
                Box::new(move || drop(accumulate(blas, x, dy, flat, 0, true)))
            }),
        }
    }
}

/// Times the products, and prints a table and the fastest library.
pub fn run(args: &GemmBenchArgs) -> Result<ExitCode, Error> {
    if args.repeats == 0 {
        return Err("invalid repeats = 0: expected at least 1".into());
    }
    if let Some(path) = &args.tune {
        return run_tune(args, path);
    }
    let (mut names, mut libraries) = (vec![], vec![]);
    for kind in CpuGemm::ALL {
        match kind.open() {
            Ok(library) => {
                names.push(kind);
                libraries.push(library);
            }
            Err(error) => println!("without {kind}: {error}"),
        }
    }
    let threads = rayon::current_num_threads();
    let header: String = names.iter().map(|kind| format!("{kind:>10}")).collect();
    println!(
        "GFLOP/s in f32, {}, medians of {} in turns",
        count(threads, "thread"),
        count(args.repeats, "run")
    );
    println!("rows x in x out              {header}");
    let timing = TimingConfig {
        samples: args.repeats,
        warm_up: Duration::from_millis(50),
    };
    let mut logarithms = vec![0.0; names.len()];
    for LinearSizes(sizes) in &args.sizes {
        for product in Product::ALL {
            let works: Vec<_> = libraries
                .iter()
                .map(|blas| product.work(*blas, *sizes))
                .collect();
            let works: Vec<_> = works.iter().collect();
            let times = time_interleaved(&Device::flex(), timing, &works)?;
            let seconds: Vec<_> = times.iter().map(|times| median(times)).collect();
            let operations = 2.0 * sizes.iter().product::<usize>() as f64;
            let rates = seconds.iter().map(|seconds| operations / seconds * 1e-9);
            let rates: String = rates.map(|rate| format!("{rate:10.1}")).collect();
            let [rows, inputs, outputs] = sizes;
            let layer = format!("{rows} x {inputs} x {outputs}");
            println!("{layer:<24} {:<3} {rates}", product.name());
            for (sum, own) in logarithms.iter_mut().zip(&seconds) {
                *sum += (seconds[0] / own).ln();
            }
        }
    }
    let products = (args.sizes.len() * Product::ALL.len()) as f64;
    let means: Vec<f64> = logarithms
        .iter()
        .map(|sum| (sum / products).exp())
        .collect();
    let ratios: String = means.iter().map(|mean| format!("{mean:10.2}")).collect();
    println!("geometric mean, of gemm      {ratios}");
    let fastest = (0..means.len()).max_by(|a, b| means[*a].total_cmp(&means[*b]));
    if let Some(fastest) = fastest.map(|index| names[index]) {
        println!(
            "fastest here: {fastest} (kernels.gemm = \"{fastest}\" in a recipe, --kernels gemm={fastest})"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Times the candidates of each product, prints a table and writes the fastest.
fn run_tune(args: &GemmBenchArgs, path: &Path) -> Result<ExitCode, Error> {
    let device = args.device.checked()?;
    let on = (&device, DType::from(args.dtype));
    let sizes: Vec<_> = args.sizes.iter().map(|LinearSizes(sizes)| *sizes).collect();
    let timed = tune(on, &sizes, (args.candidates, args.repeats))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_products_are_timed() {
        let args = |repeats| GemmBenchArgs {
            sizes: vec![LinearSizes([4, 3, 2])],
            repeats,
            tune: None,
            candidates: 8,
            device: DeviceKind::Cpu,
            dtype: BenchDtype::Bf16,
        };
        run(&args(1)).unwrap();
        let error = run(&args(0)).unwrap_err().to_string();
        assert_eq!(error, "invalid repeats = 0: expected at least 1");
        let file = PathBuf::from("never_written.json");
        let tune = GemmBenchArgs {
            tune: Some(file.clone()),
            ..args(1)
        };
        let error = run(&tune).unwrap_err().to_string();
        let reason = "gemm --tune: cuBLASLt is for CUDA devices";
        assert!(error.starts_with(reason) && !file.exists(), "{error}");
        assert!("4x3".parse::<LinearSizes>().is_err());
        assert!("4x0x2".parse::<LinearSizes>().is_err());
    }
}
