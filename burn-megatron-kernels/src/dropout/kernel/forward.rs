//! The element-wise kernel. It computes the output from input, bias and residual, or only the gradient of the input.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::backward::DropoutForwardOp;
use super::*;
use crate::cube::instance::{AotList, given, instance, types};
use crate::cube::{Elementwise, Operation, SPLITS, Split, empty, launch, launch_tuned};

/// Computes the output. A portion of the work split is a group of `each` vectors.
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
    #[comptime] draws: MaskAlignment,
    #[comptime] split: Split,
    #[define(I, B, O)] _types: [ElemType; 3],
) {
    let lanes = N::value().comptime();
    let own = CUBE_POS * comptime!(split.portions()) + UNIT_POS as usize;
    #[unroll]
    for portion in 0..split.each {
        let group = own + portion * comptime!(split.units as usize);
        if group < groups {
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
}

pub(in super::super) fn forward(
    kernel: &DropoutForwardOp,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let input = inputs.remove(0);
    let bias = kernel.bias.then(|| inputs.remove(0));
    let residual = kernel.residual.then(|| inputs.remove(0));
    let dtype = residual.as_ref().map_or(input.dtype, |tensor| tensor.dtype);
    vec![elementwise(input, bias, residual, dtype, kernel.mask)]
}

/// Computes `residual + mask * (input + bias)` in type `dtype`.
pub(super) fn elementwise(
    input: CubeTensor,
    bias: Option<CubeTensor>,
    residual: Option<CubeTensor>,
    dtype: DType,
    mask: Option<DropoutMask>,
) -> CubeTensor {
    let output = empty(&input, input.shape(), dtype);
    let elements = input.shape().num_elements();
    let width = match &bias {
        Some(bias) => bias.shape().num_elements(),
        None => elements,
    };
    let bias_type = bias.as_ref().map_or(dtype, |bias| bias.dtype);
    let dtypes = [input.dtype, bias_type, dtype];
    let vector = vector(&input.client, &dtypes, width);
    launch_tuned(DropoutLaunch {
        input,
        bias,
        residual,
        output: output.clone(),
        mask,
        width,
        dtypes,
        vector,
    });
    output
}

/// A launch of the kernel.
#[derive(Clone)]
struct DropoutLaunch {
    input: CubeTensor,
    bias: Option<CubeTensor>,
    residual: Option<CubeTensor>,
    /// The uninitialized output.
    output: CubeTensor,
    mask: Option<DropoutMask>,
    /// The length of the bias, after which it repeats.
    width: usize,
    dtypes: [DType; 3],
    vector: usize,
}

impl DropoutLaunch {
    fn draws(&self) -> MaskAlignment {
        MaskAlignment::new(self.mask.as_ref().map(DropoutMask::is_aligned), WORDS)
    }
}

impl Elementwise for DropoutLaunch {
    const STATIC: Split = Split::new(UNITS, 1);

    fn operation(&self) -> Operation {
        Operation::Dropout {
            input: self.input.dtype,
            bias: self.bias.is_some(),
            residual: self.residual.is_some(),
            draws: self.draws(),
        }
    }

    fn vector(&self) -> usize {
        self.vector
    }

    fn output(&self) -> &CubeTensor {
        &self.output
    }

    fn launch(self, split: Split) {
        let client = self.input.client.clone();
        let elements = self.input.shape().num_elements();
        let draws = self.draws();
        let each = WORDS.div_ceil(self.vector);
        let groups = elements.div_ceil(each * self.vector);
        // SAFETY: a unit past the groups or the vectors accesses no memory. All inputs are
        // contiguous and have the sizes that the public functions check.
        unsafe {
            launch!(
                bias_dropout_add_kernel,
                [client, groups.div_ceil(split.portions()), split.units],
                [self.vector],
                [self.input, self.bias, self.residual, self.output],
                (MaskArgs::launch(self.mask.as_ref()), groups),
                (elements / self.vector, self.width / self.vector),
                (each, draws, split, self.dtypes.map(dtype_to_storage_type))
            );
        }
    }
}

/// Adds instances with a bias, a residual and every mask alignment.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, element, vector) in types() {
        for draws in [
            MaskAlignment::None,
            MaskAlignment::Aligned,
            MaskAlignment::Any,
        ] {
            // A unit that computes random numbers needs the most registers per portion.
            let splits = match draws {
                MaskAlignment::Aligned => &SPLITS[..],
                _ => &[DropoutLaunch::STATIC],
            };
            for split in splits.iter().copied() {
                instance!(
                    list.streaming("bias_dropout_add/forward/{name}/{draws:?}-{split}"), split.units,
                    bias_dropout_add_kernel::BiasDropoutAddKernel
                    [_ (given(true)) (given(true)) _ _ _ _ _]
                    (vector, WORDS.div_ceil(vector), draws, split, [element; 3])
                );
            }
        }
    }
}
