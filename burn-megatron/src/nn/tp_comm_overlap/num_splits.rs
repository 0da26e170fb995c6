//! The number of chunks of a sequence-parallel collective, and its exposed communication time. Layers and the planner
//! use these functions.

use crate::mesh::{ParallelConfig, TpCommOverlap, divisors_near};

/// The minimum number of chunks, if the number of tokens allows it. With `c` chunks, `1 / c` of the collective is not
/// hidden.
const FEWEST: usize = 4;
/// The maximum number of chunks, because matmuls with few rows do not use a device fully.
const MOST: usize = 16;
/// The bytes per second that a rank sends over the NVLink of an H100.
const BYTES_PER_SECOND: f64 = 400e9;
/// The time of an additional chunk, in seconds. It consists of the latency of a collective, and the time at the end of
/// a matmul when the last tiles do not use the device fully.
const SECONDS_PER_CHUNK: f64 = 10e-6;

/// The error for tokens of a rank that cannot be split into the requested number of chunks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tp_comm_overlap = {method} cannot make {} of the {tokens} tokens of a sequence on each tensor rank: expected \
     {divisors}sequences with a multiple of {multiple} tokens on each tensor rank",
    splits.map_or(format!("2 to {MOST} equal chunks"), |splits| format!("{splits} equal chunks"))
)]
pub struct NumSplitsError {
    method: TpCommOverlap,
    splits: Option<usize>,
    tokens: usize,
    /// A description of valid settings.
    divisors: String,
    multiple: usize,
}

/// Returns the number of chunks into which a sequence is split. Each of `ranks` ranks holds `tokens` tokens of the
/// sequence and sends `bytes` bytes. If `given` is set, this number is returned. Otherwise the result depends on
/// `method`:
///
/// - Bulk: the divisor `c` of `tokens`, between 4 and 16, with the least exposed time. This time is
///   `bytes / c / bandwidth + c * latency`. If there is no such divisor, the result is 3 or 2. The bandwidth and the
///   latency are the values of an H100 with NVLink.
/// - Ring: a ring already has one chunk per rank, and the result is the number of chunks of each rank's part. It is the
///   smallest number that gives at least 4 chunks in total, or 1 if the tokens cannot be split.
///
/// # Errors
///
/// [`NumSplitsError`] if `tokens` cannot be split into the number of chunks.
pub fn num_splits(
    method: TpCommOverlap,
    given: Option<usize>,
    ranks: usize,
    tokens: usize,
    bytes: f64,
) -> Result<usize, NumSplitsError> {
    let divides = |splits: &usize| tokens > 0 && tokens.is_multiple_of(*splits);
    let exposed = |splits: &usize| {
        let splits = *splits as f64;
        bytes / splits / BYTES_PER_SECOND + splits * SECONDS_PER_CHUNK
    };
    let chosen = || match method {
        TpCommOverlap::Ring => {
            let splits = (FEWEST.div_ceil(ranks)..=FEWEST).find(divides);
            Some(splits.unwrap_or(1))
        }
        TpCommOverlap::Bulk => {
            let best = (FEWEST..=MOST)
                .filter(divides)
                .min_by(|one, two| exposed(one).total_cmp(&exposed(two)));
            best.or_else(|| (2..FEWEST).rev().find(divides))
        }
    };
    let found = match given {
        Some(splits) => Some(splits).filter(divides),
        None => chosen(),
    };
    found.ok_or_else(|| {
        let least = fewest(method);
        let near = given.unwrap_or(FEWEST);
        let mut divisors = divisors_near(tokens, near, |splits| splits >= least);
        if !divisors.is_empty() {
            divisors = format!("tp_comm_overlap_num_splits of {divisors}, or ");
        }
        if method == TpCommOverlap::Bulk {
            divisors += "tp_comm_overlap = ring, or ";
        }
        NumSplitsError {
            method,
            splits: given,
            tokens,
            divisors,
            multiple: given.unwrap_or(least),
        }
    })
}

/// Returns the minimum number of chunks of a rank's part.
const fn fewest(method: TpCommOverlap) -> usize {
    match method {
        TpCommOverlap::Ring => 1,
        TpCommOverlap::Bulk => 2,
    }
}

/// Checks that the collectives of sequences with `length` tokens can be split into chunks.
///
/// # Errors
///
/// [`NumSplitsError`] if the sequences cannot be split.
pub fn check(layout: &ParallelConfig, length: usize) -> Result<(), NumSplitsError> {
    let Some(method) = layout.tp_comm_overlap else {
        return Ok(());
    };
    let tokens = length / (layout.context * layout.tensor).max(1);
    let given = layout.tp_comm_overlap_num_splits;
    num_splits(method, given, layout.tensor, tokens, 0.0).map(drop)
}

/// Returns a number that must divide the number of tokens of a sequence that the tensor ranks share, in a layout with
/// sequence parallelism.
pub fn sequence_multiple(layout: &ParallelConfig) -> usize {
    let chunks = match layout.tp_comm_overlap {
        Some(method) => layout.tp_comm_overlap_num_splits.unwrap_or(fewest(method)),
        None => 1,
    };
    layout.tensor * chunks
}

