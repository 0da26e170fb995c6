//! Writes timelines of a run in the Chrome trace format, which chrome://tracing and Perfetto display.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::schedule::{Action, Simulation, idle_fraction};

/// The kind of activity in a [`TraceEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceKind {
    /// A computation of the schedule. Time without a computation counts as bubble.
    Compute,
    /// An action of the schedule that is not a computation.
    Other,
    /// A communication call, from its start until its result is taken. Calls run concurrently with the actions.
    Call,
}

/// One event in the timeline of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// The rank.
    pub rank: usize,
    /// The name of the event, such as `F 2 5` or `all_gather of 4096 f32 over context`.
    pub name: String,
    /// The kind of activity.
    pub kind: TraceKind,
    /// The start time in seconds. Time 0 is the same for all ranks.
    pub start: f64,
    /// The end time in seconds. Time 0 is the same for all ranks.
    pub end: f64,
}

impl TraceEvent {
    /// Creates the event for an action of a schedule.
    pub fn action(rank: usize, action: &Action, start: f64, end: f64) -> Self {
        TraceEvent {
            rank,
            name: action.to_string(),
            kind: if action.kind.is_compute() {
                TraceKind::Compute
            } else {
                TraceKind::Other
            },
            start,
            end,
        }
    }
}

impl Simulation {
    /// Returns the simulated timelines of all ranks as events. The times of the simulation are interpreted as seconds.
    pub fn trace(&self) -> Vec<TraceEvent> {
        let of_rank = |rank| {
            self.timeline(rank)
                .iter()
                .map(move |span| TraceEvent::action(rank, &span.action, span.start, span.end))
        };
        (0..self.schedule().ranks()).flat_map(of_rank).collect()
    }
}

/// Returns the measured bubble of a run on `ranks` ranks: the fraction of the time in which the ranks do not compute,
/// from 0 to 1. The measured time begins with the first computation on any rank and ends with the last computation on
/// any rank.
///
/// The result can be compared with [`Simulation::bubble`]. Computations of one rank must not overlap. A rank without
/// computations counts as idle for the complete time. If no rank has a computation, the result is 0.
pub fn trace_bubble(ranks: usize, events: &[TraceEvent]) -> f64 {
    let computed = || {
        events
            .iter()
            .filter(|event| event.kind == TraceKind::Compute)
    };
    let first = computed()
        .map(|event| event.start)
        .fold(f64::INFINITY, f64::min);
    let last = computed()
        .map(|event| event.end)
        .fold(f64::NEG_INFINITY, f64::max);
    let busy: f64 = computed().map(|event| event.end - event.start).sum();
    // Without computations the time is negative, and the fraction is 0.
    idle_fraction(busy, ranks as f64 * (last - first))
}

/// Writes events in the Chrome trace format (JSON). Each rank has one row for its actions and additional rows for its
/// communication calls. Calls that overlap are in different rows.
///
/// # Errors
///
/// Returns the errors of the writer.
pub fn write_chrome_trace(events: &[TraceEvent], writer: impl Write) -> io::Result<()> {
    let rows = rows(events);
    let names = rows.iter().enumerate().map(|(tid, row)| Entry::Name {
        ph: "M",
        name: "thread_name",
        pid: 0,
        tid,
        args: Name {
            name: row.name.clone(),
        },
    });
    let spans = rows.iter().enumerate().flat_map(|(tid, row)| {
        row.events.iter().map(move |event| Entry::Span {
            ph: "X",
            name: &event.name,
            cat: event.kind,
            pid: 0,
            tid,
            ts: event.start * MICROSECONDS,
            dur: (event.end - event.start) * MICROSECONDS,
        })
    });
    let file = File {
        trace_events: names.chain(spans).collect(),
        display_time_unit: "ms",
    };
    serde_json::to_writer(writer, &file).map_err(io::Error::from)
}

/// A row of the trace. Calls in a row do not overlap.
struct Row<'a> {
    name: String,
    events: Vec<&'a TraceEvent>,
}

