//! `burn-megatron-bench generate`: tokens per second of greedy generation on the CPU, in turns with `transformers`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::philox::Stream;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{GenerateConfig, Generator};
use burn_megatron_models::hf::ModelFamily;
use burn_megatron_models::{Transformer, TransformerConfig};
use clap::Args;
use serde_json::{Value, json};

use super::peer::Peer;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::NamedModel;
use burn_megatron_cli::internal::median;

/// The program of the peer.
const PEER: &str = include_str!("../python/torch_generate.py");

/// Flags of `generate`.
#[derive(Args)]
pub struct GenerateBenchArgs {
    /// The shape of the model, which has random weights.
    #[arg(long, value_enum, default_value_t = NamedModel::Small)]
    pub model: NamedModel,
    /// Texts at a time.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,..",
        default_value = "1,8"
    )]
    pub batch_size: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub prompt: usize,
    /// New tokens of each text.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// Measured rounds after one of warm-up; the median is reported.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,
    /// A Python with transformers and torch, which generates in turns with as many threads.
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
}

/// Times the generation of each batch size, and prints a table.
pub fn run(args: &GenerateBenchArgs) -> Result<ExitCode, Error> {
    let config = args.model.config();
    for (name, value) in [
        ("prompt", args.prompt),
        ("tokens", args.tokens),
        ("rounds", args.rounds),
        (
            "batch-size",
            args.batch_size.iter().copied().min().unwrap_or(0),
        ),
    ] {
        if value == 0 {
            return Err(format!("invalid {name} = 0: expected at least 1").into());
        }
    }
    if args.python.is_some() && args.model.family() != ModelFamily::Gpt2 {
        let name = args.model.name();
        return Err(format!("--python is for the shapes of GPT-2, not --model {name}").into());
    }
    if args.prompt + args.tokens > config.context {
        return Err(format!(
            "{} tokens after a prompt of {}: the context of the model is {}",
            args.tokens, args.prompt, config.context
        )
        .into());
    }
    let (device, groups) = (Device::flex(), ParallelContext::single());
    let builder = ModelBuilder::with(&groups, &device, 1, DType::F32);
    let bench = GenerateBench {
        args,
        model: config.init_with(builder)?.module,
        groups,
        device,
        tokenizer: numbers(config.vocabulary)?,
        vocabulary: config.vocabulary,
    };
    let peer = args.python.as_deref();
    let mut peer = peer
        .map(|python| Peer::start(python, PEER, &peer_settings(args, &config)))
        .transpose()?;
    let threads = rayon::current_num_threads();
    let name = peer
        .as_ref()
        .map_or(String::new(), |peer| format!("; {}", peer.name));
    println!(
        "{}: {} tokens after {}, greedy, f32, {threads} threads, medians of {}{name}",
        args.model.name(),
        args.tokens,
        args.prompt,
        args.rounds
    );
    println!("batch  tokens/s  transformers  ratio");
    for batch in &args.batch_size {
        let (mut own, mut others, mut ratios) = (vec![], vec![], vec![]);
        for round in 0..=args.rounds {
            let seconds = bench.time(*batch)?;
            let other = peer.as_mut().map(|peer| peer.ask(&json!(batch)));
            let other = other.transpose()?.and_then(|seconds| seconds.as_f64());
            if round > 0 {
                own.push(seconds);
                ratios.extend(other.map(|other| other / seconds));
                others.extend(other);
            }
        }
        let rate = |seconds: &[f64]| (batch * args.tokens) as f64 / median(seconds);
        if others.is_empty() {
            println!("{batch:5}  {:8.1}", rate(&own));
        } else {
            let (own, other, ratio) = (rate(&own), rate(&others), median(&ratios));
            println!("{batch:5}  {own:8.1}  {other:12.1}  {ratio:5.2}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct GenerateBench<'a> {
    args: &'a GenerateBenchArgs,
    model: Transformer,
    groups: ParallelContext,
    device: Device,
    tokenizer: Tokenizer,
    vocabulary: usize,
}

impl GenerateBench<'_> {
    /// The seconds of one generation, from prompts that share no beginning.
    fn time(&self, batch: usize) -> Result<f64, Error> {
        let prompt = |number: usize| -> Vec<u32> {
            let mut tokens = vec![];
            Stream::new(1, number as u64).words(0, self.args.prompt, |_, word| {
                tokens.push(((u64::from(word) * self.vocabulary as u64) >> 32) as u32);
            });
            tokens
        };
        let prompts: Vec<_> = (0..batch).map(prompt).collect();
        let config = GenerateConfig {
            tokens: self.args.tokens,
            temperature: 0.0,
            ..GenerateConfig::default()
        };
        let mut generator = Generator::new(&self.model, &self.groups, &self.device);
        let started = Instant::now();
        generator.generate_batch(
            &prompts,
            batch,
            &config,
            &self.tokenizer,
            &mut |_, _| Ok(()),
        )?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// A tokenizer whose tokens are their numbers.
fn numbers(vocabulary: usize) -> Result<Tokenizer, Error> {
    let words: BTreeMap<String, usize> = (0..vocabulary).map(|id| (id.to_string(), id)).collect();
    let tokenizer = json!({
        "version": "1.0",
        "pre_tokenizer": { "type": "Whitespace" },
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "0" },
    });
    let files = BTreeMap::from([(
        "tokenizer.json".to_string(),
        tokenizer.to_string().into_bytes(),
    )]);
    Ok(Tokenizer::from_files(Path::new("numbers"), &files)?)
}

/// The settings of the peer.
fn peer_settings(args: &GenerateBenchArgs, config: &TransformerConfig) -> Value {
    json!({
        "threads": rayon::current_num_threads(),
        "vocabulary": config.vocabulary,
        "context": config.context,
        "hidden": config.hidden,
        "layers": config.layers,
        "heads": config.heads,
        "prompt": args.prompt,
        "tokens": args.tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_is_timed() {
        let args = |tokens| GenerateBenchArgs {
            model: NamedModel::Tiny,
            batch_size: vec![2],
            prompt: 4,
            tokens,
            rounds: 1,
            python: None,
        };
        run(&args(3)).unwrap();
        let error = run(&args(200)).unwrap_err().to_string();
        assert_eq!(
            error,
            "200 tokens after a prompt of 4: the context of the model is 128"
        );
        let error = run(&args(0)).unwrap_err().to_string();
        assert_eq!(error, "invalid tokens = 0: expected at least 1");
    }
}
