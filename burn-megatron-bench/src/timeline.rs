//! The timeline of a rank and its link, from which the share of the transfers that overlaps with computation is
//! computed.

use std::path::Path;
use std::time::{Duration, Instant};

use burn_megatron_cli::internal::Error;
use burn_megatron_comm_testing::Transfer;
use serde_json::{Value, json};

use crate::report::write;

/// The kind of a [`TimelineEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A phase of a step in which the rank computes, except while it waits.
    Compute,
    /// A phase of a step in which the rank communicates.
    Reduce,
    /// A time in which the rank is blocked: by the link, by ranks that are late, or by the reduction itself, which runs
    /// in the waiting thread.
    Wait,
    /// A time in which the link is busy.
    Transfer,
}

/// An event of a rank or its link. Times are in seconds since an origin that is the same for all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineEvent {
    pub kind: EventKind,
    pub name: String,
    /// The step of the event. For a transfer, the step in which it was issued.
    pub step: usize,
    pub start: f64,
    pub end: f64,
}

impl TimelineEvent {
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }

    /// Returns the part of the event between `start` and `end`, in seconds.
    pub fn within(&self, start: f64, end: f64) -> f64 {
        (self.end.min(end) - self.start.max(start)).max(0.0)
    }
}

/// Returns the share of a step's transfer time in which the rank computed. A rank computes while it is in a compute
/// phase of this step or the next step and does not wait. The share is 1 if nothing was transferred.
///
/// `events` belong to one rank. Phases do not overlap each other, and neither do waits.
pub fn hidden_share(events: &[TimelineEvent], step: usize) -> f64 {
    let of = |kind| events.iter().filter(move |event| event.kind == kind);
    let computing = |start: f64, end: f64| -> f64 {
        let phases = of(EventKind::Compute).map(|phase| {
            let (start, end) = (phase.start.max(start), phase.end.min(end));
            let blocked: f64 = of(EventKind::Wait)
                .map(|wait| wait.within(start, end))
                .sum();
            ((end - start).max(0.0) - blocked).max(0.0)
        });
        phases.sum()
    };
    let transfers = || of(EventKind::Transfer).filter(|transfer| transfer.step == step);
    let total: f64 = transfers().map(TimelineEvent::seconds).sum();
    let hidden = transfers().map(|transfer| computing(transfer.start, transfer.end));
    if total > 0.0 {
        hidden.sum::<f64>() / total
    } else {
        1.0
    }
}

/// The activity of a rank and its link over time.
pub struct RankTimeline {
    /// Phases, waits and transfers.
    pub events: Vec<TimelineEvent>,
    /// The start and the end of each step in seconds.
    pub steps: Vec<(f64, f64)>,
    /// The transfers that were issued in each step.
    pub transfers: Vec<Vec<Transfer>>,
}

/// Records the phases of the steps of a rank.
pub struct Recorder {
    origin: Instant,
    events: Vec<TimelineEvent>,
    steps: Vec<(f64, f64)>,
    /// The end of the last phase.
    last: f64,
}

impl Recorder {
    /// Creates a recorder. Times are relative to `origin`.
    pub fn new(origin: Instant) -> Self {
        Self {
            origin,
            events: vec![],
            steps: vec![],
            last: 0.0,
        }
    }

    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Records a step.
    pub fn step<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let start = self.now();
        let done = work(self);
        self.steps.push((start, self.now()));
        done
    }

    /// Starts the first phase of a step.
    pub fn start(&mut self) {
        self.last = self.now();
    }

    /// Ends a phase and starts the next phase.
    pub fn end(&mut self, kind: EventKind, name: &str) {
        let (start, end) = (self.last, self.now());
        self.push(kind, name.into(), self.steps.len(), (start, end));
        self.last = end;
    }

    fn push(&mut self, kind: EventKind, name: String, step: usize, (start, end): (f64, f64)) {
        self.events.push(TimelineEvent {
            kind,
            name,
            step,
            start,
            end,
        });
    }

    /// Assigns the transfers to steps and returns the timeline. The times of the transfers are relative to `epoch`.
    pub fn finish(mut self, all: Vec<Transfer>, epoch: Instant) -> RankTimeline {
        let offset = epoch.saturating_duration_since(self.origin);
        let seconds = |time: Duration| (offset + time).as_secs_f64();
        let mut transfers = vec![vec![]; self.steps.len()];
        for transfer in all {
            let asked = seconds(transfer.asked);
            let before = self.steps.partition_point(|(start, _)| *start <= asked);
            let step = before.saturating_sub(1);
            let name = format!("{} {:.2} MB", transfer.op, transfer.bytes as f64 / 1e6);
            if let Some(begin) = transfer.begin_wait {
                let wait = (seconds(begin), seconds(begin + transfer.waited));
                self.push(EventKind::Wait, name.clone(), step, wait);
            }
            let busy = (seconds(transfer.started), seconds(transfer.done));
            self.push(EventKind::Transfer, name, step, busy);
            transfers[step].push(transfer);
        }
        RankTimeline {
            events: self.events,
            steps: self.steps,
            transfers,
        }
    }
}

