//! A rank's connection to the rendezvous.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::message::{
    self, CallId, CoordinatorMessage, FailureCause, FailureReport, Hello, MissingRanks,
    RankMessage, RankStatus,
};
use super::{PURPOSE, RendezvousError};
use crate::auth::{HandshakeError, Token, client_handshake};
#[cfg(any(test, feature = "cuda"))]
use crate::error::CommError;
#[cfg(any(test, feature = "cuda"))]
use crate::process::KeyValueStore;
use crate::report::call_log::{RankPosition, describe_rank};

/// How often a rank sends a heartbeat with its position.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);
/// The timeout of one connection attempt to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two rounds over the addresses.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The time for the coordinator to answer a query, of which it waits for the ranks 1 s at most.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);

/// Identity and timeouts of a rank that joins a rendezvous.
#[derive(Clone, Debug)]
pub(crate) struct JoinRequest {
    pub rank: usize,
    pub size: usize,
    /// The id of the world; 0 if it has none.
    pub world: u64,
    /// The token of the run; may be left out on one machine.
    pub token: Option<Token>,
    /// For the coordinator to answer, and then for all ranks to join.
    pub join_timeout: Duration,
    /// For a heartbeat of the coordinator.
    pub heartbeat_timeout: Duration,
}

/// Reports what the rank is doing. Called from other threads, also while the rank computes.
pub(crate) trait StatusProvider: Send + Sync {
    /// What the rank is doing.
    fn position(&self) -> RankPosition;
    /// The same, and whether the rank has joined a collective, and with which call.
    fn status(&self, call: Option<CallId>) -> RankStatus;
}

/// The connection of one rank to the coordinator of its world.
#[derive(Debug)]
pub(crate) struct RendezvousClient {
    request: JoinRequest,
    address: SocketAddr,
    pub(super) stream: Mutex<TcpStream>,
    state: Mutex<ClientState>,
    condvar: Condvar,
}

#[derive(Debug, Default)]
struct ClientState {
    complete: bool,
    stop: bool,
    all_returned: bool,
    /// This rank is leaving: a closed connection is no longer a failure.
    leaving: bool,
    failure: Option<FailureReport>,
    /// The world failed because the connection was lost.
    lost: bool,
    refused: Option<String>,
    posted: HashMap<String, Vec<u8>>,
    answers: HashMap<u64, MissingRanks>,
    questions: u64,
    /// The next heartbeat is due now.
    heartbeat_due: bool,
    returned: HashMap<usize, HashMap<u64, u64>>,
}

