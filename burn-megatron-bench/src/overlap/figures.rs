//! The results of a case.

use std::fmt::{self, Display};
use std::ops::Range;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_comm_testing::{Transfer, hidden_share};
use serde::Serialize;

use super::case::OverlapCase;
use crate::links::LinkSpeed;
use crate::report::{Column, fixed};
use crate::timeline::{self, EventKind, RankTimeline, TimelineEvent};
use burn_megatron_cli::internal::median;

/// Collectives with fewer bytes are control messages, such as a token count or a norm. The rank needs their result
/// immediately.
const MAX_CONTROL_BYTES: u64 = 1024;

/// The median of a share over ranks and steps, with its spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HiddenShare {
    pub median: f64,
    pub lowest: f64,
    pub highest: f64,
}

/// A row of the table: medians over ranks and steps. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OverlapRow {
    pub zero_stage: ZeroStage,
    pub overlap: bool,
    /// The bandwidth of the link.
    pub bytes_per_second: f64,
    pub step_seconds: f64,
    /// The time of the backward without the time for which the rank waits.
    pub backward_seconds: f64,
    /// The time for which the link was busy with the transfers of a step.
    pub transfer_seconds: f64,
    /// The time for which a rank was blocked by the transfers.
    pub blocked_seconds: f64,
    /// The share of the transfer time that overlaps with computation: `1 - blocked / transfers`, at least 0.
    pub hidden: HiddenShare,
    /// The share of the transfer time during which the rank computed.
    pub hidden_in_trace: HiddenShare,
    /// The largest share that could be hidden.
    pub ideal: f64,
}

impl HiddenShare {
    fn of(shares: &[f64]) -> Self {
        Self {
            median: median(shares),
            lowest: shares.iter().copied().fold(f64::INFINITY, f64::min),
            highest: shares.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

impl OverlapRow {
    /// Computes the results of the measured steps.
    pub fn new(
        case: OverlapCase,
        link: LinkSpeed,
        records: &[RankTimeline],
        counted: Range<usize>,
    ) -> Self {
        let over = |figure: &dyn Fn(&RankTimeline, usize) -> f64| -> Vec<f64> {
            let of = |record| counted.clone().map(move |step| figure(record, step));
            records.iter().flat_map(of).collect()
        };
        let sum = |of: fn(&Transfer) -> f64| {
            median(&over(&|record, step| {
                record.transfers[step].iter().map(of).sum()
            }))
        };
        Self {
            zero_stage: case.stage,
            overlap: case.overlap,
            bytes_per_second: link.bytes_per_second,
            step_seconds: median(&over(&|record, step| {
                let (start, end) = record.steps[step];
                end - start
            })),
            backward_seconds: median(&over(&|record, step| computing(record, step, is_backward))),
            transfer_seconds: sum(|transfer| transfer.duration().as_secs_f64()),
            blocked_seconds: sum(|transfer| transfer.waited.as_secs_f64()),
            hidden: HiddenShare::of(&over(&|record, step| hidden_share(&record.transfers[step]))),
            hidden_in_trace: HiddenShare::of(&over(&|record, step| {
                timeline::hidden_share(&record.events, step)
            })),
            ideal: median(&over(&|record, step| {
                let backward = computing(record, step, is_backward);
                let others = computing(record, step, |phase| !is_backward(phase));
                ideal(case, &record.transfers[step], backward, others)
            })),
        }
    }
}

/// Columns that do not fit are left out: first the share in the trace, then the backward.
pub const COLUMNS: &[Column<OverlapRow>] = &[
    Column::new("stage", -7, |row| format!("ZeRO-{}", row.zero_stage)),
    Column::new("overlap", -8, |row| {
        if row.overlap { "on" } else { "off" }.into()
    }),
    Column::new("MB/s", 6, |row| fixed(row.bytes_per_second / 1e6, 1)),
    Column::new("step s", 7, |row| fixed(row.step_seconds, 2)),
    Column::optional(2, "backward s", 11, |row| fixed(row.backward_seconds, 2)),
    Column::new("link s", 7, |row| fixed(row.transfer_seconds, 2)),
    Column::new("blocked s", 10, |row| fixed(row.blocked_seconds, 2)),
    Column::new("hidden", -18, |row| row.hidden.to_string()),
    Column::optional(1, "in the trace", -18, |row| {
        row.hidden_in_trace.to_string()
    }),
    Column::new("ideal", 5, |row| format!("{:.0} %", 100.0 * row.ideal)),
];

impl Display for HiddenShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, lowest, highest] =
            [self.median, self.lowest, self.highest].map(|share| 100.0 * share);
        write!(f, "{median:>3.0} % ({lowest:.0} - {highest:.0})")
    }
}

/// Returns whether a phase is the backward.
pub fn is_backward(phase: &str) -> bool {
    phase == "backward"
}

/// Returns the seconds of computation, without waits, in the phases of a step whose names `is` selects.
pub fn computing(record: &RankTimeline, step: usize, is: impl Fn(&str) -> bool) -> f64 {
    let of = |kind| {
        let events = record.events.iter();
        events.filter(move |event| event.kind == kind)
    };
    let blocked = |phase: &TimelineEvent| -> f64 {
        let waits = of(EventKind::Wait).map(|wait| wait.within(phase.start, phase.end));
        waits.sum()
    };
    let phases = of(EventKind::Compute).filter(|phase| phase.step == step && is(&phase.name));
    phases.map(|phase| phase.seconds() - blocked(phase)).sum()
}

