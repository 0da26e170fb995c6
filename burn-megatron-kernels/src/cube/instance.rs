//! Kernels that can be compiled without a device.
//!
//! Each operation lists its AOT instances: every kernel in every element type, with typical sizes. [`aot`](crate::aot)
//! collects these lists.

use std::sync::Arc;

use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::*;

/// The device and the compiler for which kernels are compiled ahead of time.
#[derive(Clone, Debug)]
pub struct AotTarget {
    /// The properties of the device.
    pub device: Arc<DeviceProperties>,
    /// The properties of the device's compiler.
    pub compiler: Arc<TargetProperties>,
}

/// A kernel with concrete types and sizes, for ahead-of-time compilation.
pub struct AotInstance {
    /// The unique name of the instance, `operation/kernel/type/sizes`.
    pub name: String,
    /// The kernel.
    pub kernel: Box<dyn CubeKernel>,
    /// Whether the kernel reads rows from memory as a stream. The loads of such a kernel must be 128 bits wide.
    pub streams: bool,
    /// Whether the kernel uses tensor cores. Such a kernel must contain matrix instructions.
    pub multiplies: bool,
}

/// A list of kernels for one target. The operations add their [instances](instance) to it.
pub(crate) struct AotList {
    pub target: AotTarget,
    pub all: Vec<AotInstance>,
}

impl AotList {
    /// Adds a kernel that streams rows of memory.
    pub(crate) fn streaming(&mut self, name: String, kernel: impl CubeKernel + 'static) {
        self.add(name, kernel, true, false);
    }

    /// Adds a kernel that uses tensor cores.
    pub(crate) fn multiplying(&mut self, name: String, kernel: impl CubeKernel + 'static) {
        self.add(name, kernel, false, true);
    }

    /// Adds a kernel of any other kind.
    pub(crate) fn other(&mut self, name: String, kernel: impl CubeKernel + 'static) {
        self.add(name, kernel, false, false);
    }

    fn add(
        &mut self,
        name: String,
        kernel: impl CubeKernel + 'static,
        streams: bool,
        multiplies: bool,
    ) {
        self.all.push(AotInstance {
            name,
            kernel: Box::new(kernel),
            streams,
            multiplies,
        });
    }
}

impl AotTarget {
    /// Returns the settings of a launch whose cubes have `units` units.
    pub(crate) fn settings(&self, units: u32) -> KernelSettings {
        let dim = CubeDim::new_1d(units);
        KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
    }
}

/// A kernel parameter for which the kernel's function `new` has only one possible argument.
pub(crate) trait DefaultArg {
    fn default_arg() -> Self;
}

/// A scalar parameter.
impl DefaultArg for () {
    fn default_arg() -> Self {}
}

/// A parameter of type `&[..]` or `&mut [..]`.
impl DefaultArg for BufferCompilationArg {
    fn default_arg() -> Self {
        Self { inplace: None }
    }
}

/// A parameter of type `&Tensor<..>` or `&mut Tensor<..>`.
impl DefaultArg for TensorCompilationArg {
    fn default_arg() -> Self {
        Self {
            meta: TensorMetaCompilationArg { len: (), rank: () },
            buffer: DefaultArg::default_arg(),
        }
    }
}

/// Implements [`DefaultArg`] for a struct whose fields implement it.
macro_rules! default_fields {
    ($argument:ident [$($field:ident)*]) => {
        impl $crate::cube::instance::DefaultArg for $argument {
            fn default_arg() -> Self {
                Self { $($field: $crate::cube::instance::DefaultArg::default_arg()),* }
            }
        }
    };
}
pub(crate) use default_fields;

/// Returns the argument for an optional tensor, which is present if `is_given` is true.
pub(crate) fn given<T>(is_given: bool) -> ComptimeOptionCompilationArg<T>
where
    T: LaunchArg<CompilationArg = TensorCompilationArg>,
{
    if is_given {
        ComptimeOptionCompilationArg::Some(DefaultArg::default_arg())
    } else {
        ComptimeOptionCompilationArg::None
    }
}

/// Returns the argument for a list of `count` tensors.
pub(crate) fn sequence<T>(count: usize) -> SequenceCompilationArg<T>
where
    T: LaunchArg<CompilationArg = TensorCompilationArg>,
{
    (0..count).map(|_| DefaultArg::default_arg()).collect()
}

/// Adds a kernel for cubes of `units` units to an [`AotList`]:
/// `instance!(list.streaming("name/{type}"), units, Kernel [_ (given(true)) _] (a, b))`.
///
/// The runtime arguments are in brackets, with `_` for a [`DefaultArg`]. The compile-time arguments
/// are in parentheses.
macro_rules! instance {
    (@argument _) => { $crate::cube::instance::DefaultArg::default_arg() };
    (@argument ($argument:expr)) => { $argument };
    (
        $list:ident.$add:ident($name:literal), $units:expr,
        $kernel:ty [$($argument:tt)*] ($($comptime:expr),*)
    ) => {{
        let kernel = <$kernel>::new(
            $list.target.settings($units),
            $list.target.device.clone(),
            $list.target.compiler.clone(),
            $($crate::cube::instance::instance!(@argument $argument),)*
            $($comptime),*
        );
        $list.$add(format!($name), kernel);
    }};
}
pub(crate) use instance;

/// Returns the element types for which kernels are compiled. Each type has its name and the number of elements in 128
/// bits.
pub(crate) fn types() -> [(&'static str, ElemType, usize); 3] {
    [
        ("f32", ElemType::Float(FloatKind::F32), 4),
        ("f16", ElemType::Float(FloatKind::F16), 8),
        ("bf16", ElemType::Float(FloatKind::BF16), 8),
    ]
}
