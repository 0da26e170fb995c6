//! Finds or installs NVIDIA's CUDA compilers, from wheels of the Python package index.

use std::env;
use std::path::{Path, PathBuf};

use crate::pip;

/// A wheel, and a file that it contains.
struct Wheel {
    package: &'static str,
    version: &'static str,
    file: &'static str,
}

const WHEELS: [Wheel; 4] = [
    Wheel {
        package: "nvidia-cuda-nvrtc-cu12",
        version: "12.9.86",
        file: "cuda_nvrtc/lib/libnvrtc.so.12",
    },
    Wheel {
        package: "nvidia-cuda-nvcc-cu12",
        version: "12.9.86",
        file: "cuda_nvcc/bin/ptxas",
    },
    Wheel {
        package: "nvidia-cuda-runtime-cu12",
        version: "12.9.79",
        file: "cuda_runtime/include/cuda_bf16.h",
    },
    // There is no such wheel for CUDA 12. This version can still read the files of CUDA 12.
    Wheel {
        package: "nvidia-cuda-nvdisasm",
        version: "13.2.51",
        file: "cu13/bin/nvdisasm",
    },
];

impl Wheel {
    /// Returns whether this version of the wheel is in a folder that pip filled.
    fn is_in(&self, folder: &Path) -> bool {
        let package = self.package.replace('-', "_");
        let record = format!("{package}-{}.dist-info", self.version);
        folder.join(record).is_dir() && folder.join("nvidia").join(self.file).is_file()
    }

    fn pinned(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }
}

/// Returns the folder of the compilers: `CUDA_WHEELS` if it is set, or a folder in the target folder.
pub fn folder(target: &Path) -> PathBuf {
    match env::var_os("CUDA_WHEELS").filter(|folder| !folder.is_empty()) {
        Some(folder) => folder.into(),
        None => target.join("cuda-wheels"),
    }
}

/// Finds the compilers in a folder, or installs them. The error describes how to install the missing wheels.
pub fn find_or_install(folder: &Path) -> Result<(), String> {
    if missing(folder).is_empty() {
        println!("found in {}", folder.display());
        return Ok(());
    }
    if env::consts::OS != "linux" {
        let os = env::consts::OS;
        return Err(format!(
            "NVIDIA's compilers come as wheels for Linux, and this is {os}"
        ));
    }
    pip::install(&WHEELS.map(|wheel| wheel.pinned()), folder)?;
    match missing(folder).as_slice() {
        [] => Ok(()),
        missing => {
            let (folder, missing) = (folder.display(), missing.join(", "));
            Err(format!(
                "pip installed into {folder} without an error, but not {missing}"
            ))
        }
    }
}

fn missing(folder: &Path) -> Vec<String> {
    let missing = WHEELS.iter().filter(|wheel| !wheel.is_in(folder));
    missing.map(Wheel::pinned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn a_wheel_is_there_with_its_version_and_its_file() {
        let folder = TempDir::new("wheels").unwrap();
        let all: Vec<_> = WHEELS.iter().map(Wheel::pinned).collect();
        assert_eq!(missing(folder.path()), all);
        for wheel in &WHEELS {
            folder.write(&format!("nvidia/{}", wheel.file), "");
        }
        assert_eq!(missing(folder.path()), all);
        folder.write("nvidia_cuda_nvrtc_cu12-12.9.86.dist-info/METADATA", "");
        folder.write("nvidia_cuda_nvcc_cu12-12.8.93.dist-info/METADATA", "");
        folder.write("nvidia_cuda_runtime_cu12-12.9.79.dist-info/METADATA", "");
        folder.write("nvidia_cuda_nvdisasm-13.2.51.dist-info/METADATA", "");
        assert_eq!(missing(folder.path()), ["nvidia-cuda-nvcc-cu12==12.9.86"]);
    }
}
