//! Launches of the element-wise kernels.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::CubeDim;

use super::ActivationPlan;
use super::elements::{backward_kernel, forward_kernel};
use crate::cube::{Elementwise, Operation, Split, grid, optional};

/// A forward, or the backward of the input alone where there is a gradient.
#[derive(Clone)]
pub(super) struct ElementwiseLaunch {
    pub plan: ActivationPlan,
    pub x: CubeTensor,
    pub bias: Option<CubeTensor>,
    pub weight: Option<CubeTensor>,
    pub gradient: Option<CubeTensor>,
    /// The output, not initialised.
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
        let cubes = grid(&client, plan.vectors().div_ceil(split.portions()));
        let units = CubeDim::new_1d(split.units);
        // SAFETY: a unit past the vectors accesses no memory, and all inputs are contiguous and of
        // the sizes that the public functions check.
        match self.gradient {
            None => unsafe {
                forward_kernel::launch_unchecked(
                    &client,
                    cubes,
                    units,
                    plan.row.vector,
                    self.x.into_tensor_arg(),
                    optional(self.bias),
                    optional(self.weight),
                    self.output.into_tensor_arg(),
                    plan.clamp,
                    plan.offset,
                    plan.vectors() as u32,
                    plan.row.columns,
                    plan.variant,
                    split,
                    dtype_to_storage_type(dtype),
                );
            },
            Some(gradient) => unsafe {
                backward_kernel::launch_unchecked(
                    &client,
                    cubes,
                    units,
                    plan.row.vector,
                    self.x.into_tensor_arg(),
                    optional(self.bias),
                    optional(self.weight),
                    gradient.into_tensor_arg(),
                    self.output.into_tensor_arg(),
                    plan.clamp,
                    plan.offset,
                    plan.vectors() as u32,
                    plan.row.columns,
                    plan.variant,
                    split,
                    dtype_to_storage_type(dtype),
                );
            },
        }
    }
}
