//! Output from input, bias and residual; also the gradient of the input alone.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::backward::Forward;
use super::*;
use crate::cube::specimen::{Specimen, Target, tensor, types};
use crate::cube::{empty, grid};

#[cube(launch_unchecked)]
fn bias_dropout_add_kernel<I: Float, B: Float, O: Float, N: Size>(
    input: &Tensor<Vector<I, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<B, N>>>,
    residual: &ComptimeOption<OwnedTensor<Vector<O, N>>>,
    output: &mut Tensor<Vector<O, N>>,
    mask: &MaskArgs,
    groups: usize,
    vectors: usize,
    columns: usize,
    #[comptime] each: usize,
    #[comptime] draws: Draws,
    #[comptime] units: u32,
    #[define(I, B, O)] _types: [ElemType; 3],
) {
    let group = CUBE_POS * units as usize + UNIT_POS as usize;
    if group < groups {
        let lanes = N::value().comptime();
        let first = group * each;
        let element = (first * N::value()) as u32;
        let factors = factors(mask, element, comptime!(each * lanes), draws);
        #[unroll]
        for i in 0..each {
            let at = first + i;
            if at < vectors {
                let mut value = Vector::<f32, N>::cast_from(input[at]);
                #[comptime]
                match bias {
                    ComptimeOption::Some(bias) => {
                        value += Vector::cast_from(bias.as_slice()[at % columns]);
                    }
                    ComptimeOption::None => {}
                }
                value = masked(value, &factors, i, draws);
                #[comptime]
                match residual {
                    ComptimeOption::Some(residual) => {
                        value += Vector::cast_from(residual.as_slice()[at]);
                    }
                    ComptimeOption::None => {}
                }
                output[at] = Vector::cast_from(value);
            }
        }
    }
}

pub(in super::super) fn forward(kernel: &Forward, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let input = inputs.remove(0);
    let bias = kernel.bias.then(|| inputs.remove(0));
    let residual = kernel.residual.then(|| inputs.remove(0));
    let dtype = residual.as_ref().map_or(input.dtype, |tensor| tensor.dtype);
    vec![elementwise(input, bias, residual, dtype, kernel.mask)]
}

/// `residual + mask * (input + bias)`, of type `dtype`.
pub(super) fn elementwise(
    input: CubeTensor,
    bias: Option<CubeTensor>,
    residual: Option<CubeTensor>,
    dtype: DType,
    mask: Option<Mask>,
) -> CubeTensor {
    let client = input.client.clone();
    let output = empty(&input, input.shape(), dtype);
    let elements = input.shape().num_elements();
    let width = match &bias {
        Some(bias) => bias.shape().num_elements(),
        None => elements,
    };
    let bias_type = bias.as_ref().map_or(dtype, |bias| bias.dtype);
    let dtypes = [input.dtype, bias_type, dtype];
    let vector = vector(&client, &dtypes, width);
    let each = WORDS.div_ceil(vector);
    let groups = elements.div_ceil(each * vector);
    let types = dtypes.map(dtype_to_storage_type);
    unsafe {
        bias_dropout_add_kernel::launch_unchecked(
            &client,
            grid(&client, groups.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            input.into_tensor_arg(),
            optional(bias),
            optional(residual),
            output.clone().into_tensor_arg(),
            MaskArgs::launch(mask.as_ref()),
            groups,
            elements / vector,
            width / vector,
            each,
            Draws::new(mask.as_ref(), WORDS),
            UNITS,
            types,
        );
    }
    output
}

/// With a bias, a residual and every way of drawing.
pub(super) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut all = Vec::new();
    for (name, element, vector) in types() {
        for draws in [Draws::None, Draws::Aligned, Draws::Any] {
            let (device, compiler) = target.properties();
            let kernel = bias_dropout_add_kernel::BiasDropoutAddKernel::new(
                target.settings(UNITS),
                device,
                compiler,
                tensor(),
                ComptimeOptionCompilationArg::Some(tensor()),
                ComptimeOptionCompilationArg::Some(tensor()),
                tensor(),
                MaskArgs::compiled(),
                (),
                (),
                (),
                vector,
                WORDS.div_ceil(vector),
                draws,
                UNITS,
                [element; 3],
            );
            let name = format!("bias_dropout_add/forward/{name}/{draws:?}");
            all.push(Specimen::streaming(name, kernel));
        }
    }
    all
}
