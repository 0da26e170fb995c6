//! `burn-megatron generate`.

use std::io::{self, Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::{DType, Device};
use burn_megatron::checkpoint::{Leniency, load_weights};
use burn_megatron::choice::Choices;
use burn_megatron::comm::{Groups, Rank};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel};
use burn_megatron::generate::{End, GenerateConfig, Generated, Generator};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::Scope;
use burn_megatron::pipeline::split::{LayerSplit, StageLayout};
use burn_megatron_models::Transformer;

use crate::ranks::{self, Ranks};
use crate::recipe::Error;

pub mod args;
mod model;
#[cfg(test)]
mod tests;

use args::GenerateArgs;
use model::SavedModel;

/// Writes text after a prompt.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, Error> {
    let config = args.config()?;
    let saved = SavedModel::open(&args.model, args.tokenizer.as_deref())?;
    let writing = Writing::new(args, &config, &saved)?;
    let ranks = args.tensor_parallel * args.pipeline_parallel;
    let Ranks {
        world,
        own_rank,
        local_rank,
        ..
    } = ranks::of(&args.ranks, args.device, ranks)?;
    let devices = args.device.devices()?;
    let results = world.run(|rank| {
        let place = own_rank.map_or(rank.rank(), |_| local_rank);
        let show = |text: &str| show(text, own_rank.is_none());
        writing.write(&rank, &devices[place % devices.len()], &show)
    });
    if let Some(written) = results?.swap_remove(0) {
        eprintln!("{}", written.figures());
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows a piece of text at once. Where nobody reads any more, as behind `| head`, there is nothing left to do
/// for a process that has all ranks; one of several goes on, as the others wait for it.
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

/// What every rank works with.
struct Writing<'a> {
    args: &'a GenerateArgs,
    config: &'a GenerateConfig,
    saved: &'a SavedModel,
    prompt: Vec<u32>,
    layout: ParallelConfig,
    stages: Vec<StageLayout>,
    kernels: Choices,
}

/// What was written, and what it took.
struct Written {
    generated: Generated,
    cache_bytes: usize,
}

impl<'a> Writing<'a> {
    /// Checks all that can be checked before a model is built.
    fn new(
        args: &'a GenerateArgs,
        config: &'a GenerateConfig,
        saved: &'a SavedModel,
    ) -> Result<Self, Error> {
        let (tensor, pipeline) = (args.tensor_parallel, args.pipeline_parallel);
        for (name, size) in [("tensor", tensor), ("pipeline", pipeline)] {
            if size == 0 {
                return Err(format!("{name} = 0 makes no ranks; 1 and more do").into());
            }
        }
        saved.config.check(tensor, false)?;
        let mut kernels = Choices::default();
        for choices in &args.kernels {
            kernels.set(choices)?;
        }
        let framed = saved.tokenizer.encode_framed(&config.prompt)?;
        let prompt = match saved.framed && !framed.is_empty() {
            true => framed,
            false => config.prompt_tokens(&saved.tokenizer)?,
        };
        Ok(Self {
            args,
            config,
            saved,
            prompt,
            layout: ParallelConfig::new()
                .with_tensor(tensor)
                .with_pipeline(pipeline),
            stages: LayerSplit::Even.stages(saved.config.layers, pipeline)?,
            kernels,
        })
    }

    /// Builds and loads the part of a rank and writes with it; the first rank shows the text.
    fn write(
        &self,
        rank: &Rank,
        device: &Device,
        show: &(dyn Fn(&str) -> io::Result<()> + Sync),
    ) -> Result<Option<Written>, Error> {
        let groups = Groups::new(&self.layout, rank)?;
        let model = self.model(&groups, device)?;
        let mut generator = Generator::new(model.module(), &groups, device);
        if self.args.no_cache {
            generator = generator.without_cache();
        }
        let is_first = rank.rank() == 0;
        let mut out = |text: &str| match is_first {
            true => show(text),
            false => Ok(()),
        };
        if is_first {
            eprintln!("{}", self.describe(rank));
        }
        out(&self.config.prompt)?;
        let tokenizer = &self.saved.tokenizer;
        let generated = generator.generate(&self.prompt, self.config, tokenizer, &mut out)?;
        out("\n")?;
        let cache_bytes = generator.cache_bytes();
        Ok(is_first.then_some(Written {
            generated,
            cache_bytes,
        }))
    }

    /// What writes.
    fn describe(&self, rank: &Rank) -> String {
        let (model, args) = (&self.saved.config, self.args);
        let (engine, threads) = (rank.engine(), rank.compute_threads());
        let plural = if threads == 1 { "" } else { "s" };
        format!(
            "model    {}: {} layers, hidden {}, {} heads, context {}; tensor {} x pipeline {}, {engine}; {}, \
             {threads} compute thread{plural} per rank",
            self.saved.source.name(),
            model.layers,
            model.hidden,
            model.heads,
            model.context,
            args.tensor_parallel,
            args.pipeline_parallel,
            args.device,
        )
    }

    fn model(
        &self,
        groups: &Groups,
        device: &Device,
    ) -> Result<DistributedDataParallel<Transformer>, Error> {
        let data_parallel = DataParallelConfig {
            precision: self.args.precision,
            ..DataParallelConfig::default()
        };
        let scope = Scope::with(groups, device, 0, DType::F32)
            .computing_in(self.args.precision.of(DType::F32))
            .with_kernels(&self.kernels)?;
        let own = groups.pipeline().rank();
        let stages = [(own, self.stages[own].clone())];
        let model = self.saved.config.init_stages(scope, false, &stages)?;
        let mut ddp = DistributedDataParallel::with(model, groups, &data_parallel)?;
        load_weights(&mut ddp, &*self.saved.source, Leniency::default())?;
        Ok(ddp)
    }
}

impl Written {
    /// How long it took, and why it ended.
    fn figures(&self) -> String {
        let Generated {
            tokens,
            end,
            prompt,
            prefill,
            decode,
            ..
        } = &self.generated;
        let ended = match end {
            End::Length => "as many tokens as were asked for",
            End::Stop => "a text of --stop",
            End::Token => "a token that ends texts",
        };
        let line = |what: &str, tokens: usize, time: &Duration| {
            let seconds = time.as_secs_f64();
            let rate = tokens as f64 / seconds.max(1e-9);
            format!("{what} {tokens} tokens in {seconds:.3} s, {rate:.1} per second")
        };
        // The first token comes with the prompt.
        let drawn = tokens.len().saturating_sub(1);
        format!(
            "{}\n{}; {:.2} MB of keys and values on rank 0\nend      {ended}",
            line("prefill ", *prompt, prefill),
            line("decode  ", drawn, decode),
            self.cache_bytes as f64 / 1e6,
        )
    }
}
