//! `burn-megatron bench preprocess`: token files from text, beside the tokenizers library alone.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use burn_megatron::data::{EXTENSIONS, list_folder};
use clap::{Args, Parser};
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokenizers::Tokenizer;

use super::timing::median;
use crate::preprocess::args::PreprocessArgs;
use crate::preprocess::preprocess;
use crate::recipe::Error;

/// Flags of `bench preprocess`.
#[derive(Args)]
pub struct PreprocessBenchArgs {
    /// The tokenizer: a tokenizer.json, or a folder that has one.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: PathBuf,
    /// A folder whose .rs, .md and .txt files are the documents; this repository by default.
    #[arg(long, value_name = "FOLDER")]
    pub text: Option<PathBuf>,
    /// Megabytes (1e6 bytes) of text; the documents are repeated up to there.
    #[arg(long, value_name = "MB", default_value_t = 16)]
    pub megabytes: usize,
    /// Threads of each contestant; as many as there are cores by default.
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Rounds of which the median counts; one that does not count comes before them.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,
}

/// What is compared, and how each is called in the table.
const NAMES: [&str; 3] = [
    "tokenizers, encode_batch, in memory",
    "tokenizers, encode_batch_fast, in memory",
    "preprocess, JSON lines to token files",
];

/// Times the contestants in turns, and prints a table.
pub fn run(args: &PreprocessBenchArgs) -> Result<ExitCode, Error> {
    let workers = match args.workers {
        Some(workers) => workers,
        None => std::thread::available_parallelism()?.get(),
    };
    let folder = Folder::new()?;
    let texts = texts(args)?;
    let megabytes = texts.iter().map(String::len).sum::<usize>() as f64 / 1e6;
    let contest = Contest {
        tokenizer: read(&args.tokenizer)?,
        path: args.tokenizer.display().to_string(),
        pool: ThreadPoolBuilder::new().num_threads(workers).build()?,
        workers: workers.to_string(),
        input: write_lines(&folder.0, &texts)?,
        texts,
        folder,
    };
    let mut speeds: [Vec<f64>; 3] = Default::default();
    for round in 0..=args.rounds {
        let times = contest.round()?;
        if round > 0 {
            for (speeds, seconds) in speeds.iter_mut().zip(times) {
                speeds.push(megabytes / seconds);
            }
        }
    }
    let documents = contest.texts.len();
    println!(
        "{megabytes:.1} MB in {documents} documents, {workers} threads; MB of text per second\n"
    );
    println!("{:<42}{:>8}{:>14}", "", "MB/s", "of the first");
    for (name, own) in NAMES.iter().zip(&speeds) {
        let ratios = own.iter().zip(&speeds[0]).map(|(own, first)| own / first);
        let ratio = median(&ratios.collect::<Vec<_>>());
        println!("{name:<42}{:>8.2}{:>13.0}%", median(own), 100.0 * ratio);
    }
    Ok(ExitCode::SUCCESS)
}

struct Contest {
    tokenizer: Tokenizer,
    path: String,
    pool: ThreadPool,
    workers: String,
    input: PathBuf,
    texts: Vec<String>,
    folder: Folder,
}

impl Contest {
    /// The seconds of each, whose tokens must be as many.
    fn round(&self) -> Result<[f64; 3], Error> {
        let texts = || self.texts.iter().map(String::as_str).collect::<Vec<_>>();
        let mut tokens = [0; 3];
        let mut time = |at: usize, work: &dyn Fn() -> Result<usize, Error>| {
            let start = Instant::now();
            tokens[at] = work()?;
            Ok::<_, Error>(start.elapsed().as_secs_f64())
        };
        let count = |encodings: Vec<tokenizers::Encoding>| encodings.iter().map(|x| x.len()).sum();
        let seconds = [
            time(0, &|| {
                let encoded = self
                    .pool
                    .install(|| self.tokenizer.encode_batch(texts(), false));
                Ok(count(encoded?))
            })?,
            time(1, &|| {
                let fast = || self.tokenizer.encode_batch_fast(texts(), false);
                Ok(count(self.pool.install(fast)?))
            })?,
            time(2, &|| self.preprocess())?,
        ];
        match tokens.iter().all(|count| *count == tokens[0]) {
            true => Ok(seconds),
            false => Err(format!("the contestants made {tokens:?} tokens of one text").into()),
        }
    }

    /// The whole command, from the file to synced files.
    fn preprocess(&self) -> Result<usize, Error> {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            args: PreprocessArgs,
        }
        let output = self.folder.0.join("out");
        let (input, output) = (self.input.display(), output.display());
        let flags = Flags::try_parse_from([
            "preprocess".to_string(),
            input.to_string(),
            format!("--output={output}"),
            format!("--tokenizer={}", self.path),
            format!("--workers={}", self.workers),
            "--overwrite".to_string(),
        ])?;
        let summary = preprocess(&flags.args, &Arc::new(AtomicBool::new(false)))?;
        Ok(summary
            .outputs
            .iter()
            .map(|(_, info, _)| info.tokens as usize)
            .sum())
    }
}

fn read(path: &Path) -> Result<Tokenizer, Error> {
    let file = match path.is_dir() {
        true => path.join("tokenizer.json"),
        false => path.to_path_buf(),
    };
    Tokenizer::from_file(&file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()).into())
}

/// The documents, over and over up to the size.
fn texts(args: &PreprocessBenchArgs) -> Result<Vec<String>, Error> {
    let repository = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = args.text.clone().unwrap_or_else(repository);
    let wanted = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
    };
    let files = list_folder(&folder, wanted)?;
    let mut documents = vec![];
    for file in files {
        // What is no text is no document here.
        documents.extend(
            String::from_utf8(fs::read(file)?)
                .ok()
                .filter(|text| !text.is_empty()),
        );
    }
    if documents.is_empty() {
        return Err(format!("{} has no text", folder.display()).into());
    }
    let mut bytes = 0;
    let repeated = documents.iter().cycle().take_while(|text| {
        let more = bytes < args.megabytes.max(1) * 1_000_000;
        bytes += text.len();
        more
    });
    Ok(repeated.cloned().collect())
}

fn write_lines(folder: &Path, texts: &[String]) -> Result<PathBuf, Error> {
    let path = folder.join("in.jsonl");
    let mut lines = std::io::BufWriter::new(fs::File::create(&path)?);
    for text in texts {
        serde_json::to_writer(&mut lines, &serde_json::json!({ "text": text }))?;
        lines.write_all(b"\n")?;
    }
    lines.flush()?;
    Ok(path)
}

/// A folder below the system's temporary one, which goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Error> {
        let name = format!("bench-preprocess-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
