//! Finds the inputs of the command line.

use super::args::PreprocessArgs;
use super::error::PreprocessError;
use crate::documents::{DocumentFormat, FindOptions, Found, RECORDS, TEXT, find as find_files};

/// Returns all inputs in order. `keys` contains the keys of `--json-key`, or the default key.
///
/// # Errors
/// Returns a [`PreprocessError`] if an input cannot be read, if a folder contains nothing to read, or if a flag has
/// no effect.
pub fn find(args: &PreprocessArgs, keys: &[String]) -> Result<Found, PreprocessError> {
    let text = match (&args.separator, args.lines) {
        (Some(separator), _) => DocumentFormat::Separated(unescape(separator)?),
        (None, true) => DocumentFormat::Lines,
        (None, false) => DocumentFormat::Whole,
    };
    let found = find_files(
        &args.inputs,
        &FindOptions {
            extensions: &args.extensions,
            default_extensions: &[&[&TEXT[..], &RECORDS].concat()],
            format: args.format,
            text,
            keys,
        },
    )?;
    check(args, &found)?;
    Ok(found)
}

/// Checks that the flags have an effect.
fn check(args: &PreprocessArgs, found: &Found) -> Result<(), PreprocessError> {
    let inputs = &found.inputs;
    let any_record = inputs.iter().any(|input| input.format.has_keys());
    let any_text = inputs.iter().any(|input| !input.format.has_keys());
    let ignored = if inputs.iter().filter(|input| input.path.is_none()).count() > 1 {
        "standard input can be read once: give a single `-`"
    } else if !args.json_key.is_empty() && !any_record {
        "--json-key requires JSON lines, Parquet or Arrow, but all inputs are text; see --format jsonl"
    } else if args.json_key.len() > 1 && any_text {
        "several keys require JSON lines, Parquet or Arrow, but some inputs are text; see --format jsonl"
    } else if (args.lines || args.separator.is_some()) && !any_text {
        "--lines and --separator require text, but no input is text; see --format text"
    } else {
        return Ok(());
    };
    Err(PreprocessError::Ignored(ignored))
}

/// Returns the bytes of a separator, with escapes for characters that are hard to type in a shell.
fn unescape(text: &str) -> Result<Vec<u8>, PreprocessError> {
    if text.is_empty() {
        return Err(PreprocessError::EmptySeparator);
    }
    let mut bytes = vec![];
    let mut left = text;
    while let Some(first) = left.chars().next() {
        let escaped = match left.as_bytes() {
            [b'\\', b'n', ..] => Some(b'\n'),
            [b'\\', b'r', ..] => Some(b'\r'),
            [b'\\', b't', ..] => Some(b'\t'),
            [b'\\', b'0', ..] => Some(b'\0'),
            [b'\\', b'\\', ..] => Some(b'\\'),
            _ => None,
        };
        let used = match escaped {
            Some(byte) => {
                bytes.push(byte);
                2
            }
            None => {
                bytes.extend(&left.as_bytes()[..first.len_utf8()]);
                first.len_utf8()
            }
        };
        left = &left[used..];
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_have_escapes() {
        let of = |text| unescape(text).unwrap();
        assert_eq!(of(r"\n\n"), b"\n\n");
        assert_eq!(of(r"é\0\\n<\t>\r\"), b"\xc3\xa9\0\\n<\t>\r\\");
        assert!(unescape("").is_err());
    }
}
