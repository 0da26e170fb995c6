//! Tests the merge of two results on different keys against Burn's operations in f64.

use super::*;

const SHAPE: [usize; 4] = [2, 5, 3, 12];

/// Returns an output and a log-sum-exp. Every `unseen`-th query has no visible key.
fn result(key: usize, unseen: usize, options: (&Device, DType)) -> (Tensor<4>, Tensor<3>) {
    let [batch, queries, heads, width] = SHAPE;
    let number = |i: usize| ((i * 37 + key * 11) % 101) as f64 / 25.0 - 2.0;
    let query = |lse: usize| lse % queries;
    let sees = |lse: usize| query(lse) % unseen != 0;
    let lse = (0..batch * heads * queries).map(|i| {
        if sees(i) {
            8.0 * number(i)
        } else {
            f64::NEG_INFINITY
        }
    });
    let out = (0..batch * queries * heads * width).map(|i| {
        let lse = i / (width * heads) % queries;
        if sees(lse) { number(i + 3) } else { 0.0 }
    });
    let data = |values: Vec<f64>, shape: &[usize]| TensorData::new(values, shape.to_vec());
    (
        Tensor::from_data(data(out.collect(), &SHAPE), options),
        Tensor::from_data(data(lse.collect(), &[batch, heads, queries]), options),
    )
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn a_merge_is_that_of_burns_operations() {
    let exact = (&Device::flex(), DType::F64);
    for (unseen, other_unseen) in [(9, 9), (2, 9), (2, 4), (1, 1)] {
        let expected = composed::merge(result(1, unseen, exact), result(2, other_unseen, exact));
        let (out, lse) = (values(expected.0), values(expected.1));
        for (device, types) in devices() {
            for dtype in types {
                if !matches!(dtype, DType::F32 | DType::F64) {
                    continue;
                }
                let options = (&device, dtype);
                let (found, found_lse) =
                    merge(result(1, unseen, options), result(2, other_unseen, options));
                assert_eq!(found.dtype(), dtype);
                let bound = if dtype == DType::F64 { 1e-14 } else { 4e-6 };
                for (found, expected) in [(values(found), &out), (values(found_lse), &lse)] {
                    for (found, expected) in found.iter().zip(expected) {
                        let same = found == expected;
                        assert!(
                            same || (found - expected).abs() <= bound * (1.0 + expected.abs()),
                            "{device:?}, {dtype:?}: {found} and {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "expected equal ones")]
fn results_of_other_queries_are_refused() {
    let options = (&Device::flex(), DType::F32);
    let (out, lse) = result(1, 9, options);
    let other = (out.clone().narrow(1, 0, 4), lse.clone().narrow(2, 0, 4));
    merge((out, lse), other);
}

#[test]
#[should_panic(expected = "all F32, or all F64")]
fn results_in_16_bits_are_refused() {
    let options = (&Device::flex(), DType::F32);
    let (out, lse) = result(1, 9, options);
    let narrow = (out.clone().cast(DType::BF16), lse.clone());
    merge(narrow, (out.cast(DType::BF16), lse));
}
