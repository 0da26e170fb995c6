use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::testing::{Input, compare, devices};

/// Returns choices that cover all experts unevenly. Some pairs are dropped, with both kinds of invalid indices.
fn choices(tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
    let choice = |pair: usize| {
        let (token, slot) = (pair / top_k, pair % top_k);
        match token * 7 % 11 {
            0 if slot == 0 => -1,
            1 if slot + 1 == top_k => experts as i32 + slot as i32,
            spread => ((token * spread / 3 + slot) % experts) as i32,
        }
    };
    (0..tokens * top_k).map(choice).collect()
}

fn indices(values: &[i32], tokens: usize, top_k: usize, device: &Device) -> Tensor<2, Int> {
    let data = TensorData::new(values.to_vec(), [tokens, top_k]);
    Tensor::from_data(data, (device, DType::I32))
}

fn ints<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    tensor.into_data().iter::<i32>().collect()
}

/// Returns the pair of each row, the number of rows of each expert, and the counts. The pairs are found expert by
/// expert.
fn sorted(choices: &[i32], experts: usize, layout: RowLayout) -> (Vec<i32>, Vec<usize>, Vec<i32>) {
    let (mut rows, mut sizes, mut counts) = (vec![], vec![], vec![]);
    for expert in 0..experts {
        let mut pairs: Vec<i32> = (0..choices.len() as i32).collect();
        pairs.retain(|pair| choices[*pair as usize] == expert as i32);
        match layout {
            RowLayout::Kept => {}
            RowLayout::Rows(limit) => pairs.truncate(limit - rows.len()),
            RowLayout::Aligned(align) => {
                counts.push(pairs.len() as i32);
                while !pairs.len().is_multiple_of(align) {
                    pairs.push(-1);
                }
            }
            RowLayout::Capacity(capacity) => {
                counts.push(pairs.len().min(capacity) as i32);
                pairs.resize(capacity, -1);
            }
        }
        sizes.push(pairs.len());
        rows.extend(pairs);
        counts.truncate(expert + 1);
        if counts.len() == expert {
            counts.push(sizes[expert] as i32);
        }
    }
    if let RowLayout::Rows(limit) = layout {
        rows.resize(limit, -1);
    }
    (rows, sizes, counts)
}

fn assert_map(device: &Device, values: &[i32], top_k: usize, experts: usize, layout: RowLayout) {
    let tokens = values.len() / top_k;
    let what = format!("[{tokens}, {top_k}] of {experts} in {layout:?} on {device:?}");
    let (rows, sizes, counts) = sorted(values, experts, layout);
    let map = RowMap::new(indices(values, tokens, top_k, device), experts, layout);
    assert_eq!(map.rows(), rows.len(), "{what}");
    assert_eq!(map.group_sizes(), sizes, "{what}");
    assert_eq!(ints(map.counts()), counts, "{what}");
    let offsets = ints(map.offsets());
    let mut end = 0;
    for (expert, size) in sizes.iter().enumerate() {
        assert_eq!(offsets[expert], end, "{what}: expert {expert}");
        end += *size as i32;
    }
    assert_eq!(offsets[experts], end, "{what}");
    assert_eq!(ints(map.row_to_pair.clone()), rows, "{what}");
    let mut inverse = vec![-1; values.len()];
    for (row, pair) in rows.iter().enumerate().filter(|(_, pair)| **pair >= 0) {
        inverse[*pair as usize] = row as i32;
    }
    assert_eq!(ints(map.slot_to_row()), inverse, "{what}");
}

#[test]
fn rows_are_those_of_a_stable_sort() {
    // The sizes are not a multiple of a chunk, several chunks, one expert, or as many choices as experts.
    let sizes = [(1, 1, 1), (5, 2, 3), (40, 4, 4), (300, 4, 7), (700, 3, 300)];
    for (device, _) in devices() {
        for (tokens, top_k, experts) in sizes {
            let values = choices(tokens, top_k, experts);
            let kept = sorted(&values, experts, RowLayout::Kept).0.len();
            for layout in [
                RowLayout::Kept,
                RowLayout::Rows(kept),
                RowLayout::Rows(kept / 2),
                RowLayout::Rows(kept + 9),
                RowLayout::Aligned(16),
                RowLayout::Capacity(1),
                RowLayout::Capacity(3),
                RowLayout::Capacity(tokens + 1),
            ] {
                assert_map(&device, &values, top_k, experts, layout);
            }
        }
    }
}

