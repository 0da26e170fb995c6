//! The matrix products of the experts.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

/// The product of each expert: `[rows, in]`, of which `group_sizes[e]` rows in turn are those of expert `e`, by
/// `[experts, in, out]` gives `[rows, out]`.
///
/// The gradient of an expert without rows is 0.
pub(in crate::nn::moe) fn grouped_matmul(
    x: Tensor<2>,
    weights: Tensor<3>,
    group_sizes: &[usize],
) -> Tensor<2> {
    let function = GroupedMatmul {
        group_sizes: group_sizes.to_vec(),
    };
    apply(vec![x.into_dispatch(), weights.into_dispatch()], function)
}

#[derive(Debug)]
struct GroupedMatmul {
    group_sizes: Vec<usize>,
}

impl GroupedMatmul {
    /// The rows of each expert; none for an expert without rows.
    fn groups(&self, x: &Tensor<2>) -> impl Iterator<Item = Option<Tensor<2>>> {
        let mut start = 0;
        self.group_sizes.iter().map(move |size| {
            let rows = (*size > 0).then(|| x.clone().narrow(0, start, *size));
            start += size;
            rows
        })
    }

    /// The products of the rows by each expert's weight, `[rows, out]`.
    fn products(&self, x: &Tensor<2>, weights: &Tensor<3>) -> Tensor<2> {
        let [_, _, output] = weights.dims();
        let groups = self.groups(x).enumerate();
        let products = groups.filter_map(|(expert, rows)| {
            let rows = rows?;
            Some(rows.matmul(weights.clone().narrow(0, expert, 1).squeeze_dim(0)))
        });
        let products: Vec<_> = products.collect();
        if products.is_empty() {
            return Tensor::empty([0, output], (&x.device(), x.dtype()));
        }
        Tensor::cat(products, 0)
    }

    fn weight_gradient(&self, x: &Tensor<2>, gradient: &Tensor<2>) -> Tensor<3> {
        let shape = [x.dims()[1], gradient.dims()[1]];
        let groups = self.groups(x).zip(self.groups(gradient));
        let gradients = groups.map(|(rows, gradient)| match (rows, gradient) {
            (Some(rows), Some(gradient)) => rows.transpose().matmul(gradient),
            _ => Tensor::zeros(shape, (&x.device(), x.dtype())),
        });
        Tensor::stack(gradients.collect(), 0)
    }
}

impl Function for GroupedMatmul {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let (x, weights) = both(&inputs);
        (self.products(&x, &weights).into_dispatch(), inputs)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let (x, weights) = both(&saved);
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let of_x = needed[0].then(|| self.products(&gradient, &weights.swap_dims(1, 2)));
        let of_weights = needed[1].then(|| self.weight_gradient(&x, &gradient));
        vec![
            of_x.map(Tensor::into_dispatch),
            of_weights.map(Tensor::into_dispatch),
        ]
    }
}

fn both(inputs: &[DispatchTensor]) -> (Tensor<2>, Tensor<3>) {
    let (x, weights) = (inputs[0].clone(), inputs[1].clone());
    (Tensor::from_dispatch(x), Tensor::from_dispatch(weights))
}
