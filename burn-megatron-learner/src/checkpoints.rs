//! The sharded checkpoints of a training run, one per epoch.
//!
//! Burn's `Checkpointer` cannot store sharded checkpoints: it receives complete records on one rank, and runs in a
//! separate thread that the other ranks cannot join. Therefore the training strategy saves sharded checkpoints itself.

use std::path::{Path, PathBuf};

use burn::train::LearnerModel;
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, LoadTolerance, Retention,
};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::optim::ParallelOptimizer;
use burn_megatron::regular_file::is_there;
use burn_megatron_train::{SaveConfig, Saver, load_module};
use serde_json::json;

use crate::error::LearnerError;

/// The folder of the checkpoints, and the number of checkpoints to keep.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointSettings {
    pub folder: PathBuf,
    pub keep: usize,
}

impl CheckpointSettings {
    /// Creates the checkpoint saver of one rank. Collective: call on all ranks.
    pub fn saver(&self, groups: &ParallelContext) -> Result<Saver, LearnerError> {
        let config = SaveConfig {
            keep: Retention {
                last: Some(self.keep),
                ..Retention::default()
            },
            layout: format!("data = {}", groups.data().size()),
            ..SaveConfig::into_folder(&self.folder)
        };
        Ok(Saver::open(config, groups)?)
    }

    /// Loads the checkpoint of an epoch and returns its training state. Collective: call on all ranks.
    pub fn load<M: LearnerModel>(
        &self,
        epoch: usize,
        ddp: &mut DistributedDataParallel<M>,
        optimizer: &mut ParallelOptimizer,
        saver: &Saver,
    ) -> Result<RunState, LearnerError> {
        let found = epochs(&self.folder)?;
        let Some((_, checkpoint)) = found.iter().find(|(found, _)| *found == epoch) else {
            let epochs: Vec<_> = found.iter().map(|(epoch, _)| epoch.to_string()).collect();
            return Err(LearnerError::NoEpoch {
                epoch,
                folder: self.folder.display().to_string(),
                found: match epochs.is_empty() {
                    true => "the folder has no checkpoints".into(),
                    false => format!("expected one of {}", epochs.join(", ")),
                },
            });
        };
        let state = load_module(ddp, optimizer, checkpoint, LoadTolerance::default())?;
        saver.prepare_resume(checkpoint.metadata().step, &[], true)?;
        Ok(state)
    }
}

/// Saves the training state after an epoch. Collective: call on all ranks.
pub(crate) fn save<M: LearnerModel>(
    saver: &mut Saver,
    epoch: usize,
    ddp: &DistributedDataParallel<M>,
    optimizer: &ParallelOptimizer,
    state: &RunState,
) -> Result<(), LearnerError> {
    saver.save_module(ddp, optimizer, state, json!({ "epoch": epoch }))?;
    Ok(())
}

/// Returns the number of the newest epoch that has a sharded checkpoint in `folder`. Training can resume from this
/// epoch. Returns `None` if the folder does not exist or contains no checkpoint. See
/// [`checkpoints`](crate::MegatronStrategy::checkpoints).
///
/// # Errors
///
/// [`CheckpointError`] if a checkpoint cannot be read.
pub fn newest_epoch(folder: impl AsRef<Path>) -> Result<Option<usize>, CheckpointError> {
    let folder = folder.as_ref();
    if !is_there(folder) {
        return Ok(None);
    }
    Ok(epochs(folder)?.into_iter().map(|(epoch, _)| epoch).max())
}

/// Returns the checkpoints in a folder, with their epochs.
fn epochs(folder: &Path) -> Result<Vec<(usize, Checkpoint)>, CheckpointError> {
    let folder = CheckpointFolder::open(folder)?;
    let mut found = vec![];
    for checkpoint in folder.checkpoints()? {
        let epoch = checkpoint.metadata().config.get("epoch");
        if let Some(epoch) = epoch.and_then(serde_json::Value::as_u64) {
            found.push((epoch as usize, checkpoint));
        }
    }
    Ok(found)
}