/// Returns the share of the transfers of a step that a perfect schedule hides behind computation. The backward computes
/// for `backward` seconds, and the other phases compute for `others` seconds.
///
/// The assumptions are:
///
/// - The gradients of a bucket are sent while the gradients of the next bucket are computed. All buckets except the
///   last one can be hidden. They overlap with the backward, except while the first bucket is filled.
/// - Updated parameters are gathered while the optimizer updates the rest and the next forward runs. All of them can be
///   hidden.
/// - With ZeRO-3, parameters are gathered in the forward and again in the backward. The rank waits for the first block
///   of the forward.
/// - Control messages are never hidden, and no more time is hidden than was computed.
pub fn ideal(case: OverlapCase, transfers: &[Transfer], backward: f64, others: f64) -> f64 {
    let times = |parameters: bool| -> Vec<f64> {
        let is = |transfer: &&Transfer| {
            transfer.bytes >= MAX_CONTROL_BYTES && (transfer.op == "all_gather") == parameters
        };
        let seconds = |transfer: &Transfer| transfer.duration().as_secs_f64();
        transfers.iter().filter(is).map(seconds).collect()
    };
    let (gradients, parameters) = (times(false), times(true));
    let all = transfers
        .iter()
        .map(|transfer| transfer.duration().as_secs_f64());
    let total: f64 = all.sum();
    let all_but = |times: &[f64], one: Option<&f64>| -> f64 {
        times.iter().sum::<f64>() - one.copied().unwrap_or(0.0)
    };
    let of_gradients = match (case.overlap, gradients.len()) {
        (false, _) | (true, 0) => 0.0,
        (true, buckets) => {
            let free = backward * (buckets - 1) as f64 / buckets as f64;
            all_but(&gradients, gradients.last()).min(free)
        }
    };
    let of_parameters = match (case.stage, case.overlap) {
        (ZeroStage::Parameters, _) => {
            all_but(&parameters, parameters.first()).min(backward + others - of_gradients)
        }
        (_, true) => all_but(&parameters, None).min(others),
        (_, false) => 0.0,
    };
    if total > 0.0 {
        (of_gradients + of_parameters) / total
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::report::row_line;

    fn transfer(op: &'static str, bytes: u64, seconds: u64) -> Transfer {
        Transfer {
            op,
            group: "data".into(),
            bytes,
            between: 0,
            asked: Duration::ZERO,
            started: Duration::ZERO,
            done: Duration::from_secs(seconds),
            begin_wait: None,
            waited: Duration::ZERO,
        }
    }

    fn case(stage: ZeroStage, overlap: bool) -> OverlapCase {
        OverlapCase { stage, overlap }
    }

    #[test]
    fn the_last_gradients_and_agreements_cannot_be_hidden() {
        let all = [
            transfer("all_reduce", 5000, 6),
            transfer("all_reduce", 4000, 3),
            transfer("all_gather", 24, 1),
        ];
        let replicated = |overlap| case(ZeroStage::Replicated, overlap);
        assert_eq!(ideal(replicated(true), &all, 100.0, 0.0), 0.6);
        assert_eq!(ideal(replicated(false), &all, 100.0, 0.0), 0.0);
        // The second half of the backward takes 2 s. Other phases do not count.
        assert_eq!(ideal(replicated(true), &all, 4.0, 50.0), 0.2);
        assert_eq!(ideal(replicated(true), &[], 2.0, 0.0), 1.0);
    }

    #[test]
    fn parameters_hide_behind_the_optimizer_and_the_forward() {
        let all = [
            transfer("reduce_scatter", 5000, 4),
            transfer("reduce_scatter", 5000, 2),
            transfer("all_gather", 5000, 3),
            transfer("all_gather", 5000, 1),
        ];
        assert_eq!(
            ideal(case(ZeroStage::Optimizer, true), &all, 100.0, 50.0),
            0.8
        );
        assert_eq!(
            ideal(case(ZeroStage::Optimizer, true), &all, 100.0, 2.0),
            0.6
        );
        assert_eq!(
            ideal(case(ZeroStage::Gradients, false), &all, 100.0, 50.0),
            0.0
        );
        // With full sharding, the rank waits for the first block.
        assert_eq!(
            ideal(case(ZeroStage::Parameters, true), &all, 100.0, 50.0),
            0.5
        );
        assert_eq!(
            ideal(case(ZeroStage::Parameters, false), &all, 100.0, 50.0),
            0.1
        );
    }

    #[test]
    fn a_row_shows_medians_and_spreads() {
        let share = HiddenShare::of(&[0.5, 0.9, 0.8]);
        assert_eq!(share.to_string(), " 80 % (50 - 90)");
        let row = OverlapRow {
            zero_stage: ZeroStage::Optimizer,
            overlap: true,
            bytes_per_second: 75e6,
            step_seconds: 1.5,
            backward_seconds: 0.75,
            transfer_seconds: 0.5,
            blocked_seconds: 0.1,
            hidden: share,
            hidden_in_trace: share,
            ideal: 0.95,
        };
        let line = row_line(COLUMNS, &row);
        let cells: Vec<_> = line.split_whitespace().collect();
        let expected = "ZeRO-1 on 75.0 1.50 0.75 0.50 0.10 80 % (50 - 90) 80 % (50 - 90) 95 %";
        assert_eq!(cells.join(" "), expected);
    }
}
