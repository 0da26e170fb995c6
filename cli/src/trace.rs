//! What the ranks of a pipeline did in their last step, as a trace.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use burn_megatron::comm::{Communicator, all_gather_bytes};
use burn_megatron::partial::replace_file;
use burn_megatron::pipeline::engine::Event;
use burn_megatron::pipeline::trace::{TraceEvent, trace_bubble, write_chrome_trace};
use burn_megatron::train::run_folder::RunFolder;

use crate::recipe::Error;

/// The events of all ranks, on every rank; all must come.
///
/// Ranks may be processes, on machines of their own: their times are those of the wall clock, and as good
/// as the clocks agree.
pub fn gather(world: &dyn Communicator, own: &[Event]) -> Result<Vec<TraceEvent>, Error> {
    let (now, wall) = (
        Instant::now(),
        SystemTime::now().duration_since(UNIX_EPOCH)?,
    );
    let seconds = |time: Instant| wall.as_secs_f64() - (now - time).as_secs_f64();
    let event = |event: &Event| {
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

/// Writes the events of `ranks` ranks, and says how much of their time was waiting.
pub fn write(folder: &RunFolder, ranks: usize, events: &[TraceEvent]) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    let path = folder.path().join("trace.json");
    let failed = |error| format!("{} cannot be written: {error}", path.display());
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
