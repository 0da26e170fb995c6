//! The results of a benchmark: a table that is printed row by row, and a JSON file.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use burn_megatron::atomic_file::replace_file;
use burn_megatron_cli::internal::{Error, count, terminal_width, wrapped};
use serde::Serialize;
use serde_json::Value;

/// A column of a table.
pub struct Column<R> {
    title: &'static str,
    /// The width of a cell in characters. A negative width means left-aligned.
    width: i32,
    /// The order in which optional columns are left out if the table does not fit. The lowest number is left out first.
    optional: Option<u8>,
    cell: fn(&R) -> String,
}

impl<R> Column<R> {
    /// Creates a column that is always shown.
    pub const fn new(title: &'static str, width: i32, cell: fn(&R) -> String) -> Self {
        Self {
            title,
            width,
            optional: None,
            cell,
        }
    }

    /// Creates a column that is left out if the table does not fit. Columns with a lower `order` are left out first.
    pub const fn optional(
        order: u8,
        title: &'static str,
        width: i32,
        cell: fn(&R) -> String,
    ) -> Self {
        Self {
            optional: Some(order),
            ..Self::new(title, width, cell)
        }
    }

    fn size(&self) -> usize {
        self.width.unsigned_abs() as usize
    }
}

/// Returns the columns that fit into a line of `most` characters.
fn fitting<R>(columns: &[Column<R>], most: Option<usize>) -> Vec<&Column<R>> {
    let mut shown: Vec<_> = columns.iter().collect();
    let length = |shown: &[&Column<R>]| shown.iter().map(|of| of.size() + 1).sum::<usize>();
    while most.is_some_and(|most| length(&shown) > most + 1) {
        let orders = shown.iter().filter_map(|column| column.optional);
        let Some(first) = orders.min() else { break };
        shown.retain(|column| column.optional != Some(first));
    }
    shown
}

fn line<R>(shown: &[&Column<R>], cell: impl Fn(&Column<R>) -> String) -> String {
    let cells = shown.iter().map(|column| {
        let (cell, size) = (cell(column), column.size());
        if column.width < 0 {
            format!("{cell:<size$}")
        } else {
            format!("{cell:>size$}")
        }
    });
    cells.collect::<Vec<_>>().join(" ").trim_end().to_string()
}

/// Returns the header of a table.
pub fn header<R>(columns: &[Column<R>]) -> String {
    line(&fitting(columns, terminal_width()), |column| {
        column.title.into()
    })
}

/// Returns the line of a row.
pub fn row_line<R>(columns: &[Column<R>], row: &R) -> String {
    line(&fitting(columns, terminal_width()), |column| {
        (column.cell)(row)
    })
}

/// Formats a number with a fixed number of decimals.
pub fn fixed(number: f64, decimals: usize) -> String {
    format!("{number:.decimals$}")
}

/// Formats a share in percent.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// The content of the JSON file.
#[derive(Debug, Serialize)]
pub struct Results<S, R> {
    #[serde(flatten)]
    pub settings: S,
    pub rows: Vec<R>,
    /// The rows that could not be measured, with the reasons.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<Value>,
}

/// The report of a running benchmark.
pub struct Report<S, R: 'static> {
    columns: &'static [Column<R>],
    json: Option<PathBuf>,
    pub results: Results<S, R>,
}

impl<S: Serialize, R: Serialize> Report<S, R> {
    /// Prints a description and the header of the table. `settings` are at the top level of the JSON file.
    pub fn begin(
        about: &str,
        columns: &'static [Column<R>],
        settings: S,
        json: &Option<PathBuf>,
    ) -> Self {
        println!("{}\n\n{}", wrapped(about), header(columns));
        Self {
            columns,
            json: json.clone(),
            results: Results {
                settings,
                rows: vec![],
                failed: vec![],
            },
        }
    }

    /// Prints a row. The JSON file is written after each row, since a later row may run out of memory.
    pub fn add(&mut self, row: R) -> Result<(), Error> {
        println!("{}", row_line(self.columns, &row));
        self.results.rows.push(row);
        self.write()
    }

    /// Adds the rows that `work` returns. An error or a panic is printed with `name` as its title, and the next rows
    /// still run. `failed` converts the reason to an entry of the JSON file.
    pub fn attempt(
        &mut self,
        name: &str,
        failed: impl FnOnce(String) -> Value,
        work: impl FnOnce() -> Result<Vec<R>, Error>,
    ) -> Result<(), Error> {
        match attempt(work) {
            Ok(rows) => rows.into_iter().try_for_each(|row| self.add(row)),
            Err(reason) => {
                println!("{name} failed: {reason}");
                self.results.failed.push(failed(reason));
                self.write()
            }
        }
    }

    fn write(&self) -> Result<(), Error> {
        match &self.json {
            Some(path) => write(path, &serde_json::to_vec_pretty(&self.results)?),
            None => Ok(()),
        }
    }

    /// Prints the legend.
    ///
    /// # Errors
    /// Returns an error if rows failed.
    pub fn finish(self, legend: &str) -> Result<(), Error> {
        if !legend.is_empty() {
            println!("\n{}", wrapped(legend));
        }
        if let Some(path) = &self.json {
            println!("written to {}", path.display());
        }
        match (self.results.failed.len(), self.results.rows.len()) {
            (0, _) => Ok(()),
            (failed, rows) => Err(format!(
                "{failed} of {} failed, see above",
                count(failed + rows, "row")
            )
            .into()),
        }
    }
}

/// Writes a file. An existing file is replaced atomically.
pub fn write(path: &Path, content: &[u8]) -> Result<(), Error> {
    replace_file(path, content)
        .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}

/// Returns a warning for the end of a description if the results may be wrong. Otherwise returns an empty string.
pub fn unchecked(is_unchecked: bool) -> &'static str {
    match is_unchecked {
        true => "\nUNCHECKED: results may be wrong, and times are host times",
        false => "",
    }
}

/// Runs work and returns an error or a panic as text, so that the benchmark continues.
fn attempt<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("panic: {}", text(&*panic))),
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column<u8>] = &[
        Column::new("name", -4, |_| "a".into()),
        Column::optional(1, "one", 3, |row| row.to_string()),
        Column::optional(2, "two", 5, |_| "23".into()),
    ];

    #[test]
    fn columns_for_which_there_is_no_room_are_left_out() {
        let fit = |most| line(&fitting(COLUMNS, most), |column| (column.cell)(&1));
        assert_eq!(fit(None), "a      1    23");
        assert_eq!(fit(Some(14)), "a      1    23");
        assert_eq!(fit(Some(13)), "a       23");
        assert_eq!(fit(Some(9)), "a");
    }

    #[test]
    fn a_row_that_fails_says_why_and_the_rows_after_it_run() {
        let mut report = Report::begin("about", COLUMNS, (), &None);
        let empty: Vec<u8> = vec![];
        for work in [0, 1, 2] {
            let work = || match work {
                0 => Err("no room".into()),
                1 => Ok(vec![empty[empty.len()]]),
                _ => Ok(vec![7]),
            };
            report.attempt("x", Value::from, work).unwrap();
        }
        let Results { rows, failed, .. } = &report.results;
        assert_eq!((&rows[..], &failed[0]), (&[7][..], &Value::from("no room")));
        let reason = failed[1].as_str().unwrap();
        assert!(reason.starts_with("panic: index out of bounds"), "{reason}");
        let error = report.finish("").unwrap_err().to_string();
        insta::assert_snapshot!(error, @"2 of 3 rows failed, see above");
    }
}
