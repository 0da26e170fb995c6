//! The connection of a rank to the rendezvous server.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::RendezvousError;
use super::connect::{connect, describe_end};
use super::message::{
    self, CallId, CoordinatorMessage, FailureCause, MissingRanks, RankMessage, RankStatus,
};
use crate::auth::{Token, spawn};
use crate::failure_report::{FailureReport, RankPosition, describe_rank};
use crate::rank_runs::RankRuns;

/// The interval at which a rank sends a heartbeat with its position.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);
/// The timeout for the coordinator to answer a query. The coordinator itself waits up to 1 s for the ranks.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);

/// The identity and the timeouts of a rank that joins a rendezvous.
#[derive(Clone, Debug)]
pub struct JoinRequest {
    /// The rank of this process.
    pub rank: usize,
    /// The number of ranks in the world.
    pub size: usize,
    /// The id of the world, or 0 if the world has no id.
    pub world: u64,
    /// The token of the run. It may be `None` if all ranks are on one machine.
    pub token: Option<Token>,
    /// The timeout for the coordinator to answer and for all ranks to join.
    pub join_timeout: Duration,
    /// The heartbeat timeout: the time without a heartbeat after which the coordinator counts as lost.
    pub heartbeat_timeout: Duration,
}

/// The interface through which the rendezvous gets the position of a rank. The methods are called from
/// other threads, even while the rank computes.
pub trait StatusProvider: Send + Sync {
    /// Returns the current position of the rank.
    fn position(&self) -> RankPosition;
    /// Returns the current position of the rank. For the collective `call`, also returns whether the rank has joined
    /// the collective, and the rank's call with the same sequence number.
    fn status(&self, call: Option<CallId>) -> RankStatus;
}

/// The connection of one rank to the coordinator of its world.
#[derive(Debug)]
pub struct RendezvousClient {
    request: JoinRequest,
    address: SocketAddr,
    pub(super) stream: Mutex<Arc<TcpStream>>,
    state: Mutex<ClientState>,
    condvar: Condvar,
    sent: AtomicUsize,
}

#[derive(Debug, Default)]
struct ClientState {
    complete: bool,
    stop: bool,
    all_returned: bool,
    /// Whether this rank is leaving the world. If so, a closed connection is not a failure.
    leaving: bool,
    failure: Option<FailureReport>,
    /// Whether the world failed because the connection was lost.
    lost: bool,
    refused: Option<String>,
    posted: HashMap<String, Vec<u8>>,
    answers: HashMap<CallId, MissingRanks>,
    /// Whether the next heartbeat is due now.
    heartbeat_due: bool,
    /// The ranks that have returned. `returned_changes` counts the changes of this set.
    returned: HashSet<usize>,
    returned_changes: u64,
    /// For each call, the ranks that have returned without joining the call. `asked` contains the value of
    /// `returned_changes` at the last query for the call.
    returned_before: HashMap<CallId, HashSet<usize>>,
    asked: HashMap<CallId, u64>,
}

impl RendezvousClient {
    /// Connects to the rendezvous server and waits until all ranks have joined. The first address that answers is used.
    ///
    /// # Errors
    /// [`RendezvousError`] if this rank or another rank could not join.
    pub fn join(
        addresses: &[SocketAddr],
        request: JoinRequest,
        provider: Arc<dyn StatusProvider>,
    ) -> Result<Arc<Self>, RendezvousError> {
        let until = Instant::now() + request.join_timeout;
        let (stream, address) = connect(addresses, &request, until)?;
        // Reads and writes share the file descriptor of the connection.
        let from = Arc::new(stream);
        let client = Arc::new(Self {
            request,
            address,
            stream: Mutex::new(from.clone()),
            state: Mutex::default(),
            condvar: Condvar::new(),
            sent: AtomicUsize::new(0),
        });
        client.spawn_reader(from, &provider)?;
        let weak = Arc::downgrade(&client);
        let send_heartbeats = move || {
            while let Some(client) = weak.upgrade() {
                let heartbeat = RankMessage::Heartbeat(provider.position());
                if client.send(&heartbeat).is_err() || client.is_closed() {
                    return;
                }
                client.wait_for_next_heartbeat();
            }
        };
        spawn("heartbeat", send_heartbeats)?;
        client.wait_for_all_ranks(until)?;
        Ok(client)
    }

