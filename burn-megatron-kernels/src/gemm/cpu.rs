//! Matrix multiplication on Burn's CPU backend with the `gemm` crate, which writes directly to the result.
//!
//! The epilogue is the initial value of the result: the bias in each row, or the range of a flat buffer. The crate uses
//! the thread pool of the calling thread.
//!
//! An element of the result has the same bits for any number of rows and threads. It is a chain of multiplications and
//! additions in the order of the summed dimension (the depth). This module splits the depth into [`depths`],
//! independently of cache sizes. The crate uses other orders for a single row, for a small result, and for a depth of
//! two. [`row`](super::row) computes these cases instead. As a result, the output of a token does not depend on the
//! other tokens.

use std::borrow::Cow;
use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};

use super::blas::Blas;
use super::engine::{Epilogue, GemmEngine, GemmProblem, Matrix, Operands};
use super::op::GemmOp;
use super::row;
use crate::cpu::{
    Element, ROW_GRAIN, Real, for_each_task, own, rows_per_task, slice, slice_mut, tensor,
    vectorized,
};

pub(super) const NAME: &str = "the gemm crate";

/// The number of multiplications below which several threads are not faster than one thread.
const MIN_PARALLEL_PRODUCTS: usize = 192 * 192 * 192;

/// The maximum number of rows for which reading the right operand dominates the time of a multiplication.
const FEW_ROWS: usize = 16;
/// The minimum number of elements of the right operand for which several threads read it.
const MIN_PARALLEL_READ: usize = 256 * 1024;

/// The maximum number of elements of a result for which the `gemm` crate may sum in a different order.
const SMALL_RESULT: usize = 256;
/// The maximum depth for which the `gemm` crate may sum in a different order.
const SMALL_DEPTH: usize = 2;
/// The maximum depth that the `gemm` crate sums in one chain.
const MAX_CHAIN: usize = 512;

/// The `gemm` crate, or a BLAS library.
#[derive(Debug)]
struct CpuEngine {
    blas: Option<Blas>,
}

/// Computes the matrix multiplication of an operation from its inputs.
pub(super) fn multiply(product: GemmOp, inputs: Vec<FlexTensor>) -> FlexTensor {
    let mut inputs = inputs.into_iter();
    let (Some(first), Some(second)) = (inputs.next(), inputs.next()) else {
        unreachable!("a product has two factors")
    };
    let factors = first.dtype();
    let first = match product {
        GemmOp::Linear { .. } => first,
        GemmOp::WeightGradient { .. } => first.transpose(0, 1),
    };
    let ((left, left_matrix), (right, right_matrix)) = (to_matrix(first), to_matrix(second));
    let epilogue = inputs.next();
    let problem = product.problem(left_matrix, right_matrix, factors, epilogue.is_some());
    let operands = Operands {
        left,
        right,
        epilogue,
        offset: product.offset(),
    };
    let blas = product.blas();
    CpuEngine { blas }.multiply(&problem, operands)
}

fn matrix_of(tensor: &FlexTensor) -> Option<Matrix> {
    let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
    Matrix::of([shape[0], shape[1]], [strides[0], strides[1]])
}

/// Returns the tensor and its matrix layout. Copies the tensor if its strides are not supported.
fn to_matrix(tensor: FlexTensor) -> (FlexTensor, Matrix) {
    match matrix_of(&tensor) {
        Some(matrix) => (tensor, matrix),
        None => {
            let tensor = tensor.to_contiguous();
            match matrix_of(&tensor) {
                Some(matrix) => (tensor, matrix),
                None => unreachable!("a contiguous matrix lies row by row"),
            }
        }
    }
}

impl GemmEngine<FlexTensor> for CpuEngine {
    fn name(&self) -> &'static str {
        self.blas.map_or(NAME, |blas| blas.kind().name())
    }

    fn supports(&self, _problem: &GemmProblem) -> Result<(), String> {
        Ok(())
    }

    fn multiply(&self, problem: &GemmProblem, operands: Operands<FlexTensor>) -> FlexTensor {
        match problem.factors {
            DType::F64 => exact::<f64>(self.blas, problem, operands),
            DType::F16 | DType::BF16 => widened(self.blas, problem, operands),
            _ => exact::<f32>(self.blas, problem, operands),
        }
    }
}

