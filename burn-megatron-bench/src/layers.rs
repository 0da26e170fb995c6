//! Benchmarks of layers in which ranks communicate activations. Steps run without a simulated link, and over a
//! simulated link on which the transfers take a given share of the time.

use std::fmt::Display;
use std::time::Duration;

use burn_megatron::comm::Rank;
use burn_megatron_cli::internal::Error;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::links::{LinkSpeed, LinkStep, Rounds, mean, traffic};
use crate::report::{Column, fixed, percent};

/// A row of the table: means over the ranks of the medians over the steps. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayersRow {
    pub ranks: usize,
    pub case: String,
    /// Whether the times come from a virtual clock.
    pub counted: bool,
    pub calls: f64,
    /// The number of bytes that a rank sends in a step. The next field is the number of these bytes that are sent to
    /// other nodes.
    pub bytes: f64,
    pub bytes_between_nodes: f64,
    /// The time of a step without a simulated link, in seconds.
    pub seconds: f64,
    /// The time of the first case divided by the time of this case.
    pub speed: f64,
    pub seconds_over_link: f64,
    pub transfer_seconds: f64,
    /// The time for which a rank was blocked by its transfers over the simulated link, in seconds.
    pub blocked_seconds: f64,
    /// The additional time for which a rank waited for other ranks, in seconds.
    pub late_seconds: f64,
    /// The share of the transfer time that overlaps with computation: `1 - blocked / transfers`, at least 0.
    pub hidden: f64,
}

pub const COLUMNS: &[Column<LayersRow>] = &[
    Column::new("ranks", 5, |row| row.ranks.to_string()),
    Column::new("case", -20, |row| row.case.clone()),
    Column::optional(2, "clock", -7, |row| clock(row.counted).into()),
    Column::optional(1, "calls", 6, |row| fixed(row.calls, 0)),
    Column::new("sent", 10, |row| bytes(row.bytes)),
    Column::optional(3, "to nodes", 10, |row| bytes(row.bytes_between_nodes)),
    Column::new("seconds", 8, |row| fixed(row.seconds, 3)),
    Column::new("speed", 6, |row| fixed(row.speed, 2)),
    Column::new("over link", 9, |row| fixed(row.seconds_over_link, 3)),
    Column::new("link", 7, |row| fixed(row.transfer_seconds, 3)),
    Column::new("blocked", 8, |row| fixed(row.blocked_seconds, 3)),
    Column::optional(4, "late", 7, |row| fixed(row.late_seconds, 3)),
    Column::new("hidden", 6, |row| percent(row.hidden)),
];

fn clock(counted: bool) -> &'static str {
    if counted { "counted" } else { "real" }
}

fn bytes(number: f64) -> String {
    HumanBytes(number as u64).to_string()
}

/// The meaning of the columns.
pub const LEGEND: &str = "sent: bytes that a rank sends in a step; to nodes: bytes sent to other nodes; seconds: \
    time of a step without the simulated link; speed: seconds of the first case divided by seconds of this case; \
    over link: time of a step over the simulated link; link: time of the transfers; blocked: time in which a rank \
    waited for transfers; late: time in which it waited for other ranks; hidden: 1 - blocked / link. A counted clock \
    advances only by the time of matrix multiplications and transfers";

/// A benchmark run of layers on a number of ranks.
pub struct LayersRun {
    pub ranks: usize,
    pub rounds: Rounds,
    /// The time of the transfers of the first case over the simulated link, as a fraction of the time of the first case
    /// without a simulated link.
    pub share: f64,
    pub latency: Duration,
    /// Returns the time for which a rank was blocked in a step, in seconds.
    pub blocked: fn(&LinkStep) -> f64,
}

impl LayersRun {
    /// Runs each case without a simulated link and over a simulated link. Returns the rows of the table, which are the
    /// same on each rank. Collective: call on all ranks.
    pub fn rows<C: Display>(
        &self,
        rank: &Rank,
        cases: &[C],
        steps: impl Fn(&C, LinkSpeed) -> Result<Vec<LinkStep>, Error>,
    ) -> Result<Vec<LayersRow>, Error> {
        let (mut rows, mut link) = (vec![], None);
        for case in cases {
            let alone = traffic(rank, &steps(case, LinkSpeed::INFINITE)?)?;
            let (first, link) = match link {
                Some(first) => first,
                None => *link.insert((alone.seconds, alone.link(self.share, self.latency)?)),
            };
            let over_link = steps(case, link)?;
            let row = self.row(rank, case, &over_link)?;
            rows.push(LayersRow {
                seconds: alone.seconds,
                speed: first / alone.seconds,
                ..row
            });
        }
        Ok(rows)
    }

    /// Returns the measurements over the simulated link.
    fn row(
        &self,
        rank: &Rank,
        case: &impl Display,
        steps: &[LinkStep],
    ) -> Result<LayersRow, Error> {
        let mean = |of: &dyn Fn(&LinkStep) -> f64| mean(rank, steps, of);
        let blocked = self.blocked;
        Ok(LayersRow {
            ranks: self.ranks,
            case: case.to_string(),
            counted: self.rounds.counted,
            calls: mean(&LinkStep::calls)?,
            bytes: mean(&LinkStep::bytes)?,
            bytes_between_nodes: mean(&LinkStep::bytes_between_nodes)?,
            seconds: 0.0,
            speed: 1.0,
            seconds_over_link: mean(&|step| step.seconds)?,
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
