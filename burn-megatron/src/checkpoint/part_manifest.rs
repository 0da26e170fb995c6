//! The files that one rank writes to a checkpoint: a safetensors file, and a part manifest. The part manifest exists
//! until the checkpoint is published.

use std::cmp::Reverse;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::header::{self, HeaderEntry};
use super::part_writer::{EntryWriter, PartWriter};
use super::{
    CheckpointError, Checksum, FileEntry, ObjectEntry, ShardEntry, TensorEntry, TensorMeta,
    TensorSlice, checksummed,
};
use crate::regular_file;

/// The maximum size of a part manifest that is read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 4 << 30;

/// A shard of a tensor: a slice that one rank writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShard {
    /// The key, element type and shape of the complete tensor.
    pub tensor: TensorMeta,
    /// The slice of the tensor in this shard. An empty slice only declares that the tensor exists.
    pub slice: TensorSlice,
}

/// The manifest of the part of a checkpoint that one rank writes. The index of its only data file is 0.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartManifest {
    /// The data file, or `None` if the rank writes no data.
    pub file: Option<FileEntry>,
    /// The tensors of the part. Each entry lists only the shards in this file.
    pub tensors: Vec<TensorEntry>,
    /// The objects of the part.
    pub objects: Vec<ObjectEntry>,
    #[serde(rename = "checksum", skip_serializing)]
    _checksum: Option<Checksum>,
}

/// Returns the name of a rank's data file.
pub fn data_name(rank: usize) -> String {
    format!("part-{rank:05}.safetensors")
}

/// Returns the name of a rank's part manifest, which is written when the data file is complete.
pub fn manifest_name(rank: usize) -> String {
    format!("part-{rank:05}.json")
}

/// Returns the name of the file in which a rank reports that it could not write its part.
pub fn failed_name(rank: usize) -> String {
    format!("part-{rank:05}.failed")
}

/// The source of an entry's bytes.
enum EntryOrigin {
    TensorShard(usize),
    Object(usize),
}

/// Writes a rank's data file, syncs it, and writes its part manifest. `data` writes the elements of a shard to
/// its entry, in one or more calls. See [`super::PendingCheckpoint::write_part`].
pub fn write(
    disk: &Disk,
    folder: &Path,
    rank: usize,
    shards: &[TensorShard],
    objects: &[(String, Vec<u8>)],
    mut data: impl FnMut(usize, &mut EntryWriter) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut part = PartManifest::default();
    let (mut entries, origins) = plan_entries(shards, objects)?;
    let empty = shards.iter().filter(|shard| shard.slice.is_empty());
    part.tensors
        .extend(empty.map(|shard| entry_of(&shard.tensor, vec![])));
    if !entries.is_empty() {
        let name = data_name(rank);
        let header = header::build(&name, &mut entries)?;
        let size = header.len() as u64 + entries.iter().map(|entry| entry.size).sum::<u64>();
        let path = folder.join(&name);
        let mut file = PartWriter::create(disk, &path, size)?;
        file.write(&header)?;
        for (entry, origin) in entries.iter().zip(origins) {
            match origin {
                EntryOrigin::TensorShard(index) => {
                    let shard = &shards[index];
                    let mut to = file.entry(entry.size);
                    data(index, &mut to)?;
                    let written = ShardEntry {
                        file: 0,
                        begin: entry.begin,
                        slice: shard.slice.clone(),
                        checksums: to
                            .finish()
                            .map_err(|found| length(shard, entry.size, found))?,
                    };
                    part.tensors.push(entry_of(&shard.tensor, vec![written]));
                }
                EntryOrigin::Object(index) => {
                    let (key, bytes) = &objects[index];
                    let mut to = file.entry(entry.size);
                    to.write(bytes)?;
                    part.objects.push(ObjectEntry {
                        key: key.clone(),
                        file: 0,
                        begin: entry.begin,
                        size: entry.size,
                        checksums: to.finish().expect("the entry has the size of the object"),
                    });
                }
            }
        }
        file.finish()?;
        part.file = Some(FileEntry {
            name,
            size,
            header: header.len() as u64,
            checksum: Checksum::of(&header),
        });
    }
    disk.sync_folder(folder)?;
    // Nothing follows, because the publisher renames the folder as soon as it finds the last part manifest. The
    // names of the part manifests need no sync, because the publisher removes them.
    disk.write_atomically(&folder.join(manifest_name(rank)), &part.to_bytes())
}

impl PartManifest {
    /// Reads a part manifest.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = regular_file::read(path, MAX_MANIFEST_BYTES)
            .map_err(|error| CheckpointError::io("read", path, error))?;
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        checksummed::check(&bytes).map_err(corrupt)?;
        serde_json::from_slice(&bytes).map_err(|error| corrupt(error.to_string()))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string(self)
            .expect("numbers, strings and lists of them serialize to JSON");
        // The checksum replaces the closing brace.
        checksummed::append_checksum(text[..text.len() - 1].to_string() + ",\n")
    }
}

/// Returns the entries of the file and their sources. The widest element types come first, so that all entries
/// are aligned.
fn plan_entries(
    shards: &[TensorShard],
    objects: &[(String, Vec<u8>)],
) -> Result<(Vec<HeaderEntry>, Vec<EntryOrigin>), CheckpointError> {
    let mut all = vec![];
    for (index, shard) in shards.iter().enumerate() {
        let TensorShard { tensor, slice } = shard;
        tensor.slice_bytes(slice)?;
        tensor.bytes()?;
        if slice.is_empty() {
            continue;
        }
        let entry = entry_of(tensor, vec![]).header_entry(slice, 0);
        all.push((tensor.dtype.size(), entry, EntryOrigin::TensorShard(index)));
    }
    for (index, (key, bytes)) in objects.iter().enumerate() {
        let entry = ObjectEntry::header_entry(key, 0, bytes.len() as u64);
        all.push((1, entry, EntryOrigin::Object(index)));
    }
    all.sort_by_key(|(width, ..)| Reverse(*width));
    Ok(all
        .into_iter()
        .map(|(_, entry, origin)| (entry, origin))
        .unzip())
}

fn entry_of(tensor: &TensorMeta, shards: Vec<ShardEntry>) -> TensorEntry {
    TensorEntry {
        key: tensor.key.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        shards,
    }
}

fn length(shard: &TensorShard, wanted: u64, found: u64) -> CheckpointError {
    CheckpointError::Length {
        key: shard.tensor.key.clone(),
        slice: shard.slice.clone(),
        found: found as usize,
        wanted: wanted as usize,
    }
}
