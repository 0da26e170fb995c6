//! All-gather and reduce-scatter of rows (dim 0), where the number of rows may differ between ranks.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

use super::async_ops::{CollectiveOp, start};
use super::group::Comm;

/// Gathers the rows (dim 0) of all ranks in rank order. Rank `r` contributes `rows[r]` rows, which may be 0.
///
/// The ranks may compute different values from the result. Therefore the backward sums the gradients of all ranks and
/// returns the gradient of this rank's rows ([`reduce_scatter_rows`]).
pub fn gather_rows<const D: usize>(x: Tensor<D>, rows: &[usize], comm: &Comm) -> Tensor<D> {
    apply_rows(x, rows, comm, false)
}

/// Sums `x` over all ranks and returns this rank's rows of the sum. Rank `r` keeps `rows[r]` rows (dim 0), in rank
/// order.
///
/// The backward [gathers](gather_rows) the gradients of the rows.
pub fn reduce_scatter_rows<const D: usize>(x: Tensor<D>, rows: &[usize], comm: &Comm) -> Tensor<D> {
    apply_rows(x, rows, comm, true)
}

fn apply_rows<const D: usize>(x: Tensor<D>, rows: &[usize], comm: &Comm, sums: bool) -> Tensor<D> {
    if comm.size() == 1 {
        return x;
    }
    let function = RowsFunction::<D> {
        rows: rows.to_vec(),
        comm: comm.clone(),
        sums,
    };
    apply(vec![x.into_dispatch()], function)
}

#[derive(Debug)]
struct RowsFunction<const D: usize> {
    rows: Vec<usize>,
    comm: Comm,
    /// Whether the forward is the reduce-scatter.
    sums: bool,
}

impl<const D: usize> RowsFunction<D> {
    fn run(&self, x: DispatchTensor, sums: bool) -> DispatchTensor {
        let x = Tensor::<D>::from_dispatch(x);
        let (all, own) = (self.rows.clone(), self.rows[self.comm.rank()]);
        let own_of_each = vec![own; all.len()];
        if !sums {
            let copies = Tensor::cat(vec![x; all.len()], 0);
            return self.exchange(copies, own_of_each, all).into_dispatch();
        }
        let parts = self.exchange(x, all, own_of_each);
        if own == 0 {
            return parts.into_dispatch();
        }
        // The sum is in rank order, so that its bits are the same on every rank and in every run.
        let parts = parts.chunk(self.comm.size(), 0).into_iter();
        match parts.reduce(|sum, part| sum + part) {
            Some(sum) => sum.into_dispatch(),
            None => unreachable!("a group has a rank"),
        }
    }

    fn exchange(&self, x: Tensor<D>, send: Vec<usize>, receive: Vec<usize>) -> Tensor<D> {
        start(x, &CollectiveOp::AllToAll { send, receive }, &self.comm).wait()
    }
}

impl<const D: usize> Function for RowsFunction<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (self.run(inputs.remove(0), self.sums), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.run(gradient, !self.sums))]
    }
}
