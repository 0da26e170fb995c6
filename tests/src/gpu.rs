use burn::tensor::Device;
use burn_megatron::device::DeviceKind;

/// The device whose results are compared with those of the CPU: the first CUDA device where the feature
/// `cuda` is on, else the first of wgpu.
///
/// # Panics
///
/// If there is none: whoever asks for the feature says that there is one.
#[track_caller]
pub fn gpu() -> Device {
    let kind = match cfg!(feature = "cuda") {
        true => DeviceKind::Cuda,
        false => DeviceKind::Wgpu,
    };
    let devices = kind.devices();
    devices.unwrap_or_else(|error| panic!("{error}")).remove(0)
}
