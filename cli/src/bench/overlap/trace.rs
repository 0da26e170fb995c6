//! What a rank and its link did when, and how much of the transfers that hides.

use std::path::Path;

use burn_megatron::partial::replace_file;
use serde_json::{Value, json};

use crate::recipe::Error;

/// What an [`Event`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A phase of a step in which the rank computes, but for the waits in it.
    Compute,
    /// A phase of a step that is there for the other ranks.
    Reduce,
    /// The rank is blocked: for the link, for ranks that are late, and for the sum itself, which the
    /// engine leaves to those who wait.
    Wait,
    /// The link is taken.
    Transfer,
}

/// Something that a rank or its link did. Times are seconds from a moment that is the same for all
/// ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub kind: Kind,
    pub name: String,
    /// The step to which it belongs, a transfer to the one in which it was asked for.
    pub step: usize,
    pub start: f64,
    pub end: f64,
}

impl Event {
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }

    /// The seconds from `start` to `end` in which this was going on.
    pub fn within(&self, start: f64, end: f64) -> f64 {
        (self.end.min(end) - self.start.max(start)).max(0.0)
    }
}

/// The share of the time of a step's transfers in which the rank computed: it was in a computing phase,
/// of this step or of the next one, and not in a wait. 1 if nothing was transferred.
///
/// `events` are those of one rank. Phases do not overlap each other, and neither do waits.
pub fn hidden_share(events: &[Event], step: usize) -> f64 {
    let of = |kind| events.iter().filter(move |event| event.kind == kind);
    let computing = |start: f64, end: f64| -> f64 {
        let phases = of(Kind::Compute).map(|phase| {
            let (start, end) = (phase.start.max(start), phase.end.min(end));
            let blocked: f64 = of(Kind::Wait).map(|wait| wait.within(start, end)).sum();
            ((end - start).max(0.0) - blocked).max(0.0)
        });
        phases.sum()
    };
    let transfers = || of(Kind::Transfer).filter(|transfer| transfer.step == step);
    let total: f64 = transfers().map(Event::seconds).sum();
    let hidden = transfers().map(|transfer| computing(transfer.start, transfer.end));
    match total > 0.0 {
        true => hidden.sum::<f64>() / total,
        false => 1.0,
    }
}

/// Writes the events of each rank in the Chrome trace format (JSON): a process for each rank, with a
/// row for what it does and one for its link.
pub fn write_chrome(path: &Path, ranks: &[&[Event]]) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| -> Error {
        format!("{} cannot be written: {error}", path.display()).into()
    };
    let text = serde_json::to_vec(&chrome(ranks)).map_err(|error| failed(&error))?;
    replace_file(path, &text).map_err(|error| failed(&error))
}

fn chrome(ranks: &[&[Event]]) -> Value {
    let name = |what: &str, rank: usize, row: usize, name: String| json!({"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}});
    let names = (0..ranks.len()).flat_map(|rank| {
        [
            name("process_name", rank, 0, format!("rank {rank}")),
            name("thread_name", rank, 0, "computing".into()),
            name("thread_name", rank, 1, "link".into()),
        ]
    });
    let spans = ranks.iter().enumerate().flat_map(|(rank, events)| {
        let span = move |event: &Event| {
            let row = usize::from(event.kind == Kind::Transfer);
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

    fn event(kind: Kind, step: usize, start: f64, end: f64) -> Event {
        Event {
            kind,
            name: format!("{kind:?}"),
            step,
            start,
            end,
        }
    }

    #[test]
    fn what_runs_beside_a_computation_is_hidden() {
        use Kind::{Compute, Reduce, Transfer, Wait};
        let mut events = vec![
            event(Compute, 0, 1.0, 5.0),
            event(Reduce, 0, 5.0, 8.0),
            event(Compute, 1, 8.0, 12.0),
            event(Transfer, 0, 2.0, 4.0),
        ];
        assert_eq!(hidden_share(&events, 0), 1.0);
        // 1 s of the next one beside the computation, and 3 s beside the phase that waits.
        events.push(event(Transfer, 0, 4.0, 8.0));
        assert_eq!(hidden_share(&events, 0), 0.5);
        // 1 s of the first transfer is waited for inside of the phase, and nothing of the second.
        events.push(event(Wait, 0, 3.0, 4.0));
        events.push(event(Wait, 0, 5.0, 8.0));
        assert_eq!(hidden_share(&events, 0), 2.0 / 6.0);
        // What flies into the next step is hidden by that.
        events.push(event(Transfer, 0, 8.0, 10.0));
        assert_eq!(hidden_share(&events, 0), 0.5);
        // The other step has no transfers of its own.
        assert_eq!(hidden_share(&events, 1), 1.0);
    }

    #[test]
    fn nothing_is_hidden_where_nothing_is_computed() {
        let events = [event(Kind::Transfer, 3, 0.0, 1.0)];
        assert_eq!(hidden_share(&events, 3), 0.0);
        let before = event(Kind::Compute, 3, -2.0, 0.0);
        let after = event(Kind::Compute, 3, 1.0, 2.0);
        assert_eq!(
            hidden_share(&[&events[..], &[before, after]].concat(), 3),
            0.0
        );
    }

    #[test]
    fn the_file_has_two_rows_for_each_rank() {
        let first = [event(Kind::Compute, 2, 0.5, 0.75)];
        let second = [event(Kind::Transfer, 2, 0.25, 0.5)];
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
