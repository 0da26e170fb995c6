//! The flags of `preprocess`.

use std::path::PathBuf;

use clap::Args;

use crate::documents::Format;

use crate::byte_size::ByteSize;

/// Flags of `preprocess`.
#[derive(Args, Clone, Debug)]
pub struct PreprocessArgs {
    /// Text, JSON Lines, Parquet or Arrow files, which are read in the given order. In a folder, all files with one of
    /// the --extensions are read, sorted by path. In a Hugging Face dataset folder, the files of the split `train` are
    /// read. Files that end in .gz or .zst are decompressed. `-` is standard input.
    #[arg(required = true, value_name = "PATH")]
    pub inputs: Vec<PathBuf>,
    /// PREFIX of the output files: PREFIX.bin, PREFIX.idx and PREFIX.json. For several keys, the files are
    /// PREFIX_KEY.bin, PREFIX_KEY.idx and PREFIX_KEY.json. The files get these names when all of them are complete.
    /// Missing folders are created.
    #[arg(long, short, value_name = "PREFIX")]
    pub output: PathBuf,
    /// The tokenizer: a tokenizer.json, a folder that contains a tokenizer.json, or `bytes`, which uses every byte as a
    /// token.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: String,
    /// Format of inputs other than Parquet or Arrow: text, jsonl (one JSON object per line), or auto. With auto,
    /// .jsonl, .ndjson and .json files are jsonl, and all other files and `-` are text.
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub format: Format,
    /// Keys of the JSON objects, or columns of Parquet and Arrow files, that contain text. Separate token files are
    /// written for each key. The default is `text`.
    #[arg(long, value_name = "KEY,..", value_delimiter = ',')]
    pub json_key: Vec<String>,
    /// Treat every line of a text file as a document. By default, each file is one document.
    #[arg(long, conflicts_with = "separator")]
    pub lines: bool,
    /// Separator that ends a document in a text file. It may contain the escapes \n, \r, \t and \0.
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,
    /// Extensions of the files that are read in a folder. The default is rs,md,txt,jsonl,ndjson,parquet,arrow.
    #[arg(long, value_name = "EXTENSION,..", value_delimiter = ',')]
    pub extensions: Vec<String>,
    /// Append the end-of-document token to every document.
    #[arg(long)]
    pub append_eod: bool,
    /// The end-of-document token, as it is written in the vocabulary. It is required only if the tokenizer files do not
    /// define it.
    #[arg(long, value_name = "TOKEN")]
    pub eod: Option<String>,
    /// Add the special tokens of the tokenizer, such as `<s>`, to every document. The default is true, as in `pretrain
    /// --data TEXT`. Megatron-LM does not add special tokens by default, which corresponds to --special-tokens=false.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub special_tokens: Option<bool>,
    /// Number of tokenizer threads. The default is the number of cores. The token files do not depend on it.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub workers: Option<usize>,
    /// Maximum size of a document. A larger document is an error. A tokenizer thread needs about 120 times the size of
    /// its document in memory.
    #[arg(long, value_name = "BYTES", default_value = "8MiB")]
    pub max_document_bytes: ByteSize,
    /// Skip and count invalid documents instead of failing. These are documents that are not valid JSON or UTF-8, that
    /// do not have a required key, or that are too large.
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
