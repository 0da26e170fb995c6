//! The GPT data set of Megatron: the samples of one part (training, validation or test) of token files.

use std::ops::Range;
use std::sync::Arc;

use serde_json::json;

use super::{Epochs, GptIndices, IndexCache, SamplingError, Split, SplitPart};
use crate::indexed::IndexedDataset;
use crate::{DataError, IGNORE, Sample, Samples};

/// Samples whose total number is finite and known.
pub trait FiniteSamples: Samples {
    /// Returns the total number of samples.
    fn count(&self) -> u64;
}

/// Options of the GPT data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptOptions {
    /// The number of tokens per sample.
    pub seq: usize,
    /// The random seed for the order of documents and samples. It must fit into 32 bits, as in NumPy's generator.
    pub seed: u64,
    /// The end-of-document token, if the documents have one.
    pub eod: Option<i32>,
    /// Whether the target of each end-of-document token is ignored.
    pub eod_mask_loss: bool,
    /// Whether a new document starts after each end-of-document token: tokens then do not attend to earlier documents,
    /// and positions restart.
    pub reset_attention: bool,
    /// Whether the incomplete last sample of the validation part is dropped. In the other parts, an incomplete last
    /// sample is always dropped.
    pub drop_last: bool,
    /// Whether samples read one additional token, which is the last target. If false, the last target of each sample is
    /// ignored.
    pub extra_token: bool,
    /// The vocabulary size. If it is set, all tokens are checked to be smaller.
    pub vocabulary: Option<usize>,
}

impl GptOptions {
    /// Creates options with the defaults of Megatron, for samples of `seq` tokens.
    pub fn new(seq: usize, seed: u64) -> Self {
        Self {
            seq,
            seed,
            eod: None,
            eod_mask_loss: false,
            reset_attention: false,
            drop_last: true,
            extra_token: true,
            vocabulary: None,
        }
    }

    /// Checks the options, and returns the seed.
    pub(crate) fn check(&self) -> Result<u32, DataError> {
        if self.seq == 0 {
            return Err(DataError::ZeroLength);
        }
        let wanted = match (self.eod_mask_loss, self.reset_attention) {
            (true, _) => Some("eod_mask_loss"),
            (_, true) => Some("reset_attention"),
            (false, false) => None,
        };
        if let (Some(what), None) = (wanted, self.eod) {
            return Err(SamplingError::NoEod(what).into());
        }
        Ok(u32::try_from(self.seed).map_err(|_| SamplingError::Seed(self.seed))?)
    }
}

/// The samples of one part of token files (training, validation or test), in the same order as in Megatron.
///
/// The document index contains the sequences of the token file. In most files, each sequence is one document.
pub struct GptDataset {
    file: Arc<IndexedDataset>,
    indices: GptIndices,
    options: GptOptions,
}

impl GptDataset {
    /// Creates a data set of at least `samples` samples, with the necessary number of epochs. `None` means one epoch.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for invalid options or too few tokens; [`CacheError`](super::CacheError) if the indices cannot
    /// be cached.
    pub fn new(
        file: Arc<IndexedDataset>,
        split: &Split,
        part: SplitPart,
        samples: Option<u64>,
        options: &GptOptions,
        cache: Option<&IndexCache>,
    ) -> Result<Self, DataError> {
        let seed = options.check()?;
        let (seq, extra) = (options.seq, usize::from(options.extra_token));
        let range = part_range(&file, split, part)?;
        let lengths: Vec<i32> = file.lengths().collect();
        let tokens = lengths[range.clone()].iter().map(|x| *x as u64).sum();
        let drop_last = part != SplitPart::Valid || options.drop_last;
        // Without tokens an epoch never ends. With fewer than `needed` tokens there is no sample.
        let needed = if drop_last { seq + extra } else { 1 + extra };
        let epochs = match tokens {
            0 => None,
            _ => Some(Epochs::new(tokens, seq, extra, samples, drop_last)?),
        };
        let Some(epochs) = epochs.filter(|epochs| epochs.samples > 0) else {
            return Err(SamplingError::TooFewTokens {
                prefix: file.prefix().to_path_buf(),
                part,
                tokens,
                sequences: range.len(),
                all_sequences: lengths.len(),
                seq,
                needed,
            }
            .into());
        };
        let build = || GptIndices::build(&lengths, range.clone(), &epochs, seq, extra, seed);
        let indices = match cache {
            None => build()?,
            Some(cache) => {
                let description = json!({
                    "what": "GPT indices, version 1",
                    "file": file.fingerprint(),
                    "sequences": [range.start, range.end],
                    "seq": seq,
                    "seed": seed,
                    "extra_token": options.extra_token,
                    "epochs": epochs.count,
                    "samples": epochs.samples,
                    "before_last": epochs.before_last,
                });
                let arrays = cache.arrays(&description, || {
                    let indices = build()?;
                    Ok(vec![
                        ("document_index", indices.documents),
                        ("sample_index", indices.samples),
                        ("shuffle_index", indices.shuffle),
                    ])
                })?;
                let [documents, samples, shuffle] =
                    arrays.try_into().expect("the description has 3 arrays");
                GptIndices {
                    documents,
                    samples,
                    shuffle,
                }
            }
        };
        Ok(Self {
            file,
            indices,
            options: options.clone(),
        })
    }

