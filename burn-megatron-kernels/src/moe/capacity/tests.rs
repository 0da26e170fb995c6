use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::keep_within_capacity;
use crate::testing::devices;

/// Returns uneven choices with many equal weights. Some choices have no valid expert.
fn pairs(tokens: usize, k: usize, experts: usize) -> (Vec<i32>, Vec<f32>) {
    let choice = |pair: usize| match pair % 13 {
        5 => -1,
        6 => experts as i32,
        _ => (pair * pair / 7 % experts) as i32,
    };
    let weight = |pair: usize| (pair * 5 % 17) as f32 / 17.0;
    let all = 0..tokens * k;
    (all.clone().map(choice).collect(), all.map(weight).collect())
}

/// Returns the expected choices. For each expert, the pairs are selected one by one, starting with the largest weight.
fn expected(choices: &[i32], weights: Option<&[f32]>, experts: i32, capacity: usize) -> Vec<i32> {
    let mut kept = choices.to_vec();
    for expert in 0..experts {
        let own = || (0..choices.len()).filter(|pair| choices[*pair] == expert);
        let mut left: Vec<usize> = own().collect();
        for _ in 0..capacity.min(left.len()) {
            let mut best = 0;
            for (at, pair) in left.iter().enumerate() {
                if weights.is_some_and(|weights| weights[*pair] > weights[left[best]]) {
                    best = at;
                }
            }
            left.remove(best);
        }
        left.into_iter().for_each(|pair| kept[pair] = -1);
    }
    kept
}

#[test]
fn an_expert_keeps_its_capacity() {
    for (device, _) in devices() {
        for (tokens, k, experts) in [(1, 1, 1), (40, 2, 3), (700, 3, 8)] {
            let (choices, weights) = pairs(tokens, k, experts);
            let matrix = |data: TensorData| Tensor::<2>::from_data(data, (&device, DType::F32));
            for capacity in [0, 1, 7, 100, tokens * k + 5] {
                for given in [None, Some(&weights[..])] {
                    let indices = TensorData::new(choices.clone(), [tokens, k]);
                    let indices = Tensor::<2, Int>::from_data(indices, (&device, DType::I32));
                    let weights =
                        given.map(|given| matrix(TensorData::new(given.to_vec(), [tokens, k])));
                    let kept = keep_within_capacity(indices, weights, experts, capacity);
                    let found: Vec<i32> = kept.into_data().iter::<i32>().collect();
                    let expected = expected(&choices, given, experts as i32, capacity);
                    assert_eq!(
                        found, expected,
                        "{tokens} x {k}, {experts}, {capacity}, {given:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn no_tokens_and_sizes_that_do_not_fit() {
    let device = Device::flex();
    let none = Tensor::<2, Int>::from_data(TensorData::new(Vec::<i32>::new(), [0, 2]), &device);
    assert_eq!(keep_within_capacity(none, None, 4, 1).dims(), [0, 2]);
    let refused = std::panic::catch_unwind(|| {
        let indices = Tensor::<2, Int>::zeros([3, 2], &Device::flex());
        keep_within_capacity(indices, Some(Tensor::ones([2, 2], &Device::flex())), 4, 1)
    });
    assert!(refused.is_err());
}
