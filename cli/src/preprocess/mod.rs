//! Implements `burn-megatron preprocess`, which writes token files from text.
//!
//! One thread reads, the workers tokenize, and the calling thread writes. Batches are sent to the workers round-robin
//! and received in the same order, so the output has the order of the inputs. The channels are bounded, which bounds
//! the memory.

pub mod args;
mod error;
mod inputs;
mod output;
mod progress;
mod read;
mod work;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use burn_megatron_data::tokenizer::{TokenFileInfo, Tokenizer};

use crate::documents::{FileCounts, Found, Input, TEXT_KEY};
use crate::error::Error;
use crate::interrupt::EXIT_CODE;
use crate::numbers::count;
use crate::terminal;
use args::PreprocessArgs;
use error::PreprocessError;
use output::TokenFileOutput;
use progress::{PreprocessProgress, speed};
use read::{DocumentBatch, InputReader, StageMessage};
use work::{TokenizeWorker, TokenizedBatch};

/// The capacity of the channels before and after each worker, in batches.
const QUEUE_DEPTH: usize = 1;

/// The interval at which Ctrl-C is polled while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Writes token files, and prints a summary.
pub fn run(args: &PreprocessArgs) -> Result<ExitCode, Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let pressed = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if pressed.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(EXIT_CODE));
        }
    })?;
    match preprocess(args, &stop) {
        Ok(summary) => {
            summary.print();
            Ok(ExitCode::SUCCESS)
        }
        Err(error @ PreprocessError::Interrupted) => {
            eprintln!("{error}");
            Ok(ExitCode::from(EXIT_CODE))
        }
        Err(error) => Err(error.into()),
    }
}

/// Results of the command.
#[derive(Debug)]
pub struct PreprocessSummary {
    /// The prefix and the metadata of each output, and the number of documents without tokens.
    pub outputs: Vec<(PathBuf, TokenFileInfo, u64)>,
    /// The number of files that were read and skipped.
    pub files: FileCounts,
    /// The number of bad documents that were skipped.
    pub bad: u64,
    /// The number of input bytes.
    pub read: u64,
    /// The duration in seconds.
    pub seconds: f64,
}

impl PreprocessSummary {
    fn print(&self) {
        for (prefix, info, empty) in &self.outputs {
            let per_token = info.bytes_per_token().unwrap_or(0.0);
            let line = format!(
                "{}: {}, {} of {} of text, {per_token:.3} bytes per token",
                prefix.display(),
                count(info.documents as usize, "document"),
                count(info.tokens as usize, "token"),
                count(info.bytes as usize, "byte"),
            );
            println!("{}", terminal::wrapped(&line));
            if *empty > 0 {
                println!("  {} skipped", count(*empty as usize, "empty document"));
            }
            if info.documents == 1 {
                eprintln!(
                    "warning: {} is 1 document, and a split never divides a document, so nothing can be held out: \
                     preprocess with --lines or --separator, or train with --data.split 100,0,0",
                    prefix.display()
                );
            }
        }
        if self.bad > 0 {
            println!("{} skipped", count(self.bad as usize, "bad document"));
        }
        if self.files.is_notable() {
            println!("{}", self.files);
        }
        println!(
            "read {} in {:.1} s, {}",
            count(self.read as usize, "byte"),
            self.seconds,
            speed(self.read, self.seconds),
        );
    }
}

/// Writes token files, unless `stop` is set before they are complete.
///
/// # Errors
/// Returns a `PreprocessError`. In this case, the files do not get their final names.
pub fn preprocess(
    args: &PreprocessArgs,
    stop: &Arc<AtomicBool>,
) -> Result<PreprocessSummary, PreprocessError> {
    let tokenizer = tokenizer(args)?;
    let keys = keys(args)?;
    let Found {
        inputs,
        counts: files,
    } = inputs::find(args, &keys)?;
    let mut outputs = outputs(args, &tokenizer, &keys, &inputs)?;
    let worker = TokenizeWorker {
        eod: eod(args, &tokenizer)?,
        tokenizer,
        keys: keys.clone(),
        framed: special_tokens(args),
        skip_bad: args.skip_bad,
    };
    let read = Arc::new(AtomicU64::new(0));
    let known = inputs.iter().all(|input| input.path.is_some());
    let total = known.then(|| inputs.iter().map(|input| input.bytes).sum());
    let mut progress = PreprocessProgress::start(total);
    let reader = InputReader {
        inputs,
        keys,
        limit: args.max_document_bytes.0 as usize,
        skip_bad: args.skip_bad,
        read: Arc::clone(&read),
        stop: Arc::clone(stop),
    };
    let workers = args
        .workers
        .map_or_else(thread::available_parallelism, |workers| {
            std::num::NonZero::new(workers).ok_or(std::io::ErrorKind::InvalidInput.into())
        });
    let workers = workers.map_or(1, std::num::NonZero::get);
    let results = start(reader, &worker, workers).map_err(PreprocessError::Threads)?;
    let mut bad = 0;
    let written = write(&results, stop, |tokens| {
        bad += tokens.bad;
        for (output, documents) in outputs.iter_mut().zip(&tokens.outputs) {
            output.write(documents)?;
        }
        let tokens = outputs.iter().map(|output| output.info().tokens).sum();
        progress.show(read.load(Ordering::Relaxed), tokens);
        Ok(())
    });
    progress.clear();
    written?;
    let summary = PreprocessSummary {
        outputs: outputs
            .iter()
            .map(|output| (output.prefix().into(), output.info().clone(), output.empty))
            .collect(),
        files,
        bad,
        read: read.load(Ordering::Relaxed),
        seconds: progress.seconds(),
    };
    finish(outputs, &summary)?;
    Ok(summary)
}

