//! A backward that starts from a gradient which comes later.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

/// The place into which the gradient of a stage's output is put.
#[derive(Clone, Default)]
pub(super) struct Seed(Arc<Mutex<Option<DispatchTensor>>>);

impl Seed {
    /// A scalar whose backward gives `output` the gradient that is in this place by then.
    ///
    /// `output` is not kept: only its graph is. `anchor` is tracked, so that a stage that trains
    /// nothing has a backward too.
    pub fn root(&self, output: Tensor<3>, anchor: Tensor<1>) -> Tensor<1> {
        apply(
            vec![output.into_dispatch(), anchor.into_dispatch()],
            self.clone(),
        )
    }

    /// Puts the gradient in.
    pub fn put(&self, gradient: Tensor<3>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient.into_dispatch());
    }
}

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the gradient of a stage's output")
    }
}

impl Function for Seed {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let output = Tensor::<3>::from_dispatch(inputs.remove(0));
        let root = Tensor::<1>::zeros([1], (&output.device(), output.dtype()));
        (root.into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        assert!(
            gradient.is_some(),
            "a valid schedule brings the gradient before the backward"
        );
        vec![gradient, None]
    }
}
