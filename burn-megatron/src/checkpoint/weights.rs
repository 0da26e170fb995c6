//! The weights of a rank, from any source.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};

use super::{CheckpointError, TensorSource, held};
use crate::comm::all_gather_bytes;
use crate::data_parallel::DistributedDataParallel;
use crate::nn::ParameterEntry;

/// Before the path of a weight, in the key of its tensor.
pub const MODEL: &str = "model/";

/// What loading lets pass. By default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leniency {
    /// Whether the model may have tensors that the source has not; they stay as they are.
    pub missing: bool,
    /// Whether the source may have tensors that the model has not.
    pub unexpected: bool,
}

/// Loads the weights that this rank holds, whatever layout they were saved in. Every rank must come.
///
/// Nothing has changed when names or shapes do not fit.
///
/// # Errors
///
/// [`CheckpointError`] for tensors that are missing, unexpected or of another shape, and for what cannot
/// be read.
pub fn load_weights<M: Module>(
    ddp: &mut DistributedDataParallel<M>,
    source: &dyn TensorSource,
    leniency: Leniency,
) -> Result<(), CheckpointError> {
    let table = ddp.table().clone();
    let present = check(table.entries(), source, leniency.missing)?;
    if !leniency.unexpected {
        check_unexpected(ddp, source)?;
    }
    for (index, entry) in table.entries().iter().enumerate() {
        if present[index] {
            let value = part(ddp, index, entry, source)?;
            ddp.write_parameter(index, &value);
        }
    }
    ddp.parameters_written();
    Ok(())
}

/// Which entries are there; the shapes of all of these fit.
fn check(
    entries: &[ParameterEntry],
    source: &dyn TensorSource,
    may_miss: bool,
) -> Result<Vec<bool>, CheckpointError> {
    let (mut present, mut missing) = (vec![], vec![]);
    for entry in entries {
        let key = format!("{MODEL}{}", entry.path);
        let meta = source.tensor(&key);
        present.push(meta.is_some());
        match meta {
            None => missing.push(key),
            Some(meta) if meta.shape != entry.shape => {
                return Err(CheckpointError::Shape {
                    of: source.name(),
                    key,
                    found: meta.shape,
                    wanted: entry.shape.clone(),
                });
            }
            Some(_) => {}
        }
    }
    match missing.is_empty() || may_miss {
        true => Ok(present),
        false => Err(CheckpointError::Missing {
            of: source.name(),
            keys: missing,
        }),
    }
}

/// Looks for weights that no stage of the pipeline has.
fn check_unexpected<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
) -> Result<(), CheckpointError> {
    let paths = ddp.table().entries().iter().map(|entry| &entry.path[..]);
    let own = paths.collect::<Vec<_>>().join("\n");
    let all = all_gather_bytes(&**ddp.groups().pipeline(), own.as_bytes())?;
    let all: Vec<_> = all.iter().map(|own| String::from_utf8_lossy(own)).collect();
    let known: BTreeSet<&str> = all.iter().flat_map(|own| own.lines()).collect();
    let keys = source.keys().into_iter().filter(|key| {
        let path = key.strip_prefix(MODEL);
        path.is_some_and(|path| !known.contains(path))
    });
    let keys: Vec<_> = keys.collect();
    match keys.is_empty() {
        true => Ok(()),
        false => Err(CheckpointError::Unexpected {
            of: source.name(),
            keys,
        }),
    }
}

/// This rank's part of a weight, flat and in the type that it is stepped in; padding is zero.
fn part<M: Module>(
    ddp: &DistributedDataParallel<M>,
    index: usize,
    entry: &ParameterEntry,
    source: &dyn TensorSource,
) -> Result<Tensor<1>, CheckpointError> {
    let place = ddp.groups().place();
    let shape = entry.local_shape(place);
    let len: usize = shape.iter().product();
    let mut values = vec![0f64; len];
    let key = format!("{MODEL}{}", entry.path);
    let Some(meta) = source.tensor(&key) else {
        unreachable!("{key} was seen to be there")
    };
    for held in held(entry, place, 0..len) {
        let bytes = source.read(&key, &held.whole)?;
        let data = TensorData::from_bytes_vec(bytes, [held.whole.len()], meta.dtype.dtype());
        let read: Vec<f64> = data.iter::<f64>().collect();
        for run in held.part.runs(&shape) {
            values[run.in_tensor..run.in_tensor + run.len]
                .copy_from_slice(&read[run.in_slice..run.in_slice + run.len]);
        }
    }
    let main = ddp.plan().parameters[index].main;
    let data = TensorData::new(values, [len]);
    let data = match main {
        DType::F64 => data,
        main => data.convert_dtype(main),
    };
    Ok(Tensor::from_data(data, (&ddp.plan().device, main)))
}
