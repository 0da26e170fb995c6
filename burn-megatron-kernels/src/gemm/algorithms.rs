//! The algorithms of cuBLASLt that a run uses: those of the library's heuristic, unless others were chosen.
//!
//! [`time_algorithms`] times the candidates of the heuristic for each product of some work, and returns the fastest.
//! [`use_algorithms`] has later products computed by such choices. Nothing is timed otherwise: a choice changes the
//! order of sums, so all ranks of a run must use the same.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

/// A device and a version of cuBLASLt, for which an algorithm is chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmLibrary {
    /// The name of the device, by its driver.
    pub device: String,
    /// The version of cuBLASLt: 120901 is 12.9.1.
    pub cublaslt: usize,
}

/// Algorithms that were chosen by time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithms {
    /// The library with which they were timed.
    pub library: GemmLibrary,
    /// By product: its sizes, the layouts of its matrices, its types and its epilogue.
    pub products: BTreeMap<String, GemmAlgorithm>,
}

/// The fastest algorithm of a product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithm {
    /// `cublasLtMatmulAlgo_t`, which NVIDIA allows to be kept for the same version of the library.
    pub algorithm: [u64; 8],
    /// Its place among the candidates; the heuristic's own choice is 0.
    pub candidate: usize,
    /// The median times of all candidates in microseconds, in the order of the heuristic.
    pub microseconds: Vec<f64>,
}

/// The settings of [`time_algorithms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTiming {
    /// The most candidates of a product.
    pub candidates: usize,
    /// Measured rounds, in each of which every candidate has its turn.
    pub rounds: usize,
    /// Runs of a candidate in its turn.
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

/// The device and its version of cuBLASLt.
///
/// # Errors
///
/// Why there is none.
pub fn gemm_library(device: &Device) -> Result<GemmLibrary, String> {
    by::library(device)
}

/// Runs `work` with each of its products on `device` computed by every candidate in turn. Returns the fastest ones.
///
/// Products that are added to a buffer are added several times: what `work` computes must not be used. Calls from
/// several threads at once time each other's products.
///
/// # Errors
///
/// Why there is no cuBLASLt, or its error.
pub fn time_algorithms(
    device: &Device,
    timing: GemmTiming,
    work: impl FnOnce(),
) -> Result<GemmAlgorithms, String> {
    by::time(device, timing, work)
}

/// Computes later products on `device` by these algorithms, and the others as before. An algorithm that the library no
/// longer accepts is left out with a warning.
///
/// # Errors
///
/// If they were chosen for another device or version of the library, or there is no cuBLASLt.
pub fn use_algorithms(device: &Device, algorithms: &GemmAlgorithms) -> Result<(), String> {
    let own = gemm_library(device)?;
    if own != algorithms.library {
        return Err(format!(
            "the algorithms are those of {}, and this is {own}",
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
