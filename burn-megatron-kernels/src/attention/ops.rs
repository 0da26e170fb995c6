//! The portable kernels as device operations.

use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::problem::{AttentionProblem, OPERATION};
use super::{cpu, options::Heads};
use crate::cpu::wide;
use crate::launch::{DeviceOp, Spec};

/// Inputs: the projections (one or three), the sink, the bounds of the documents; outputs: the
/// output and the log-sum-exp.
#[derive(Debug)]
pub(super) struct AttentionForwardOp(pub AttentionProblem);

/// Inputs: the projections, output, log-sum-exp, gradient of the output, the sink, the bounds of
/// the documents; outputs: the gradient of the joint projection, or that of the queries and one
/// tensor `[2, batch, keys, groups, width]` for keys and values, then that of the sink.
#[derive(Debug)]
pub(super) struct AttentionBackwardOp(pub AttentionProblem);

impl DeviceOp for AttentionForwardOp {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        let problem = &self.0;
        vec![
            Spec::new(problem.out_shape(), problem.dtype),
            Spec::new(problem.lse_shape(), wide(problem.dtype)),
        ]
    }

    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::forward(&self.0, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::forward(&self.0, inputs)
    }
}

impl DeviceOp for AttentionBackwardOp {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let problem = &self.0;
        let mut outputs = vec![inputs[0].clone()];
        if !problem.packed {
            outputs.push(Spec::new(problem.pair_shape(), problem.dtype));
        }
        if problem.sink {
            outputs.push(Spec::new([problem.heads.heads], wide(problem.dtype)));
        }
        outputs
    }

    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(&self.0, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::backward(&self.0, inputs)
    }
}

impl AttentionProblem {
    /// `[2, batch, keys, groups, width]`: keys, then values.
    pub(super) fn pair_shape(&self) -> [usize; 5] {
        [
            2,
            self.batch,
            self.keys,
            self.heads.groups,
            self.heads.width,
        ]
    }

    /// The strides of queries, keys and values in tensors with these offsets and strides.
    pub(super) fn head_strides(&self, tensors: &[(usize, Vec<usize>)]) -> [HeadStrides; 3] {
        let Heads {
            heads,
            groups,
            width,
        } = self.heads;
        if self.packed {
            let (offset, strides) = &tensors[0];
            let at = |head: usize| HeadStrides {
                offset: offset + head * width,
                batch: strides[0],
                row: strides[1],
                head: width,
            };
            return [at(0), at(heads), at(heads + groups)];
        }
        [0, 1, 2].map(|i| {
            let (offset, strides) = &tensors[i];
            HeadStrides {
                offset: *offset,
                batch: strides[0],
                row: strides[1],
                head: strides[2],
            }
        })
    }

    /// The strides of the gradients of queries, keys and values in the outputs of
    /// [`AttentionBackwardOp`].
    #[cfg(feature = "cubecl")]
    pub(super) fn gradient_strides(&self) -> [HeadStrides; 3] {
        let Heads {
            heads,
            groups,
            width,
        } = self.heads;
        if self.packed {
            let features = self.heads.features();
            return self.head_strides(&[(0, vec![self.queries * features, features, 1])]);
        }
        let whole = |rows: usize, heads: usize, offset: usize| {
            let row = heads * width;
            (offset, vec![rows * row, row, width, 1])
        };
        let values = self.batch * self.keys * groups * width;
        self.head_strides(&[
            whole(self.queries, heads, 0),
            whole(self.keys, groups, 0),
            whole(self.keys, groups, values),
        ])
    }
}

/// Strides of the rows of a head, in elements; a row itself is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadStrides {
    /// The first row of the first head of the first sequence.
    pub offset: usize,
    /// From sequence to sequence.
    pub batch: usize,
    /// From position to position.
    pub row: usize,
    /// From head to head.
    pub head: usize,
}
