//! What a wrapped module and its optimizer save, and how they load it, with or without a trainer.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;

use super::save::CheckpointContent;
use super::{SavedCheckpoint, Saver};
use crate::checkpoint::state::{
    BucketReader, ExpectedTensors, FIRST, FP8, ModelKeys, RunState, SECOND, Snapshot, StateError,
    agree, buffers, check,
};
use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointMetadata, LoadTolerance, TensorSource, read_buckets,
    weights,
};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::fp8::Fp8LayerState;
use crate::optim::ParallelAdamW;

/// The scales of FP8 layers, by path.
pub(super) type Scales = BTreeMap<String, Fp8LayerState>;

impl Saver {
    /// Saves a module and its optimizer in a loop without a [`Trainer`](super::Trainer), or starts to; `config` is kept
    /// in the metadata. Rank 0 returns the checkpoints published so far. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`StateError`] on every rank if any rank failed to write this checkpoint or the previous one.
    pub fn save_module<M: Module>(
        &mut self,
        ddp: &DistributedDataParallel<M>,
        optimizer: &ParallelAdamW,
        state: &RunState,
        config: serde_json::Value,
    ) -> Result<Vec<SavedCheckpoint>, StateError> {
        let layout = self.saving().layout.clone();
        let content = || {
            Ok(CheckpointContent {
                snapshot: Snapshot::new(ddp, optimizer)?,
                objects: objects(ddp)?,
                about: CheckpointMetadata {
                    step: state.count.made(),
                    samples: state.samples,
                    layout,
                    config,
                    state: json(serde_json::to_value(state))?,
                },
            })
        };
        self.save(content())
    }
}

/// Loads what [`Saver::save_module`] has saved, in any layout, and returns its state. Collective: call on all ranks of
/// the world. After an error neither must be used.
///
/// # Errors
///
/// [`StateError`] for a missing or unexpected tensor, another shape, a type that would have to be rounded, or data
/// that cannot be read.
pub fn load_module<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    optimizer: &mut ParallelAdamW,
    checkpoint: &Checkpoint,
    leniency: LoadTolerance,
) -> Result<RunState, StateError> {
    let names = ModelKeys::gather(ddp)?;
    let world = ddp.groups().world().clone();
    let checked = || {
        let state = RunState::of(checkpoint)?;
        check_tensors(ddp, checkpoint, &names, leniency)?;
        Ok((state, scales(ddp, checkpoint)?))
    };
    let (state, scales) = agree(checked(), &*world)?;
    let read = read(ddp, optimizer, checkpoint, state.count.taken);
    let buckets = agree(read, &*world)?;
    let biases = agree(buffers::read(ddp, checkpoint), &*world)?;
    let restored = ddp.fp8().load(&scales).map_err(StateError::from);
    let missing = scales.is_empty() && leniency.missing;
    agree(if missing { Ok(()) } else { restored }, &*world)?;
    ddp.replace_masters(buckets);
    buffers::replace(biases);
    Ok(state)
}

/// The scales of the FP8 layers of this stage, on the first of the ranks that hold them.
fn objects<M: Module>(
    ddp: &DistributedDataParallel<M>,
) -> Result<Vec<(String, Vec<u8>)>, StateError> {
    if ddp.groups().stage().rank() != 0 {
        return Ok(vec![]);
    }
    let states = ddp.fp8().states().into_iter();
    let object = |(path, state)| Ok((format!("{FP8}{path}"), json(serde_json::to_vec(&state))?));
    states.map(object).collect()
}

/// Checks that a checkpoint has the tensors and objects of this model.
pub(super) fn check_tensors<M: Module>(
    ddp: &DistributedDataParallel<M>,
    checkpoint: &Checkpoint,
    names: &ModelKeys,
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    let moments = |prefix| ExpectedTensors {
        prefix,
        types: ParallelAdamW::moment_dtypes(ddp),
    };
    let wanted = [weights(ddp), moments(FIRST), moments(SECOND)];
    let (entries, keys) = (ddp.table().entries(), checkpoint.keys());
    check(entries, &wanted, checkpoint, keys, names, leniency)?;
    buffers::check(ddp, checkpoint, leniency)?;
    let unexpected = names.unexpected_objects(checkpoint.objects());
    if !unexpected.is_empty() && !leniency.unexpected {
        let (of, keys) = (checkpoint.name(), unexpected);
        return Err(CheckpointError::Unexpected { of, keys }.into());
    }
    Ok(())
}

/// Reads the moments into the optimizer, and returns the weights, which are not replaced yet.
pub(super) fn read<M: Module>(
    ddp: &DistributedDataParallel<M>,
    optimizer: &mut ParallelAdamW,
    checkpoint: &Checkpoint,
    taken: u64,
) -> Result<Vec<Tensor<1>>, StateError> {
    let reader = BucketReader {
        source: checkpoint,
        entries: ddp.table().entries(),
        rank: ddp.groups().mesh_rank(),
    };
    for (bucket, shard) in ddp.shards().iter().enumerate() {
        let [first, second] = optimizer.moments(bucket, ddp);
        let first = reader.bucket(FIRST, &shard.slices, &first)?;
        let second = reader.bucket(SECOND, &shard.slices, &second)?;
        optimizer.restore(bucket, [first, second], taken);
    }
    read_buckets(ddp, checkpoint)
}

/// The scales of the FP8 layers of this rank that the checkpoint has.
pub(super) fn scales<M: Module>(
    ddp: &DistributedDataParallel<M>,
    checkpoint: &Checkpoint,
) -> Result<Scales, StateError> {
    let saved = checkpoint.objects();
    let mut scales = Scales::new();
    for path in ddp.fp8().states().into_keys() {
        let key = format!("{FP8}{path}");
        if saved.contains(&key) {
            let state = serde_json::from_slice(&checkpoint.object(&key)?);
            let state = state.map_err(|error| StateError::InvalidRunState {
                of: checkpoint.name(),
                reason: format!("{key}: {error}"),
            })?;
            scales.insert(path, state);
        }
    }
    Ok(scales)
}

/// Converts an error of JSON serialization.
fn json<T>(result: Result<T, serde_json::Error>) -> Result<T, StateError> {
    result.map_err(|error| StateError::InvalidRunState {
        of: "this run".into(),
        reason: error.to_string(),
    })
}
