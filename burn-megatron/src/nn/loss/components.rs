//! The components of a loss, which are reported separately.

use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;

/// The components of a loss, each `[tokens]`, without autodiff.
#[derive(Debug)]
pub(super) struct LossComponents {
    /// The complete loss.
    pub loss: Tensor<1>,
    /// The cross-entropy.
    pub plain: Tensor<1>,
    /// The weighted z-loss, or `None` without a z-loss.
    pub z_loss: Option<Tensor<1>>,
}

impl LossComponents {
    /// Concatenates the components of consecutive chunks of tokens. Returns `None` for an empty list.
    pub fn joined(chunks: Vec<Self>) -> Option<Self> {
        let join = |part: fn(&Self) -> Option<&Tensor<1>>| {
            let parts: Option<Vec<_>> = chunks.iter().map(|own| part(own).cloned()).collect();
            parts
                .filter(|parts| !parts.is_empty())
                .map(|parts| Tensor::cat(parts, 0))
        };
        Some(Self {
            loss: join(|own| Some(&own.loss))?,
            plain: join(|own| Some(&own.plain))?,
            z_loss: join(|own| own.z_loss.as_ref()),
        })
    }
}

/// A cell that passes the components out of the autodiff function, which has only one output.
#[derive(Clone, Debug, Default)]
pub(super) struct ComponentsCell(Arc<Mutex<Option<LossComponents>>>);

impl ComponentsCell {
    pub fn put(&self, components: Option<LossComponents>) {
        *self.0.lock() = components;
    }

    pub fn take(&self) -> Option<LossComponents> {
        self.0.lock().take()
    }
}
