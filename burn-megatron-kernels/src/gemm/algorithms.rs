//! The cuBLASLt algorithms of a run: the choice of the library's heuristic by default.
//!
//! [`time_algorithms`] times the candidates of the heuristic for each product of some work and
//! returns the fastest. [`use_algorithms`] makes later products use these algorithms. Nothing else
//! is timed. The algorithm determines the order of sums, so all ranks of a run must use the same
//! algorithms.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

/// A device and a version of cuBLASLt, for which algorithms are chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmLibrary {
    /// The name of the device as reported by its driver.
    pub device: String,
    /// The version of cuBLASLt, for example 120901 for 12.9.1.
    pub cublaslt: usize,
}

/// Algorithms that were chosen by timing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithms {
    /// The library with which the algorithms were timed.
    pub library: GemmLibrary,
    /// The algorithms, keyed by product: its sizes, the layouts of its matrices, its types and its
    /// epilogue.
    pub products: BTreeMap<String, GemmAlgorithm>,
}

/// The fastest algorithm of a product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithm {
    /// The `cublasLtMatmulAlgo_t`. NVIDIA allows storing it for the same version of the library.
    pub algorithm: [u64; 8],
    /// The index among the candidates. Index 0 is the choice of the heuristic.
    pub candidate: usize,
    /// The median times of all candidates in microseconds, in the order of the heuristic.
    pub microseconds: Vec<f64>,
}

/// The settings of [`time_algorithms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTiming {
    /// The maximum number of candidates per product.
    pub candidates: usize,
    /// The number of measured rounds. Every candidate runs once per round.
    pub rounds: usize,
    /// The number of runs of a candidate per round.
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

/// Returns the device and its version of cuBLASLt.
///
/// # Errors
///
/// Returns the reason if cuBLASLt is not available.
pub fn gemm_library(device: &Device) -> Result<GemmLibrary, String> {
    by::library(device)
}

/// Runs `work`, computes each of its products on `device` with every candidate, and returns the
/// fastest candidates.
///
/// Products that are added to a buffer are added several times, so the results of `work` must not
/// be used. Concurrent calls from several threads also time each other's products.
///
/// # Errors
///
/// Returns the reason if cuBLASLt is not available, or its error.
pub fn time_algorithms(
    device: &Device,
    timing: GemmTiming,
    work: impl FnOnce(),
) -> Result<GemmAlgorithms, String> {
    by::time(device, timing, work)
}

/// Makes later products on `device` use these algorithms. Products without an algorithm stay
/// unchanged. An algorithm that the library no longer accepts is skipped with a warning.
///
/// # Errors
///
/// Returns an error if the algorithms were chosen for another device or library version, or if
/// cuBLASLt is not available.
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
