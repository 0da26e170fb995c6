//! The trace of the last step of several ranks.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use burn_megatron::atomic_file::replace_file;
use burn_megatron::comm::{Rank, all_gather_bytes};
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron::pipeline::trace::{TraceEvent, TraceKind, trace_bubble, write_chrome_trace};
use burn_megatron_train::run_folder::RunFolder;

use crate::error::Error;

/// Gathers the actions of all ranks in the last step and their calls during that step, on every rank. Collective:
/// call on all ranks.
///
/// Times are wall-clock times. Between machines, their accuracy depends on the synchronization of the clocks.
pub fn gather(rank: &Rank, own: &[ActionEvent]) -> Result<Vec<TraceEvent>, Error> {
    let (now, wall, elapsed) = (
        Instant::now(),
        SystemTime::now().duration_since(UNIX_EPOCH)?,
        rank.elapsed(),
    );
    let seconds = |time: Instant| wall.as_secs_f64() - (now - time).as_secs_f64();
    let event = |event: &ActionEvent| {
        let (start, end) = (seconds(event.start), seconds(event.end));
        TraceEvent::action(rank.rank(), &event.action, start, end)
    };
    let mut own: Vec<_> = own.iter().map(event).collect();
    let first = own
        .iter()
        .map(|event| event.start)
        .fold(f64::INFINITY, f64::min);
    let last = own
        .iter()
        .map(|event| event.end)
        .fold(f64::NEG_INFINITY, f64::max);
    let began = wall.as_secs_f64() - elapsed.as_secs_f64();
    let calls = rank.recent_calls().into_iter().filter_map(|call| {
        let (start, end) = (began + call.started, began + call.completed?);
        (first <= start && start <= last).then(|| TraceEvent {
            rank: rank.rank(),
            name: format!("{} over {}", call.call, call.group),
            kind: TraceKind::Call,
            start,
            end,
        })
    });
    own.extend(calls);
    let all = all_gather_bytes(&*rank.communicator(), &serde_json::to_vec(&own)?)?;
    let mut events = Vec::new();
    for bytes in all {
        events.extend(serde_json::from_slice::<Vec<TraceEvent>>(&bytes)?);
    }
    let origin = events
        .iter()
        .map(|event| event.start)
        .fold(f64::INFINITY, f64::min);
    for event in &mut events {
        event.start -= origin;
        event.end -= origin;
    }
    Ok(events)
}

/// Writes the events of `ranks` ranks, and prints the measured bubble of a pipeline.
pub fn write(
    folder: &RunFolder,
    ranks: usize,
    is_pipeline: bool,
    events: &[TraceEvent],
) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    let path = folder.path().join("trace.json");
    let failed = |error| format!("cannot write {}: {error}", path.display());
    let mut text = vec![];
    let written = write_chrome_trace(events, &mut text);
    written
        .and_then(|()| replace_file(&path, &text))
        .map_err(failed)?;
    if is_pipeline {
        println!(
            "bubble of the last step {:.1} % of its time, measured over all ranks (trace.json)",
            100.0 * trace_bubble(ranks, events),
        );
    }
    Ok(())
}
