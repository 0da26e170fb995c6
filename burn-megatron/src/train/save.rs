//! Saving a run, at once or while it goes on.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::DecimalBytes;

use crate::checkpoint::state::{Snapshot, StateError, agree};
use crate::checkpoint::{
    About, Checkpoint, CheckpointError, CheckpointFolder, Draft, Entry, FolderLock, PassedOver,
    Retention, TensorSource,
};
use crate::comm::{Communicator, Groups, broadcast_bytes};

/// Where and when a run saves.
#[derive(Clone, Debug)]
pub struct Saving {
    /// The folder of its checkpoints, the same on every rank.
    pub folder: PathBuf,
    /// Steps between two checkpoints; there is always one at the end.
    pub every: Option<u64>,
    /// Which checkpoints stay when a new one is there.
    pub keep: Retention,
    /// Whether training goes on while a checkpoint is written.
    pub asynchronous: bool,
    /// How long the first rank waits for the parts of the others.
    pub deadline: Duration,
    /// The layout of the run, as a person writes it.
    pub layout: String,
    /// The recipe of the run.
    pub config: serde_json::Value,
}

impl Saving {
    /// Saves at the end, keeps every checkpoint, and waits until it is written.
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

/// A checkpoint that was published.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Steps that were made.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// From the beginning to its publication.
    pub seconds: f64,
    /// How long training stood still for it.
    pub stall_seconds: f64,
}

impl fmt::Display for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            step,
            bytes,
            seconds,
            ..
        } = self;
        let bytes = DecimalBytes(*bytes);
        write!(f, "saved step {step} in {seconds:.1} s ({bytes})")
    }
}

/// Saves the checkpoints of a run; every rank has one.
///
/// One save is in flight at a time: the next one, or the end, waits for it. An error of a rank is one
/// of all ranks, and ends the run there.
pub struct Saver {
    saving: Saving,
    folder: CheckpointFolder,
    world: Arc<dyn Communicator>,
    flight: Flight,
    /// Keeps other runs out, on the first rank.
    _lock: Option<FolderLock>,
}

/// What a rank writes.
pub(super) struct Content {
    pub snapshot: Snapshot,
    /// Objects by their keys.
    pub objects: Vec<(String, Vec<u8>)>,
    pub about: About,
}

/// The save that was begun last.
enum Flight {
    None,
    Flying(Flying),
    /// Its thread has ended, and not every rank knows how.
    Landed(Result<(), StateError>),
}

struct Flying {
    step: u64,
    /// Something until it is joined.
    thread: Option<JoinHandle<Result<Option<Saved>, StateError>>>,
    stall: f64,
}

