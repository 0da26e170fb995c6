//! Saves checkpoints, synchronously or in the background.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::HumanBytes;

use burn_megatron::checkpoint::state::{Snapshot, StateError, agree};
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointMetadata, EntryWriter, FolderLock,
    PendingCheckpoint, Retention, SkippedCheckpoint, TensorSource,
};
use burn_megatron::comm::{Communicator, ParallelContext, broadcast_bytes};

/// Settings for saving the checkpoints of a run.
#[derive(Clone, Debug)]
pub struct SaveConfig {
    /// The folder of checkpoints. It must be the same on every rank.
    pub folder: PathBuf,
    /// The number of steps between two checkpoints. A checkpoint is always saved at the end of the run.
    pub every: Option<u64>,
    /// The retention policy: selects the checkpoints that are kept when a new checkpoint is published.
    pub keep: Retention,
    /// Whether checkpoints are written in the background.
    pub asynchronous: bool,
    /// The maximum time for which rank 0 waits until the other ranks have written their parts.
    pub deadline: Duration,
    /// The parallel layout of the run, as text for the metadata of the checkpoints.
    pub layout: String,
    /// The recipe of the run, for the metadata of the checkpoints.
    pub config: serde_json::Value,
}

impl SaveConfig {
    /// Creates settings for a folder. With these settings, a checkpoint is saved only at the end of the run,
    /// synchronously, and every checkpoint is kept.
    pub fn into_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            every: None,
            keep: Retention::default(),
            asynchronous: false,
            deadline: Duration::from_secs(600),
            layout: String::new(),
            config: serde_json::Value::Null,
        }
    }
}

/// A checkpoint that was saved and published.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedCheckpoint {
    /// The number of optimizer steps before the checkpoint.
    pub step: u64,
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The size of the checkpoint's tensors, in bytes.
    pub bytes: u64,
    /// The time from the start of the save until the checkpoint was published, in seconds.
    pub seconds: f64,
    /// The time for which the save blocked training, in seconds.
    pub stall_seconds: f64,
}

impl fmt::Display for SavedCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            step,
            bytes,
            seconds,
            ..
        } = self;
        let bytes = HumanBytes(*bytes);
        write!(f, "saved step {step} in {seconds:.1} s ({bytes})")
    }
}

/// A saver, which saves the checkpoints of a run. Each rank has one saver.
///
/// At most one checkpoint is being saved at a time. The next save and the end of the run wait until the previous save
/// is complete. An error on one rank is returned on all ranks.
pub struct Saver {
    saving: SaveConfig,
    folder: CheckpointFolder,
    world: Arc<dyn Communicator>,
    pending: PendingSave,
    /// Locks the folder against other runs, on rank 0.
    _lock: Option<FolderLock>,
}

/// The data that a rank writes.
pub(super) struct CheckpointContent {
    pub snapshot: Snapshot,
    /// Objects (blobs) by key.
    pub objects: Vec<(String, Vec<u8>)>,
    pub about: CheckpointMetadata,
}

/// The last started save.
enum PendingSave {
    None,
    Running(RunningSave),
    /// The thread has ended, but the ranks have not yet agreed on its result.
    Finished(Result<(), StateError>),
}

struct RunningSave {
    step: u64,
    /// `None` once it is joined.
    thread: Option<JoinHandle<Result<Option<SavedCheckpoint>, StateError>>>,
    stall: f64,
}

impl Saver {
    /// Creates the folder of checkpoints and locks it against other runs. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`StateError`] if the folder cannot be created, or is locked by another run.
    pub fn open(saving: SaveConfig, groups: &ParallelContext) -> Result<Self, StateError> {
        let world = groups.world().clone();
        let is_first = groups.rank() == 0;
        let first = || {
            let folder = CheckpointFolder::create(&saving.folder)?;
            let lock = folder.lock()?;
            Ok((folder, Some(lock)))
        };
        let made = agree(is_first.then(first).transpose(), &*world)?;
        let other = || Ok((CheckpointFolder::open(&saving.folder)?, None));
        let opened = made.map_or_else(other, Ok);
        let (folder, _lock) = agree(opened, &*world)?;
        Ok(Self {
            saving,
            folder,
            world,
            pending: PendingSave::None,
            _lock,
        })
    }

    /// Returns the settings of the saver.
    pub fn saving(&self) -> &SaveConfig {
        &self.saving
    }

