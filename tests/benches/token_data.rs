//! Compares token files with megatron-core: building and saving indices, and reading samples.
//!
//! ```text
//! cargo bench -p burn-megatron-tests --bench token_data -- --python PATH
//! ```
//!
//! PATH is a Python with megatron-core. Without it, only burn-megatron is timed. The files are generated. They
//! contain documents of 1 to 500 random tokens, 50 million tokens in total (`--tokens`), and are in the page cache.
//! Indices are for 20 epochs of samples of 1024 tokens. Before the timing, both sides must return the same indices
//! and the same samples.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use burn_megatron_data::Samples;
use burn_megatron_data::gpt::{GptDataset, GptOptions, IndexCache, SplitPart};
use burn_megatron_data::indexed::{IndexedDataset, IndexedDatasetBuilder, TokenType};

type AnyError = Box<dyn Error + Send + Sync>;

const SEQ: usize = 1024;
const EPOCHS: u64 = 20;
const ROUNDS: u64 = 5;
/// The number of samples read per round.
const READ: u64 = 20_000;
/// The number of samples compared.
const COMPARED: u64 = 200;
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/token_data.py");

fn main() -> Result<(), AnyError> {
    let (python, tokens) = arguments()?;
    let folder = std::env::temp_dir().join(format!("token-data-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let timed = time_all(&folder, python.as_deref(), tokens);
    std::fs::remove_dir_all(&folder)?;
    timed
}

fn arguments() -> Result<(Option<PathBuf>, u64), AnyError> {
    let (mut python, mut tokens) = (None, 50_000_000);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("a flag has no value");
        match argument.as_str() {
            "--python" => python = Some(value()?.into()),
            "--tokens" => tokens = value()?.parse()?,
            // cargo passes this argument.
            "--bench" => {}
            other => {
                return Err(
                    format!("invalid argument {other}: expected --python or --tokens").into(),
                );
            }
        }
    }
    Ok((python, tokens))
}

fn time_all(folder: &Path, python: Option<&Path>, tokens: u64) -> Result<(), AnyError> {
    let prefix = folder.join("x");
    let started = Instant::now();
    write(&prefix, tokens)?;
    let seconds = started.elapsed().as_secs_f64();
    let megabytes = tokens as f64 * 2.0 / 1e6;
    println!("written: {tokens} tokens, {:.0} MB/s", megabytes / seconds);
    let file = Arc::new(IndexedDataset::open(&prefix)?);
    let samples = EPOCHS * file.tokens() / SEQ as u64 - 1;
    let ours = Ours {
        file,
        samples,
        cache: IndexCache::new(&folder.join("ours")),
    };
    let mut megatron = python
        .map(|python| MegatronProcess::start(python, folder, samples))
        .transpose()?;
    if let Some(megatron) = &mut megatron {
        let dataset = ours.build(0)?;
        let command = format!("compare 0 {COMPARED} {}", folder.join("ours").display());
        let theirs = megatron.request(&command)? as i64;
        assert_eq!(theirs, ours.sum(&dataset)?, "the samples differ");
    }
    let mut figures: [Vec<f64>; 4] = Default::default();
    for seed in 1..=ROUNDS {
        let started = Instant::now();
        let dataset = ours.build(seed)?;
        figures[0].push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        for number in 0..READ {
            std::hint::black_box(dataset.sample(number)?);
        }
        figures[1].push(READ as f64 / started.elapsed().as_secs_f64());
        if let Some(megatron) = &mut megatron {
            figures[2].push(megatron.request(&format!("build {seed}"))?);
            figures[3].push(READ as f64 / megatron.request(&format!("read {READ}"))?);
        }
    }
    let [build, read, their_build, their_read] = figures.map(median);
    println!("\nmedians of {ROUNDS} rounds; {samples} samples of {SEQ} tokens, {EPOCHS} epochs\n");
    println!("| | burn-megatron | megatron-core | ratio |");
    println!("|---|---|---|---|");
    let row = |what: &str, ours: f64, theirs: f64, faster: f64| {
        let theirs = megatron.as_ref().map(|_| (theirs, faster));
        let (theirs, faster) = theirs.map_or(("-".into(), "-".into()), |(theirs, faster)| {
            (format!("{theirs:.3}"), format!("{faster:.2} x as fast"))
        });
        println!("| {what} | {ours:.3} | {theirs} | {faster} |");
    };
    row(
        "indices built and saved, s",
        build,
        their_build,
        their_build / build,
    );
    let scale = SEQ as f64 / 1e6;
    row(
        "samples read, million tokens/s",
        read * scale,
        their_read * scale,
        read / their_read,
    );
    Ok(())
}

/// Writes documents of a linear congruential generator (Knuth's constants).
fn write(prefix: &Path, tokens: u64) -> Result<(), AnyError> {
    let mut writer = IndexedDatasetBuilder::create(prefix, TokenType::U16)?;
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut left = tokens;
    while left > 0 {
        let length = (1 + draw(500)).min(left);
        let document: Vec<u32> = (0..length).map(|_| draw(50_000) as u32).collect();
        writer.document(&document)?;
        left -= length;
    }
    writer.finish()?;
    Ok(())
}

/// The burn-megatron side.
struct Ours {
    file: Arc<IndexedDataset>,
    samples: u64,
    cache: IndexCache,
}

impl Ours {
    fn build(&self, seed: u64) -> Result<GptDataset, AnyError> {
        let (split, options) = ("1".parse()?, GptOptions::new(SEQ, seed));
        let (file, samples) = (Arc::clone(&self.file), Some(self.samples));
        let cache = Some(&self.cache);
        Ok(GptDataset::new(
            file,
            &split,
            SplitPart::Train,
            samples,
            &options,
            cache,
        )?)
    }

    /// Returns a checksum in which each token is weighted by its position.
    fn sum(&self, dataset: &GptDataset) -> Result<i64, AnyError> {
        let mut sum = 0;
        for number in 0..COMPARED {
            let sample = dataset.sample(number)?;
            let weighted = sample.tokens.iter().zip(&sample.targets).zip(1..);
            let weighted =
                weighted.map(|((token, target), place)| i64::from(token + target) * place);
            sum += (number as i64 + 1) * weighted.sum::<i64>();
        }
        Ok(sum)
    }
}

/// The megatron-core side: a process that executes commands and returns a number for each.
struct MegatronProcess {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl MegatronProcess {
    fn start(python: &Path, folder: &Path, samples: u64) -> Result<Self, AnyError> {
        let mut process = Command::new(python)
            .args(["-W", "ignore", SCRIPT])
            .arg(folder)
            .args([SEQ.to_string(), samples.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (to, from) = (process.stdin.take(), process.stdout.take());
        let (to, from) = to.zip(from).ok_or("the process has no pipes")?;
        let from = BufReader::new(from);
        Ok(Self { process, to, from })
    }

    fn request(&mut self, what: &str) -> Result<f64, AnyError> {
        writeln!(self.to, "{what}")?;
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        let answer = answer.trim();
        let number = answer.parse();
        number.map_err(|_| format!("invalid answer '{answer}' to {what}: expected a number").into())
    }
}

impl Drop for MegatronProcess {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
