//! The launches, copies and waits of a training step, and the least time that it takes on a GPU: from [counts] of the
//! emulated GPU for one and two rows and one and two layers, which are linear in both.
//!
//! The [report] shows it, the [budget] fails a step that does more than it may.

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

/// Tokens of a row.
pub const ROW: usize = 1024;

/// Rows of the reported step: 65,536 tokens.
pub const ROWS: f64 = 64.0;

/// A model that is counted.
#[derive(Clone, Debug)]
pub struct StepCase {
    /// Its name in the budgets.
    pub name: &'static str,
    /// Its layers; two of them are counted.
    pub layers: usize,
    /// Its configuration, of one layer.
    pub config: TransformerConfig,
    /// The 8-bit settings of its layers.
    pub fp8: Fp8Config,
}

impl StepCase {
    /// GPT-2 of 124M and 1.5B parameters, and Llamas of the same widths whose queries share keys and
    /// values by three and by five; the smaller GPT-2 in 8 bits too, with delayed scales.
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

/// The counts of a step: by layers, one and two, and by rows, one and two.
#[derive(Clone, Debug)]
pub struct StepRuns(pub [[StepCounts; 2]; 2]);
