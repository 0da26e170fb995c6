//! The `burn-megatron-bench preprocess` benchmark: writing token files, compared with the tokenizers library alone.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use burn_megatron::regular_file;
use burn_megatron_cli::internal::{Error, PreprocessArgs, median, preprocess};
use burn_megatron_data::{EXTENSIONS, list_folder};
use clap::{Args, Parser};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::Serialize;
use tempfile::TempDir;
use tokenizers::Tokenizer;

use crate::report::{Column, Report, fixed};

/// The number of measured rounds after a warm-up round. The median is reported.
const ROUNDS: usize = 5;

/// Bytes of text. The documents are repeated until they reach this size.
const BYTES: usize = 16_000_000;

/// Flags of `preprocess`.
#[derive(Args)]
pub struct PreprocessBenchArgs {
    /// Tokenizer: a tokenizer.json, or a folder that contains one.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: PathBuf,
    /// Number of threads. Default: the number of cores.
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
}

/// The compared programs, as named in the table.
const NAMES: [&str; 3] = [
    "tokenizers, encode_batch, in memory",
    "tokenizers, encode_batch_fast, in memory",
    "preprocess, JSON lines to token files",
];

/// A program and its speed.
#[derive(Serialize)]
struct SpeedRow {
    name: &'static str,
    megabytes_per_second: f64,
    /// The speed relative to the first program.
    ratio: f64,
}

const COLUMNS: &[Column<SpeedRow>] = &[
    Column::new("", -42, |row| row.name.into()),
    Column::new("MB/s", 7, |row| fixed(row.megabytes_per_second, 2)),
    Column::new("of the first", 13, |row| {
        format!("{:.0}%", 100.0 * row.ratio)
    }),
];

/// Times all programs, interleaved, and prints a table. The documents are the .rs, .md and .txt files of this
/// repository.
pub fn run(args: &PreprocessBenchArgs) -> Result<(), Error> {
    let workers = match args.workers {
        Some(workers) => workers,
        None => std::thread::available_parallelism()?.get(),
    };
    let folder = tempfile::tempdir()?;
    let texts = texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))?;
    let megabytes = texts.iter().map(String::len).sum::<usize>() as f64 / 1e6;
    let about = format!(
        "{megabytes:.1} MB in {} documents, {workers} threads; MB of text per second",
        texts.len()
    );
    let comparison = TokenizerComparison {
        tokenizer: read(&args.tokenizer)?,
        path: args.tokenizer.display().to_string(),
        pool: ThreadPoolBuilder::new().num_threads(workers).build()?,
        workers,
        input: write_lines(folder.path(), &texts)?,
        texts,
        folder,
    };
    let mut speeds: [Vec<f64>; 3] = Default::default();
    for round in 0..=ROUNDS {
        let times = comparison.round()?;
        if round > 0 {
            for (speeds, seconds) in speeds.iter_mut().zip(times) {
                speeds.push(megabytes / seconds);
            }
        }
    }
    let mut report = Report::begin(&about, COLUMNS, (), &None);
    for (name, own) in NAMES.into_iter().zip(&speeds) {
        let ratios = own.iter().zip(&speeds[0]).map(|(own, first)| own / first);
        report.add(SpeedRow {
            name,
            megabytes_per_second: median(own),
            ratio: median(&ratios.collect::<Vec<_>>()),
        })?;
    }
    report.finish("")
}

struct TokenizerComparison {
    tokenizer: Tokenizer,
    path: String,
    pool: ThreadPool,
    workers: usize,
    input: PathBuf,
    texts: Vec<String>,
    folder: TempDir,
}

impl TokenizerComparison {
    /// Returns the seconds of each program. All programs must return the same number of tokens.
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
        if tokens.iter().all(|count| *count == tokens[0]) {
            Ok(seconds)
        } else {
            Err(format!("the token counts of the same text differ: {tokens:?}").into())
        }
    }

    /// Runs the whole command, from the input file to synced token files.
    fn preprocess(&self) -> Result<usize, Error> {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            args: PreprocessArgs,
        }
        let output = self.folder.path().join("out");
        let (input, output) = (self.input.display(), output.display());
        let flags = Flags::try_parse_from([
            "preprocess".to_string(),
            input.to_string(),
            format!("--output={output}"),
            format!("--tokenizer={}", self.path),
            format!("--workers={}", self.workers),
            "--special-tokens=false".to_string(),
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
    let file = if path.is_dir() {
        path.join("tokenizer.json")
    } else {
        path.to_path_buf()
    };
    Tokenizer::from_file(&file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()).into())
}

/// Returns the documents of a folder, repeated until they reach [`BYTES`].
fn texts(folder: &Path) -> Result<Vec<String>, Error> {
    let wanted = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
    };
    let mut documents = vec![];
    for file in list_folder(folder, wanted)? {
        // Files that are not UTF-8 are skipped.
        let text = String::from_utf8(regular_file::read(&file, u64::MAX)?).ok();
        documents.extend(text.filter(|text| !text.is_empty()));
    }
    if documents.is_empty() {
        return Err(format!("{} has no text", folder.display()).into());
    }
    let mut bytes = 0;
    let repeated = documents.iter().cycle().take_while(|text| {
        let more = bytes < BYTES;
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
