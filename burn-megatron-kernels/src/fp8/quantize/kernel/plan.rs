//! The launch layout of a quantizer.

use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::super::scaling::{QuantizerUsage, ScalingKind};
use crate::activation::kernel::ActivationVariant;
use crate::cube::RowPlan;
use crate::fp8::format::Format;
use crate::fp8::kernel::tile::{GROUPS, PATCH_ROWS, UNITS};
use crate::fp8::matrix::{BLOCK, MX_BLOCK};

/// The compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct QuantizePlan {
    pub kind: ScalingKind,
    pub format: Format,
    pub usage: QuantizerUsage,
    /// The activation that computes the matrix.
    pub activation: Option<ActivationVariant>,
    /// The number of elements per load.
    pub vector: usize,
    /// Whether reductions over a cube use plane operations.
    pub planes: bool,
    /// The smallest plane size of the device, or 1 if plane operations are not used.
    pub plane: usize,
    /// Whether the device may flush subnormal floats to 0.
    pub flushes: bool,
    /// Whether loops over the values of a unit are unrolled in the kernel. On CUDA, unrolling is required to keep the
    /// values in registers. On other devices, it would cost seconds of compilation, so the decision is left to the
    /// driver.
    pub unrolled: bool,
}

impl QuantizePlan {
    /// Returns the variant of the activation that computes the matrix.
    pub(super) fn variant(&self) -> ActivationVariant {
        match self.activation {
            Some(variant) => variant,
            None => unreachable!("the matrix is stored"),
        }
    }

    /// Returns whether the kernel computes the tile number again at the end, so that no register holds it until then.
    /// On sm_80, kernels that compute an activation without a gate have no spare registers.
    pub(super) fn computes_tile_again(&self) -> bool {
        self.activation.is_some_and(|variant| !variant.gated)
    }

    /// Returns the number of columns per patch.
    pub(super) fn patch(&self) -> usize {
        self.vector.max(4)
    }

    /// Returns the number of loads per row of a patch.
    pub(super) fn loads(&self) -> usize {
        self.patch() / self.vector
    }

    /// Returns the number of patches in a row of the tile.
    pub(super) fn across(&self) -> usize {
        BLOCK / self.patch()
    }

    /// Returns the number of groups of 4 rows that the units process at a time.
    pub(super) fn groups(&self) -> usize {
        UNITS as usize / self.across()
    }

    /// Returns the number of patches per unit.
    pub(super) fn patches(&self) -> usize {
        GROUPS / self.groups()
    }

    /// Returns the number of vectors that a unit keeps in registers.
    pub(super) fn kept(&self) -> usize {
        self.patches() * PATCH_ROWS * self.loads()
    }

    /// Returns the number of elements of a line that share a scale.
    pub(super) fn width(&self) -> usize {
        match self.kind {
            ScalingKind::Mx => MX_BLOCK,
            _ => BLOCK,
        }
    }

    /// Returns the number of blocks in a line of the tile.
    pub(super) fn blocks(&self) -> usize {
        BLOCK / self.width()
    }

    /// Returns the number of adjacent patches that share a scale.
    pub(super) fn lanes(&self) -> usize {
        self.width() / self.patch()
    }

    /// Returns whether the adjacent patches that share a scale are in one plane.
    pub(super) fn shuffles(&self) -> bool {
        self.lanes() <= self.plane
    }

    /// Returns whether the kernel computes scales for the lines of the tile.
    pub(super) fn by_lines(&self) -> bool {
        !self.kind.shares_codes()
    }

    /// Returns whether the scales of lines are powers of two, as in E8M0.
    pub(super) fn power_of_two(&self) -> bool {
        match self.kind {
            ScalingKind::Blocks { power_of_two, .. } => power_of_two,
            _ => false,
        }
    }

    /// Returns whether the kernel computes codes along the rows.
    pub(super) fn along_rows(&self) -> bool {
        self.usage.rowwise || self.kind.shares_codes()
    }
}

/// The number of elements per load, and whether plane operations are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLoads {
    pub vector: usize,
    pub planes: bool,
}

impl RowLoads {
    /// Creates the loads for rows of `width` elements of `dtype` on the device of `like`.
    pub(super) fn new(like: &CubeTensor, dtype: DType, width: usize) -> Self {
        let plan = RowPlan::new(&like.client, dtype, width);
        Self {
            vector: plan.vector,
            planes: plan.planes(),
        }
    }
}

/// Returns whether the device is a CUDA device. With the options that are used here, the CUDA compilers keep subnormal
/// floats. Shading languages may flush subnormal floats to 0.
pub(super) fn is_cuda(like: &CubeTensor) -> bool {
    #[cfg(test)]
    if FORCED.get() {
        return true;
    }
    matches!(like.device, CubeDevice::Cuda(_))
}

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `work` with the kernel variants of CUDA on every device. In these variants, the device may still flush
/// subnormal floats.
#[cfg(test)]
pub(in super::super) fn with_cuda_forms(work: impl FnOnce()) {
    FORCED.set(true);
    work();
    FORCED.set(false);
}
