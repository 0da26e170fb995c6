//! Saves and loads the state of a wrapped module and its optimizer, with or without a trainer.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;

use super::save::CheckpointContent;
use super::{SavedCheckpoint, Saver};
use burn_megatron::checkpoint::state::{
    BucketReader, FP8, ModelKeys, RunState, Snapshot, StateError, agree, buffers, check,
};
use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointMetadata, LoadTolerance, TensorSource, of_frozen,
    read_buckets, read_frozen, weights,
};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::nn::fp8::Fp8LayerState;
use burn_megatron::optim::{OptimizerState, ParallelOptimizer, StateKind};

/// The scales of FP8 layers, keyed by path.
pub(super) type Scales = BTreeMap<String, Fp8LayerState>;

impl Saver {
    /// Saves a module and its optimizer in a custom training loop, without a [`Trainer`](super::Trainer). The
    /// checkpoint may be written in the background. `config` is stored in the metadata of the checkpoint. Rank 0
    /// returns the checkpoints that were published since the last call. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`StateError`] on every rank if any rank failed to write this checkpoint or the previous one.
    pub fn save_module<M: Module>(
        &mut self,
        ddp: &DistributedDataParallel<M>,
        optimizer: &ParallelOptimizer,
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

/// Loads a checkpoint of [`Saver::save_module`] into `ddp` and `optimizer`, and returns the run state of the
/// checkpoint. The parallel layout may differ from the layout that saved the checkpoint. Collective: call on all ranks
/// of the world. After an error, `ddp` and `optimizer` must not be used.
///
/// # Errors
///
/// [`StateError`] if a tensor is missing or unexpected or has another shape, if its values would have to be rounded, or
/// if its data cannot be read.
pub fn load_module<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    optimizer: &mut ParallelOptimizer,
    checkpoint: &Checkpoint,
    leniency: LoadTolerance,
) -> Result<RunState, StateError> {
    let names = names(ddp)?;
    let checked = || {
        let state = RunState::of(checkpoint)?;
        let scales = check_tensors(ddp, optimizer, checkpoint, &names, leniency)?;
        Ok((state, scales))
    };
    let (state, scales) = agree(checked(), &**ddp.groups().world())?;
    let taken = state.count.taken;
    restore(ddp, optimizer, checkpoint, (&scales, taken), leniency)?;
    Ok(state)
}

/// Returns the keys of the tensors that checkpoints of this module have.
pub(super) fn names<M: Module>(ddp: &DistributedDataParallel<M>) -> Result<ModelKeys, StateError> {
    match ddp.saved_frozen() {
        Some(_) => ModelKeys::gather_all(ddp),
        None => ModelKeys::gather(ddp),
    }
}

/// Loads the tensors that [`check_tensors`] has checked, after `taken` steps. Collective: call on all ranks of the
/// world.
pub(super) fn restore<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    optimizer: &mut ParallelOptimizer,
    checkpoint: &Checkpoint,
    (scales, taken): (&Scales, u64),
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    let world = ddp.groups().world().clone();
    let read = read(ddp, optimizer, checkpoint, taken);
    let buckets = agree(read, &*world)?;
    let frozen = ddp.saved_frozen().map(|_| read_frozen(ddp, checkpoint));
    let frozen = agree(frozen.transpose(), &*world)?;
    let biases = agree(buffers::read(ddp, checkpoint), &*world)?;
    // FP8 weights are quantized with the scales.
    let restored = ddp.fp8().load(scales).map_err(StateError::from);
    let missing = scales.is_empty() && leniency.missing;
    agree(if missing { Ok(()) } else { restored }, &*world)?;
    if let Some(frozen) = frozen {
        ddp.replace_frozen(frozen);
    }
    ddp.replace_masters(buckets);
    buffers::replace(biases);
    Ok(())
}

/// Returns the scales of the FP8 layers of this stage, on the first rank of the stage.
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

/// Checks that a checkpoint has the tensors and objects of this model, and returns the scales of its FP8 layers.
pub(super) fn check_tensors<M: Module>(
    ddp: &DistributedDataParallel<M>,
    optimizer: &ParallelOptimizer,
    checkpoint: &Checkpoint,
    names: &ModelKeys,
    leniency: LoadTolerance,
) -> Result<Scales, StateError> {
    let mut wanted = vec![weights(ddp)];
    wanted.extend(kinds(ddp, optimizer));
    let (entries, keys) = (ddp.table().entries(), checkpoint.keys());
    check(entries, &wanted, checkpoint, keys, names, leniency)?;
    if let (Some(_), Some(table)) = (ddp.saved_frozen(), ddp.frozen_table()) {
        let (entries, wanted) = (table.entries(), [of_frozen(ddp)]);
        check(entries, &wanted, checkpoint, vec![], names, leniency)?;
    }
    buffers::check(ddp, checkpoint, leniency)?;
    let unexpected = names.unexpected_objects(checkpoint.objects());
    if !unexpected.is_empty() && !leniency.unexpected {
        let (of, keys) = (checkpoint.name(), unexpected);
        return Err(CheckpointError::Unexpected { of, keys }.into());
    }
    scales(ddp, checkpoint)
}

/// Returns the kinds of state that the optimizer saves per parameter.
fn kinds<M: Module>(
    ddp: &DistributedDataParallel<M>,
    optimizer: &ParallelOptimizer,
) -> Vec<StateKind> {
    let masters: Vec<_> = ddp.master_dtypes().collect();
    optimizer.kinds(&masters)
}

/// Reads the state into the optimizer, and returns the weights. The weights of the module are not replaced yet.
fn read<M: Module>(
    ddp: &DistributedDataParallel<M>,
    optimizer: &mut ParallelOptimizer,
    checkpoint: &Checkpoint,
    taken: u64,
) -> Result<Vec<Tensor<1>>, StateError> {
    let kinds = kinds(ddp, optimizer);
    let reader = BucketReader {
        source: checkpoint,
        entries: ddp.table().entries(),
        rank: ddp.groups().mesh_rank(),
    };
    for (bucket, shard) in ddp.shards().iter().enumerate() {
        let now = optimizer.tensors(bucket, shard);
        let read = kinds.iter().zip(&now);
        let read = read.map(|(kind, now)| reader.bucket(&kind.prefix, &shard.slices, now));
        let read = read.collect::<Result<_, _>>()?;
        optimizer.restore(bucket, shard, read, taken);
    }
    read_buckets(ddp, checkpoint)
}

/// Returns the scales in the checkpoint for the FP8 layers of this rank.
fn scales<M: Module>(
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
