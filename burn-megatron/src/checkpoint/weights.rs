//! Loads the weights of a rank from any tensor source.

use burn::module::Module;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::TensorSource;
use super::state::{BucketReader, MODEL, ModelKeys, StateError, agree, buffers, check};
use crate::data_parallel::{BucketShard, DistributedDataParallel};
use crate::nn::{ParameterEntry, ParameterTable};
use crate::optim::StateKind;

/// The differences between a model and a tensor source that are tolerated when weights are loaded. By default no
/// difference is tolerated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadTolerance {
    /// Allows parameters that the source does not have. These parameters keep their values.
    pub missing: bool,
    /// Allows tensors in the source that the model does not have. These tensors are ignored.
    pub unexpected: bool,
    /// Allows values to be rounded if the type of the model cannot represent all values of the type in the source.
    pub rounding: bool,
}

/// Loads this rank's weights and router biases from a source, which may have been saved with any parallel layout. Each
/// rank reads the shards that it optimizes and gathers the rest. Collective: call on all ranks.
///
/// For a model with [adapters](crate::nn::lora), the source must have the frozen weights. If the source does not have
/// the weights of the adapters, these weights keep their values. Other tensors of the source, such as moments, are
/// ignored.
///
/// # Errors
///
/// [`StateError`] if tensors are missing or unexpected, have another shape, or would have to be rounded, and if a read
/// fails. If names, shapes or types do not match, the model is unchanged on all ranks.
pub fn load_weights<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    source: &dyn TensorSource,
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    let keys: Vec<_> = source
        .keys()
        .into_iter()
        .filter(|key| key.starts_with(MODEL))
        .collect();
    // A source that only has the frozen weights starts new adapters.
    let is_in_source = |entry: &ParameterEntry| {
        let key = format!("{MODEL}{}", entry.path);
        source.tensor(&key).is_some()
    };
    let has_trained =
        ddp.frozen_table().is_none() || ddp.table().entries().iter().any(is_in_source);
    let names = ModelKeys::gather_all(ddp)?;
    let frozen = ddp.frozen_table().map_or(&[][..], ParameterTable::entries);
    let wanted = [of_frozen(ddp)];
    let fits = check(frozen, &wanted, source, keys.clone(), &names, leniency);
    let fits = fits.and_then(|()| {
        if !has_trained {
            return Ok(());
        }
        let entries = ddp.table().entries();
        check(entries, &[weights(ddp)], source, keys, &names, leniency)
    });
    let fits = fits.and_then(|()| buffers::check(ddp, source, leniency));
    let world = ddp.groups().world().clone();
    agree(fits, &*world)?;
    let buckets = has_trained.then(|| read_buckets(ddp, source));
    let buckets = agree(buckets.transpose(), &*world)?;
    let frozen = agree(read_frozen(ddp, source), &*world)?;
    let buffers = agree(buffers::read(ddp, source), &*world)?;
    ddp.replace_frozen(frozen);
    if let Some(buckets) = buckets {
        ddp.replace_masters(buckets);
    }
    buffers::replace(buffers);
    Ok(())
}

/// Returns the keys of a model's frozen weights, and the dtypes that their master weights would have, as an argument of
/// [`check`].
pub fn of_frozen<M: Module>(ddp: &DistributedDataParallel<M>) -> StateKind {
    StateKind::of_all(MODEL, ddp.frozen_dtypes())
}

/// Reads this rank's shard of each bucket of frozen weights, in the dtype of the model. The source must have been
/// checked with [`check`].
pub fn read_frozen<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
) -> Result<Vec<Tensor<1>>, StateError> {
    let reader = BucketReader {
        source,
        entries: ddp.frozen_table().map_or(&[], ParameterTable::entries),
        rank: ddp.groups().mesh_rank(),
    };
    let shards = ddp.frozen_shards().into_iter();
    let read = |(shard, now): (BucketShard, Tensor<1>)| {
        let read = reader.bucket(MODEL, &shard.slices, &now)?;
        Ok(read.cast(shard.dtype))
    };
    shards.map(read).collect()
}

/// Returns the keys and dtypes of a model's weights, as an argument of [`check`].
pub fn weights<M: Module>(ddp: &DistributedDataParallel<M>) -> StateKind {
    StateKind::of_all(MODEL, ddp.master_dtypes().collect())
}

/// Reads this rank's shard of each bucket of weights. The source must have been checked with [`check`].
pub fn read_buckets<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
) -> Result<Vec<Tensor<1>>, StateError> {
    let reader = BucketReader {
        source,
        entries: ddp.table().entries(),
        rank: ddp.groups().mesh_rank(),
    };
    let shards = ddp.shards().iter().enumerate();
    let read = |(bucket, shard): (usize, &BucketShard)| {
        reader.bucket(MODEL, &shard.slices, &ddp.master_shard(bucket))
    };
    shards.map(read).collect()
}
