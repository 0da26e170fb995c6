//! The server of the rendezvous.

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

/// The interval at which the coordinator checks timeouts.
const TICK_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which the coordinator sends a heartbeat to all ranks.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The rendezvous server of one world. It is hosted by rank 0 or by the launcher.
///
/// Every rank keeps a connection to the coordinator. The coordinator informs the ranks when all ranks have joined,
/// stores small values, and checks heartbeats. After a failure, it sends one failure report to all ranks. The report
/// contains the failed rank and the position of each rank.
#[derive(Debug)]
pub struct Coordinator {
    state: Arc<CoordinatorState>,
    /// The listener is dropped first, so that no rank connects while other ranks are disconnected.
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
    /// Hosts the rendezvous of a launcher. Listens on `address` for `ranks` ranks that have the token. Port 0 selects a
    /// free port.
    ///
    /// Raises the limit of open files of this process up to 65,536, because each rank has a connection. The ranks read
    /// the token from the environment variable [`Token::VARIABLE`]. They read `job`, the id of this world, from the
    /// environment variable [`Launch::JOB_ID`](crate::Launch::JOB_ID). Ranks with a different id are refused.
    ///
    /// All ranks must join within `join_timeout`. Each rank must send a heartbeat within `heartbeat_timeout`. If a rank
    /// joins with a shorter timeout, the shorter timeout is used.
    ///
    /// # Errors
    /// An error if the operating system rejects the address, for example because the port is in use.
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

    /// Hosts the rendezvous of a world. `world` is the id of the world, or 0 if the world has no id. Listens on
    /// `addresses` for `size` ranks. Port 0 selects a free port.
    ///
    /// # Errors
    /// An error if the operating system rejects an address, for example because the port is in use. Also an error if
    /// there is no token and an address can be reached from other machines.
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

    /// Returns the first address on which the coordinator listens, including the port.
    pub fn address(&self) -> SocketAddr {
        self.addresses()[0]
    }

    /// Returns the addresses on which the coordinator listens, in the given order.
    pub fn addresses(&self) -> &[SocketAddr] {
        let listener = self.listener.as_ref();
        listener
            .expect("it listens until it is dropped")
            .addresses()
    }

    /// Requests that all ranks stop after the current step. Returns whether all ranks have joined. If not, the request
    /// has no effect.
    pub fn request_stop(&self) -> bool {
        let complete = self.state.registry.lock().is_complete();
        if complete {
            self.state
                .send(vec![(Recipient::All, CoordinatorMessage::Stop)]);
        }
        complete
    }

    /// Reports that the process of a rank has ended. `how` describes how it ended, for example `"ended with exit code
    /// 1"`. If the rank had not joined, the world fails.
    pub fn process_ended(&self, rank: usize, how: &str) {
        let outgoing = self
            .state
            .registry
            .lock()
            .process_ended(rank, how, self.state.now());
        self.state.send(outgoing);
    }

    /// Returns the rank in the failure report, or `None` if no rank has failed.
    pub fn failed_rank(&self) -> Option<usize> {
        self.failure_of_joined_ranks().map(|failure| failure.rank)
    }

    /// Returns the kind of the failure, or `None` if no rank has failed.
    pub fn failure_kind(&self) -> Option<FailureKind> {
        let registry = self.state.registry.lock();
        registry.failure.as_ref().map(|(kind, _)| *kind)
    }

    /// Returns the failure report for the user in two lines: the failed rank with its error, and the position of each
    /// rank. Returns `None` if no rank has failed, or if no rank has ever joined, for example because the program does
    /// not use this library.
    pub fn failure_report(&self) -> Option<String> {
        self.failure_of_joined_ranks()
            .map(|failure| failure.to_string())
    }

    fn failure_of_joined_ranks(&self) -> Option<FailureReport> {
        let registry = self.state.registry.lock();
        let failure = registry.failure.as_ref().map(|(_, report)| report);
        failure.filter(|_| registry.has_registered_ranks()).cloned()
    }

    /// Returns the number of messages that the coordinator has sent.
    #[cfg(test)]
    pub(super) fn sent(&self) -> usize {
        self.state.links.sent.load(Ordering::Relaxed)
    }

    /// Waits up to `timeout` until all ranks that have joined are disconnected. Returns whether they are disconnected.
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

    /// Serves one authenticated rank until the rank disconnects.
    fn serve(&self, hello: &str, stream: TcpStream) {
        let Ok(hello) = Hello::read(hello) else {
            return;
        };
        let rank = hello.rank;
        // Reads and writes share the file descriptor of the connection.
        let stream = Arc::new(stream);
        let Ok(link) = Link::new(stream.clone()) else {
            return;
        };
        let mut registry = self.registry.lock();
        let outgoing = match registry.join(hello, self.now()) {
            Ok(outgoing) => {
                // The link is set under the lock, so that it receives every later message.
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

    /// Sends messages. If a rank cannot be reached, it fails later because its heartbeats are missing.
    fn send(&self, outgoing: Outgoing) {
        self.links.send(&outgoing);
    }
}
