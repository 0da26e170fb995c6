//! Tests single blocks and their merge against known values.

use std::f64::consts::{FRAC_1_SQRT_2, SQRT_2};

use burn_megatron_kernels::attention::Portable;

use super::*;
use crate::nn::score_options::ScoreOptions;

#[test]
fn two_results_merge_to_the_known_one() {
    let device = Device::flex();
    let part = |out: f64, lse: f64| -> PartialResult {
        let options = (&device, DType::F64);
        (
            Tensor::full([1, 1, 1, 1], out, options),
            Tensor::full([1, 1, 1], lse, options),
        )
    };
    let (out, lse) = merge(part(0.25, 1.0), part(0.75, -0.5));
    assert_close(&doubles(lse), &[1.201413278], 1e-9, "lse");
    assert_close(&doubles(out), &[0.341212762], 1e-9, "out");
    let unseen = || part(0.0, f64::NEG_INFINITY);
    let (out, lse) = merge(unseen(), part(0.75, -0.5));
    assert_eq!((doubles(out)[0], doubles(lse)[0]), (0.75, -0.5));
    let (out, lse) = merge(unseen(), unseen());
    assert_eq!((doubles(out)[0], doubles(lse)[0]), (0.0, f64::NEG_INFINITY));
}

const QUERIES: [[f64; 2]; 4] = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]];
const KEYS: [[f64; 2]; 4] = [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.5, -0.5]];
const VALUES: [[f64; 2]; 4] = [[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [-1.0, 3.0]];
const OUT: [[f64; 2]; 4] = [
    [1.0, 0.0],
    [0.5, 0.5],
    [1.0, 0.496510157],
    [0.371941910, 0.996546650],
];
const LSE: [f64; 4] = [FRAC_1_SQRT_2, 1.400253962, 2.100405301, 1.389851119];

/// Tests attention of four tokens on two ranks with {0, 3} and {1, 2} against known values.
#[test]
fn blocks_of_a_ring_have_the_known_results() {
    let device = Device::flex();
    let tensor = |rows: Vec<[f64; 2]>| {
        let shape = [rows.len(), 1, 2];
        Tensor::<3>::from_data(TensorData::new(rows.concat(), shape), (&device, DType::F64))
    };
    for rank in 0..2 {
        let shard = SequenceShard::new([1, 4], None, ContextSplit::Zigzag, (rank, 2)).unwrap();
        assert_eq!(shard.tokens(), [[0, 3], [1, 2]][rank]);
        let of_rank = |rows: &[[f64; 2]; 4], rank: usize| -> Vec<[f64; 2]> {
            let tokens = [[0, 3], [1, 2]][rank];
            tokens.iter().map(|token| rows[*token]).collect()
        };
        let block = |rank| {
            let (k, v) = (of_rank(&KEYS, rank), of_rank(&VALUES, rank));
            Tensor::cat(vec![tensor(k), tensor(v)], 1)
        };
        let of = PartialAttention {
            engine: Arc::new(Portable),
            heads: Heads {
                heads: 1,
                groups: 1,
                width: 2,
            },
            scores: ScoreOptions::default(),
            shard,
            queries: rank..rank + 1,
            narrow_gradients: false,
        };
        let q = tensor(of_rank(&QUERIES, rank)).unsqueeze::<4>();
        let [own, other] = [rank, 1 - rank].map(|keys| {
            let (out, lse) = of.attend(&q, &block(keys), keys..keys + 1).unwrap();
            (
                doubles(out),
                doubles(lse),
                of.attend(&q, &block(keys), keys..keys + 1).unwrap(),
            )
        });
        let expected = if rank == 0 {
            // Token 0 attends to itself, and to no token of the other rank.
            assert_eq!(other.1[0], f64::NEG_INFINITY);
            [
                (0.339523099, 0.990715352, 0.400833527),
                (0.391140635, 1.0, 0.924728503),
            ]
        } else {
            [(1.0, 1.0, 1.400253962), (1.0, 0.0, SQRT_2)]
        };
        for ((out, lse, _), (x, y, l)) in [&own, &other].into_iter().zip(expected) {
            assert_close(&out[2..], &[x, y], 1e-8, "the last row");
            assert_close(&lse[1..], &[l], 1e-8, "its log-sum-exp");
        }
        let (out, lse) = merge(own.2, other.2);
        let tokens = [[0, 3], [1, 2]][rank];
        assert_close(
            &doubles(out),
            &tokens.map(|token| OUT[token]).concat(),
            1e-8,
            "merged",
        );
        assert_close(
            &doubles(lse),
            &tokens.map(|token| LSE[token]),
            1e-8,
            "merged",
        );
    }
}
