//! Checks that a source has exactly the tensors of a model, before anything is changed.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::tensor::DType;

use super::{FP8, StateError};
use crate::checkpoint::{CheckpointError, ElementType, LoadTolerance, TensorSource};
use crate::comm::{Communicator, all_gather_bytes};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::{ParameterEntry, ParameterTable};
use crate::optim::StateKind;

/// The paths of the parameters, FP8 layers and router biases of the complete model, gathered from all pipeline stages.
pub struct ModelKeys(BTreeSet<String>);

impl ModelKeys {
    /// Gathers the paths of the trained parameters, FP8 layers and router biases of all pipeline stages. Collective:
    /// call on all ranks of the pipeline group.
    pub fn gather<M: Module>(ddp: &DistributedDataParallel<M>) -> Result<Self, StateError> {
        Self::of_table(ddp, ddp.table())
    }

    /// Gathers the paths like [`Self::gather`], including the paths of frozen parameters. Collective: call on all
    /// ranks.
    pub fn gather_all<M: Module>(ddp: &DistributedDataParallel<M>) -> Result<Self, StateError> {
        Self::of_table(ddp, ddp.whole_table())
    }

    fn of_table<M: Module>(
        ddp: &DistributedDataParallel<M>,
        table: &ParameterTable,
    ) -> Result<Self, StateError> {
        let paths = table.entries().iter().map(|entry| entry.path.clone());
        let layers = ddp
            .fp8()
            .states()
            .into_keys()
            .map(|path| format!("{FP8}{path}"));
        let buffers = ddp.routers().expert_biases().into_iter();
        let buffers = buffers.map(|(path, _)| path);
        let own = paths.chain(layers).chain(buffers);
        let own = own.collect::<Vec<_>>().join("\n");
        let all = all_gather_bytes(&**ddp.groups().pipeline(), own.as_bytes())?;
        let all: Vec<_> = all.iter().map(|own| String::from_utf8_lossy(own)).collect();
        let names = all.iter().flat_map(|own| own.lines().map(String::from));
        Ok(Self(names.collect()))
    }

    /// Returns the keys that have none of the prefixes, or whose path is not in the model.
    fn unexpected(&self, keys: Vec<String>, wanted: &[StateKind]) -> Vec<String> {
        let known = |key: &String| {
            let mut paths = wanted.iter().filter_map(|of| key.strip_prefix(&of.prefix));
            paths.any(|path| self.0.contains(path))
        };
        keys.into_iter().filter(|key| !known(key)).collect()
    }

    /// Returns the keys of objects that do not belong to an FP8 layer of the model.
    pub fn unexpected_objects(&self, keys: Vec<String>) -> Vec<String> {
        keys.into_iter()
            .filter(|key| !self.0.contains(key))
            .collect()
    }
}

/// Checks the names, shapes and types of the tensors in `keys` against the model.
pub fn check(
    entries: &[ParameterEntry],
    wanted: &[StateKind],
    source: &dyn TensorSource,
    keys: Vec<String>,
    names: &ModelKeys,
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    let mut missing = vec![];
    for StateKind { prefix, types } in wanted {
        for (entry, dtype) in entries.iter().zip(types) {
            let Some(dtype) = dtype else {
                continue;
            };
            let key = format!("{prefix}{}", entry.path);
            if !has_tensor(source, &key, &entry.shape, *dtype, leniency)? {
                missing.push(key);
            }
        }
    }
    check_missing(missing, source, leniency)?;
    let keys = names.unexpected(keys, wanted);
    if keys.is_empty() || leniency.unexpected {
        Ok(())
    } else {
        let of = source.name();
        Err(CheckpointError::Unexpected { of, keys }.into())
    }
}

/// Returns whether a source has a tensor. Returns an error if the shape of the tensor differs or its type cannot be
/// converted.
pub(super) fn has_tensor(
    source: &dyn TensorSource,
    key: &str,
    shape: &[usize],
    dtype: DType,
    leniency: LoadTolerance,
) -> Result<bool, StateError> {
    let Some(meta) = source.tensor(key) else {
        return Ok(false);
    };
    let (of, key, wanted) = (source.name(), key.to_string(), shape.to_vec());
    if meta.shape != shape {
        let found = meta.shape;
        return Err(CheckpointError::Shape {
            of,
            key,
            found,
            wanted,
        }
        .into());
    }
    if !fits(meta.dtype, dtype, leniency.rounding) {
        let (found, wanted) = (meta.dtype, dtype);
        return Err(StateError::Type {
            of,
            key,
            found,
            wanted,
        });
    }
    Ok(true)
}

/// Returns an error for tensors that the source does not have, unless missing tensors are tolerated.
pub(super) fn check_missing(
    keys: Vec<String>,
    source: &dyn TensorSource,
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    if keys.is_empty() || leniency.missing {
        return Ok(());
    }
    let of = source.name();
    Err(CheckpointError::Missing { of, keys }.into())
}

/// Whether values can be converted from type `from` to type `to`. If `rounding` is false, the conversion must not round
/// any value.
pub(super) fn fits(from: ElementType, to: DType, rounding: bool) -> bool {
    use ElementType::{Bf16, F16, F32, F64};
    match (from, to) {
        (F64, DType::F64)
        | (F32, DType::F32 | DType::F64)
        | (F16, DType::F16 | DType::F32 | DType::F64)
        | (Bf16, DType::BF16 | DType::F32 | DType::F64) => true,
        (F64 | F32 | F16 | Bf16, _) => rounding,
        _ => false,
    }
}

/// Returns this rank's result if no rank failed. If any rank failed, every rank returns an error: the only distinct
/// error, or a list of the distinct errors if there are several. Collective: call on all ranks of `comm`.
pub fn agree<T>(result: Result<T, StateError>, comm: &dyn Communicator) -> Result<T, StateError> {
    let own = match &result {
        Ok(_) => String::new(),
        // The communicator may be the cause, so it is not used again.
        Err(StateError::Comm(_)) => return result,
        Err(error) => error.to_string(),
    };
    let all = all_gather_bytes(comm, own.as_bytes())?;
    let mut reasons: Vec<(usize, String)> = vec![];
    for (rank, text) in comm.group().ranks().iter().zip(all) {
        let reason = String::from_utf8_lossy(&text).into_owned();
        let is_new = reasons.iter().all(|(_, known)| *known != reason);
        if !reason.is_empty() && is_new {
            reasons.push((*rank, reason));
        }
    }
    match (&reasons[..], result) {
        ([], result) | ([_], result @ Err(_)) => result,
        _ => Err(StateError::Ranks { reasons }),
    }
}
