//! FP8 matrix multiplication with cuBLASLt.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, FloatDType, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::engine::DECODED;
use super::problem::Fp8Problem;
use super::scales::library_scales;
use super::{Accumulation, store_flat};
use crate::cube::{empty, own};
use crate::fp8::matrix::Fp8Matrix;
use crate::gemm::Epilogue;
use crate::gemm::cube::{FLAT_ALIGNMENT, aligned, warn_once};
use crate::gemm::cublaslt::{Buffers, CublasLt};
use crate::launch::{DeviceOp, Spec, launch_one};

/// cuBLASLt on a device, or the reason why it is not available.
type Engine = Result<Arc<CublasLt>, String>;

/// Computes [`multiply`](super::multiply), or returns `None` if cuBLASLt does not support the problem.
pub(super) fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<&Tensor<1>>,
    dtype: FloatDType,
    accumulation: Accumulation,
) -> Option<Tensor<2>> {
    let engine = CublasLt::on(&a.codes.device())?;
    let problem = |result, epilogue| Fp8Problem::new(a, b, result, epilogue, accumulation);
    if let Some(bias) = bias.filter(|bias| inside(bias.dtype(), dtype.into())) {
        let problem = problem(dtype.into(), Epilogue::Bias);
        if supports(&engine, &problem).is_ok() {
            return Some(Tensor::from_dispatch(launch(
                problem,
                0,
                a,
                b,
                Some(bias.clone()),
            )));
        }
    }
    let between = if bias.is_some() {
        FloatDType::F32
    } else {
        dtype
    };
    let problem = problem(between.into(), Epilogue::Nothing);
    supports(&engine, &problem).map_err(warn).ok()?;
    let product = Tensor::<2>::from_dispatch(launch(problem, 0, a, b, None));
    Some(match bias {
        Some(bias) => (product + bias.clone().cast(between).unsqueeze()).cast(dtype),
        None => product,
    })
}

/// Returns a multiplication that accumulates into a flat buffer, or `None` if cuBLASLt does not support it. The result
/// is written directly to the buffer if its address is aligned.
pub(super) fn flat_problem(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: &Tensor<1>,
    offset: usize,
    add: bool,
) -> Option<Fp8Problem> {
    let engine = CublasLt::on(&a.codes.device())?;
    let straight = (offset * size_of::<f32>()).is_multiple_of(FLAT_ALIGNMENT);
    let epilogue = if straight {
        Epilogue::Flat { add }
    } else {
        Epilogue::Nothing
    };
    let problem = Fp8Problem::new(a, b, flat.dtype(), epilogue, Accumulation::Exact);
    supports(&engine, &problem).map_err(warn).ok()?;
    Some(problem)
}

/// Computes [`accumulate_at`](super::accumulate_at) with the problem returned by [`flat_problem`].
pub(super) fn accumulate_at(
    problem: Fp8Problem,
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    match problem.epilogue {
        Epilogue::Flat { .. } => Tensor::from_dispatch(launch(problem, offset, a, b, Some(flat))),
        _ => {
            let product = Tensor::from_dispatch(launch(problem, 0, a, b, None));
            store_flat(product, flat, offset, add)
        }
    }
}

/// Returns whether cuBLASLt adds this bias without rounding it. With an f32 result, cuBLASLt supports only bias types
/// to which an f32 bias would be rounded.
fn inside(bias: DType, result: DType) -> bool {
    bias == result && result != DType::F32
}

/// Checks whether cuBLASLt supports a multiplication.
fn supports(engine: &Engine, problem: &Fp8Problem) -> Result<(), String> {
    let engine = engine.as_ref().map_err(String::clone)?;
    let accepted = problem
        .accept(engine.chip())
        .and_then(|()| engine.supports_request(&problem.request()));
    accepted.map_err(|reason| format!("cuBLASLt does not support {problem:?}: {reason}"))
}

fn warn(reason: String) {
    warn_once(format!("FP8 matrices are {DECODED}: {reason}"));
}

fn launch(
    problem: Fp8Problem,
    offset: usize,
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    epilogue: Option<Tensor<1>>,
) -> DispatchTensor {
    let codes = |matrix: &Fp8Matrix| matrix.codes.clone().into_dispatch();
    let mut inputs = vec![codes(a), codes(b), library_scales(a), library_scales(b)];
    inputs.extend(epilogue.map(Tensor::into_dispatch));
    launch_one(Fp8MatmulOp { problem, offset }, inputs)
}

/// The multiplication as a device operation. Its inputs are the codes of both operands, their scales in the layout of
/// cuBLASLt, and a bias or the flat buffer.
#[derive(Debug)]
struct Fp8MatmulOp {
    problem: Fp8Problem,
    /// The element of the buffer at which the result begins.
    offset: usize,
}

impl DeviceOp for Fp8MatmulOp {
    fn name(&self) -> &'static str {
        "fp8::multiply"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let Fp8Problem {
            rows,
            columns,
            result,
            ..
        } = self.problem;
        vec![match self.problem.epilogue {
            Epilogue::Flat { .. } => inputs[4].clone(),
            _ => Spec::new([rows, columns], result),
        }]
    }

    fn cpu(&self, _inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        unreachable!("only products on CUDA devices are launched")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let problem = &self.problem;
        let CubeDevice::Cuda(device) = &inputs[0].device else {
            unreachable!("only products on CUDA devices are launched")
        };
        let engine = match CublasLt::of(device) {
            Ok(engine) => engine,
            Err(reason) => panic!("cuBLASLt was there before: {reason}"),
        };
        let mut inputs = inputs.into_iter().map(aligned);
        let (Some(a), Some(b), Some(of_a), Some(of_b)) =
            (inputs.next(), inputs.next(), inputs.next(), inputs.next())
        else {
            unreachable!("a product has two factors and their scales")
        };
        let shape = Shape::from([problem.rows, problem.columns]);
        let (result, bias) = match (inputs.next(), problem.epilogue) {
            (Some(flat), Epilogue::Flat { .. }) => (own(flat), None),
            (bias, _) => (empty(&a, shape, problem.result), bias),
        };
        let client = a.client.clone();
        let buffers = Buffers {
            a: b.handle,
            b: a.handle,
            d: result.handle.clone(),
            start: (self.offset * problem.result.size()) as u64,
            bias: bias.map(|bias| bias.handle),
            auxiliary: None,
            scales: Some([of_b.handle, of_a.handle]),
        };
        engine.launch(&problem.request(), &client, buffers);
        vec![result]
    }
}
