//! What a rank steps of a bucket, from the tensors of a whole model.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::StateError;
use super::parts::chunks;
use super::snapshot::read;
use crate::checkpoint::{ElementType, Run, TensorSource, held};
use crate::data_parallel::Plan;
use crate::mesh::Place;
use crate::nn::ParameterEntry;

/// Reads what one rank steps.
pub(crate) struct Reader<'a> {
    pub source: &'a dyn TensorSource,
    pub plan: &'a Plan,
    pub entries: &'a [ParameterEntry],
    /// On the tensor axis.
    pub place: Place,
}

impl Reader<'_> {
    /// What the rank steps of a bucket of the tensors whose keys begin with `prefix`, in the type of
    /// `now`, which has the values of tensors that the source has not. Padding is zero.
    ///
    /// The tensors were [checked](super::check).
    pub fn bucket(
        &self,
        prefix: &str,
        bucket: usize,
        now: &Tensor<1>,
    ) -> Result<Tensor<1>, StateError> {
        let Self { plan, entries, .. } = self;
        let (dtype, pieces) = (now.dtype(), plan.own_pieces(bucket));
        let key = |index: usize| format!("{prefix}{}", entries[index].path);
        let has_all = pieces
            .iter()
            .all(|piece| self.source.tensor(&key(piece.index)).is_some());
        let start = match has_all {
            true => Tensor::zeros(now.dims(), (&Device::flex(), dtype)),
            false => now.clone(),
        };
        let mut bytes = read(start, prefix)?;
        for piece in pieces {
            let (entry, key) = (&entries[piece.index], key(piece.index));
            let Some(meta) = self.source.tensor(&key) else {
                continue;
            };
            let shape = entry.local_shape(self.place);
            let before = piece.of_range.start;
            let size = dtype.size();
            for chunk in chunks(piece.of_parameter.clone()) {
                for held in held(entry, self.place, chunk) {
                    let runs = held.part.runs(&shape);
                    let at = |run: &Run| {
                        let begin = (before + run.in_tensor - piece.of_parameter.start) * size;
                        begin..begin + run.len * size
                    };
                    if let ([run], true) = (&runs[..], meta.dtype.dtype() == dtype) {
                        let to = &mut bytes[at(run)];
                        self.source.read_into(&key, &held.whole, to)?;
                        continue;
                    }
                    let values = self.source.read(&key, &held.whole)?;
                    let values = converted(values, held.whole.len(), &key, meta.dtype, dtype)?;
                    for run in &runs {
                        let from = run.in_slice * size..(run.in_slice + run.len) * size;
                        bytes[at(run)].copy_from_slice(&values.as_bytes()[from]);
                    }
                }
            }
        }
        let data = TensorData::from_bytes(bytes, now.dims(), dtype);
        Ok(Tensor::from_data(data, (&plan.device, dtype)))
    }
}

/// So many elements as another type; nothing is done where it is the same.
fn converted(
    bytes: Vec<u8>,
    elements: usize,
    key: &str,
    from: ElementType,
    to: DType,
) -> Result<TensorData, StateError> {
    let data = TensorData::try_from_bytes_vec(bytes, [elements], from.dtype());
    let data = data.map_err(|error| StateError::Unreadable {
        key: key.into(),
        reason: error.to_string(),
    })?;
    Ok(match from.dtype() == to {
        true => data,
        false => data.convert_dtype(to),
    })
}
