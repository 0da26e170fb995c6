//! What one rank writes: a safetensors file, and beside it, until the checkpoint is published, what is in
//! it.

use std::cmp::Reverse;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::header::{self, HeaderEntry};
use super::part_file::{Entry, PartFile};
use super::{
    CheckpointError, Checksum, FileEntry, ObjectEntry, PieceEntry, Slice, TensorEntry, TensorMeta,
    sealed,
};

/// A box of a tensor, which a part will hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tensor.
    pub tensor: TensorMeta,
    /// The box; an empty one says only that the tensor is there.
    pub slice: Slice,
}

/// What a part holds. Its file has the number 0.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its file; none if it holds nothing.
    pub file: Option<FileEntry>,
    /// Its pieces, each with its tensor.
    pub tensors: Vec<TensorEntry>,
    /// Its objects.
    pub objects: Vec<ObjectEntry>,
    #[serde(rename = "checksum", skip_serializing)]
    _checksum: Option<Checksum>,
}

/// The name of the file of a part.
pub fn data_name(rank: usize) -> String {
    format!("part-{rank:05}.safetensors")
}

/// The name of what a part says of itself when it is complete.
pub fn done_name(rank: usize) -> String {
    format!("part-{rank:05}.json")
}

/// The name of what a rank says that could not write its part.
pub fn failed_name(rank: usize) -> String {
    format!("part-{rank:05}.failed")
}

/// Where the bytes of an entry come from.
enum Origin {
    Piece(usize),
    Object(usize),
}

/// Writes the file of a part, syncs it, and says what is in it. `data` writes the elements of a piece into
/// its entry, a stretch at a time. See [`super::Draft::write_part`].
pub fn write(
    disk: &Disk,
    folder: &Path,
    rank: usize,
    pieces: &[Piece],
    objects: &[(String, Vec<u8>)],
    mut data: impl FnMut(usize, &mut Entry) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut part = Part {
        file: None,
        tensors: vec![],
        objects: vec![],
        _checksum: None,
    };
    let (mut entries, origins) = plan(pieces, objects)?;
    let empty = pieces.iter().filter(|piece| piece.slice.is_empty());
    part.tensors
        .extend(empty.map(|piece| entry_of(&piece.tensor, vec![])));
    if !entries.is_empty() {
        let name = data_name(rank);
        let header = header::build(&name, &mut entries)?;
        let size = header.len() as u64 + entries.iter().map(|entry| entry.size).sum::<u64>();
        let path = folder.join(&name);
        let mut file = PartFile::create(disk, &path, size)?;
        file.write(&header)?;
        for (entry, origin) in entries.iter().zip(origins) {
            match origin {
                Origin::Piece(index) => {
                    let piece = &pieces[index];
                    let mut to = file.entry(entry.size);
                    data(index, &mut to)?;
                    let written = PieceEntry {
                        file: 0,
                        begin: entry.begin,
                        slice: piece.slice.clone(),
                        checksums: to
                            .finish()
                            .map_err(|found| length(piece, entry.size, found))?,
                    };
                    part.tensors.push(entry_of(&piece.tensor, vec![written]));
                }
                Origin::Object(index) => {
                    let (key, bytes) = &objects[index];
                    let mut to = file.entry(entry.size);
                    to.write(bytes)?;
                    part.objects.push(ObjectEntry {
                        key: key.clone(),
                        file: 0,
                        begin: entry.begin,
                        size: entry.size,
                        checksums: to.finish().expect("the entry is as long as the object"),
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
    disk.replace(&folder.join(done_name(rank)), &part.to_bytes())
}

impl Part {
    /// Reads what a part says of itself.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = std::fs::read(path);
        let bytes = bytes.map_err(|error| CheckpointError::io("read", path, error))?;
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        sealed::check(&bytes).map_err(corrupt)?;
        serde_json::from_slice(&bytes).map_err(|error| corrupt(error.to_string()))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let text =
            serde_json::to_string(self).expect("numbers, text and lists of them have a form");
        // The checksum takes the place of the end.
        sealed::seal(text[..text.len() - 1].to_string() + ",\n")
    }
}

/// The entries of the file, the widest elements first so that all are aligned, and where their bytes come
/// from.
fn plan(
    pieces: &[Piece],
    objects: &[(String, Vec<u8>)],
) -> Result<(Vec<HeaderEntry>, Vec<Origin>), CheckpointError> {
    let mut all = vec![];
    for (index, piece) in pieces.iter().enumerate() {
        let Piece { tensor, slice } = piece;
        let (key, shape) = (&tensor.key, &tensor.shape);
        if !slice.fits(shape) {
            return Err(CheckpointError::Slice {
                key: key.clone(),
                shape: shape.clone(),
                slice: slice.clone(),
            });
        }
        let too_large = || CheckpointError::TooLarge {
            key: key.clone(),
            shape: shape.clone(),
        };
        tensor.bytes().ok_or_else(too_large)?;
        let size = tensor.bytes_of(slice).ok_or_else(too_large)?;
        if slice.is_empty() {
            continue;
        }
        let entry = HeaderEntry {
            name: entry_of(tensor, vec![]).name_of(slice),
            dtype: header::dtype(tensor.dtype),
            shape: slice.shape.clone(),
            begin: 0,
            size: size as u64,
        };
        all.push((tensor.dtype.size(), entry, Origin::Piece(index)));
    }
    for (index, (key, bytes)) in objects.iter().enumerate() {
        let entry = HeaderEntry {
            name: ObjectEntry::name(key),
            dtype: safetensors::Dtype::U8,
            shape: vec![bytes.len()],
            begin: 0,
            size: bytes.len() as u64,
        };
        all.push((1, entry, Origin::Object(index)));
    }
    all.sort_by_key(|(width, ..)| Reverse(*width));
    Ok(all
        .into_iter()
        .map(|(_, entry, origin)| (entry, origin))
        .unzip())
}

fn entry_of(tensor: &TensorMeta, pieces: Vec<PieceEntry>) -> TensorEntry {
    TensorEntry {
        key: tensor.key.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        pieces,
    }
}

fn length(piece: &Piece, wanted: u64, found: u64) -> CheckpointError {
    CheckpointError::Length {
        key: piece.tensor.key.clone(),
        slice: piece.slice.clone(),
        found: found as usize,
        wanted: wanted as usize,
    }
}
