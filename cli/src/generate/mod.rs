//! Implements `burn-megatron generate`.

use std::fs::File;
use std::io::{self, Write, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn_megatron::checkpoint::check_place;
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::device::check_results;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::pipeline::stages_of;
use burn_megatron::regular_file::open_output;
use burn_megatron_generate::{FinishReason, GenerateConfig, GenerationOutput, Written};
use indicatif::{HumanBytes, ProgressBar};
use serde::Serialize;

use crate::error::Error;
use crate::family::Families;
use crate::numbers::count;
use crate::ranks::{self, RankSetup};
use crate::terminal::bar_style;

pub mod args;
mod model;
#[cfg(test)]
mod tests;

use args::GenerateArgs;
use model::SavedModel;

/// Generates text from prompts.
pub fn run(args: &GenerateArgs, families: &Families) -> Result<ExitCode, Error> {
    let (config, prompts) = (args.config()?, args.prompts()?);
    let saved = SavedModel::open(&args.model, args.tokenizer.as_deref(), families)?;
    let run = GenerationRun::new(args, &config, &prompts, &saved)?;
    let sizes = [
        args.tensor_parallel,
        args.context_parallel,
        args.pipeline_parallel,
    ];
    let ranks = sizes.into_iter().fold(1, usize::saturating_mul);
    let RankSetup {
        world,
        own_rank,
        local_rank,
        ..
    } = ranks::set_up(&args.ranks, &args.nccl.0, args.device, ranks)?;
    let devices = args.device.devices()?;
    // Open the file first, so that an error is reported before hours of generation.
    let file = match &args.output {
        Some(path) if own_rank.is_none_or(|rank| rank == 0) => {
            check_output_file(path, args.prompts.as_deref())?;
            let mut options = File::options();
            let made = open_output(path, options.write(true).create(true).truncate(true));
            Some(made.map_err(|error| format!("cannot write {}: {error}", path.display()))?)
        }
        _ => None,
    };
    let results = world.run(|rank| {
        let place = own_rank.map_or(rank.rank(), |_| local_rank);
        let show = |text: &str| show(text, own_rank.is_none());
        run.write(&rank, &devices[place % devices.len()], &show)
    });
    if let Some(result) = results?.swap_remove(0) {
        if args.is_json() {
            let lines = json_lines(&prompts, args.samples, &result.generated)?;
            match file {
                Some(mut file) => file.write_all(lines.as_bytes())?,
                None => show(&lines, own_rank.is_none())?,
            }
        }
        eprintln!("{}", result.summary());
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that `--output` does not overwrite the prompts or a part of a checkpoint.
fn check_output_file(output: &Path, prompts: Option<&Path>) -> Result<(), Error> {
    let output = check_place(output)?;
    let is_output = |prompts: &Path| prompts.canonicalize().is_ok_and(|path| path == output);
    // Both may be a terminal.
    if output.is_file() && prompts.is_some_and(is_output) {
        let path = output.display();
        return Err(format!(
            "--output conflicts with --prompts: both are {path}; name another file"
        )
        .into());
    }
    Ok(())
}

/// Line of the output.
#[derive(Serialize)]
struct TextLine<'a> {
    prompt: &'a str,
    /// The index of the sample, from 0, or `None` with one sample per prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    text: &'a str,
    finish_reason: &'static str,
    tokens: &'a [u32],
    /// The log-probabilities in nats.
    #[serde(skip_serializing_if = "<[f64]>::is_empty")]
    logprobs: &'a [f64],
}

/// Returns the texts as JSON Lines, in the order of the prompts. All samples of a prompt are adjacent.
fn json_lines(
    prompts: &[String],
    samples: usize,
    texts: &[GenerationOutput],
) -> Result<String, Error> {
    let mut lines = String::new();
    for (number, text) in texts.iter().enumerate() {
        let line = TextLine {
            prompt: &prompts[number / samples],
            sample: (samples > 1).then_some(number % samples),
            text: &text.text,
            finish_reason: match text.finish_reason {
                FinishReason::Length => "length",
                FinishReason::Stop => "stop",
                FinishReason::Token => "token",
            },
            tokens: &text.tokens,
            logprobs: &text.logprobs,
        };
        lines.push_str(&serde_json::to_string(&line)?);
        lines.push('\n');
    }
    Ok(lines)
}

/// Prints text immediately. If the pipe is closed, for example by `| head`, a process that contains all ranks exits.
/// One of several processes continues, because the other ranks wait for it.
fn show(text: &str, has_all_ranks: bool) -> io::Result<()> {
    let mut out = stdout().lock();
    let shown = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match shown {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe && has_all_ranks => {
            std::process::exit(0);
        }
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        shown => shown,
    }
}

/// Inputs of every rank.
struct GenerationRun<'a> {
    args: &'a GenerateArgs,
    config: &'a GenerateConfig,
    saved: &'a SavedModel,
    /// The prompts as given by the user. The next field contains their tokens.
    texts: &'a [String],
    prompts: Vec<Vec<u32>>,
    layout: ParallelConfig,
    kernels: KernelChoices,
}

/// Generated texts and their cost.
struct GenerationResult {
    generated: Vec<GenerationOutput>,
    time: Duration,
    cache_bytes: usize,
}

impl<'a> GenerationRun<'a> {
    /// Runs all checks that do not require a model.
    fn new(
        args: &'a GenerateArgs,
        config: &'a GenerateConfig,
        texts: &'a [String],
        saved: &'a SavedModel,
    ) -> Result<Self, Error> {
        let (tensor, pipeline) = (args.tensor_parallel, args.pipeline_parallel);
        let context = args.context_parallel;
        for (name, size) in [
            ("tensor", tensor),
            ("pipeline", pipeline),
            ("context", context),
        ] {
            if size == 0 {
                return Err(format!("invalid {name} = 0: expected at least 1").into());
            }
        }
        let mut kernels = KernelChoices::default();
        for choices in &args.kernels {
            kernels.set(choices)?;
        }
        kernels.check_measured()?;
        if kernels.gemm_algorithms.is_some() {
            return Err("--kernels gemm_algorithms requires pretrain: remove it".into());
        }
        let prompts = texts.iter().map(|text| saved.prompt_tokens(text));
        let prompts = prompts.collect::<Result<_, _>>()?;
        let layout = ParallelConfig::new()
            .with_tensor(tensor)
            .with_sequence_parallel(args.sequence_parallel)
            .with_context(context)
            .with_pipeline(pipeline);
        saved.model.check_layout(&layout)?;
        saved.model.check_context(&layout)?;
        stages_of(&layout, saved.model.layers())?;
        Ok(Self {
            args,
            config,
            saved,
            texts,
            prompts,
            layout,
            kernels,
        })
    }

    /// Builds and loads the model part of a rank, and generates. Rank 0 prints the text of a single prompt.
    fn write(
        &self,
        rank: &Rank,
        device: &Device,
        show: &(dyn Fn(&str) -> io::Result<()> + Sync),
    ) -> Result<Option<GenerationResult>, Error> {
        check_results(device)?;
        let groups = ParallelContext::new(&self.layout, rank)?;
        let precision = self.args.precision;
        let builder = ModelBuilder::with(&groups, device, 0, precision.master())
            .with_compute_dtype(precision.of(precision.master()))
            .with_kernels(&self.kernels)?;
        let (model, weights) = (&self.saved.model, &*self.saved.source);
        let generator = model.generator(builder, precision, weights)?;
        let is_first = rank.rank() == 0;
        if is_first {
            eprintln!("{}", self.describe(rank));
        }
        let is_streamed = is_first && !self.args.is_json();
        let texts = self.prompts.len() * self.config.samples;
        let progress = (is_first && texts > 1).then(|| bar(texts));
        let out = |written: Written<'_>| match written {
            Written::Text(text) if is_streamed => show(text),
            Written::Text(_) => Ok(()),
            Written::End => {
                progress.iter().for_each(|bar| bar.inc(1));
                Ok(())
            }
        };
        out(Written::Text(&self.texts[0]))?;
        let started = Instant::now();
        let (generated, cache_bytes) = generator.generate(
            &self.prompts,
            self.args.batch_size,
            self.config,
            &self.saved.tokenizer,
            !self.args.no_cache,
            &mut |_, written| out(written),
        )?;
        let time = started.elapsed();
        out(Written::Text("\n"))?;
        Ok(is_first.then_some(GenerationResult {
            generated,
            time,
            cache_bytes,
        }))
    }

    /// Returns the line that describes the model.
    fn describe(&self, rank: &Rank) -> String {
        let args = self.args;
        let engine = rank.engine();
        let threads = count(rank.compute_threads(), "compute thread");
        let context = match args.context_parallel {
            1 => String::new(),
            ranks => format!(" x context {ranks}"),
        };
        format!(
            "model    {}: {}; tensor {} x pipeline {}{context}, {engine}; {}, {threads} per rank",
            self.saved.source.name(),
            self.saved.model.describe(),
            args.tensor_parallel,
            args.pipeline_parallel,
            args.device,
        )
    }
}

