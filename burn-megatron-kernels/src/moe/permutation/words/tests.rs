use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::super::{RowLayout, RowMap};
use super::permute_words;
use crate::testing::devices;

fn words(values: Vec<u32>, width: usize, device: &Device) -> Tensor<2, Int> {
    let rows = values.len() / width;
    Tensor::from_data(TensorData::new(values, [rows, width]), (device, DType::U32))
}

/// A row has the integers of its token from both parts. The widths are not a multiple of a vector. Some tokens have no
/// row, and one row is empty.
#[test]
fn rows_have_the_words_of_both_parts() {
    const TOKENS: usize = 700;
    let (a, b) = (7, 3);
    // Tokens go to experts `t % 3` and `t % 5 + 1` of six. Multiples of 7 go to no expert.
    let choice = |token: i64, slot: i64| match token % 7 {
        0 => -1,
        _ => token % (3 + 2 * slot) + slot,
    };
    let choices: Vec<i64> = (0..TOKENS as i64)
        .flat_map(|token| [choice(token, 0), choice(token, 1)])
        .collect();
    let mut order: Vec<_> = (0..choices.len())
        .filter(|pair| choices[*pair] >= 0)
        .collect();
    order.sort_by_key(|pair| choices[*pair]);
    let value = |part: u32, token: usize, column: usize| {
        (token as u32 * 16 + column as u32).wrapping_mul(0x9e37_79b9) ^ part
    };
    let part = |part: u32, width: usize| -> Vec<u32> {
        let all = (0..TOKENS).flat_map(|token| (0..width).map(move |column| (token, column)));
        all.map(|(token, column)| value(part, token, column))
            .collect()
    };
    let mut expected = vec![];
    for pair in &order {
        let token = pair / 2;
        expected.extend((0..a).map(|column| value(1, token, column)));
        expected.extend((0..b).map(|column| value(2, token, column)));
    }
    expected.extend(vec![0; a + b]);
    for (device, _) in devices() {
        let indices =
            Tensor::<2, Int>::from_data(TensorData::new(choices.clone(), [TOKENS, 2]), &device);
        let map = RowMap::new(indices, 6, RowLayout::Rows(order.len() + 1));
        let [left, right] =
            [(1, a), (2, b)].map(|(of, width)| words(part(of, width), width, &device));
        let found: Vec<u32> = permute_words(left, right, &map)
            .into_data()
            .try_into_vec()
            .unwrap();
        assert_eq!(found, expected);
    }
}

#[test]
fn no_rows_are_no_words() {
    let device = Device::flex();
    let map = RowMap::new(
        Tensor::from_ints([[-1], [-1]], &device),
        2,
        RowLayout::Rows(0),
    );
    let [left, right] = [3, 1].map(|width| words(vec![1; 2 * width], width, &device));
    assert_eq!(permute_words(left, right, &map).dims(), [0, 4]);
}
