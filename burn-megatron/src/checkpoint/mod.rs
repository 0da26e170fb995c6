//! Checkpoints that any layout can load, and tensors of whole models from elsewhere.
//!
//! Nothing here depends on how a run is laid out: a tensor has a key, such as
//! `model/blocks.0.mlp.up.weight`, and the shape that it has in the whole model. Ranks write and read
//! [boxes](Slice) of it; [`held`] says which ones a rank has.
//!
//! A [`CheckpointFolder`] has a folder for each saved step:
//!
//! ```text
//! RUN/checkpoints/
//!   latest                      names the newest
//!   lock                        held by the run that writes here
//!   step-00000100/
//!     manifest.json             which box of which tensor lies where, with checksums
//!     part-00000.safetensors    what rank 0 wrote
//!     part-00001.safetensors    what rank 1 wrote
//! ```
//!
//! What a run [passed over](CheckpointFolder::newest_whole) is kept under another name,
//! `step-00000100.unreadable-corrupt`, and never removed.
//!
//! Saving takes three calls. One rank [begins](CheckpointFolder::begin) a [`Draft`], all
//! [join](CheckpointFolder::join) it and [write](Draft::write_part) what they hold, one
//! [publishes](Draft::publish) it. A [`Checkpoint`] reads any box of any tensor, and no more of the files
//! than that needs.

mod about;
mod aside;
mod checksum;
mod compare;
mod coverage;
mod disk;
mod draft;
mod error;
mod file;
mod folder;
mod header;
mod held;
mod manifest;
mod newest;
mod part;
mod part_file;
mod reader;
mod reshard;
mod sealed;
mod slice;
mod source;
pub mod state;
mod validate;
mod verify;
mod weights;

pub use about::{About, Retention};
pub use aside::Aside;
pub use checksum::{CHUNK, Checksum};
pub use compare::{Comparison, TensorDifference, compare};
pub use disk::{Disk, Operation};
pub use draft::Draft;
pub use error::CheckpointError;
pub use folder::{CheckpointFolder, FolderLock};
pub use header::{
    HeaderEntry, LENGTH as HEADER_LENGTH, LONGEST as LONGEST_HEADER, dtype as header_dtype,
    parse as parse_header,
};
pub use held::{Held, held};
pub use manifest::{FileEntry, Manifest, ObjectEntry, PieceEntry, TensorEntry};
pub use newest::{Newest, PassedOver, Unusable};
pub use part::Piece;
pub(crate) use part_file::Entry;
pub use reader::Checkpoint;
pub use reshard::{FileSizes, reshard};
pub use slice::{Run, Slice};
pub use source::{ElementType, TensorMeta, TensorSource};
pub use state::MODEL;
pub use verify::Totals;
pub use weights::{Leniency, load_weights};
pub(crate) use weights::{read_buckets, replace_buckets, weights};

#[cfg(test)]
mod tests;