#[test]
fn extremes_are_sorted() {
    let layouts = [
        RowLayout::Kept,
        RowLayout::Rows(0),
        RowLayout::Rows(4),
        RowLayout::Aligned(8),
        RowLayout::Capacity(0),
        RowLayout::Capacity(2),
    ];
    for (device, _) in devices() {
        for layout in layouts {
            // The cases are: all pairs dropped, no tokens, all pairs in one expert.
            assert_map(&device, &[-1, 9, -1, 5], 2, 5, layout);
            assert_map(&device, &[], 2, 3, layout);
            assert_map(&device, &[3; 1200], 1, 5, layout);
        }
    }
}

#[test]
fn other_integers_are_accepted() {
    let data = TensorData::new(vec![1i64, -7, 0, 1 << 20], [2, 2]);
    let indices = Tensor::<2, Int>::from_data(data, (&Device::flex(), DType::I64));
    let map = RowMap::new(indices, 2, RowLayout::Kept);
    assert_eq!(ints(map.slot_to_row()), [1, -1, 0, -1]);
}

/// The expected numbers of the reference for four tokens with the top two of four experts.
#[test]
fn the_golden_permutation() {
    let chosen = [0, 1, 1, 0, 1, 2, 0, 1];
    let map = RowMap::new(indices(&chosen, 4, 2, &Device::flex()), 4, RowLayout::Kept);
    let pairs = ints(map.row_to_pair.clone()).into_iter();
    let tokens: Vec<i32> = pairs.map(|pair| pair / 2).collect();
    assert_eq!(tokens, [0, 1, 3, 0, 1, 2, 3, 2]);
    assert_eq!(ints(map.offsets()), [0, 3, 7, 8, 8]);
    assert_eq!(ints(map.counts()), [3, 4, 1, 0]);
}

/// Returns a matrix `[rows, pairs]` on the device of `like`: 1 where the row holds the pair, otherwise 0.
fn selection(rows: &[i32], pairs: usize, like: &Tensor<1>) -> Tensor<2> {
    let mut values = vec![0.0; rows.len() * pairs];
    for (row, pair) in rows.iter().enumerate().filter(|(_, pair)| **pair >= 0) {
        values[row * pairs + *pair as usize] = 1.0;
    }
    let data = TensorData::new(values, [rows.len(), pairs]);
    Tensor::from_data(data, (&like.device().inner(), DType::F64))
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}

#[test]
fn rows_and_sums_equal_products_with_a_selection() {
    // The widths are one element, not a multiple of a vector, or several tasks.
    for (tokens, top_k, experts, width) in [(9, 2, 3, 1), (37, 3, 5, 7), (600, 4, 4, 128)] {
        let values = choices(tokens, top_k, experts);
        for layout in [RowLayout::Kept, RowLayout::Capacity(tokens / 2)] {
            let rows = sorted(&values, experts, layout).0;
            let map = |x: &Tensor<1>| {
                let device = x.device().inner();
                RowMap::new(indices(&values, tokens, top_k, &device), experts, layout)
            };
            // The token of each row is selected by the product of a selection of pairs and a selection of tokens.
            let of_tokens = |x: &Tensor<1>| {
                let pairs: Vec<i32> = (0..(tokens * top_k) as i32)
                    .map(|i| i / top_k as i32)
                    .collect();
                selection(&rows, pairs.len(), x).matmul(selection(&pairs, tokens, x))
            };
            let name = format!("[{tokens}, {top_k}] {layout:?} {width}");
            compare(
                &format!("permute {name}"),
                &[Input::wave([tokens, width], 0.2)],
                |x| flat(permute(x[0].clone().reshape([tokens, width]), &map(&x[0]))),
                |x| flat(of_tokens(&x[0]).matmul(x[0].clone().reshape([tokens, width]))),
            );
            compare(
                &format!("unpermute {name}"),
                &[Input::wave([rows.len(), width], 0.4)],
                |x| {
                    flat(unpermute(
                        x[0].clone().reshape([rows.len(), width]),
                        &map(&x[0]),
                    ))
                },
                |x| {
                    let matrix = of_tokens(&x[0]).transpose();
                    flat(matrix.matmul(x[0].clone().reshape([rows.len(), width])))
                },
            );
            compare(
                &format!("permute_weights {name}"),
                &[Input::wave([tokens, top_k], 0.6)],
                |x| permute_weights(x[0].clone().reshape([tokens, top_k]), &map(&x[0])),
                |x| {
                    let pairs = tokens * top_k;
                    let weights = x[0].clone().reshape([pairs, 1]);
                    flat(selection(&rows, pairs, &x[0]).matmul(weights))
                },
            );
        }
    }
}

