//! Whether a source has what a model needs, and nothing else, before anything has changed.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::tensor::DType;

use super::{FP8, StateError};
use crate::checkpoint::{CheckpointError, ElementType, Leniency, TensorSource};
use crate::comm::{Communicator, all_gather_bytes};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::ParameterEntry;

/// Tensors that a model needs: for each parameter one.
pub(crate) struct Wanted<'a> {
    /// What stands before the path of the parameter.
    pub prefix: &'a str,
    /// The type of each, by place in the table.
    pub types: Vec<DType>,
}

/// What there is in the whole model, over all stages.
pub(crate) struct Names(BTreeSet<String>);

impl Names {
    /// The parameters and the 8-bit layers of all stages; every rank of the pipeline must come.
    pub fn gather<M: Module>(ddp: &DistributedDataParallel<M>) -> Result<Self, StateError> {
        let paths = ddp.table().entries().iter().map(|entry| entry.path.clone());
        let layers = ddp.fp8().states().into_keys();
        let layers = layers.map(|path| format!("{FP8}{path}"));
        let own = paths.chain(layers).collect::<Vec<_>>().join("\n");
        let all = all_gather_bytes(&**ddp.groups().pipeline(), own.as_bytes())?;
        let all = all.iter().map(|own| String::from_utf8_lossy(own));
        let all: Vec<_> = all.collect();
        let names = all.iter().flat_map(|own| own.lines().map(String::from));
        Ok(Self(names.collect()))
    }

    /// Those of `keys` that are of none of the kinds, or of no parameter.
    fn unexpected(&self, keys: Vec<String>, wanted: &[Wanted]) -> Vec<String> {
        let known = |key: &String| {
            let mut paths = wanted.iter().filter_map(|of| key.strip_prefix(of.prefix));
            paths.any(|path| self.0.contains(path))
        };
        keys.into_iter().filter(|key| !known(key)).collect()
    }

    /// The objects that belong to no layer of the model.
    pub fn unexpected_objects(&self, keys: Vec<String>) -> Vec<String> {
        keys.into_iter()
            .filter(|key| !self.0.contains(key))
            .collect()
    }
}

/// Checks names, shapes and types of the tensors among `keys`.
pub(crate) fn check(
    entries: &[ParameterEntry],
    wanted: &[Wanted],
    source: &dyn TensorSource,
    keys: Vec<String>,
    names: &Names,
    leniency: Leniency,
) -> Result<(), StateError> {
    let mut missing = vec![];
    for Wanted { prefix, types } in wanted {
        for (entry, dtype) in entries.iter().zip(types) {
            let key = format!("{prefix}{}", entry.path);
            let Some(meta) = source.tensor(&key) else {
                missing.push(key);
                continue;
            };
            let of = source.name();
            if meta.shape != entry.shape {
                return Err(CheckpointError::Shape {
                    of,
                    key,
                    found: meta.shape,
                    wanted: entry.shape.clone(),
                }
                .into());
            }
            if !fits(meta.dtype, *dtype, leniency.rounding) {
                return Err(StateError::Type {
                    of,
                    key,
                    found: meta.dtype,
                    wanted: *dtype,
                });
            }
        }
    }
    let of = source.name();
    if !missing.is_empty() && !leniency.missing {
        return Err(CheckpointError::Missing { of, keys: missing }.into());
    }
    let keys = names.unexpected(keys, wanted);
    match keys.is_empty() || leniency.unexpected {
        true => Ok(()),
        false => Err(CheckpointError::Unexpected { of, keys }.into()),
    }
}

/// Whether values of a type can become another one: always where none is rounded.
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

/// What this rank came to, unless another one failed. All ranks of `comm` must come, and all fail where
/// one does: with the error that there is, or with all different ones.
pub(crate) fn agree<T>(
    result: Result<T, StateError>,
    comm: &dyn Communicator,
) -> Result<T, StateError> {
    let own = match &result {
        Ok(_) => String::new(),
        // It may be about the ranks themselves, which are not to be asked then.
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
