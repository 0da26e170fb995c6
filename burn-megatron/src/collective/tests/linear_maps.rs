//! The collectives that apply one linear map on every rank.

use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::{autodiff, both_ways, dot, integers, over, own, tensor};

/// A simple reference for the effect on the tensors of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LinearMap {
    Same,
    Sum,
    Part,
    Join,
    SumPart,
}

/// The distribution of the values: each rank has its own values, or all ranks have the same values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    Own,
    Equal,
}

/// The table in the documentation of the module, with the input and output of each function.
const FUNCTIONS: [(&str, Values, LinearMap, Values, LinearMap); 8] = [
    (
        "copy",
        Values::Equal,
        LinearMap::Same,
        Values::Own,
        LinearMap::Sum,
    ),
    (
        "reduce",
        Values::Own,
        LinearMap::Sum,
        Values::Equal,
        LinearMap::Same,
    ),
    (
        "split",
        Values::Equal,
        LinearMap::Part,
        Values::Own,
        LinearMap::Join,
    ),
    (
        "gather",
        Values::Own,
        LinearMap::Join,
        Values::Equal,
        LinearMap::Part,
    ),
    (
        "scatter_sequence",
        Values::Equal,
        LinearMap::Part,
        Values::Own,
        LinearMap::Join,
    ),
    (
        "gather_sequence",
        Values::Own,
        LinearMap::Join,
        Values::Own,
        LinearMap::SumPart,
    ),
    (
        "reduce_scatter_sequence",
        Values::Own,
        LinearMap::SumPart,
        Values::Own,
        LinearMap::Join,
    ),
    (
        "all_reduce",
        Values::Own,
        LinearMap::Sum,
        Values::Own,
        LinearMap::Sum,
    ),
];

fn call<const D: usize>(name: &str, x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    match name {
        "copy" => copy(x, comm),
        "reduce" => reduce(x, comm),
        "split" => split(x, dim, comm),
        "gather" => gather(x, dim, comm),
        "scatter_sequence" => scatter_sequence(x, dim, comm),
        "gather_sequence" => gather_sequence(x, dim, comm),
        "reduce_scatter_sequence" => reduce_scatter_sequence(x, dim, comm),
        "all_reduce" => all_reduce(x, comm),
        other => unreachable!("{other}"),
    }
}

/// Returns part `index` of `parts` along `dim`, element by element.
fn part(values: &[i64], shape: &[usize], dim: usize, index: usize, parts: usize) -> Vec<i64> {
    let inner: usize = shape[dim + 1..].iter().product();
    let len = shape[dim] / parts;
    let at = |i: usize| i / inner % shape[dim];
    let kept = |i: &usize| (index * len..(index + 1) * len).contains(&at(*i));
    (0..values.len()).filter(kept).map(|i| values[i]).collect()
}

fn join(parts: &[Vec<i64>], shape: &[usize], dim: usize) -> Vec<i64> {
    let run: usize = shape[dim..].iter().product();
    let rows = 0..parts[0].len() / run;
    rows.flat_map(|row| {
        parts
            .iter()
            .flat_map(move |part| &part[row * run..(row + 1) * run])
    })
    .copied()
    .collect()
}

fn sum(parts: &[Vec<i64>]) -> Vec<i64> {
    (0..parts[0].len())
        .map(|i| parts.iter().map(|part| part[i]).sum())
        .collect()
}

/// Returns the values of member `index` after `map`, if the members had `all` of this shape before.
fn reference(
    map: LinearMap,
    all: &[Vec<i64>],
    shape: &[usize],
    dim: usize,
    index: usize,
) -> Vec<i64> {
    match map {
        LinearMap::Same => all[index].clone(),
        LinearMap::Sum => sum(all),
        LinearMap::Part => part(&all[index], shape, dim, index, all.len()),
        LinearMap::Join => join(all, shape, dim),
        LinearMap::SumPart => part(&sum(all), shape, dim, index, all.len()),
    }
}

fn shape_after<const D: usize>(
    map: LinearMap,
    mut shape: [usize; D],
    dim: usize,
    n: usize,
) -> [usize; D] {
    match map {
        LinearMap::Same | LinearMap::Sum => {}
        LinearMap::Part | LinearMap::SumPart => shape[dim] /= n,
        LinearMap::Join => shape[dim] *= n,
    }
    shape
}