impl RendezvousClient {
    /// Connects to the rendezvous at the first of the addresses that answers, and waits until all ranks have
    /// joined.
    ///
    /// # Errors
    /// [`RendezvousError`].
    pub fn join(
        addresses: &[SocketAddr],
        request: JoinRequest,
        provider: Arc<dyn StatusProvider>,
    ) -> Result<Arc<Self>, RendezvousError> {
        let until = Instant::now() + request.join_timeout;
        let (client, from) = loop {
            match Self::connect_any(addresses, &request, until) {
                Ok(connected) => break connected,
                Err(error @ RendezvousError::Token { .. }) => return Err(error),
                // The port may still be in use by another run, or the coordinator not be started yet.
                Err(_) if Instant::now() < until => thread::sleep(RETRY_INTERVAL),
                Err(error) => return Err(error),
            }
        };
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

    fn connect_any(
        addresses: &[SocketAddr],
        request: &JoinRequest,
        until: Instant,
    ) -> Result<(Arc<Self>, BufReader<TcpStream>), RendezvousError> {
        let mut last = RendezvousError::Unreachable {
            addresses: super::list(addresses),
            waited: request.join_timeout.as_secs(),
            reason: "no address was given".into(),
        };
        for address in addresses {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = CONNECT_TIMEOUT.min(left).max(Duration::from_millis(1));
            let connected = TcpStream::connect_timeout(address, timeout)
                .map_err(HandshakeError::from)
                .and_then(|stream| Self::handshake(stream, *address, request));
            match connected {
                Ok(connected) => return Ok(connected),
                Err(HandshakeError::Token) => {
                    last = RendezvousError::Token {
                        address: address.to_string(),
                    };
                }
                // A wrong token at one address is the better error.
                Err(_) if matches!(last, RendezvousError::Token { .. }) => {}
                Err(error) => {
                    last = RendezvousError::Unreachable {
                        addresses: super::list(addresses),
                        waited: request.join_timeout.as_secs(),
                        reason: error.to_string(),
                    };
                }
            }
        }
        Err(last)
    }

    fn handshake(
        stream: TcpStream,
        address: SocketAddr,
        request: &JoinRequest,
    ) -> Result<(Arc<Self>, BufReader<TcpStream>), HandshakeError> {
        stream.set_nodelay(true)?;
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            rank: request.rank,
            size: request.size,
            world: request.world,
            host: super::host_name(),
            process: process::id(),
            join_timeout: request.join_timeout.as_secs_f64(),
            heartbeat_timeout: request.heartbeat_timeout.as_secs_f64(),
        };
        let hello = serde_json::to_string(&hello).map_err(io::Error::from)?;
        let (token, timeout) = (request.token.as_ref(), request.heartbeat_timeout);
        client_handshake(&stream, token, PURPOSE, &hello, timeout)?;
        let from = BufReader::new(stream.try_clone()?);
        // The coordinator sends a heartbeat every second.
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let client = Self {
            request: request.clone(),
            address,
            stream: Mutex::new(stream),
            state: Mutex::default(),
            condvar: Condvar::new(),
        };
        Ok((Arc::new(client), from))
    }

    fn spawn_reader(
        self: &Arc<Self>,
        mut from: BufReader<TcpStream>,
        provider: &Arc<dyn StatusProvider>,
    ) -> io::Result<()> {
        let (client, provider) = (Arc::clone(self), Arc::clone(provider));
        spawn("rendezvous", move || {
            let reason = loop {
                match message::read::<CoordinatorMessage>(&mut from) {
                    Ok(Some(message)) => client.handle(message, &*provider),
                    Ok(None) => break "has closed the connection".to_owned(),
                    Err(error) if is_timeout(&error) => {
                        let seconds = client.request.heartbeat_timeout.as_secs();
                        break format!("has sent no heartbeat for {seconds} s");
                    }
                    Err(error) => break format!("cannot be read ({error})"),
                }
            };
            client.connection_lost(&reason, &*provider);
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
                // If the send fails, the connection is closed, which the reader detects.
                let _ = self.send(&RankMessage::Status { question, status });
                return;
            }
            CoordinatorMessage::MissingRanks { question, found } => {
                state.answers.insert(question, found);
            }
            CoordinatorMessage::Failure(report) => {
                state.failure.get_or_insert(report);
            }
            CoordinatorMessage::Returned { rank, calls } => {
                state.returned.insert(rank, calls.into_iter().collect());
            }
            CoordinatorMessage::AllReturned => state.all_returned = true,
            CoordinatorMessage::Stop => state.stop = true,
        }
        drop(state);
        self.condvar.notify_all();
    }

