//! Handles SIGINT, SIGTERM and SIGHUP in the launcher, while a world runs and between two worlds.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::error::LaunchError;
use super::supervise::SupervisorEvent;
use super::sys;

/// Receiver of the termination signals, which runs in a thread.
pub struct TerminationSignals(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    received: Condvar,
}

#[derive(Default)]
struct State {
    /// The last signal that was received.
    signal: Option<i32>,
    /// The event channel of the running world.
    world: Option<Sender<SupervisorEvent>>,
}

impl TerminationSignals {
    /// Blocks the signals in this thread and the threads that it starts, and receives them in a new thread. The ranks
    /// of a world have `grace` seconds to stop.
    pub fn listen(grace: f64) -> Result<Self, LaunchError> {
        sys::block_termination_signals()
            .map_err(LaunchError::system("signals cannot be blocked"))?;
        let shared = Arc::new(Shared::default());
        let receiver = shared.clone();
        let listen = move || {
            while let Ok(signal) = sys::wait_for_termination_signal() {
                receiver.receive(signal as i32, grace);
            }
        };
        let builder = thread::Builder::new().name("signals".into());
        let started = builder.spawn(listen);
        started.map_err(LaunchError::system("a thread cannot be started"))?;
        Ok(Self(shared))
    }

    /// Forwards signals to a world from now on. A signal that was received before is forwarded too.
    pub fn attach(&self, world: &Sender<SupervisorEvent>) {
        let mut state = self.0.state.lock();
        if let Some(signal) = state.signal {
            let _ = world.send(SupervisorEvent::Interrupted(signal));
        }
        state.world = Some(world.clone());
    }

    /// Stops forwarding signals, after the world has ended.
    pub fn detach(&self) {
        self.0.state.lock().world = None;
    }

    /// Waits for this time, or until a signal has been received. Returns the signal.
    pub fn wait(&self, time: Duration) -> Option<i32> {
        let mut state = self.0.state.lock();
        let none = |state: &mut State| state.signal.is_none();
        self.0.received.wait_while_for(&mut state, none, time);
        state.signal
    }
}

impl Shared {
    fn receive(&self, signal: i32, grace: f64) {
        let mut state = self.state.lock();
        let is_first = state.signal.is_none();
        state.signal = Some(signal);
        match &state.world {
            None => eprintln!("\ninterrupted: no restart follows"),
            Some(world) => {
                if is_first {
                    eprintln!(
                        "\ninterrupted: the ranks have {grace} s to stop (interrupt again to kill them)"
                    );
                } else {
                    eprintln!("\ninterrupted again: the ranks are killed");
                }
                let _ = world.send(SupervisorEvent::Interrupted(signal));
            }
        }
        self.received.notify_all();
    }
}
