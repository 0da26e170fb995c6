//! The errors of optimizers.

use super::groups::GroupError;
use super::logit_clip::QkClipError;
use crate::comm::CommError;

/// The error that is returned if an optimizer cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A setting is out of its valid range.
    #[error("invalid optimizer setting {name} = {value}: expected {fits} in 32 bits")]
    Setting {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
        /// The valid range.
        fits: &'static str,
    },
    /// A parameter group is invalid.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// QK-Clip cannot limit the logits of this model.
    #[error(transparent)]
    QkClip(#[from] QkClipError),
    /// A setting requires attention logits, but the model has no attention.
    #[error(
        "{setting} requires attention logits, but this model has no attention layer of this library: remove {setting}"
    )]
    NoAttention {
        /// The name of the setting.
        setting: &'static str,
    },
    /// 16-bit moments were requested for an optimizer that stores moments in the dtype of the master weights.
    #[error(
        "moments = bf16 requires the fused AdamW, but this run uses another optimizer, or an unfused one; fuse AdamW, \
         or use moments = f32"
    )]
    Moments,
    /// Optimizer state in host memory was requested, but the optimizer supports only state on the device.
    #[error(
        "offload.optimizer = {0} requires the fused AdamW, which steps a bucket at once on the device or the host, but \
         this run uses another optimizer, or an unfused one; fuse AdamW, or use offload.optimizer = 0"
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
