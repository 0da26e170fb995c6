//! Timelines of a run, written in the Chrome trace format (chrome://tracing, Perfetto).

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::schedule::{Action, Simulation, idle_fraction};

/// One event of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// The rank.
    pub rank: usize,
    /// The name, as in `F 2 5` or `all-reduce of gradients`.
    pub name: String,
    /// Whether this is a computation of the schedule; all other time is bubble.
    pub compute: bool,
    /// Start, in seconds from an origin that all ranks share.
    pub start: f64,
    /// End, in seconds from the same origin.
    pub end: f64,
}

impl TraceEvent {
    /// The event of an action of a schedule.
    pub fn action(rank: usize, action: &Action, start: f64, end: f64) -> Self {
        TraceEvent {
            rank,
            name: action.to_string(),
            compute: action.kind.is_compute(),
            start,
            end,
        }
    }
}

impl Simulation {
    /// The simulated timeline as events; times are taken as seconds.
    pub fn trace(&self) -> Vec<TraceEvent> {
        let of_rank = |rank| {
            self.timeline(rank)
                .iter()
                .map(move |span| TraceEvent::action(rank, &span.action, span.start, span.end))
        };
        (0..self.schedule().ranks()).flat_map(of_rank).collect()
    }
}

/// The measured bubble: the fraction of the time of `ranks` ranks in which they do not compute, from 0
/// to 1. The time runs from the start of the first computation of any rank to the end of the last.
///
/// Comparable with [`Simulation::bubble`]. Computations of one rank must not overlap; a rank without
/// computations counts as idle throughout. Without any computation the result is 0.
pub fn trace_bubble(ranks: usize, events: &[TraceEvent]) -> f64 {
    let computed = || events.iter().filter(|event| event.compute);
    let first = computed()
        .map(|event| event.start)
        .fold(f64::INFINITY, f64::min);
    let last = computed()
        .map(|event| event.end)
        .fold(f64::NEG_INFINITY, f64::max);
    let busy: f64 = computed().map(|event| event.end - event.start).sum();
    // Without computations the time is negative, and the fraction 0.
    idle_fraction(busy, ranks as f64 * (last - first))
}

/// Writes events in the Chrome trace format (JSON), one row per rank.
///
/// # Errors
///
/// Errors of the writer.
pub fn write_chrome_trace(events: &[TraceEvent], writer: impl Write) -> io::Result<()> {
    let mut ranks: Vec<_> = events.iter().map(|event| event.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let names = ranks.into_iter().map(|rank| Entry::Name {
        ph: "M",
        name: "thread_name",
        pid: 0,
        tid: rank,
        args: Name {
            name: format!("rank {rank}"),
        },
    });
    let spans = events.iter().map(|event| Entry::Span {
        ph: "X",
        name: &event.name,
        cat: if event.compute { "compute" } else { "other" },
        pid: 0,
        tid: event.rank,
        ts: event.start * MICROSECONDS,
        dur: (event.end - event.start) * MICROSECONDS,
    });
    let file = File {
        trace_events: names.chain(spans).collect(),
        display_time_unit: "ms",
    };
    serde_json::to_writer(writer, &file).map_err(io::Error::from)
}

/// Times in the file are in microseconds.
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
        cat: &'static str,
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
            // A run does not begin at 0, and has events that are no computations.
            for event in &mut events {
                event.start += 17.0;
                event.end += 17.0;
            }
            events.push(TraceEvent {
                rank: 2,
                name: "optimizer".into(),
                compute: false,
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
    fn the_file_has_a_named_row_for_each_rank_and_microseconds() {
        let mut text = vec![];
        let events = [
            TraceEvent::action(1, &"B 1 0".parse().unwrap(), 0.5, 0.75),
            TraceEvent::action(0, &"SF 0 3".parse().unwrap(), 0.25, 0.25),
        ];
        write_chrome_trace(&events, &mut text).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let expected = serde_json::json!({
            "displayTimeUnit": "ms",
            "traceEvents": [
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "rank 1"}},
                {"ph": "X", "name": "B 1 0", "cat": "compute", "pid": 0, "tid": 1,
                 "ts": 500_000.0, "dur": 250_000.0},
                {"ph": "X", "name": "SF 0 3", "cat": "other", "pid": 0, "tid": 0,
                 "ts": 250_000.0, "dur": 0.0},
            ],
        });
        assert_eq!(json, expected);
    }
}
