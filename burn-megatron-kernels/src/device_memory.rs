//! Queries of the device memory that is in use, as reported by the driver of the device.

use burn::tensor::Device;

/// The memory usage of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverMemory {
    /// The memory in bytes that all processes and libraries use.
    pub used: u64,
    /// The total memory of the device in bytes.
    pub total: u64,
}

/// Returns the memory usage of `device` as reported by its driver. Returns `None` if the device is not a CUDA device,
/// or if the call of the driver fails.
pub fn driver_memory(device: &Device) -> Option<DriverMemory> {
    driver::memory(device)
}

/// Returns unused memory of the CubeCL allocator to the driver of `device`. Does nothing on devices other than CUDA
/// devices.
///
/// The memory is returned when the stream of the calling thread is flushed, or when the allocator runs out of memory.
/// Until then, other libraries cannot use the memory. Do not call this function during the capture of a CUDA graph.
pub fn return_freed_memory(device: &Device) {
    driver::return_freed(device);
}

#[cfg(not(feature = "cuda"))]
mod driver {
    use super::{Device, DriverMemory};

    pub fn memory(_device: &Device) -> Option<DriverMemory> {
        None
    }

    pub fn return_freed(_device: &Device) {}
}

#[cfg(feature = "cuda")]
mod driver {
    use burn_cubecl::CubeDevice;
    use cudarc::driver::CudaContext;

    use super::{Device, DriverMemory};
    use crate::cube::cube_device;

    pub fn memory(device: &Device) -> Option<DriverMemory> {
        let CubeDevice::Cuda(device) = cube_device(device.as_dispatch())? else {
            return None;
        };
        let context = CudaContext::new(device.index).ok()?;
        let (free, total) = context.mem_get_info().ok()?;
        Some(DriverMemory {
            used: (total - free) as u64,
            total: total as u64,
        })
    }

    pub fn return_freed(device: &Device) {
        // `Device::flush` would also end the collection of operations by Burn's fusion.
        let Some(cuda @ CubeDevice::Cuda(_)) = cube_device(device.as_dispatch()) else {
            return;
        };
        if let Err(error) = cuda.client().flush() {
            tracing::warn!("cannot return freed memory to the driver: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_no_driver() {
        return_freed_memory(&Device::flex());
        assert_eq!(driver_memory(&Device::flex()), None);
    }

    /// Pages of small tensors are replaced by larger pages after a larger tensor is allocated.
    #[cfg(feature = "cuda")]
    #[test]
    fn freed_pages_go_back_to_the_driver() {
        use burn::tensor::Tensor;

        let device = Device::cuda(0);
        let zeros = |mib: usize| Tensor::<1>::zeros([mib << 18], &device);
        let used = || driver_memory(&device).unwrap().used;
        device.memory_cleanup();
        let small: Vec<_> = (0..8).map(|_| zeros(8)).collect();
        let large = zeros(16);
        drop(small);
        // The next allocation finds the pages empty and queues them.
        let next = zeros(16);
        let before = used();
        return_freed_memory(&device);
        assert!(used() + (32 << 20) <= before, "{} of {before}", used());
        drop((large, next));
    }
}
