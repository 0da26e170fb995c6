//! The header of a safetensors file: a length of 8 bytes, then JSON with the type, the shape and the
//! place of each entry, filled up with spaces.

use std::collections::BTreeSet;
use std::fmt::Write;

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::{CheckpointError, ElementType};

/// The data begins at a multiple of this.
const ALIGNMENT: usize = 64;
/// Longer headers are read by nobody.
pub const LONGEST: usize = 100_000_000;
/// The bytes of the length before a header.
pub const LENGTH: usize = 8;

/// An entry of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its own shape.
    pub shape: Vec<usize>,
    /// Where it begins, counted from the beginning of the file.
    pub begin: u64,
    /// Its bytes.
    pub size: u64,
}

/// The type as safetensors names it.
pub fn dtype(of: ElementType) -> Dtype {
    match of {
        ElementType::F64 => Dtype::F64,
        ElementType::F32 => Dtype::F32,
        ElementType::F16 => Dtype::F16,
        ElementType::Bf16 => Dtype::BF16,
        ElementType::I64 => Dtype::I64,
        ElementType::I32 => Dtype::I32,
        ElementType::U8 => Dtype::U8,
    }
}

/// The header of a file whose entries follow each other in this order, and sets where each begins.
///
/// # Errors
///
/// [`CheckpointError::Twice`]; [`CheckpointError::Corrupt`] for more entries than a header can name.
pub fn build(file: &str, entries: &mut [HeaderEntry]) -> Result<Vec<u8>, CheckpointError> {
    let mut text = String::from(r#"{"__metadata__":{"format":"burn-megatron"}"#);
    let mut names = BTreeSet::from(["__metadata__"]);
    let mut at = 0;
    for entry in entries.iter() {
        if !names.insert(&entry.name) {
            let key = entry.name.clone();
            return Err(CheckpointError::Twice { key });
        }
        let end = at + entry.size;
        let name = serde_json::Value::from(&entry.name[..]);
        let (dtype, shape) = (entry.dtype, &entry.shape);
        let offsets = format!(r#""data_offsets":[{at},{end}]"#);
        let _ = write!(
            text,
            r#",{name}:{{"dtype":"{dtype}","shape":{shape:?},{offsets}}}"#
        );
        at = end;
    }
    text.push('}');
    let total = (LENGTH + text.len()).next_multiple_of(ALIGNMENT);
    if total - LENGTH > LONGEST {
        let what = format!(
            "{} pieces need a header of {total} bytes, and {LONGEST} is the most: write more parts",
            entries.len()
        );
        return Err(CheckpointError::corrupt(file, what));
    }
    text.extend(std::iter::repeat_n(' ', total - LENGTH - text.len()));
    let mut begin = total as u64;
    for entry in entries {
        entry.begin = begin;
        begin += entry.size;
    }
    Ok([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat())
}

/// Reads the header at the beginning of a safetensors file, of which the first bytes, or all, are here.
/// The entries come in the order in which they lie in the file, without gaps and to its end.
///
/// # Errors
///
/// What is wrong with it.
pub fn parse(bytes: &[u8], file_size: u64) -> Result<Vec<HeaderEntry>, String> {
    let size = header_size(bytes)?;
    let Some(header) = bytes.get(..size) else {
        let known = bytes.len();
        return Err(format!(
            "its header has {size} bytes, and {known} are there"
        ));
    };
    let metadata: Metadata = serde_json::from_slice(&header[LENGTH..])
        .map_err(|error| format!("its header: {error}"))?;
    let (begin, data) = (header.len() as u64, metadata.data_len() as u64);
    if begin.checked_add(data) != Some(file_size) {
        return Err(format!(
            "it has {file_size} bytes, and its header says {begin} and {data}"
        ));
    }
    let entry = |name: String| {
        let info = metadata.info(&name)?;
        let (start, end) = info.data_offsets;
        Some(HeaderEntry {
            dtype: info.dtype,
            shape: info.shape.clone(),
            begin: begin + start as u64,
            size: (end - start) as u64,
            name,
        })
    };
    Ok(metadata
        .offset_keys()
        .into_iter()
        .filter_map(entry)
        .collect())
}

/// The bytes of the header, with those of its length.
fn header_size(bytes: &[u8]) -> Result<usize, String> {
    let Some(length) = bytes.first_chunk::<LENGTH>() else {
        return Err(format!("it has {} bytes, and no header", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    match usize::try_from(length) {
        Ok(length) if length <= LONGEST => Ok(LENGTH + length),
        _ => Err(format!(
            "its header has {length} bytes, and {LONGEST} is the most"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(name: &str, dtype: Dtype, shape: &[usize], size: u64) -> HeaderEntry {
        HeaderEntry {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            begin: 0,
            size,
        }
    }

    fn entries() -> [HeaderEntry; 3] {
        [
            entry("a \"b\" ä", Dtype::F64, &[2], 16),
            entry("scalar", Dtype::F32, &[], 4),
            entry("empty", Dtype::U8, &[0, 3], 0),
        ]
    }

    #[test]
    fn what_is_built_is_read() {
        let mut entries = entries();
        let mut bytes = build("part", &mut entries).unwrap();
        assert_eq!(entries[0].begin as usize, bytes.len());
        assert_eq!(bytes.len() % ALIGNMENT, 0);
        let size = bytes.len() as u64 + 20;
        assert_eq!(parse(&bytes, size).unwrap(), entries);
        // The rest of the file changes nothing.
        bytes.extend([7; 20]);
        assert_eq!(parse(&bytes, size).unwrap(), entries);
        parse(&bytes, size + 1).unwrap_err();
        parse(&bytes[..50], size).unwrap_err();
    }

    #[test]
    fn a_name_is_given_once() {
        for name in ["__metadata__", "weight"] {
            let once = entry(name, Dtype::F32, &[], 4);
            let error = build("part", &mut [once.clone(), once]).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn numbers_that_lie_are_found() {
        let of = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let offsets = |offsets: &str| format!(r#"{{"a":{{"dtype":"F32","shape":[1],{offsets}}}}}"#);
        let cases = [
            u64::MAX.to_le_bytes().to_vec(),
            99_999_999u64.to_le_bytes().to_vec(),
            of(&offsets(r#""data_offsets":[4,8]"#)),
            of(&offsets(r#""data_offsets":[0,9]"#)),
            of(&offsets(r#""data_offsets":[9,0]"#)),
            of(r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#),
            of(
                r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
            ),
        ];
        for case in cases {
            parse(&case, 4).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn no_bytes_end_the_program(
            noise in prop::collection::vec(any::<u8>(), 0..64),
            at in any::<prop::sample::Index>(), value in any::<u8>(),
        ) {
            let _ = parse(&noise, noise.len() as u64);
            let mut bytes = build("part", &mut entries()).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = value;
            let _ = parse(&bytes, bytes.len() as u64 + 20);
        }
    }
}
