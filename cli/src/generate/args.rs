//! The flags of `generate`.

use std::path::PathBuf;

use burn_megatron::data_parallel::Precision;
use burn_megatron::device::DeviceKind;
use burn_megatron::generate::GenerateConfig;
use clap::Args;

use crate::data_parallel::precision;
use crate::error::Error;
use crate::ranks::RankArgs;

/// Flags of `generate`.
#[derive(Args)]
pub struct GenerateArgs {
    /// The model: a checkpoint, a folder of checkpoints or of a run (the latest one is used), or a Hugging Face
    /// folder.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// The prompt.
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file")]
    pub prompt: Option<String>,
    /// File with the prompt.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: usize,
    /// Sampling temperature; 0 takes the most likely token.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 0.7
    )]
    pub temperature: f64,
    /// Sample from the K most likely tokens only.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens only whose probabilities add up to P.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// Stop before this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Seed of sampling: the same seed gives the same text in any layout.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// The tokenizer: a tokenizer.json, a folder with one, or `bytes`. By default that of the Hugging Face
    /// folder, or of the one that the checkpoint was converted from, or the one that its recipe names.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Number of tensor-parallel ranks, which share each layer.
    #[arg(long, visible_alias = "tp", value_name = "N", default_value_t = 1)]
    pub tensor_parallel: usize,
    /// Split the activations between the blocks along the sequence, over the ranks of --tensor-parallel. A model with
    /// experts needs it with several of them.
    #[arg(long, visible_alias = "sp")]
    pub sequence_parallel: bool,
    /// Number of pipeline-parallel ranks, which share the layers.
    #[arg(long, visible_alias = "pp", value_name = "N", default_value_t = 1)]
    pub pipeline_parallel: usize,
    /// Number of context-parallel ranks, which read a prompt together; each keeps a part of the KV cache.
    #[arg(long, visible_alias = "cp", value_name = "N", default_value_t = 1)]
    pub context_parallel: usize,
    /// The type that the model computes in.
    #[arg(long, value_name = "f64|f32|bf16|f16", default_value = "f32", value_parser = precision)]
    pub precision: Precision,
    /// Recompute the whole sequence for each token instead of using the KV cache.
    #[arg(long)]
    pub no_cache: bool,
    /// Device: cpu, wgpu or cuda. The last two must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Which operations use fused kernels; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// The ranks and their timeouts.
    #[command(flatten)]
    pub ranks: RankArgs,
}

impl GenerateArgs {
    /// The settings of sampling, checked.
    pub fn config(&self) -> Result<GenerateConfig, Error> {
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(file)) => std::fs::read_to_string(file)
                .map_err(|error| format!("cannot read the prompt {}: {error}", file.display()))?,
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
