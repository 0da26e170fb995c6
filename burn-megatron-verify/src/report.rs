//! The report of [`verify`](crate::verify), which can be formatted as a table.

use std::fmt;

use super::{Comparison, Difference, Layout, Rounding, VerifyOptions};
use burn_megatron::text_table::Table;

/// The columns of the table.
const COLUMNS: usize = 10;

/// The report of [`verify`](crate::verify): the comparison of each layout with one rank.
#[derive(Clone, Debug)]
pub struct VerifyReport {
    rows: Vec<(Layout, Comparison)>,
    not_run: Vec<(Layout, String)>,
    /// For each row, the bound if the layout rounds other values than a run on one rank does.
    roundings: Vec<Option<Rounding>>,
    tolerance: f64,
    steps: usize,
}

impl VerifyReport {
    pub(super) fn new(
        rows: Vec<(Layout, Comparison, Option<Rounding>)>,
        not_run: Vec<(Layout, String)>,
        options: &VerifyOptions,
    ) -> Self {
        let split = |(layout, comparison, rounding)| ((layout, comparison), rounding);
        let (rows, roundings) = rows.into_iter().map(split).unzip();
        Self {
            rows,
            not_run,
            roundings,
            tolerance: options.tolerance,
            steps: options.steps,
        }
    }

    /// Returns the layouts that ran, each with its comparison.
    pub fn rows(&self) -> &[(Layout, Comparison)] {
        &self.rows
    }

    /// Returns the layouts that could not run, each with the error message.
    pub fn not_run(&self) -> &[(Layout, String)] {
        &self.not_run
    }

    /// Returns whether every layout ran and passed.
    pub fn passes(&self) -> bool {
        self.not_run.is_empty() && self.failing().next().is_none()
    }

    /// Returns the layouts that ran and failed.
    pub fn failing(&self) -> impl Iterator<Item = &Layout> {
        let rows = self.rows.iter().zip(self.bounds());
        let failing = rows.filter(|((_, comparison), bound)| !comparison.passes(*bound));
        failing.map(|((layout, _), _)| layout)
    }

    /// Returns the largest relative difference that passes, for each row of the report.
    pub fn bounds(&self) -> impl Iterator<Item = f64> {
        let bound = |rounding: &Option<Rounding>| {
            let rounding = rounding.as_ref();
            rounding.map_or(self.tolerance, |rounding| {
                rounding.bound.max(self.tolerance)
            })
        };
        self.roundings.iter().map(bound)
    }

    /// Returns the bounds and their reasons.
    fn reasons(&self) -> Vec<String> {
        let reason = |rounding: &Option<Rounding>| match rounding {
            Some(rounding) if rounding.bound > self.tolerance => {
                format!("{:.1e} ({})", rounding.bound, rounding.why)
            }
            _ => format!("{:.1e} (sums in another order)", self.tolerance),
        };
        let mut reasons: Vec<String> = vec![];
        for reason in self.roundings.iter().map(reason) {
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
        reasons
    }

    fn cells(&self, layout: &Layout, comparison: &Comparison, bound: f64) -> [String; COLUMNS] {
        let number = |difference: &Difference| match difference.relative {
            0.0 => "0".to_string(),
            relative => format!("{relative:.1e}"),
        };
        let worst = comparison.gradients.path.clone().unwrap_or_default();
        let weights = match comparison.unequal_weights.first() {
            None => "bit-equal".to_string(),
            Some(path) => format!("differ: {path}"),
        };
        let verdict = match (
            comparison.passes(bound),
            comparison.unequal_replicas.first(),
        ) {
            (true, _) => "pass".to_string(),
            (false, None) => "FAIL".to_string(),
            (false, Some(path)) => format!("FAIL (replicas of {path} differ)"),
        };
        [
            layout.to_string(),
            weights,
            number(&comparison.loss),
            number(&comparison.gradients),
            worst,
            number(&comparison.last_gradients),
            number(&comparison.gradient_norm),
            number(&comparison.final_weights),
            format!("{bound:.1e}"),
            verdict,
        ]
    }
}

impl VerifyReport {
    /// Formats the report as a table with lines of at most `width` characters, or without a limit if `width` is `None`.
    /// If the table does not fit, columns are left out in this order: the bounds, the names of the worst gradients, the
    /// last gradients, the gradient norms, and the weights after the last step.
    pub fn fit(&self, width: Option<usize>) -> String {
        let mut text = "largest passing relative difference from one rank:\n".to_string();
        for reason in self.reasons() {
            text += &format!("  {reason}\n");
        }
        let plural = if self.steps == 1 { "" } else { "s" };
        let after = format!("after {} step{plural}", self.steps);
        let header = [
            "layout",
            "initial weights",
            "loss",
            "parameter grad",
            "worst",
            "last grad",
            "grad norm",
            &after,
            "bound",
            "verdict",
        ]
        .map(str::to_string);
        let rows = self.rows.iter().zip(self.bounds());
        let rows = rows.map(|((layout, comparison), bound)| self.cells(layout, comparison, bound));
        let rows = std::iter::once(header).chain(rows);
        let table = Table::new(rows.map(|row| row.to_vec()))
            .with_left(0..COLUMNS)
            .with_optional([8, 4, 5, 6, 7]);
        let not_run = self.not_run.iter();
        let not_run = not_run.map(|(layout, reason)| format!("\nnot run: {layout}: {reason}"));
        text + &table.fit(width) + &not_run.collect::<String>()
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.fit(None))
    }
}
