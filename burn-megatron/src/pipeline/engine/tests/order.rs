//! Checks that runs do not deadlock, even if sends block until the matching receive.

use std::collections::HashMap;
use std::sync::Condvar;
use std::time::Duration;

use super::*;
use crate::comm::{Buffer, BufferPool, Call, Communicator, Group, Pending};

/// A timeout that is long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The number of receives that each pair (from, to) has started.
#[derive(Debug, Default)]
struct Board {
    receives: Mutex<HashMap<(usize, usize), usize>>,
    changed: Condvar,
}

/// A communicator whose sends do not start before the receiver is in the matching receive.
#[derive(Debug)]
struct Rendezvous {
    inner: Comm,
    board: Arc<Board>,
    /// The number of sends so far, by receiver.
    sends: Mutex<HashMap<usize, usize>>,
    /// The time that a send waits for its receive.
    patience: Duration,
}

impl Communicator for Rendezvous {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        match call {
            Call::Receive { from, .. } => {
                let pair = (from, self.rank());
                *self.board.receives.lock().unwrap().entry(pair).or_default() += 1;
                self.board.changed.notify_all();
            }
            Call::Send { to } => self.meet(to)?,
            _ => {}
        }
        self.inner.start(call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        self.inner.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }
}

impl Rendezvous {
    fn meet(&self, to: usize) -> Result<(), CommError> {
        let mut sends = self.sends.lock().unwrap();
        let number = sends.entry(to).or_default();
        *number += 1;
        let pair = (self.rank(), to);
        let receives = self.board.receives.lock().unwrap();
        let early = |receives: &mut HashMap<(usize, usize), usize>| {
            receives.get(&pair).copied().unwrap_or(0) < *number
        };
        let waited = self
            .board
            .changed
            .wait_timeout_while(receives, self.patience, early);
        if waited.unwrap().1.timed_out() {
            return Err(CommError::Engine {
                engine: "rendezvous".into(),
                message: format!("rank {to} does not receive from rank {}", self.rank()),
            });
        }
        Ok(())
    }
}

fn with_rendezvous(schedule: &Schedule, inputs: &[[usize; 2]]) -> Vec<Vec<f64>> {
    let board = Arc::new(Board::default());
    let over = |inner, _: &Chain| -> Comm {
        Arc::new(Rendezvous {
            inner,
            board: board.clone(),
            sends: Mutex::default(),
            patience: PATIENCE,
        })
    };
    let look = |_, chain: &Chain| chain.gradients();
    by_stage(run_over(schedule, inputs, over, look))
}

#[test]
fn sends_may_wait_for_their_receives() {
    for kind in ScheduleKind::ALL {
        for (ranks, micro_batches) in [(2, 2), (2, 4), (4, 8)] {
            let schedule = schedule(kind, ranks, micro_batches);
            let inputs = even(micro_batches);
            let expected = weight_gradients(&schedule, &inputs);
            let found = with_rendezvous(&schedule, &inputs);
            assert_eq!(found, expected, "{kind}, {ranks} ranks");
        }
    }
}

#[test]
fn a_cycle_of_two_ranks_ends() {
    for stages in [2, 3, 4] {
        let kind = ScheduleKind::Interleaved { group: None };
        let config = ScheduleConfig::new(kind, 2, 6).with_virtual_stages(stages);
        let schedule = generate(&config).unwrap();
        let expected = weight_gradients(&schedule, &even(6));
        assert_eq!(with_rendezvous(&schedule, &even(6)), expected);
    }
}

#[test]
fn a_send_that_is_never_received_is_found() {
    // The wrapper can fail if the other rank receives a different message.
    let world = World::threads(2).unwrap();
    let board = Arc::new(Board::default());
    let result = world.run(|rank| {
        let comm = Rendezvous {
            inner: rank.communicator(),
            board: board.clone(),
            sends: Mutex::default(),
            patience: Duration::from_millis(100),
        };
        comm.start_send(Buffer::from(vec![1i64]), 1 - comm.rank())
            .map(drop)
    });
    let message = result.unwrap_err().to_string();
    assert!(message.contains("does not receive"), "{message}");
}
