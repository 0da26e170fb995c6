//! Matrix multiplications with a GELU epilogue in cuBLASLt.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::{GRADIENT, GeluOutput, WIDTH_MULTIPLE, only_cuda};
use crate::cube::empty;
use crate::gemm::cube::{aligned, to_matrix, warn_once};
use crate::gemm::cublaslt::{Buffers, CublasLt};
use crate::gemm::engine::{ColumnMajor, Epilogue, Matrix};
use crate::gemm::request::{Element, Gelu, Request};
use crate::launch::{DeviceOp, Spec, launch};

/// The number of rows for the check if the actual number of rows is not known yet.
const SOME_ROWS: usize = 128;

/// Checks whether the epilogues are supported. See [`check_gelu_epilogues`](super::check_gelu_epilogues).
pub(super) fn check(
    device: &Device,
    dtype: DType,
    [inputs, width]: [usize; 2],
) -> Result<(), String> {
    let engine = CublasLt::on(device).ok_or_else(|| only_cuda(device))??;
    let stored = Matrix::contiguous;
    let (x, up) = (stored(SOME_ROWS, inputs), stored(inputs, width));
    let down = stored(width, inputs).transpose();
    for (left, right, gelu) in [(x, up, Gelu::Forward), (x, down, Gelu::Gradient)] {
        let op = GeluOp { gelu, bias: true };
        let request = op.request(dtype, left, right);
        engine
            .supports_request(&request)
            .map_err(|reason| format!("{} refuses {request:?}: {reason}", engine.chip()))?;
    }
    Ok(())
}

/// Computes [`linear_gelu`](super::linear_gelu), or returns `None` if cuBLASLt does not support the epilogue.
pub(super) fn linear_gelu(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
) -> Option<GeluOutput> {
    let op = GeluOp {
        gelu: Gelu::Forward,
        bias: bias.is_some(),
    };
    op.supported([x, weight])?;
    let mut inputs = vec![x.clone().into_dispatch(), weight.clone().into_dispatch()];
    inputs.extend(bias.map(|bias| bias.clone().into_dispatch()));
    let mut outputs = launch(op, inputs).into_iter().map(Tensor::from_dispatch);
    let (Some(activated), Some(input)) = (outputs.next(), outputs.next()) else {
        unreachable!("the product has two outputs")
    };
    Some(GeluOutput { activated, input })
}

/// Computes [`gelu_gradient`](super::gelu_gradient), or returns `None` if cuBLASLt does not support the epilogue.
pub(super) fn gelu_gradient(
    gradient: &Tensor<2>,
    weight: &Tensor<2>,
    input: &Tensor<2>,
    with_bias: bool,
) -> Option<(Tensor<2>, Option<Tensor<1>>)> {
    let op = GeluOp {
        gelu: Gelu::Gradient,
        bias: with_bias,
    };
    let weight = weight.clone().transpose();
    op.supported([gradient, &weight])?;
    let inputs = [gradient, &weight, input].map(|tensor| tensor.clone().into_dispatch());
    let mut outputs = launch(op, inputs.into()).into_iter();
    let gradient = outputs.next().map(Tensor::from_dispatch)?;
    Some((gradient, outputs.next().map(Tensor::from_dispatch)))
}

/// A matrix multiplication with a GELU epilogue.
///
/// - Forward: the inputs are `x`, the weight `[in, out]` and an optional bias. The outputs are the output of GELU and
///   the input of GELU.
/// - Gradient: the inputs are the gradient, the weight `[out, width]` and the input of GELU. The outputs are the
///   gradients of the input of GELU and of its bias.
#[derive(Clone, Copy, Debug)]
struct GeluOp {
    gelu: Gelu,
    bias: bool,
}

impl GeluOp {
    fn request(self, dtype: DType, left: Matrix, right: Matrix) -> Request {
        Request {
            layout: ColumnMajor::of(left, right),
            factors: [Element::Plain(dtype); 2],
            result: dtype,
            epilogue: if self.bias {
                Epilogue::Bias
            } else {
                Epilogue::Nothing
            },
            gelu: Some(self.gelu),
            scaled: None,
        }
    }

