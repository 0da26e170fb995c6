//! The table that `verify` prints.

use std::fmt;

use super::{Comparison, Difference, Layout, Options};

/// The comparisons of all layouts.
#[derive(Clone, Debug)]
pub struct Report {
    rows: Vec<(Layout, Comparison)>,
    tolerance: f64,
    steps: usize,
}

impl Report {
    pub(super) fn new(rows: Vec<(Layout, Comparison)>, options: &Options) -> Self {
        Self {
            rows,
            tolerance: options.tolerance,
            steps: options.steps,
        }
    }

    /// The layouts with their comparisons.
    pub fn rows(&self) -> &[(Layout, Comparison)] {
        &self.rows
    }

    /// Whether every layout passes.
    pub fn passes(&self) -> bool {
        self.rows
            .iter()
            .all(|(_, comparison)| comparison.passes(self.tolerance))
    }

    fn cells(&self, layout: &Layout, comparison: &Comparison) -> [String; 8] {
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
            comparison.passes(self.tolerance),
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
            number(&comparison.input_gradient),
            format!("{} {worst}", number(&comparison.gradients))
                .trim_end()
                .to_string(),
            number(&comparison.gradient_norm),
            number(&comparison.final_weights),
            verdict,
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after = format!("after {} steps", self.steps);
        let header = [
            "layout",
            "initial weights",
            "loss",
            "input grad",
            "parameter grad (worst)",
            "grad norm",
            &after,
            "verdict",
        ]
        .map(str::to_string);
        let rows = self
            .rows
            .iter()
            .map(|(layout, comparison)| self.cells(layout, comparison));
        let rows: Vec<[String; 8]> = std::iter::once(header).chain(rows).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        for row in &rows {
            let cells = row.iter().enumerate();
            let line: Vec<_> = cells
                .map(|(column, cell)| format!("{cell:<0$}", width(column)))
                .collect();
            writeln!(f, "{}", line.join("  ").trim_end())?;
        }
        write!(
            f,
            "largest relative difference to one rank; {:e} passes",
            self.tolerance
        )
    }
}
