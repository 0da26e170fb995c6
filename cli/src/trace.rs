//! The trace of the last step of a pipeline.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use burn_megatron::comm::{Communicator, all_gather_bytes};
use burn_megatron::partial::replace_file;
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron::pipeline::trace::{TraceEvent, trace_bubble, write_chrome_trace};
use burn_megatron::train::run_folder::RunFolder;

use crate::error::Error;

/// Gathers the events of all ranks on every rank. Collective: call on all ranks.
///
/// Times are those of the wall clock: between machines they are as exact as the clocks are synchronised.
pub fn gather(world: &dyn Communicator, own: &[ActionEvent]) -> Result<Vec<TraceEvent>, Error> {
    let (now, wall) = (
        Instant::now(),
        SystemTime::now().duration_since(UNIX_EPOCH)?,
    );
    let seconds = |time: Instant| wall.as_secs_f64() - (now - time).as_secs_f64();
    let event = |event: &ActionEvent| {
        let (start, end) = (seconds(event.start), seconds(event.end));
        TraceEvent::action(world.rank(), &event.action, start, end)
    };
    let own: Vec<_> = own.iter().map(event).collect();
    let all = all_gather_bytes(world, &serde_json::to_vec(&own)?)?;
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

/// Writes the events of `ranks` ranks, and prints the measured bubble.
pub fn write(folder: &RunFolder, ranks: usize, events: &[TraceEvent]) -> Result<(), Error> {
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
    println!(
        "bubble of the last step {:.1} % of its time, measured over all ranks (trace.json)",
        100.0 * trace_bubble(ranks, events),
    );
    Ok(())
}
