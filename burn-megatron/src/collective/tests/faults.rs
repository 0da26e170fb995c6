//! Invalid arguments cause an error of the world, not a hang.

use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::{autodiff, own, tensor};
use crate::comm::{CommError, World, WorldError};

/// Returns the message of the rank that failed first.
fn failure(ranks: usize, f: impl Fn(Comm) + Sync) -> String {
    let world = World::threads(ranks)
        .unwrap()
        .deadline(Duration::from_secs(5));
    let result = world.run(|rank| {
        f(rank.communicator());
        Ok::<_, CommError>(())
    });
    match result {
        Err(WorldError::RankFailed { source, .. }) => {
            assert!(source.is::<CommError>(), "no error of a call: {source}");
            source.to_string()
        }
        other => panic!("{other:?}"),
    }
}

fn plain<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    tensor(
        &own(0, shape.iter().product()),
        shape,
        &Device::flex(),
        DType::F32,
    )
}

#[test]
fn a_dim_that_cannot_be_split_is_named() {
    let functions: [fn(Tensor<2>, usize, &Comm) -> Tensor<2>; 3] =
        [split, scatter_sequence, reduce_scatter_sequence];
    for function in functions {
        let message = failure(3, |comm| drop(function(plain([6, 4]), 1, &comm)));
        for part in ["dim 1", "[6, 4]", "3 ranks", "world"] {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
    }
}

#[test]
fn a_group_is_named_by_its_name() {
    let message = failure(2, |comm| {
        let tensor = comm.split("tensor", &[vec![0, 1]]).unwrap();
        drop(split(plain([5]), 0, &tensor));
    });
    assert!(message.contains("tensor [0, 1]"), "{message}");
}

#[test]
fn a_dim_that_is_not_there_is_named() {
    let functions: [fn(Tensor<2>, usize, &Comm) -> Tensor<2>; 3] =
        [split, gather, reduce_scatter_sequence];
    for function in functions {
        for ranks in [1, 2] {
            let message = failure(ranks, |comm| drop(function(plain([6, 4]), 2, &comm)));
            for part in ["dim 2", "[6, 4]", "world"] {
                assert!(message.contains(part), "{message:?} does not name {part:?}");
            }
        }
    }
}

#[test]
fn counts_that_do_not_fit_are_named() {
    let exchange = |ranks, send: &[usize], receive: &[usize]| {
        failure(ranks, |comm| {
            drop(all_to_all(
                plain([4, 2]),
                send.into(),
                receive.into(),
                &comm,
            ))
        })
    };
    // A single rank gets the same error.
    for (message, parts) in [
        (
            exchange(2, &[2, 3], &[2, 3]),
            ["5 rows", "[2, 3]", "[4, 2]", "world [0, 1]"],
        ),
        (
            exchange(1, &[5], &[5]),
            ["5 rows", "[5]", "[4, 2]", "world [0]"],
        ),
        (
            exchange(2, &[4], &[2, 2]),
            ["1 ranks", "[4]", "[2, 2]", "one count per rank"],
        ),
        (
            exchange(1, &[4], &[3]),
            ["sends 4 rows to itself", "receives 3", "", "world [0]"],
        ),
    ] {
        for part in parts {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
    }
}

#[test]
fn counts_of_the_ranks_must_agree() {
    let message = failure(2, |comm| {
        let receive = [vec![1, 2], vec![1, 1]][comm.rank()].clone();
        drop(all_to_all(plain([2, 2]), vec![1, 1], receive, &comm));
    });
    assert!(
        message.contains("rank 1 sends 2 elements to rank 0, which expects 4"),
        "{message}"
    );
}

#[test]
fn a_rank_that_misses_the_backward_is_named() {
    let message = failure(2, |comm| {
        let x = tensor(&own(0, 2), [2], &autodiff(), DType::F32).require_grad();
        let y = copy(x, &comm);
        if comm.rank() == 0 {
            let _ = y.sum().backward();
        }
    });
    assert!(
        message.contains("rank 1 has returned without joining call"),
        "{message}"
    );
    assert!(message.contains("all_reduce"), "{message}");
}
