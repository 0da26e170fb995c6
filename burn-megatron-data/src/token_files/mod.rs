//! A [`Dataset`] of token files.

mod sidecar;

use std::path::PathBuf;
use std::sync::Arc;

use indicatif::HumanCount;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::blend::{
    BlendedDataset, build_blending_indices, build_exhaustive_blending_indices, normalize, sizes,
};
use super::gpt::{
    FiniteSamples, GptDataset, GptOptions, IndexCache, SamplingError, Split, SplitPart,
};
use super::indexed::IndexedDataset;
use super::pack::PackedSamples;
use super::{DataError, Dataset, Sample, Samples, Sampling};
use crate::tokenizer::TokenFileInfo;

/// The seed of held-out samples. It is the same in all runs, so that their losses are comparable.
const HELD_OUT_SEED: u64 = 1234;

/// The maximum number of files that a description lists.
const MAX_NAMED_FILES: usize = 4;

/// A token file of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenFile {
    /// The path prefix: the path of the `.bin` and `.idx` files without these extensions.
    pub prefix: PathBuf,
    /// The weight of the file: the relative share of the samples that are from this file. Either all files have a
    /// weight or no file has a weight. Without weights, each sample is used once.
    pub weight: Option<f64>,
}

/// Settings for reading and sampling token files.
///
/// ```
/// use burn_megatron_data::indexed::{IndexedDatasetBuilder, TokenType};
/// use burn_megatron_data::{Dataset, Sampling, TokenFile, TokenFilesConfig};
///
/// let folder = tempfile::tempdir()?;
/// let prefix = folder.path().join("corpus");
/// let mut writer = IndexedDatasetBuilder::create(&prefix, TokenType::for_vocabulary(256))?;
/// for first in 0..20 {
///     writer.document(&[first, first + 1, first + 2, first + 3])?;
/// }
/// writer.finish()?;
/// let config = TokenFilesConfig {
///     vocabulary: Some(256),
///     split: "80,20".parse()?,
///     ..TokenFilesConfig::new(vec![TokenFile { prefix, weight: None }])
/// };
/// let data = config.open()?;
/// let samples = data.training(&Sampling { seq: 8, seed: 1, samples: 4 })?;
/// assert_eq!(samples.sample(0)?.tokens.len(), 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenFilesConfig {
    /// The token files of the data set.
    pub files: Vec<TokenFile>,
    /// The split of the sequences of each file into training, validation and test parts.
    pub split: Split,
    /// The cache of sample indices. With `None`, each process builds the indices in memory.
    pub cache: Option<IndexCache>,
    /// The end-of-document token. With `None`, the token is read from the sidecar files.
    pub eod: Option<i32>,
    /// Whether the target of each end-of-document token is ignored: see [`GptOptions::eod_mask_loss`].
    pub eod_mask_loss: bool,
    /// Whether a token only attends to tokens of its own document, and positions restart in each document: see
    /// [`GptOptions::reset_attention`].
    pub reset_attention: bool,
    /// Whether the incomplete last sample of the validation part is dropped: see [`GptOptions::drop_last`].
    pub drop_last: bool,
    /// Whether several documents are packed into one sample: see [`PackedSamples`].
    pub packing: bool,
    /// The vocabulary size. With `None`, the vocabulary size is read from the sidecar files.
    pub vocabulary: Option<usize>,
}

impl TokenFilesConfig {
    /// Creates settings for the given files, with the defaults of Megatron.
    pub fn new(files: Vec<TokenFile>) -> Self {
        Self {
            files,
            split: Split::default(),
            cache: None,
            eod: None,
            eod_mask_loss: false,
            reset_attention: false,
            drop_last: true,
            packing: false,
            vocabulary: None,
        }
    }

    /// Opens the token files.
    ///
    /// # Errors
    ///
    /// [`DataError`] if files cannot be read, if their sidecar files contradict each other, or if an option has no
    /// effect together with another option.
    pub fn open(self) -> Result<TokenFiles, DataError> {
        TokenFiles::open(self)
    }
}

/// A [`Dataset`] of token files.
pub struct TokenFiles {
    config: TokenFilesConfig,
    files: Vec<Arc<IndexedDataset>>,
    /// The weights, normalized to sum to 1.
    weights: Option<Vec<f64>>,
    eod: Option<i32>,
    vocabulary: usize,
    bytes_per_token: f64,
    fingerprint: u64,
    /// The training samples, shared by the ranks of this process.
    training: Mutex<Option<(Sampling, Arc<dyn FiniteSamples>)>>,
}

