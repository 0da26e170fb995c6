//! Rows in the order of their experts.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron_kernels::{Function, apply};

/// How many rows each expert has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nn::moe) enum RowLayout {
    /// One for each token that chose it.
    Kept,
    /// This many: those of its tokens, then rows of zeros.
    Capacity(usize),
}

/// Which tokens the rows are of: rows are sorted by expert, those of one expert by token.
#[derive(Clone, Debug)]
pub(in crate::nn::moe) struct RowMap {
    tokens: usize,
    rows: usize,
    group_sizes: Vec<usize>,
    /// `[rows]`: the token of each row, or `tokens` for a row of zeros.
    row_to_token: Tensor<1, Int>,
    /// `[rows]`: the pair of token and choice of each row, or `tokens * k` for a row of zeros.
    row_to_pair: Tensor<1, Int>,
    /// For each of the `k` choices `[tokens]`: the row, or `rows` for a dropped pair.
    slot_to_row: Vec<Tensor<1, Int>>,
    is_identity: bool,
    /// Whether each row is of a pair, and each pair has a row.
    is_complete: bool,
}

impl RowMap {
    /// The rows of the choices `[tokens, k]`; one outside of `0..experts` is dropped.
    ///
    /// Reads the choices from the device.
    pub fn new(choices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> Self {
        let [tokens, k] = choices.dims();
        let device = choices.device();
        Self::of(&read(choices), [tokens, k], experts, layout, &device)
    }

    /// The rows of choices that the host has, row by row.
    pub fn of(
        choices: &[i64],
        [tokens, k]: [usize; 2],
        experts: usize,
        layout: RowLayout,
        device: &Device,
    ) -> Self {
        let mut of_expert = vec![vec![]; experts];
        for (pair, expert) in choices.iter().enumerate() {
            let expert = usize::try_from(*expert).ok();
            if let Some(pairs) = expert.and_then(|expert| of_expert.get_mut(expert)) {
                pairs.push(pair);
            }
        }
        if let RowLayout::Capacity(rows) = layout {
            for pairs in &mut of_expert {
                assert!(
                    pairs.len() <= rows,
                    "an expert with {} rows: expected at most its capacity of {rows}",
                    pairs.len()
                );
                pairs.resize(rows, tokens * k);
            }
        }
        let group_sizes = of_expert.iter().map(Vec::len).collect();
        let row_to_pair = of_expert.concat();
        let rows = row_to_pair.len();
        let mut slots = vec![vec![rows as i64; tokens]; k];
        for (row, pair) in row_to_pair.iter().enumerate() {
            if *pair < tokens * k {
                slots[pair % k][pair / k] = row as i64;
            }
        }
        let device = device.clone().inner();
        let ints = |values: Vec<i64>| {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), &device)
        };
        let pairs = || row_to_pair.iter();
        let kept = pairs().filter(|pair| **pair < tokens * k).count();
        Self {
            tokens,
            rows,
            group_sizes,
            row_to_token: ints(pairs().map(|pair| (pair / k) as i64).collect()),
            row_to_pair: ints(pairs().map(|pair| *pair as i64).collect()),
            slot_to_row: slots.into_iter().map(&ints).collect(),
            is_complete: kept == rows && kept == tokens * k,
            is_identity: k == 1 && rows == tokens && pairs().enumerate().all(|(i, at)| i == *at),
        }
    }

    /// The number of rows of each expert.
    pub fn group_sizes(&self) -> &[usize] {
        &self.group_sizes
    }

    fn gather(&self, x: Tensor<2>) -> Tensor<2> {
        select(self.with_zeros(x), self.row_to_token.clone())
    }

    /// In the order of the choices, in f32 or wider.
    fn sum(&self, rows: Tensor<2>) -> Tensor<2> {
        let dtype = rows.dtype();
        let wide = self.with_zeros(rows.cast(super::super::wide(dtype)));
        let parts = self.slot_to_row.iter();
        let parts = parts.map(|at| select(wide.clone(), at.clone()));
        match parts.reduce(|sum, part| sum + part) {
            Some(sum) => sum.cast(dtype),
            None => unreachable!("a token has a choice"),
        }
    }

    /// With a row of zeros at the end, if a row or a pair is mapped to it.
    fn with_zeros(&self, x: Tensor<2>) -> Tensor<2> {
        if self.is_complete {
            return x;
        }
        let zeros = Tensor::zeros([1, x.dims()[1]], (&x.device(), x.dtype()));
        Tensor::cat(vec![x, zeros], 0)
    }
}

/// The choices, row by row.
pub(in crate::nn::moe) fn read(choices: Tensor<2, Int>) -> Vec<i64> {
    let values = choices.into_data().convert_dtype(DType::I64);
    match values.try_into_vec() {
        Ok(values) => values,
        Err(error) => unreachable!("choices of experts are integers: {error}"),
    }
}

/// The rows `at` of `x`, of which there may be none.
fn select(x: Tensor<2>, at: Tensor<1, Int>) -> Tensor<2> {
    if at.dims()[0] == 0 {
        return Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype()));
    }
    x.select(0, at)
}

/// The rows of tokens `[tokens, hidden]`, in the order of their experts: `[rows, hidden]`.
pub(in crate::nn::moe) fn permute(x: Tensor<2>, map: &RowMap) -> Tensor<2> {
    run(x, map, false)
}

/// The sums over the rows of each token, in the order of its choices: `[rows, hidden]` to `[tokens, hidden]`. A
/// token without rows has zeros.
pub(in crate::nn::moe) fn unpermute(rows: Tensor<2>, map: &RowMap) -> Tensor<2> {
    run(rows, map, true)
}

/// The weights `[tokens, k]` of the choices as those of the rows: `[rows]`, 0 for a row of zeros.
pub(in crate::nn::moe) fn permute_weights(weights: Tensor<2>, map: &RowMap) -> Tensor<1> {
    let [tokens, k] = weights.dims();
    let pairs = RowMap {
        tokens: tokens * k,
        row_to_token: map.row_to_pair.clone(),
        slot_to_row: vec![pair_to_row(map)],
        ..map.clone()
    };
    run(weights.reshape([tokens * k, 1]), &pairs, false).reshape([map.rows])
}

/// `[tokens * k]`
fn pair_to_row(map: &RowMap) -> Tensor<1, Int> {
    let slots = map.slot_to_row.iter();
    let columns = slots.map(|rows| rows.clone().reshape([map.tokens, 1]));
    let pairs = map.tokens * map.slot_to_row.len();
    Tensor::cat(columns.collect(), 1).reshape([pairs])
}

fn run(x: Tensor<2>, map: &RowMap, sums: bool) -> Tensor<2> {
    let map = map.clone();
    apply(vec![x.into_dispatch()], RowFunction { map, sums })
}

/// Rows of tokens, or their sums: each is the backward of the other.
///
/// It is recorded for an identity too: the order in which backward calls collectives follows from the depth of the
/// graph, which must not depend on the choices of a rank.
#[derive(Debug)]
struct RowFunction {
    map: RowMap,
    sums: bool,
}

impl RowFunction {
    fn run(&self, x: DispatchTensor, sums: bool) -> DispatchTensor {
        if self.map.is_identity {
            return x;
        }
        let x = Tensor::from_dispatch(x);
        let y = if sums {
            self.map.sum(x)
        } else {
            self.map.gather(x)
        };
        y.into_dispatch()
    }
}

impl Function for RowFunction {
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
