//! Collectives of rows whose numbers differ between ranks.

use burn::tensor::{DType, Tensor};

use super::super::*;
use super::{autodiff, both_ways, dot, integers, over, own, tensor};

/// Returns the number of rows from rank to rank. The numbers are uneven, and some pairs and ranks send nothing.
fn counts(from: usize, to: usize) -> usize {
    match (from, to) {
        (1, 1) | (2, 0) => 0,
        (3, _) => 0,
        _ => 1 + (2 * from + to) % 3,
    }
}

/// Returns the rows that each rank receives when `from(rank)` has `take(rank, to)` rows for `to`.
fn exchanged(
    rank: usize,
    ranks: usize,
    width: usize,
    from: impl Fn(usize) -> Vec<i64>,
    take: impl Fn(usize, usize) -> usize,
) -> Vec<i64> {
    let stretch = |source: usize| {
        let before: usize = (0..rank).map(|to| take(source, to)).sum();
        from(source)[before * width..(before + take(source, rank)) * width].to_vec()
    };
    (0..ranks).flat_map(stretch).collect()
}

fn check<const D: usize>(comm: &Comm, dtype: DType) -> (i64, i64) {
    let (n, rank) = (comm.size(), comm.rank());
    let width: usize = [3, 2][..D - 1].iter().product();
    let sent = |rank| -> usize { (0..n).map(|to| counts(rank, to)).sum() };
    let received = |rank| -> usize { (0..n).map(|from| counts(from, rank)).sum() };
    let shape = |rows| {
        let mut shape = [3; D];
        shape[0] = rows;
        shape[D - 1] = if D == 3 { 2 } else { shape[D - 1] };
        shape
    };
    let input = |rank| own(rank, sent(rank) * width);
    let gradient = |rank| {
        own(rank, received(rank) * width)
            .iter()
            .map(|x| x + 1)
            .collect()
    };

    let send = (0..n).map(|to| counts(rank, to)).collect::<Vec<_>>();
    let receive = (0..n).map(|from| counts(from, rank)).collect::<Vec<_>>();
    let g: Vec<i64> = gradient(rank);
    let (y, dx) = both_ways::<D>(
        |x| all_to_all(x, send.clone(), receive.clone(), comm),
        tensor(&input(rank), shape(sent(rank)), &autodiff(), dtype),
        |shape| tensor(&g, shape, &autodiff(), dtype),
    );
    assert_eq!(y.dims(), shape(received(rank)));
    let (y, dx) = (integers(y), integers(dx));
    assert_eq!(y, exchanged(rank, n, width, input, counts));
    assert_eq!(
        dx,
        exchanged(rank, n, width, gradient, |from, to| counts(to, from))
    );
    (dot(&g, &y), dot(&dx, &input(rank)))
}

#[test]
fn rows_arrive_in_rank_order_and_their_gradients_go_home() {
    for ranks in 2..=4 {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let sides = over(ranks, |comm| {
                [
                    check::<1>(&comm, dtype),
                    check::<2>(&comm, dtype),
                    check::<3>(&comm, dtype),
                ]
            });
            for d in 0..3 {
                let left: i64 = sides.iter().map(|rank| rank[d].0).sum();
                let right: i64 = sides.iter().map(|rank| rank[d].1).sum();
                assert_eq!(left, right, "{} dims over {ranks} ranks", d + 1);
            }
        }
    }
}

#[test]
fn one_rank_keeps_its_rows() {
    over(1, |comm| {
        let x = tensor(&own(0, 6), [2, 3], &autodiff(), DType::F32).require_grad();
        let y: Tensor<2> = all_to_all(x, vec![2], vec![2], &comm);
        assert!(y.is_require_grad());
    });
}

/// The gather of all ranks' rows and their sum are transposes of each other, with ranks without rows.
#[test]
fn uneven_rows_are_gathered_and_their_gradients_summed() {
    const ROWS: [usize; 4] = [2, 0, 3, 1];
    for ranks in 2..=4 {
        over(ranks, |comm| {
            let (rows, rank) = (&ROWS[..ranks], comm.rank());
            let total: usize = rows.iter().sum();
            let whole = |rank| own(rank, 2 * total);
            let all: Vec<i64> = (0..ranks)
                .flat_map(|rank| own(rank, 2 * rows[rank]))
                .collect();
            let sum = (0..ranks).map(whole).reduce(|sum, part| {
                let pairs = sum.iter().zip(&part);
                pairs.map(|(a, b)| a + b).collect()
            });
            let before = 2 * rows[..rank].iter().sum::<usize>();
            let own_sum = sum.unwrap()[before..before + 2 * rows[rank]].to_vec();

            let x = tensor(
                &own(rank, 2 * rows[rank]),
                [rows[rank], 2],
                &autodiff(),
                DType::F64,
            );
            let g = |shape| tensor(&whole(rank), shape, &autodiff(), DType::F64);
            let (y, dx) = both_ways::<2>(|x| gather_rows(x, rows, &comm), x.clone(), g);
            assert_eq!((integers(y), integers(dx)), (all.clone(), own_sum.clone()));

            let partial = tensor(&whole(rank), [total, 2], &autodiff(), DType::F64);
            let g = |_| x.clone();
            let sums = |x| reduce_scatter_rows(x, rows, &comm);
            let (y, dx) = both_ways::<2>(sums, partial, g);
            assert_eq!((integers(y), integers(dx)), (own_sum, all));
        });
    }
}
