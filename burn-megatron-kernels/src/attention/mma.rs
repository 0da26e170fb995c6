//! Attention by `mma.sync`, in the shape of FlashAttention-2.

use burn::tensor::{DType, Device};

use super::engine::AttentionEngine;
use super::kernel::mma::{MAX_WIDTH, STEP, shared_memory};
use super::ops::Kernels;
use super::problem::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionProblem, BackwardInputs,
    OPERATION, Projections,
};
use crate::KernelError;
use crate::cube::cube_device;
use crate::cube::mma::missing_support;
use crate::error::accept;

/// The algorithm of Dao, "FlashAttention-2" (2023), by NVIDIA's `mma.sync` of 16 by 8 by 16 in f16 or
/// bf16 with sums in f32: scores, weights and their gradients stay in registers, `ldmatrix` reads
/// keys and values from shared memory, and `cp.async` copies the next tile there while one is worked
/// on. It takes heads of 16 to 256 features, in steps of 16, values no wider than keys, a positive
/// scale, and all that [`Portable`](super::Portable) does beside that: groups, masks, ranges, sinks,
/// views. Views whose rows do not start at multiples of 16 bytes are copied.
///
/// Softmax, its statistics and all sums are in f32. Probabilities, and the gradients of scores, are
/// rounded to the type of the inputs before they are multiplied, as in that paper. The backward has no
/// atomic additions: one kernel over blocks of queries and one over blocks of keys compute the scores
/// each, and the gradients of a key over the heads of its group are summed in order.
///
/// [`select_engine`](super::select_engine) prefers it to [`Portable`](super::Portable). It has never run
/// on a GPU; the book says what was run on an emulated one.
#[derive(Clone, Debug)]
pub struct MmaTiles {
    device: Device,
    types: Vec<DType>,
    /// The bytes of shared memory that a block may have.
    shared_memory: usize,
}

impl MmaTiles {
    /// An engine for tensors on `device`; queries the device for what the kernels need.
    ///
    /// # Errors
    ///
    /// If `device` is not a CubeCL device, or has no `mma.sync`, `ldmatrix` or `cp.async` for f16 or
    /// bf16; the message names what is missing.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Self::query(device).map_err(|reason| {
            let message = format!("no matrix units on {device:?}: {reason}: use Portable");
            KernelError::shape(OPERATION, message)
        })
    }

    /// [`new`](Self::new), with only what is missing as the error.
    pub(super) fn query(device: &Device) -> Result<Self, String> {
        let Some(cube) = cube_device(device.as_dispatch()) else {
            return Err("it is not a CubeCL device".into());
        };
        let client = cube.client();
        let (mut types, mut missing) = (vec![], vec![]);
        for dtype in [DType::F16, DType::BF16] {
            match missing_support(&client, dtype) {
                Some(reason) => missing.push(reason),
                None => types.push(dtype),
            }
        }
        if types.is_empty() {
            return Err(missing.join("; "));
        }
        Ok(Self {
            device: device.clone().inner(),
            types,
            shared_memory: client.properties().hardware.max_shared_memory_size,
        })
    }

    /// The element types that it takes on its device.
    pub fn types(&self) -> &[DType] {
        &self.types
    }

    fn check_device(&self, projections: &Projections) -> Result<(), KernelError> {
        let given = projections.device().inner();
        if given == self.device {
            return Ok(());
        }
        let message = format!(
            "tensors are on {given:?}, and the engine {:?} was made for {:?}: expected the same device",
            self.name(),
            self.device
        );
        Err(KernelError::shape(OPERATION, message))
    }
}

impl AttentionEngine for MmaTiles {
    fn name(&self) -> &'static str {
        "mma"
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        let (width, values) = (problem.heads.width, problem.value_width);
        if !width.is_multiple_of(STEP) || width > MAX_WIDTH {
            return Err(format!(
                "heads of width {width}: expected multiples of {STEP} up to {MAX_WIDTH}"
            ));
        }
        if !values.is_multiple_of(STEP) || values > width {
            return Err(format!(
                "values of width {values}: expected multiples of {STEP} up to the {width} of the keys"
            ));
        }
        if !self.types.contains(&problem.dtype) {
            return Err(format!(
                "element type {:?}: expected one of {:?}",
                problem.dtype, self.types
            ));
        }
        if problem.scale <= 0.0 {
            return Err(format!(
                "scale {}: expected a positive number",
                problem.scale
            ));
        }
        let (needed, there) = (shared_memory(width, values), self.shared_memory);
        if needed > there {
            return Err(format!(
                "heads of width {width}: {needed} bytes of shared memory for a block, and the device has \
                 {there}"
            ));
        }
        Ok(())
    }

    fn forward(&self, problem: &AttentionProblem, inputs: AttentionInputs) -> AttentionOutputs {
        accept(self.check_device(&inputs.projections));
        Kernels::Mma.forward(problem, inputs)
    }

    fn backward(&self, problem: &AttentionProblem, inputs: BackwardInputs) -> AttentionGradients {
        accept(self.check_device(&inputs.inputs.projections));
        Kernels::Mma.backward(problem, inputs)
    }
}
