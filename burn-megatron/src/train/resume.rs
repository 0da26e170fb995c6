//! Saving and resuming a trainer.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::save::CheckpointContent;
use super::{LanguageModel, Observer, SavedCheckpoint, Saver, TrainError, Trainer};
use crate::checkpoint::state::{
    BucketReader, FP8, ModelKeys, RunState, Snapshot, StateError, agree, buffers, check,
};
use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointMetadata, LoadTolerance, TensorSource, load_weights,
    of_frozen, read_buckets, read_frozen, weights,
};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::fp8::Fp8LayerState;
use crate::optim::{OptimizerState, StateKind};

/// The scales of FP8 layers, by path.
type Scales = BTreeMap<String, Fp8LayerState>;

impl<M: LanguageModel> Trainer<M> {
    /// Sets the saver: [`fit`](Self::fit) saves when a checkpoint is due, when the run is stopped, and at
    /// the end.
    pub fn save_with(&mut self, saver: Saver) {
        self.saver = Some(saver);
    }

    /// Saves a checkpoint, or starts to save it in the background. Rank 0 returns the checkpoints published
    /// so far, which may be earlier ones. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] on every rank if any rank failed to write this checkpoint or the previous one.
    pub fn save(&mut self) -> Result<Vec<SavedCheckpoint>, TrainError> {
        let _span = tracing::info_span!("save", step = self.count.made()).entered();
        let Some(mut saver) = self.saver.take() else {
            return Err(StateError::NoSaver.into());
        };
        let content = self.content(&saver);
        let saved = saver.save(content);
        self.saver = Some(saver);
        self.saved_at = self.count.made();
        Ok(saved?)
    }

    /// Waits for the save in the background. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// See [`save`](Self::save).
    pub fn finish_saving(&mut self) -> Result<Option<SavedCheckpoint>, TrainError> {
        Ok(self.saver.as_mut().map_or(Ok(None), Saver::wait)?)
    }

    /// Loads a checkpoint of any layout, to resume its run. Collective: call on all ranks of the world.
    ///
    /// After an error the trainer must not be used.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] for a missing or unexpected tensor, another shape, a type that would have to be
    /// rounded, another seed, or data that cannot be read.
    pub fn load(
        &mut self,
        checkpoint: &Checkpoint,
        leniency: LoadTolerance,
    ) -> Result<(), TrainError> {
        let _span = tracing::info_span!("load").entered();
        let saves_frozen = self.ddp.saved_frozen().is_some();
        let names = if saves_frozen {
            ModelKeys::gather_all(&self.ddp)
        } else {
            ModelKeys::gather(&self.ddp)
        }?;
        let world = self.ddp.groups().world().clone();
        let checked = self.check(checkpoint, &names, leniency);
        let (state, scales) = agree(checked, &*world)?;
        let read = self.read(checkpoint, &state);
        let buckets = agree(read, &*world)?;
        let frozen = saves_frozen.then(|| read_frozen(&self.ddp, checkpoint));
        let frozen = agree(frozen.transpose(), &*world)?;
        let biases = agree(buffers::read(&self.ddp, checkpoint), &*world)?;
        // FP8 weights are quantized with the scales.
        let restored = self.ddp.fp8().load(&scales).map_err(StateError::from);
        let missing = scales.is_empty() && leniency.missing;
        agree(if missing { Ok(()) } else { restored }, &*world)?;
        if let Some(frozen) = frozen {
            self.ddp.replace_frozen(frozen);
        }
        self.ddp.replace_masters(buckets);
        buffers::replace(biases);
        if let Some(state) = state.loss_scaler.filter(|_| self.scaler.state().is_some()) {
            self.scaler.restore(state).map_err(StateError::from)?;
        }
        self.count = state.count;
        self.samples = state.samples;
        self.spikes = state.spikes.unwrap_or_default();
        self.saved_at = state.count.made();
        Ok(())
    }

    /// Loads only weights, to start a run with them: see [`load_weights`]. Collective: call on all ranks of
    /// the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`].
    pub fn load_weights(
        &mut self,
        source: &dyn TensorSource,
        leniency: LoadTolerance,
    ) -> Result<(), TrainError> {
        load_weights(&mut self.ddp, source, leniency)?;
        if let Some(average) = self.optimizer.average() {
            average.reset(&self.ddp);
        }
        Ok(())
    }

    /// Whether a checkpoint is due after `steps` steps.
    pub(super) fn is_save_due(&self, steps: u64) -> bool {
        self.saver.as_ref().is_some_and(|saver| saver.is_due(steps))
    }

    /// Reports the checkpoints that have been published, and saves another one if `is_due`.
    pub(super) fn save_if(
        &mut self,
        is_due: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let finished = self.saver.as_mut().and_then(Saver::take_finished);
        report_saved(finished, observer)?;
        if is_due {
            report_saved(self.save()?, observer)
        } else {
            Ok(())
        }
    }

