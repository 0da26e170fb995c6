//! Merges two attention results for the same queries and different keys.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::KernelError;
use crate::error::accept;
use crate::launch::{DeviceOp, InPlace, Spec, launch};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

const NAME: &str = "merge of attention";

/// The threshold for a query without visible keys: its log-sum-exp is at most this value.
pub(crate) const UNSEEN: f64 = -1e30;

/// Merges two attention results for the same queries and different keys.
///
/// Outputs are `[batch, queries, heads, width]` and log-sum-exps are `[batch, heads, queries]`. All inputs are f32, or
/// all are f64.
///
/// ```text
/// lse = ln(e^lse1 + e^lse2)      out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2
/// ```
///
/// If a query has no visible keys in either result, the merged output is 0 and the merged log-sum-exp is minus
/// infinity. The first output is updated in place if no other tensor shares its memory. The function is not
/// differentiable: autodiff does not record it. [`composed::merge`](super::composed::merge) computes the same function
/// with Burn's own operations.
///
/// # Panics
///
/// Panics with a [`KernelError`] if shapes or types differ.
pub fn merge(
    (out, lse): (Tensor<4>, Tensor<3>),
    (other_out, other_lse): (Tensor<4>, Tensor<3>),
) -> (Tensor<4>, Tensor<3>) {
    accept(check([&out, &other_out], [&lse, &other_lse]));
    if out.shape().num_elements() == 0 {
        return (out, lse);
    }
    let inputs = vec![
        out.into_dispatch(),
        lse.into_dispatch(),
        other_out.into_dispatch(),
        other_lse.into_dispatch(),
    ];
    let mut outputs = launch(MergeOp, inputs);
    let lse = Tensor::from_dispatch(outputs.remove(1));
    (Tensor::from_dispatch(outputs.remove(0)), lse)
}

fn check(outs: [&Tensor<4>; 2], lses: [&Tensor<3>; 2]) -> Result<(), KernelError> {
    let [batch, queries, heads, _] = outs[0].dims();
    let fits = [batch, heads, queries];
    if outs[0].dims() != outs[1].dims() || lses.iter().any(|lse| lse.dims() != fits) {
        let message = format!(
            "outputs of shape {:?} and {:?} with log-sum-exps of {:?} and {:?}: expected equal ones, [batch, queries, heads, \
             width] and [batch, heads, queries]",
            outs[0].dims(),
            outs[1].dims(),
            lses[0].dims(),
            lses[1].dims()
        );
        return Err(KernelError::shape(NAME, message));
    }
    let types = [
        outs[0].dtype(),
        outs[1].dtype(),
        lses[0].dtype(),
        lses[1].dtype(),
    ];
    let is_wide = matches!(types[0], DType::F32 | DType::F64);
    if is_wide && types.iter().all(|dtype| *dtype == types[0]) {
        return Ok(());
    }
    Err(KernelError::Option {
        operation: NAME,
        name: "types of outputs and log-sum-exps",
        value: format!("{types:?}"),
        fits: "all F32, or all F64",
    })
}

/// The merge as a device operation. Its inputs are the output and the log-sum-exp of both results.
#[derive(Debug)]
struct MergeOp;

impl DeviceOp for MergeOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        inputs[..2].to_vec()
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::FIRST)
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        match inputs[0].dtype() {
            DType::F64 => cpu::merge::<f64>(inputs),
            _ => cpu::merge::<f32>(inputs),
        }
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::merge(inputs)
    }
}
