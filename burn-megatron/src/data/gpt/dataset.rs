//! The samples of a part of token files.

use std::ops::Range;
use std::sync::Arc;

use serde_json::json;

use super::{Cache, Epochs, Indices, Part, SamplingError, Split};
use crate::data::indexed::IndexedFile;
use crate::data::{DataError, IGNORE, Sample, Samples};

/// Samples whose number is known.
pub trait FiniteSamples: Samples {
    /// How many there are: numbers are below it.
    fn count(&self) -> u64;
}

/// How samples are cut out of token files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptOptions {
    /// Tokens of a sample.
    pub seq: usize,
    /// Of the orders of documents and samples; NumPy's generator takes 32 bits.
    pub seed: u64,
    /// The token that ends a document.
    pub eod: Option<i32>,
    /// What follows the end of a document has no loss.
    pub eod_mask_loss: bool,
    /// Tokens see nothing of what stands before the end of a document, and positions begin at 0 after it.
    pub reset_attention: bool,
    /// Leaves out the sample of the validation part that is not full. The other parts never have it.
    pub drop_last: bool,
    /// Samples take one token more than they have, which is the last target. Without it the last target of
    /// each has no loss.
    pub extra_token: bool,
    /// Tokens must be below this.
    pub vocabulary: Option<usize>,
}

impl GptOptions {
    /// What Megatron does where nothing else is said, for samples of `seq` tokens.
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

    /// The seed, if the options fit one another.
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

/// The samples of a part of token files, in Megatron's order.
///
/// What the documents of other formats are, the sequences of the file are here: most files have one for each
/// document.
pub struct GptDataset {
    file: Arc<IndexedFile>,
    indices: Indices,
    options: GptOptions,
}

impl GptDataset {
    /// At least `samples` samples, over as many epochs as that takes; those of one epoch where no number is
    /// given.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] where the options or the tokens do not suffice;
    /// [`CacheError`](super::CacheError).
    pub fn new(
        file: Arc<IndexedFile>,
        split: &Split,
        part: Part,
        samples: Option<u64>,
        options: &GptOptions,
        cache: Option<&Cache>,
    ) -> Result<Self, DataError> {
        let seed = options.check()?;
        let (seq, extra) = (options.seq, usize::from(options.extra_token));
        let range = part_range(&file, split, part)?;
        let lengths: Vec<i32> = file.lengths().collect();
        let tokens = lengths[range.clone()].iter().map(|x| *x as u64).sum();
        let drop_last = part != Part::Valid || options.drop_last;
        // Without a token an epoch never ends; without one and an extra one the last sample has none.
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
                seq,
                needed,
            }
            .into());
        };
        let build = || Indices::build(&lengths, range.clone(), &epochs, seq, extra, seed);
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
                Indices {
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

    /// The indices.
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// The tokens of a sample, with the extra one: fewer where the last sample is not full.
    fn text(&self, number: u64) -> Result<Vec<i32>, DataError> {
        let samples = self.count();
        if number >= samples {
            return Err(SamplingError::NoSuchSample { number, samples }.into());
        }
        let Indices {
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

    /// A number out of an index, if it points somewhere.
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
        // A sample that is not full, or has no extra token.
        targets.resize(seq, IGNORE);
        let real = tokens.len().min(seq);
        tokens.resize(seq, 0);
        let mut sample = Sample {
            tokens,
            targets,
            documents: vec![],
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

/// Takes the loss from what follows the end of a document, or makes it a document of its own, among the
/// first `real` tokens.
fn mask_eod(sample: &mut Sample, real: usize, eod: i32, mask: bool, reset: bool) {
    let ends = (0..real).filter(|place| sample.tokens[*place] == eod);
    let ends: Vec<usize> = ends.collect();
    if mask {
        ends.iter().for_each(|end| sample.targets[*end] = IGNORE);
    }
    if reset {
        let begins = ends.iter().map(|end| end + 1);
        let begins = begins.filter(|begin| *begin < sample.tokens.len());
        sample.documents = std::iter::once(0).chain(begins).collect();
    }
}

/// The sequences of a part.
pub(crate) fn part_range(
    file: &IndexedFile,
    split: &Split,
    part: Part,
) -> Result<Range<usize>, SamplingError> {
    let range = split.range(part, file.sequences());
    range.ok_or_else(|| SamplingError::NoPart {
        split: split.to_string(),
        part,
    })
}

/// Whether the model has a row for each of the tokens.
pub(crate) fn check_vocabulary(
    file: &IndexedFile,
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
