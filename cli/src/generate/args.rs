//! The flags of `generate`.

use std::path::PathBuf;

use burn_megatron::data_parallel::Precision;
use burn_megatron::device::DeviceKind;
use burn_megatron::generate::GenerateConfig;
use clap::Args;

use crate::cli::RankArgs;
use crate::recipe::Error;
use crate::sharing::precision;

/// Flags of `generate`.
#[derive(Args)]
pub struct GenerateArgs {
    /// The model: a checkpoint, a folder of checkpoints or of a run (the latest one is taken), or a
    /// folder of Hugging Face.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// What the text begins with.
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file")]
    pub prompt: Option<String>,
    /// A file with what the text begins with.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// The most tokens to draw.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: usize,
    /// Logits are divided by it; 0 takes the likeliest token.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 0.7
    )]
    pub temperature: f64,
    /// Draw from so many of the likeliest tokens only.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw from the likeliest tokens only whose probabilities together reach this.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// End the text before this; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Seed of the draws: the same gives the same text, in any layout.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// The tokenizer: a tokenizer.json, a folder that has one, or `bytes`. By default that of the folder
    /// of Hugging Face, or of the one that the checkpoint was converted from, or the one that its recipe
    /// names.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Ranks that share each layer.
    #[arg(long, visible_alias = "tp", value_name = "N", default_value_t = 1)]
    pub tensor_parallel: usize,
    /// Ranks that share the layers.
    #[arg(long, visible_alias = "pp", value_name = "N", default_value_t = 1)]
    pub pipeline_parallel: usize,
    /// The type that the model computes in.
    #[arg(long, value_name = "f32|bf16|f16", default_value = "f32", value_parser = precision)]
    pub precision: Precision,
    /// Read the whole text again for each token, to see what the cache of keys and values saves.
    #[arg(long)]
    pub no_cache: bool,
    /// Where the model runs: cpu, wgpu or cuda. The last two must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Which operations run as fused kernels; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Where the ranks are, and how long they wait for each other.
    #[command(flatten)]
    pub ranks: RankArgs,
}

impl GenerateArgs {
    /// How the text is drawn, checked.
    pub fn config(&self) -> Result<GenerateConfig, Error> {
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(file)) => std::fs::read_to_string(file)
                .map_err(|error| format!("the prompt {}: {error}", file.display()))?,
            (None, None) => String::new(),
        };
        let config = GenerateConfig {
            prompt,
            tokens: self.tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            stop: self.stop.clone(),
            seed: Some(self.seed),
        };
        config.check()?;
        Ok(config)
    }
}
