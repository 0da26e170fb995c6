//! The samples of a blend.

use std::sync::Arc;

use serde_json::json;

use super::{build_blending_indices, build_exhaustive_blending_indices};
use crate::gpt::{FiniteSamples, IndexCache, NpyArray, SamplingError};
use crate::{DataError, Sample, Samples};

/// A blend: samples of several data sets that are mixed by weight.
pub struct BlendedDataset {
    parts: Vec<Arc<dyn FiniteSamples>>,
    /// The data set of each sample: `[count]`.
    datasets: NpyArray,
    /// The index of the sample in its data set: `[count]`.
    samples: NpyArray,
}

impl BlendedDataset {
    /// Creates a blend of `size` samples. About `weights[d] * size` samples are from data set `d`. The weights must sum
    /// to 1.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] if there are no data sets, if their samples have different lengths, or if a data set has too
    /// few samples. [`CacheError`](crate::gpt::CacheError) if the indices cannot be cached.
    pub fn weighted(
        parts: Vec<Arc<dyn FiniteSamples>>,
        weights: &[f64],
        size: u64,
        cache: Option<&IndexCache>,
    ) -> Result<Self, DataError> {
        if weights.len() != parts.len() {
            return Err(SamplingError::Weights(weights.to_vec()).into());
        }
        // Weights are written as text, which keeps all bits.
        let texts: Vec<String> = weights.iter().map(f64::to_string).collect();
        let description = json!({
            "what": "weighted blend, version 1",
            "weights": texts,
            "size": size,
        });
        let arrays = || build_blending_indices(weights, size);
        Self::new(parts, description, arrays, cache)
    }

    /// Creates a blend that contains each sample of each data set exactly once.
    ///
    /// # Errors
    ///
    /// The errors of [`weighted`](Self::weighted).
    pub fn exhaustive(
        parts: Vec<Arc<dyn FiniteSamples>>,
        cache: Option<&IndexCache>,
    ) -> Result<Self, DataError> {
        let counts: Vec<u64> = parts.iter().map(|part| part.count()).collect();
        let description = json!({ "what": "exhaustive blend, version 1", "counts": counts });
        let arrays = || build_exhaustive_blending_indices(&counts);
        Self::new(parts, description, arrays, cache)
    }

    fn new(
        parts: Vec<Arc<dyn FiniteSamples>>,
        description: serde_json::Value,
        arrays: impl FnOnce() -> (Vec<i16>, Vec<i64>),
        cache: Option<&IndexCache>,
    ) -> Result<Self, DataError> {
        check_parts(&parts)?;
        let build = || {
            let (datasets, samples) = arrays();
            let shape = [datasets.len()];
            vec![
                ("dataset_index", NpyArray::new(&datasets, &shape)),
                ("dataset_sample_index", NpyArray::new(&samples, &shape)),
            ]
        };
        let arrays = match cache {
            Some(cache) => cache.arrays(&description, || Ok(build()))?,
            None => build().into_iter().map(|(_, array)| array).collect(),
        };
        let [datasets, samples] = arrays.try_into().expect("the description has 2 arrays");
        let blended = Self {
            parts,
            datasets,
            samples,
        };
        for (number, taken) in blended.taken().into_iter().enumerate() {
            let samples = blended.parts[number].count();
            if taken > samples {
                return Err(SamplingError::Oversampled {
                    number,
                    taken,
                    samples,
                }
                .into());
            }
        }
        Ok(blended)
    }

    /// Returns the number of samples that the blend takes from each data set.
    pub fn taken(&self) -> Vec<u64> {
        let mut taken = vec![0; self.parts.len()];
        for number in self.datasets.iter() {
            taken[number as usize] += 1;
        }
        taken
    }
}

fn check_parts(parts: &[Arc<dyn FiniteSamples>]) -> Result<(), SamplingError> {
    let Some(first) = parts.first().filter(|_| parts.len() <= i16::MAX as usize) else {
        return Err(SamplingError::Files(parts.len()));
    };
    let seq = first.seq();
    let other = parts.iter().position(|part| part.seq() != seq);
    match other {
        Some(number) => Err(SamplingError::UnequalLengths {
            number,
            found: parts[number].seq(),
            seq,
        }),
        None => Ok(()),
    }
}

impl Samples for BlendedDataset {
    fn seq(&self) -> usize {
        self.parts[0].seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let samples = self.count();
        if number >= samples {
            return Err(SamplingError::NoSuchSample { number, samples }.into());
        }
        let (dataset, sample) = (
            self.datasets.get(number as usize),
            self.samples.get(number as usize),
        );
        self.parts[dataset as usize].sample(sample as u64)
    }
}

impl FiniteSamples for BlendedDataset {
    fn count(&self) -> u64 {
        self.datasets.len() as u64
    }
}
