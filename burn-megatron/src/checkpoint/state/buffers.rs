//! Saves and loads the biases of expert routers, which are tensors of a model but not parameters. All ranks of a
//! pipeline stage have equal biases. The first rank of the stage writes the biases, and each rank reads all biases of
//! its stage.

use burn::module::Module;
use burn::tensor::{DType, Tensor};

use super::check::{check_missing, has_tensor};
use super::read::converted;
use super::snapshot::read as bytes_of;
use super::{MODEL, StateError};
use crate::checkpoint::{
    ElementType, LoadTolerance, TensorMeta, TensorShard, TensorSlice, TensorSource,
};
use crate::data_parallel::DistributedDataParallel;
use crate::nn::moe::ExpertBias;

/// Returns the tensors that this rank writes, with their bytes.
pub(super) fn write<M: Module>(
    ddp: &DistributedDataParallel<M>,
) -> Result<Vec<(TensorShard, Vec<u8>)>, StateError> {
    if ddp.groups().stage().rank() != 0 {
        return Ok(vec![]);
    }
    let biases = ddp.routers().expert_biases().into_iter();
    let write = |(path, bias): (String, ExpertBias)| {
        let tensor = meta(&path, &bias);
        let bytes = bytes_of(bias.value(), &tensor.key)?.to_vec();
        let slice = TensorSlice::whole(&tensor.shape);
        Ok((TensorShard { tensor, slice }, bytes))
    };
    biases.map(write).collect()
}

/// Checks that a source has all router biases of this rank, with the expected shapes.
pub fn check<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
    leniency: LoadTolerance,
) -> Result<(), StateError> {
    let mut missing = vec![];
    for (path, bias) in ddp.routers().expert_biases() {
        let TensorMeta { key, shape, .. } = meta(&path, &bias);
        if !has_tensor(source, &key, &shape, DType::F32, leniency)? {
            missing.push(key);
        }
    }
    check_missing(missing, source, leniency)
}

/// Reads this rank's router biases from a source that [`check`] has accepted. Biases that the source does not have keep
/// their values.
pub fn read<M: Module>(
    ddp: &DistributedDataParallel<M>,
    source: &dyn TensorSource,
) -> Result<Vec<(ExpertBias, Tensor<1>)>, StateError> {
    let mut read = vec![];
    for (path, bias) in ddp.routers().expert_biases() {
        let TensorMeta { key, shape, .. } = meta(&path, &bias);
        let Some(found) = source.tensor(&key) else {
            continue;
        };
        let bytes = source.read(&key, &TensorSlice::whole(&shape))?;
        let data = converted(bytes, shape[0], &key, found.dtype, DType::F32)?;
        let device = bias.value().device();
        read.push((bias, Tensor::from_data(data, (&device, DType::F32))));
    }
    Ok(read)
}

/// Sets the router biases to the values that [`read`] returned.
pub fn replace(read: Vec<(ExpertBias, Tensor<1>)>) {
    for (bias, value) in read {
        bias.set(value);
    }
}

fn meta(path: &str, bias: &ExpertBias) -> TensorMeta {
    TensorMeta {
        key: format!("{MODEL}{path}"),
        dtype: ElementType::F32,
        shape: bias.value().dims().to_vec(),
    }
}