    /// Prepares the folder of checkpoints for a run that resumes from `step`. Collective: call on all ranks of the
    /// world.
    ///
    /// The checkpoints in `passed` are [quarantined](CheckpointFolder::quarantine). Only rank 0 uses `passed`.
    /// Checkpoints of later steps are [discarded](CheckpointFolder::discard_after) if `discard_later` is true.
    ///
    /// # Errors
    ///
    /// [`StateError`] if there are checkpoints of later steps and `discard_later` is false, or if a folder cannot be
    /// renamed.
    pub fn prepare_resume(
        &self,
        step: u64,
        passed: &[SkippedCheckpoint],
        discard_later: bool,
    ) -> Result<(), StateError> {
        let ready = || {
            self.folder.quarantine(passed)?;
            let steps = self.folder.steps()?.into_iter();
            let later: Vec<_> = steps.filter(|later| *later > step).collect();
            if !later.is_empty() && !discard_later {
                let path = self.folder.path().to_path_buf();
                return Err(CheckpointError::LaterSteps { path, step, later });
            }
            self.folder.discard_after(step).map(drop)
        };
        let ready = match self.world.rank() {
            0 => ready(),
            _ => Ok(()),
        };
        agree(ready.map_err(StateError::from), &*self.world)
    }

    /// Returns whether a checkpoint is due after `step` steps.
    pub(super) fn is_due(&self, step: u64) -> bool {
        let every = self.saving.every.filter(|every| *every > 0);
        every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Waits for the previous save, then saves or starts to save. Rank 0 returns the checkpoints published so far.
    /// Collective: call on all ranks of the world.
    pub(super) fn save(
        &mut self,
        content: Result<CheckpointContent, StateError>,
    ) -> Result<Vec<SavedCheckpoint>, StateError> {
        let started = Instant::now();
        let before = self.wait()?;
        let (draft, mut content) = self.begin(content)?;
        let kept = if self.saving.asynchronous {
            content.snapshot.keep()
        } else {
            Ok(())
        };
        let step = content.about.step;
        let job = SaveJob {
            draft,
            content,
            rank: self.world.rank(),
            ranks: self.world.size(),
            keep: self.saving.keep,
            deadline: self.saving.deadline,
            folder: self.saving.folder.clone(),
            started,
        };
        let run = move || match kept {
            Ok(()) => job.run(),
            Err(error) => {
                job.draft.fail_part(job.rank, &error.to_string());
                Err(error)
            }
        };
        if !self.saving.asynchronous {
            let saved = agree(run(), &*self.world)?;
            let stall_seconds = started.elapsed().as_secs_f64();
            let saved = saved.map(|saved| SavedCheckpoint {
                stall_seconds,
                ..saved
            });
            return Ok(before.into_iter().chain(saved).collect());
        }
        let name = format!("save-{}", self.world.rank());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|error| CheckpointError::io("start a thread for", &self.saving.folder, error));
        self.pending = match thread {
            Ok(thread) => PendingSave::Running(RunningSave {
                step,
                thread: Some(thread),
                stall: started.elapsed().as_secs_f64(),
            }),
            Err(error) => PendingSave::Finished(Err(error.into())),
        };
        Ok(before.into_iter().collect())
    }

    /// Creates the pending checkpoint on rank 0. The other ranks join it.
    fn begin(
        &self,
        content: Result<CheckpointContent, StateError>,
    ) -> Result<(PendingCheckpoint, CheckpointContent), StateError> {
        let content = agree(content, &*self.world)?;
        let begun = match self.world.rank() {
            0 => self.folder.begin(content.about.step).map(Some),
            _ => Ok(None),
        };
        let name = begun.as_ref().ok().and_then(Option::as_ref);
        let name = name.map(|draft| draft.name().as_bytes().to_vec());
        let name = broadcast_bytes(&*self.world, &name.unwrap_or_default(), 0)?;
        let name = String::from_utf8_lossy(&name);
        let draft = match (begun, name.is_empty()) {
            // Rank 0 returns the error.
            (Ok(None), true) => Ok(None),
            (Ok(None), false) => self.folder.join(&name).map(Some),
            (begun, _) => begun,
        };
        match agree(draft.map_err(StateError::from), &*self.world)? {
            Some(draft) => Ok((draft, content)),
            None => unreachable!("rank 0 has created a draft and broadcast its name"),
        }
    }

