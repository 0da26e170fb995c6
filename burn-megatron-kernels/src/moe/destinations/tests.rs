use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{ExpertPlacement, destinations};
use crate::testing::devices;

const RANKS: ExpertPlacement = ExpertPlacement {
    experts: 8,
    experts_per_rank: 2,
    stride: 1,
    parts: 1,
    part_stride: 0,
    first: 0,
    size: 1,
    count: 4,
};

/// Returns placements with destinations that are single ranks, nodes, and ranks of a node. Some experts are on two
/// ranks, in both orders.
fn cases() -> Vec<ExpertPlacement> {
    let shared = ExpertPlacement {
        parts: 2,
        count: 8,
        ..RANKS
    };
    vec![
        RANKS,
        ExpertPlacement {
            size: 2,
            count: 2,
            ..RANKS
        },
        ExpertPlacement {
            first: 2,
            count: 2,
            ..RANKS
        },
        ExpertPlacement {
            stride: 2,
            part_stride: 1,
            ..shared
        },
        ExpertPlacement {
            part_stride: 4,
            ..shared
        },
        ExpertPlacement {
            part_stride: 4,
            size: 4,
            count: 2,
            ..shared
        },
    ]
}

/// Returns the expected destinations from a table of the ranks of each expert.
fn expected(choices: &[i64], top_k: usize, ranks: &ExpertPlacement) -> Vec<i32> {
    let mut of_expert = vec![vec![]; ranks.experts];
    for (expert, found) in of_expert.iter_mut().enumerate() {
        for part in 0..ranks.parts {
            let rank = expert / ranks.experts_per_rank * ranks.stride + part * ranks.part_stride;
            let own = (0..ranks.count).find(|number| {
                let first = ranks.first + number * ranks.size;
                (first..first + ranks.size).contains(&rank)
            });
            found.push(own.map_or(-1, |own| own as i32));
        }
    }
    let mut all = vec![];
    for token in choices.chunks(top_k) {
        let none = vec![-1; ranks.parts];
        let of = |choice: &i64| {
            let expert = usize::try_from(*choice).ok();
            expert
                .and_then(|it| of_expert.get(it))
                .unwrap_or(&none)
                .clone()
        };
        let mut slots: Vec<i32> = token.iter().flat_map(of).collect();
        for slot in (0..slots.len()).rev() {
            if slots[..slot].contains(&slots[slot]) {
                slots[slot] = -1;
            }
        }
        all.extend(slots);
    }
    all
}

#[test]
fn a_token_has_each_destination_once() {
    for (device, _) in devices() {
        for ranks in cases() {
            for (tokens, top_k) in [(1, 1), (7, 2), (300, 3), (40, 8), (5, 0), (0, 2)] {
                let choice = |pair: usize| (pair * pair / 3 % 11) as i64 - 1;
                let choices: Vec<i64> = (0..tokens * top_k).map(choice).collect();
                let data = TensorData::new(choices.clone(), [tokens, top_k]);
                let indices = Tensor::<2, Int>::from_data(data, (&device, DType::I32));
                let found = destinations(indices, ranks);
                assert_eq!(found.dims(), [tokens, top_k * ranks.parts]);
                let found: Vec<i32> = match tokens * top_k {
                    0 => vec![],
                    _ => found.into_data().iter::<i32>().collect(),
                };
                let expected = if top_k == 0 {
                    vec![]
                } else {
                    expected(&choices, top_k, &ranks)
                };
                assert_eq!(found, expected, "{tokens} x {top_k}, {ranks:?}");
            }
        }
    }
}

#[test]
fn experts_that_are_not_split_evenly_are_refused() {
    for wrong in [
        ExpertPlacement {
            experts_per_rank: 3,
            ..RANKS
        },
        ExpertPlacement {
            experts_per_rank: 0,
            ..RANKS
        },
        ExpertPlacement { size: 0, ..RANKS },
        ExpertPlacement { count: 0, ..RANKS },
    ] {
        let refused = std::panic::catch_unwind(|| {
            destinations(Tensor::zeros([3, 2], &Device::flex()), wrong)
        });
        assert!(refused.is_err(), "{wrong:?}");
    }
}
