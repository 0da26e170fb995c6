//! Kernels as values, to compile them without a device.
//!
//! Each operation lists its AOT instances: every kernel in every type, with typical sizes.
//! [`aot`](crate::aot) collects them.

use std::sync::Arc;

use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::*;

/// The device and compiler that kernels are expanded for.
#[derive(Clone, Debug)]
pub struct AotTarget {
    /// The device.
    pub device: Arc<DeviceProperties>,
    /// Its compiler.
    pub compiler: Arc<TargetProperties>,
}

/// One kernel with concrete types and sizes, for ahead-of-time compilation.
pub struct AotInstance {
    /// `operation/kernel/type/sizes`, unique.
    pub name: String,
    /// The kernel.
    pub kernel: Box<dyn CubeKernel>,
    /// Whether it streams rows, so that its loads must be 128 bits wide.
    pub streams: bool,
    /// Whether it multiplies by matrix units, so that it must contain matrix instructions.
    pub multiplies: bool,
}

impl AotInstance {
    /// A kernel that streams rows of memory.
    pub(crate) fn streaming(name: String, kernel: impl CubeKernel + 'static) -> Self {
        Self {
            name,
            kernel: Box::new(kernel),
            streams: true,
            multiplies: false,
        }
    }

    /// Any other kernel.
    pub(crate) fn other(name: String, kernel: impl CubeKernel + 'static) -> Self {
        Self {
            name,
            kernel: Box::new(kernel),
            streams: false,
            multiplies: false,
        }
    }

    /// A kernel that multiplies by matrix units.
    pub(crate) fn multiplying(name: String, kernel: impl CubeKernel + 'static) -> Self {
        Self {
            multiplies: true,
            ..Self::other(name, kernel)
        }
    }
}

impl AotTarget {
    /// The settings of a launch with cubes of `units` units.
    pub(crate) fn settings(&self, units: u32) -> KernelSettings {
        let dim = CubeDim::new_1d(units);
        KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
    }

    /// The arguments of a kernel's `new` after the settings.
    pub(crate) fn properties(&self) -> (Arc<DeviceProperties>, Arc<TargetProperties>) {
        (self.device.clone(), self.compiler.clone())
    }
}

/// The argument of a kernel's `new` for a parameter `&Tensor<..>` or `&mut Tensor<..>`.
pub(crate) fn tensor() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg { len: (), rank: () },
        buffer: buffer(),
    }
}

/// The argument of a kernel's `new` for a parameter `&[..]` or `&mut [..]`.
pub(crate) fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// The types that kernels are compiled in, each with its name and the vector of a 128-bit load.
pub(crate) fn types() -> [(&'static str, ElemType, usize); 3] {
    [
        ("f32", ElemType::Float(FloatKind::F32), 4),
        ("f16", ElemType::Float(FloatKind::F16), 8),
        ("bf16", ElemType::Float(FloatKind::BF16), 8),
    ]
}