/// Computes a multiplication whose operands have the type used for computation.
fn exact<W: Real>(
    blas: Option<Blas>,
    problem: &GemmProblem,
    operands: Operands<FlexTensor>,
) -> FlexTensor {
    let [left, right] = [&operands.left, &operands.right].map(|factor| {
        let start = factor.layout().start_offset();
        &factor.storage::<W>()[start..]
    });
    match problem.epilogue {
        Epilogue::Nothing | Epilogue::Bias => {
            let bias = operands.epilogue.map(|bias| bias.to_contiguous());
            let [rows, columns, _] = problem.sizes();
            let bias = bias.as_ref().map(slice::<W>);
            tensor(product(blas, problem, left, right, bias), [rows, columns])
        }
        Epilogue::Flat { add } => into_flat(
            blas,
            problem,
            left,
            right,
            (operands.epilogue, operands.offset),
            add,
        ),
    }
}

/// Computes a multiplication of 16-bit operands, which are converted to f32 in their own layouts.
fn widened(
    blas: Option<Blas>,
    problem: &GemmProblem,
    operands: Operands<FlexTensor>,
) -> FlexTensor {
    let wide = |factor: FlexTensor, matrix: Matrix| {
        let stored = if matrix.transposed {
            factor.transpose(0, 1)
        } else {
            factor
        };
        let values = singles(&stored.to_contiguous()).into_owned();
        let leading = if matrix.transposed {
            matrix.rows
        } else {
            matrix.columns
        };
        let matrix = Matrix {
            leading: leading.max(1),
            ..matrix
        };
        (values, matrix)
    };
    let (left, left_matrix) = wide(operands.left, problem.left);
    let (right, right_matrix) = wide(operands.right, problem.right);
    let problem = GemmProblem {
        left: left_matrix,
        right: right_matrix,
        ..*problem
    };
    match problem.epilogue {
        Epilogue::Nothing | Epilogue::Bias => {
            let bias = operands.epilogue.map(|bias| bias.to_contiguous());
            let bias = bias.as_ref().map(singles);
            let [rows, columns, _] = problem.sizes();
            let values = product(blas, &problem, &left, &right, bias.as_deref());
            of_singles(values, problem.factors, [rows, columns])
        }
        Epilogue::Flat { add } => {
            let into = (operands.epilogue, operands.offset);
            into_flat(blas, &problem, &left, &right, into, add)
        }
    }
}

/// Returns the values of a contiguous tensor of f32, f16 or bf16 as f32.
pub(crate) fn singles(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    match tensor.dtype() {
        DType::F16 => Cow::Owned(converted(slice::<f16>(tensor), Element::wide)),
        DType::BF16 => Cow::Owned(converted(slice::<bf16>(tensor), Element::wide)),
        _ => Cow::Borrowed(slice(tensor)),
    }
}

/// Converts f32 values to a tensor in f32, f16 or bf16.
pub(crate) fn of_singles(values: Vec<f32>, dtype: DType, shape: [usize; 2]) -> FlexTensor {
    match dtype {
        DType::F16 => tensor(converted(&values, f16::narrow), shape),
        DType::BF16 => tensor(converted(&values, bf16::narrow), shape),
        _ => tensor(values, shape),
    }
}

#[inline(always)]
fn converted<A: Element, B: Element>(from: &[A], convert: impl Fn(A) -> B + Sync) -> Vec<B> {
    let part = |from: &[A], to: &mut [B]| {
        vectorized(
            #[inline(always)]
            || {
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, from)| *to = convert(*from))
            },
        )
    };
    let mut to = vec![B::narrow(<B::Wide as Real>::ZERO); from.len()];
    let parts = from.chunks(ROW_GRAIN).zip(to.chunks_mut(ROW_GRAIN));
    for_each_task(parts, |(from, to)| part(from, to));
    to
}

/// Computes `left right` in new memory, and adds the bias.
fn product<W: Real>(
    blas: Option<Blas>,
    problem: &GemmProblem,
    left: &[W],
    right: &[W],
    bias: Option<&[W]>,
) -> Vec<W> {
    let [rows, columns, _] = problem.sizes();
    let mut result = vec![W::ZERO; rows * columns];
    if let Some(bias) = bias.filter(|bias| !bias.is_empty()) {
        let fill = |rows: &mut [W]| {
            rows.chunks_mut(columns)
                .for_each(|row| row.copy_from_slice(bias));
        };
        for_each_task(result.chunks_mut(rows_per_task(columns) * columns), fill);
    }
    gemm_into(blas, problem, (left, right), &mut result, bias.is_some());
    result
}

