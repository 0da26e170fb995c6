//! The attention engine for NVIDIA tensor cores.

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

/// An attention engine for NVIDIA tensor cores, based on Dao, "FlashAttention-2" (2023).
///
/// Matrix multiplications use `mma.sync` with tiles of 16 by 8 by 16 in f16 or bf16, and accumulate in f32. Scores,
/// probabilities and their gradients stay in registers. `ldmatrix` reads keys and values from shared memory. `cp.async`
/// copies the next tile while the current tile is processed.
///
/// The engine requires heads whose number of features is a multiple of 16 and at most 256, value heads that are not
/// wider than key heads, and a positive scale. Within these limits it supports the same problems as
/// [`Portable`](super::Portable): grouped-query attention, masks, key ranges, sinks and strided views of tensors. Views
/// whose rows do not start at multiples of 16 bytes are copied.
///
/// The softmax, its statistics and all sums are in f32. As in the paper, probabilities and score gradients are rounded
/// to the type of the inputs before a matrix multiplication. The backward pass uses no atomic additions. It has one
/// kernel over blocks of queries and one kernel over blocks of keys. Both kernels recompute the scores. The gradients
/// of a key are summed over the query heads of its group in a fixed order.
///
/// [`select_engine`](super::select_engine) prefers this engine to [`Portable`](super::Portable). This engine has never
/// run on a GPU. The book lists the tests on an emulated GPU.
#[derive(Clone, Debug)]
pub struct MmaTiles {
    device: Device,
    types: Vec<DType>,
    /// The maximum number of bytes of shared memory per block.
    shared_memory: usize,
}

impl MmaTiles {
    /// Creates an engine for tensors on `device`.
    ///
    /// # Errors
    ///
    /// Returns an error if `device` is not a CubeCL device, or if it does not support `mma.sync`, `ldmatrix` or
    /// `cp.async` for f16 or bf16. The message names the missing feature.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        Self::query(device).map_err(|reason| {
            let message = format!("no tensor cores on {device:?}: {reason}: use Portable");
            KernelError::shape(OPERATION, message)
        })
    }

    /// Creates an engine like [`new`](Self::new). The error contains only the missing feature.
    pub(super) fn query(device: &Device) -> Result<Self, String> {
        let Some(cube) = cube_device(device.as_dispatch()) else {
            return Err("the device is not a CubeCL device".into());
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

    /// Returns the element types that the engine supports on its device.
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
                "heads of width {width} require {needed} bytes of shared memory per block, and the device has {there}"
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
