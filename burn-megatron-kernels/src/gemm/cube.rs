//! The engines of CubeCL devices, and the choice among them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use super::engine::{Added, GemmEngine, Matrix, Operands, Problem};
use super::product::Product;
use crate::cube::{empty, own};
use crate::flat::kernel::accumulate;

/// A product goes straight into a flat buffer at multiples of so many bytes.
pub(crate) const FLAT_ALIGNMENT: usize = 16;

/// Buffers start at multiples of so many bytes, or are copied: what cuBLASLt takes for granted.
const ALIGNMENT: u64 = 256;

/// The product of a kernel's inputs.
pub(super) fn multiply(product: Product, inputs: Vec<CubeTensor>) -> CubeTensor {
    let added = product.added(inputs.len());
    let mut inputs = inputs.into_iter();
    let (Some(first), Some(second)) = (inputs.next(), inputs.next()) else {
        unreachable!("a product has two factors")
    };
    let (factors, device) = (first.dtype, first.device.clone());
    let first = match product {
        Product::Linear => first,
        Product::WeightGradient { .. } => permute(first, &[1, 0]),
    };
    let ((left, left_lies), (right, right_lies)) = (settle(first), settle(second));
    let problem = Problem {
        left: left_lies,
        right: right_lies,
        factors,
        result: product.result(factors),
        added,
    };
    let added = inputs
        .next()
        .map(|added| settle_added(added, problem.added));
    let operands = Operands {
        left,
        right,
        added,
        offset: product.offset(),
    };
    let start = operands.offset * problem.result.size();
    let misplaced = !start.is_multiple_of(FLAT_ALIGNMENT);
    match (problem.sizes(), problem.added) {
        ([0, ..] | [_, 0, _] | [.., 0], _) => without_products(&problem, operands),
        (_, Added::Flat { add }) if misplaced => {
            let alone = Problem {
                added: Added::Nothing,
                ..problem
            };
            product_into_flat(&*choose(&device, &alone), &alone, operands, add)
        }
        _ => choose(&device, &problem).multiply(&problem, operands),
    }
}

/// The flat buffer with a product that `engine` computes `alone`.
fn product_into_flat(
    engine: &dyn GemmEngine<CubeTensor>,
    alone: &Problem,
    operands: Operands<CubeTensor>,
    add: bool,
) -> CubeTensor {
    let Operands {
        added: Some(flat),
        offset,
        ..
    } = operands
    else {
        unreachable!("a product that goes into a flat buffer is given one")
    };
    let operands = Operands {
        added: None,
        offset: 0,
        ..operands
    };
    let product = into_contiguous(engine.multiply(alone, operands));
    accumulate(flat, offset, product, add)
}

fn lies(tensor: &CubeTensor) -> Option<Matrix> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    Matrix::of(
        [shape[0], shape[1]],
        [strides[0] as isize, strides[1] as isize],
    )
}

/// The tensor and how it lies, copied if it lies in no way that can be multiplied.
fn settle(tensor: CubeTensor) -> (CubeTensor, Matrix) {
    let tensor = aligned(tensor);
    match lies(&tensor) {
        Some(matrix) => (tensor, matrix),
        None => {
            let tensor = into_contiguous(tensor);
            match lies(&tensor) {
                Some(matrix) => (tensor, matrix),
                None => unreachable!("a contiguous matrix lies row by row"),
            }
        }
    }
}

/// Contiguous, and what is written to held by nobody else.
fn settle_added(tensor: CubeTensor, added: Added) -> CubeTensor {
    let tensor = into_contiguous(aligned(tensor));
    match added {
        Added::Flat { .. } => own(tensor),
        _ => tensor,
    }
}

pub(crate) fn aligned(tensor: CubeTensor) -> CubeTensor {
    let start = tensor.handle.offset_start.unwrap_or(0);
    match start.is_multiple_of(ALIGNMENT) {
        true => tensor,
        false => tensor.copy(),
    }
}