    /// Saves the last step, if it is not saved yet, and waits until it is written.
    pub(super) fn save_final(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        if self.saver.is_some() && self.saved_at != self.count.made() {
            report_saved(self.save()?, observer)?;
        }
        report_saved(self.finish_saving()?, observer)
    }

    /// The state of the run other than tensors and FP8 scales.
    pub fn state(&self) -> RunState {
        RunState {
            count: self.count,
            samples: self.samples,
            seed: self.config.seed,
            loss_scaler: self.scaler.state(),
            spikes: self.config.skip_spikes.map(|_| self.spikes.clone()),
        }
    }

    fn content(&self, saver: &Saver) -> Result<CheckpointContent, StateError> {
        let state = self.state();
        let saving = saver.saving();
        let about = CheckpointMetadata {
            step: state.count.made(),
            samples: state.samples,
            layout: saving.layout.clone(),
            config: saving.config.clone(),
            state: json(serde_json::to_value(&state))?,
        };
        Ok(CheckpointContent {
            snapshot: Snapshot::new(&self.ddp, &self.optimizer)?,
            objects: self.objects()?,
            about,
        })
    }

    /// The scales of the FP8 layers of this stage, on the first of the ranks that hold them.
    fn objects(&self) -> Result<Vec<(String, Vec<u8>)>, StateError> {
        let groups = self.ddp.groups();
        if groups.stage().rank() != 0 {
            return Ok(vec![]);
        }
        let states = self.ddp.fp8().states().into_iter();
        let object =
            |(path, state)| Ok((format!("{FP8}{path}"), json(serde_json::to_vec(&state))?));
        states.map(object).collect()
    }

    /// Checks everything that can be checked before reading tensors.
    fn check(
        &self,
        checkpoint: &Checkpoint,
        names: &ModelKeys,
        leniency: LoadTolerance,
    ) -> Result<(RunState, Scales), StateError> {
        let of = || checkpoint.name();
        let state = RunState::of(checkpoint)?;
        if state.seed != self.config.seed {
            return Err(StateError::Seed {
                of: of(),
                found: state.seed,
                wanted: self.config.seed,
            });
        }
        match (state.loss_scaler, self.scaler.state()) {
            (None, Some(_)) if !leniency.missing => {
                return Err(StateError::NoLossScale { of: of() });
            }
            (Some(state), own) if own.is_some() || !leniency.unexpected => {
                self.scaler.clone().restore(state)?;
            }
            _ => {}
        }
        let ddp = &self.ddp;
        let mut wanted = vec![weights(ddp)];
        wanted.extend(self.optimizer_kinds());
        let keys = checkpoint.keys();
        check(
            ddp.table().entries(),
            &wanted,
            checkpoint,
            keys,
            names,
            leniency,
        )?;
        if let (Some(_), Some(table)) = (ddp.saved_frozen(), ddp.frozen_table()) {
            let wanted = [of_frozen(ddp)];
            check(
                table.entries(),
                &wanted,
                checkpoint,
                vec![],
                names,
                leniency,
            )?;
        }
        buffers::check(ddp, checkpoint, leniency)?;
        let unexpected = names.unexpected_objects(checkpoint.objects());
        if !unexpected.is_empty() && !leniency.unexpected {
            let of = of();
            return Err(CheckpointError::Unexpected {
                of,
                keys: unexpected,
            }
            .into());
        }
        Ok((state, scales(ddp, checkpoint)?))
    }

    /// What the optimizer saves of each parameter.
    fn optimizer_kinds(&self) -> Vec<StateKind> {
        let masters: Vec<_> = self.ddp.master_dtypes().collect();
        self.optimizer.kinds(&masters)
    }

    /// Reads the state into the optimizer, and returns the weights, which are not replaced yet.
    fn read(
        &mut self,
        checkpoint: &Checkpoint,
        state: &RunState,
    ) -> Result<Vec<Tensor<1>>, StateError> {
        let kinds = self.optimizer_kinds();
        let (ddp, optimizer) = (&self.ddp, &mut self.optimizer);
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
            optimizer.restore(bucket, shard, read, state.count.taken);
        }
        read_buckets(ddp, checkpoint)
    }
}

/// The scales of the FP8 layers of this rank that the checkpoint has.
fn scales<M: LanguageModel>(
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

fn report_saved(
    published: impl IntoIterator<Item = SavedCheckpoint>,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    published
        .into_iter()
        .try_for_each(|saved| observer.saved(&saved))
        .map_err(TrainError::Observer)
}

/// Converts an error of JSON serialization.
fn json<T>(result: Result<T, serde_json::Error>) -> Result<T, StateError> {
    result.map_err(|error| StateError::InvalidRunState {
        of: "this run".into(),
        reason: error.to_string(),
    })
}
