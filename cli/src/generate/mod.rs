//! `burn-megatron generate`.

use std::io::{self, Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::Device;
use burn_megatron::choice::KernelChoices;
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::generate::{FinishReason, GenerateConfig, GenerationOutput};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::pipeline::stages_of;

use crate::error::Error;
use crate::family::Families;
use crate::ranks::{self, RankSetup};

pub mod args;
mod model;
#[cfg(test)]
mod tests;

use args::GenerateArgs;
use model::SavedModel;

/// Generates text from a prompt.
pub fn run(args: &GenerateArgs, families: &Families) -> Result<ExitCode, Error> {
    let config = args.config()?;
    let saved = SavedModel::open(&args.model, args.tokenizer.as_deref(), families)?;
    let run = GenerationRun::new(args, &config, &saved)?;
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
    } = ranks::set_up(&args.ranks, args.device, ranks)?;
    let devices = args.device.devices()?;
    let results = world.run(|rank| {
        let place = own_rank.map_or(rank.rank(), |_| local_rank);
        let show = |text: &str| show(text, own_rank.is_none());
        run.write(&rank, &devices[place % devices.len()], &show)
    });
    if let Some(written) = results?.swap_remove(0) {
        eprintln!("{}", written.summary());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints text immediately. If the pipe is closed, as by `| head`, a process with all ranks exits; one of several
/// continues, as the others wait for it.
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

/// The inputs of every rank.
struct GenerationRun<'a> {
    args: &'a GenerateArgs,
    config: &'a GenerateConfig,
    saved: &'a SavedModel,
    prompt: Vec<u32>,
    layout: ParallelConfig,
    kernels: KernelChoices,
}

/// The generated text and its cost.
struct GenerationResult {
    generated: GenerationOutput,
    cache_bytes: usize,
}

impl<'a> GenerationRun<'a> {
    /// Checks everything that can be checked before a model is built.
    fn new(
        args: &'a GenerateArgs,
        config: &'a GenerateConfig,
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
        let framed = saved.tokenizer.encode_with_special_tokens(&config.prompt)?;
        let prompt = if saved.framed && !framed.is_empty() {
            framed
        } else {
            config.prompt_tokens(&saved.tokenizer)?
        };
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
            prompt,
            layout,
            kernels,
        })
    }

    /// Builds and loads the model part of a rank and generates; rank 0 prints the text.
    fn write(
        &self,
        rank: &Rank,
        device: &Device,
        show: &(dyn Fn(&str) -> io::Result<()> + Sync),
    ) -> Result<Option<GenerationResult>, Error> {
        let groups = ParallelContext::new(&self.layout, rank)?;
        let precision = self.args.precision;
        let builder = ModelBuilder::with(&groups, device, 0, precision.master())
            .with_compute_dtype(precision.of(precision.master()))
            .with_kernels(&self.kernels)?;
        let (model, weights) = (&self.saved.model, &*self.saved.source);
        let generator = model.generator(builder, precision, weights)?;
        let is_first = rank.rank() == 0;
        let mut out = |text: &str| if is_first { show(text) } else { Ok(()) };
        if is_first {
            eprintln!("{}", self.describe(rank));
        }
        out(&self.config.prompt)?;
        let tokenizer = &self.saved.tokenizer;
        let (generated, cache_bytes) = generator.generate(
            &self.prompt,
            self.config,
            tokenizer,
            !self.args.no_cache,
            &mut out,
        )?;
        out("\n")?;
        Ok(is_first.then_some(GenerationResult {
            generated,
            cache_bytes,
        }))
    }

    /// The line that describes the model.
    fn describe(&self, rank: &Rank) -> String {
        let args = self.args;
        let (engine, threads) = (rank.engine(), rank.compute_threads());
        let plural = if threads == 1 { "" } else { "s" };
        let context = match args.context_parallel {
            1 => String::new(),
            ranks => format!(" x context {ranks}"),
        };
        format!(
            "model    {}: {}; tensor {} x pipeline {}{context}, {engine}; {}, {threads} compute thread{plural} per rank",
            self.saved.source.name(),
            self.saved.model.describe(),
            args.tensor_parallel,
            args.pipeline_parallel,
            args.device,
        )
    }
}

impl GenerationResult {
    /// The times, and why generation ended.
    fn summary(&self) -> String {
        let GenerationOutput {
            tokens,
            finish_reason,
            prompt,
            prefill,
            decode,
            ..
        } = &self.generated;
        let ended = match finish_reason {
            FinishReason::Length => "maximum number of tokens",
            FinishReason::Stop => "a stop text (--stop)",
            FinishReason::Token => "an end-of-text token",
        };
        let line = |what: &str, tokens: usize, time: &Duration| {
            let seconds = time.as_secs_f64();
            let rate = tokens as f64 / seconds.max(1e-9);
            format!("{what} {tokens} tokens in {seconds:.3} s, {rate:.1} per second")
        };
        // The first token is computed by the prefill.
        let drawn = tokens.len().saturating_sub(1);
        format!(
            "{}\n{}; {:.2} MB of cache on rank 0\nend      {ended}",
            line("prefill ", *prompt, prefill),
            line("decode  ", drawn, decode),
            self.cache_bytes as f64 / 1e6,
        )
    }
}