impl TokenFiles {
    fn open(config: TokenFilesConfig) -> Result<Self, DataError> {
        let weights = normalized_weights(&config.files)?;
        for (on, what) in [
            (config.reset_attention, "reset_attention"),
            (!config.drop_last, "drop_last = false"),
        ] {
            if config.packing && on {
                return Err(SamplingError::Ignored(what, "packing").into());
            }
        }
        let open = |file: &TokenFile| IndexedDataset::open(&file.prefix).map(Arc::new);
        let files: Vec<_> = config.files.iter().map(open).collect::<Result<_, _>>()?;
        let prefixes: Vec<_> = config.files.iter().map(|file| &*file.prefix).collect();
        let beside = sidecar::read(&prefixes)?;
        let prefix = &config.files[0].prefix;
        let known = beside.iter().find_map(|sidecar| sidecar.vocabulary);
        let known = config.vocabulary.or(known);
        let vocabulary = known.ok_or_else(|| SamplingError::NoVocabulary {
            prefix: prefix.clone(),
            sidecar: TokenFileInfo::path(prefix),
        })?;
        let eod = beside
            .iter()
            .find_map(|info| info.eod)
            .map(i32::try_from)
            .transpose()
            .map_err(|_| SamplingError::Eod(prefix.clone()))?;
        let mut opened = Self {
            eod: config.eod.or(eod),
            vocabulary,
            bytes_per_token: sidecar::bytes_per_token(&beside, weights.as_deref()),
            weights,
            files,
            fingerprint: 0,
            training: Mutex::new(None),
            config,
        };
        opened.fingerprint = opened.hash();
        Ok(opened)
    }

    /// Returns a hash of everything that determines the samples, except the paths of the files.
    fn hash(&self) -> u64 {
        let files: Vec<u64> = self.files.iter().map(|file| file.fingerprint()).collect();
        let TokenFilesConfig {
            split,
            eod_mask_loss,
            reset_attention,
            drop_last,
            packing,
            ..
        } = &self.config;
        let all = (files, &self.weights, self.eod, self.vocabulary, split);
        let flags = [eod_mask_loss, reset_attention, drop_last, packing];
        xxh3_64(format!("{all:?} {flags:?}").as_bytes())
    }

    /// Returns at most `max` samples of the test part. The same samples are always selected.
    ///
    /// # Errors
    ///
    /// The errors of [`Dataset::training`].
    pub fn test(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        self.evaluation(SplitPart::Test, seq, max)
    }

    /// Returns the samples of a part. If `samples` is set, at least this number of samples is returned. Otherwise, the
    /// samples of one epoch of each file are returned.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for invalid options or too few tokens; [`CacheError`](super::gpt::CacheError) if the indices
    /// cannot be cached.
    pub fn samples(
        &self,
        part: SplitPart,
        seq: usize,
        seed: u64,
        samples: u64,
    ) -> Result<Arc<dyn FiniteSamples>, DataError> {
        let cache = self.config.cache.as_ref();
        if let ([file], None) = (&self.files[..], &self.weights) {
            return self.dataset(file, part, seq, seed, Some(samples));
        }
        let (parts, weights, size) = match &self.weights {
            Some(weights) => {
                let sizes = sizes(weights, samples);
                let counts = sizes.iter().map(|(_, with_surplus)| Some(*with_surplus));
                let parts = self.datasets(part, seq, seed, counts)?;
                (parts, weights.clone(), sizes.iter().map(|x| x.0).sum())
            }
            None => {
                let parts = self.one_epoch(part, seq, seed)?;
                let counts = parts.iter().map(|part| part.count());
                let all = counts.clone().sum();
                if all < samples {
                    return Err(SamplingError::Exhausted {
                        samples: all,
                        seq,
                        wanted: samples,
                    }
                    .into());
                }
                let counts: Vec<f64> = counts.map(|count| count as f64).collect();
                (parts, normalize(&counts)?, samples)
            }
        };
        let blended = BlendedDataset::weighted(parts, &weights, size, cache)?;
        Ok(Arc::new(blended))
    }

