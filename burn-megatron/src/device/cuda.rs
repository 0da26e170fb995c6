//! Lists NVIDIA GPUs with the CUDA driver, because Burn's queries panic if no driver is installed.

#[cfg(feature = "cuda")]
use std::ffi::{CStr, c_char, c_int};

use burn::tensor::Device;

use super::{DeviceError, DeviceKind};
#[cfg(feature = "cuda")]
use crate::comm::probe::{CudaToolkit, cuda_driver};

#[cfg(not(feature = "cuda"))]
pub(super) fn devices() -> Result<Vec<Device>, DeviceError> {
    Err(DeviceError::NotCompiled(DeviceKind::Cuda))
}

/// Returns the GPUs that the driver reports. The libraries that compile kernels are checked first: without
/// them, kernels fail to run, but their outputs can still be read.
#[cfg(feature = "cuda")]
pub(super) fn devices() -> Result<Vec<Device>, DeviceError> {
    let kind = DeviceKind::Cuda;
    let cure = "Install the NVIDIA driver, or use --device cpu";
    let missing = |cause| DeviceError::Missing { kind, cause, cure };
    let driver = cuda_driver().map_err(missing)?;
    if driver.devices == 0 {
        return Err(missing("the CUDA driver found no GPU".into()));
    }
    let toolkit = CudaToolkit::find();
    toolkit
        .check()
        .map_err(|problem| DeviceError::Unusable { kind, problem })?;
    Ok((0..driver.devices).map(Device::cuda).collect())
}

/// The name of the CUDA driver library.
#[cfg(feature = "cuda")]
const DRIVER: &str = if cfg!(windows) {
    "nvcuda.dll"
} else {
    "libcuda.so.1"
};

#[cfg(not(feature = "cuda"))]
pub(super) fn name() -> Option<String> {
    None
}

#[cfg(feature = "cuda")]
pub(super) fn name() -> Option<String> {
    type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    let mut name = [0u8; 256];
    // SAFETY: `cuDeviceGetName` has this signature in the driver API. The driver writes at most 256 bytes,
    // including the terminating 0.
    let code = with_first_cuda_device(|driver, device| unsafe {
        let get_name: libloading::Symbol<GetName> = driver.get(b"cuDeviceGetName").ok()?;
        Some(get_name(
            name.as_mut_ptr().cast(),
            name.len() as c_int,
            device,
        ))
    })?;
    let name = CStr::from_bytes_until_nul(&name).ok()?;
    (code == 0).then(|| name.to_string_lossy().into_owned())
}

#[cfg(not(feature = "cuda"))]
pub(super) fn memory() -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
pub(super) fn memory() -> Option<u64> {
    type TotalMemory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    let mut bytes = 0;
    // SAFETY: `cuDeviceTotalMem_v2` has this signature in the driver API.
    let code = with_first_cuda_device(|driver, device| unsafe {
        let total: libloading::Symbol<TotalMemory> = driver.get(b"cuDeviceTotalMem_v2").ok()?;
        Some(total(&mut bytes, device))
    })?;
    (code == 0).then_some(bytes as u64)
}

/// Calls `query` with the driver library and the first device. Returns `None` if there is no device.
#[cfg(feature = "cuda")]
fn with_first_cuda_device<T>(
    query: impl FnOnce(&libloading::Library, c_int) -> Option<T>,
) -> Option<T> {
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    // Initializes the driver.
    cuda_driver().ok()?;
    let mut device = 0;
    // SAFETY: `cuDeviceGet` has this signature in the driver API.
    let (driver, code) = unsafe {
        let driver = libloading::Library::new(DRIVER).ok()?;
        let get: libloading::Symbol<Get> = driver.get(b"cuDeviceGet").ok()?;
        let code = get(&mut device, 0);
        (driver, code)
    };
    if code == 0 {
        query(&driver, device)
    } else {
        None
    }
}
