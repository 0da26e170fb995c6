//! Launches of the element-wise kernels.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;

use super::ActivationPlan;
use super::elements::{backward_kernel, forward_kernel};
use crate::cube::{Elementwise, Operation, Split, launch};

/// A launch of the forward kernel. If a gradient is given, a launch of the backward kernel that computes only the
/// gradient of the input.
#[derive(Clone)]
pub(super) struct ElementwiseLaunch {
    pub plan: ActivationPlan,
    pub x: CubeTensor,
    pub bias: Option<CubeTensor>,
    pub weight: Option<CubeTensor>,
    pub gradient: Option<CubeTensor>,
    /// The uninitialized output.
    pub output: CubeTensor,
}

impl Elementwise for ElementwiseLaunch {
    const STATIC: Split = Split::new(256, 2);

    fn operation(&self) -> Operation {
        Operation::Activation {
            curve: self.plan.variant.curve,
            gated: self.plan.variant.gated,
            backward: self.gradient.is_some(),
        }
    }

    fn vector(&self) -> usize {
        self.plan.row.vector
    }

    fn output(&self) -> &CubeTensor {
        &self.output
    }

    fn launch(self, split: Split) {
        let plan = self.plan;
        let (client, dtype) = (self.x.client.clone(), self.x.dtype);
        let cubes = plan.vectors().div_ceil(split.portions());
        let (vector, vectors) = (plan.row.vector, plan.vectors() as u32);
        let (columns, dtype) = (plan.row.columns, dtype_to_storage_type(dtype));
        // SAFETY: a unit past the vectors accesses no memory, and all inputs are contiguous and of
        // the sizes that the public functions check.
        match self.gradient {
            None => unsafe {
                launch!(
                    forward_kernel,
                    [client, cubes, split.units],
                    [vector],
                    [self.x, self.bias, self.weight, self.output],
                    (plan.clamp, plan.offset, vectors),
                    (columns, plan.variant, split, dtype)
                );
            },
            Some(gradient) => unsafe {
                launch!(
                    backward_kernel,
                    [client, cubes, split.units],
                    [vector],
                    [self.x, self.bias, self.weight, gradient, self.output],
                    (plan.clamp, plan.offset, vectors),
                    (columns, plan.variant, split, dtype)
                );
            },
        }
    }
}
