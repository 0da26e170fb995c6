//! Tests that the dropout mask does not depend on the number of ranks.

use burn::tensor::{DType, Tensor};

use super::{assemble, autodiff, leaf, over, part, values, wave};
use crate::nn::*;

const SHAPE: [usize; 3] = [2, 8, 4];

/// Returns the output and gradient of each rank, for an input with this placement.
fn dropped(ranks: usize, split: Option<usize>) -> (Vec<Vec<f64>>, Placement) {
    let placement = match split {
        Some(dim) => Placement::split(dim, SHAPE[dim], ranks),
        None => Placement::Replicated,
    };
    let parts = over(ranks, |groups| {
        let builder = ModelBuilder::with(&groups, &autodiff(), 5, DType::F64);
        let dropout = Dropout::new(0.4, &builder.child("dropout")).unwrap();
        builder.position().set(2, 6);
        let place = groups.place();
        let layout = match split {
            Some(dim) => ActivationLayout::SplitAlong { dim, place },
            None => ActivationLayout::Whole,
        };
        let x = leaf(part(wave(SHAPE, 0.5), &placement, place));
        let y: Tensor<3> = dropout.forward(x.clone(), layout);
        let mask = values(x.grad(&y.clone().sum().backward()).unwrap());
        let y = values(y.inner());
        let expected: Vec<f64> = values(x.inner())
            .iter()
            .zip(&mask)
            .map(|(x, m)| x * m)
            .collect();
        assert_eq!(y, expected, "the gradient is the mask");
        y
    });
    (parts, placement)
}

#[test]
fn ranks_with_the_same_elements_drop_the_same() {
    let (one, _) = dropped(1, None);
    for ranks in [2, 4] {
        assert!(dropped(ranks, None).0.iter().all(|part| *part == one[0]));
    }
    let zeros = one[0].iter().filter(|x| **x == 0.0).count();
    // Each of the 64 elements is dropped with probability 0.4.
    assert!((15..37).contains(&zeros), "{zeros} of 64");
}

#[test]
fn ranks_with_other_elements_drop_parts_of_one_mask() {
    let (one, _) = dropped(1, None);
    for ranks in [2, 4] {
        for dim in [1, 2] {
            let (parts, placement) = dropped(ranks, Some(dim));
            assert_eq!(
                assemble(&placement, &SHAPE, &parts),
                one[0],
                "dim {dim} over {ranks}"
            );
            let pattern = |part: &[f64]| part.iter().map(|x| *x == 0.0).collect::<Vec<_>>();
            assert_ne!(pattern(&parts[0]), pattern(&parts[1]), "the parts differ");
        }
    }
}
