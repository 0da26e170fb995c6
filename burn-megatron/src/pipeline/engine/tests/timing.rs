//! Checks that the bubble of a run is equal to the simulated bubble. The run is measured with a logical clock.

use std::collections::HashMap;

use super::*;
use crate::comm::{Buffer, BufferPool, Call, Communicator, Group, Pending};
use crate::pipeline::schedule::{StageTimes, simulate};

/// The logical time of a rank, advanced by computations and by waiting for messages.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<Time>);

#[derive(Clone, Copy, Debug, Default)]
struct Time {
    now: u64,
    computed: u64,
}

impl Clock {
    /// Runs a computation, which takes 1.
    pub fn compute(&self) {
        let mut time = self.0.lock().unwrap();
        time.now += 1;
        time.computed += 1;
    }

    fn wait_until(&self, arrival: u64) {
        let mut time = self.0.lock().unwrap();
        time.now = time.now.max(arrival);
    }

    fn time(&self) -> Time {
        *self.0.lock().unwrap()
    }
}

/// The send times of the messages between each pair (from, to), in order.
type Departures = Arc<Mutex<HashMap<(usize, usize), Vec<u64>>>>;

/// A communicator whose messages contain their send time. Transfers take no time.
#[derive(Debug)]
struct Timed {
    inner: Comm,
    clock: Arc<Clock>,
    departures: Departures,
    /// The number of receives so far, by sender.
    receives: Mutex<HashMap<usize, usize>>,
}

impl Communicator for Timed {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        match call {
            Call::Send { to } => {
                let now = self.clock.time().now;
                let mut departures = self.departures.lock().unwrap();
                let pair = (self.rank(), to);
                departures.entry(pair).or_default().push(now);
                self.inner.start(call, input)
            }
            Call::Receive { from, .. } => {
                let (clock, departures) = (self.clock.clone(), self.departures.clone());
                let pair = (from, self.rank());
                let mut receives = self.receives.lock().unwrap();
                let number = receives.entry(from).or_default();
                let own = *number;
                *number += 1;
                let pending = self.inner.start(call, input)?;
                Ok(Pending::new(move || {
                    let received = pending.wait()?;
                    let sent = departures.lock().unwrap()[&pair][own];
                    clock.wait_until(sent);
                    Ok(received)
                }))
            }
            _ => self.inner.start(call, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        self.inner.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }
}

#[test]
fn the_bubble_of_a_run_is_that_of_the_simulation() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        let departures = Departures::default();
        let over = |inner, chain: &Chain| -> Comm {
            Arc::new(Timed {
                inner,
                clock: chain.clock.clone(),
                departures: departures.clone(),
                receives: Mutex::default(),
            })
        };
        let times = run_over(&schedule, &even(8), over, |_, chain| chain.clock.time());
        let computed: u64 = times.iter().map(|time| time.computed).sum();
        let total = times.iter().map(|time| time.now).max().unwrap();
        let bubble = 1.0 - computed as f64 / (total * 4) as f64;

        let each = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let simulation = simulate(&schedule, &each).unwrap();
        assert_eq!(total as f64, simulation.total(), "{kind}");
        assert!((bubble - simulation.bubble()).abs() < 1e-12, "{kind}");
    }
}

#[test]
fn the_events_of_a_run_are_its_actions_one_after_the_other() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        let ranks = run(&schedule, &even(8), |run, _| run.events);
        for (rank, events) in ranks.iter().enumerate() {
            let actions: Vec<_> = events.iter().map(|event| event.action).collect();
            assert_eq!(actions, schedule.actions(rank), "{kind}");
            let times: Vec<_> = events.iter().flat_map(|e| [e.start, e.end]).collect();
            assert!(times.is_sorted(), "{kind}");
        }
    }
}
