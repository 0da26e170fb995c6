//! The matrix multiplication engines of CubeCL devices, and their selection.

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

use super::engine::{Epilogue, GemmEngine, GemmProblem, Matrix, Operands};
use super::op::GemmOp;
use crate::cube::{empty, own};
use crate::flat::kernel::accumulate;

/// The alignment in bytes that is required to write a result directly to a flat buffer.
pub(crate) const FLAT_ALIGNMENT: usize = 16;

/// The alignment of buffers in bytes that cuBLASLt assumes. Buffers with a smaller alignment are copied.
const ALIGNMENT: u64 = 256;

/// Computes the matrix multiplication of an operation from its inputs.
pub(crate) fn multiply(product: GemmOp, inputs: Vec<CubeTensor>) -> CubeTensor {
    let mut inputs = inputs.into_iter();
    let (Some(first), Some(second)) = (inputs.next(), inputs.next()) else {
        unreachable!("a product has two factors")
    };
    let (factors, device) = (first.dtype, first.device.clone());
    let first = match product {
        GemmOp::Linear { .. } => first,
        GemmOp::WeightGradient { .. } => permute(first, &[1, 0]),
    };
    let ((left, left_matrix), (right, right_matrix)) = (to_matrix(first), to_matrix(second));
    let epilogue = inputs.next();
    let problem = product.problem(left_matrix, right_matrix, factors, epilogue.is_some());
    let epilogue = epilogue.map(|epilogue| prepare_epilogue(epilogue, problem.epilogue));
    let operands = Operands {
        left,
        right,
        epilogue,
        offset: product.offset(),
    };
    let start = operands.offset * problem.result.size();
    let misplaced = !start.is_multiple_of(FLAT_ALIGNMENT);
    match (problem.sizes(), problem.epilogue) {
        ([0, ..] | [_, 0, _] | [.., 0], _) => without_products(&problem, operands),
        (_, Epilogue::Flat { add }) if misplaced => {
            let plain = GemmProblem {
                epilogue: Epilogue::Nothing,
                ..problem
            };
            product_into_flat(&*choose(&device, &plain), &plain, operands, add)
        }
        _ => choose(&device, &problem).multiply(&problem, operands),
    }
}

/// Returns the flat buffer with the result written to it or added to it. `plain` is the problem without the buffer.
fn product_into_flat(
    engine: &dyn GemmEngine<CubeTensor>,
    plain: &GemmProblem,
    operands: Operands<CubeTensor>,
    add: bool,
) -> CubeTensor {
    let Operands {
        epilogue: Some(flat),
        offset,
        ..
    } = operands
    else {
        unreachable!("a product that goes into a flat buffer is given one")
    };
    let operands = Operands {
        epilogue: None,
        offset: 0,
        ..operands
    };
    let product = into_contiguous(engine.multiply(plain, operands));
    accumulate(flat, offset, product, add)
}

fn matrix_of(tensor: &CubeTensor) -> Option<Matrix> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    Matrix::of(
        [shape[0], shape[1]],
        [strides[0] as isize, strides[1] as isize],
    )
}

/// Returns the tensor and its matrix layout. Copies the tensor if no engine supports its strides.
pub(super) fn to_matrix(tensor: CubeTensor) -> (CubeTensor, Matrix) {
    let tensor = aligned(tensor);
    match matrix_of(&tensor) {
        Some(matrix) => (tensor, matrix),
        None => {
            let tensor = into_contiguous(tensor);
            match matrix_of(&tensor) {
                Some(matrix) => (tensor, matrix),
                None => unreachable!("a contiguous matrix lies row by row"),
            }
        }
    }
}

/// Makes the epilogue tensor contiguous. If the result is written to it, also ensures that no other tensor shares its
/// memory.
fn prepare_epilogue(tensor: CubeTensor, epilogue: Epilogue) -> CubeTensor {
    let tensor = into_contiguous(aligned(tensor));
    match epilogue {
        Epilogue::Flat { .. } => own(tensor),
        _ => tensor,
    }
}

pub(crate) fn aligned(tensor: CubeTensor) -> CubeTensor {
    let start = tensor.handle.offset_start.unwrap_or(0);
    if start.is_multiple_of(ALIGNMENT) {
        tensor
    } else {
        tensor.copy()
    }
}

