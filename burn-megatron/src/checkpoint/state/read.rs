//! Reads a rank's shard of a bucket from the tensors of a complete model.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::StateError;
use super::snapshot::read;
use crate::checkpoint::{ContiguousRun, ElementType, TensorSource, local_shards};
use crate::data_parallel::layout::ParameterSlice;
use crate::data_parallel::layout::chunks;
use crate::nn::{MeshRank, ParameterEntry};

/// Reads the bucket shards of one rank from a tensor source.
pub struct BucketReader<'a> {
    /// The source of the tensors.
    pub source: &'a dyn TensorSource,
    /// All parameters of the model.
    pub entries: &'a [ParameterEntry],
    /// The rank whose shards are read.
    pub rank: &'a MeshRank,
}

impl BucketReader<'_> {
    /// Reads the rank's shard of a bucket, in the dtype of `now`, which holds the current values. `slices` are the
    /// parameters in the shard. The keys of their tensors begin with `prefix`. Tensors that the source does not have
    /// keep the values in `now`. Padding is filled with zeros.
    ///
    /// The tensors must have been [checked](super::check).
    pub fn bucket(
        &self,
        prefix: &str,
        slices: &[ParameterSlice],
        now: &Tensor<1>,
    ) -> Result<Tensor<1>, StateError> {
        let (entries, dtype) = (self.entries, now.dtype());
        let key = |index: usize| format!("{prefix}{}", entries[index].path);
        let has_all = slices
            .iter()
            .all(|piece| self.source.tensor(&key(piece.index)).is_some());
        let start = if has_all {
            Tensor::zeros(now.dims(), (&Device::flex(), dtype))
        } else {
            now.clone()
        };
        let mut bytes = read(start, prefix)?;
        for piece in slices {
            let (entry, key) = (&entries[piece.index], key(piece.index));
            let Some(meta) = self.source.tensor(&key) else {
                continue;
            };
            let shape = entry.local_shape(self.rank);
            let before = piece.local_range.start;
            let size = dtype.size();
            for chunk in chunks(piece.parameter_range.clone()) {
                for shard in local_shards(entry, self.rank, chunk) {
                    let runs = shard.local.runs(&shape);
                    let at = |run: &ContiguousRun| {
                        let begin = (before + run.in_tensor - piece.parameter_range.start) * size;
                        begin..begin + run.len * size
                    };
                    if let ([run], true) = (&runs[..], meta.dtype.dtype() == dtype) {
                        let to = &mut bytes[at(run)];
                        self.source.read_into(&key, &shard.global, to)?;
                        continue;
                    }
                    let values = self.source.read(&key, &shard.global)?;
                    let values = converted(values, shard.global.len(), &key, meta.dtype, dtype)?;
                    for run in &runs {
                        let from = run.in_slice * size..(run.in_slice + run.len) * size;
                        bytes[at(run)].copy_from_slice(&values.as_bytes()[from]);
                    }
                }
            }
        }
        let data = TensorData::from_bytes(bytes, now.dims(), dtype);
        Ok(Tensor::from_data(data, (&now.device(), dtype)))
    }
}

/// Converts elements to another type. It does nothing if the type is the same.
pub(super) fn converted(
    bytes: Vec<u8>,
    elements: usize,
    key: &str,
    from: ElementType,
    to: DType,
) -> Result<TensorData, StateError> {
    let data =
        TensorData::try_from_bytes_vec(bytes, [elements], from.dtype()).map_err(|error| {
            StateError::Unreadable {
                key: key.into(),
                reason: error.to_string(),
            }
        })?;
    Ok(if from.dtype() == to {
        data
    } else {
        data.convert_dtype(to)
    })
}
