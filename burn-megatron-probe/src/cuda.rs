//! The NVIDIA driver, and the software that is required to compile kernels for it: NVRTC and the CUDA headers.

use std::env;
use std::error::Error;
use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::{Library, Symbol};
use serde::Serialize;

use super::{first_library, number};

/// The file names of the NVRTC library, in the order in which CubeCL tries them.
const NVRTC_NAMES: [&str; 4] = match cfg!(windows) {
    true => [
        "nvrtc.dll",
        "nvrtc64_130_0.dll",
        "nvrtc64_120_0.dll",
        "nvrtc64.dll",
    ],
    false => [
        "libnvrtc.so",
        "libnvrtc.so.13",
        "libnvrtc.so.12",
        "libnvrtc.so.11",
    ],
};

/// The file names of the cuBLASLt library.
const CUBLAS_LT_NAMES: [&str; 3] = match cfg!(windows) {
    true => ["cublasLt.dll", "cublasLt64_13.dll", "cublasLt64_12.dll"],
    false => ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"],
};

/// The headers that CUDA kernels include.
const HEADERS: [&str; 3] = ["cuda_fp16.h", "cuda_bf16.h", "mma.h"];

/// The CUDA version of driver R570. It is the oldest driver that has all functions that CubeCL calls
/// (`cuEventElapsedTime_v2`).
const OLDEST_DRIVER: (u32, u32) = (12, 8);

/// The version of the NVIDIA driver, and the number of GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaDriverInfo {
    /// The newest CUDA version that the driver supports, as major and minor version. For example, `(12, 4)` means CUDA
    /// 12.4.
    pub version: (u32, u32),
    /// The number of GPUs that are visible to this process.
    pub devices: usize,
}

/// An NVIDIA library that the dynamic linker finds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SharedLibrary {
    /// The major and the minor version of the library.
    pub version: (u32, u32),
    /// The path of the library file, or the file name that was opened if the system does not report the path.
    pub path: PathBuf,
}

/// The NVIDIA driver, compiler, headers and cuBLASLt on this machine. If one of them is missing, its field contains the
/// reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaToolkit {
    /// The NVIDIA driver.
    pub driver: Result<CudaDriverInfo, String>,
    /// The NVRTC library, which compiles kernels to PTX.
    pub nvrtc: Result<SharedLibrary, String>,
    /// The folder that contains the headers that kernels include.
    pub headers: Result<PathBuf, String>,
    /// The cuBLASLt library, which multiplies matrices. Matrix multiplications are slow without cuBLASLt.
    pub cublas_lt: Result<SharedLibrary, String>,
}

/// The reason why kernels cannot be compiled for the GPUs of this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}. {cure}")]
pub struct CudaProblem {
    /// The cause of the problem, for example a missing library.
    pub cause: String,
    /// The solution, for example a package to install.
    pub cure: String,
}

impl CudaToolkit {
    /// Finds the driver, the libraries and the headers. Libraries are opened, queried and closed again.
    pub fn find() -> Self {
        Self {
            driver: cuda_driver(),
            nvrtc: nvrtc(),
            headers: headers(cuda_include_folder()),
            cublas_lt: cublas_lt(),
        }
    }

    /// Checks that the driver, NVRTC and the headers are present and compatible.
    ///
    /// # Errors
    ///
    /// [`CudaProblem`] if one of them is missing, if the driver is older than R570, or if the PTX version that NVRTC
    /// writes is too new for the driver.
    pub fn check(&self) -> Result<(), CudaProblem> {
        let problem = |cause: String, cure: String| Err(CudaProblem { cause, cure });
        let driver = match &self.driver {
            Ok(driver) => driver.version,
            Err(reason) => {
                let cure = "Install the NVIDIA driver, R570 or newer";
                return problem(reason.clone(), cure.into());
            }
        };
        let (major, minor) = driver;
        if driver < OLDEST_DRIVER {
            let (oldest, minor_of_oldest) = OLDEST_DRIVER;
            return problem(
                format!(
                    "the NVIDIA driver supports CUDA {major}.{minor}: expected {oldest}.{minor_of_oldest} or newer. An older \
                     driver has no cuEventElapsedTime_v2, so kernels cannot be timed and tuned"
                ),
                "Install the NVIDIA driver R570 or newer".into(),
            );
        }
        let nvrtc = match &self.nvrtc {
            Ok(nvrtc) => nvrtc,
            Err(reason) => {
                let cause = format!("NVRTC, which compiles kernels, cannot be opened ({reason})");
                return problem(cause, install_nvrtc(driver));
            }
        };
        if ptx_version(nvrtc.version) > ptx_version(driver) {
            let (of_nvrtc, of_driver) = (shown_ptx(nvrtc.version), shown_ptx(driver));
            let ((a, b), path) = (nvrtc.version, nvrtc.path.display());
            return problem(
                format!(
                    "NVRTC {a}.{b} ({path}) writes {of_nvrtc}, but the driver, which supports CUDA {major}.{minor}, \
                     reads at most {of_driver}"
                ),
                format!("{}, or a newer driver", install_nvrtc(driver)),
            );
        }
        match &self.headers {
            Ok(_) => Ok(()),
            Err(reason) => problem(
                format!("the CUDA headers, which kernels include, are missing ({reason})"),
                format!(
                    "Install the CUDA toolkit {major}.{minor}, or set CUDA_PATH to a folder with {} in its folder include",
                    HEADERS.join(", ")
                ),
            ),
        }
    }
}

