//! Published defects of other frameworks, which are injected into small models. [`find_published`] checks that
//! [`verify`] detects each defect.
//!
//! Without the fault, the models pass. With the fault, they compute the wrong result that the publication describes.

pub mod context;
pub mod corrupted;
pub mod decoder;
mod replacing;

use std::fmt;

use super::{Comparison, VerifyError, VerifyOptions, verify};
use context::{ContextFault, ContextSubject};
use decoder::{Fault, FaultySubject};

/// The fault that is injected to reproduce a published defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedFault {
    /// A fault of [`FaultySubject`].
    Decoder(Fault),
    /// A fault of [`ContextSubject`].
    Context(ContextFault),
}

/// A published defect, with the fault that reproduces it.
#[derive(Clone, Copy, Debug)]
pub struct PublishedFault {
    /// A description of the defect.
    pub defect: &'static str,
    /// The link to the publication.
    pub link: &'static str,
    /// A description of how the small model with the fault behaves.
    pub planted: &'static str,
    /// The layout in which the fault has an effect.
    pub layout: &'static str,
    /// The fault that reproduces the defect.
    pub fault: PlantedFault,
}

const fn of(
    defect: &'static str,
    link: &'static str,
    planted: &'static str,
    layout: &'static str,
    fault: PlantedFault,
) -> PublishedFault {
    PublishedFault {
        defect,
        link,
        planted,
        layout,
        fault,
    }
}

/// The list of published defects, from the issue trackers of Megatron-LM, transformers, axolotl, unsloth and others.
pub const PUBLISHED: [PublishedFault; 15] = [
    of(
        "Gradient accumulation averages the means of micro-batches with different numbers of tokens",
        "https://github.com/huggingface/transformers/pull/34191",
        "the loss of each micro-batch is divided by its own number of tokens",
        "tp1-dp1-mb1",
        PlantedFault::Decoder(Fault::MeanOfMicroBatches),
    ),
    of(
        "Loss and gradient norm grow with the number of accumulation steps",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/2262",
        "the means of micro-batches are summed",
        "tp1-dp1-mb1",
        PlantedFault::Decoder(Fault::SumOfMicroBatches),
    ),
    of(
        "The training loss of ORPO doubles with two accumulation steps",
        "https://github.com/unslothai/unsloth/issues/2055",
        "the means of two micro-batches are summed",
        "tp1-dp1-mb2",
        PlantedFault::Decoder(Fault::SumOfMicroBatches),
    ),
    of(
        "The loss of data-parallel devices is the average of their means over tokens",
        "https://github.com/huggingface/transformers/issues/34242",
        "the loss of each rank is divided by its own number of tokens",
        "tp1-dp2",
        PlantedFault::Decoder(Fault::MeanOfMeans),
    ),
    of(
        "With context parallelism, a masked loss is normalised by the number of tokens of each shard",
        "https://github.com/NVIDIA/Megatron-LM/pull/7513",
        "the loss is the mean over context ranks of their means over tokens",
        "cp2-ring-dp1",
        PlantedFault::Context(ContextFault::LossPerRank),
    ),
    of(
        "Attention gradients are wrong with context parallelism over point-to-point messages",
        "https://github.com/NVIDIA/Megatron-LM/issues/1464",
        "gradients of keys and values stop one rank before their owner",
        "cp2-ring-dp1",
        PlantedFault::Context(ContextFault::GradientsOneHopShort),
    ),
    of(
        "Label smoothing of a split vocabulary uses the mean over the rank's shard",
        "https://github.com/NVIDIA/Megatron-LM/issues/7464",
        "label smoothing only uses the logits of the rank's shard",
        "tp2-dp1",
        PlantedFault::Decoder(Fault::LocalSmoothing),
    ),
    of(
        "The gradient of a norm differs between tensor ranks under sequence parallelism",
        "https://github.com/NVIDIA/Megatron-LM/issues/1446",
        "the gradient of one norm is not summed over the tensor axis",
        "tp2-sp-dp1",
        PlantedFault::Decoder(Fault::NormNotSummed),
    ),
    of(
        "Keys and values that tensor ranks share only get the gradient of one rank's queries",
        "https://github.com/bigcode-project/Megatron-LM/pull/37",
        "gradients of replicated keys and values are not summed",
        "tp4-dp1",
        PlantedFault::Decoder(Fault::SharedNotSummed),
    ),
    of(
        "The gradient norm omits experts of other ranks, so gradients are clipped less than expected",
        "https://github.com/NVIDIA/Megatron-LM/pull/5916",
        "each rank computes only the norm of its shard",
        "tp2-dp1",
        PlantedFault::Decoder(Fault::LocalNorm),
    ),
    of(
        "The gradient norm counts replicated weights once per tensor rank",
        "https://github.com/ROCm/TransformerEngine/pull/715",
        "a replicated weight is declared as split",
        "tp2-dp1",
        PlantedFault::Decoder(Fault::CountedTwice),
    ),
    of(
        "Split weights of all tensor ranks are initialised with the same seed",
        "https://github.com/modelscope/ms-swift/pull/7944",
        "every rank has the shard of the first rank",
        "tp2-dp1",
        PlantedFault::Decoder(Fault::OneSeed),
    ),
    of(
        "Replicas of a sharded model start from different weights",
        "https://github.com/allenai/OLMo-core/pull/319",
        "one data-parallel rank starts from weights that differ in the last digits",
        "tp1-dp2",
        PlantedFault::Decoder(Fault::OwnWeights),
    ),
    of(
        "Dropout under sequence parallelism does not use the random generator of its rank",
        "https://github.com/NVIDIA/Megatron-LM/issues/1256",
        "every sequence shard draws the dropout mask of the first shard",
        "tp2-sp-dp1",
        PlantedFault::Decoder(Fault::MaskOfFirstPart),
    ),
    of(
        "The bias of a row-parallel layer is added on every rank before the sum",
        "https://github.com/huggingface/text-generation-inference/issues/1036",
        "the bias is added once per rank",
        "tp2-dp1",
        PlantedFault::Decoder(Fault::BiasBeforeSum),
    ),
];

