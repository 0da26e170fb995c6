//! The server of a rendezvous.

use std::io::{self, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::links::{Link, Links};
use super::message::{self, CoordinatorMessage, FailureKind, Hello, RankMessage};
use super::open_files;
use super::registry::{JoinError, Outgoing, Recipient, Registry, RendezvousTimeouts};
use crate::auth::{Connection, Listener, ListenerLimits, Token, spawn};
use crate::failure_report::FailureReport;
use crate::launch;

/// The interval at which the coordinator checks its timeouts.
const TICK_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which the coordinator sends a heartbeat to all ranks.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The coordinator of one world, hosted by rank 0 or by the launcher.
///
/// Every rank keeps a connection to it. It reports when all ranks have joined, stores small values, checks heartbeats, and
/// sends one failure report to all ranks: which rank failed, and what each was doing.
#[derive(Debug)]
pub struct Coordinator {
    state: Arc<CoordinatorState>,
    /// Dropped first, so that no rank connects while the others are disconnected.
    listener: Option<Listener>,
    timer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct CoordinatorState {
    began: Instant,
    registry: Mutex<Registry>,
    links: Links,
    closing: AtomicBool,
}

impl Coordinator {
    /// Listens on `address` for `ranks` ranks that have `token`, for a launcher; port 0 picks a free one. Raises the
    /// limit of open files of this process up to 65,536, as each rank has a connection. The
    /// ranks get the token from the environment variable [`Token::VARIABLE`], and `job`, the id of this world, from
    /// [`Launch::JOB_ID`](crate::Launch::JOB_ID): ranks with another id are refused.
    ///
    /// `join_timeout` is the time for all ranks to join, `heartbeat_timeout` that for a heartbeat of each; a
    /// rank that joins with a shorter one lowers it.
    ///
    /// # Errors
    /// The operating system refuses, for example because the port is in use.
    pub fn host(
        address: SocketAddr,
        ranks: usize,
        job: Option<&str>,
        token: &Token,
        join_timeout: Duration,
        heartbeat_timeout: Duration,
    ) -> io::Result<Self> {
        let timeouts = RendezvousTimeouts {
            join: join_timeout,
            heartbeat: heartbeat_timeout,
        };
        let world = job.map_or(0, launch::world_id_of);
        Self::listen(&[address], ranks, world, Some(token), timeouts)
    }

    /// Listens on `addresses` for the `size` ranks of the world with the id `world` (0 if it has none). Port
    /// 0 picks a free one.
    ///
    /// # Errors
    /// The operating system refuses, for example because the port is in use; or an address is reachable from
    /// other machines and there is no token.
    pub fn listen(
        addresses: &[SocketAddr],
        size: usize,
        world: u64,
        token: Option<&Token>,
        timeouts: RendezvousTimeouts,
    ) -> io::Result<Self> {
        open_files::raise_limit();
        let state = Arc::new(CoordinatorState {
            began: Instant::now(),
            registry: Mutex::new(Registry::new(size, world, timeouts)),
            links: Links::new(size),
            closing: AtomicBool::new(false),
        });
        let (server, timer) = (state.clone(), state.clone());
        let serve = move |connection| match connection {
            Connection::Authenticated { hello, stream } => server.serve(&hello, stream),
            Connection::WrongToken(from) => server.registry.lock().wrong_token(from.ip()),
        };
        let limits = ListenerLimits::for_ranks(size);
        let listener = Listener::open(addresses, token.cloned(), limits, serve)?;
        let timer = spawn("rendezvous-clock", move || timer.run_timer())?;
        Ok(Self {
            state,
            listener: Some(listener),
            timer: Some(timer),
        })
    }

    /// The first address that it listens on, with its port.
    pub fn address(&self) -> SocketAddr {
        self.addresses()[0]
    }

    /// The addresses that it listens on, in the given order.
    pub fn addresses(&self) -> &[SocketAddr] {
        let listener = self.listener.as_ref();
        listener
            .expect("it listens until it is dropped")
            .addresses()
    }

    /// Requests that all ranks stop after the current step. Returns whether they have joined, as the request is
    /// lost otherwise.
    pub fn request_stop(&self) -> bool {
        let complete = self.state.registry.lock().is_complete();
        if complete {
            self.state
                .send(vec![(Recipient::All, CoordinatorMessage::Stop)]);
        }
        complete
    }

    /// Reports that the process of a rank has ended, and how, for example `"ended with exit code 1"`. If the
    /// rank had not joined, the world fails.
    pub fn process_ended(&self, rank: usize, how: &str) {
        let outgoing = self
            .state
            .registry
            .lock()
            .process_ended(rank, how, self.state.now());
        self.state.send(outgoing);
    }

    /// The rank of the failure report, once a rank has failed.
    pub fn failed_rank(&self) -> Option<usize> {
        self.failure_of_joined_ranks().map(|failure| failure.rank)
    }

    /// The kind of the failure, once a rank has failed.
    pub fn failure_kind(&self) -> Option<FailureKind> {
        let registry = self.state.registry.lock();
        registry.failure.as_ref().map(|(kind, _)| *kind)
    }

    /// Two lines for the user, once a rank has failed: which one and why, and what each rank was doing. `None`
    /// if no rank ever joined, as with a program that does not use this library.
    pub fn failure_report(&self) -> Option<String> {
        self.failure_of_joined_ranks()
            .map(|failure| failure.to_string())
    }

    fn failure_of_joined_ranks(&self) -> Option<FailureReport> {
        let registry = self.state.registry.lock();
        let failure = registry.failure.as_ref().map(|(_, report)| report);
        failure.filter(|_| registry.has_registered_ranks()).cloned()
    }

    /// The number of messages sent.
    #[cfg(test)]
    pub(super) fn sent(&self) -> usize {
        self.state.links.sent.load(Ordering::Relaxed)
    }

    /// Waits at most `timeout` until all ranks that joined have disconnected; returns whether they have.
    pub fn wait_for_disconnects(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        while !self.state.registry.lock().all_disconnected() {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Release);
        drop(self.listener.take());
        self.state.links.close();
        if let Some(timer) = self.timer.take() {
            let _ = timer.join();
        }
    }
}

impl CoordinatorState {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Serves one authenticated rank until it disconnects.
    fn serve(&self, hello: &str, stream: TcpStream) {
        let Ok(hello) = Hello::read(hello) else {
            return;
        };
        let rank = hello.rank;
        // Reads and writes share its file descriptor.
        let stream = Arc::new(stream);
        let Ok(link) = Link::new(stream.clone()) else {
            return;
        };
        let mut registry = self.registry.lock();
        let outgoing = match registry.join(hello, self.now()) {
            Ok(outgoing) => {
                // Under the lock, so that no message misses it.
                self.links.set(rank, link);
                outgoing
            }
            Err(error) => {
                drop(registry);
                return self.refuse(&link, error);
            }
        };
        drop(registry);
        self.send(outgoing);
        let mut from = BufReader::new(&*stream);
        while let Ok(Some(message)) = message::read::<RankMessage>(&mut from) {
            let outgoing = self.registry.lock().handle(rank, message, self.now());
            self.send(outgoing);
        }
        if self.is_closing() {
            // The coordinator has closed the connection, not the rank.
            return;
        }
        let outgoing = self.registry.lock().disconnected(rank, self.now());
        self.links.remove(rank);
        self.send(outgoing);
    }

    fn refuse(&self, link: &Link, error: JoinError) {
        let (reason, outgoing) = match error {
            JoinError::UnknownClient(reason) => (reason, vec![]),
            JoinError::Incompatible { reason, outgoing } => (reason, outgoing),
        };
        link.send(&message::line(&CoordinatorMessage::Refused(reason)));
        self.send(outgoing);
    }

    fn run_timer(&self) {
        let mut next_heartbeat = Duration::ZERO;
        while !self.is_closing() {
            thread::sleep(TICK_INTERVAL);
            let now = self.now();
            let mut outgoing = self.registry.lock().tick(now);
            if now >= next_heartbeat {
                next_heartbeat = now + HEARTBEAT_INTERVAL;
                outgoing.push((Recipient::All, CoordinatorMessage::Heartbeat));
            }
            self.send(outgoing);
        }
    }

    /// Sends messages. A rank that cannot be reached fails by its missing heartbeats.
    fn send(&self, outgoing: Outgoing) {
        self.links.send(&outgoing);
    }
}
