//! The engines that compute on a GPU, for headers and reports.

use burn::tensor::Device;
use burn_megatron::device::{DeviceKind, UNCHECKED, is_unchecked};
use burn_megatron::kernel_selection::KernelSelection;
use burn_megatron::kernels::gemm::{engine_of, slow_reason};

use crate::error::Error;
use crate::header::Header;

/// Adds the matrix multiplication engine and a warning for each slow engine to the header. Adds nothing on a CPU.
pub fn print_engines(
    header: &mut Header,
    kind: DeviceKind,
    device: &Device,
    kernels: &KernelSelection,
) {
    if kind != DeviceKind::Cpu {
        header.line("matmul", engine_of(device));
    }
    for slow in slow_engines(kind, device, kernels) {
        header.line("WARNING", slow);
    }
    if is_unchecked() {
        header.line(
            "WARNING",
            format!("unchecked: {UNCHECKED} is set, so results may be wrong"),
        );
    }
}

/// Returns the reasons why a CUDA device computes slower than it could, one per engine.
pub fn slow_engines(kind: DeviceKind, device: &Device, kernels: &KernelSelection) -> Vec<String> {
    if kind != DeviceKind::Cuda {
        return vec![];
    }
    let products =
        slow_reason(device).map(|reason| format!("matrix multiplications are slow: {reason}"));
    let attention = kernels.slow_attention();
    let attention = attention.map(|reason| format!("attention is slow: {reason}"));
    products.into_iter().chain(attention).collect()
}

/// Returns an error if an engine is slow, for `--require-fast-kernels`.
pub fn require_fast(
    kind: DeviceKind,
    device: &Device,
    kernels: &KernelSelection,
) -> Result<(), Error> {
    match slow_engines(kind, device, kernels).as_slice() {
        [] => Ok(()),
        slow => Err(format!("--require-fast-kernels: {}", slow.join("; ")).into()),
    }
}