/// Returns the result of a multiplication whose summed dimension is 0 or whose result has no elements.
fn without_products(problem: &GemmProblem, operands: Operands<CubeTensor>) -> CubeTensor {
    let [rows, columns, _] = problem.sizes();
    let shape = Shape::from([rows, columns]);
    match (operands.epilogue, problem.epilogue) {
        (Some(flat), Epilogue::Flat { add: false }) if rows * columns > 0 => {
            // The result is allocated as one row, because a matrix on CUDA may be allocated with gaps between its rows.
            let shape = Shape::from([rows * columns]);
            let zeros = CubeBackend::float_zeros(shape, &flat.device, float(problem.result));
            accumulate(flat, operands.offset, zeros, false)
        }
        (Some(flat), Epilogue::Flat { .. }) => flat,
        (Some(bias), Epilogue::Bias) if rows * columns > 0 => {
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

/// The engine that uses Burn's matmul and adds the bias or accumulates afterwards.
#[derive(Debug)]
struct BurnMatmul;

const BURN: &str = "Burn's matmul";

impl GemmEngine<CubeTensor> for BurnMatmul {
    fn name(&self) -> &'static str {
        BURN
    }

    fn supports(&self, _problem: &GemmProblem) -> Result<(), String> {
        Ok(())
    }

    fn multiply(&self, problem: &GemmProblem, operands: Operands<CubeTensor>) -> CubeTensor {
        if let Epilogue::Flat { add } = problem.epilogue {
            let plain = GemmProblem {
                epilogue: Epilogue::Nothing,
                ..*problem
            };
            return product_into_flat(self, &plain, operands, add);
        }
        let Operands {
            left,
            right,
            epilogue,
            ..
        } = operands;
        // A bias is added before the result is rounded to 16 bits.
        let between = match epilogue {
            Some(_) => crate::cpu::wide(problem.result),
            None => problem.result,
        };
        let result = matmul(left, right, None, MatmulStrategy::default(), between);
        let product = result.unwrap_or_else(|error| panic!("{BURN} failed: {error:?}"));
        let Some(bias) = epilogue else { return product };
        let bias = cast(row(bias, problem.right.columns), between);
        // The first operand may be overwritten.
        cast(CubeBackend::float_add(product, bias), problem.result)
    }
}

fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    if tensor.dtype() == dtype {
        tensor
    } else {
        CubeBackend::float_cast(tensor, float(dtype))
    }
}

/// Returns the fastest engine of the device that supports the problem.
fn choose(device: &CubeDevice, problem: &GemmProblem) -> Arc<dyn GemmEngine<CubeTensor>> {
    let refusal = match fastest(device) {
        Ok(engine) => match engine.supports(problem) {
            Ok(()) => return engine,
            Err(reason) => format!("{} does not support {problem:?}: {reason}", engine.name()),
        },
        Err(reason) => reason,
    };
    // cuBLASLt is only for CUDA, so other devices log no warning.
    if matches!(device, CubeDevice::Cuda(_)) {
        warn_once(format!(
            "cuBLASLt is not used; matrices are multiplied by {BURN}: {refusal}"
        ));
    }
    Arc::new(BurnMatmul)
}

/// Returns the engine that is faster than Burn's matmul, or the reason why the device does not have this engine.
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

/// Logs a warning, but each text only once per process.
pub(crate) fn warn_once(warning: String) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if !warned.contains(&warning) {
        tracing::warn!("{warning}");
        warned.insert(warning);
    }
}

/// Returns the reason why a CUDA device uses Burn's matmul. Returns `None` if the device uses cuBLASLt or is not a CUDA
/// device.
pub(super) fn slow_reason(device: &CubeDevice) -> Option<String> {
    // cuBLASLt is only for CUDA.
    match device {
        CubeDevice::Cuda(_) => fastest(device).err(),
        _ => None,
    }
}

/// Returns a description of the engine of a device.
pub(super) fn describe(device: &CubeDevice) -> String {
    match fastest(device) {
        Ok(engine) => engine.name().to_string(),
        Err(reason) => format!("{BURN}: {reason}"),
    }
}
