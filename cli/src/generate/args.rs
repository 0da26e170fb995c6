//! The flags of `generate`.

use std::path::{Path, PathBuf};

use burn_megatron::data_parallel::Precision;
use burn_megatron::device::DeviceKind;
use burn_megatron::regular_file;
use burn_megatron_generate::GenerateConfig;
use clap::Args;
use serde::Deserialize;

use crate::data_parallel::precision;
use crate::error::Error;
use crate::ranks::RankArgs;
use crate::settings::NcclFlags;

/// Flags of `generate`.
#[derive(Args)]
pub struct GenerateArgs {
    /// The model: a checkpoint, a folder of checkpoints, a run folder, or a Hugging Face folder. In a folder of
    /// checkpoints and in a run folder, the latest checkpoint is used.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// The prompt. May be repeated.
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_file", "prompts"])]
    pub prompt: Vec<String>,
    /// File that contains one prompt.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompts"])]
    pub prompt_file: Option<PathBuf>,
    /// File that contains one prompt per line. In a .jsonl file, each line is an object with the key "prompt".
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompts: Option<PathBuf>,
    /// Number of prompts that are processed at the same time. The generated texts do not depend on it.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_size: usize,
    /// Write the generated texts to this file as JSON Lines. By default, a single text is streamed to standard output,
    /// and several texts are written to standard output as JSON Lines.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the log-probabilities of the new tokens, in nats. The output is JSON Lines.
    #[arg(long)]
    pub logprobs: bool,
    /// Maximum number of tokens to generate.
    #[arg(
        long,
        visible_alias = "max-new-tokens",
        value_name = "N",
        default_value_t = 200,
        help_heading = "Sampling"
    )]
    pub max_tokens: usize,
    /// Sampling temperature. With 0, the most likely token is always selected.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 0.7,
        help_heading = "Sampling"
    )]
    pub temperature: f64,
    /// Sample only from the K most likely tokens.
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    pub top_k: Option<usize>,
    /// Sample only from the most likely tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", help_heading = "Sampling")]
    pub top_p: Option<f64>,
    /// Stop the generation before this text. May be repeated.
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,
    /// Seed of the sampling. With the same seed, the text is the same in every layout.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
    /// Generate N different texts for each prompt, as JSON Lines. Each of these texts does not depend on N, the batch
    /// size or the layout.
    #[arg(
        long,
        visible_alias = "num-return-sequences",
        value_name = "N",
        default_value_t = 1,
        help_heading = "Sampling"
    )]
    pub samples: usize,
    /// The tokenizer: a tokenizer.json, a folder that contains a tokenizer.json, or `bytes`. The default is the
    /// tokenizer in the Hugging Face folder. For a checkpoint, the default is the tokenizer in its recipe, or in the
    /// Hugging Face folder from which it was converted.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// Number of tensor-parallel ranks, over which each layer is split.
    #[arg(
        long,
        visible_alias = "tp",
        value_name = "N",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub tensor_parallel: usize,
    /// Use sequence parallelism: activations between the tensor-parallel layers are split along the sequence over the
    /// ranks of --tensor-parallel. A model with experts requires this flag if there are several tensor-parallel ranks.
    #[arg(long, visible_alias = "sp", help_heading = "Parallelism")]
    pub sequence_parallel: bool,
    /// Number of pipeline-parallel ranks, over which the layers are divided.
    #[arg(
        long,
        visible_alias = "pp",
        value_name = "N",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub pipeline_parallel: usize,
    /// Number of context-parallel ranks. They process each prompt together, and each rank holds a part of the KV cache.
    #[arg(
        long,
        visible_alias = "cp",
        value_name = "N",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub context_parallel: usize,
    /// The compute dtype of the model.
    #[arg(long, value_name = "f64|f32|bf16|f16", default_value = "f32", value_parser = precision, help_heading = "Device and kernels")]
    pub precision: Precision,
    /// Recompute the whole sequence for each token instead of using the KV cache.
    #[arg(long, help_heading = "Device and kernels")]
    pub no_cache: bool,
    /// Use speculative decoding: the multi-token prediction module of the model drafts the token after the next token,
    /// and one forward pass processes both tokens. On the CPU, this does not change the generated texts.
    #[arg(long, conflicts_with = "no_cache", help_heading = "Device and kernels")]
    pub speculative: bool,
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu, help_heading = "Device and kernels")]
    pub device: DeviceKind,
    /// Operations that use fused kernels; see `pretrain --help`.
    #[arg(
        long,
        value_name = "CHOICE|OPERATION=CHOICE,..",
        help_heading = "Device and kernels"
    )]
    pub kernels: Vec<String>,
    /// Flags for the ranks and their timeouts.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// The NCCL settings.
    #[command(flatten)]
    pub nccl: NcclFlags,
}

impl GenerateArgs {
    /// Returns the prompts, at least one.
    pub fn prompts(&self) -> Result<Vec<String>, Error> {
        match (&self.prompts, &self.prompt_file) {
            (Some(file), _) => prompts_of(file),
            (None, Some(file)) => Ok(vec![read(file, "prompt")?]),
            (None, None) => Ok(self.prompt.clone()),
        }
    }

    /// Returns whether the texts are written as JSON Lines.
    pub fn is_json(&self) -> bool {
        let is_several = self.samples > 1 || self.prompt.len() > 1;
        self.output.is_some() || self.logprobs || self.prompts.is_some() || is_several
    }

    /// Returns the checked sampling settings, with an empty prompt.
    pub fn config(&self) -> Result<GenerateConfig, Error> {
        let config = GenerateConfig {
            prompt: String::new(),
            tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            stop: self.stop.clone(),
            seed: Some(self.seed),
            samples: self.samples,
            logprobs: self.logprobs,
            speculative: self.speculative,
            special_tokens: false,
        };
        config.check()?;
        if self.batch_size == 0 {
            return Err("invalid batch-size = 0: expected at least 1".into());
        }
        Ok(config)
    }
}

/// Maximum size of a file of prompts, in bytes.
const MAX_PROMPTS_BYTES: u64 = 1 << 30;

fn read(file: &Path, what: &str) -> Result<String, Error> {
    let text = regular_file::read_text_stream(file, MAX_PROMPTS_BYTES);
    Ok(text.map_err(|error| format!("cannot read the {what} {}: {error}", file.display()))?)
}

/// Line of a JSON Lines file of prompts.
#[derive(Deserialize)]
struct PromptLine {
    prompt: String,
}

/// Returns the prompts of a file, one per line. Empty lines of JSON Lines are skipped.
fn prompts_of(file: &Path) -> Result<Vec<String>, Error> {
    let text = read(file, "prompts")?;
    let is_json = file
        .extension()
        .is_some_and(|extension| extension == "jsonl");
    let prompts: Vec<String> = if is_json {
        let lines = text.lines().enumerate();
        let lines = lines.filter(|(_, line)| !line.trim().is_empty());
        let prompt = |(number, line)| match serde_json::from_str::<PromptLine>(line) {
            Ok(line) => Ok(line.prompt),
            Err(error) => Err(format!(
                "invalid line {} of {}: {error}; expected {{\"prompt\": \"...\"}}",
                number + 1,
                file.display()
            )),
        };
        lines.map(prompt).collect::<Result<_, _>>()?
    } else {
        text.lines().map(String::from).collect()
    };
    if prompts.is_empty() {
        return Err(format!(
            "{} has no prompts: expected one in each line",
            file.display()
        )
        .into());
    }
    Ok(prompts)
}
