//! Benchmarks that time work in alternation with a baseline.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::kernels::gemm;
use burn_megatron_cli::internal::{Shape, Work};

/// A benchmark with a baseline.
pub struct PairBenchmark {
    /// The name in the table.
    pub name: &'static str,
    /// The group name of the benchmark.
    pub group: &'static str,
    /// The sizes that are used without `--sizes`, for a CPU and for other devices. If a list is empty, the default
    /// sizes are used.
    pub sizes: [&'static [Shape]; 2],
    /// Creates the work for a size, on random values.
    pub pairs: Pairs,
}

/// A function that returns the work for a size, on random values of a type.
pub type Pairs = Box<dyn Fn(&Shape, &Device, DType) -> Vec<TimedPair>>;

/// The work that is timed at one size.
pub struct TimedPair {
    /// The direction, as shown in the table.
    pub direction: &'static str,
    /// The minimum number of bytes that must be read and written.
    pub bytes: usize,
    /// The kernel, or the work in FP8.
    pub fused: Work<'static>,
    /// The baseline, if there is a baseline.
    pub plain: Option<Work<'static>>,
}

/// Creates a shape.
pub const fn shape(rows: usize, width: usize) -> Shape {
    Shape { rows, width }
}

/// Returns a random matrix.
pub fn draw(sizes: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(sizes, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Returns work on operands. The time to clone the operands is not measured.
pub fn repeated<A: Clone + Send + 'static, T>(
    operands: A,
    work: impl Fn(A) -> T + Copy + Send + 'static,
) -> Work<'static> {
    Box::new(move || {
        let operands = operands.clone();
        Box::new(move || drop(work(operands)))
    })
}

/// Returns a benchmark closure that adds to zeroed f32 gradients of `length` elements. The time to create the
/// gradients is not measured.
pub fn with_sums<A: Clone + Send + 'static, T>(
    length: usize,
    device: &Device,
    operands: A,
    work: impl Fn(A, Tensor<1>) -> T + Copy + Send + 'static,
) -> Work<'static> {
    let device = device.clone();
    Box::new(move || {
        let operands = operands.clone();
        let sums = Tensor::zeros([length], (&device, DType::F32));
        Box::new(move || drop(work(operands, sums)))
    })
}

/// Returns the matrix multiplications of a linear layer without quantization: `y = x w`, and `dx = dy w^T` with `dw +=
/// x^T dy`.
pub fn linear_layer(x: &Tensor<2>, weight: &Tensor<2>, dy: &Tensor<2>) -> [Work<'static>; 2] {
    let (x, weight, dy) = (x.clone(), weight.clone(), dy.clone());
    let [inputs, outputs] = weight.dims();
    let device = x.device();
    let forward = repeated((x.clone(), weight.clone()), |(x, weight)| {
        gemm::linear(x, weight, None)
    });
    let operands = (x, weight, dy);
    let backward = with_sums(
        inputs * outputs,
        &device,
        operands,
        |(x, weight, dy), sums| {
            let dx = gemm::linear(dy.clone(), weight.transpose(), None);
            (
                dx,
                gemm::accumulate_weight_gradient_at(x, dy, sums, 0, true),
            )
        },
    );
    [forward, backward]
}
