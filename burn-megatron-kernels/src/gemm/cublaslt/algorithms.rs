//! The selection of the algorithm for a matrix multiplication. It is the choice of the heuristic, a stored algorithm,
//! or all candidates if they are timed.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::tensor::Device;
use cudarc::driver::result::stream::synchronize;
use cudarc::driver::sys::CUstream;

use super::CublasLt;
use super::plan::{Algorithm, AlgorithmSource};
use crate::gemm::algorithms::{GemmAlgorithm, GemmAlgorithms, GemmLibrary, GemmTiming};
use crate::gemm::request::Request;

/// The algorithms of a device that are used instead of the heuristic's choices.
#[derive(Debug, Default)]
pub(super) struct Choices {
    chosen: Mutex<HashMap<String, [u64; 8]>>,
    timing: Mutex<Option<(GemmTiming, Timed)>>,
}

/// The multiplications that have been timed, and their fastest algorithms.
type Timed = Arc<Mutex<BTreeMap<String, GemmAlgorithm>>>;

impl Choices {
    /// Returns the source of the algorithm for the plan of a multiplication.
    pub(super) fn source(&self, request: &Request) -> AlgorithmSource {
        if let Some((timing, _)) = &*lock(&self.timing) {
            return AlgorithmSource::Candidates(timing.candidates.max(1));
        }
        let chosen = lock(&self.chosen).get(&request.to_string()).copied();
        chosen.map_or(AlgorithmSource::Heuristic, AlgorithmSource::Chosen)
    }

    /// Returns the timing of the next multiplication with this request, or `None` if it is not timed.
    pub(super) fn timing_of(&self, request: &Request) -> Option<ProductTiming> {
        let timing = lock(&self.timing);
        let (timing, timed) = timing.as_ref()?;
        Some(ProductTiming {
            product: request.to_string(),
            timing: *timing,
            timed: timed.clone(),
        })
    }
}

/// The timing of a multiplication. It runs on the thread that submits the multiplication.
pub(super) struct ProductTiming {
    product: String,
    timing: GemmTiming,
    timed: Timed,
}

impl ProductTiming {
    /// Runs and times the candidates. If the multiplication has already been timed, runs only the first candidate.
    pub(super) fn run(
        self,
        candidates: &[Algorithm],
        stream: CUstream,
        run: impl Fn(&Algorithm) -> Result<(), String>,
    ) -> Result<(), String> {
        if lock(&self.timed).contains_key(&self.product) {
            return candidates.first().map_or(Ok(()), run);
        }
        let wait = || {
            // SAFETY: the multiplications are on this stream.
            unsafe { synchronize(stream) }.map_err(|error| format!("{error:?}"))
        };
        for algorithm in candidates {
            run(algorithm)?;
        }
        wait()?;
        let mut times = vec![vec![]; candidates.len()];
        for _ in 0..self.timing.rounds.max(1) {
            for (algorithm, times) in candidates.iter().zip(&mut times) {
                let start = Instant::now();
                let runs = self.timing.runs.max(1);
                for _ in 0..runs {
                    run(algorithm)?;
                }
                wait()?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / runs as f64);
            }
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        let fastest = (0..medians.len()).min_by(|a, b| medians[*a].total_cmp(&medians[*b]));
        if let Some(candidate) = fastest {
            let chosen = GemmAlgorithm {
                algorithm: candidates[candidate].words(),
                candidate,
                microseconds: medians,
            };
            lock(&self.timed).insert(self.product, chosen);
        }
        Ok(())
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the engine of a device.
fn engine(device: &Device) -> Result<Arc<CublasLt>, String> {
    let other = || Err(format!("cuBLASLt is for CUDA devices, not for {device:?}"));
    CublasLt::on(device).unwrap_or_else(other)
}

impl CublasLt {
    /// Drops all plans, because their algorithms may change.
    fn plan_again(&self) {
        lock(&self.plans).clear();
    }
}

/// Returns the library. See [`gemm_library`](crate::gemm::algorithms::gemm_library).
pub(in crate::gemm) fn library(device: &Device) -> Result<GemmLibrary, String> {
    let engine = engine(device)?;
    Ok(GemmLibrary {
        device: engine.submitter.name()?,
        cublaslt: engine.chip.version,
    })
}

/// Times the algorithms. See [`time_algorithms`](crate::gemm::algorithms::time_algorithms).
pub(in crate::gemm) fn time(
    device: &Device,
    timing: GemmTiming,
    work: impl FnOnce(),
) -> Result<GemmAlgorithms, String> {
    let (library, engine) = (library(device)?, engine(device)?);
    let timed = Timed::default();
    *lock(&engine.choices.timing) = Some((timing, timed.clone()));
    engine.plan_again();
    work();
    // After this call, all submitted work has run.
    let ended = engine.submitter.wait(|| Ok(()));
    *lock(&engine.choices.timing) = None;
    engine.plan_again();
    ended?;
    let products = lock(&timed).clone();
    Ok(GemmAlgorithms { library, products })
}

/// Uses the algorithms. See [`use_algorithms`](crate::gemm::algorithms::use_algorithms).
pub(in crate::gemm) fn choose(device: &Device, algorithms: &GemmAlgorithms) -> Result<(), String> {
    let engine = engine(device)?;
    let products = algorithms.products.iter();
    *lock(&engine.choices.chosen) = products
        .map(|(product, chosen)| (product.clone(), chosen.algorithm))
        .collect();
    engine.plan_again();
    Ok(())
}
