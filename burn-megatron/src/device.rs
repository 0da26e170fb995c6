//! Devices by name, checked before Burn is called.
//!
//! Burn panics on a device that is compiled in but not present, and its default device is a GPU
//! if one is compiled in. So a device is always named, and checked first.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The CPU, through Burn's Flex.
    Cpu,
    /// A GPU through WebGPU, Vulkan or Metal; feature `wgpu`.
    Wgpu,
    /// An NVIDIA GPU; feature `cuda`.
    Cuda,
}

/// A device that is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An unknown name.
    #[error("invalid device \"{0}\": expected cpu, wgpu or cuda")]
    Unknown(String),
    /// The binary was built without the feature.
    #[error("this binary was built without {0}; build it with --features {0}")]
    NotCompiled(DeviceKind),
    /// The machine has no such device.
    #[error("no {kind} device was found: {cause}. {cure}")]
    Missing {
        /// The kind.
        kind: DeviceKind,
        /// What is missing.
        cause: String,
        /// How to fix it.
        cure: &'static str,
    },
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for DeviceKind {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let kinds = [Self::Cpu, Self::Wgpu, Self::Cuda];
        let kind = kinds.into_iter().find(|kind| kind.to_string() == text);
        kind.ok_or_else(|| DeviceError::Unknown(text.into()))
    }
}

impl DeviceKind {
    /// The devices of this kind on this machine, at least one. Ranks use them round-robin.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] if the kind is not compiled in, or the machine has none.
    pub fn devices(self) -> Result<Vec<Device>, DeviceError> {
        match self {
            Self::Cpu => Ok(vec![Device::flex()]),
            Self::Wgpu => wgpu_devices(),
            Self::Cuda => cuda_devices(),
        }
    }
}

impl DeviceKind {
    /// The name of the first device of this kind, as the driver has it; otherwise that of the kind.
    pub fn name(self) -> String {
        let name = match self {
            Self::Cuda => cuda_device_name(),
            Self::Cpu | Self::Wgpu => None,
        };
        name.unwrap_or_else(|| self.to_string())
    }

    /// The bytes of the memory of the first device of this kind; `None` where no driver tells them.
    pub fn memory(self) -> Option<u64> {
        match self {
            Self::Cuda => cuda_device_memory(),
            Self::Cpu | Self::Wgpu => None,
        }
    }
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_devices() -> Result<Vec<Device>, DeviceError> {
    Err(DeviceError::NotCompiled(DeviceKind::Wgpu))
}

#[cfg(feature = "wgpu")]
fn wgpu_devices() -> Result<Vec<Device>, DeviceError> {
    use burn::tensor::DeviceType;

    let devices = Device::enumerate(DeviceType::Wgpu).into_vec();
    if devices.is_empty() {
        return Err(DeviceError::Missing {
            kind: DeviceKind::Wgpu,
            cause: "no adapter offers Vulkan, Metal or DirectX 12".into(),
            cure: "Install a driver, such as the package mesa-vulkan-drivers, or use --device cpu",
        });
    }
    Ok(devices)
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<Vec<Device>, DeviceError> {
    Err(DeviceError::NotCompiled(DeviceKind::Cuda))
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<Vec<Device>, DeviceError> {
    let count = cuda_driver_devices().map_err(|cause| DeviceError::Missing {
        kind: DeviceKind::Cuda,
        cause,
        cure: "Install the NVIDIA driver, or use --device cpu",
    })?;
    Ok((0..count).map(Device::cuda).collect())
}

/// The library of the CUDA driver.
#[cfg(any(feature = "cuda", test))]
const CUDA_DRIVER: &str = if cfg!(windows) {
    "nvcuda.dll"
} else {
    "libcuda.so.1"
};

#[cfg(not(feature = "cuda"))]
fn cuda_device_name() -> Option<String> {
    None
}

#[cfg(feature = "cuda")]
fn cuda_device_name() -> Option<String> {
    use std::ffi::{CStr, c_char, c_int};

    type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    let mut name = [0u8; 256];
    // SAFETY: the signature of `cuDeviceGetName` is that of the driver API; the name is written with its 0 into at most
    // 256 bytes.
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
fn cuda_device_memory() -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
fn cuda_device_memory() -> Option<u64> {
    use std::ffi::c_int;

    type TotalMemory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    let mut bytes = 0;
    // SAFETY: the signature of `cuDeviceTotalMem_v2` is that of the driver API.
    let code = with_first_cuda_device(|driver, device| unsafe {
        let total: libloading::Symbol<TotalMemory> = driver.get(b"cuDeviceTotalMem_v2").ok()?;
        Some(total(&mut bytes, device))
    })?;
    (code == 0).then_some(bytes as u64)
}

/// Calls `query` with the library of the driver and the first device, if there is one.
#[cfg(feature = "cuda")]
fn with_first_cuda_device<T>(
    query: impl FnOnce(&libloading::Library, std::ffi::c_int) -> Option<T>,
) -> Option<T> {
    use std::ffi::c_int;

    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    // Initializes the driver.
    cuda_driver_devices().ok()?;
    let mut device = 0;
    // SAFETY: the signature of `cuDeviceGet` is that of the driver API.
    let (driver, code) = unsafe {
        let driver = libloading::Library::new(CUDA_DRIVER).ok()?;
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

/// The number of GPUs, from the driver itself: Burn's own query panics if no driver is installed.
#[cfg(any(feature = "cuda", test))]
fn cuda_driver_devices() -> Result<usize, String> {
    use std::ffi::c_int;

    let name = CUDA_DRIVER;
    let missing =
        |error: libloading::Error| format!("the CUDA driver {name} cannot be used ({error})");
    let mut count: c_int = 0;
    // SAFETY: the signatures of `cuInit(unsigned)` and `cuDeviceGetCount(int*)` are those of the driver API.
    let code = unsafe {
        let driver = libloading::Library::new(name).map_err(missing)?;
        let init: libloading::Symbol<unsafe extern "C" fn(u32) -> c_int> =
            driver.get(b"cuInit").map_err(missing)?;
        let devices: libloading::Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
            driver.get(b"cuDeviceGetCount").map_err(missing)?;
        match init(0) {
            0 => devices(&mut count),
            code => code,
        }
    };
    match (code, count) {
        (0, 1..) => Ok(count as usize),
        (0, _) => Err("the CUDA driver sees no GPU".into()),
        (code, _) => Err(format!("the CUDA driver reports error {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_written() {
        for kind in [DeviceKind::Cpu, DeviceKind::Wgpu, DeviceKind::Cuda] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "gpu".parse::<DeviceKind>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid device \"gpu\": expected cpu, wgpu or cuda"
        );
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert_eq!(DeviceKind::Cpu.devices().unwrap().len(), 1);
        assert_eq!(DeviceKind::Cpu.name(), "cpu");
    }

    /// The query must not panic on any machine.
    #[test]
    fn a_driver_that_is_missing_is_named() {
        match cuda_driver_devices() {
            Ok(count) => assert!(count > 0),
            Err(cause) => assert!(cause.starts_with("the CUDA driver"), "{cause}"),
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_device_that_was_left_out_names_its_feature() {
        let error = DeviceKind::Cuda.devices().unwrap_err();
        assert_eq!(
            error.to_string(),
            "this binary was built without cuda; build it with --features cuda",
        );
    }
}