    /// Returns the document, sample and shuffle indices of the data set.
    pub fn indices(&self) -> &GptIndices {
        &self.indices
    }

    /// Returns the tokens of a sample, including the extra token. An incomplete last sample has fewer tokens.
    fn text(&self, number: u64) -> Result<Vec<i32>, DataError> {
        let samples = self.count();
        if number >= samples {
            return Err(SamplingError::NoSuchSample { number, samples }.into());
        }
        let GptIndices {
            documents,
            samples,
            shuffle,
        } = &self.indices;
        let begins = samples.len() / 2 - 1;
        let sample = self.checked(shuffle.get(number as usize), begins, "sample")?;
        let place = samples.get(2 * sample);
        let mut place = self.checked(place, documents.len(), "place")?;
        let mut offset = samples.get(2 * sample + 1) as usize;
        let wanted = self.options.seq + usize::from(self.options.extra_token);
        let mut text = Vec::with_capacity(wanted);
        while text.len() < wanted && place < documents.len() {
            let sequences = self.file.sequences();
            let sequence = self.checked(documents.get(place), sequences, "sequence")?;
            let length = self.file.length(sequence).unwrap_or(0);
            let taken = (wanted - text.len()).min(length.saturating_sub(offset));
            let first = text.len();
            self.file.read(sequence, offset, taken, &mut text)?;
            check_vocabulary(
                &self.file,
                sequence,
                &text[first..],
                self.options.vocabulary,
            )?;
            (place, offset) = (place + 1, 0);
        }
        Ok(text)
    }

    /// Checks that a value of an index is below `len`, and returns it.
    fn checked(&self, found: i64, len: usize, what: &'static str) -> Result<usize, SamplingError> {
        let fits = usize::try_from(found).ok().filter(|found| *found < len);
        fits.ok_or_else(|| SamplingError::ForeignIndex {
            prefix: self.file.prefix().to_path_buf(),
            what,
            found,
            len,
        })
    }
}

impl Samples for GptDataset {
    fn seq(&self) -> usize {
        self.options.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let seq = self.options.seq;
        let mut tokens = self.text(number)?;
        let mut targets = tokens.get(1..).unwrap_or_default().to_vec();
        // The sample may be incomplete, or have no extra token.
        targets.resize(seq, IGNORE);
        let real = tokens.len().min(seq);
        tokens.resize(seq, 0);
        let mut sample = Sample {
            tokens,
            targets,
            documents: vec![],
            padding: seq - real,
        };
        if let Some(eod) = self.options.eod {
            let GptOptions {
                eod_mask_loss,
                reset_attention,
                ..
            } = self.options;
            mask_eod(&mut sample, real, eod, eod_mask_loss, reset_attention);
        }
        Ok(sample)
    }
}

impl FiniteSamples for GptDataset {
    fn count(&self) -> u64 {
        self.indices.shuffle.len() as u64
    }
}

/// Processes the ends of documents among the first `real` tokens: ignores the targets after them with `mask`, and
/// starts a new document after them with `reset`.
fn mask_eod(sample: &mut Sample, real: usize, eod: i32, mask: bool, reset: bool) {
    let ends: Vec<usize> = (0..real)
        .filter(|place| sample.tokens[*place] == eod)
        .collect();
    if mask {
        ends.iter().for_each(|end| sample.targets[*end] = IGNORE);
    }
    if reset {
        let begins = ends
            .iter()
            .map(|end| end + 1)
            .filter(|begin| *begin < sample.tokens.len());
        sample.documents = std::iter::once(0).chain(begins).collect();
    }
}

/// Returns the range of sequences of a part.
pub(crate) fn part_range(
    file: &IndexedDataset,
    split: &Split,
    part: SplitPart,
) -> Result<Range<usize>, SamplingError> {
    let range = split.range(part, file.sequences());
    range.ok_or_else(|| SamplingError::NoPart {
        split: split.to_string(),
        part,
    })
}

/// Checks that all tokens are below `vocabulary`.
pub(crate) fn check_vocabulary(
    file: &IndexedDataset,
    sequence: usize,
    tokens: &[i32],
    vocabulary: Option<usize>,
) -> Result<(), SamplingError> {
    let Some(vocabulary) = vocabulary else {
        return Ok(());
    };
    match tokens.iter().max() {
        Some(&token) if token as usize >= vocabulary => Err(SamplingError::BeyondVocabulary {
            prefix: file.prefix().to_path_buf(),
            sequence,
            token,
            vocabulary,
        }),
        _ => Ok(()),
    }
}
