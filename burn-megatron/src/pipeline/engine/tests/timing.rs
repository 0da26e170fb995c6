//! The bubble of a run is that of the simulation.

use super::*;
use crate::pipeline::schedule::{Times, simulate};

const PAUSE: Duration = Duration::from_millis(20);
/// Other work on the machine can make a run wait, so that one is not enough; an engine that waits
/// where the simulator does not fails them all.
const ATTEMPTS: usize = 5;

/// The part of the ranks' time, from the start until the last computation, without computation.
fn bubble(runs: &[Vec<Event>]) -> f64 {
    let computed = || {
        let events = runs.iter().flatten();
        events.filter(|event| event.action.kind.is_compute())
    };
    let busy: Duration = computed().map(|event| event.end - event.start).sum();
    let start = runs.iter().flatten().map(|event| event.start).min();
    let end = computed().map(|event| event.end).max();
    let total = end.unwrap() - start.unwrap();
    1.0 - busy.as_secs_f64() / (total.as_secs_f64() * runs.len() as f64)
}

#[test]
fn the_bubble_of_a_run_is_that_of_the_simulation() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        let times = Times::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let expected = simulate(&schedule, &times).unwrap().bubble();
        let inputs = vec![[1, 1]; 8];
        let mut measured = vec![];
        let agrees = (0..ATTEMPTS).any(|_| {
            let runs = run_over(&schedule, &inputs, PAUSE, |comm| comm, |run, _| run.events);
            let bubble = bubble(&runs);
            measured.push(bubble);
            (bubble - expected).abs() < 0.03
        });
        println!("{kind:12} measured {measured:.4?}, simulated {expected:.4}");
        assert!(
            agrees,
            "{kind}: measured {measured:?}, simulated {expected}"
        );
    }
}