/// A sum over nothing, or a result without elements.
fn without_products(problem: &Problem, operands: Operands<CubeTensor>) -> CubeTensor {
    let [rows, columns, _] = problem.sizes();
    let shape = Shape::from([rows, columns]);
    match (operands.added, problem.added) {
        (Some(flat), Added::Flat { add: false }) if rows * columns > 0 => {
            // As one row: between rows of a matrix CUDA leaves gaps.
            let shape = Shape::from([rows * columns]);
            let zeros = CubeBackend::float_zeros(shape, &flat.device, float(problem.result));
            accumulate(flat, operands.offset, zeros, false)
        }
        (Some(flat), Added::Flat { .. }) => flat,
        (Some(bias), Added::Bias) if rows * columns > 0 => {
            into_contiguous(CubeBackend::float_expand(row(bias, columns), shape))
        }
        _ if rows * columns == 0 => empty(&operands.left, shape, problem.result),
        _ => {
            let device = operands.left.device.clone();
            CubeBackend::float_zeros(shape, &device, float(problem.result))
        }
    }
}

fn row(bias: CubeTensor, columns: usize) -> CubeTensor {
    CubeBackend::float_reshape(bias, Shape::from([1, columns]))
}

fn float(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

/// Burn's matmul, then an addition.
#[derive(Debug)]
struct BurnMatmul;

const BURN: &str = "Burn's matmul";

impl GemmEngine<CubeTensor> for BurnMatmul {
    fn name(&self) -> &'static str {
        BURN
    }

    fn supports(&self, _problem: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn multiply(&self, problem: &Problem, operands: Operands<CubeTensor>) -> CubeTensor {
        if let Added::Flat { add } = problem.added {
            let alone = Problem {
                added: Added::Nothing,
                ..*problem
            };
            return product_into_flat(self, &alone, operands, add);
        }
        let Operands {
            left, right, added, ..
        } = operands;
        // A bias is added before the rounding to 16 bits.
        let between = match added {
            Some(_) => crate::cpu::wide(problem.result),
            None => problem.result,
        };
        let product = matmul(left, right, None, MatmulStrategy::default(), between);
        let product = product.unwrap_or_else(|error| panic!("{BURN} failed: {error:?}"));
        let Some(bias) = added else { return product };
        let bias = cast(row(bias, problem.right.columns), between);
        // The first operand is what may be written to.
        cast(CubeBackend::float_add(product, bias), problem.result)
    }
}

fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    match tensor.dtype() == dtype {
        true => tensor,
        false => CubeBackend::float_cast(tensor, float(dtype)),
    }
}

/// The fastest engine of the device that takes the problem.
fn choose(device: &CubeDevice, problem: &Problem) -> Arc<dyn GemmEngine<CubeTensor>> {
    let refusal = match fastest(device) {
        Ok(engine) => match engine.supports(problem) {
            Ok(()) => return engine,
            Err(reason) => format!("{} refuses {problem:?}: {reason}", engine.name()),
        },
        Err(reason) => reason,
    };
    // On other devices nothing is missing.
    if matches!(device, CubeDevice::Cuda(_)) {
        warn_once(format!("matrices are multiplied by {BURN}: {refusal}"));
    }
    Arc::new(BurnMatmul)
}

/// What is faster than Burn's matmul, or why there is nothing.
#[cfg(feature = "cuda")]
fn fastest(device: &CubeDevice) -> Result<Arc<dyn GemmEngine<CubeTensor>>, String> {
    match device {
        CubeDevice::Cuda(device) => Ok(super::cublaslt::CublasLt::of(device)?),
        _ => Err(ONLY_CUDA.to_string()),
    }
}

#[cfg(not(feature = "cuda"))]
fn fastest(_device: &CubeDevice) -> Result<Arc<dyn GemmEngine<CubeTensor>>, String> {
    Err(ONLY_CUDA.to_string())
}

const ONLY_CUDA: &str = "cuBLASLt is for CUDA devices, with the feature `cuda`";

/// Warns unless it was said before.
pub(crate) fn warn_once(warning: String) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if !told.contains(&warning) {
        tracing::warn!("{warning}");
        told.insert(warning);
    }
}

/// The engine of a device in words.
pub(super) fn describe(device: &CubeDevice) -> String {
    match fastest(device) {
        Ok(engine) => engine.name().to_string(),
        Err(reason) => format!("{BURN}: {reason}"),
    }
}