/// Returns the values of each member of `comm`, or the values of the first member if they are equal.
fn values(kind: Values, comm: &Comm, len: usize, times: i64) -> Vec<Vec<i64>> {
    let ranks = comm.group().ranks();
    let of = |rank: &usize| match kind {
        Values::Own => own(*rank, len),
        Values::Equal => own(ranks[0], len),
    };
    // The gradient is not a multiple of the input, so that gradient and output cannot be confused.
    let bent = |(i, x): (usize, i64)| x * times + (times - 1) * (i as i64 % 3);
    ranks
        .iter()
        .map(|rank| of(rank).into_iter().enumerate().map(bent).collect())
        .collect()
}

/// Runs both directions of every function along every dim. Returns the two sides of the transpose property.
fn check<const D: usize>(comm: &Comm, dtype: DType) -> Vec<(String, i64, i64)> {
    let (n, index) = (comm.size(), comm.rank());
    let counts = |kind| kind == Values::Own || index == 0;
    let mut sides = vec![];
    for (name, takes, forward, gives, backward) in FUNCTIONS {
        for dim in 0..D {
            let mut shape: [usize; D] = std::array::from_fn(|i| 2 + i % 2);
            shape[dim] = 2 * n;
            let shape_out = shape_after(forward, shape, dim, n);
            let xs = values(takes, comm, shape.iter().product(), 1);
            let gs = values(gives, comm, shape_out.iter().product(), 2);
            let (y, dx) = both_ways(
                |x| call(name, x, dim, comm),
                tensor(&xs[index], shape, &autodiff(), dtype),
                |shape| tensor(&gs[index], shape, &autodiff(), dtype),
            );
            let what = format!("{name} along {dim} of {shape:?} over {n} ranks in {dtype:?}");
            assert_eq!(y.dims(), shape_out, "{what}");
            assert_eq!((y.dtype(), dx.dtype()), (dtype, dtype), "{what}");
            let (y, dx) = (integers(y), integers(dx));
            assert_eq!(y, reference(forward, &xs, &shape, dim, index), "{what}");
            assert_eq!(
                dx,
                reference(backward, &gs, &shape_out, dim, index),
                "gradient of {what}"
            );
            // If all members have the same values, the values are one vector and count once.
            let left = if counts(gives) {
                dot(&gs[index], &y)
            } else {
                0
            };
            let right = if counts(takes) {
                dot(&dx, &xs[index])
            } else {
                0
            };
            sides.push((what, left, right));
        }
    }
    sides
}

fn check_all(comm: &Comm) -> Vec<(String, i64, i64)> {
    let mut sides = vec![];
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        sides.extend(check::<1>(comm, dtype));
        sides.extend(check::<2>(comm, dtype));
        sides.extend(check::<3>(comm, dtype));
        sides.extend(check::<4>(comm, dtype));
    }
    sides
}

/// Asserts `<g, f(x)> = <f^T(g), x>` over the members of one group.
fn assert_transposed(ranks: &[Vec<(String, i64, i64)>]) {
    assert_eq!(ranks[0].len(), FUNCTIONS.len() * 10 * 3);
    for call in 0..ranks[0].len() {
        let (what, ..) = &ranks[0][call];
        let left: i64 = ranks.iter().map(|rank| rank[call].1).sum();
        let right: i64 = ranks.iter().map(|rank| rank[call].2).sum();
        assert_eq!(left, right, "{what} is not the transpose");
        assert_ne!(left, 0, "{what}");
    }
}

#[test]
fn forward_and_backward_are_exact_and_transposed() {
    for ranks in 1..=4 {
        assert_transposed(&over(ranks, |comm| check_all(&comm)));
    }
}

#[test]
fn groups_of_a_world_do_not_mix() {
    let groups = [vec![0, 2], vec![1, 3]];
    let ranks = over(4, |comm| check_all(&comm.split("tensor", &groups).unwrap()));
    for group in groups {
        let members: Vec<_> = group.iter().map(|rank| ranks[*rank].clone()).collect();
        assert_transposed(&members);
    }
}

#[test]
fn one_rank_records_nothing() {
    over(1, |comm| {
        for (name, ..) in FUNCTIONS {
            let x = tensor(&own(0, 6), [2, 3], &autodiff(), DType::F32).require_grad();
            let y = call(name, x.clone(), 1, &comm);
            // A recorded node would no longer be a leaf.
            assert!(y.is_require_grad(), "{name}");
            assert_eq!(
                integers(y.clone().inner()),
                integers(x.clone().inner()),
                "{name}"
            );
            assert!(x.grad(&y.sum().backward()).is_some(), "{name}");
        }
    });
}

#[test]
fn plain_tensors_stay_plain() {
    over(2, |comm| {
        for (name, ..) in FUNCTIONS {
            let x = tensor(&own(comm.rank(), 4), [4], &Device::flex(), DType::F32);
            assert!(!call(name, x, 0, &comm).is_autodiff(), "{name}");
        }
    });
}
