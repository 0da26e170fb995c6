//! Selects devices by name, and checks them before Burn is called.
//!
//! Burn panics if a backend is compiled in but the machine does not have its device. Burn's default device is a GPU if
//! a GPU backend is compiled in. Therefore this library always selects the device by name and checks it first.

use burn::tensor::Device;

use crate::comm::probe::CudaProblem;

mod cuda;
mod failure;
mod results;

pub use failure::{failure, watch};
pub use results::check_results;

pub use crate::kernels::unchecked::{UNCHECKED, is_unchecked};

/// A kind of device.
///
/// ```
/// use burn_megatron::device::{DeviceKind, check_results};
///
/// let kind: DeviceKind = "cpu".parse()?;
/// let devices = kind.devices()?;
/// check_results(&devices[0])?;
/// let error = "gpu".parse::<DeviceKind>().unwrap_err();
/// assert_eq!(error.to_string(), "invalid device \"gpu\": expected cpu, wgpu or cuda");
/// # Ok::<(), burn_megatron::device::DeviceError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
#[strum(parse_err_ty = DeviceError, parse_err_fn = unknown)]
pub enum DeviceKind {
    /// The CPU, with Burn's Flex backend.
    Cpu,
    /// A GPU with WebGPU, Vulkan or Metal. Requires the feature `wgpu`.
    Wgpu,
    /// An NVIDIA GPU. Requires the feature `cuda`.
    Cuda,
}

/// The error that is returned if a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The name of the device is unknown.
    #[error("invalid device \"{0}\": expected cpu, wgpu or cuda")]
    Unknown(String),
    /// The program was built without the feature for this kind of device.
    #[error("this binary was built without {0}; build it with --features {0}")]
    NotCompiled(DeviceKind),
    /// The machine has no device of this kind.
    #[error("no {kind} device was found: {cause}. {cure}")]
    Missing {
        /// The kind of device.
        kind: DeviceKind,
        /// The missing requirement.
        cause: String,
        /// The remedy.
        cure: &'static str,
    },
    /// The machine has devices of this kind, but kernels cannot be compiled for them.
    #[error("{kind} devices cannot be used: {problem}")]
    Unusable {
        /// The kind of device.
        kind: DeviceKind,
        /// The cause and the remedy.
        problem: CudaProblem,
    },
    /// A kernel on the device computed a different result than the host.
    #[error(
        "the device ({device}) computes wrong results: {difference}. Check the driver and its libraries with `burn-megatron env`; \
         {UNCHECKED}=1 uses the device nevertheless"
    )]
    WrongResults {
        /// The device, as Burn prints it.
        device: String,
        /// The value that the kernel computed and the value that was expected.
        difference: String,
    },
    /// A thread that runs a device has panicked, so later results of the device are wrong.
    #[error("a task of a device failed: {0}")]
    Failed(String),
}

fn unknown(text: &str) -> DeviceError {
    DeviceError::Unknown(text.into())
}

impl DeviceKind {
    /// Returns the devices of this kind on this machine. The list is never empty. Ranks are assigned to the devices
    /// round-robin.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] if the kind is not compiled in, the machine has no such device, or kernels cannot be
    /// compiled for it.
    pub fn devices(self) -> Result<Vec<Device>, DeviceError> {
        match self {
            Self::Cpu => Ok(vec![Device::flex()]),
            Self::Wgpu => wgpu_devices(),
            Self::Cuda => cuda::devices(),
        }
    }
}

impl DeviceKind {
    /// Returns the first device of this kind, after it has passed [`check_results`].
    ///
    /// # Errors
    ///
    /// The errors of [`devices`](Self::devices) and [`check_results`].
    pub fn checked(self) -> Result<Device, DeviceError> {
        let device = self.devices()?.swap_remove(0);
        check_results(&device)?;
        Ok(device)
    }

    /// Returns the name that the driver reports for the first device of this kind. If the driver does not report a
    /// name, the name of the kind is returned.
    pub fn name(self) -> String {
        let name = match self {
            Self::Cuda => cuda::name(),
            Self::Cpu | Self::Wgpu => None,
        };
        name.unwrap_or_else(|| self.to_string())
    }

    /// Returns the memory of the first device of this kind in bytes, or `None` if no driver reports it.
    pub fn memory(self) -> Option<u64> {
        match self {
            Self::Cuda => cuda::memory(),
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

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_written() {
        for kind in [DeviceKind::Cpu, DeviceKind::Wgpu, DeviceKind::Cuda] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "gpu".parse::<DeviceKind>().unwrap_err();
        assert_snapshot!(error, @"invalid device \"gpu\": expected cpu, wgpu or cuda");
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert_eq!(DeviceKind::Cpu.devices().unwrap().len(), 1);
        assert_eq!(DeviceKind::Cpu.name(), "cpu");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_device_that_was_left_out_names_its_feature() {
        let error = DeviceKind::Cuda.devices().unwrap_err();
        assert_snapshot!(
            error,
            @"this binary was built without cuda; build it with --features cuda"
        );
    }
}