impl Saver {
    /// Makes the folder ready, and keeps other runs out of it; every rank must come.
    ///
    /// # Errors
    ///
    /// [`StateError`] for a folder that cannot be made, or that another run writes to.
    pub fn open(saving: Saving, groups: &Groups) -> Result<Self, StateError> {
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
            flight: Flight::None,
            _lock,
        })
    }

    /// Where and when it saves.
    pub fn saving(&self) -> &Saving {
        &self.saving
    }

    /// Makes the folder ready for a run that goes on in it from `step`; every rank must come, and the
    /// first one says what was passed over. That is [set aside](CheckpointFolder::set_aside); checkpoints of
    /// later steps are [discarded](CheckpointFolder::discard_after) where `discard_later` allows it.
    ///
    /// # Errors
    ///
    /// [`StateError`] where there are later ones and they may not be discarded, and for names that cannot
    /// be changed.
    pub fn go_on_from(
        &self,
        step: u64,
        passed: &[PassedOver],
        discard_later: bool,
    ) -> Result<(), StateError> {
        let ready = || {
            self.folder.set_aside(passed)?;
            let steps = self.folder.steps()?.into_iter();
            let later: Vec<_> = steps.filter(|later| *later > step).collect();
            if !later.is_empty() && !discard_later {
                let path = self.folder.path().to_path_buf();
                return Err(CheckpointError::Later { path, step, later });
            }
            self.folder.discard_after(step).map(drop)
        };
        let ready = match self.world.rank() {
            0 => ready(),
            _ => Ok(()),
        };
        agree(ready.map_err(StateError::from), &*self.world)
    }

    /// Whether a checkpoint is due after so many steps.
    pub(super) fn is_due(&self, step: u64) -> bool {
        let every = self.saving.every.filter(|every| *every > 0);
        every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Begins to save, after the save in flight; every rank must come. What was published by then is
    /// known to the first rank.
    pub(super) fn save(
        &mut self,
        content: Result<Content, StateError>,
    ) -> Result<Vec<Saved>, StateError> {
        let started = Instant::now();
        let before = self.settle()?;
        let (draft, mut content) = self.begin(content)?;
        let kept = match self.saving.asynchronous {
            true => content.snapshot.keep(),
            false => Ok(()),
        };
        let step = content.about.step;
        let job = Job {
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
            let saved = saved.map(|saved| Saved {
                stall_seconds,
                ..saved
            });
            return Ok(before.into_iter().chain(saved).collect());
        }
        let name = format!("save-{}", self.world.rank());
        let thread = std::thread::Builder::new().name(name).spawn(run);
        let thread = thread
            .map_err(|error| CheckpointError::io("begin a thread for", &self.saving.folder, error));
        self.flight = match thread {
            Ok(thread) => Flight::Flying(Flying {
                step,
                thread: Some(thread),
                stall: started.elapsed().as_secs_f64(),
            }),
            Err(error) => Flight::Landed(Err(error.into())),
        };
        Ok(before.into_iter().collect())
    }

    /// The draft, which the first rank begins and the others join.
    fn begin(&self, content: Result<Content, StateError>) -> Result<(Draft, Content), StateError> {
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
            // The first rank says why not.
            (Ok(None), true) => Ok(None),
            (Ok(None), false) => self.folder.join(&name).map(Some),
            (begun, _) => begun,
        };
        match agree(draft.map_err(StateError::from), &*self.world)? {
            Some(draft) => Ok((draft, content)),
            None => unreachable!("the first rank began a draft and told its name"),
        }
    }

    /// What was published in the background since it was asked last; known to the first rank.
    pub(super) fn landed(&mut self) -> Option<Saved> {
        let Flight::Flying(flying) = &mut self.flight else {
            return None;
        };
        let is_over = |thread: &JoinHandle<_>| thread.is_finished();
        if !flying.thread.as_ref().is_some_and(is_over) {
            return None;
        }
        let landed = flying.join();
        let saved = landed.as_ref().ok().cloned().flatten();
        if let Err(error) = &landed {
            let step = flying.step;
            tracing::warn!(
                "step {step} could not be saved, and the next save will end the run: {error}"
            );
        }
        self.flight = Flight::Landed(landed.map(|_| ()));
        saved
    }

    /// Waits for the save in flight; every rank must come. What was published since it was asked last
    /// is known to the first rank.
    pub(super) fn settle(&mut self) -> Result<Option<Saved>, StateError> {
        let waited = match std::mem::replace(&mut self.flight, Flight::None) {
            Flight::None => return Ok(None),
            Flight::Landed(result) => result.map(|()| None),
            Flight::Flying(mut flying) => {
                let started = Instant::now();
                let saved = flying.join();
                let waited = started.elapsed().as_secs_f64();
                saved.map(|saved| {
                    saved.map(|saved| Saved {
                        stall_seconds: saved.stall_seconds + waited,
                        ..saved
                    })
                })
            }
        };
        agree(waited, &*self.world)
    }
}

impl Flying {
    fn join(&mut self) -> Result<Option<Saved>, StateError> {
        let step = self.step;
        let joined = self.thread.take().map(JoinHandle::join);
        let saved = joined.and_then(Result::ok);
        let saved = saved.unwrap_or(Err(StateError::Writer { step }))?;
        let stall_seconds = self.stall;
        Ok(saved.map(|saved| Saved {
            stall_seconds,
            ..saved
        }))
    }
}

impl Drop for Flying {
    /// What was begun is brought to its end, or the files would be those of a save that was killed.
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One rank's work on a checkpoint.
struct Job {
    draft: Draft,
    content: Content,
    rank: usize,
    ranks: usize,
    keep: Retention,
    deadline: Duration,
    folder: PathBuf,
    started: Instant,
}

impl Job {
    /// Writes the part of this rank; the first one waits for the others, and publishes.
    fn run(self) -> Result<Option<Saved>, StateError> {
        let Self {
            draft,
            mut content,
            rank,
            ranks,
            ..
        } = self;
        let pieces = content.snapshot.pieces();
        let folder = &self.folder;
        let data = |number, to: &mut Entry| {
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
        // Tensors that are held are copied by who changes them.
        drop(content.snapshot);
        if rank != 0 {
            return Ok(None);
        }
        let checkpoint = draft.publish(ranks, &content.about, &self.keep, self.deadline)?;
        Ok(Some(Saved {
            step: content.about.step,
            path: checkpoint.path().to_path_buf(),
            bytes: bytes(&checkpoint),
            seconds: self.started.elapsed().as_secs_f64(),
            stall_seconds: 0.0,
        }))
    }
}

/// The bytes of all tensors.
fn bytes(checkpoint: &Checkpoint) -> u64 {
    let keys = checkpoint.keys().into_iter();
    let tensors = keys.filter_map(|key| checkpoint.tensor(&key));
    let bytes = tensors.map(|tensor| tensor.shape.iter().product::<usize>() * tensor.dtype.size());
    bytes.sum::<usize>() as u64
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
