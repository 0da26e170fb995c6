//! Rows of a dropout mask that are not evenly spaced.

/// Rows with a constant distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowRun {
    /// The number of the first row.
    pub first: usize,
    /// The distance of one row to the next; 1 for a single row.
    pub step: usize,
    /// How many rows.
    pub count: usize,
}

/// Ascending rows as runs.
pub(super) fn row_runs(rows: &[usize]) -> Vec<RowRun> {
    let mut runs: Vec<RowRun> = vec![];
    for &row in rows {
        match runs.last_mut() {
            Some(run) if run.count == 1 && row > run.first => {
                run.step = row - run.first;
                run.count = 2;
            }
            Some(run) if row == run.first + run.count * run.step => run.count += 1,
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
        assert_eq!(
            row_runs(&[0, 1, 2, 9, 10, 11]),
            [run(0, 1, 3), run(9, 1, 3)]
        );
        assert_eq!(row_runs(&[1, 4, 7, 10]), [run(1, 3, 4)]);
        assert_eq!(row_runs(&[5]), [run(5, 1, 1)]);
        assert_eq!(row_runs(&[]), []);
        for rows in [vec![0, 15, 16, 31], vec![0, 3, 4, 7, 8, 11, 40]] {
            let all = row_runs(&rows).into_iter();
            let all = all.flat_map(|run| (0..run.count).map(move |i| run.first + i * run.step));
            assert_eq!(all.collect::<Vec<_>>(), rows);
        }
    }
}