    /// Checks whether the device supports the epilogue for operands of these sizes. Logs the reason if cuBLASLt rejects
    /// them.
    fn supported(self, [left, right]: [&Tensor<2>; 2]) -> Option<()> {
        let engine = CublasLt::on(&left.device())?;
        let ([rows, inputs], [_, width]) = (left.dims(), right.dims());
        if [rows, inputs, width].contains(&0) {
            return None;
        }
        let supported = || {
            if !width.is_multiple_of(WIDTH_MULTIPLE) {
                return Err(format!(
                    "the width is {width}: expected a multiple of {WIDTH_MULTIPLE}"
                ));
            }
            let right = match self.gelu {
                Gelu::Forward => Matrix::contiguous(inputs, width),
                Gelu::Gradient => Matrix::contiguous(width, inputs).transpose(),
            };
            let left_matrix = Matrix::contiguous(rows, inputs);
            engine?.supports_request(&self.request(left.dtype(), left_matrix, right))
        };
        supported()
            .map_err(|reason| {
                warn_once(format!("GELU is not fused into matrix products: {reason}"))
            })
            .ok()
    }
}

impl DeviceOp for GeluOp {
    fn name(&self) -> &'static str {
        match self.gelu {
            Gelu::Forward => "linear_gelu",
            Gelu::Gradient => GRADIENT,
        }
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let (rows, width) = (inputs[0].shape[0], inputs[1].shape[1]);
        let matrix = || Spec::new([rows, width], inputs[0].dtype);
        match (self.gelu, self.bias) {
            (Gelu::Forward, _) => vec![matrix(), matrix()],
            (Gelu::Gradient, false) => vec![matrix()],
            (Gelu::Gradient, true) => vec![matrix(), Spec::new([width], inputs[0].dtype)],
        }
    }

    /// Transposed matrices are read in place.
    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, _inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        unreachable!("only products on CUDA devices are launched")
    }

    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let CubeDevice::Cuda(device) = &inputs[0].device else {
            unreachable!("only products on CUDA devices are launched")
        };
        let engine = match CublasLt::of(device) {
            Ok(engine) => engine,
            Err(reason) => panic!("cuBLASLt was there before: {reason}"),
        };
        let mut inputs = inputs.into_iter();
        let (Some(left), Some(right)) = (inputs.next(), inputs.next()) else {
            unreachable!("a product has two factors")
        };
        let dtype = left.dtype;
        let ((left, left_matrix), (right, right_matrix)) = (to_matrix(left), to_matrix(right));
        let request = self.request(dtype, left_matrix, right_matrix);
        let (rows, width) = (left_matrix.rows, right_matrix.columns);
        let new = |shape| empty(&left, shape, dtype);
        let matrix = || new(Shape::from([rows, width]));
        let third = inputs.next().map(|tensor| into_contiguous(aligned(tensor)));
        let (auxiliary, bias) = match (self.gelu, third) {
            (Gelu::Forward, bias) => (matrix(), bias),
            (Gelu::Gradient, Some(input)) => (input, self.bias.then(|| new(Shape::from([width])))),
            (Gelu::Gradient, None) => unreachable!("a gradient of GELU is that at its input"),
        };
        let result = matrix();
        let client = left.client.clone();
        let buffers = Buffers {
            a: right.handle,
            b: left.handle,
            d: result.handle.clone(),
            start: 0,
            bias: bias.as_ref().map(|bias| bias.handle.clone()),
            auxiliary: Some(auxiliary.handle.clone()),
            scales: None,
        };
        engine.launch(&request, &client, buffers);
        match self.gelu {
            Gelu::Forward => vec![result, auxiliary],
            Gelu::Gradient => [Some(result), bias].into_iter().flatten().collect(),
        }
    }
}
