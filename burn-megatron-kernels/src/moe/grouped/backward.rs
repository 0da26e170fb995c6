//! The grouped matrix multiplication as a [`Function`], and its device operations.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{NAME, accumulate_grouped_weight_gradient_at, check, cpu, grouped_weight_gradient};
use crate::cpu::wide;
use crate::error::{accept, check_same_type};
use crate::flat::accumulate;
use crate::function::{Function, Gradients, Tensors};
use crate::gradient::{Destination, FlatGradients, Place};
use crate::launch::{DeviceOp, Spec, launch_one};

/// The grouped matrix multiplication of [`grouped_matmul_with`](super::grouped_matmul_with) as a [`Function`].
///
/// The inputs are the rows and the weights. The function saves them for the backward pass.
#[derive(Debug)]
pub struct GroupedMatmul {
    group_sizes: Arc<[usize]>,
    /// The flat buffer that receives the gradient of the weights. With `None`, autodiff receives the gradient.
    destination: Option<Destination>,
}

impl GroupedMatmul {
    /// Creates the multiplication of rows with the given shape and type by `weights`.
    ///
    /// # Panics
    ///
    /// Panics in the same cases as [`grouped_matmul`](super::grouped_matmul).
    pub fn new(
        (rows, dtype): ([usize; 2], DType),
        weights: &Tensor<3>,
        destination: Option<Destination>,
        group_sizes: &[usize],
    ) -> Self {
        accept(check(rows, weights.dims(), group_sizes));
        let of_weights = "type of the weights";
        accept(check_same_type(NAME, dtype, of_weights, weights.dtype()));
        Self {
            group_sizes: group_sizes.into(),
            destination,
        }
    }

    /// Returns whether the gradient of the weights is written to a flat buffer.
    pub fn has_destination(&self) -> bool {
        self.destination.is_some()
    }

    fn product(&self, x: DispatchTensor, weights: DispatchTensor) -> DispatchTensor {
        let [rows, k] = Tensor::<2>::from_dispatch(x.clone()).dims();
        let [_, _, n] = Tensor::<3>::from_dispatch(weights.clone()).dims();
        let _span = tracing::trace_span!("product", flops = (2 * rows * k * n) as u64).entered();
        let group_sizes = self.group_sizes.clone();
        launch_one(ProductOp { group_sizes }, vec![x, weights])
    }
}

/// Returns the gradient of the weights as a flat tensor, or the flat buffer that contains the gradient.
fn weight_gradient(
    x: Tensor<2>,
    gradient: Tensor<2>,
    sizes: &[usize],
    target: Option<FlatGradients>,
) -> Tensor<1> {
    let ([rows, k], [_, n]) = (x.dims(), gradient.dims());
    let _span =
        tracing::trace_span!("weight_gradient", flops = (2 * rows * k * n) as u64).entered();
    let alone = |x, gradient| grouped_weight_gradient(x, gradient, sizes).flatten(0, 2);
    let Some(FlatGradients { flat, places }) = target else {
        return alone(x, gradient);
    };
    let Place { offset, add } = places[0];
    if flat.dtype() == wide(x.dtype()) {
        accumulate_grouped_weight_gradient_at(x, gradient, sizes, flat, offset, add)
    } else {
        // In this case the buffer has a 16-bit type.
        accumulate(flat, offset, alone(x, gradient), add)
    }
}

impl Function for GroupedMatmul {
    fn forward(&self, inputs: Tensors) -> (DispatchTensor, Tensors) {
        let product = self.product(inputs[0].clone(), inputs[1].clone());
        (product, inputs)
    }

    fn backward(&self, mut saved: Tensors, gradient: DispatchTensor, needed: &[bool]) -> Gradients {
        let (weights, x) = (saved.remove(1), saved.remove(0));
        let of_x = needed[0].then(|| {
            let transposed = Tensor::<3>::from_dispatch(weights).swap_dims(1, 2);
            self.product(gradient.clone(), transposed.into_dispatch())
        });
        let (experts, x) = (self.group_sizes.len(), Tensor::<2>::from_dispatch(x));
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let of_weights = match &self.destination {
            Some(destination) => {
                let sizes = self.group_sizes.clone();
                destination
                    .accumulate_later(move |target| weight_gradient(x, gradient, &sizes, target));
                None
            }
            None => needed[1].then(|| {
                let ([_, inputs], [_, outputs]) = (x.dims(), gradient.dims());
                let flat = weight_gradient(x, gradient, &self.group_sizes, None);
                flat.reshape([experts, inputs, outputs]).into_dispatch()
            }),
        };
        vec![of_x, of_weights]
    }
}

/// The multiplication as a device operation. Its inputs are the rows and the weights.
#[derive(Debug)]
pub(super) struct ProductOp {
    pub group_sizes: Arc<[usize]>,
}

impl DeviceOp for ProductOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let sizes = [inputs[0].shape[0], inputs[1].shape[2]];
        vec![Spec::new(sizes, inputs[0].dtype)]
    }

    /// Transposed weights are read in place.
    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::product(self, inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::cube::product(self, inputs)]
    }
}

/// The weight gradient as a device operation. Its inputs are the rows, the gradient of the result, and the flat buffer.
#[derive(Debug)]
pub(super) struct WeightGradientOp {
    pub group_sizes: Arc<[usize]>,
    /// The element of the buffer at which the gradient begins.
    pub offset: usize,
    /// Whether the gradient is added to the existing elements.
    pub add: bool,
}

impl DeviceOp for WeightGradientOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[2].clone()]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::weight_gradient(self, inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::cube::weight_gradient(self, inputs)]
    }
}
