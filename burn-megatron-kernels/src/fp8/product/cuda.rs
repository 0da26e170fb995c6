//! Products by cuBLASLt.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchDevice, DispatchTensor};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::engine::DECODED;
use super::problem::Problem;
use super::{Accumulation, bring, library_scales};
use crate::cube::{empty, own};
use crate::fp8::Fp8Matrix;
use crate::gemm::Added;
use crate::gemm::cube::{FLAT_ALIGNMENT, aligned, warn_once};
use crate::gemm::cublaslt::{Buffers, CublasLt};
use crate::launch::{Kernel, Spec, launch_one};

/// cuBLASLt on a device, or why it is missing.
type Engine = Result<Arc<CublasLt>, String>;

/// That of a device; `None` for other devices than CUDA's.
pub(super) fn engine(device: &Device) -> Option<Engine> {
    let mut device = device.as_dispatch();
    while let DispatchDevice::Autodiff(inner) = device {
        device = inner;
    }
    match device {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(CublasLt::of(device)),
        _ => None,
    }
}

/// See [`multiply`](super::multiply); `None` where the library does not take it.
pub(super) fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<&Tensor<1>>,
    dtype: FloatDType,
    accumulation: Accumulation,
) -> Option<Tensor<2>> {
    let engine = engine(&a.codes.device())?;
    let problem = |result, added| Problem::new(a, b, result, added, accumulation);
    if let Some(bias) = bias.filter(|bias| inside(bias.dtype(), dtype.into())) {
        let problem = problem(dtype.into(), Added::Bias);
        if takes(&engine, &problem).is_ok() {
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
    let problem = problem(between.into(), Added::Nothing);
    takes(&engine, &problem).map_err(warn).ok()?;
    let product = Tensor::<2>::from_dispatch(launch(problem, 0, a, b, None));
    Some(match bias {
        Some(bias) => (product + bias.clone().cast(between).unsqueeze()).cast(dtype),
        None => product,
    })
}

/// A product for a flat buffer, straight into it where it begins at an address that is good for that;
/// `None` where the library does not take it.
pub(super) fn for_flat(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: &Tensor<1>,
    offset: usize,
    add: bool,
) -> Option<Problem> {
    let engine = engine(&a.codes.device())?;
    let straight = (offset * size_of::<f32>()).is_multiple_of(FLAT_ALIGNMENT);
    let added = match straight {
        true => Added::Flat { add },
        false => Added::Nothing,
    };
    let problem = Problem::new(a, b, flat.dtype(), added, Accumulation::Exact);
    takes(&engine, &problem).map_err(warn).ok()?;
    Some(problem)
}

/// See [`accumulate_at`](super::accumulate_at), by what [`for_flat`] gave.
pub(super) fn accumulate_at(
    problem: Problem,
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    match problem.added {
        Added::Flat { .. } => Tensor::from_dispatch(launch(problem, offset, a, b, Some(flat))),
        _ => {
            let product = Tensor::from_dispatch(launch(problem, 0, a, b, None));
            bring(product, flat, offset, add)
        }
    }
}

/// Whether the library adds this bias as it is: beside f32 it takes other types than f32, which would
/// round it.
fn inside(bias: DType, result: DType) -> bool {
    bias == result && result != DType::F32
}

/// Whether the library takes a product, or why not.
fn takes(engine: &Engine, problem: &Problem) -> Result<(), String> {
    let engine = engine.as_ref().map_err(String::clone)?;
    let accepted = problem
        .accept(engine.chip())
        .and_then(|()| engine.takes(&problem.request()));
    accepted.map_err(|reason| format!("cuBLASLt refuses {problem:?}: {reason}"))
}

fn warn(reason: String) {
    warn_once(format!("8-bit matrices are {DECODED}: {reason}"));
}

fn launch(
    problem: Problem,
    offset: usize,
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    added: Option<Tensor<1>>,
) -> DispatchTensor {
    let codes = |matrix: &Fp8Matrix| matrix.codes.clone().into_dispatch();
    let mut inputs = vec![codes(a), codes(b), library_scales(a), library_scales(b)];
    inputs.extend(added.map(Tensor::into_dispatch));
    launch_one(Product { problem, offset }, inputs)
}

/// Inputs: the codes of both factors, their scales as the library reads them, and a bias or the flat
/// buffer.
#[derive(Debug)]
struct Product {
    problem: Problem,
    /// The element of the buffer that the product begins at.
    offset: usize,
}

impl Kernel for Product {
    fn name(&self) -> &'static str {
        "fp8::multiply"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let Problem {
            rows,
            columns,
            result,
            ..
        } = self.problem;
        vec![match self.problem.added {
            Added::Flat { .. } => inputs[4].clone(),
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
        let (result, bias) = match (inputs.next(), problem.added) {
            (Some(flat), Added::Flat { .. }) => (own(flat), None),
            (bias, _) => (empty(&a, shape, problem.result), bias),
        };
        let client = a.client.clone();
        let buffers = Buffers {
            a: b.handle,
            b: a.handle,
            d: result.handle.clone(),
            start: (self.offset * problem.result.size()) as u64,
            bias: bias.map(|bias| bias.handle),
            scales: Some([of_b.handle, of_a.handle]),
        };
        engine.launch(&problem.request(), &client, buffers);
        vec![result]
    }
}
