//! The autodiff function behind every collective of this module.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;
use parking_lot::Mutex;

use super::{CollectiveOp, Comm, PendingTensor, start};

/// One collective in the forward, its transpose in the backward.
#[derive(Debug)]
pub(super) struct CollectiveFunction<const D: usize> {
    pub comm: Comm,
    pub forward: CollectiveOp,
    pub backward: CollectiveOp,
    /// What is computed while the forward is under way.
    pub meanwhile: Meanwhile,
}

/// Work that is done once, and does not depend on the collective.
#[derive(Default)]
pub(super) struct Meanwhile(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Meanwhile {
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Mutex::new(Some(Box::new(work))))
    }

    fn run(&self) {
        let work = self.0.lock().take();
        if let Some(work) = work {
            work();
        }
    }
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

impl<const D: usize> CollectiveFunction<D> {
    fn start(&self, x: DispatchTensor, op: &CollectiveOp) -> PendingTensor<D> {
        start(Tensor::from_dispatch(x), op, &self.comm)
    }
}

impl<const D: usize> Function for CollectiveFunction<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let pending = self.start(inputs.remove(0), &self.forward);
        self.meanwhile.run();
        (pending.wait().into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let pending = self.start(gradient, &self.backward);
        vec![Some(pending.wait().into_dispatch())]
    }
}
