//! Launches that turn one tensor.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::CubeDim;

use super::turn::turn_kernel;
use super::{Angles, MOST_HEADS, Plan, UNITS, cubes};
use crate::cube::{Elementwise, Operation, Split, empty, grid, launch_tuned};
use crate::rope::Heads;

/// Turns `x`, in place where nobody else holds it.
pub(in crate::rope) fn turn(x: CubeTensor, angles: Angles, heads: Heads) -> CubeTensor {
    if x.shape().num_elements() == 0 {
        return x;
    }
    let plan = Plan::new(&x.client, x.dtype, heads, &[]);
    let in_place = x.can_mut() && x.is_nonoverlapping();
    let y = match in_place {
        true => x.clone(),
        false => empty(&x, x.shape(), x.dtype),
    };
    let turn = Turn {
        plan,
        angles,
        x,
        y: y.clone(),
        in_place,
        copies: !in_place,
    };
    if turn.items(plan) > 0 {
        launch_tuned(turn);
    }
    y
}

/// A launch of the kernel. A portion of its split is the same part of one more head.
#[derive(Clone)]
struct Turn {
    plan: Plan,
    angles: Angles,
    x: CubeTensor,
    y: CubeTensor,
    /// Whether `y` is `x`.
    in_place: bool,
    /// Whether what does not turn is copied.
    copies: bool,
}

impl Turn {
    /// Units that work on one token.
    fn items(&self, plan: Plan) -> usize {
        match self.copies {
            true => plan.turning() + plan.passing(),
            false => plan.turning(),
        }
    }
}

impl Elementwise for Turn {
    const STATIC: Split = Split::new(UNITS, MOST_HEADS);

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

    /// The same work on other memory: a tensor must be turned once.
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
        let output = match self.in_place {
            true => self.x.as_tensor_alias(0),
            false => self.y.into_tensor_arg(),
        };
        let angles = self.angles;
        let [cosine, sine] = angles.table();
        // SAFETY: a unit past the tokens touches nothing, and all inputs are contiguous and of the
        // sizes that the public functions check.
        unsafe {
            turn_kernel::launch_unchecked(
                &client,
                grid(&client, cubes(tokens, items, split.units)),
                CubeDim::new_1d(split.units),
                plan.vector,
                plan.lanes,
                self.x.into_tensor_arg(),
                cosine,
                sine,
                angles.each(),
                output,
                angles.start as u32,
                angles.last(),
                angles.seq as u32,
                tokens as u32,
                angles.direction,
                plan,
                items,
                split.units,
                dtype_to_storage_type(dtype),
            );
        }
    }
}
