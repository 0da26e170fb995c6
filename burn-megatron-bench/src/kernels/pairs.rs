//! Work that is timed in turns with what it is compared with.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron_cli::internal::{Shape, Work};

/// A benchmark of a group.
pub struct PairBenchmark {
    /// The name in the table.
    pub name: &'static str,
    /// The name of all benchmarks of its kind together.
    pub group: &'static str,
    /// The sizes without `--sizes`, on a CPU and elsewhere; those of the operations if empty.
    pub sizes: [&'static [Shape]; 2],
    /// The work at a size, on random values.
    pub pairs: Pairs,
}

/// Returns the work at a size, on random values of a type.
pub type Pairs = Box<dyn Fn(&Shape, &Device, DType) -> Vec<TimedPair>>;

/// The work that is timed at one size.
pub struct TimedPair {
    /// The direction, as the table writes it.
    pub direction: &'static str,
    /// The least bytes that must be read and written.
    pub bytes: usize,
    /// The kernel, or the work in 8 bits.
    pub fused: Work<'static>,
    /// What it is compared with.
    pub plain: Option<Work<'static>>,
}

/// A size.
pub const fn shape(rows: usize, width: usize) -> Shape {
    Shape { rows, width }
}

/// A random matrix.
pub fn draw(sizes: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(sizes, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Work without a set-up for each run.
pub fn repeated<T: Send>(work: impl Fn() -> T + Clone + Send + 'static) -> Work<'static> {
    Box::new(move || {
        let work = work.clone();
        Box::new(move || drop(work()))
    })
}

/// Returns a function that creates a zeroed gradient buffer.
pub fn zeros(len: usize, device: &Device) -> impl Fn() -> Tensor<1> + Clone + Send + 'static {
    let device = device.clone();
    move || Tensor::zeros([len], (&device, DType::F32))
}

/// Work on a gradient buffer that it owns, whose creation is not timed.
pub fn with_sums<T: Send>(
    zeros: impl Fn() -> Tensor<1> + 'static,
    work: impl Fn(Tensor<1>) -> T + Clone + Send + 'static,
) -> Work<'static> {
    Box::new(move || {
        let (sums, work) = (zeros(), work.clone());
        Box::new(move || drop(work(sums)))
    })
}
