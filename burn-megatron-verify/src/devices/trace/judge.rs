//! Compares the difference of an operation with its limit.

use burn::tensor::TensorData;
use burn_ir::{ModuleOperationIr, OperationIr, TensorIr};

use super::super::compare::difference;
use super::super::report::{FirstDifference, ReplayMode};
use super::super::step::floats;
use super::{Node, Trace, What};

/// The limit of a difference. The difference must be at most `bound`, relative to the largest output or to `scale`,
/// whichever is larger.
#[derive(Default)]
pub(super) struct Limit {
    pub(super) scale: f64,
    pub(super) bound: f64,
}

impl Trace {
    /// Returns the difference of an operation, or `None` if it is within the limit.
    pub(super) fn judge(
        &self,
        number: usize,
        mode: ReplayMode,
        inputs: &[TensorData],
        expected: &[TensorData],
        found: &Result<Vec<TensorData>, String>,
        limit: impl Fn(&Node) -> Limit,
    ) -> Option<FirstDifference> {
        let node = &self.nodes[number];
        if node.name.starts_with("Empty") {
            return None;
        }
        let first = |relative, bound, reason: Option<String>| FirstDifference {
            module: node.module.clone(),
            operation: node.name.clone(),
            number,
            operations: self.len(),
            shape: node.outputs.first().map_or(vec![], |it| it.shape.to_vec()),
            relative,
            bound,
            mode,
            reason,
        };
        let is_nan = |all: &[TensorData]| {
            let floats = all.iter().filter(|data| data.dtype().is_float());
            floats.cloned().any(floats_have_nan)
        };
        let has_nan = is_nan(inputs);
        if is_nan(expected) {
            let reason = if has_nan {
                "its input is not a number"
            } else {
                "not a number, also on the CPU"
            };
            return Some(first(f64::INFINITY, 0.0, Some(reason.into())));
        }
        let found = match found {
            Ok(found) => found,
            Err(reason) => return Some(first(f64::INFINITY, 0.0, Some(reason.clone()))),
        };
        let has_floats = expected.iter().any(|data| data.dtype().is_float());
        let pairs = expected.iter().zip(found);
        // If values are equal, their indices may differ, so only the values are compared.
        let pairs = pairs.filter(|(data, _)| data.dtype().is_float() || !has_floats);
        let Limit { scale, bound } = if has_floats {
            limit(node)
        } else {
            Limit::default()
        };
        let relative = pairs.map(|(expected, found)| {
            difference(&floats(expected.clone()), &floats(found.clone()), scale)
        });
        let relative = relative.fold(0.0, f64::max);
        (relative > bound).then(|| first(relative, bound, None))
    }
}

fn floats_have_nan(data: TensorData) -> bool {
    data.iter::<f64>().any(f64::is_nan)
}

impl Node {
    /// Returns the number of terms of the longest sum that the operation can contain: the largest dimension, or the
    /// number of inputs per output.
    pub(super) fn longest_sum(&self) -> usize {
        let elements = |tensor: &TensorIr| tensor.shape.num_elements();
        let outputs = self.outputs.iter().map(elements).max().unwrap_or(1).max(1);
        let dims = self
            .inputs
            .iter()
            .flat_map(|input| input.shape.iter().copied());
        let ratios = self.inputs.iter().map(|input| elements(input) / outputs);
        let windows = match &self.what {
            // The number of weights per output.
            What::Operation(OperationIr::Module(ModuleOperationIr::Conv2d(conv))) => {
                elements(&conv.weight) / conv.weight.shape[0].max(1)
            }
            _ => 1,
        };
        dims.chain(ratios)
            .chain([windows])
            .max()
            .unwrap_or(1)
            .max(1)
    }

    /// Returns whether an output is a sum of terms that grow with the inputs. The output for the absolute values of the
    /// inputs is then an upper bound of the terms.
    pub(super) fn is_sum(&self) -> bool {
        let sums = [
            "Sum",
            "Mean",
            "CumSum",
            "AvgPool",
            "AdaptiveAvgPool",
            "Matmul",
            "Linear",
            "Conv",
        ];
        matches!(self.what, What::Operation(_))
            && sums.iter().any(|name| self.name.starts_with(name))
    }

    pub(super) fn is_product(&self) -> bool {
        let products = ["Matmul", "Linear", "Conv", "Attention", "DeformableConv"];
        matches!(self.what, What::Call(_))
            || products.iter().any(|name| self.name.starts_with(name))
    }
}
