//! Validates a manifest without reading the data files.

use std::path::Path;

use super::checksum::CHECKSUM_CHUNK;
use super::manifest::{Manifest, TensorEntry};
use super::{CheckpointError, coverage};

/// The maximum number of dims. Slices are cut recursively, with one call per dim.
const MAX_DIMS: usize = 32;

/// The bytes of one entry in a file.
struct Extent<'a> {
    file: usize,
    begin: u64,
    size: u64,
    key: &'a str,
}

/// Validates a manifest that was read from `path`.
pub fn check(manifest: &Manifest, path: &Path) -> Result<(), CheckpointError> {
    let corrupt = |what: String| Err(CheckpointError::corrupt(path, what));
    let files = manifest.files.iter().map(|file| &file.name);
    check_order("files", files, path)?;
    let tensors = manifest.tensors.iter().map(|tensor| &tensor.key);
    check_order("tensors", tensors, path)?;
    let objects = manifest.objects.iter().map(|object| &object.key);
    check_order("objects", objects, path)?;
    if let Some(file) = manifest.files.iter().find(|file| !is_plain(&file.name)) {
        return corrupt(format!(
            "invalid file name '{}': expected a name in the checkpoint's folder",
            file.name
        ));
    }
    let mut extents = vec![];
    for tensor in &manifest.tensors {
        tensor_extents(tensor, path, &mut extents)?;
    }
    for object in &manifest.objects {
        if object.checksums.len() as u64 != object.size.div_ceil(CHECKSUM_CHUNK as u64) {
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

/// Checks that the names of a list are in ascending order.
fn check_order<'a>(
    list: &str,
    names: impl Iterator<Item = &'a String>,
    path: &Path,
) -> Result<(), CheckpointError> {
    let names: Vec<_> = names.collect();
    match names.windows(2).find(|pair| pair[0] >= pair[1]) {
        None => Ok(()),
        Some(pair) => {
            let (first, second) = (pair[0], pair[1]);
            let what = format!("its {list} are not in order: '{second}' follows '{first}'");
            Err(CheckpointError::corrupt(path, what))
        }
    }
}

/// Whether this is the name of a file directly in the folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn wrong_checksums(key: &str, size: u64, found: usize) -> String {
    format!("{key} has {size} bytes and {found} checksums of 4 MiB each")
}

/// Checks the shards of a tensor.
fn tensor_extents<'a>(
    tensor: &'a TensorEntry,
    path: &Path,
    extents: &mut Vec<Extent<'a>>,
) -> Result<(), CheckpointError> {
    let meta = tensor.meta();
    if tensor.shape.len() > MAX_DIMS {
        let (key, dims) = (&tensor.key, tensor.shape.len());
        let what = format!("{key} has {dims} dims, more than {MAX_DIMS}");
        return Err(CheckpointError::corrupt(path, what));
    }
    meta.bytes()?;
    for shard in &tensor.shards {
        let slice = &shard.slice;
        let size = meta.slice_bytes(slice)?;
        let key = tensor.name_of(slice);
        if slice.is_empty() {
            return Err(CheckpointError::corrupt(
                path,
                format!("{key} is an empty shard"),
            ));
        }
        if shard.checksums.len() != size.div_ceil(CHECKSUM_CHUNK) {
            let what = wrong_checksums(&key, size as u64, shard.checksums.len());
            return Err(CheckpointError::corrupt(path, what));
        }
        extents.push(Extent {
            file: shard.file,
            begin: shard.begin,
            size: size as u64,
            key: &tensor.key,
        });
    }
    let slices: Vec<_> = tensor.shards.iter().map(|shard| &shard.slice).collect();
    coverage::check(&tensor.key, &tensor.shape, &slices)
}

/// Checks that each byte of each file is either in its header or in exactly one entry.
fn check_files(
    manifest: &Manifest,
    path: &Path,
    mut extents: Vec<Extent>,
) -> Result<(), CheckpointError> {
    let corrupt = |what: String| Err(CheckpointError::corrupt(path, what));
    let files = manifest.files.len();
    if let Some(Extent { file, key, .. }) = extents.iter().find(|extent| extent.file >= files) {
        return corrupt(format!(
            "{key} is in file {file}, but there are only {files}"
        ));
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
                    "{key} begins at byte {begin} of {name}, expected {end}"
                ));
            }
        }
    }
    for (file, end) in manifest.files.iter().zip(ends) {
        if end != file.size {
            let (name, size) = (&file.name, file.size);
            return corrupt(format!(
                "{name} has {size} bytes, but its entries end at {end}"
            ));
        }
    }
    Ok(())
}
