//! Reordering of the tokens of several ranks into ascending order.

use burn::backend::DispatchTensor;
use burn::tensor::{Device, Int, Tensor};

use crate::nn::unsaved::unsaved;

/// The permutation between rank order and ascending token order.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Order {
    /// Maps positions in ascending order to positions in rank order.
    ascending: Tensor<1, Int>,
    /// Maps positions in rank order to positions in ascending order.
    by_rank: Tensor<1, Int>,
}

impl Order {
    /// Creates the order of the tokens with the indices `numbers`.
    pub fn new(numbers: &[usize], device: &Device) -> Self {
        let mut ascending: Vec<_> = (0..numbers.len()).collect();
        ascending.sort_unstable_by_key(|place| numbers[*place]);
        let mut by_rank = vec![0; ascending.len()];
        for (place, from) in ascending.iter().enumerate() {
            by_rank[*from] = place;
        }
        let device = device.clone().inner();
        let upload = |places: Vec<usize>| {
            let places: Vec<_> = places.into_iter().map(|place| place as i32).collect();
            Tensor::from_data(&places[..], &device)
        };
        Self {
            ascending: upload(ascending),
            by_rank: upload(by_rank),
        }
    }

    /// Returns `[tokens, heads, width]` in ascending order. The operation is differentiable.
    pub fn ascending(&self, x: Tensor<3>) -> Tensor<3> {
        permute(x, &self.ascending, &self.by_rank)
    }

    /// Returns `[tokens, heads, width]` in rank order. The operation is differentiable.
    pub fn by_rank(&self, x: Tensor<3>) -> Tensor<3> {
        permute(x, &self.by_rank, &self.ascending)
    }
}

/// Returns the rows in the order `places`. The backward pass selects the rows of the gradient in the inverse order
/// `back`. The generic gradient of a selection would use a scatter-add, because indices may repeat.
fn permute(x: Tensor<3>, places: &Tensor<1, Int>, back: &Tensor<1, Int>) -> Tensor<3> {
    let select = |x: DispatchTensor, places: &Tensor<1, Int>| {
        let x = Tensor::<3>::from_dispatch(x);
        x.select(0, places.clone()).into_dispatch()
    };
    let (places, back) = (places.clone(), back.clone());
    unsaved(
        "Permutation",
        vec![x.into_dispatch()],
        move |mut inputs| select(inputs.swap_remove(0), &places),
        move |gradient| vec![Some(select(gradient, &back))],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::values;

    /// One rank has tokens 0 and 3, the other has tokens 1 and 2.
    #[test]
    fn tokens_and_gradients_find_their_places() {
        let device = Device::flex();
        let order = Order::new(&[0, 3, 1, 2], &device);
        let x = Tensor::<3>::from_data([[[0.0]], [[3.0]], [[1.0]], [[2.0]]], &device);
        let x = Tensor::from_inner(x).require_grad();
        let ascending = order.ascending(x.clone());
        assert_eq!(values(ascending.clone().inner()), [0.0, 1.0, 2.0, 3.0]);
        let again = order.by_rank(ascending.clone());
        assert_eq!(values(again.inner()), [0.0, 3.0, 1.0, 2.0]);
        let weights = Tensor::<3>::from_data([[[10.0]], [[11.0]], [[12.0]], [[13.0]]], &device);
        let gradients = (ascending * Tensor::from_inner(weights)).sum().backward();
        assert_eq!(
            values(x.grad(&gradients).unwrap()),
            [10.0, 13.0, 11.0, 12.0]
        );
    }
}
