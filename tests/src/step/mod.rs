//! The launches, copies and waits of a training step, and its minimum time on a GPU. The [counts] of the emulated GPU
//! for one and two rows and one and two layers are extrapolated linearly.
//!
//! The [report] prints the step. The [budget] rejects a step that exceeds its limits.

pub mod budget;
pub mod counts;
pub mod report;
#[cfg(test)]
mod tests;

pub use budget::Budgets;
pub use counts::{Launch, StepCounts};
pub use report::StepReport;

use burn_megatron::nn::fp8::{DelayedScaling, Fp8Config, Fp8Recipe};
use burn_megatron_models::TransformerConfig;

/// The number of tokens per row.
pub const ROW: usize = 1024;

/// The number of rows of the reported step: 65,536 tokens.
pub const ROWS: f64 = 64.0;

/// A model whose step is counted.
#[derive(Clone, Debug)]
pub struct StepCase {
    /// The name of the model in the budgets.
    pub name: &'static str,
    /// The number of layers of the model. Two layers are counted.
    pub layers: usize,
    /// The configuration of the model with one layer.
    pub config: TransformerConfig,
    /// The FP8 settings of the layers.
    pub fp8: Fp8Config,
}

impl StepCase {
    /// Returns GPT-2 with 124M and 1.5B parameters, and Llamas of the same widths in which three and five queries
    /// share keys and values. The smaller GPT-2 is also returned in FP8 with delayed scaling.
    pub fn all() -> [Self; 5] {
        let gpt = |name, hidden, heads, layers| Self {
            name,
            layers,
            config: TransformerConfig {
                vocabulary: 50_304,
                context: ROW,
                hidden,
                heads,
                layers: 1,
                ..TransformerConfig::gpt2()
            },
            fp8: Fp8Config::default(),
        };
        let llama = |name, hidden, heads, groups, layers| {
            let gpt = gpt(name, hidden, heads, layers);
            let config = TransformerConfig {
                vocabulary: gpt.config.vocabulary,
                context: ROW,
                hidden,
                heads,
                groups: Some(groups),
                layers: 1,
                ..TransformerConfig::llama()
            };
            Self { config, ..gpt }
        };
        let delayed = Fp8Config {
            recipe: Some(Fp8Recipe::Delayed(DelayedScaling::default())),
            ..Fp8Config::default()
        };
        [
            gpt("gpt-768", 768, 12, 12),
            Self {
                fp8: delayed,
                ..gpt("gpt-768-fp8", 768, 12, 12)
            },
            llama("llama-768", 768, 12, 4, 12),
            gpt("gpt-1600", 1600, 25, 48),
            llama("llama-1600", 1600, 25, 5, 48),
        ]
    }
}

/// The counts of a step, by the number of layers (one and two) and by the number of rows (one and two).
#[derive(Clone, Debug)]
pub struct StepRuns(pub [[StepCounts; 2]; 2]);
