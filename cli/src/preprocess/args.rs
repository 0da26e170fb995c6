//! The flags of `preprocess`.

use std::path::PathBuf;

use clap::Args;

use crate::documents::Format;

use crate::byte_size::ByteSize;

/// Flags of `preprocess`.
#[derive(Args, Clone, Debug)]
pub struct PreprocessArgs {
    /// Files to read, in this order: text, JSON lines, Parquet or Arrow. For a folder, all files with one of
    /// --extensions are read in the order of their paths. For a Hugging Face dataset folder, the files of the split
    /// train are read. Files that end in .gz or .zst are decompressed. `-` is standard input.
    #[arg(required = true, value_name = "PATH")]
    pub inputs: Vec<PathBuf>,
    /// Output: PREFIX.bin, PREFIX.idx and PREFIX.json, or PREFIX_KEY.bin and so on for several keys. The files are
    /// renamed to these names once all are complete. Missing folders are created.
    #[arg(long, short, value_name = "PREFIX")]
    pub output: PathBuf,
    /// A tokenizer.json, a folder with one, or `bytes`, for which every byte is a token.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: String,
    /// Format of inputs other than Parquet or Arrow: text, jsonl (one JSON object per line), or auto. With auto,
    /// .jsonl, .ndjson and .json files are jsonl, and all other files and `-` are text.
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub format: Format,
    /// Keys of the JSON objects, or columns of Parquet and Arrow, that hold text. Token files are written for each
    /// key. The default is `text`.
    #[arg(long, value_name = "KEY,..", value_delimiter = ',')]
    pub json_key: Vec<String>,
    /// Treat every line of a text as a document. By default a file is one document.
    #[arg(long, conflicts_with = "separator")]
    pub lines: bool,
    /// Treat this text as the end of a document. \n, \r, \t and \0 are escapes.
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,
    /// Extensions of the files of a folder that are read. The default is rs,md,txt,jsonl,ndjson,parquet,arrow.
    #[arg(long, value_name = "EXTENSION,..", value_delimiter = ',')]
    pub extensions: Vec<String>,
    /// Append the end-of-document token to every document.
    #[arg(long)]
    pub append_eod: bool,
    /// The end-of-document token, as written in the vocabulary. Required only if the tokenizer files do not define
    /// it.
    #[arg(long, value_name = "TOKEN")]
    pub eod: Option<String>,
    /// Add the special tokens of the tokenizer, such as `<s>`, to every document. The default is true, as in
    /// `pretrain --data TEXT`. Megatron-LM adds no special tokens by default, as with --special-tokens=false.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub special_tokens: Option<bool>,
    /// Number of tokenizer threads. The default is the number of cores. The files are the same for any number.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub workers: Option<usize>,
    /// Maximum size of a document. A longer document is an error. A worker needs about 120 times the bytes of its
    /// document in memory.
    #[arg(long, value_name = "BYTES", default_value = "8MiB")]
    pub max_document_bytes: ByteSize,
    /// Skip and count bad documents instead of failing: documents that are not JSON, lack a key, are not UTF-8 or are
    /// too long.
    #[arg(long)]
    pub skip_bad: bool,
    /// Replace existing files.
    #[arg(long)]
    pub overwrite: bool,
}

/// Maximum number of tokenizer threads.
const MAX_WORKERS: usize = 1024;

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err(format!("expected 1 to {MAX_WORKERS} workers")),
        Ok(workers) if workers > MAX_WORKERS => Err(format!("expected 1 to {MAX_WORKERS} workers")),
        Ok(workers) => Ok(workers),
        Err(error) => Err(format!("{error}")),
    }
}
