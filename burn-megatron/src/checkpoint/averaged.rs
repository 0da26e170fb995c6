//! The average of the weights in a checkpoint, in the place of its weights.

use super::{Checkpoint, CheckpointError, TensorMeta, TensorSlice, TensorSource, state::MODEL};
use crate::optim::EMA;

/// The tensors of a checkpoint, with the [exponential moving average](crate::optim::EmaConfig) of each weight in its
/// place. What has no average, such as the bias of a router, is as it was saved.
pub struct AveragedWeights<'a>(&'a Checkpoint);

impl<'a> AveragedWeights<'a> {
    /// The average in a checkpoint; `None` if it has none.
    pub fn of(checkpoint: &'a Checkpoint) -> Option<Self> {
        let mut keys = checkpoint.keys().into_iter();
        keys.any(|key| key.starts_with(EMA))
            .then_some(Self(checkpoint))
    }

    /// The key of the tensor that stands for another.
    fn key(&self, key: &str) -> String {
        let average = key.strip_prefix(MODEL).map(|path| format!("{EMA}{path}"));
        let average = average.filter(|average| self.0.tensor(average).is_some());
        average.unwrap_or_else(|| key.to_string())
    }
}

impl TensorSource for AveragedWeights<'_> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn keys(&self) -> Vec<String> {
        self.0.keys()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        let meta = self.0.tensor(&self.key(key))?;
        let key = key.to_string();
        Some(TensorMeta { key, ..meta })
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        self.0.read(&self.key(key), slice)
    }

    fn read_into(
        &self,
        key: &str,
        slice: &TensorSlice,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        self.0.read_into(&self.key(key), slice, to)
    }
}
