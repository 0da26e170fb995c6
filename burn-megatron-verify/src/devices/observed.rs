//! Functions that other modules use to record a forward.

use std::cell::RefCell;
use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::trace::Trace;
use super::{Batch, place};

/// Returns the size in bytes of the operation outputs of each module.
///
/// # Errors
///
/// The reason why the forward cannot be recorded.
pub(crate) fn output_bytes<M: Module, B: Batch>(
    model: &M,
    batch: &B,
    loss: &mut impl FnMut(&M, &B) -> Tensor<1>,
) -> Result<BTreeMap<String, u64>, String> {
    let loss = RefCell::new(loss);
    let trace = Trace::record(model, batch, |model: &M, batch: &B| {
        loss.borrow_mut()(model, batch)
    })?;
    Ok(trace.output_bytes())
}

/// Returns a copy of the module on `device` for training.
pub(crate) fn place_for_training<M: Module>(model: &M, device: &Device) -> M {
    place::place_for_training(model, &device.clone().without_autodiff())
}
