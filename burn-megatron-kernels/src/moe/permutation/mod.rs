//! Permutation of tokens into rows that are sorted by expert, and the reverse permutation.
//!
//! The router chooses `k` experts `indices[t, j]` for each token `t`. Each pair `(t, j)` becomes one row of its expert.
//! [`RowMap`] is a stable counting sort of the pairs by expert, so the rows of an expert are in the order of the
//! tokens. A pair whose index is outside `0..experts` is dropped and has no row.
//!
//! ```text
//! permute:    y[n] = x[token of row n]                             [tokens, h] to [rows, h]
//! unpermute:  y[t] = sum over the rows n of t, by slot, of x[n]    [rows, h] to [tokens, h]
//! ```
//!
//! Each of the two operations is the backward pass of the other operation. Both are gathers without atomic additions.
//! Sums are computed in f32 (f64 for f64) and rounded once. The operations do not apply the router weights.
//! [`permute_weights`] returns the weights of the rows, and an [activation](crate::activation::activate) multiplies the
//! rows by these weights.

use burn::tensor::{DType, Int, IntDType, Tensor, TensorData};

use crate::KernelError;
use crate::error::{accept, check_shape};
use crate::record;

pub(crate) mod gather;
mod layout;
pub(crate) mod sort;
#[cfg(test)]
mod tests;
pub(crate) mod words;

pub use gather::{permute, permute_weights, unpermute};
pub use layout::RowLayout;
pub use sort::MAX_EXPERTS;
pub use words::permute_words;

const NAME: &str = "RowMap";

/// The mapping between token-expert pairs and rows that are sorted by expert.
///
/// All tensors are I32 on the device of the indices, and autodiff does not track them.
#[derive(Clone, Debug)]
pub struct RowMap {
    tokens: usize,
    top_k: usize,
    experts: usize,
    rows: usize,
    /// The number of rows of each expert, including empty rows. `None` if the numbers are only on the device.
    group_sizes: Option<Vec<usize>>,
    /// The index `t * k + j` of the pair `(t, j)` of each row, or -1 for an empty row, `[rows]`.
    pub(super) row_to_pair: Tensor<1, Int>,
    pub(super) slot_to_row: Tensor<2, Int>,
    counts: Tensor<1, Int>,
    pub(super) offsets: Tensor<1, Int>,
}

impl RowMap {
    /// Creates the row map by sorting `indices`, `[tokens, k]` of any integer type, by expert.
    ///
    /// On a GPU, the sort runs on the device. With [`RowLayout::Kept`] and [`RowLayout::Aligned`], the numbers of rows
    /// are copied to the host, because the shapes of later tensors depend on them.
    ///
    /// # Panics
    ///
    /// Panics with a [`KernelError`] if there are no experts or more than 2048 experts, if an alignment is 0, or if
    /// there are more than 2^31 - 1 pairs or rows.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_megatron_kernels::moe::permutation::{RowLayout, RowMap, permute};
    ///
    /// let device = Device::flex();
    /// let indices = Tensor::<2, Int>::from_ints([[1, 0], [1, -1]], &device);
    /// let map = RowMap::new(indices, 3, RowLayout::Kept);
    /// assert_eq!((map.rows(), map.group_sizes()), (3, vec![1, 2, 0]));
    /// let x = Tensor::<2>::from_floats([[10.0], [20.0]], &device);
    /// let rows: Vec<f32> = permute(x, &map).into_data().try_into_vec().unwrap();
    /// assert_eq!(rows, [10.0, 10.0, 20.0]);
    /// ```
    pub fn new(indices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> Self {
        let [tokens, top_k] = indices.dims();
        let pairs = tokens.saturating_mul(top_k);
        accept(sort::check_experts(NAME, experts));
        accept(layout.check(pairs, experts));
        if pairs == 0 {
            return Self::without_pairs(indices, experts, layout);
        }
        let indices = indices.inner().cast(IntDType::I32);
        let counted = sort::count(indices.clone(), experts, layout);
        let group_sizes = layout.group_sizes(experts, || {
            if record::is_recording() {
                even(pairs, experts)
            } else {
                on_host(counted.counts.clone())
            }
        });
        let rows = match layout {
            RowLayout::Rows(rows) => rows,
            _ => group_sizes.iter().flatten().sum(),
        };
        let (row_to_pair, slot_to_row) = sort::place(indices, &counted, rows, layout);
        Self {
            tokens,
            top_k,
            experts,
            rows,
            group_sizes,
            row_to_pair,
            slot_to_row,
            counts: counted.counts,
            offsets: counted.offsets,
        }
    }

    fn without_pairs(indices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> Self {
        let [tokens, top_k] = indices.dims();
        let device = indices.device().inner();
        let ints = |values: Vec<i32>| {
            let shape = [values.len()];
            Tensor::from_data(TensorData::new(values, shape), (&device, DType::I32))
        };
        let sizes = layout.sizes();
        let starts = (0..=experts).map(|expert| (sizes.group(0) * expert).min(sizes.limit) as i32);
        let offsets: Vec<i32> = starts.collect();
        let rows = match layout {
            RowLayout::Rows(rows) => rows,
            _ => sizes.group(0) * experts,
        };
        Self {
            tokens,
            top_k,
            experts,
            rows,
            group_sizes: Some(vec![sizes.group(0); experts]),
            row_to_pair: ints(vec![-1; rows]),
            slot_to_row: Tensor::empty([tokens, top_k], (&device, DType::I32)),
            counts: ints(vec![0; experts]),
            offsets: ints(offsets),
        }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of chosen experts per token, `k`.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Returns the number of rows of all experts, including empty rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of rows of each expert, including empty rows, as an argument for
    /// [`grouped_matmul`](crate::moe::grouped::grouped_matmul).
    ///
    /// With [`RowLayout::Rows`], this method copies the numbers from the device. Padding rows after the rows of the
    /// last expert belong to no expert.
    pub fn group_sizes(&self) -> Vec<usize> {
        match &self.group_sizes {
            Some(sizes) => sizes.clone(),
            None => on_host(self.counts.clone()),
        }
    }

    /// Returns the index of the row of each pair, `[tokens, k]`. The index is -1 for a dropped pair.
    pub fn slot_to_row(&self) -> Tensor<2, Int> {
        self.slot_to_row.clone()
    }

    /// Returns the number of pairs of each expert that have a row, `[experts]`.
    pub fn counts(&self) -> Tensor<1, Int> {
        self.counts.clone()
    }

    /// Returns the index of the first row of each expert, followed by the end of the last expert's rows,
    /// `[experts + 1]`.
    pub fn offsets(&self) -> Tensor<1, Int> {
        self.offsets.clone()
    }
}

/// Returns the numbers of pairs per expert for evenly distributed pairs. A recording uses them, because it has no
/// values.
fn even(pairs: usize, experts: usize) -> Vec<usize> {
    let (each, more) = (pairs / experts, pairs % experts);
    (0..experts)
        .map(|expert| each + usize::from(expert < more))
        .collect()
}

/// Copies counts to the host.
fn on_host(counts: Tensor<1, Int>) -> Vec<usize> {
    let counts = counts.into_data().iter::<i32>().collect::<Vec<_>>();
    counts.into_iter().map(|count| count as usize).collect()
}

/// Checks that a tensor has the number of rows that a map has.
fn check_rows(operation: &'static str, given: usize, expected: usize) -> Result<(), KernelError> {
    check_shape(operation, given == expected, || {
        format!("{given} rows for a map of {expected} rows: expected {expected}")
    })
}
