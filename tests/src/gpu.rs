use burn::tensor::Device;
use burn_megatron::device::DeviceKind;

/// Returns the device whose results are compared with the CPU: the first CUDA device with the feature `cuda`, or else
/// the first wgpu device.
///
/// # Panics
///
/// Panics if there is no device: the feature requires one.
#[track_caller]
pub fn gpu() -> Device {
    let kind = if cfg!(feature = "cuda") {
        DeviceKind::Cuda
    } else {
        DeviceKind::Wgpu
    };
    let devices = kind.devices();
    devices.unwrap_or_else(|error| panic!("{error}")).remove(0)
}
