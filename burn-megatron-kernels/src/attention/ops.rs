//! Attention as a device operation.

use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::problem::{AttentionProblem, OPERATION};
use super::{cpu, options::Heads};
use crate::cpu::wide;
use crate::gradient::Place;
use crate::launch::{DeviceOp, Spec};

/// Selects the kernels for CubeCL devices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernels {
    /// The kernels that do not use tensor cores.
    Portable,
    /// The kernels that use tensor cores with `mma.sync`.
    #[cfg(feature = "cubecl")]
    Mma,
}

/// The forward or the backward pass of attention.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    /// The forward pass.
    ///
    /// The inputs are the projections (one or three tensors), the optional sink, and the optional ranges of the
    /// queries. The outputs are the output of attention and the log-sum-exp. If the problem has the largest scores,
    /// they follow in the tensor of the log-sum-exp.
    Forward,
    /// The backward pass.
    ///
    /// The inputs are the projections, the output, the log-sum-exp, and the gradient of the output. The sink, the
    /// ranges of the queries, the ranges of the keys and the flat buffer follow if they exist.
    ///
    /// The outputs are the gradient of the joint projection and the gradient of the sink. With separate projections,
    /// the gradient of the queries and one flat tensor with the gradients of keys and values replace the gradient of
    /// the joint projection.
    Backward {
        /// The places of the gradients of keys and values in the flat buffer, or `None` without a buffer.
        places: Option<[Place; 2]>,
    },
}

/// Attention as a device operation.
#[derive(Debug)]
pub(super) struct AttentionOp {
    pub problem: AttentionProblem,
    pub kernels: Kernels,
    pub pass: Pass,
}

impl DeviceOp for AttentionOp {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let problem = &self.problem;
        let wide = wide(problem.dtype);
        let Pass::Backward { places } = self.pass else {
            let statistics = Spec::new(problem.statistics_shape(), wide);
            return vec![Spec::new(problem.out_shape(), problem.dtype), statistics];
        };
        let mut outputs = vec![inputs[0].clone()];
        if places.is_some() {
            outputs.extend(inputs.last().cloned());
        } else if !problem.packed {
            outputs.push(Spec::new([problem.key_elements()], problem.dtype));
        }
        if problem.sink {
            outputs.push(Spec::new([problem.heads.heads], wide));
        }
        outputs
    }

    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        match (self.kernels, self.pass) {
            (Kernels::Portable, Pass::Forward) => cpu::forward(&self.problem, inputs),
            (Kernels::Portable, Pass::Backward { places }) => {
                cpu::backward(&self.problem, inputs, places)
            }
            #[cfg(feature = "cubecl")]
            (Kernels::Mma, _) => {
                unreachable!("`check_device` accepts only tensors on its CubeCL device")
            }
        }
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::run(self, inputs)
    }
}

impl AttentionProblem {
    /// Returns the number of tensors that hold the projections.
    pub(super) fn projections(&self) -> usize {
        if self.packed { 1 } else { 3 }
    }

    /// Returns the shape of the log-sum-exp. It includes the largest scores if the problem has them.
    pub(super) fn statistics_shape(&self) -> Vec<usize> {
        let rows = self.lse_shape();
        if self.with_max {
            [&[2], &rows[..]].concat()
        } else {
            rows.to_vec()
        }
    }

    /// Returns the number of elements of keys and values together.
    pub(super) fn key_elements(&self) -> usize {
        let [k, v] = [self.k_shape(), self.v_shape()].map(|shape| shape.iter().product::<usize>());
        k + v
    }

    /// Returns the strides of queries, keys and values in tensors with these offsets and strides.
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

    /// Returns the strides of the gradients of queries, keys and values in the outputs of
    /// [`Pass::Backward`].
    #[cfg(feature = "cubecl")]
    pub(super) fn gradient_strides(&self, places: Option<[Place; 2]>) -> [HeadStrides; 3] {
        if self.packed {
            let features = self.heads.features();
            return self.head_strides(&[(0, vec![self.queries * features, features, 1])]);
        }
        let keys = self.k_shape().iter().product();
        let [k, v] = places.map_or([0, keys], |places| places.map(|place| place.offset));
        let Heads {
            heads,
            groups,
            width,
        } = self.heads;
        let whole = |rows: usize, heads: usize, width: usize, offset: usize| {
            let row = heads * width;
            (offset, vec![rows * row, row, width, 1])
        };
        self.head_strides(&[
            whole(self.queries, heads, width, 0),
            whole(self.keys, groups, width, k),
            whole(self.keys, groups, self.value_width, v),
        ])
    }
}

/// The strides of the rows of a head, in elements. Each row is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadStrides {
    /// The offset of the first row of the first head of the first sequence.
    pub offset: usize,
    /// The stride between sequences.
    pub batch: usize,
    /// The stride between positions.
    pub row: usize,
    /// The stride between heads.
    pub head: usize,
}