/// Returns the rows of all ranks, in order.
fn rows(events: &[TraceEvent]) -> Vec<Row<'_>> {
    let mut by_rank: BTreeMap<usize, Vec<&TraceEvent>> = BTreeMap::new();
    for event in events {
        by_rank.entry(event.rank).or_default().push(event);
    }
    let mut rows = vec![];
    for (rank, mut events) in by_rank {
        events.sort_by(|a, b| a.start.total_cmp(&b.start));
        let (calls, actions): (Vec<_>, Vec<_>) = events
            .into_iter()
            .partition(|event| event.kind == TraceKind::Call);
        rows.push(Row {
            name: format!("rank {rank}"),
            events: actions,
        });
        let first = rows.len();
        for call in calls {
            let is_free =
                |row: &Row<'_>| row.events.last().is_none_or(|last| last.end <= call.start);
            match rows[first..].iter().position(is_free) {
                Some(row) => rows[first + row].events.push(call),
                None => rows.push(Row {
                    name: format!("rank {rank}: calls"),
                    events: vec![call],
                }),
            }
        }
    }
    rows
}

/// The factor for times, which are in microseconds in the file.
const MICROSECONDS: f64 = 1e6;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct File<'a> {
    trace_events: Vec<Entry<'a>>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    /// The name of a row.
    Name {
        ph: &'static str,
        name: &'static str,
        pid: usize,
        tid: usize,
        args: Name,
    },
    /// An event with a start and a duration.
    Span {
        ph: &'static str,
        name: &'a str,
        cat: TraceKind,
        pid: usize,
        tid: usize,
        ts: f64,
        dur: f64,
    },
}

#[derive(Serialize)]
struct Name {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::super::schedule::{ScheduleConfig, ScheduleKind, StageTimes, generate, simulate};
    use super::*;

    fn simulated(kind: ScheduleKind) -> Simulation {
        let schedule = generate(&ScheduleConfig::new(kind, 4, 8)).unwrap();
        let times = StageTimes::uniform(schedule.stages(), 1.0, 1.25, 0.5, 0.125);
        simulate(&schedule, &times).unwrap()
    }

    #[test]
    fn a_trace_has_the_bubble_of_the_simulation() {
        for kind in ScheduleKind::ALL {
            let simulation = simulated(kind);
            let mut events = simulation.trace();
            // A run does not start at 0, and has events that are not computations.
            for event in &mut events {
                event.start += 17.0;
                event.end += 17.0;
            }
            events.push(TraceEvent {
                rank: 2,
                name: "optimizer".into(),
                kind: TraceKind::Other,
                start: 0.0,
                end: 1000.0,
            });
            let bubble = trace_bubble(4, &events);
            assert!((bubble - simulation.bubble()).abs() < 1e-12, "{kind}");
            assert!(bubble > 0.0);
        }
    }

    #[test]
    fn idle_ranks_count_and_nothing_has_no_bubble() {
        let event = TraceEvent::action(0, &"F 0 0".parse().unwrap(), 2.0, 4.0);
        assert_eq!(trace_bubble(4, &[event]), 0.75);
        assert_eq!(trace_bubble(4, &[]), 0.0);
    }

    #[test]
    fn the_file_has_named_rows_for_actions_and_calls_and_microseconds() {
        let mut text = vec![];
        let call = |start, end| TraceEvent {
            rank: 0,
            name: "all_to_all".into(),
            kind: TraceKind::Call,
            start,
            end,
        };
        let events = [
            TraceEvent::action(1, &"B 1 0".parse().unwrap(), 0.5, 0.75),
            TraceEvent::action(0, &"SF 0 3".parse().unwrap(), 0.25, 0.25),
            // The second call begins before the first ends, the third after.
            call(0.0, 0.5),
            call(0.25, 0.75),
            call(0.5, 0.625),
        ];
        write_chrome_trace(&events, &mut text).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let row = |tid: usize, name: &str| serde_json::json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}});
        let span = |tid: usize, name: &str, cat: &str, [ts, dur]: [f64; 2]| serde_json::json!({"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur});
        let expected = serde_json::json!({
            "displayTimeUnit": "ms",
            "traceEvents": [
                row(0, "rank 0"),
                row(1, "rank 0: calls"),
                row(2, "rank 0: calls"),
                row(3, "rank 1"),
                span(0, "SF 0 3", "other", [250_000.0, 0.0]),
                span(1, "all_to_all", "call", [0.0, 500_000.0]),
                span(1, "all_to_all", "call", [500_000.0, 125_000.0]),
                span(2, "all_to_all", "call", [250_000.0, 500_000.0]),
                span(3, "B 1 0", "compute", [500_000.0, 250_000.0]),
            ],
        });
        assert_eq!(json, expected);
    }
}
