//! The header of a safetensors file. The header consists of its length (8 bytes), followed by JSON with the type, shape
//! and offsets of each entry. The JSON is padded with spaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::de::IgnoredAny;
use serde_json::Deserializer;

use super::{CheckpointError, ElementType, unique_keys};

/// The alignment of the data in the file, in bytes.
const ALIGNMENT: usize = 64;
/// The maximum size of a header that the safetensors library reads, in bytes.
pub const MAX_BYTES: usize = 100_000_000;
/// The number of bytes of the length prefix.
pub const LENGTH_BYTES: usize = 8;

/// An entry of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// The name of the entry.
    pub name: String,
    /// The element type of the entry.
    pub dtype: Dtype,
    /// The shape of the entry.
    pub shape: Vec<usize>,
    /// The offset of the entry from the start of the file, in bytes.
    pub begin: u64,
    /// The size of the entry in bytes.
    pub size: u64,
}

/// Returns the type of the safetensors library that corresponds to an element type.
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

/// Builds the header of a file with the given entries in the given order, and sets the offset of each entry.
///
/// # Errors
///
/// [`CheckpointError::Duplicate`] for a repeated name; [`CheckpointError::Corrupt`] if the entries exceed the
/// maximum header size.
pub fn build(file: &str, entries: &mut [HeaderEntry]) -> Result<Vec<u8>, CheckpointError> {
    let mut text = String::from(r#"{"__metadata__":{"format":"burn-megatron"}"#);
    let mut names = BTreeSet::from(["__metadata__"]);
    let mut at = 0;
    for entry in entries.iter() {
        if !names.insert(&entry.name) {
            let key = entry.name.clone();
            return Err(CheckpointError::Duplicate { key });
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
    let total = (LENGTH_BYTES + text.len()).next_multiple_of(ALIGNMENT);
    if total - LENGTH_BYTES > MAX_BYTES {
        let what = format!(
            "{} shards need a header of {total} bytes, more than {MAX_BYTES}: write more parts",
            entries.len()
        );
        return Err(CheckpointError::corrupt(file, what));
    }
    text.extend(std::iter::repeat_n(' ', total - LENGTH_BYTES - text.len()));
    let mut begin = total as u64;
    for entry in entries {
        entry.begin = begin;
        begin += entry.size;
    }
    Ok([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat())
}

/// Parses the header of a safetensors file. `bytes` starts at the beginning of the file and contains at least the
/// header. Returns the entries in the order of the file. The function checks that the entries are contiguous and that
/// the last entry ends at the end of the file.
///
/// # Errors
///
/// Returns the reason as text.
pub fn parse(bytes: &[u8], file_size: u64) -> Result<Vec<HeaderEntry>, String> {
    let size = header_size(bytes)?;
    let Some(header) = bytes.get(..size) else {
        let known = bytes.len();
        return Err(format!(
            "its header has {size} bytes, but only {known} are there"
        ));
    };
    let invalid = |error| format!("its header: {error}");
    let text = &header[LENGTH_BYTES..];
    let metadata: Metadata = serde_json::from_slice(text).map_err(invalid)?;
    // The line above keeps only one entry if a name has several entries.
    let _: BTreeMap<_, IgnoredAny> =
        unique_keys(&mut Deserializer::from_slice(text)).map_err(invalid)?;
    let (begin, data) = (header.len() as u64, metadata.data_len() as u64);
    if begin.checked_add(data) != Some(file_size) {
        return Err(format!(
            "it has {file_size} bytes, but its header gives {begin} and {data}"
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

/// Returns the size of the header, including its length prefix.
fn header_size(bytes: &[u8]) -> Result<usize, String> {
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Err(format!(
            "it has {} bytes, too few for a header",
            bytes.len()
        ));
    };
    let length = u64::from_le_bytes(*length);
    match usize::try_from(length) {
        Ok(length) if length <= MAX_BYTES => Ok(LENGTH_BYTES + length),
        _ => Err(format!(
            "its header has {length} bytes, more than {MAX_BYTES}"
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
        // Bytes after the header have no effect.
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
        // The same tensor twice, and two tensors with the same bytes.
        let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let twice = parse(&of(&format!(r#"{{"a":{entry},"a":{entry}}}"#)), 0);
        assert!(twice.unwrap_err().contains("\"a\" twice"));
        let both = parse(&of(&format!(r#"{{"a":{entry},"b":{entry}}}"#)), 0);
        assert!(both.unwrap_err().contains("offset"));
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