    fn spawn_reader(
        self: &Arc<Self>,
        from: Arc<TcpStream>,
        provider: &Arc<dyn StatusProvider>,
    ) -> io::Result<JoinHandle<()>> {
        let (client, provider) = (Arc::clone(self), Arc::clone(provider));
        spawn("rendezvous", move || {
            let mut from = BufReader::new(&*from);
            let end = loop {
                match message::read::<CoordinatorMessage>(&mut from) {
                    Ok(Some(message)) => client.handle(message, &*provider),
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            let reason = describe_end(end, client.request.heartbeat_timeout);
            client.coordinator_lost(&reason, &*provider);
        })
    }

    fn handle(&self, message: CoordinatorMessage, provider: &dyn StatusProvider) {
        let mut state = self.state.lock();
        match message {
            CoordinatorMessage::Heartbeat => return,
            CoordinatorMessage::AllJoined => state.complete = true,
            CoordinatorMessage::Refused(reason) => state.refused = Some(reason),
            CoordinatorMessage::Posted { key, value } => {
                state.posted.insert(key, value);
            }
            CoordinatorMessage::QueryStatus { question, call } => {
                drop(state);
                let status = provider.status(call);
                // If the send fails, the connection is closed, and the reader detects that.
                let _ = self.send(&RankMessage::Status { question, status });
                return;
            }
            CoordinatorMessage::MissingRanks { call, found } => {
                state.answers.insert(call, found);
            }
            CoordinatorMessage::ReturnedBefore { call, ranks } => {
                let known = state.returned_before.entry(call).or_default();
                known.extend(ranks.iter());
            }
            CoordinatorMessage::Failure(report) => {
                state.failure.get_or_insert(report);
            }
            CoordinatorMessage::Returned(ranks) => {
                state.returned.extend(ranks.iter());
                state.returned_changes += 1;
            }
            CoordinatorMessage::AllReturned => state.all_returned = true,
            CoordinatorMessage::Stop => state.stop = true,
        }
        drop(state);
        self.condvar.notify_all();
    }

    /// Fails the world if the coordinator is lost, unless the world has ended.
    fn coordinator_lost(&self, reason: &str, provider: &dyn StatusProvider) {
        let mut state = self.state.lock();
        if !state.leaving && state.refused.is_none() && !state.all_returned {
            let own = describe_rank(self.request.rank, &provider.position());
            state.lost |= state.failure.is_none();
            state.failure.get_or_insert(FailureReport {
                rank: 0,
                message: format!("the rendezvous at {} {reason}", self.address),
                positions: format!("{own}; the positions of the other ranks are unknown"),
            });
        }
        drop(state);
        self.condvar.notify_all();
    }

    fn wait_for_all_ranks(&self, until: Instant) -> Result<(), RendezvousError> {
        // The coordinator has a shorter timeout, because its error names the missing ranks.
        let last = until + REPLY_TIMEOUT;
        let state = self.wait_until(last, |state| {
            state.complete || state.failure.is_some() || state.refused.is_some()
        });
        match state {
            None => Err(RendezvousError::Unreachable {
                addresses: self.address.to_string(),
                waited: self.request.join_timeout.as_secs(),
                reason: "it answers, but does not report that all ranks have joined".into(),
            }),
            Some(state) if state.complete => Ok(()),
            Some(state) => Err(match (&state.refused, &state.failure) {
                (Some(reason), _) => RendezvousError::Refused {
                    address: self.address.to_string(),
                    reason: reason.clone(),
                },
                (None, failure) => {
                    let FailureReport { rank, message, .. } = failure.clone().unwrap_or_default();
                    RendezvousError::Failed { rank, message }
                }
            }),
        }
    }

    /// Requests that the next heartbeat is sent immediately. Called at the start of a step, so that a failure report
    /// contains the step.
    pub fn send_heartbeat_now(&self) {
        self.state.lock().heartbeat_due = true;
        self.condvar.notify_all();
    }

    fn wait_for_next_heartbeat(&self) {
        let until = Instant::now() + HEARTBEAT_INTERVAL;
        let state = self.wait_until(until, |state| state.heartbeat_due || state.leaving);
        if let Some(mut state) = state {
            state.heartbeat_due = false;
        }
    }

    /// Returns the failure of the world, or `None` if no rank has failed.
    pub fn failure(&self) -> Option<FailureReport> {
        self.state.lock().failure.clone()
    }

    /// Returns whether the world failed because the connection to the coordinator was lost.
    pub fn is_lost(&self) -> bool {
        self.state.lock().lost
    }

    /// Returns whether the launcher has requested that all ranks stop after the current step.
    pub fn stop_requested(&self) -> bool {
        self.state.lock().stop
    }

    /// Returns the first rank in `ranks` that is known to have returned without joining `call`. If any rank in `ranks`
    /// has returned, sends a query to the coordinator but does not wait for the answer.
    pub fn first_returned(&self, ranks: &[usize], call: CallId) -> Option<usize> {
        let mut state = self.state.lock();
        if state.returned.is_empty() {
            return None;
        }
        if let Some(known) = state.returned_before.get(&call)
            && let Some(first) = ranks.iter().find(|rank| known.contains(*rank))
        {
            return Some(*first);
        }
        let mut returned = ranks.to_vec();
        returned.retain(|rank| state.returned.contains(rank));
        let changes = state.returned_changes;
        if !returned.is_empty() && state.asked.insert(call, changes) != Some(changes) {
            drop(state);
            let ranks = RankRuns::new(&returned);
            // If the send fails, the connection is closed, and the reader detects that.
            let _ = self.send(&RankMessage::FindReturned { call, ranks });
        }
        None
    }

    /// Queries which members of a group have not joined a collective. `ranks` contains the members of the group.
    pub fn missing_ranks(&self, call: CallId, ranks: &[usize]) -> MissingRanks {
        self.state.lock().answers.remove(&call);
        let ranks = RankRuns::new(ranks);
        let sent = self.send(&RankMessage::FindMissing { call, ranks });
        let until = Instant::now() + REPLY_TIMEOUT;
        let is_answered =
            |state: &ClientState| state.answers.contains_key(&call) || state.failure.is_some();
        let answered = sent.ok().and_then(|()| self.wait_until(until, is_answered));
        answered
            .and_then(|mut state| state.answers.remove(&call))
            .unwrap_or_default()
    }

    /// Reports the failure of this rank. Waits for the failure report of the world and returns it, or `None` after a
    /// timeout.
    pub fn fail(&self, cause: FailureCause, position: RankPosition) -> Option<FailureReport> {
        // If the send fails, the connection is closed, which ends the world too.
        let _ = self.send(&RankMessage::Failed { cause, position });
        self.await_failure(REPLY_TIMEOUT)
    }

    /// Waits up to `timeout` for the world to fail.
    pub fn await_failure(&self, timeout: Duration) -> Option<FailureReport> {
        let until = Instant::now() + timeout;
        let state = self.wait_until(until, |state| state.failure.is_some())?;
        state.failure.clone()
    }

    /// Waits until the world ends. Returns `None` if the world has ended without a failure.
    pub fn await_end(&self) -> Option<FailureReport> {
        let mut state = self.state.lock();
        self.condvar.wait_while(&mut state, |state| {
            state.failure.is_none() && !state.all_returned && !state.leaving
        });
        state.failure.clone()
    }

    /// Reports that the closure of this rank has returned, and waits until all ranks have returned. `calls` contains
    /// the number of collectives per group.
    pub fn return_with_all(&self, calls: Vec<(u64, u64)>) -> Result<(), FailureReport> {
        // If the send fails, the connection is closed, and the reader detects that.
        let _ = self.send(&RankMessage::Returned(calls));
        match self.await_end() {
            None => Ok(()),
            Some(failure) => Err(failure),
        }
    }

    /// Leaves the world and closes the connection.
    pub fn leave(&self) {
        self.state.lock().leaving = true;
        self.condvar.notify_all();
        let _ = self.stream.lock().shutdown(Shutdown::Both);
    }

    /// Stores a value under a key, so that all ranks can read it.
    ///
    /// # Errors
    /// A message if the connection is closed.
    pub fn post(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let post = RankMessage::Post {
            key: key.into(),
            value: value.into(),
        };
        let posted = self.send(&post);
        posted.map_err(|error| format!("cannot publish {key}: {error}"))
    }

    /// Waits until a rank has posted a value under `key`, and returns this value.
    ///
    /// # Errors
    /// A message if the connection is closed, or if no rank posts the value within `timeout`.
    pub fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        let sent = self.send(&RankMessage::Read { key: key.into() });
        sent.map_err(|error| format!("cannot request {key}: {error}"))?;
        let until = Instant::now() + timeout;
        let is_posted =
            |state: &ClientState| state.posted.contains_key(key) || state.failure.is_some();
        let state = self.wait_until(until, is_posted);
        let value = state.and_then(|state| state.posted.get(key).cloned());
        let seconds = timeout.as_secs_f64();
        value.ok_or_else(|| format!("no rank has published {key} within {seconds:.1} s"))
    }

    fn is_closed(&self) -> bool {
        let state = self.state.lock();
        state.leaving || state.refused.is_some()
    }

    /// Returns the number of messages that this rank has sent.
    #[cfg(test)]
    pub fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    fn send(&self, message: &RankMessage) -> io::Result<()> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        (&**self.stream.lock()).write_all(&message::line(message))
    }

    fn wait_until(
        &self,
        until: Instant,
        condition: impl Fn(&ClientState) -> bool,
    ) -> Option<MutexGuard<'_, ClientState>> {
        let mut state = self.state.lock();
        self.condvar
            .wait_while_until(&mut state, |state| !condition(state), until);
        condition(&state).then_some(state)
    }
}
