//! Launches CubeCL kernels.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{BufferArg, ComptimeOptionArgs, CubePrimitive, OwnedTensor, TensorArg};

/// A tensor that can be converted to the kernel argument type `A`.
pub(crate) trait KernelTensor<A> {
    /// Converts the tensor to the argument.
    fn argument(self) -> A;
}

impl KernelTensor<TensorArg> for CubeTensor {
    fn argument(self) -> TensorArg {
        self.into_tensor_arg()
    }
}

impl KernelTensor<BufferArg> for CubeTensor {
    fn argument(self) -> BufferArg {
        self.into_buffer_arg()
    }
}

impl<A> KernelTensor<A> for &CubeTensor
where
    CubeTensor: KernelTensor<A>,
{
    fn argument(self) -> A {
        self.clone().argument()
    }
}

/// An optional tensor.
impl<T: CubePrimitive> KernelTensor<ComptimeOptionArgs<OwnedTensor<T>>> for Option<CubeTensor> {
    fn argument(self) -> ComptimeOptionArgs<OwnedTensor<T>> {
        self.map(CubeTensor::into_tensor_arg).into()
    }
}

/// An argument that needs no conversion.
impl<A> KernelTensor<A> for A {
    fn argument(self) -> A {
        self
    }
}

/// Launches `cubes` cubes of `units` units of a kernel: `launch!(kernel, [client, cubes, units],
/// [vector], [x], [&y], (rows), (plan, dtype))`.
///
/// The second bracket holds the vector sizes. The following brackets hold tensors
/// ([`KernelTensor`]) and the parentheses hold other arguments, in any number of groups.
///
/// # Safety
///
/// The kernel must access only memory of its tensors.
macro_rules! launch {
    (
        $kernel:ident,
        [$client:expr, $cubes:expr, $units:expr],
        [$($vector:expr),*],
        $([$($tensor:expr),* $(,)?]),+,
        $(($($argument:expr),* $(,)?)),+ $(,)?
    ) => {
        $kernel::launch_unchecked(
            &$client,
            $crate::cube::grid(&$client, $cubes),
            cubecl::prelude::CubeDim::new_1d($units),
            $($vector,)*
            $($($crate::cube::KernelTensor::argument($tensor),)*)+
            $($($argument,)*)+
        )
    };
}
pub(crate) use launch;
