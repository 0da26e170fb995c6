//! The errors of optimizers.

use super::groups::GroupError;
use super::logit_clip::QkClipError;
use crate::comm::CommError;

/// Why an optimizer cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A setting out of its range.
    #[error("invalid optimizer setting {name} = {value}: expected {fits} in 32 bits")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The valid range.
        fits: &'static str,
    },
    /// An invalid parameter group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// QK-Clip that cannot limit the logits of a model.
    #[error(transparent)]
    QkClip(#[from] QkClipError),
    /// Logits of a model without attention.
    #[error(
        "{setting} needs the logits of attention, and this model has no attention layer of this library; remove {setting}"
    )]
    NoAttention {
        /// The setting.
        setting: &'static str,
    },
    /// 16-bit moments for an optimizer that stores them in the dtype of the masters.
    #[error(
        "moments = bf16 requires the fused AdamW, but the optimizer of this run is another one, or unfused; fuse \
         AdamW, or use moments = f32"
    )]
    Moments,
    /// State on the host for an optimizer that is stepped on the device.
    #[error(
        "offload.optimizer = {0} requires the fused AdamW, which steps a bucket at once on the device or the host, but \
         the optimizer of this run is another one, or unfused; fuse AdamW, or use offload.optimizer = 0"
    )]
    Offload(f64),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for OptimizerError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
