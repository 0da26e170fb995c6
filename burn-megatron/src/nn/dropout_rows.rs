//! Rows of a dropout mask that are not evenly spaced.

/// Evenly spaced rows: the first draws of adjacent rows have a constant distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowRun {
    /// The index of the first random number of the first row.
    pub first: u64,
    /// The distance between the first random numbers of adjacent rows. The distance is 1 for a single row.
    pub step: u64,
    /// The number of rows.
    pub count: usize,
}

/// Groups rows into runs, given the first draw of each row. A row with `None` may use any draws and continues the
/// current run.
pub(super) fn row_runs(rows: &[Option<u64>]) -> Vec<RowRun> {
    let mut runs: Vec<RowRun> = vec![];
    for &row in rows {
        let row = match (row, runs.last_mut()) {
            (Some(row), _) => row,
            (None, None) => 0,
            (None, Some(run)) => {
                run.count += 1;
                continue;
            }
        };
        match runs.last_mut() {
            Some(run) if run.count == 1 && row > run.first => {
                run.step = row - run.first;
                run.count = 2;
            }
            Some(run) if row == run.first + run.count as u64 * run.step => run.count += 1,
            _ => runs.push(RowRun {
                first: row,
                step: 1,
                count: 1,
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_all_rows() {
        let run = |first, step, count| RowRun { first, step, count };
        let runs = |rows: &[u64]| row_runs(&rows.iter().copied().map(Some).collect::<Vec<_>>());
        assert_eq!(runs(&[0, 1, 2, 9, 10, 11]), [run(0, 1, 3), run(9, 1, 3)]);
        assert_eq!(runs(&[1, 4, 7, 10]), [run(1, 3, 4)]);
        assert_eq!(runs(&[5]), [run(5, 1, 1)]);
        assert_eq!(runs(&[]), []);
        for rows in [
            vec![0, 15, 16, 31],
            vec![0, 3, 4, 7, 8, 11, 40],
            vec![5, 9, 2, 2, 3],
        ] {
            let all = runs(&rows).into_iter();
            let all =
                all.flat_map(|run| (0..run.count as u64).map(move |i| run.first + i * run.step));
            assert_eq!(all.collect::<Vec<_>>(), rows);
        }
    }

    #[test]
    fn rows_with_any_draws_continue_a_run() {
        let run = |first, step, count| RowRun { first, step, count };
        let rows = [Some(4), Some(6), None, None, Some(12), Some(8), None];
        assert_eq!(row_runs(&rows), [run(4, 2, 5), run(8, 1, 2)]);
        assert_eq!(row_runs(&[None, Some(3)]), [run(0, 3, 2)]);
    }
}
