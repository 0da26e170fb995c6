//! The `burn-megatron-bench generate` benchmark: tokens per second of greedy generation on the CPU, alternating with
//! `transformers`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::philox::Stream;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_cli::internal::{Error, NamedModel, at_least_one, median};
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{GenerateConfig, Generator};
use burn_megatron_models::hf::ModelFamily;
use burn_megatron_models::{Transformer, TransformerConfig};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::report::{Column, Report, fixed};

/// The Python program of the peer.
const PEER: &str = include_str!("../python/torch_generate.py");

/// Flags of `generate`.
#[derive(Args)]
pub struct GenerateBenchArgs {
    /// Shape of the model. The weights are random.
    #[arg(long, value_enum, default_value_t = NamedModel::Small)]
    pub model: NamedModel,
    /// Number of new tokens for each text.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub tokens: usize,
    /// Number of measured rounds after one warm-up round. The median is reported.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub rounds: usize,
    /// Python interpreter with transformers and torch. It generates in alternation with this program, with the same
    /// number of threads.
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
}

/// The numbers of texts that are generated at the same time.
const BATCHES: [usize; 2] = [1, 8];

/// The number of tokens of a prompt.
const PROMPT: usize = 16;

/// The generation speed for a batch size.
#[derive(Serialize)]
struct GenerateRow {
    batch: usize,
    tokens_per_second: f64,
    /// Tokens per second of the peer.
    peer_tokens_per_second: Option<f64>,
    /// The median over the rounds of the ratio to the peer.
    ratio: Option<f64>,
}

const COLUMNS: &[Column<GenerateRow>] = &[
    Column::new("batch", 5, |row| row.batch.to_string()),
    Column::new("tokens/s", 9, |row| fixed(row.tokens_per_second, 1)),
    Column::new("transformers", 13, |row| {
        row.peer_tokens_per_second
            .map_or("-".into(), |rate| format!("{rate:.1}"))
    }),
    Column::new("ratio", 6, |row| {
        row.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
    }),
];

/// Times the generation of each batch size, and prints a table.
pub fn run(args: &GenerateBenchArgs) -> Result<(), Error> {
    let config = args.model.config();
    let name = args.model.name();
    if args.python.is_some() && args.model.family() != ModelFamily::Gpt2 {
        return Err(format!("--python requires a GPT-2 model, got --model {name}").into());
    }
    if PROMPT + args.tokens > config.context {
        return Err(format!(
            "invalid --tokens {}: the prompt has {PROMPT} tokens, and the context of the model is {}",
            args.tokens, config.context
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
    let versions = peer.as_ref().map(|peer| format!("; {}", peer.name));
    let about = format!(
        "{name}: {} tokens after {PROMPT}, greedy, f32, {} threads, medians of {}{}",
        args.tokens,
        rayon::current_num_threads(),
        args.rounds,
        versions.unwrap_or_default()
    );
    let mut report = Report::begin(&about, COLUMNS, (), &None);
    for batch in BATCHES {
        report.add(bench.row(batch, peer.as_mut())?)?;
    }
    report.finish("")
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
    /// Generates in alternation with the peer.
    fn row(&self, batch: usize, mut peer: Option<&mut Peer>) -> Result<GenerateRow, Error> {
        let (mut own, mut others, mut ratios) = (vec![], vec![], vec![]);
        for round in 0..=self.args.rounds {
            let seconds = self.time(batch)?;
            let other = peer.as_mut().map(|peer| peer.ask(&json!(batch)));
            let other = other.transpose()?.and_then(|seconds| seconds.as_f64());
            if round > 0 {
                own.push(seconds);
                ratios.extend(other.map(|other| other / seconds));
                others.extend(other);
            }
        }
        let rate = |seconds: &[f64]| (batch * self.args.tokens) as f64 / median(seconds);
        let has_peer = !others.is_empty();
        Ok(GenerateRow {
            batch,
            tokens_per_second: rate(&own),
            peer_tokens_per_second: has_peer.then(|| rate(&others)),
            ratio: has_peer.then(|| median(&ratios)),
        })
    }

    /// Returns the seconds of one generation. The prompts do not share a prefix.
    fn time(&self, batch: usize) -> Result<f64, Error> {
        let prompt = |number: usize| -> Vec<u32> {
            let mut tokens = vec![];
            Stream::new(1, number as u64).words(0, PROMPT, |_, word| {
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

/// Returns a tokenizer whose tokens are their own IDs as text.
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

/// Returns the settings of the peer.
fn peer_settings(args: &GenerateBenchArgs, config: &TransformerConfig) -> Value {
    json!({
        "threads": rayon::current_num_threads(),
        "vocabulary": config.vocabulary,
        "context": config.context,
        "hidden": config.hidden,
        "layers": config.layers,
        "heads": config.heads,
        "prompt": PROMPT,
        "tokens": args.tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse_text;

    #[test]
    fn a_small_model_is_timed() {
        let run = |tokens: &str| {
            let flags = format!("--model tiny --rounds 1 --tokens {tokens}");
            run(&parse_text(&flags)?)
        };
        run("3").unwrap();
        let error = run("200").unwrap_err().to_string();
        insta::assert_snapshot!(
            error,
            @"invalid --tokens 200: the prompt has 16 tokens, and the context of the model is 128"
        );
        assert!(run("0").is_err());
    }
}