    /// Returns the checkpoint that a background save has published since the last call. Only rank 0 returns a
    /// checkpoint.
    pub(super) fn take_finished(&mut self) -> Option<SavedCheckpoint> {
        let PendingSave::Running(running) = &mut self.pending else {
            return None;
        };
        let is_over = |thread: &JoinHandle<_>| thread.is_finished();
        if !running.thread.as_ref().is_some_and(is_over) {
            return None;
        }
        let finished = running.join();
        let saved = finished.as_ref().ok().cloned().flatten();
        if let Err(error) = &finished {
            let step = running.step;
            tracing::warn!(
                "saving step {step} failed, the next save will return this error: {error}"
            );
        }
        self.pending = PendingSave::Finished(finished.map(|_| ()));
        saved
    }

    /// Waits for the save in progress. Rank 0 returns the checkpoint, unless [`take_finished`] already returned it.
    /// Collective: call on all ranks of the world.
    ///
    /// [`take_finished`]: Self::take_finished
    pub(super) fn wait(&mut self) -> Result<Option<SavedCheckpoint>, StateError> {
        let waited = match std::mem::replace(&mut self.pending, PendingSave::None) {
            PendingSave::None => return Ok(None),
            PendingSave::Finished(result) => result.map(|()| None),
            PendingSave::Running(mut running) => {
                let started = Instant::now();
                let saved = running.join();
                let waited = started.elapsed().as_secs_f64();
                saved.map(|saved| {
                    saved.map(|saved| SavedCheckpoint {
                        stall_seconds: saved.stall_seconds + waited,
                        ..saved
                    })
                })
            }
        };
        agree(waited, &*self.world)
    }
}

impl RunningSave {
    fn join(&mut self) -> Result<Option<SavedCheckpoint>, StateError> {
        let step = self.step;
        let joined = self.thread.take().map(JoinHandle::join);
        let saved = joined.and_then(Result::ok);
        let saved = saved.unwrap_or(Err(StateError::WriterPanicked { step }))?;
        let stall_seconds = self.stall;
        Ok(saved.map(|saved| SavedCheckpoint {
            stall_seconds,
            ..saved
        }))
    }
}

impl Drop for RunningSave {
    /// Waits for the thread, so that no incomplete files remain.
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The work of one rank for a checkpoint.
struct SaveJob {
    draft: PendingCheckpoint,
    content: CheckpointContent,
    rank: usize,
    ranks: usize,
    keep: Retention,
    deadline: Duration,
    folder: PathBuf,
    started: Instant,
}

impl SaveJob {
    /// Writes the part of this rank. Rank 0 then waits for the other parts, and publishes the checkpoint.
    fn run(self) -> Result<Option<SavedCheckpoint>, StateError> {
        let Self {
            draft,
            mut content,
            rank,
            ranks,
            ..
        } = self;
        let pieces = content.snapshot.shards();
        let folder = &self.folder;
        let data = |number, to: &mut EntryWriter| {
            let streamed = content
                .snapshot
                .stream(number, &mut |bytes| to.write(bytes));
            streamed.map_err(|error| match error {
                StateError::Checkpoint(error) => error,
                error => CheckpointError::io("read a tensor for", folder, io::Error::other(error)),
            })
        };
        if let Err(error) = draft.stream_part(rank, &pieces, &content.objects, data) {
            draft.fail_part(rank, &error.to_string());
            return Err(error.into());
        }
        // A tensor is copied on write while the snapshot holds it.
        drop(content.snapshot);
        if rank != 0 {
            return Ok(None);
        }
        let checkpoint = draft.publish(ranks, &content.about, &self.keep, self.deadline)?;
        Ok(Some(SavedCheckpoint {
            step: content.about.step,
            path: checkpoint.path().to_path_buf(),
            bytes: bytes(&checkpoint),
            seconds: self.started.elapsed().as_secs_f64(),
            stall_seconds: 0.0,
        }))
    }
}

/// Returns the size of all tensors, in bytes.
fn bytes(checkpoint: &Checkpoint) -> u64 {
    let keys = checkpoint.keys().into_iter();
    let tensors = keys.filter_map(|key| checkpoint.tensor(&key));
    let bytes = tensors.map(|tensor| tensor.shape.iter().product::<usize>() * tensor.dtype.size());
    bytes.sum::<usize>() as u64
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
