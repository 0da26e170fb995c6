//! What a trainer saves, and how it goes on from there.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::save::Content;
use super::{LanguageModel, Observer, Saved, Saver, TrainError, Trainer};
use crate::checkpoint::state::{
    FIRST, FP8, Names, Reader, RunState, SECOND, Snapshot, StateError, Wanted, agree, check,
};
use crate::checkpoint::{
    About, Checkpoint, CheckpointError, Leniency, TensorSource, load_weights, read_buckets,
    replace_buckets, weights,
};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::fp8::Fp8LayerState;

/// The scales of 8-bit layers by their paths.
type Scales = BTreeMap<String, Fp8LayerState>;

impl<M: LanguageModel> Trainer<M> {
    /// Saves with this from now on: when it is due, when the run is stopped, and at the end of
    /// [`fit`](Self::fit).
    pub fn save_with(&mut self, saver: Saver) {
        self.saver = Some(saver);
    }

    /// Saves now, or begins to; every rank must come. The first rank gets what was published by then,
    /// which may be an earlier checkpoint.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] on every rank where one cannot write, or could not write the checkpoint
    /// before.
    pub fn save(&mut self) -> Result<Vec<Saved>, TrainError> {
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

    /// Waits until what is being saved in the background is there; every rank must come.
    ///
    /// # Errors
    ///
    /// See [`save`](Self::save).
    pub fn finish_saving(&mut self) -> Result<Option<Saved>, TrainError> {
        let settle = |saver: &mut Saver| saver.settle();
        Ok(self.saver.as_mut().map_or(Ok(None), settle)?)
    }

    /// Goes on where the run of a checkpoint was, whatever its layout; every rank must come.
    ///
    /// A trainer that could not load is not to be used.
    ///
    /// # Errors
    ///
    /// [`TrainError::State`] for what is missing, unexpected, of another shape or of a type that would
    /// have to be rounded, for another seed, and for what cannot be read.
    pub fn load(&mut self, checkpoint: &Checkpoint, leniency: Leniency) -> Result<(), TrainError> {
        let _span = tracing::info_span!("load").entered();
        let names = Names::gather(&self.ddp)?;
        let world = self.ddp.groups().world().clone();
        let checked = self.check(checkpoint, &names, leniency);
        let (state, scales) = agree(checked, &*world)?;
        let read = self.read(checkpoint, &state);
        let buckets = agree(read, &*world)?;
        // Weights in 8 bits are made with the scales.
        let restored = self.ddp.fp8().load(&scales).map_err(StateError::from);
        let missing = scales.is_empty() && leniency.missing;
        agree(if missing { Ok(()) } else { restored }, &*world)?;
        replace_buckets(&mut self.ddp, buckets);
        if let Some(state) = state.loss_scaler.filter(|_| self.scaler.state().is_some()) {
            self.scaler.restore(state).map_err(StateError::from)?;
        }
        self.count = state.count;
        self.samples = state.samples;
        self.saved_at = state.count.made();
        Ok(())
    }

    /// Loads weights alone, to begin a run with them; every rank must come. See [`load_weights`].
    ///
    /// # Errors
    ///
    /// [`TrainError::State`].
    pub fn load_weights(
        &mut self,
        source: &dyn TensorSource,
        leniency: Leniency,
    ) -> Result<(), TrainError> {
        Ok(load_weights(&mut self.ddp, source, leniency)?)
    }

    /// Saves where it is due, and tells of what was published since.
    pub(super) fn save_if_due(&mut self, observer: &mut impl Observer) -> Result<(), TrainError> {
        let Some(saver) = &mut self.saver else {
            return Ok(());
        };
        let (landed, step) = (saver.landed(), self.count.made());
        let is_due = saver.is_due(step) && step < self.config.steps as u64;
        tell(landed, observer)?;
        match is_due {
            true => tell(self.save()?, observer),
            false => Ok(()),
        }
    }

    /// Saves the last step, unless it is saved, and waits until all is written.
    pub(super) fn save_the_end(&mut self, observer: &mut impl Observer) -> Result<(), TrainError> {
        if self.saver.is_some() && self.saved_at != self.count.made() {
            tell(self.save()?, observer)?;
        }
        tell(self.finish_saving()?, observer)
    }

    /// What the run remembers beside tensors and 8-bit scales.
    pub fn state(&self) -> RunState {
        RunState {
            count: self.count,
            samples: self.samples,
            seed: self.config.seed,
            loss_scaler: self.scaler.state(),
        }
    }

    fn content(&self, saver: &Saver) -> Result<Content, StateError> {
        let state = self.state();
        let saving = saver.saving();
        let about = About {
            step: state.count.made(),
            samples: state.samples,
            layout: saving.layout.clone(),
            config: saving.config.clone(),
            state: json(serde_json::to_value(&state))?,
        };
        Ok(Content {
            snapshot: Snapshot::new(&self.ddp, &self.optimizer)?,
            objects: self.objects()?,
            about,
        })
    }

    /// The scales of the 8-bit layers of this stage, on the first of the ranks that have them.
    fn objects(&self) -> Result<Vec<(String, Vec<u8>)>, StateError> {
        let groups = self.ddp.groups();
        if groups.data().rank() != 0 || groups.tensor().rank() != 0 {
            return Ok(vec![]);
        }
        let states = self.ddp.fp8().states().into_iter();
        let object =
            |(path, state)| Ok((format!("{FP8}{path}"), json(serde_json::to_vec(&state))?));
        states.map(object).collect()
    }

    /// Checks everything that can be checked before a tensor is read.
    fn check(
        &self,
        checkpoint: &Checkpoint,
        names: &Names,
        leniency: Leniency,
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
        let wanted = [weights(ddp), self.moments(FIRST), self.moments(SECOND)];
        let keys = checkpoint.keys();
        check(
            ddp.table().entries(),
            &wanted,
            checkpoint,
            keys,
            names,
            leniency,
        )?;
        let strangers = names.unexpected_objects(checkpoint.objects());
        if !strangers.is_empty() && !leniency.unexpected {
            let of = of();
            return Err(CheckpointError::Unexpected {
                of,
                keys: strangers,
            }
            .into());
        }
        Ok((state, scales(ddp, checkpoint)?))
    }

    /// The moments of a kind, for a check.
    fn moments(&self, prefix: &'static str) -> Wanted<'static> {
        let plan = self.ddp.plan();
        let parameters = 0..plan.parameters.len();
        let dtype = |index| self.optimizer.moment_type(plan.place(index).0, plan);
        Wanted {
            prefix,
            types: parameters.map(dtype).collect(),
        }
    }

    /// Reads the moments, and the weights, which are not yet replaced.
    fn read(
        &mut self,
        checkpoint: &Checkpoint,
        state: &RunState,
    ) -> Result<Vec<Tensor<1>>, StateError> {
        let (ddp, optimizer) = (&self.ddp, &mut self.optimizer);
        let plan = ddp.plan();
        let reader = Reader {
            source: checkpoint,
            plan,
            entries: ddp.table().entries(),
            place: ddp.groups().place(),
        };
        for bucket in 0..plan.buckets() {
            let [first, second] = optimizer.moments(bucket, plan);
            let first = reader.bucket(FIRST, bucket, &first)?;
            let second = reader.bucket(SECOND, bucket, &second)?;
            optimizer.restore(bucket, [first, second], state.count.taken);
        }
        read_buckets(ddp, checkpoint)
    }
}

/// The scales of the 8-bit layers of this rank, as far as they are there.
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
            let state = state.map_err(|error| StateError::Run {
                of: checkpoint.name(),
                reason: format!("{key}: {error}"),
            })?;
            scales.insert(path, state);
        }
    }
    Ok(scales)
}

fn tell(
    published: impl IntoIterator<Item = Saved>,
    observer: &mut impl Observer,
) -> Result<(), TrainError> {
    let mut published = published.into_iter();
    let told = published.try_for_each(|saved| observer.saved(&saved));
    told.map_err(TrainError::Observer)
}

/// What JSON has no form for cannot be saved.
fn json<T>(made: Result<T, serde_json::Error>) -> Result<T, StateError> {
    made.map_err(|error| StateError::Run {
        of: "this run".into(),
        reason: error.to_string(),
    })
}
