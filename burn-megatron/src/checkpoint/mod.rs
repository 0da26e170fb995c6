//! Distributed checkpoints, which can be loaded with any parallel layout. The module also defines other sources from
//! which the tensors of a complete model can be read.
//!
//! The format does not depend on the parallel layout. A tensor has a key, such as `model/blocks.0.mlp.up.weight`, and
//! its shape in the complete model. Ranks write and read [slices](TensorSlice) of tensors. [`local_shards`] returns the
//! slices that a rank holds.
//!
//! A [`CheckpointFolder`] has one folder per saved step:
//!
//! ```text
//! RUN/checkpoints/
//!   latest                      name of the newest checkpoint
//!   lock                        locked by the run that writes here
//!   step-00000100/
//!     manifest.json             file and offset of each slice of each tensor, with checksums
//!     part-00000.safetensors    data written by rank 0
//!     part-00001.safetensors    data written by rank 1
//! ```
//!
//! A run [skips](CheckpointFolder::newest_verified) a checkpoint that cannot be read. The skipped checkpoint is
//! renamed, for example to `step-00000100.unreadable-corrupt`, and is never removed.
//!
//! Saving takes three calls:
//!
//! 1. One rank [begins](CheckpointFolder::begin) a [`PendingCheckpoint`].
//! 2. All ranks [join](CheckpointFolder::join) it and [write](PendingCheckpoint::write_part) their shards.
//! 3. One rank [publishes](PendingCheckpoint::publish) it.
//!
//! A [`Checkpoint`] reads any slice of any tensor, and reads only the bytes that the slice needs.
//!
//! ```
//! use std::time::Duration;
//!
//! use burn_megatron::checkpoint::{
//!     Checkpoint, CheckpointFolder, CheckpointMetadata, ElementType, Retention, TensorMeta,
//!     TensorShard, TensorSlice, TensorSource,
//! };
//!
//! let run = tempfile::tempdir()?;
//! let pending = CheckpointFolder::create(run.path())?.begin(10)?;
//! let tensor = TensorMeta { key: "model/bias".into(), dtype: ElementType::U8, shape: vec![4] };
//! let shard = TensorShard { slice: TensorSlice::whole(&tensor.shape), tensor };
//! pending.write_part(0, &[shard], &[], |_| Ok(vec![1, 2, 3, 4]))?;
//! let metadata = CheckpointMetadata {
//!     step: 10,
//!     samples: 80,
//!     layout: "tensor 1".into(),
//!     config: serde_json::Value::Null,
//!     state: serde_json::Value::Null,
//! };
//! pending.publish(1, &metadata, &Retention::default(), Duration::from_secs(10))?;
//!
//! let checkpoint = Checkpoint::open(run.path())?;
//! assert_eq!(checkpoint.metadata().step, 10);
//! let half = TensorSlice { offset: vec![2], shape: vec![2] };
//! assert_eq!(checkpoint.read("model/bias", &half)?, [3, 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod averaged;
mod checksum;
mod checksummed;
mod compare;
mod coverage;
mod disk;
mod error;
mod folder;
mod header;
mod inactive;
mod manifest;
mod mapped_file;
mod metadata;
mod newest;
mod output;
mod part_manifest;
mod part_writer;
mod pending;
mod reader;
mod reshard;
mod source;
pub mod state;
mod unique_keys;
mod validate;
mod verify;
mod weights;

pub use crate::nn::{ContiguousRun, LocalShard, TensorSlice, local_shards};
pub use averaged::AveragedWeights;
pub use checksum::{CHECKSUM_CHUNK, Checksum};
pub use compare::{CheckpointComparison, TensorDifference, compare};
pub use disk::{Disk, DiskOperation};
pub use error::CheckpointError;
pub use folder::{CheckpointFolder, FolderLock, LOCK};
pub use header::{
    HeaderEntry, LENGTH_BYTES as HEADER_LENGTH_BYTES, MAX_BYTES as MAX_HEADER_BYTES,
    dtype as header_dtype, parse as parse_header,
};
pub use inactive::InactiveCheckpoint;
pub use manifest::{FileEntry, Manifest, ObjectEntry, ShardEntry, TensorEntry};
pub use metadata::{CheckpointMetadata, Retention};
pub use newest::{NewestCheckpoint, SkippedCheckpoint, UnusableReason};
pub use output::{check_output, check_place};
pub use part_manifest::TensorShard;
pub use part_writer::EntryWriter;
pub use pending::PendingCheckpoint;
pub use reader::Checkpoint;
pub use reshard::{FileSizes, reshard};
pub use source::{ElementType, TensorMeta, TensorSource};
pub use state::MODEL;
pub use unique_keys::unique_keys;
pub use verify::CheckpointTotals;
pub use weights::{LoadTolerance, load_weights};
pub use weights::{of_frozen, read_buckets, read_frozen, weights};

#[cfg(test)]
mod tests;
