//! The choice of cuBLASLt algorithms for matrix multiplications. By default, cuBLASLt selects an algorithm by its
//! heuristic.
//!
//! [`time_algorithms`] runs a closure, times several algorithms for each matrix multiplication of the closure, and
//! returns the fastest algorithms. [`use_algorithms`] makes later multiplications use these algorithms. Without a call
//! of [`time_algorithms`], nothing is timed. The algorithm determines the order of summation, so all ranks of a run
//! must use the same algorithms.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

/// A device and its cuBLASLt version. An algorithm is valid only for the device and version with which it was timed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmLibrary {
    /// The name of the device, as reported by its driver.
    pub device: String,
    /// The version number of cuBLASLt, for example 120901 for version 12.9.1.
    pub cublaslt: usize,
}

/// The fastest algorithms of matrix multiplications, as measured by [`time_algorithms`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithms {
    /// The device and the library version with which the algorithms were timed.
    pub library: GemmLibrary,
    /// The fastest algorithm for each matrix multiplication. The key describes the multiplication: its sizes, the
    /// layouts of its matrices, its types and its epilogue.
    pub products: BTreeMap<String, GemmAlgorithm>,
}

/// The fastest cuBLASLt algorithm for one matrix multiplication, with the measured times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithm {
    /// The contents of the `cublasLtMatmulAlgo_t` of the algorithm. NVIDIA allows storing it for later use with the
    /// same version of the library.
    pub algorithm: [u64; 8],
    /// The index of the algorithm in the list of candidates. Candidate 0 is the choice of the heuristic.
    pub candidate: usize,
    /// The median time of each candidate in microseconds. The candidates are in the order in which the heuristic
    /// returns them.
    pub microseconds: Vec<f64>,
}

/// Options of [`time_algorithms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTiming {
    /// The maximum number of candidate algorithms per matrix multiplication.
    pub candidates: usize,
    /// The number of measured rounds. In each round, all candidates are timed one after the other.
    pub rounds: usize,
    /// The number of times that each candidate runs per round.
    pub runs: usize,
}

impl Display for GemmLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, cublaslt } = self;
        let (major, minor) = (cublaslt / 10_000, cublaslt / 100 % 100);
        write!(
            f,
            "{device} with cuBLASLt {major}.{minor}.{}",
            cublaslt % 100
        )
    }
}

/// Returns the name of a device and the version of its cuBLASLt library.
///
/// # Errors
///
/// Returns an error message with the reason if cuBLASLt is not available.
pub fn gemm_library(device: &Device) -> Result<GemmLibrary, String> {
    by::library(device)
}

/// Runs `work` and times each of its matrix multiplications on `device` with every candidate algorithm. Returns the
/// fastest algorithms.
///
/// A multiplication that accumulates into a buffer runs several times, so the values that `work` computes are wrong and
/// must not be used. If several threads call this function at the same time, each call also times the multiplications
/// of the other threads.
///
/// # Errors
///
/// Returns an error message if cuBLASLt is not available or fails.
pub fn time_algorithms(
    device: &Device,
    timing: GemmTiming,
    work: impl FnOnce(),
) -> Result<GemmAlgorithms, String> {
    by::time(device, timing, work)
}

/// Makes later matrix multiplications on `device` use these algorithms. A multiplication without an algorithm in
/// `algorithms` uses the heuristic. An algorithm that the library rejects is skipped with a warning.
///
/// # Errors
///
/// Returns an error if the algorithms were timed on another device or with another library version, or if cuBLASLt is
/// not available.
pub fn use_algorithms(device: &Device, algorithms: &GemmAlgorithms) -> Result<(), String> {
    let own = gemm_library(device)?;
    if own != algorithms.library {
        return Err(format!(
            "the algorithms were chosen on {}, but this device is {own}: choose them again on this device",
            algorithms.library
        ));
    }
    by::choose(device, algorithms)
}

#[cfg(feature = "cuda")]
use super::cublaslt::algorithms as by;

#[cfg(not(feature = "cuda"))]
mod by {
    use super::{Device, GemmAlgorithms, GemmLibrary, GemmTiming};

    pub fn library(device: &Device) -> Result<GemmLibrary, String> {
        Err(refusal(device))
    }

    fn refusal(device: &Device) -> String {
        format!("cuBLASLt is for CUDA devices, with the feature `cuda`, not for {device:?}")
    }

    pub fn time(
        device: &Device,
        _timing: GemmTiming,
        _work: impl FnOnce(),
    ) -> Result<GemmAlgorithms, String> {
        Err(refusal(device))
    }

    pub fn choose(device: &Device, _algorithms: &GemmAlgorithms) -> Result<(), String> {
        Err(refusal(device))
    }
}
