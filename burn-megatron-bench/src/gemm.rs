//! The `burn-megatron-bench gemm` benchmark: matrix multiplications on the CPU with each library that can be loaded, or
//! on a GPU with the algorithms of cuBLASLt.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernels::gemm::algorithms::GemmAlgorithms;
use burn_megatron::kernels::gemm::{Blas, CpuGemm, accumulate_weight_gradient_at_by, linear_by};
use burn_megatron_cli::internal::{
    Error, TimingConfig, Work, at_least_one, count, median, time_interleaved, tune,
};
use clap::Args;

use crate::args::BenchDtype;
use crate::report::write;

/// The number of algorithms from the cuBLASLt heuristic that are timed for each matrix multiplication.
const CANDIDATES: usize = 8;

/// Flags of `gemm`.
#[derive(Args)]
pub struct GemmBenchArgs {
    /// Sizes of linear layers, as rows x input features x output features.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ROWSxINxOUT",
        default_value = "1024x96x384,1024x256x1024,1024x768x768,1024x768x3072,1024x3072x768"
    )]
    pub sizes: Vec<LinearSizes>,
    /// Number of measured runs of each matrix multiplication, or of each algorithm with --tune. The median is reported.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = at_least_one)]
    pub repeats: usize,
    /// Time the cuBLASLt algorithms for the matrix multiplications of these layers instead, with and without GELU as an
    /// epilogue. Write the fastest algorithms to this file. It can be used as kernels.gemm_algorithms in a recipe.
    /// Requires --device cuda.
    #[arg(long, value_name = "FILE.json")]
    pub tune: Option<PathBuf>,
    /// Device for --tune.
    #[arg(long, default_value_t = DeviceKind::Cpu, requires = "tune")]
    pub device: DeviceKind,
    /// Dtype of the matrices for --tune.
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

/// The three matrix multiplications of a linear layer in training.
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
                // The gradient is copied, so that the multiplication can write it in place.
                let (x, dy, flat) = (x.clone(), dy.clone(), flat.clone() + 0.0);
                let accumulate = accumulate_weight_gradient_at_by;
                Box::new(move || drop(accumulate(blas, x, dy, flat, 0, true)))
            }),
        }
    }
}

/// Measures the times of the matrix multiplications, and prints a table and the fastest library.
pub fn run(args: &GemmBenchArgs) -> Result<(), Error> {
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
    println!(
        "GFLOP/s in f32, {}, medians of {}, interleaved",
        count(rayon::current_num_threads(), "thread"),
        count(args.repeats, "run")
    );
    print_line("rows x in x out", &names, |kind| kind.to_string());
    let timing = TimingConfig {
        samples: args.repeats,
        warm_up: Duration::from_millis(50),
    };
    let mut logarithms = vec![0.0; names.len()];
    for LinearSizes(sizes) in &args.sizes {
        for product in Product::ALL {
            let works = libraries.iter().map(|blas| product.work(*blas, *sizes));
            let works: Vec<_> = works.collect();
            let works: Vec<_> = works.iter().collect();
            let times = time_interleaved(&Device::flex(), timing, &works)?;
            let seconds: Vec<_> = times.iter().map(|times| median(times)).collect();
            let operations = 2.0 * sizes.iter().product::<usize>() as f64;
            let [rows, inputs, outputs] = sizes;
            let layer = format!("{rows} x {inputs} x {outputs}");
            let name = format!("{layer:<24} {}", product.name());
            print_line(&name, &seconds, |own| {
                format!("{:.1}", operations / own * 1e-9)
            });
            for (sum, own) in logarithms.iter_mut().zip(&seconds) {
                *sum += (seconds[0] / own).ln();
            }
        }
    }
    let products = (args.sizes.len() * Product::ALL.len()) as f64;
    let means = logarithms.iter().map(|sum| (sum / products).exp());
    let means: Vec<f64> = means.collect();
    print_line("geometric mean vs gemm", &means, |mean| {
        format!("{mean:.2}")
    });
    let fastest = means.iter().zip(&names);
    if let Some((_, fastest)) = fastest.max_by(|(a, _), (b, _)| a.total_cmp(b)) {
        println!(
            "fastest on this machine: {fastest} (kernels.gemm = \"{fastest}\" in a recipe, --kernels gemm={fastest})"
        );
    }
    Ok(())
}

/// Prints a line of the table, with a cell for each library.
fn print_line<T>(name: &str, cells: &[T], cell: impl Fn(&T) -> String) {
    let cells: String = cells.iter().map(|of| format!("{:>10}", cell(of))).collect();
    println!("{name:<29}{cells}");
}

/// Measures the times of the candidates for each matrix multiplication, prints a table, and writes the fastest
/// algorithms to a file.
fn run_tune(args: &GemmBenchArgs, path: &Path) -> Result<(), Error> {
    let device = args.device.checked()?;
    let on = (&device, DType::from(args.dtype));
    let sizes: Vec<_> = args.sizes.iter().map(|LinearSizes(sizes)| *sizes).collect();
    let timed = tune(on, &sizes, (CANDIDATES, args.repeats))?;
    print(&timed);
    write(path, &serde_json::to_vec_pretty(&timed)?)?;
    println!(
        "{} written to {}: kernels.gemm_algorithms in a recipe, or --kernels gemm_algorithms={}",
        count(timed.products.len(), "product"),
        path.display(),
        path.display()
    );
    Ok(())
}

fn print(timed: &GemmAlgorithms) {
    println!("{}", timed.library);
    println!("heuristic us   fastest us   candidate of   matmul");
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
    use crate::test_flags::parse_text;

    #[test]
    fn small_products_are_timed() {
        let args = |more: &str| {
            let flags = format!("--sizes 4x3x2 --repeats 1 {more}");
            parse_text::<GemmBenchArgs>(&flags)
        };
        run(&args("").unwrap()).unwrap();
        let error = run(&args("--tune never_written.json").unwrap()).unwrap_err();
        let error = error.to_string();
        let reason = "gemm --tune: cuBLASLt is for CUDA devices";
        assert!(error.starts_with(reason), "{error}");
        assert!(!Path::new("never_written.json").exists());
        for flags in ["--repeats 0", "--sizes 4x3", "--sizes 4x0x2"] {
            assert!(parse_text::<GemmBenchArgs>(flags).is_err(), "{flags}");
        }
    }
}
