//! Launches the kernel that rotates one tensor.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;

use super::rotate::rotate_kernel;
use super::{AngleArgs, MAX_HEADS_PER_UNIT, RopePlan, UNITS, cubes};
use crate::cube::{Elementwise, Operation, Split, empty, launch, launch_tuned};
use crate::rope::RotaryHeads;

/// Rotates `x`. `x` is updated in place if no other tensor shares its memory.
pub(in crate::rope) fn rotate(x: CubeTensor, angles: AngleArgs, heads: RotaryHeads) -> CubeTensor {
    if x.shape().num_elements() == 0 {
        return x;
    }
    let plan = RopePlan::new(&x.client, x.dtype, heads, &[]);
    let in_place = x.can_mut();
    let y = if in_place {
        x.clone()
    } else {
        empty(&x, x.shape(), x.dtype)
    };
    let rotate = RotateLaunch {
        plan,
        angles,
        x,
        y: y.clone(),
        in_place,
        copies: !in_place,
    };
    if rotate.items(plan) > 0 {
        launch_tuned(rotate);
    }
    y
}

/// A launch of the kernel. A portion of the work split is the same part of one more head.
#[derive(Clone)]
struct RotateLaunch {
    plan: RopePlan,
    angles: AngleArgs,
    x: CubeTensor,
    y: CubeTensor,
    /// Whether the output `y` is the input `x`.
    in_place: bool,
    /// Whether features and heads that are not rotated are copied.
    copies: bool,
}

impl RotateLaunch {
    /// Returns the number of units per token.
    fn items(&self, plan: RopePlan) -> usize {
        if self.copies {
            plan.rotated_units() + plan.unrotated_vectors()
        } else {
            plan.rotated_units()
        }
    }
}

impl Elementwise for RotateLaunch {
    const STATIC: Split = Split::new(UNITS, MAX_HEADS_PER_UNIT);

    fn operation(&self) -> Operation {
        Operation::Rope {
            copies: self.copies,
        }
    }

    fn vector(&self) -> usize {
        self.plan.vector
    }

    fn output(&self) -> &CubeTensor {
        &self.y
    }

    /// Returns a launch that writes to a new tensor, because the input must be rotated only once.
    fn trial(&self) -> Self {
        let mut trial = self.clone();
        if self.in_place {
            trial.y = empty(&self.x, self.x.shape(), self.x.dtype);
            trial.in_place = false;
        }
        trial
    }

    fn launch(self, split: Split) {
        let plan = self.plan.grouped(split.each);
        let items = self.items(plan);
        let tokens = self.x.shape()[0] * self.x.shape()[1];
        let (client, dtype) = (self.x.client.clone(), self.x.dtype);
        let output = if self.in_place {
            self.x.as_tensor_alias(0)
        } else {
            self.y.into_tensor_arg()
        };
        let angles = self.angles;
        let (cosine, sine, each) = angles.tensors();
        // SAFETY: a unit past the tokens accesses no memory. All inputs are contiguous and have the
        // sizes that the public functions check.
        unsafe {
            launch!(
                rotate_kernel,
                [client, cubes(tokens, items, split.units), split.units],
                [plan.vector, plan.lanes],
                [self.x, cosine, sine, each, output],
                (angles.launch(tokens)),
                (plan, items, split.units, dtype_to_storage_type(dtype))
            );
        }
    }
}