/// Returns an instruction to install an NVRTC version that is compatible with the driver.
fn install_nvrtc((major, minor): (u32, u32)) -> String {
    // From CUDA 13 on, package names contain no version.
    let package = match major {
        ..=12 => format!("nvidia-cuda-nvrtc-cu{major}"),
        _ => "nvidia-cuda-nvrtc".into(),
    };
    format!(
        "Install an NVRTC of at most CUDA {major}.{minor} (pip install \"{package}=={major}.{minor}.*\") and add the folder \
         of its library to LD_LIBRARY_PATH"
    )
}

/// Returns the PTX version of a CUDA version, according to the PTX release notes. NVRTC of this CUDA version writes
/// this PTX version, and a driver for this CUDA version can read it. Returns `(0, 0)` for CUDA versions before 11.
fn ptx_version((major, minor): (u32, u32)) -> (u32, u32) {
    match (major, minor) {
        // CUDA 12.6 did not change PTX.
        (12, 6..) => (8, minor - 1),
        (12, _) => (8, minor),
        (11, _) => (7, minor),
        (13.., _) => (major - 4, minor),
        _ => (0, 0),
    }
}

fn shown_ptx(cuda: (u32, u32)) -> String {
    let (major, minor) = ptx_version(cuda);
    format!("PTX {major}.{minor}")
}

/// Returns the folder in which CubeCL looks for the CUDA headers, or `None` if no CUDA folder is known.
fn cuda_include_folder() -> Option<PathBuf> {
    let known = || {
        let folders = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
        let found = folders.into_iter().find(|folder| folder.exists());
        found.or_else(|| Path::new("/usr/bin/nvcc").exists().then(|| "/usr".into()))
    };
    let cuda = env::var_os("CUDA_PATH").map(PathBuf::from).or_else(known);
    cuda.map(|cuda| cuda.join("include"))
}

fn headers(folder: Option<PathBuf>) -> Result<PathBuf, String> {
    let folder = folder.ok_or("CUDA_PATH is not set, and /usr/local/cuda does not exist")?;
    let missing = HEADERS.iter().find(|name| !folder.join(name).is_file());
    match missing {
        Some(name) => Err(format!("{} has no {name}", folder.display())),
        None => Ok(folder),
    }
}

/// Queries the version of the NVIDIA driver and the number of GPUs.
///
/// # Errors
/// If the driver is not installed, or if the driver returns an error.
pub fn cuda_driver() -> Result<CudaDriverInfo, String> {
    let name = if cfg!(windows) {
        "nvcuda.dll"
    } else {
        "libcuda.so.1"
    };
    let (mut version, mut devices): (c_int, c_int) = (0, 0);
    let missing = |error: libloading::Error| format!("cannot load {name}: {error}");
    // SAFETY: the driver API declares `cuDriverGetVersion(int*)`, `cuInit(unsigned)` and `cuDeviceGetCount(int*)`. The
    // result of each function is an int.
    let codes = unsafe {
        let driver = Library::new(name).map_err(missing)?;
        let get_version: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
            driver.get(b"cuDriverGetVersion").map_err(missing)?;
        let init: Symbol<unsafe extern "C" fn(u32) -> c_int> =
            driver.get(b"cuInit").map_err(missing)?;
        let count: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
            driver.get(b"cuDeviceGetCount").map_err(missing)?;
        [get_version(&mut version), init(0), count(&mut devices)]
    };
    match codes.into_iter().find(|code| *code != 0) {
        Some(code) => Err(format!("the CUDA driver reports error {code}")),
        None => Ok(CudaDriverInfo {
            version: (number(version / 1000), number(version % 1000 / 10)),
            devices: number(devices) as usize,
        }),
    }
}

