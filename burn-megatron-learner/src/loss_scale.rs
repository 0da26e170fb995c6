//! The loss scale for f16 training. Only the model can apply it, because the model calls the backward pass.

use std::cell::Cell;

use burn::tensor::Tensor;

use crate::error::LearnerError;

thread_local! {
    /// The loss scale of the current step on this rank's thread, and whether the model has applied it.
    static SCALE: Cell<(f64, bool)> = const { Cell::new((1.0, false)) };
}

/// Multiplies the loss by the loss scale of the current step. Call this function in
/// [`TrainStep::step`](burn::train::TrainStep::step):
///
/// ```text
/// let gradients = scale_loss(output.loss.clone()).backward();
/// TrainOutput::new(self, gradients, output)
/// ```
///
/// Returns the loss unchanged if no loss scale is set, or outside of a [`MegatronStrategy`](crate::MegatronStrategy).
/// The gradients are divided by the loss scale before they are clipped.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_learner::scale_loss;
///
/// // Outside of a `MegatronStrategy` there is no loss scale.
/// let loss = Tensor::<1>::full([1], 2.0, &Device::flex());
/// assert_eq!(scale_loss(loss).into_scalar::<f32>(), 2.0);
/// ```
pub fn scale_loss<const D: usize>(loss: Tensor<D>) -> Tensor<D> {
    let (scale, _) = SCALE.get();
    SCALE.set((scale, true));
    if scale == 1.0 {
        loss
    } else {
        loss.mul_scalar(scale)
    }
}

/// Runs the training step `step` with a loss scale. `step` must apply the scale if it is not 1.
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