    /// Returns the first samples of a blend of one epoch, until one of the files is exhausted. A part with a share of 0
    /// has no samples.
    fn evaluation(
        &self,
        part: SplitPart,
        seq: usize,
        max: usize,
    ) -> Result<Vec<Sample>, DataError> {
        if max == 0 || self.config.split.range(part, 0).is_none() {
            return Ok(vec![]);
        }
        let parts = self.one_epoch(part, seq, HELD_OUT_SEED)?;
        let counts: Vec<u64> = parts.iter().map(|part| part.count()).collect();
        let size = counts.iter().sum::<u64>().min(max as u64);
        let (datasets, samples) = match &self.weights {
            Some(weights) => build_blending_indices(weights, size),
            None => build_exhaustive_blending_indices(&counts),
        };
        let all = datasets.into_iter().zip(samples).take(size as usize);
        let left = |(dataset, sample): &(i16, i64)| (*sample as u64) < counts[*dataset as usize];
        all.take_while(left)
            .map(|(dataset, sample)| parts[dataset as usize].sample(sample as u64))
            .collect()
    }

    fn one_epoch(
        &self,
        part: SplitPart,
        seq: usize,
        seed: u64,
    ) -> Result<Vec<Arc<dyn FiniteSamples>>, DataError> {
        self.datasets(part, seq, seed, self.files.iter().map(|_| None))
    }

    fn datasets(
        &self,
        part: SplitPart,
        seq: usize,
        seed: u64,
        counts: impl Iterator<Item = Option<u64>>,
    ) -> Result<Vec<Arc<dyn FiniteSamples>>, DataError> {
        let each = self.files.iter().zip(counts);
        each.map(|(file, count)| self.dataset(file, part, seq, seed, count))
            .collect()
    }

    fn dataset(
        &self,
        file: &Arc<IndexedDataset>,
        part: SplitPart,
        seq: usize,
        seed: u64,
        count: Option<u64>,
    ) -> Result<Arc<dyn FiniteSamples>, DataError> {
        let options = GptOptions {
            eod: self.eod,
            eod_mask_loss: self.config.eod_mask_loss,
            reset_attention: self.config.reset_attention,
            drop_last: self.config.drop_last,
            vocabulary: Some(self.vocabulary),
            ..GptOptions::new(seq, seed)
        };
        let (file, split) = (Arc::clone(file), &self.config.split);
        Ok(if self.config.packing {
            Arc::new(PackedSamples::new(file, split, part, count, &options)?)
        } else {
            let cache = self.config.cache.as_ref();
            Arc::new(GptDataset::new(file, split, part, count, &options, cache)?)
        })
    }
}

impl Dataset for TokenFiles {
    fn describe(&self) -> String {
        let tokens = self.files.iter().map(|file| file.tokens());
        let tokens = HumanCount(tokens.sum());
        let name = |file: &TokenFile| match file.weight {
            Some(weight) => format!("{} (weight {weight})", file.prefix.display()),
            None => file.prefix.display().to_string(),
        };
        let mut names: Vec<_> = self
            .config
            .files
            .iter()
            .map(name)
            .take(MAX_NAMED_FILES)
            .collect();
        if self.files.len() > MAX_NAMED_FILES {
            names.push(format!("and {} more", self.files.len() - MAX_NAMED_FILES));
        }
        let packed = if self.config.packing { ", packed" } else { "" };
        format!(
            "{}: {tokens} tokens of a vocabulary of {}, split {}{packed}",
            names.join(", "),
            self.vocabulary,
            self.config.split,
        )
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn bytes_per_token(&self) -> f64 {
        self.bytes_per_token
    }

    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        let mut training = self.training.lock();
        if let Some((_, made)) = training.as_ref().filter(|made| made.0 == *sampling) {
            return Ok(made.clone());
        }
        let Sampling { seq, seed, samples } = *sampling;
        let made = self.samples(SplitPart::Train, seq, seed, samples)?;
        *training = Some((*sampling, Arc::clone(&made)));
        Ok(made)
    }

    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        self.evaluation(SplitPart::Valid, seq, max)
    }
}

/// Returns the normalized weights; `None` if no file has a weight.
fn normalized_weights(files: &[TokenFile]) -> Result<Option<Vec<f64>>, SamplingError> {
    let weights: Vec<f64> = files.iter().filter_map(|file| file.weight).collect();
    match (files.len(), weights.len()) {
        (0, _) => Err(SamplingError::Files(0)),
        (_, 0) => Ok(None),
        (files, with) if with < files => Err(SamplingError::SomeWeights { with, files }),
        _ => normalize(&weights).map(Some),
    }
}

#[cfg(test)]
mod tests;
