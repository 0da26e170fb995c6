use burn::tensor::Device;
use burn_megatron::device::DeviceKind;

/// The device whose results are compared with those of the CPU: the first CUDA device with the feature
/// `cuda`, else the first wgpu device.
///
/// # Panics
///
/// If there is no device: enabling the feature requires one.
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
