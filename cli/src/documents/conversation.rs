//! Detects JSON lines of conversations for fine-tuning.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use burn_megatron::regular_file;

use super::TEXT_KEY;
use super::record::keys;

/// Maximum number of bytes that are read of a record.
const LIMIT: u64 = 64 << 20;

/// Returns whether the first record of a .jsonl file is a conversation, or a prompt without text. Returns false if
/// the file cannot be read.
pub fn is_conversation(path: &Path) -> bool {
    if path.extension().is_none_or(|end| end != "jsonl") || !path.is_file() {
        return false;
    }
    let Ok(file) = regular_file::open(path) else {
        return false;
    };
    let lines = BufReader::new(file.take(LIMIT)).split(b'\n');
    let mut lines = lines.map_while(Result::ok);
    let Some(first) = lines.find(|line| !line.trim_ascii().is_empty()) else {
        return false;
    };
    let keys = keys(&first);
    let has = |key: &str| keys.iter().any(|found| found == key);
    let answered = has("prompt") && (has("completion") || has("answer"));
    has("messages") || has("conversations") || answered || (has("prompt") && !has(TEXT_KEY))
}