fn tokenizer(args: &PreprocessArgs) -> Result<Tokenizer, PreprocessError> {
    let tokenizer = Tokenizer::named(&args.tokenizer)?;
    if tokenizer.is_bytes() && args.special_tokens == Some(true) {
        return Err(PreprocessError::Ignored(
            "--special-tokens has no effect on bytes; remove it",
        ));
    }
    let tokenizer = match &args.eod {
        Some(token) => tokenizer.with_eod(token)?,
        None => tokenizer,
    };
    if args.append_eod && tokenizer.eod().is_none() {
        Err(PreprocessError::NoEod(args.tokenizer.clone()))
    } else {
        Ok(tokenizer)
    }
}

fn special_tokens(args: &PreprocessArgs) -> bool {
    args.special_tokens.unwrap_or(true)
}

/// Returns the token that is appended to every document, unless the special tokens of the tokenizer already end with
/// it.
fn eod(args: &PreprocessArgs, tokenizer: &Tokenizer) -> Result<Option<u32>, PreprocessError> {
    let [_, after] = tokenizer.frame()?;
    let last = after.last().copied().filter(|_| special_tokens(args));
    let eod = tokenizer.eod().filter(|_| args.append_eod);
    Ok(eod.filter(|eod| Some(*eod) != last))
}

/// Returns the keys of the texts, one per output.
fn keys(args: &PreprocessArgs) -> Result<Vec<String>, PreprocessError> {
    let keys = if args.json_key.is_empty() {
        vec![TEXT_KEY.into()]
    } else {
        args.json_key.clone()
    };
    let twice = keys
        .iter()
        .enumerate()
        .find(|(i, key)| keys[..*i].contains(key));
    if let Some((_, key)) = twice {
        return Err(PreprocessError::KeyTwice(key.clone()));
    }
    let not_a_name = |key: &&String| key.is_empty() || key.contains(['/', '\\', '\0']);
    match keys.iter().find(not_a_name).filter(|_| keys.len() > 1) {
        Some(key) => Err(PreprocessError::KeyName(key.clone())),
        None => Ok(keys),
    }
}

fn outputs(
    args: &PreprocessArgs,
    tokenizer: &Tokenizer,
    keys: &[String],
    inputs: &[Input],
) -> Result<Vec<TokenFileOutput>, PreprocessError> {
    let any_record = inputs.iter().any(|input| input.format.has_keys());
    let outputs = keys.iter().map(|key| {
        let info = TokenFileInfo {
            eod_appended: args.append_eod,
            special_tokens: Some(special_tokens(args)),
            key: any_record.then(|| key.clone()),
            inputs: inputs
                .iter()
                .map(|input| input.name().to_string())
                .collect(),
            ..TokenFileInfo::new(tokenizer)
        };
        TokenFileOutput::create(&prefix(args, key, keys.len()), info, inputs, args.overwrite)
    });
    outputs.collect()
}

/// Returns the prefix of an output: the given prefix, or one prefix per key if there are several keys.
fn prefix(args: &PreprocessArgs, key: &str, keys: usize) -> PathBuf {
    let prefix: &Path = &args.output;
    match keys {
        1 => prefix.into(),
        _ => {
            let mut prefix = prefix.as_os_str().to_owned();
            prefix.push(format!("_{key}"));
            prefix.into()
        }
    }
}

/// Starts the reader and the workers. Returns the result channels of the workers, to be received from round-robin.
///
/// The threads are not joined, because a reader that waits for standard input cannot be stopped.
fn start(
    reader: InputReader,
    worker: &TokenizeWorker,
    workers: usize,
) -> std::io::Result<Vec<Receiver<StageMessage<TokenizedBatch>>>> {
    let (mut inputs, mut results): (Vec<SyncSender<StageMessage<DocumentBatch>>>, _) =
        (vec![], vec![]);
    for _ in 0..workers {
        let (input, from) = sync_channel(QUEUE_DEPTH);
        let (to, result) = sync_channel(QUEUE_DEPTH);
        let worker = worker.clone();
        thread::Builder::new().spawn(move || worker.run(&from, &to))?;
        inputs.push(input);
        results.push(result);
    }
    thread::Builder::new().spawn(move || reader.run(&inputs))?;
    Ok(results)
}

/// Receives the results of the workers in the order of the inputs, until the end.
fn write(
    results: &[Receiver<StageMessage<TokenizedBatch>>],
    stop: &AtomicBool,
    mut take: impl FnMut(TokenizedBatch) -> Result<(), PreprocessError>,
) -> Result<(), PreprocessError> {
    for result in results.iter().cycle() {
        let message = loop {
            if stop.load(Ordering::Relaxed) {
                return Err(PreprocessError::Interrupted);
            }
            match result.recv_timeout(POLL_INTERVAL) {
                Ok(message) => break message,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(PreprocessError::Worker),
            }
        };
        match message {
            StageMessage::Batch(tokens) => take(tokens?)?,
            StageMessage::End => return Ok(()),
        }
    }
    Err(PreprocessError::Worker)
}

/// Renames the files to their final names.
fn finish(
    outputs: Vec<TokenFileOutput>,
    summary: &PreprocessSummary,
) -> Result<(), PreprocessError> {
    let without = |(_, info, _): &&(PathBuf, TokenFileInfo, u64)| info.tokens == 0;
    if let Some((prefix, _, empty)) = summary.outputs.iter().find(without) {
        let bad = summary.bad;
        let what = format!("{empty} are empty, {bad} are bad, for {}", prefix.display());
        return Err(PreprocessError::NoDocuments(what));
    }
    outputs.into_iter().try_for_each(TokenFileOutput::finish)
}
