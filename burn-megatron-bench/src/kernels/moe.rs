//! Mixture-of-experts benchmarks. The grouped matrix multiplications of the experts are compared with a loop over the
//! experts, and with a single matrix multiplication with the same number of rows.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_megatron::kernels::moe::grouped::{
    self, accumulate_grouped_weight_gradient_at, grouped_matmul,
};
use burn_megatron_cli::internal::Shape;

use super::pairs::{PairBenchmark, TimedPair, draw, linear_layer, repeated, shape, with_sums};

/// The group name of these benchmarks.
pub const GROUP: &str = "moe";

/// The inner width of an expert, as in DeepSeek-V2-Lite.
const EXPERT_WIDTH: usize = 1408;

/// The total number of rows of all experts and the input width, for a CPU and for other devices.
const SIZES: [&[Shape]; 2] = [&[shape(4096, 512)], &[shape(65_536, 2048)]];

/// The distribution of rows over the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Eight experts have the same number of rows.
    Even,
    /// Each of eight experts has half of the rows of the expert before it.
    Skewed,
}

impl Load {
    fn group_sizes(self, rows: usize) -> Vec<usize> {
        let mut rest = rows;
        let size = |expert: usize| {
            let size = match self {
                Self::Even => rest / (8 - expert),
                Self::Skewed if expert < 7 => rest.div_ceil(2),
                Self::Skewed => rest,
            };
            rest -= size;
            size
        };
        (0..8).map(size).collect()
    }
}

/// Returns all expert benchmarks.
pub fn subjects() -> Vec<PairBenchmark> {
    let subject = |name, load, single| PairBenchmark {
        name,
        group: GROUP,
        sizes: SIZES,
        pairs: Box::new(move |shape, device, dtype| pairs(load, single, shape, (device, dtype))),
    };
    vec![
        subject("experts-even", Load::Even, false),
        subject("experts-skewed", Load::Skewed, false),
        subject("experts-one-gemm", Load::Even, true),
    ]
}

/// Returns `y = x w` as forward, and `dx = dy w^T` and `dw += x^T dy` as backward, on random values. The baseline is a
/// loop over the experts, or a single matrix multiplication of all rows.
fn pairs(
    load: Load,
    single: bool,
    shape: &Shape,
    (device, dtype): (&Device, DType),
) -> Vec<TimedPair> {
    let Shape { rows, width } = *shape;
    let sizes = load.group_sizes(rows);
    let experts = sizes.len();
    let x = draw([rows, width], device, dtype);
    let dy = draw([rows, EXPERT_WIDTH], device, dtype);
    let normal = Distribution::Normal(0.0, 1.0);
    let of_weights = [experts, width, EXPERT_WIDTH];
    let weights = Tensor::<3>::random(of_weights, normal, device).cast(dtype);
    let length = experts * width * EXPERT_WIDTH;
    let rows_bytes = rows * (width + EXPERT_WIDTH) * dtype.size();
    let bytes = rows_bytes + length * dtype.size();
    let operands = (x.clone(), weights.clone(), dy.clone(), sizes);
    let [plain_forward, plain_backward] = match single {
        true => {
            let weight = weights.narrow(0, 0, 1).reshape([width, EXPERT_WIDTH]);
            linear_layer(&x, &weight, &dy)
        }
        false => [
            repeated(operands.clone(), |(x, weights, _, sizes)| {
                grouped::composed::grouped_matmul(x, weights, &sizes)
            }),
            with_sums(
                length,
                device,
                operands.clone(),
                |(x, weights, dy, sizes), sums| {
                    let transposed = weights.swap_dims(1, 2);
                    let dx = grouped::composed::grouped_matmul(dy.clone(), transposed, &sizes);
                    let dw = loop_over_experts(&x, &dy, &sizes).cast(sums.dtype());
                    (dx, sums + dw)
                },
            ),
        ],
    };
    vec![
        TimedPair {
            direction: "forward",
            bytes,
            fused: repeated(operands.clone(), |(x, weights, _, sizes)| {
                grouped_matmul(x, weights, &sizes)
            }),
            plain: Some(plain_forward),
        },
        TimedPair {
            direction: "backward",
            // Both multiplications read dy. The accumulated gradients are read and written.
            bytes: bytes + rows_bytes + 8 * length,
            fused: with_sums(length, device, operands, |(x, weights, dy, sizes), sums| {
                let dx = grouped_matmul(dy.clone(), weights.swap_dims(1, 2), &sizes);
                let dw = accumulate_grouped_weight_gradient_at(x, dy, &sizes, sums, 0, true);
                (dx, dw)
            }),
            plain: Some(plain_backward),
        },
    ]
}

/// Returns the flat gradient of all weights, computed with Burn's operations.
fn loop_over_experts(x: &Tensor<2>, dy: &Tensor<2>, sizes: &[usize]) -> Tensor<1> {
    let mut first = 0;
    let gradient = |size: &usize| {
        let [x, dy] = [x, dy].map(|rows| rows.clone().narrow(0, first, *size));
        first += size;
        let gradient = x.transpose().matmul(dy);
        let length = gradient.shape().num_elements();
        gradient.reshape([length])
    };
    Tensor::cat(sizes.iter().map(gradient).collect(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_runs_in_both_forms() {
        let shape = shape(256, 16);
        for subject in subjects() {
            for pair in (subject.pairs)(&shape, &Device::flex(), DType::F32) {
                (pair.fused)()();
                (pair.plain.expect("both forms"))()();
            }
        }
    }

    #[test]
    fn a_load_has_all_rows() {
        assert_eq!(Load::Even.group_sizes(4096), [512; 8]);
        assert_eq!(Load::Skewed.group_sizes(256), [128, 64, 32, 16, 8, 4, 2, 2]);
    }
}
