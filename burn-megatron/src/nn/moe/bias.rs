//! The expert bias: an even load without a loss.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use parking_lot::Mutex;

/// A number for each expert that is added to its scores where experts are chosen, and nowhere else (Wang et al. 2024,
/// arXiv:2408.15664; DeepSeek-V3). After each step that is taken it grows by `rate` for an expert with less than the
/// mean load of the step, and falls by `rate` for one with more.
///
/// It is no parameter: it has no gradient, is not decayed, and stays in f32 whatever the type of the model. All ranks
/// of the router have the same. Clones share it.
#[derive(Clone, Debug)]
pub struct ExpertBias {
    rate: f64,
    /// `[experts]`, without autodiff.
    value: Arc<Mutex<Tensor<1>>>,
}

impl ExpertBias {
    pub(super) fn new(experts: usize, rate: f64, device: &Device) -> Self {
        let zeros = Tensor::zeros([experts], (&device.clone().inner(), DType::F32));
        let value = Arc::new(Mutex::new(zeros));
        Self { rate, value }
    }

    /// `[experts]` in f32, without autodiff.
    pub fn value(&self) -> Tensor<1> {
        self.value.lock().clone()
    }

    /// Replaces it, on all ranks of the router with the same.
    ///
    /// # Panics
    ///
    /// If the length is another.
    pub fn set(&self, value: Tensor<1>) {
        let mut own = self.value.lock();
        let (given, expected) = (value.dims(), own.dims());
        assert_eq!(given, expected, "the length of an expert bias");
        *own = value.inner().cast(DType::F32).to_device(&own.device());
    }

    /// Moves it by the load `[experts]` of a step, times `taken`, `[1]`: 1, or 0 for a step that was skipped.
    pub(super) fn update(&self, load: Tensor<1>, taken: Tensor<1>) {
        let mut value = self.value.lock();
        let [experts] = load.dims();
        // The mean less the load, times the number of experts: whole numbers.
        let missing = load.clone().sum() - load.mul_scalar(experts as f64);
        let change = missing.sign() * taken;
        *value = value.clone() + change.cast(DType::F32).mul_scalar(self.rate);
    }
}
