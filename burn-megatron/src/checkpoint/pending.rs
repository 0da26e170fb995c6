//! A checkpoint that is being written.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::disk;
use super::folder::FolderLock;
use super::manifest::MANIFEST;
use super::part_manifest::{self, PartManifest};
use super::part_writer::EntryWriter;
use super::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointMetadata, Manifest, Retention,
    TensorEntry, TensorShard, validate,
};
use crate::regular_file;

/// The maximum size of the failure reason of a rank that is read, in bytes.
const MAX_REASON_BYTES: u64 = 1 << 20;

/// The minimum and the maximum time between two polls of the publishing rank. Within these limits, the time is the
/// elapsed time divided by [`BACKOFF_DIVISOR`].
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
const BACKOFF_DIVISOR: u32 = 64;

/// A checkpoint that is being written. Its folder has a temporary name.
///
/// All ranks write their parts. Then one rank publishes the checkpoint. The pending checkpoint is removed if the rank
/// that began it drops this value without publishing.
#[derive(Debug)]
pub struct PendingCheckpoint {
    folder: CheckpointFolder,
    name: String,
    /// The lock of the folder, on the rank that began the save.
    lock: Option<FolderLock>,
}

impl PendingCheckpoint {
    pub(super) fn new(folder: CheckpointFolder, name: String, lock: Option<FolderLock>) -> Self {
        Self { folder, name, lock }
    }