#[test]
fn a_token_comes_back_as_often_as_it_is_kept() {
    for (device, _) in devices() {
        let (tokens, top_k, experts) = (100, 4, 6);
        let values = choices(tokens, top_k, experts);
        let map = RowMap::new(
            indices(&values, tokens, top_k, &device),
            experts,
            RowLayout::Kept,
        );
        let x = Tensor::<2>::ones([tokens, 8], &device);
        let kept = |token: usize| {
            let of_token = &values[token * top_k..(token + 1) * top_k];
            of_token
                .iter()
                .filter(|expert| (0..experts as i32).contains(*expert))
                .count()
        };
        let back: Vec<f32> = unpermute(permute(x, &map), &map)
            .into_data()
            .try_into_vec()
            .unwrap();
        for (token, row) in back.chunks(8).enumerate() {
            assert_eq!(row, [kept(token) as f32; 8], "token {token} on {device:?}");
        }
    }
}

#[test]
fn nothing_is_gathered_from_nothing() {
    for (device, _) in devices() {
        for (tokens, values, layout) in [
            (0, vec![], RowLayout::Kept),
            (0, vec![], RowLayout::Capacity(3)),
            (2, vec![-1; 4], RowLayout::Kept),
            (2, vec![-1; 4], RowLayout::Capacity(3)),
        ] {
            let map = RowMap::new(indices(&values, tokens, 2, &device), 5, layout);
            let rows = permute(Tensor::ones([tokens, 4], &device), &map);
            assert_eq!(rows.dims(), [map.rows(), 4]);
            assert_eq!(flat(rows.clone()).sum().into_scalar::<f32>(), 0.0);
            let back = unpermute(rows, &map);
            assert_eq!(back.dims(), [tokens, 4]);
            assert_eq!(flat(back).sum().into_scalar::<f32>(), 0.0);
            let weights = permute_weights(Tensor::ones([tokens, 2], &device), &map);
            assert_eq!(weights.dims(), [map.rows()]);
        }
    }
}

#[test]
fn other_sizes_are_refused() {
    let message = |call: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let panic = panic.expect_err("the call must fail");
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    let device = Device::flex();
    let new = |experts, layout| {
        drop(RowMap::new(
            indices(&[0; 4], 2, 2, &device),
            experts,
            layout,
        ))
    };
    assert_snapshot!(
        message(&|| new(0, RowLayout::Kept)),
        @"RowMap: invalid experts = 0: expected 1 to 2048"
    );
    assert_snapshot!(
        message(&|| new(2, RowLayout::Aligned(0))),
        @"RowMap: invalid alignment = 0: expected at least 1"
    );
    assert_snapshot!(
        message(&|| new(2, RowLayout::Capacity(1 << 30))),
        @"RowMap: 4 pairs and up to 2147483648 rows in Capacity(1073741824) of 2 experts: expected at most \
          2147483647 of each"
    );
    let map = RowMap::new(indices(&[0; 4], 2, 2, &device), 2, RowLayout::Kept);
    let x = |rows| Tensor::<2>::ones([rows, 3], &device);
    assert_snapshot!(
        message(&|| drop(permute(x(4), &map))),
        @"permute: 4 rows for a map of 2 rows: expected 2"
    );
    assert_snapshot!(
        message(&|| drop(unpermute(x(2), &map))),
        @"unpermute: 2 rows for a map of 4 rows: expected 4"
    );
    assert_snapshot!(
        message(&|| drop(permute_weights(x(2), &map))),
        @"permute_weights: weights [2, 3] for a map of [2, 2]: expected equal shapes"
    );
}
