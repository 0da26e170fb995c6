//! Splits the heads of a QKV projection between ranks.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::attention::Heads;

use crate::nn::unsaved::unsaved;

/// Splits a projection `[tokens, heads + 2 groups, width]` into parts for several ranks, concatenated to
/// `[ranks * tokens, own units, width]`. If there are more ranks than key-value heads, several ranks get a copy of the
/// same key-value head. The gradients of the copies are summed in rank order.
///
/// This is a single operation, because separate gradients of the parts would each be as large as the projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadSplit {
    pub heads: Heads,
    pub neighbours: usize,
}

impl HeadSplit {
    /// Returns the parts. The operation is differentiable.
    pub fn split(self, qkv: Tensor<3>) -> Tensor<3> {
        unsaved(
            "HeadSplit",
            vec![qkv.into_dispatch()],
            move |mut inputs| self.parts(inputs.swap_remove(0)),
            move |gradient| vec![Some(self.joined(gradient))],
        )
    }

    /// Returns the numbers of query heads and key-value heads of a rank.
    fn own(&self) -> (usize, usize) {
        let Self { heads, neighbours } = self;
        (heads.heads / neighbours, heads.groups.div_ceil(*neighbours))
    }

    fn part(&self, qkv: &Tensor<3>, rank: usize) -> Tensor<3> {
        let (queries, groups) = self.own();
        let first_group = rank * self.heads.groups / self.neighbours;
        let keys = self.heads.heads + first_group;
        let part = |first, count| qkv.clone().narrow(1, first, count);
        let parts = vec![
            part(rank * queries, queries),
            part(keys, groups),
            part(keys + self.heads.groups, groups),
        ];
        Tensor::cat(parts, 1)
    }
}

impl HeadSplit {
    fn parts(self, qkv: DispatchTensor) -> DispatchTensor {
        let qkv = Tensor::<3>::from_dispatch(qkv);
        let parts = (0..self.neighbours).map(|rank| self.part(&qkv, rank));
        Tensor::cat(parts.collect(), 0).into_dispatch()
    }

    /// Returns the gradient of the projection, given the gradients of its parts.
    fn joined(self, gradient: DispatchTensor) -> DispatchTensor {
        let gradient = Tensor::<3>::from_dispatch(gradient);
        let tokens = gradient.dims()[0] / self.neighbours;
        let (queries, groups) = self.own();
        let of = |rank: usize, first: usize, count: usize| {
            let own = gradient.clone().narrow(0, rank * tokens, tokens);
            own.narrow(1, first, count)
        };
        let copies = (self.neighbours / self.heads.groups).max(1);
        // Sums the copies of the keys or values that begin at `first`.
        let summed = |first: usize| {
            let of_first = (0..self.neighbours).step_by(copies);
            of_first.map(move |rank| {
                let ranks = rank..rank + copies;
                let parts = ranks.map(|rank| of(rank, first, groups));
                parts.reduce(|sum, part| sum + part)
            })
        };
        let parts = (0..self.neighbours).map(|rank| Some(of(rank, 0, queries)));
        let parts = parts.chain(summed(queries)).chain(summed(queries + groups));
        Tensor::cat(parts.flatten().collect(), 1).into_dispatch()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::{values, wave};

    /// The gradient equals the gradient of the same parts, taken one by one.
    #[test]
    fn gradients_of_copies_are_summed() {
        let heads = |groups| Heads {
            heads: 8,
            groups,
            width: 3,
        };
        for (groups, neighbours) in [(8, 2), (4, 4), (2, 4), (1, 8), (2, 2)] {
            let heads = heads(groups);
            let split = HeadSplit { heads, neighbours };
            let units = heads.heads + 2 * groups;
            let x = || Tensor::<3>::from_inner(wave([5, units, 3], 0.5)).require_grad();
            let (one, other) = (x(), x());
            let found = split.split(one.clone());
            let parts = (0..neighbours).map(|rank| split.part(&other, rank));
            let expected = Tensor::cat(parts.collect(), 0);
            assert_eq!(
                values(found.clone().inner()),
                values(expected.clone().inner())
            );
            let weights = Tensor::from_inner(wave(found.dims(), 2.0));
            let gradient = |x: &Tensor<3>, y: Tensor<3>| {
                let gradients = (y * weights.clone()).sum().backward();
                values(x.grad(&gradients).unwrap())
            };
            let (found, expected) = (gradient(&one, found), gradient(&other, expected));
            let what = format!("{groups} groups, {neighbours} ranks");
            crate::nn::tests::assert_near(&what, &found, &expected, 1e-15);
        }
    }
}