/// The result of [`verify`] for a model with a published defect.
#[derive(Clone, Debug)]
pub struct FoundFault {
    /// The published defect.
    pub published: PublishedFault,
    /// Whether the model passes without the fault.
    pub sound: bool,
    /// The comparison of the layout with one rank, with the injected fault.
    pub comparison: Comparison,
    /// The largest relative difference that passes.
    pub tolerance: f64,
}

impl FoundFault {
    /// Returns whether the layout passes without the fault and fails with it.
    pub fn is_found(&self) -> bool {
        self.sound && !self.comparison.passes(self.tolerance)
    }

    /// Returns a description of the checks that fail. It lists the largest relative differences, and the first tensor
    /// that must be bit-equal but is not.
    pub fn checks(&self) -> String {
        let found = &self.comparison;
        let first = |paths: &[String]| {
            let more = match paths.len() {
                0 | 1 => String::new(),
                n => format!(" and {} more", n - 1),
            };
            format!("{}{more}", paths.first().map_or("", String::as_str))
        };
        let check = |name: &'static str| {
            let difference = match name {
                "loss" => &found.loss,
                "parameter grad" => &found.gradients,
                "last grad" => &found.last_gradients,
                "grad norm" => &found.gradient_norm,
                "final weights" => &found.final_weights,
                "initial weights" => return format!("{name} of {}", first(&found.unequal_weights)),
                _ => return format!("{name} of {}", first(&found.unequal_replicas)),
            };
            let path = difference
                .path
                .as_ref()
                .filter(|_| name == "parameter grad");
            let path = path.map_or(String::new(), |path| format!(" ({path})"));
            format!("{name} {:.0e}{path}", difference.relative)
        };
        let checks = found.failing(self.tolerance).into_iter().map(check);
        checks.collect::<Vec<_>>().join(", ")
    }

    /// Returns a row of a Markdown table, with the defect and its link, the injected behavior, the layout, and the
    /// failing checks.
    pub fn markdown(&self) -> String {
        let PublishedFault {
            defect,
            link,
            planted,
            layout,
            ..
        } = self.published;
        let checks = self.checks();
        format!("| [{defect}]({link}) | {planted} | `{layout}` | {checks} |")
    }
}

impl fmt::Display for FoundFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PublishedFault {
            defect,
            link,
            planted,
            layout,
            ..
        } = self.published;
        writeln!(f, "{defect}\n  {link}\n  planted: {planted}, in {layout}")?;
        match (self.sound, self.comparison.passes(self.tolerance)) {
            (false, _) => write!(f, "  FAIL: the model differs without the fault too"),
            (true, true) => write!(f, "  FAIL: not found"),
            (true, false) => write!(f, "  found by: {}", self.checks()),
        }
    }
}

/// Runs [`verify`] for each defect in [`PUBLISHED`], with and without the fault. Calls `progress` before each defect.
///
/// # Errors
///
/// [`VerifyError`] if a layout cannot be run.
pub fn find_published(
    mut progress: impl FnMut(&PublishedFault),
) -> Result<Vec<FoundFault>, VerifyError> {
    let options = VerifyOptions::default();
    let find = |published: PublishedFault| {
        progress(&published);
        let layouts = [published.layout.parse().expect("a layout of the list")];
        let run = |planted: bool| match published.fault {
            PlantedFault::Decoder(fault) => {
                let subject = FaultySubject {
                    fault: planted.then_some(fault),
                    ..FaultySubject::default()
                };
                verify(&subject, &layouts, &options)
            }
            PlantedFault::Context(fault) => verify(
                &ContextSubject(planted.then_some(fault)),
                &layouts,
                &options,
            ),
        };
        Ok(FoundFault {
            published,
            sound: run(false)?.passes(),
            comparison: run(true)?.rows()[0].1.clone(),
            tolerance: options.tolerance,
        })
    };
    PUBLISHED.into_iter().map(find).collect()
}
