//! Collectives preserve every bit of packed u32 values.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::super::*;
use super::over;
use crate::comm::World;

/// Returns all kinds of words: interpreted as floats, some are infinite, or NaN with a payload.
pub(super) fn own(rank: usize, len: usize) -> Tensor<1, Int> {
    let special = [0x7f80_0000, 0x7f80_0001, 0xffc0_0123, 0x8000_0000, u32::MAX];
    let word = |i: usize| special[i % 5] ^ (rank as u32) << 3 ^ (i as u32 / 5) << 8;
    let words: Vec<u32> = (0..len).map(word).collect();
    Tensor::from_data(TensorData::new(words, [len]), (&Device::flex(), DType::U32))
}

pub(super) fn integers(words: Tensor<1, Int>) -> Vec<i64> {
    assert_eq!(words.dtype(), DType::U32);
    let words: Vec<u32> = words.into_data().try_into_vec().unwrap();
    words.into_iter().map(i64::from).collect()
}

#[test]
fn words_of_all_ranks_lie_in_rank_order() {
    for ranks in [1, 2, 3, 4] {
        over(ranks, |comm| {
            let lengths = [5, 12, 0];
            let xs = lengths.map(|len| own(comm.rank(), len)).to_vec();
            let started = start_all_gather_packed_coalesced(xs, &comm).into_iter();
            for (pending, len) in started.zip(lengths) {
                let expected = (0..ranks).flat_map(|rank| integers(own(rank, len)));
                assert_eq!(integers(pending.wait()), expected.collect::<Vec<_>>());
            }
            assert!(start_all_gather_packed_coalesced(vec![], &comm).is_empty());
        });
    }
}

/// Rank `r` sends `r + to` rows of two words to rank `to`.
#[test]
fn rows_of_words_go_to_their_ranks() {
    for ranks in [1, 2, 3] {
        over(ranks, |comm| {
            let rank = comm.rank();
            let rows: Vec<_> = (0..ranks).map(|other| rank + other).collect();
            let sent = own(rank, 2 * rows.iter().sum::<usize>());
            let found = start_all_to_all_packed(sent, 2, [&rows, &rows], &comm).wait();
            let expected = (0..ranks).flat_map(|from| {
                let before: usize = (0..rank).map(|to| from + to).sum();
                let all = integers(own(from, 2 * (before + from + rank)));
                all[2 * before..].to_vec()
            });
            assert_eq!(integers(found), expected.collect::<Vec<_>>());
        });
    }
}

#[test]
fn other_integers_are_refused_before_anything_is_sent() {
    let run = |rank: crate::comm::Rank| {
        let words = Tensor::<1, Int>::zeros([3], (&Device::flex(), DType::I64));
        let _ = start_all_gather_packed_coalesced(vec![words], &rank.communicator());
        Ok::<_, crate::comm::CommError>(())
    };
    let error = World::threads(2).unwrap().run(run).unwrap_err().to_string();
    assert!(error.contains("packed words are of u32"), "{error}");
    assert!(error.contains("I64"), "{error}");
}
