//! The weights of a rank, from any source.

use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use super::TensorSource;
use super::state::{MODEL, Names, Reader, StateError, Wanted, agree, check};
use crate::data_parallel::DistributedDataParallel;

/// What loading lets pass. By default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Leniency {
    /// Whether the model may have what the source has not; it stays as it is.
    pub missing: bool,
    /// Whether the source may have what the model has not.
    pub unexpected: bool,
    /// Whether values may be rounded to a type that cannot hold them all.
    pub rounding: bool,
}

/// Loads the weights that this rank holds, whatever layout they were saved in. Every rank must come.
/// Each reads what it steps, and gathers the rest.
///
/// Nothing has changed on any rank when names, shapes or types do not fit. Tensors of the source that are
/// no weights, such as moments, are not looked at.
///
/// # Errors
///
/// [`StateError`] for tensors that are missing, unexpected, of another shape or of a type that would
/// have to be rounded, and for what cannot be read.
pub fn load_weights<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    source: &dyn TensorSource,
    leniency: Leniency,
) -> Result<(), StateError> {
    let names = Names::gather(ddp)?;
    let keys = source.keys().into_iter();
    let keys = keys.filter(|key| key.starts_with(MODEL)).collect();
    let entries = ddp.table().entries();
    let fits = check(entries, &[weights(ddp)], source, keys, &names, leniency);
    let world = ddp.groups().world().clone();
    agree(fits, &*world)?;
    let buckets = agree(read_buckets(ddp, source), &*world)?;
    replace_buckets(ddp, buckets);
    Ok(())
}

/// The weights of a model, for a check.
pub(crate) fn weights<M: Module>(ddp: &DistributedDataParallel<M>) -> Wanted<'static> {
    let types = ddp.plan().parameters.iter().map(|parameter| parameter.main);
    Wanted {
        prefix: MODEL,
        types: types.collect(),
    }
}

/// Reads what this rank steps of each bucket, of weights that were checked.
pub(crate) fn read_buckets<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
) -> Result<Vec<Tensor<1>>, StateError> {
    let reader = Reader {
        source,
        plan: ddp.plan(),
        entries: ddp.table().entries(),
        place: ddp.groups().place(),
    };
    let buckets = 0..ddp.plan().buckets();
    let read = |bucket| reader.bucket(MODEL, bucket, &ddp.kept(bucket));
    buckets.map(read).collect()
}

/// Replaces what this rank steps, as a step of the optimizer does; every rank must come.
pub(crate) fn replace_buckets<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    buckets: Vec<Tensor<1>>,
) {
    // The last bucket has the first layers.
    for (bucket, master) in buckets.into_iter().enumerate().rev() {
        let (model, main) = ddp.plan().types(bucket);
        let copy = (model != main).then(|| master.clone().cast(FloatDType::from(model)));
        ddp.replace(bucket, master, copy);
    }
    ddp.stepped();
}