    /// Returns the name of the pending checkpoint. Other ranks [join](CheckpointFolder::join) the checkpoint by this
    /// name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(&self.name)
    }

    /// Writes the part of the checkpoint that belongs to a rank: shards of tensors, and objects (bytes with a name).
    /// Every rank must call this method once. A rank that has nothing to write passes empty lists.
    ///
    /// `data` returns the elements of the shard with the given index, in row-major order and little-endian. It is
    /// called once for each non-empty shard. Shards with the largest element types come first. Only one shard at a time
    /// is in memory. A failure is also reported to the rank that publishes the checkpoint.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::OutOfBounds`], [`CheckpointError::Length`], [`CheckpointError::TooLarge`] and
    /// [`CheckpointError::Duplicate`] for invalid shards; [`CheckpointError::Write`] for a full disk;
    /// [`CheckpointError::Io`] for other failures of the file system; the errors of `data`.
    pub fn write_part(
        &self,
        rank: usize,
        shards: &[TensorShard],
        objects: &[(String, Vec<u8>)],
        mut data: impl FnMut(usize) -> Result<Vec<u8>, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.stream_part(rank, shards, objects, |index, to| to.write(&data(index)?))
    }

    /// Writes the part of a rank like [`Self::write_part`], but `data` writes the elements of a shard in one or more
    /// calls.
    pub fn stream_part(
        &self,
        rank: usize,
        shards: &[TensorShard],
        objects: &[(String, Vec<u8>)],
        data: impl FnMut(usize, &mut EntryWriter) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let disk = self.folder.disk();
        let result = part_manifest::write(disk, &self.path(), rank, shards, objects, data);
        if let Err(error) = &result {
            self.fail_part(rank, &error.to_string());
        }
        result
    }

    /// Reports to the publishing rank that a rank could not write its part. If the report cannot be written either,
    /// [`Self::publish`] waits until its deadline.
    pub fn fail_part(&self, rank: usize, reason: &str) {
        let path = self.path().join(part_manifest::failed_name(rank));
        // The publisher removes the folder as soon as it finds the report.
        let disk = self.folder.disk();
        if let Err(error) = disk.write_atomically(&path, reason.as_bytes()) {
            tracing::warn!("rank {rank} could not report its failed write: {error}");
        }
    }

    /// Publishes the checkpoint. This method waits for the parts of all `ranks`, checks that each element was saved
    /// exactly once, and sets `latest` to this checkpoint. Then it removes the checkpoints that `keep` does not retain,
    /// and the checkpoints that were [discarded](CheckpointFolder::discard_after).
    ///
    /// The data is synced to disk before the folder gets its final name. Even if the process is killed at any time,
    /// `latest` names a complete checkpoint: this checkpoint or the previous checkpoint.
    ///
    /// # Errors
    ///
    /// - [`CheckpointError::RankFailed`] as soon as a rank has failed, and [`CheckpointError::Timeout`] after
    ///   `deadline`.
    /// - [`CheckpointError::Overlap`], [`CheckpointError::Gap`], [`CheckpointError::Mismatch`] and
    ///   [`CheckpointError::Duplicate`] for inconsistent parts.
    /// - [`CheckpointError::Io`] and [`CheckpointError::Write`] if a file system operation fails.
    /// - [`CheckpointError::Leftover`] if only the removal of older checkpoints failed.
    ///
    /// After any error except `Leftover`, the pending checkpoint is removed and `latest` is unchanged.
    pub fn publish(
        mut self,
        ranks: usize,
        metadata: &CheckpointMetadata,
        keep: &Retention,
        deadline: Duration,
    ) -> Result<Checkpoint, CheckpointError> {
        let _lock = self.folder.lock()?;
        let (path, disk) = (self.path(), self.folder.disk().clone());
        self.wait(ranks, deadline)?;
        let manifest = self.collect(ranks, metadata)?;
        validate::check(&manifest, &path.join(MANIFEST))?;
        disk.replace(&path.join(MANIFEST), &manifest.to_bytes())?;
        for rank in 0..ranks {
            disk.remove_file(&path.join(part_manifest::manifest_name(rank)))?;
        }
        disk.sync_folder(&path)?;
        let name = self.folder.free_name(metadata.step)?;
        let published = self.folder.path().join(name.text());
        disk.rename(&path, &published)?;
        // From here on `drop` has nothing to remove.
        self.lock = None;
        disk.sync_folder(self.folder.path())?;
        self.folder.point_to(name)?;
        let removed = self
            .folder
            .retain(keep, name)
            .and_then(|()| self.folder.remove_discarded());
        removed.map_err(|source| CheckpointError::Leftover {
            path: published.clone(),
            source: Box::new(source),
        })?;
        Checkpoint::with_manifest(published, manifest)
    }

    /// Waits until every rank's part manifest exists.
    fn wait(&self, ranks: usize, deadline: Duration) -> Result<(), CheckpointError> {
        let (path, begin) = (self.path(), Instant::now());
        loop {
            let names = disk::names(&path)?;
            let has = |name: String| names.binary_search(&name).is_ok();
            if let Some(rank) = (0..ranks).find(|rank| has(part_manifest::failed_name(*rank))) {
                let reason = path.join(part_manifest::failed_name(rank));
                let reason = regular_file::read(&reason, MAX_REASON_BYTES).unwrap_or_default();
                return Err(CheckpointError::RankFailed {
                    rank,
                    reason: String::from_utf8_lossy(&reason).into_owned(),
                });
            }
            let missing: Vec<_> = (0..ranks)
                .filter(|rank| !has(part_manifest::manifest_name(*rank)))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= deadline {
                let ranks = missing;
                return Err(CheckpointError::Timeout { ranks, waited });
            }
            let sleep = (waited / BACKOFF_DIVISOR).clamp(POLL_INTERVAL.0, POLL_INTERVAL.1);
            thread::sleep(sleep.min(deadline - waited));
        }
    }

    /// Merges the part manifests.
    fn collect(
        &self,
        ranks: usize,
        metadata: &CheckpointMetadata,
    ) -> Result<Manifest, CheckpointError> {
        let path = self.path();
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        let mut objects = BTreeMap::new();
        let mut files = vec![];
        for rank in 0..ranks {
            let part = PartManifest::read(&path.join(part_manifest::manifest_name(rank)))?;
            let number = files.len();
            files.extend(part.file);
            for mut tensor in part.tensors {
                tensor
                    .shards
                    .iter_mut()
                    .for_each(|shard| shard.file = number);
                match tensors.get_mut(&tensor.key) {
                    None => {
                        tensors.insert(tensor.key.clone(), tensor);
                    }
                    Some(known) => join(known, tensor)?,
                }
            }
            for mut object in part.objects {
                object.file = number;
                let key = object.key.clone();
                if objects.insert(key.clone(), object).is_some() {
                    return Err(CheckpointError::Duplicate { key });
                }
            }
        }
        Ok(Manifest {
            metadata: metadata.clone(),
            files,
            tensors: tensors.into_values().collect(),
            objects: objects.into_values().collect(),
        })
    }
}

impl Drop for PendingCheckpoint {
    fn drop(&mut self) {
        if self.lock.is_some()
            && let Err(error) = self.folder.disk().remove(&self.path())
        {
            // The next save removes it.
            tracing::warn!("could not remove an unfinished save: {error}");
        }
    }
}

/// Adds the shards of the same tensor in another part.
fn join(known: &mut TensorEntry, other: TensorEntry) -> Result<(), CheckpointError> {
    let is = |tensor: &TensorEntry| format!("{} {:?}", tensor.dtype, tensor.shape);
    if known.meta() != other.meta() {
        return Err(CheckpointError::Mismatch {
            key: other.key.clone(),
            first: is(known),
            second: is(&other),
        });
    }
    known.shards.extend(other.shards);
    Ok(())
}