fn nvrtc() -> Result<SharedLibrary, String> {
    // SAFETY: nvrtc.h declares `nvrtcResult nvrtcVersion(int*, int*)`. The result is an int.
    first_of(&NVRTC_NAMES, |library| unsafe {
        type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        let version: Symbol<GetVersion> = library.get(b"nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        version(&mut major, &mut minor);
        Ok(((number(major), number(minor)), *version as usize))
    })
}

fn cublas_lt() -> Result<SharedLibrary, String> {
    // SAFETY: cublasLt.h declares `size_t cublasLtGetVersion(void)`.
    first_of(&CUBLAS_LT_NAMES, |library| unsafe {
        let version: Symbol<unsafe extern "C" fn() -> usize> =
            library.get(b"cublasLtGetVersion")?;
        // 120904 is 12.9, and 130000 is 13.0.
        let code = version() as u32;
        Ok(((code / 10_000, code % 10_000 / 100), *version as usize))
    })
}

/// Finds an NVIDIA library under one of several names.
fn first_of(
    names: &[&str],
    query: impl Fn(&Library) -> Result<((u32, u32), usize), Box<dyn Error>>,
) -> Result<SharedLibrary, String> {
    match first_library(names, query) {
        Ok((version, path)) => Ok(SharedLibrary { version, path }),
        // Only the error for the first name is reported.
        Err(mut reasons) => Err(reasons.swap_remove(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolkit(driver: (u32, u32), nvrtc: (u32, u32)) -> CudaToolkit {
        let library = |version| SharedLibrary {
            version,
            path: "/opt/libnvrtc.so".into(),
        };
        CudaToolkit {
            driver: Ok(CudaDriverInfo {
                version: driver,
                devices: 1,
            }),
            nvrtc: Ok(library(nvrtc)),
            headers: Ok("/opt/cuda/include".into()),
            cublas_lt: Ok(library(nvrtc)),
        }
    }

    #[track_caller]
    fn assert_refused(toolkit: CudaToolkit, wanted: &[&str]) {
        let found = toolkit.check().unwrap_err().to_string();
        for part in wanted {
            assert!(found.contains(part), "{found}");
        }
    }

    #[test]
    fn an_nvrtc_that_the_driver_understands_is_accepted() {
        for (driver, nvrtc) in [
            ((12, 8), (12, 8)),
            ((13, 0), (12, 9)),
            ((13, 2), (13, 2)),
            ((13, 0), (13, 0)),
        ] {
            toolkit(driver, nvrtc).check().unwrap();
        }
        assert_eq!(ptx_version((12, 5)), ptx_version((12, 6)));
        assert_eq!(ptx_version((13, 2)), (9, 2));
        assert_eq!(ptx_version((12, 9)), (8, 8));
    }

    #[test]
    fn an_nvrtc_that_is_newer_than_the_driver_is_refused_with_both_versions() {
        assert_refused(
            toolkit((13, 0), (13, 2)),
            &[
                "NVRTC 13.2 (/opt/libnvrtc.so) writes PTX 9.2",
                "CUDA 13.0, reads at most PTX 9.0",
                "pip install \"nvidia-cuda-nvrtc==13.0.*\"",
            ],
        );
        assert_refused(
            toolkit((12, 8), (12, 9)),
            &["PTX 8.8", "PTX 8.7", "nvidia-cuda-nvrtc-cu12==12.8.*"],
        );
    }

    #[test]
    fn what_is_missing_is_refused_with_what_to_install() {
        let all = || toolkit((12, 8), (12, 8));
        assert_refused(
            toolkit((12, 4), (12, 4)),
            &["supports CUDA 12.4: expected 12.8", "R570 or newer"],
        );
        let driver = CudaToolkit {
            driver: Err(String::from("not there")),
            ..all()
        };
        assert_refused(driver, &["not there. Install the NVIDIA driver, R570"]);
        let nvrtc = CudaToolkit {
            nvrtc: Err(String::from("not there")),
            ..all()
        };
        assert_refused(
            nvrtc,
            &["NVRTC", "not there", "nvidia-cuda-nvrtc-cu12==12.8.*"],
        );
        let headers = CudaToolkit {
            headers: headers(Some("/nowhere".into())),
            ..all()
        };
        assert_refused(headers, &["/nowhere has no cuda_fp16.h", "CUDA_PATH"]);
        let without = CudaToolkit {
            cublas_lt: Err(String::from("not there")),
            ..all()
        };
        without.check().unwrap();
    }
}