/// Returns the flat buffer with the result of the multiplication written at an element.
fn into_flat<W: Real>(
    blas: Option<Blas>,
    problem: &GemmProblem,
    left: &[W],
    right: &[W],
    (flat, offset): (Option<FlexTensor>, usize),
    add: bool,
) -> FlexTensor {
    let [rows, columns, _] = problem.sizes();
    let Some(flat) = flat else {
        unreachable!("a product that goes into a flat buffer is given one")
    };
    let mut flat = own::<W>(flat);
    let stretch = &mut slice_mut::<W>(&mut flat)[offset..offset + rows * columns];
    gemm_into(blas, problem, (left, right), stretch, add);
    flat
}

/// Computes `result = left right`, or `result += left right` if `add` is true.
fn gemm_into<W: Real>(
    blas: Option<Blas>,
    problem: &GemmProblem,
    (left, right): (&[W], &[W]),
    result: &mut [W],
    add: bool,
) {
    let [rows, columns, depth] = problem.sizes();
    let work = rows.saturating_mul(columns).saturating_mul(depth);
    let reads = rows <= FEW_ROWS && columns.saturating_mul(depth) >= MIN_PARALLEL_READ;
    let parallel = work >= MIN_PARALLEL_PRODUCTS || reads;
    let (left, right) = ((left, problem.left), (right, problem.right));
    let Some(blas) = blas else {
        let parallelism = if parallel {
            gemm::Parallelism::Rayon(0)
        } else {
            gemm::Parallelism::None
        };
        return multiply_into(left, right, result, add, parallelism);
    };
    check(left, right, result);
    blas.multiply(left, right, result, add, parallel);
}

/// Computes `result = left right`, or `result += left right`, on the calling thread. The operands start at the
/// beginning of their slices, and the result is row-major.
pub(crate) fn multiply_alone<W: Real>(
    left: (&[W], Matrix),
    right: (&[W], Matrix),
    result: &mut [W],
    add: bool,
) {
    multiply_into(left, right, result, add, gemm::Parallelism::None);
}

fn multiply_into<W: Real>(
    (left, left_matrix): (&[W], Matrix),
    (right, right_matrix): (&[W], Matrix),
    result: &mut [W],
    add: bool,
    parallelism: gemm::Parallelism,
) {
    check((left, left_matrix), (right, right_matrix), result);
    let [rows, columns, depth] = [left_matrix.rows, right_matrix.columns, left_matrix.columns];
    if rows == 1 || columns == 1 || rows * columns <= SMALL_RESULT || depth <= SMALL_DEPTH {
        let is_parallel = !matches!(parallelism, gemm::Parallelism::None);
        return row::multiply(
            (left, left_matrix),
            (right, right_matrix),
            result,
            add,
            is_parallel,
        );
    }
    let [left_strides, right_strides] = [left_matrix, right_matrix].map(|matrix| {
        let leading = matrix.leading as isize;
        if matrix.transposed {
            [1, leading]
        } else {
            [leading, 1]
        }
    });
    for part in depths(depth) {
        let offset = |strides: [isize; 2], along: usize| part.start * strides[along] as usize;
        let (left, right) = (
            &left[offset(left_strides, 1)..],
            &right[offset(right_strides, 0)..],
        );
        // SAFETY: the matrices are inside their slices, as asserted above, and the result is borrowed
        // exclusively.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                part.len(),
                result.as_mut_ptr(),
                1,
                columns as isize,
                add || part.start > 0,
                left.as_ptr(),
                left_strides[1],
                left_strides[0],
                right.as_ptr(),
                right_strides[1],
                right_strides[0],
                W::ONE,
                W::ONE,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// Asserts that the operands are inside their slices, and that all sizes match.
fn check<W>(left: (&[W], Matrix), right: (&[W], Matrix), result: &[W]) {
    for (values, matrix) in [left, right] {
        assert!(
            values.len() >= extent(matrix),
            "{matrix:?} is outside of its {} elements",
            values.len()
        );
    }
    assert_eq!(result.len(), left.1.rows * right.1.columns);
    assert_eq!(right.1.rows, left.1.columns);
}

/// Returns the parts of the summed dimension. The products of a part are summed in one chain. The parts have nearly
/// equal sizes.
pub(super) fn depths(depth: usize) -> impl Iterator<Item = Range<usize>> {
    let size = depth.div_ceil(depth.div_ceil(MAX_CHAIN).max(1));
    (0..depth)
        .step_by(size.max(1))
        .map(move |first| first..(first + size).min(depth))
}

/// Returns the distance from the first to the last element of a matrix in memory, plus one.
fn extent(matrix: Matrix) -> usize {
    let (count, length) = if matrix.transposed {
        (matrix.columns, matrix.rows)
    } else {
        (matrix.rows, matrix.columns)
    };
    match count * length {
        0 => 0,
        _ => (count - 1) * matrix.leading + length,
    }
}
