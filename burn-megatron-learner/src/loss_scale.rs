//! The loss scale of f16, which only the model can apply, as it calls the backward.

use std::cell::Cell;

use burn::tensor::Tensor;

use crate::error::LearnerError;

thread_local! {
    /// The scale of this step on this rank's thread, and whether it was applied.
    static SCALE: Cell<(f64, bool)> = const { Cell::new((1.0, false)) };
}

/// The loss times the loss scale of the current step, for [`TrainStep::step`](burn::train::TrainStep::step):
///
/// ```text
/// let gradients = scale_loss(output.loss.clone()).backward();
/// TrainOutput::new(self, gradients, output)
/// ```
///
/// Without a loss scale, and outside of a [`MegatronStrategy`](crate::MegatronStrategy), it is the identity. The gradients are
/// divided by it before they are clipped.
pub fn scale_loss<const D: usize>(loss: Tensor<D>) -> Tensor<D> {
    let (scale, _) = SCALE.get();
    SCALE.set((scale, true));
    if scale == 1.0 {
        loss
    } else {
        loss.mul_scalar(scale)
    }
}

/// Runs `step` with a loss scale, which it must apply if it is not 1.
pub(crate) fn with_loss_scale<T>(scale: f64, step: impl FnOnce() -> T) -> Result<T, LearnerError> {
    SCALE.set((scale, false));
    let output = step();
    let (_, applied) = SCALE.replace((1.0, false));
    if applied || scale == 1.0 {
        Ok(output)
    } else {
        Err(LearnerError::LossNotScaled(scale))
    }
}
