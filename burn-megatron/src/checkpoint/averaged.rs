//! Reads the averaged weights of a checkpoint in place of its weights.

use super::{Checkpoint, CheckpointError, TensorMeta, TensorSlice, TensorSource, state::MODEL};
use crate::optim::EMA;

/// A checkpoint whose weights are replaced by their [exponential moving averages](crate::optim::EmaConfig). Tensors
/// without an average, such as the bias of a router, are read unchanged.
pub struct AveragedWeights<'a>(&'a Checkpoint);

impl<'a> AveragedWeights<'a> {
    /// Returns the averaged weights of a checkpoint, or `None` if the checkpoint has no averages.
    pub fn of(checkpoint: &'a Checkpoint) -> Option<Self> {
        let mut keys = checkpoint.keys().into_iter();
        keys.any(|key| key.starts_with(EMA))
            .then_some(Self(checkpoint))
    }

    /// Returns the key of the tensor that is read in place of `key`.
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
