//! Kernels as values, for compiling them with no device at hand.
//!
//! Each operation lists its kernels in every type and with typical sizes; `cargo xtask check-cuda`
//! turns them into machine code.

use std::sync::Arc;

use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::*;

/// What kernels are expanded for.
#[derive(Clone, Debug)]
pub struct Target {
    /// The device.
    pub device: Arc<DeviceProperties>,
    /// Its compiler.
    pub compiler: Arc<TargetProperties>,
}

/// One kernel with its types and sizes chosen.
pub struct Specimen {
    /// `operation/kernel/type/sizes`, unique.
    pub name: String,
    /// The kernel.
    pub kernel: Box<dyn CubeKernel>,
    /// Whether it streams rows, so that it must load 128 bits at a time.
    pub streams: bool,
    /// Whether it multiplies by matrix units, so that it must have their instructions.
    pub multiplies: bool,
}

impl Specimen {
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

impl Target {
    /// The settings of a launch with cubes of `units` units.
    pub(crate) fn settings(&self, units: u32) -> KernelSettings {
        let dim = CubeDim::new_1d(units);
        KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
    }

    /// What a kernel's `new` takes after the settings.
    pub(crate) fn properties(&self) -> (Arc<DeviceProperties>, Arc<TargetProperties>) {
        (self.device.clone(), self.compiler.clone())
    }
}

/// What a kernel's `new` takes for an argument `&Tensor<..>` or `&mut Tensor<..>`.
pub(crate) fn tensor() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg { len: (), rank: () },
        buffer: buffer(),
    }
}

/// What a kernel's `new` takes for an argument `&[..]` or `&mut [..]`.
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

/// Every kernel of the crate.
pub fn specimens(target: &Target) -> Vec<Specimen> {
    let operations = [
        crate::activation::kernel::specimens,
        crate::adamw::specimens,
        crate::attention::kernel::specimens,
        crate::cross_entropy::kernel::specimens,
        crate::dropout::kernel::specimens,
        crate::flat::kernel::specimens,
        crate::fp8::codec::specimens,
        crate::fp8::product::scales::kernel::specimens,
        crate::fp8::quantize::kernel::specimens,
        crate::norm::kernel::specimens,
        crate::rope::kernel::specimens,
        crate::softmax::kernel::specimens,
    ];
    operations
        .into_iter()
        .flat_map(|specimens| specimens(target))
        .collect()
}