/// Returns the exposed communication time in seconds: the time for which a rank waits for a collective. The collective
/// takes `transfer` seconds and overlaps with matmuls that take `product` seconds.
///
/// A ring overlaps the complete collective with the matmuls of all chunks except one. The bulk method overlaps all
/// chunks of the collective except the first.
pub fn exposed(layout: &ParallelConfig, transfer: f64, product: f64) -> f64 {
    let Some(method) = layout.tp_comm_overlap else {
        return transfer;
    };
    let given = layout.tp_comm_overlap_num_splits;
    let (chunks, first) = match method {
        TpCommOverlap::Ring => {
            let splits = given.unwrap_or(FEWEST.div_ceil(layout.tensor));
            ((layout.tensor * splits) as f64, 0.0)
        }
        TpCommOverlap::Bulk => {
            let splits = given.unwrap_or(FEWEST) as f64;
            (splits, transfer / splits)
        }
    };
    let free = product * (chunks - 1.0) / chunks;
    first + (transfer - first - free).max(0.0)
}

/// Returns the error message for FP8 layers, which do not support collectives that are split into chunks.
pub fn refuses_fp8(method: TpCommOverlap) -> String {
    format!(
        "tp_comm_overlap = {method} conflicts with FP8 layers, which quantise all tokens of a sequence together: \
         remove tp_comm_overlap, or do not compute this layer in FP8"
    )
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn more_chunks_are_chosen_where_more_is_sent() {
        let of = |tokens, bytes| num_splits(TpCommOverlap::Bulk, None, 8, tokens, bytes).unwrap();
        // Llama 3 8B, 70B and 405B on 8 ranks, 8192 tokens, bf16.
        let sent = |hidden: usize| (7 * 1024 * hidden * 2) as f64;
        assert_eq!([4096, 8192, 16384].map(|h| of(1024, sent(h))), [4, 4, 8]);
        assert_eq!(of(1024, 1e9), 16);
        assert_eq!([of(15, 0.0), of(9, 0.0), of(6, 0.0)], [5, 9, 6]);
        assert_eq!([of(3, 0.0), of(2, 0.0), of(34, 0.0)], [3, 2, 2]);
    }

    #[test]
    fn a_ring_has_at_least_four_chunks_where_it_can() {
        let of = |ranks, tokens| num_splits(TpCommOverlap::Ring, None, ranks, tokens, 1e9).unwrap();
        assert_eq!([of(2, 8), of(3, 8), of(4, 8), of(8, 8)], [2, 2, 1, 1]);
        assert_eq!([of(2, 9), of(2, 1), of(2, 5)], [3, 1, 1]);
        assert_eq!(num_splits(TpCommOverlap::Ring, Some(5), 2, 10, 0.0), Ok(5));
    }

    #[test]
    fn what_would_fit_is_said() {
        let error = |method, given, tokens| {
            let error = num_splits(method, given, 2, tokens, 0.0).unwrap_err();
            error.to_string()
        };
        assert_snapshot!(
            error(TpCommOverlap::Bulk, Some(5), 12),
            @"tp_comm_overlap = bulk cannot make 5 equal chunks of the 12 tokens of a sequence on each tensor rank: \
              expected tp_comm_overlap_num_splits of 2, 3, 4, 6, 12, or tp_comm_overlap = ring, or sequences with a \
              multiple of 5 tokens on each tensor rank"
        );
        assert_snapshot!(
            error(TpCommOverlap::Bulk, None, 1),
            @"tp_comm_overlap = bulk cannot make 2 to 16 equal chunks of the 1 tokens of a sequence on each tensor \
              rank: expected tp_comm_overlap = ring, or sequences with a multiple of 2 tokens on each tensor rank"
        );
        assert_snapshot!(
            error(TpCommOverlap::Ring, Some(2), 3),
            @"tp_comm_overlap = ring cannot make 2 equal chunks of the 3 tokens of a sequence on each tensor rank: \
              expected tp_comm_overlap_num_splits of 1, 3, or sequences with a multiple of 2 tokens on each tensor rank"
        );
    }

    #[test]
    fn a_ring_hides_all_and_chunks_all_but_one() {
        let layout = ParallelConfig::new()
            .with_tensor(4)
            .with_sequence_parallel(true);
        assert_eq!(exposed(&layout, 1.0, 10.0), 1.0);
        let ring = layout.clone().with_tp_comm_overlap(TpCommOverlap::Ring);
        assert_eq!(exposed(&ring, 3.0, 4.0), 0.0);
        assert_eq!(exposed(&ring, 4.0, 4.0), 1.0);
        let bulk = layout
            .with_tp_comm_overlap(TpCommOverlap::Bulk)
            .with_tp_comm_overlap_num_splits(8);
        assert_eq!(exposed(&bulk, 1.0, 1.0), 0.125);
        assert_eq!(exposed(&bulk, 2.0, 0.0), 2.0);
    }
}
