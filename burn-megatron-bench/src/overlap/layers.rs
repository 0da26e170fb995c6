//! The figures of layers whose ranks exchange activations over a slow link.

use std::fmt::Display;

use burn_megatron::comm::Rank;
use burn_megatron_cli::internal::Error;
use serde::Serialize;

use super::args::OverlapArgs;
use crate::links::{LinkSpeed, LinkStep, mean, traffic};
use crate::report::Column;

/// A line of the table: means over the ranks of the medians over the steps, times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayersRow {
    /// The ranks of the axis.
    pub ranks: usize,
    pub overlap: String,
    /// Whether the times are those of a virtual clock.
    pub counted: bool,
    /// Bytes that a rank sends in a step.
    pub bytes: f64,
    pub calls: f64,
    pub step_seconds: f64,
    pub transfer_seconds: f64,
    /// In which a rank was blocked.
    pub blocked_seconds: f64,
    /// In which a rank waited for others in addition.
    pub late_seconds: f64,
    /// 1 - blocked / transfers, at least 0.
    pub hidden: f64,
}

pub const COLUMNS: &[Column<LayersRow>] = &[
    Column::new("ranks", -6, |row| row.ranks.to_string()),
    Column::new("overlap", -8, |row| row.overlap.clone()),
    Column::new("clock", -7, |row| {
        if row.counted { "counted" } else { "real" }.into()
    }),
    Column::optional(1, "calls", 6, |row| format!("{:.0}", row.calls)),
    Column::new("MB sent", 9, |row| format!("{:.2}", row.bytes / 1e6)),
    Column::new("step", 7, |row| format!("{:.3}", row.step_seconds)),
    Column::new("link", 7, |row| format!("{:.3}", row.transfer_seconds)),
    Column::new("blocked", 9, |row| format!("{:.3}", row.blocked_seconds)),
    Column::new("late", 7, |row| format!("{:.3}", row.late_seconds)),
    Column::new("hidden", 6, |row| format!("{:.0} %", 100.0 * row.hidden)),
];

/// The ranks of an axis, and what blocks them.
pub struct LayersRun<'a> {
    pub args: &'a OverlapArgs,
    pub ranks: usize,
    pub counted: bool,
    /// The seconds in which a rank was blocked in a step.
    pub blocked: fn(&LinkStep) -> f64,
}

impl LayersRun<'_> {
    /// Runs `plain` without a link, then all cases over a link on which the transfers of `plain` take --share of its time.
    /// Returns the rows, which are the same on each rank. Collective: call on all ranks.
    pub fn rows<C: Copy + Display>(
        &self,
        rank: &Rank,
        plain: C,
        cases: &[C],
        steps: impl Fn(C, LinkSpeed) -> Result<Vec<LinkStep>, Error>,
    ) -> Result<Vec<LayersRow>, Error> {
        let alone = steps(plain, LinkSpeed::INFINITE)?;
        let link = traffic(rank, &alone)?.link(self.args.share, self.args.latency())?;
        let row = |case: &C| self.row(rank, case.to_string(), &steps(*case, link)?);
        cases.iter().map(row).collect()
    }

    fn row(&self, rank: &Rank, overlap: String, steps: &[LinkStep]) -> Result<LayersRow, Error> {
        let mean = |of: &dyn Fn(&LinkStep) -> f64| mean(rank, steps, of);
        let blocked = self.blocked;
        Ok(LayersRow {
            ranks: self.ranks,
            overlap,
            counted: self.counted,
            bytes: mean(&LinkStep::bytes)?,
            calls: mean(&LinkStep::calls)?,
            step_seconds: mean(&|step| step.seconds)?,
            transfer_seconds: mean(&LinkStep::link)?,
            blocked_seconds: mean(&blocked)?,
            late_seconds: mean(&|step| step.waited() - blocked(step))?,
            hidden: mean(&|step| match step.link() {
                0.0 => 1.0,
                link => (1.0 - blocked(step) / link).max(0.0),
            })?,
        })
    }
}