    /// Without the coordinator the world fails, unless it has ended.
    fn connection_lost(&self, reason: &str, provider: &dyn StatusProvider) {
        let mut state = self.state.lock();
        if !state.leaving && state.refused.is_none() && !state.all_returned {
            let own = describe_rank(self.request.rank, &provider.position());
            state.lost = state.failure.is_none();
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
        // The coordinator times out first: its error names the missing ranks.
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

    /// Sends the next heartbeat at once, at the start of a step: a failure report then has the step.
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

    /// The failure of the world, once a rank has failed.
    pub fn failure(&self) -> Option<FailureReport> {
        self.state.lock().failure.clone()
    }

    /// Whether the world failed because the connection to the coordinator was lost.
    pub fn is_lost(&self) -> bool {
        self.state.lock().lost
    }

    /// Whether the launcher requests that all ranks stop after the current step.
    pub fn stop_requested(&self) -> bool {
        self.state.lock().stop
    }

    /// Whether a rank has returned without joining a collective.
    pub fn has_returned_before(&self, rank: usize, call: CallId) -> bool {
        let state = self.state.lock();
        let calls = state.returned.get(&rank);
        calls.is_some_and(|calls| {
            calls
                .get(&call.group)
                .is_none_or(|made| *made <= call.sequence)
        })
    }

    /// Queries all ranks whether they have joined a collective.
    pub fn missing_ranks(&self, call: CallId) -> MissingRanks {
        let question = {
            let mut state = self.state.lock();
            state.questions += 1;
            state.questions
        };
        let sent = self.send(&RankMessage::FindMissing { question, call });
        let until = Instant::now() + REPLY_TIMEOUT;
        let is_answered =
            |state: &ClientState| state.answers.contains_key(&question) || state.failure.is_some();
        let answered = sent.ok().and_then(|()| self.wait_until(until, is_answered));
        answered
            .and_then(|mut state| state.answers.remove(&question))
            .unwrap_or_default()
    }

    /// Reports the failure of this rank. Returns the failure of the world, once it is decided.
    pub fn fail(&self, cause: FailureCause, position: RankPosition) -> Option<FailureReport> {
        // If the send fails, the connection is closed, which ends the world too.
        let _ = self.send(&RankMessage::Failed { cause, position });
        self.await_failure(REPLY_TIMEOUT)
    }

    /// Waits at most `timeout` for the world to fail.
    pub fn await_failure(&self, timeout: Duration) -> Option<FailureReport> {
        let until = Instant::now() + timeout;
        let state = self.wait_until(until, |state| state.failure.is_some())?;
        state.failure.clone()
    }

    /// Waits until the world ends; `None` if it has not failed.
    pub fn await_end(&self) -> Option<FailureReport> {
        let mut state = self.state.lock();
        self.condvar.wait_while(&mut state, |state| {
            state.failure.is_none() && !state.all_returned && !state.leaving
        });
        state.failure.clone()
    }

    /// Reports that this rank's closure has returned, with the number of collectives it made by group, and
    /// waits until all ranks have returned.
    pub fn return_with_all(&self, calls: Vec<(u64, u64)>) -> Result<(), FailureReport> {
        // If the send fails, the connection is closed, which the reader detects.
        let _ = self.send(&RankMessage::Returned(calls));
        match self.await_end() {
            None => Ok(()),
            Some(failure) => Err(failure),
        }
    }

    /// Closes the connection.
    pub fn leave(&self) {
        self.state.lock().leaving = true;
        self.condvar.notify_all();
        let _ = self.stream.lock().shutdown(Shutdown::Both);
    }

    fn is_closed(&self) -> bool {
        let state = self.state.lock();
        state.leaving || state.refused.is_some()
    }

    fn send(&self, message: &RankMessage) -> io::Result<()> {
        message::write(&mut *self.stream.lock(), message)
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

#[cfg(any(test, feature = "cuda"))]
impl KeyValueStore for RendezvousClient {
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let post = RankMessage::Post {
            key: key.into(),
            value: value.into(),
        };
        let posted = self.send(&post);
        posted.map_err(|error| store_error(format!("cannot post {key}: {error}")))
    }

    fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError> {
        let sent = self.send(&RankMessage::Read { key: key.into() });
        sent.map_err(|error| store_error(format!("cannot request {key}: {error}")))?;
        let until = Instant::now() + timeout;
        let is_posted =
            |state: &ClientState| state.posted.contains_key(key) || state.failure.is_some();
        let state = self.wait_until(until, is_posted);
        let value = state.and_then(|state| state.posted.get(key).cloned());
        value.ok_or_else(|| {
            let seconds = timeout.as_secs_f64();
            store_error(format!("no rank has posted {key} within {seconds:.1} s"))
        })
    }
}

#[cfg(any(test, feature = "cuda"))]
fn store_error(message: String) -> CommError {
    CommError::Engine {
        engine: "rendezvous".into(),
        message,
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = thread::Builder::new().name(name.into());
    builder.spawn(work).map(drop)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}
