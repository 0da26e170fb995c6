//! The reference implementation of the collectives, which computes each element separately.

use std::ops::Range;

use num_traits::AsPrimitive as _;

use super::values::{Expected, Number, Sum};
use burn_megatron_comm::{Buffer, Call, DType, ReduceOp, with_elements};

/// The call and the input of one member of the group.
pub(crate) type MemberCall = (Call, Buffer);

/// Returns the expected result of the member with index `index`, given the calls of all members. The expected result of
/// a send or receive is empty here.
pub(crate) fn expected(parts: &[MemberCall], index: usize, fixed_order: bool) -> Expected {
    let inputs = || parts.iter().map(|(_, input)| input);
    let whole = |input: &Buffer| input.slice(0..input.len());
    match &parts[index].0 {
        Call::AllReduce(op) => reduction(inputs().map(whole).collect(), *op, fixed_order),
        Call::ReduceScatter(op) => {
            let chunk = chunk(parts, index);
            let inputs = inputs().map(|input| input.slice(chunk.clone()));
            reduction(inputs.collect(), *op, fixed_order)
        }
        Call::AllGather => Expected::exactly(joined(inputs().map(whole).collect())),
        Call::Broadcast { root } => Expected::exactly(parts[*root].1.clone()),
        Call::AllToAll { .. } => {
            let pieces = parts.iter().map(|part| piece(part, index));
            Expected::exactly(joined(pieces.collect()))
        }
        Call::Barrier | Call::Send { .. } | Call::Receive { .. } => {
            Expected::exactly(Buffer::empty(DType::U8))
        }
    }
}

fn chunk(parts: &[MemberCall], index: usize) -> Range<usize> {
    let len = parts[index].1.len() / parts.len();
    index * len..(index + 1) * len
}

/// Returns the elements that a member sends to the member with index `index` in an all-to-all.
fn piece((call, input): &MemberCall, index: usize) -> Buffer {
    match call {
        Call::AllToAll { send, .. } => {
            let start: usize = send[..index].iter().sum();
            input.slice(start..start + send[index])
        }
        other => unreachable!("{} is not an all_to_all", other.name()),
    }
}

fn joined(pieces: Vec<Buffer>) -> Buffer {
    Buffer::concat(&pieces).expect("all pieces of a call have one type")
}

fn reduction(inputs: Vec<Buffer>, op: ReduceOp, fixed_order: bool) -> Expected {
    let is_rounded = matches!(op, ReduceOp::Sum | ReduceOp::Average);
    let is_rounded = is_rounded && inputs[0].dtype().is_float();
    with_elements!(&inputs[0], first => {
        let columns = Columns::of(first, &inputs);
        Expected {
            buffer: columns.map(|column| reduced(column, op)).into(),
            bounds: (is_rounded && !fixed_order).then(|| columns.map(|column| bound(column, op))),
        }
    })
}

/// The inputs of all members of the group.
struct Columns<'a, T>(Vec<&'a [T]>);

impl<'a, T: Number> Columns<'a, T> {
    /// Creates the columns from `inputs`. Only the element type of `_first` is used.
    fn of(_first: &[T], inputs: &'a [Buffer]) -> Self {
        let typed = |input: &'a Buffer| T::view(input).expect("all members give one type");
        Self(inputs.iter().map(typed).collect())
    }

    /// Calls `f` for each element position, with the values of all members in group order.
    fn map<R>(&self, f: impl Fn(&[T]) -> R) -> Vec<R> {
        let mut column = Vec::with_capacity(self.0.len());
        let each = (0..self.0[0].len()).map(|at| {
            column.clear();
            column.extend(self.0.iter().map(|input| input[at]));
            f(&column)
        });
        each.collect()
    }
}

fn reduced<T: Number>(column: &[T], op: ReduceOp) -> T {
    let mut sums: Vec<T::Sum> = column.iter().map(|value| value.widen()).collect();
    let sum = tree(&mut sums, op);
    let sum = match op {
        ReduceOp::Average => sum.divided_by(column.len()),
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min => sum,
    };
    sum.as_()
}

/// Combines adjacent values, then pairs of results, and so on. A value without a partner moves up one level.
fn tree<S: Sum>(sums: &mut [S], op: ReduceOp) -> S {
    let mut left = sums.len();
    while left > 1 {
        for pair in 0..left / 2 {
            sums[pair] = sums[2 * pair].combine(sums[2 * pair + 1], op);
        }
        if left % 2 == 1 {
            sums[left / 2] = sums[left - 1];
        }
        left = left.div_ceil(2);
    }
    sums[0]
}

/// Returns the maximum difference between two sums of the same `n` numbers in any order: `n epsilon sum |x|`. This is
/// twice the bound of recursive summation (Higham 2002, "Accuracy and stability of numerical algorithms", section 4.2).
/// The maximum difference is 0 for sums of whole numbers that the type can represent.
fn bound<T: Number>(column: &[T], op: ReduceOp) -> f64 {
    let ranks = column.len() as f64;
    let wide = || column.iter().map(|value| value.wide());
    let total: f64 = wide().map(f64::abs).sum();
    match op {
        ReduceOp::Average => (ranks + 1.0) * T::EPSILON * total / ranks,
        _ if total <= 2.0 / T::EPSILON && wide().all(|x| x.fract() == 0.0) => 0.0,
        _ => ranks * T::EPSILON * total,
    }
}
