//! The expert bias, which balances the load of the experts without an auxiliary loss.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use parking_lot::Mutex;

/// A bias per expert for load balancing without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3).
/// The bias is added to the scores for the selection of experts. It does not change the weights of the selected
/// experts. After each optimizer step that is not skipped, `rate` is added to the bias of experts below the mean load
/// of the step, and subtracted from the bias of experts above the mean load.
///
/// The bias is not a parameter: it has no gradient and no weight decay, and is always in f32. All ranks that hold the
/// router have the same bias. Clones share the bias.
#[derive(Clone, Debug)]
pub struct ExpertBias {
    rate: f64,
    /// The bias: `[experts]`, without autodiff.
    value: Arc<Mutex<Tensor<1>>>,
}

impl ExpertBias {
    pub(super) fn new(experts: usize, rate: f64, device: &Device) -> Self {
        let zeros = Tensor::zeros([experts], (&device.clone().inner(), DType::F32));
        let value = Arc::new(Mutex::new(zeros));
        Self { rate, value }
    }

    /// Returns the bias: `[experts]` in f32, not tracked by autodiff.
    pub fn value(&self) -> Tensor<1> {
        self.value.lock().clone()
    }

    /// Replaces the bias. All ranks that hold the router must set the same value.
    ///
    /// # Panics
    ///
    /// If the length of `value` differs from the number of experts.
    pub fn set(&self, value: Tensor<1>) {
        let mut own = self.value.lock();
        let (given, expected) = (value.dims(), own.dims());
        assert_eq!(given, expected, "the length of an expert bias");
        *own = value.inner().cast(DType::F32).to_device(&own.device());
    }

    /// Updates the bias with the load `[experts]` of a step. `taken` `[1]` is 0 if the step was skipped, and otherwise
    /// 1.
    pub(super) fn update(&self, load: Tensor<1>, taken: Tensor<1>) {
        let mut value = self.value.lock();
        let [experts] = load.dims();
        // The mean minus the load, times the number of experts. These are integers.
        let missing = load.clone().sum() - load.mul_scalar(experts as f64);
        let change = missing.sign() * taken;
        *value = value.clone() + change.cast(DType::F32).mul_scalar(self.rate);
    }
}
