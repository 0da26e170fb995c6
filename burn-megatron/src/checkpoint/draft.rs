//! A checkpoint that is being written.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::disk;
use super::folder::FolderLock;
use super::manifest::MANIFEST;
use super::part::{self, Part};
use super::part_file::Entry;
use super::{
    About, Checkpoint, CheckpointError, CheckpointFolder, Manifest, Piece, Retention, TensorEntry,
    validate,
};

/// How long the publisher sleeps between two looks: a part of what it has waited, so that little is lost
/// to it, within these bounds.
const SLEEP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
const OF_WAITED: u32 = 64;

/// A checkpoint that is being written: a folder that nobody takes for one.
///
/// All ranks write their parts into it, then one publishes it. A draft that is dropped by the one who
/// began it is removed.
#[derive(Debug)]
pub struct Draft {
    folder: CheckpointFolder,
    name: String,
    /// Of the rank that began it: the right to write, and the step.
    begun: Option<(FolderLock, u64)>,
}

impl Draft {
    pub(super) fn new(
        folder: CheckpointFolder,
        name: String,
        begun: Option<(FolderLock, u64)>,
    ) -> Self {
        Self {
            folder,
            name,
            begun,
        }
    }

    /// What the other ranks [join](CheckpointFolder::join) it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(&self.name)
    }

    /// Writes the part of a rank: pieces of tensors, and objects, which are bytes with a name. Each rank
    /// writes one, if only an empty one.
    ///
    /// `data` gives the elements of a piece by its index, in row-major order and little-endian. It is
    /// called once for each piece that is not empty, the widest types first, and one piece at a time is in
    /// memory. A failure is told to the publisher too.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Slice`], [`CheckpointError::Length`], [`CheckpointError::TooLarge`] and
    /// [`CheckpointError::Twice`] for pieces that cannot be; [`CheckpointError::Write`] for a full disk;
    /// [`CheckpointError::Io`]; what `data` fails with.
    pub fn write_part(
        &self,
        rank: usize,
        pieces: &[Piece],
        objects: &[(String, Vec<u8>)],
        mut data: impl FnMut(usize) -> Result<Vec<u8>, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.stream_part(rank, pieces, objects, |index, to| to.write(&data(index)?))
    }

    /// [`Self::write_part`] for pieces that come in stretches, which `data` writes one after another.
    pub(crate) fn stream_part(
        &self,
        rank: usize,
        pieces: &[Piece],
        objects: &[(String, Vec<u8>)],
        data: impl FnMut(usize, &mut Entry) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let disk = self.folder.disk();
        let result = part::write(disk, &self.path(), rank, pieces, objects, data);
        if let Err(error) = &result {
            self.fail_part(rank, &error.to_string());
        }
        result
    }

    /// Tells the publisher that the part of a rank will not come. If not even that can be written, the
    /// publisher's deadline ends its wait.
    pub fn fail_part(&self, rank: usize, reason: &str) {
        let path = self.path().join(part::failed_name(rank));
        if let Err(error) = self.folder.disk().replace(&path, reason.as_bytes()) {
            tracing::warn!("rank {rank} cannot tell why it has no part: {error}");
        }
    }

    /// Waits for the parts of all `ranks`, checks that each element was saved once, and makes the
    /// checkpoint the latest; then removes those that are not to be kept, and those that were
    /// [discarded](CheckpointFolder::discard_after).
    ///
    /// Everything is on the disk before it gets its name. Whenever the process dies, `latest` names a whole
    /// checkpoint: this one or the one before.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Part`] as soon as a rank has failed, [`CheckpointError::Late`] after `deadline`;
    /// [`CheckpointError::Overlap`], [`CheckpointError::Gap`], [`CheckpointError::Differ`] and
    /// [`CheckpointError::Twice`] for parts that do not make a whole; [`CheckpointError::Io`] and
    /// [`CheckpointError::Write`]. The draft is then removed and the latest is as it was.
    /// [`CheckpointError::Leftover`] if only the removal of older ones has failed.
    pub fn publish(
        mut self,
        ranks: usize,
        about: &About,
        keep: &Retention,
        deadline: Duration,
    ) -> Result<Checkpoint, CheckpointError> {
        let _lock = self.folder.lock()?;
        let (path, disk) = (self.path(), self.folder.disk().clone());
        self.wait(ranks, deadline)?;
        let manifest = self.collect(ranks, about)?;
        validate::check(&manifest, &path.join(MANIFEST))?;
        disk.replace(&path.join(MANIFEST), &manifest.to_bytes())?;
        for rank in 0..ranks {
            disk.remove_file(&path.join(part::done_name(rank)))?;
        }
        disk.sync_folder(&path)?;
        let name = self.folder.free_name(about.step)?;
        let published = self.folder.path().join(name.text());
        disk.rename(&path, &published)?;
        // From here on there is nothing to remove.
        self.begun = None;
        disk.sync_folder(self.folder.path())?;
        self.folder.point_to(name)?;
        let removed = self.folder.retain(keep, name);
        let removed = removed.and_then(|()| self.folder.remove_discarded());
        removed.map_err(|source| CheckpointError::Leftover {
            path: published.clone(),
            source: Box::new(source),
        })?;
        Checkpoint::with_manifest(published, manifest)
    }

    /// Waits until each rank has said that its part is complete.
    fn wait(&self, ranks: usize, deadline: Duration) -> Result<(), CheckpointError> {
        let (path, begin) = (self.path(), Instant::now());
        loop {
            let names = disk::names(&path)?;
            let has = |name: String| names.binary_search(&name).is_ok();
            if let Some(rank) = (0..ranks).find(|rank| has(part::failed_name(*rank))) {
                let reason = std::fs::read(path.join(part::failed_name(rank)));
                let reason = reason.unwrap_or_default();
                return Err(CheckpointError::Part {
                    rank,
                    reason: String::from_utf8_lossy(&reason).into_owned(),
                });
            }
            let missing = (0..ranks).filter(|rank| !has(part::done_name(*rank)));
            let missing: Vec<_> = missing.collect();
            if missing.is_empty() {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= deadline {
                let ranks = missing;
                return Err(CheckpointError::Late { ranks, waited });
            }
            let sleep = (waited / OF_WAITED).clamp(SLEEP.0, SLEEP.1);
            thread::sleep(sleep.min(deadline - waited));
        }
    }

    /// Puts together what the parts hold.
    fn collect(&self, ranks: usize, about: &About) -> Result<Manifest, CheckpointError> {
        let path = self.path();
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        let mut objects = BTreeMap::new();
        let mut files = vec![];
        for rank in 0..ranks {
            let part = Part::read(&path.join(part::done_name(rank)))?;
            let number = files.len();
            files.extend(part.file);
            for mut tensor in part.tensors {
                tensor
                    .pieces
                    .iter_mut()
                    .for_each(|piece| piece.file = number);
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
                    return Err(CheckpointError::Twice { key });
                }
            }
        }
        Ok(Manifest {
            about: about.clone(),
            files,
            tensors: tensors.into_values().collect(),
            objects: objects.into_values().collect(),
        })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.begun.is_some()
            && let Err(error) = self.folder.disk().remove(&self.path())
        {
            // The next save removes it.
            tracing::warn!("a save that was given up is still there: {error}");
        }
    }
}

/// Adds the pieces that another part has of a tensor.
fn join(known: &mut TensorEntry, other: TensorEntry) -> Result<(), CheckpointError> {
    let is = |tensor: &TensorEntry| format!("{} {:?}", tensor.dtype, tensor.shape);
    if known.meta() != other.meta() {
        return Err(CheckpointError::Differ {
            key: other.key.clone(),
            first: is(known),
            second: is(&other),
        });
    }
    known.pieces.extend(other.pieces);
    Ok(())
}
