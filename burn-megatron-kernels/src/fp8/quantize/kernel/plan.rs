//! The launch layout of a quantiser.

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
    /// The activation whose output the matrix is.
    pub activation: Option<ActivationVariant>,
    /// Elements of a load.
    pub vector: usize,
    /// Whether totals over a cube use planes.
    pub planes: bool,
    /// The smallest plane size of the device; 1 if planes are not used.
    pub plane: usize,
    /// Whether the device may flush subnormal floats to 0.
    pub flushes: bool,
    /// Whether loops over the values of a unit are unrolled here, which CUDA needs to keep them in
    /// registers; elsewhere that costs seconds of compilation, and is left to the driver.
    pub unrolled: bool,
}

impl QuantizePlan {
    /// The activation.
    pub(super) fn variant(&self) -> ActivationVariant {
        match self.activation {
            Some(variant) => variant,
            None => unreachable!("the matrix is stored"),
        }
    }

    /// Whether the number of the tile is computed again at the end, so that no register holds it meanwhile: of the
    /// kernels that compute an activation without a gate, sm_80 has none to spare.
    pub(super) fn computes_tile_again(&self) -> bool {
        self.activation.is_some_and(|variant| !variant.gated)
    }

    /// Columns of a patch.
    pub(super) fn patch(&self) -> usize {
        self.vector.max(4)
    }

    /// Loads of a row of a patch.
    pub(super) fn loads(&self) -> usize {
        self.patch() / self.vector
    }

    /// Patches side by side.
    pub(super) fn across(&self) -> usize {
        BLOCK / self.patch()
    }

    /// Sets of 4 rows that the units take at a time.
    pub(super) fn groups(&self) -> usize {
        UNITS as usize / self.across()
    }

    /// Patches of a unit.
    pub(super) fn patches(&self) -> usize {
        GROUPS / self.groups()
    }

    /// Vectors that a unit keeps.
    pub(super) fn kept(&self) -> usize {
        self.patches() * PATCH_ROWS * self.loads()
    }

    /// Elements of a line that share a scale.
    pub(super) fn width(&self) -> usize {
        match self.kind {
            ScalingKind::Mx => MX_BLOCK,
            _ => BLOCK,
        }
    }

    /// Blocks of a line of the tile.
    pub(super) fn blocks(&self) -> usize {
        BLOCK / self.width()
    }

    /// Patches side by side that share a scale.
    pub(super) fn lanes(&self) -> usize {
        self.width() / self.patch()
    }

    /// Whether those are in one plane.
    pub(super) fn shuffles(&self) -> bool {
        self.lanes() <= self.plane
    }

    /// Whether scales are found for lines of the tile.
    pub(super) fn by_lines(&self) -> bool {
        !self.kind.shares_codes()
    }

    /// Whether the scales of lines are powers of two, as E8M0 are.
    pub(super) fn power_of_two(&self) -> bool {
        match self.kind {
            ScalingKind::Blocks { power_of_two, .. } => power_of_two,
            _ => false,
        }
    }

    /// Whether codes are computed along the rows.
    pub(super) fn along_rows(&self) -> bool {
        self.usage.rowwise || self.kind.shares_codes()
    }
}

/// The width of loads, and whether planes are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLoads {
    pub vector: usize,
    pub planes: bool,
}

impl RowLoads {
    /// For rows of `width` elements of `dtype` on the device of `like`.
    pub(super) fn new(like: &CubeTensor, dtype: DType, width: usize) -> Self {
        let plan = RowPlan::new(&like.client, dtype, width);
        Self {
            vector: plan.vector,
            planes: plan.planes(),
        }
    }
}

/// Whether this is CUDA, whose compilers, as they are called here, keep subnormal floats; shading
/// languages may flush them to 0.
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

/// Runs `work` with the CUDA variants on every device; they need not keep subnormal floats.
#[cfg(test)]
pub(in super::super) fn with_cuda_forms(work: impl FnOnce()) {
    FORCED.set(true);
    work();
    FORCED.set(false);
}