impl GenerationResult {
    /// Returns the times, and the reason why generation ended.
    fn summary(&self) -> String {
        let line = |what: &str, tokens: usize, time: &Duration| {
            let seconds = time.as_secs_f64();
            let rate = tokens as f64 / seconds.max(1e-9);
            let tokens = count(tokens, "token");
            format!("{what} {tokens} in {seconds:.3} s, {rate:.1} per second")
        };
        let (cache, drafts) = (HumanBytes(self.cache_bytes as u64), self.drafts());
        let [only] = &self.generated[..] else {
            let texts = self.generated.len();
            let sum = |part: fn(&GenerationOutput) -> usize| self.generated.iter().map(part).sum();
            let (read, new) = (sum(|text| text.prompt), sum(|text| text.tokens.len()));
            let all = format!("{} of {}:", count(texts, "text"), count(read, "token"));
            let all = line(&all, new, &self.time);
            return format!("{all}; {cache} of cache on rank 0{drafts}");
        };
        let ended = match only.finish_reason {
            FinishReason::Length => "maximum number of tokens",
            FinishReason::Stop => "a stop text (--stop)",
            FinishReason::Token => "an end-of-text token",
        };
        // The prefill computes the first token.
        let drawn = only.tokens.len().saturating_sub(1);
        format!(
            "{}\n{}; {cache} of cache on rank 0{drafts}\nend      {ended}",
            line("prefill ", only.prompt, &only.prefill),
            line("decode  ", drawn, &only.decode),
        )
    }
}

impl GenerationResult {
    /// Describes the number of accepted drafts, with `--speculative`.
    fn drafts(&self) -> String {
        let sum = |part: fn(&GenerationOutput) -> usize| self.generated.iter().map(part).sum();
        let (drafted, accepted): (usize, usize) =
            (sum(|text| text.drafted), sum(|text| text.accepted));
        match drafted {
            0 => String::new(),
            _ => format!("; {accepted} of {drafted} drafts accepted"),
        }
    }
}

/// Returns a progress bar on standard error, which is hidden without a terminal.
fn bar(texts: usize) -> ProgressBar {
    let style = bar_style("{pos} of {len} texts {wide_bar} {eta}");
    ProgressBar::new(texts as u64).with_style(style)
}
