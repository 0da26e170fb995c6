//! Checks the libraries and the first kernel.

use burn_megatron::comm::probe::{self, CudaToolkit, SharedLibrary};
use burn_megatron::device::DeviceKind;

use super::outcome::Findings;
use crate::error::Error;

/// Finds the driver, NVRTC, the headers, cuBLASLt and NCCL.
pub fn libraries(kind: DeviceKind) -> Result<Findings, Error> {
    let mut found = Findings::default();
    found.note("device", kind.name());
    if kind != DeviceKind::Cuda {
        return Ok(found);
    }
    let toolkit = CudaToolkit::find();
    let library = |found: &Result<SharedLibrary, String>| match found {
        Ok(SharedLibrary {
            version: (major, minor),
            path,
        }) => format!("{major}.{minor}, {}", path.display()),
        Err(reason) => format!("missing: {reason}"),
    };
    match &toolkit.driver {
        Ok(driver) => {
            let ((major, minor), gpus) = (driver.version, driver.devices);
            found.note("driver", format!("up to CUDA {major}.{minor}, {gpus} GPUs"));
        }
        Err(reason) => found.note("driver", format!("missing: {reason}")),
    }
    found.note("NVRTC", library(&toolkit.nvrtc));
    found.note(
        "headers",
        match &toolkit.headers {
            Ok(folder) => folder.display().to_string(),
            Err(reason) => format!("missing: {reason}"),
        },
    );
    // Without cuBLASLt, matrix multiplications are slow: see the check of products.
    found.note("cuBLASLt", library(&toolkit.cublas_lt));
    match probe::nccl() {
        Ok(nccl) => {
            let (major, minor, patch) = nccl.version;
            let path = nccl.path.display();
            found.note("NCCL", format!("{major}.{minor}.{patch}, {path}"));
        }
        Err(reason) => found.note("NCCL", format!("missing: {reason}")),
    }
    if let Err(problem) = toolkit.check() {
        found.push("kernels", "cannot be compiled", Some(problem.to_string()));
    }
    Ok(found)
}

/// Runs the first kernel on the device.
pub fn first_kernel(kind: DeviceKind) -> Result<Findings, Error> {
    let mut found = Findings::default();
    let problem = kind.checked().err().map(|error| error.to_string());
    found.push("a kernel of 32 threads", kind.name(), problem);
    Ok(found)
}
