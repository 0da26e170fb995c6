//! Named models for benchmarks.

use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::ModelFamily;
use clap::ValueEnum;

/// Models that benchmarks can train: GPT-2 models, and byte-level Llamas, which are named after their hidden size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NamedModel {
    /// A tiny GPT-2 for tests and for a CPU: 4 layers, hidden size 128, 128 tokens.
    Tiny,
    /// GPT-2 small: 12 layers, hidden size 768, 1024 tokens.
    #[value(name = "124m")]
    Small,
    /// GPT-2 XL: 48 layers, hidden size 1600, 1024 tokens.
    #[value(name = "1.5b")]
    Xl,
    /// The Llama that `pretrain` trains without a recipe: 4 layers, hidden size 96, 128 tokens.
    #[value(name = "llama-96")]
    Llama96,
    /// A Llama with 4 layers, hidden size 256, 256 tokens.
    #[value(name = "llama-256")]
    Llama256,
    /// A Llama with 12 layers, hidden size 768, 256 tokens.
    #[value(name = "llama-768")]
    Llama768,
}

impl NamedModel {
    /// Returns the name in flags and in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "124m",
            Self::Xl => "1.5b",
            Self::Llama96 => "llama-96",
            Self::Llama256 => "llama-256",
            Self::Llama768 => "llama-768",
        }
    }

    /// Returns the configuration, whose `family` is [`family`](Self::family). The GPT-2 vocabulary of 50257 is padded
    /// to a multiple of 128, as in nanoGPT and llm.c.
    pub fn config(self) -> TransformerConfig {
        let gpt2 = |layers, hidden, heads| TransformerConfig {
            vocabulary: 50304,
            context: 1024,
            layers,
            hidden,
            heads,
            ..TransformerConfig::gpt2()
        };
        let llama = |layers, hidden, heads, context| TransformerConfig {
            context,
            layers,
            hidden,
            heads,
            groups: Some(heads),
            tied: true,
            ..TransformerConfig::llama()
        };
        match self {
            Self::Llama96 => llama(4, 96, 4, 128),
            Self::Llama256 => llama(4, 256, 4, 256),
            Self::Llama768 => llama(12, 768, 12, 256),
            Self::Tiny => TransformerConfig::gpt2(),
            Self::Small => gpt2(12, 768, 12),
            Self::Xl => gpt2(48, 1600, 25),
        }
    }

    /// Returns the family of the configuration.
    pub fn family(self) -> ModelFamily {
        match self {
            Self::Tiny | Self::Small | Self::Xl => ModelFamily::Gpt2,
            Self::Llama96 | Self::Llama256 | Self::Llama768 => ModelFamily::Llama,
        }
    }

    /// Returns the number of samples per micro-batch that fit into 80 GB without recomputation.
    pub fn micro_batch_size(self) -> usize {
        match self {
            Self::Tiny | Self::Llama256 | Self::Llama768 => 4,
            Self::Llama96 => 8,
            Self::Small => 16,
            Self::Xl => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the parameters of models that are named after their size: blocks of `12 H^2 + 13 H`, embeddings, and
    /// the last norm.
    #[test]
    fn the_names_are_the_numbers_of_parameters() {
        for (model, millions) in [(NamedModel::Small, 124.5), (NamedModel::Xl, 1557.7)] {
            let config = model.config();
            let hidden = config.hidden;
            let blocks = config.layers * (12 * hidden * hidden + 13 * hidden);
            let embeddings = (config.vocabulary + config.context) * hidden;
            let parameters = (blocks + embeddings + 2 * hidden) as f64 / 1e6;
            assert!((parameters - millions).abs() < 0.05, "{parameters}");
            assert!(config.check(1, false).is_ok());
        }
    }
}
