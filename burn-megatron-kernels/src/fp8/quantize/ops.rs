//! Quantization as device operations.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::super::format::Format;
use super::super::matrix::words;
use super::cpu;
#[cfg(feature = "cubecl")]
use super::kernel;
use super::scaling::{QuantizerUsage, ScalingKind};
use crate::activation::FusedActivation;
use crate::launch::{DeviceOp, Spec};

/// The quantizer as a device operation. Its inputs are the matrix (or the input and the bias of an activation), the
/// scales if they are given, and the optional log.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantizeOp {
    pub format: Format,
    pub kind: ScalingKind,
    pub usage: QuantizerUsage,
    /// The activation that computes the matrix, if the input is an activation.
    pub activation: Option<FusedActivation>,
    /// The index of the given scale in the tensor of scales.
    pub given: usize,
    /// The entry of the log to which the statistics are added.
    pub slot: Option<usize>,
}

impl QuantizeOp {
    /// Returns the rows and columns of the matrix, given the shape of the first input.
    pub(super) fn sizes(&self, input: &[usize]) -> [usize; 2] {
        let width = |width| match self.activation {
            Some(activation) => activation.kind.output_width(width),
            None => width,
        };
        [input[0], width(input[1])]
    }
}

impl DeviceOp for QuantizeOp {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [rows, columns] = self.sizes(&[inputs[0].shape[0], inputs[0].shape[1]]);
        let copy = |[rows, depth]: [usize; 2]| {
            [
                Spec::new([rows, words(depth)], DType::U32),
                self.kind.spec([rows, depth]),
            ]
        };
        let mut all = vec![];
        if self.usage.rowwise {
            all.extend(copy([rows, columns]));
        }
        if self.usage.columnwise {
            all.extend(copy([columns, rows]));
        }
        all.push(match (self.slot, inputs.last()) {
            (Some(_), Some(log)) => log.clone(),
            _ => Spec::new([2], DType::F32),
        });
        all
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::quantize(self, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::quantize(self, inputs)
    }
}
