//! Benchmarks of 8-bit floats: quantisation compared with a copy of as many bytes, products and an MLP compared with the
//! same in the type of the run.

mod mlp;
mod products;
mod quantisers;
mod recipe;

use burn::tensor::{DType, Device, Distribution, Tensor};

use burn_megatron_cli::internal::Shape;
use burn_megatron_cli::internal::Work;
pub(super) use products::{with_sums, zeros};
use recipe::ScalingRecipe;

/// The name of all of these benchmarks together.
pub const GROUP: &str = "fp8";

/// An 8-bit benchmark.
pub struct Fp8Benchmark {
    /// The name in the table.
    pub name: &'static str,
    /// The sizes without `--sizes`, on a CPU and elsewhere; those of the other operations if empty.
    pub sizes: [&'static [Shape]; 2],
    what: Fp8BenchmarkKind,
    recipe: ScalingRecipe,
}

#[derive(Clone, Copy)]
enum Fp8BenchmarkKind {
    Quantiser { square: bool },
    Product,
    Mlp,
}

/// The work that is timed at one size.
pub struct TimedPair {
    /// The direction, as the table writes it.
    pub direction: &'static str,
    /// The least bytes that must be read and written.
    pub bytes: usize,
    /// In 8 bits.
    pub fused: Work<'static>,
    /// The same in the type of the run.
    pub plain: Option<Work<'static>>,
}

const fn shape(rows: usize, width: usize) -> Shape {
    Shape { rows, width }
}

const PRODUCTS: [&[Shape]; 2] = [
    &[shape(256, 256), shape(512, 512), shape(1024, 1024)],
    &[shape(4096, 4096), shape(8192, 8192), shape(16384, 16384)],
];
const MLPS: [&[Shape]; 2] = [&[shape(1024, 384)], &[shape(16384, 4096)]];

/// All of them.
pub fn subjects() -> Vec<Fp8Benchmark> {
    use ScalingRecipe::{Blocks, Current, Delayed, Mx};
    let subject = |name, sizes, what, recipe| Fp8Benchmark {
        name,
        sizes,
        what,
        recipe,
    };
    let rows = Fp8BenchmarkKind::Quantiser { square: false };
    let squares = Fp8BenchmarkKind::Quantiser { square: true };
    let (product, mlp) = (Fp8BenchmarkKind::Product, Fp8BenchmarkKind::Mlp);
    vec![
        subject("quantize-delayed", [&[], &[]], rows, Delayed),
        subject("quantize-current", [&[], &[]], rows, Current),
        subject("quantize-blocks", [&[], &[]], rows, Blocks),
        subject("quantize-squares", [&[], &[]], squares, Blocks),
        subject("quantize-mx", [&[], &[]], rows, Mx),
        subject("product-delayed", PRODUCTS, product, Delayed),
        subject("product-blocks", PRODUCTS, product, Blocks),
        subject("product-mx", PRODUCTS, product, Mx),
        subject("mlp-delayed", MLPS, mlp, Delayed),
        subject("mlp-current", MLPS, mlp, Current),
        subject("mlp-blocks", MLPS, mlp, Blocks),
        subject("mlp-mx", MLPS, mlp, Mx),
    ]
}

impl Fp8Benchmark {
    /// The work at this size, on random values.
    pub fn pairs(&self, shape: &Shape, device: &Device, dtype: DType) -> Vec<TimedPair> {
        match self.what {
            Fp8BenchmarkKind::Quantiser { square } => {
                vec![quantisers::pair(self.recipe, square, shape, device, dtype)]
            }
            Fp8BenchmarkKind::Product => products::pairs(self.recipe, shape, device, dtype),
            Fp8BenchmarkKind::Mlp => vec![mlp::pair(self.recipe, shape, device, dtype)],
        }
    }
}

pub(super) fn draw(sizes: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(sizes, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Work without a set-up for each run.
pub(super) fn repeated<T: Send>(work: impl Fn() -> T + Clone + Send + 'static) -> Work<'static> {
    Box::new(move || {
        let work = work.clone();
        Box::new(move || drop(work()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_runs_in_both_forms() {
        let device = Device::flex();
        for subject in subjects() {
            let pairs = subject.pairs(&shape(32, 48), &device, DType::F32);
            assert!(!pairs.is_empty());
            for pair in pairs {
                assert!(pair.bytes > 32 * 48, "{}", subject.name);
                (pair.fused)()();
                let quantiser = matches!(subject.what, Fp8BenchmarkKind::Quantiser { .. });
                assert_eq!(pair.plain.is_none(), quantiser, "{}", subject.name);
                if let Some(plain) = pair.plain {
                    plain()();
                }
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = subjects().iter().map(|subject| subject.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), subjects().len());
    }
}
