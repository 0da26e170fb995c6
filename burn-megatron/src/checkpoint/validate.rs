//! Whether a manifest makes sense. Pure values.

use std::path::Path;

use super::checksum::CHUNK;
use super::manifest::{Manifest, TensorEntry};
use super::{CheckpointError, coverage};

/// Boxes are cut dim by dim, one inside the other.
const MOST_DIMS: usize = 32;

/// Bytes of a file that an entry has.
struct Extent<'a> {
    file: usize,
    begin: u64,
    size: u64,
    key: &'a str,
}

/// Checks a manifest that was read from `path`.
pub fn check(manifest: &Manifest, path: &Path) -> Result<(), CheckpointError> {
    let corrupt = |what: String| Err(CheckpointError::corrupt(path, what));
    let lists: [(&str, Vec<&str>); 3] = [
        (
            "files",
            manifest.files.iter().map(|file| &file.name[..]).collect(),
        ),
        (
            "tensors",
            manifest
                .tensors
                .iter()
                .map(|tensor| &tensor.key[..])
                .collect(),
        ),
        (
            "objects",
            manifest
                .objects
                .iter()
                .map(|object| &object.key[..])
                .collect(),
        ),
    ];
    for (list, names) in lists {
        if let Some(pair) = names.windows(2).find(|pair| pair[0] >= pair[1]) {
            let (first, second) = (pair[0], pair[1]);
            return corrupt(format!(
                "its {list} are not in order: '{second}' follows '{first}'"
            ));
        }
    }
    if let Some(file) = manifest.files.iter().find(|file| !is_plain(&file.name)) {
        return corrupt(format!(
            "'{}' is no name of a file in its folder",
            file.name
        ));
    }
    let mut extents = vec![];
    for tensor in &manifest.tensors {
        tensor_extents(tensor, path, &mut extents)?;
    }
    for object in &manifest.objects {
        if object.checksums.len() as u64 != object.size.div_ceil(CHUNK as u64) {
            return corrupt(wrong_checksums(
                &object.key,
                object.size,
                object.checksums.len(),
            ));
        }
        extents.push(Extent {
            file: object.file,
            begin: object.begin,
            size: object.size,
            key: &object.key,
        });
    }
    check_files(manifest, path, extents)
}

/// Whether a name leads to a file in the folder itself.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn wrong_checksums(key: &str, size: u64, found: usize) -> String {
    format!("{key} has {size} bytes and {found} checksums of 4 MiB each")
}

/// Checks the pieces of a tensor.
fn tensor_extents<'a>(
    tensor: &'a TensorEntry,
    path: &Path,
    extents: &mut Vec<Extent<'a>>,
) -> Result<(), CheckpointError> {
    let meta = tensor.meta();
    let too_large = || CheckpointError::TooLarge {
        key: tensor.key.clone(),
        shape: tensor.shape.clone(),
    };
    if tensor.shape.len() > MOST_DIMS {
        let (key, dims) = (&tensor.key, tensor.shape.len());
        let what = format!("{key} has {dims} dims, and {MOST_DIMS} is the most");
        return Err(CheckpointError::corrupt(path, what));
    }
    meta.bytes().ok_or_else(too_large)?;
    for piece in &tensor.pieces {
        let slice = &piece.slice;
        if !slice.fits(&tensor.shape) {
            return Err(CheckpointError::Slice {
                key: tensor.key.clone(),
                shape: tensor.shape.clone(),
                slice: slice.clone(),
            });
        }
        let size = meta.bytes_of(slice).ok_or_else(too_large)?;
        let key = tensor.name_of(slice);
        if slice.is_empty() {
            return Err(CheckpointError::corrupt(
                path,
                format!("{key} is a piece of nothing"),
            ));
        }
        if piece.checksums.len() != size.div_ceil(CHUNK) {
            let what = wrong_checksums(&key, size as u64, piece.checksums.len());
            return Err(CheckpointError::corrupt(path, what));
        }
        extents.push(Extent {
            file: piece.file,
            begin: piece.begin,
            size: size as u64,
            key: &tensor.key,
        });
    }
    let slices: Vec<_> = tensor.pieces.iter().map(|piece| &piece.slice).collect();
    coverage::check(&tensor.key, &tensor.shape, &slices)
}

/// Checks that each byte of each file is in its header or in one entry.
fn check_files(
    manifest: &Manifest,
    path: &Path,
    mut extents: Vec<Extent>,
) -> Result<(), CheckpointError> {
    let corrupt = |what: String| Err(CheckpointError::corrupt(path, what));
    let files = manifest.files.len();
    if let Some(Extent { file, key, .. }) = extents.iter().find(|extent| extent.file >= files) {
        return corrupt(format!("{key} lies in file {file}, and there are {files}"));
    }
    extents.sort_by_key(|extent| (extent.file, extent.begin, extent.size));
    let mut ends: Vec<u64> = manifest.files.iter().map(|file| file.header).collect();
    for Extent {
        file,
        begin,
        size,
        key,
    } in extents
    {
        let end = &mut ends[file];
        let after = begin.checked_add(size);
        let name = &manifest.files[file].name;
        match after {
            Some(after) if begin == *end => *end = after,
            _ => {
                return corrupt(format!(
                    "{key} begins at byte {begin} of {name}, not at {end}"
                ));
            }
        }
    }
    for (file, end) in manifest.files.iter().zip(ends) {
        if end != file.size {
            let (name, size) = (&file.name, file.size);
            return corrupt(format!(
                "{name} has {size} bytes, and its entries end at {end}"
            ));
        }
    }
    Ok(())
}