/// Writes the events of each rank in the Chrome trace format (JSON). Each rank is a process with one row for the rank
/// and one row for its link.
pub fn write_chrome(path: &Path, ranks: &[&[TimelineEvent]]) -> Result<(), Error> {
    write(path, &serde_json::to_vec(&chrome(ranks))?)
}

fn chrome(ranks: &[&[TimelineEvent]]) -> Value {
    let name = |what: &str, rank: usize, row: usize, name: String| json!({"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}});
    let names = (0..ranks.len()).flat_map(|rank| {
        [
            name("process_name", rank, 0, format!("rank {rank}")),
            name("thread_name", rank, 0, "computing".into()),
            name("thread_name", rank, 1, "link".into()),
        ]
    });
    let spans = ranks.iter().enumerate().flat_map(|(rank, events)| {
        let span = move |event: &TimelineEvent| {
            let row = usize::from(event.kind == EventKind::Transfer);
            json!({
                "ph": "X", "name": event.name, "cat": format!("{:?}", event.kind).to_lowercase(),
                "pid": rank, "tid": row, "ts": event.start * 1e6, "dur": event.seconds() * 1e6,
                "args": {"step": event.step},
            })
        };
        events.iter().map(span)
    });
    let events: Vec<_> = names.chain(spans).collect();
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, step: usize, start: f64, end: f64) -> TimelineEvent {
        TimelineEvent {
            kind,
            name: format!("{kind:?}"),
            step,
            start,
            end,
        }
    }

    #[test]
    fn what_runs_beside_a_computation_is_hidden() {
        use EventKind::{Compute, Reduce, Transfer, Wait};
        let mut events = vec![
            event(Compute, 0, 1.0, 5.0),
            event(Reduce, 0, 5.0, 8.0),
            event(Compute, 1, 8.0, 12.0),
            event(Transfer, 0, 2.0, 4.0),
        ];
        assert_eq!(hidden_share(&events, 0), 1.0);
        // The next transfer overlaps for 1 s with the computation, and for 3 s with the phase that waits.
        events.push(event(Transfer, 0, 4.0, 8.0));
        assert_eq!(hidden_share(&events, 0), 0.5);
        // Within the compute phase, the rank waits for 1 s during the first transfer, and not during the second.
        events.push(event(Wait, 0, 3.0, 4.0));
        events.push(event(Wait, 0, 5.0, 8.0));
        assert_eq!(hidden_share(&events, 0), 2.0 / 6.0);
        // The next step hides a transfer that continues into it.
        events.push(event(Transfer, 0, 8.0, 10.0));
        assert_eq!(hidden_share(&events, 0), 0.5);
        // The other step has no transfers.
        assert_eq!(hidden_share(&events, 1), 1.0);
    }

    #[test]
    fn nothing_is_hidden_where_nothing_is_computed() {
        let events = [event(EventKind::Transfer, 3, 0.0, 1.0)];
        assert_eq!(hidden_share(&events, 3), 0.0);
        let before = event(EventKind::Compute, 3, -2.0, 0.0);
        let after = event(EventKind::Compute, 3, 1.0, 2.0);
        assert_eq!(
            hidden_share(&[&events[..], &[before, after]].concat(), 3),
            0.0
        );
    }

    #[test]
    fn the_file_has_two_rows_for_each_rank() {
        let first = [event(EventKind::Compute, 2, 0.5, 0.75)];
        let second = [event(EventKind::Transfer, 2, 0.25, 0.5)];
        let file = chrome(&[&first, &second]);
        let events = file["traceEvents"].as_array().unwrap();
        let rows: Vec<_> = events
            .iter()
            .filter(|event| event["ph"] == "M")
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        let expected = ["rank 0", "computing", "link", "rank 1", "computing", "link"];
        assert_eq!(rows, expected);
        let spans = [
            json!({"ph": "X", "name": "Compute", "cat": "compute", "pid": 0, "tid": 0,
                   "ts": 500_000.0, "dur": 250_000.0, "args": {"step": 2}}),
            json!({"ph": "X", "name": "Transfer", "cat": "transfer", "pid": 1, "tid": 1,
                   "ts": 250_000.0, "dur": 250_000.0, "args": {"step": 2}}),
        ];
        assert_eq!(events[6..], spans);
    }
}
