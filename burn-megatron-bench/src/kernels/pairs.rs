//! Work that is timed in turns with what it is compared with.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::kernels::gemm;
use burn_megatron_cli::internal::{Shape, Work};

/// A benchmark of a group.
pub struct PairBenchmark {
    /// The name in the table.
    pub name: &'static str,
    /// The name of all benchmarks of its kind together.
    pub group: &'static str,
    /// The sizes without `--sizes`, on a CPU and elsewhere; if empty, the sizes of the operations.
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

/// Work on operands that it owns, whose copies are not timed.
pub fn repeated<A: Clone + Send + 'static, T>(
    operands: A,
    work: impl Fn(A) -> T + Copy + Send + 'static,
) -> Work<'static> {
    Box::new(move || {
        let operands = operands.clone();
        Box::new(move || drop(work(operands)))
    })
}

/// Work that adds to zeroed gradients of `length` elements in f32, whose creation is not timed either.
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

/// The plain forms of a linear layer: `y = x w`, and `dx = dy w^T` with `dw += x^T dy`.
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
