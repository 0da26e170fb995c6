//! The flags of `preprocess`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Flags of `preprocess`.
#[derive(Args, Clone, Debug)]
pub struct PreprocessArgs {
    /// Files to read, in this order; of a folder all that end in one of --extensions, in the order of their
    /// paths. Those that end in .gz or .zst are unpacked. `-` is standard input.
    #[arg(required = true, value_name = "PATH")]
    pub inputs: Vec<PathBuf>,
    /// Where the tokens go: PREFIX.bin, PREFIX.idx and PREFIX.json, and with several keys PREFIX_KEY.bin
    /// and so on. The names are there once all is written; folders that are not there are made.
    #[arg(long, short, value_name = "PREFIX")]
    pub output: PathBuf,
    /// A tokenizer.json, or a folder that has one; `bytes` makes every byte a token.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: String,
    /// What the inputs are: text, jsonl (a JSON object in every line), or by their names: .jsonl, .ndjson
    /// and .json are jsonl, all others and `-` are text.
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub format: Format,
    /// The keys that the text of a JSON object stands under; for each one files are written. The default
    /// is `text`.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub json_key: Vec<String>,
    /// Every line of a text is a document; a whole file is one otherwise.
    #[arg(long, conflicts_with = "separator")]
    pub lines: bool,
    /// Documents of a text end where this stands; \n, \r, \t and \0 are what they are elsewhere.
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,
    /// The files of a folder that are read.
    #[arg(long, value_name = "EXTENSION", value_delimiter = ',',
          default_values_t = ["rs", "md", "txt", "jsonl", "ndjson"].map(String::from))]
    pub extensions: Vec<String>,
    /// End every document with the token that the tokenizer has for it.
    #[arg(long)]
    pub append_eod: bool,
    /// The token that ends a document, as the vocabulary has it, where the files beside the tokenizer do
    /// not say so.
    #[arg(long, value_name = "TOKEN")]
    pub eod: Option<String>,
    /// Frame every document with the tokens that the tokenizer puts around a text, such as <s>.
    #[arg(long)]
    pub special_tokens: bool,
    /// Threads that make tokens; as many as there are cores by default. The files are the same for any
    /// number.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub workers: Option<usize>,
    /// A document of more bytes is a bad one: it would take all memory. A worker needs some 120 times the
    /// bytes of its document.
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = bytes)]
    pub max_document_bytes: usize,
    /// Leave bad documents out and count them, in place of ending with an error: those that are no JSON,
    /// lack a key, are not UTF-8 or too long.
    #[arg(long)]
    pub skip_bad: bool,
    /// Take the place of files that are there.
    #[arg(long)]
    pub overwrite: bool,
}

/// What an input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// By its name.
    Auto,
    /// Text.
    Text,
    /// A JSON object in every line.
    Jsonl,
}

/// The most threads that make tokens.
const MOST_WORKERS: usize = 1024;

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err(format!("0 workers make no tokens; 1 to {MOST_WORKERS} do")),
        Ok(workers) if workers > MOST_WORKERS => Err(format!(
            "{workers} workers are too many threads; 1 to {MOST_WORKERS} fit"
        )),
        Ok(workers) => Ok(workers),
        Err(error) => Err(format!("{error}")),
    }
}

/// A number of bytes: `4096`, `64K`, `32M`, `1G`, in powers of 1024.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let unit = match &text[digits.len()..] {
        "" => 1_usize,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return Err("one of K, M and G may follow the number".into()),
    };
    let number: usize = digits.parse().map_err(|error| format!("{error}"))?;
    match number.checked_mul(unit) {
        Some(0) => Err("0 bytes hold no document; 1 and more do".into()),
        Some(bytes) => Ok(bytes),
        None => Err("so many bytes no machine has".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("12"), Ok(12));
        assert_eq!(bytes("64K"), Ok(65536));
        assert_eq!(bytes("2G"), Ok(2 << 30));
        for wrong in ["", "K", "1KK", "1T", "-1", "0", "99999999999G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
