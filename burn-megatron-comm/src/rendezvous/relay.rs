//! The relay of a machine: it connects its ranks to the coordinator over one connection.

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::client::{HEARTBEAT_INTERVAL, JoinRequest};
use super::connect::{connect, describe_end};
use super::links::WRITE_TIMEOUT;
use super::message::{self, CoordinatorMessage, Hello, RankMessage};
use super::rank_slot::duplicate;
use super::relay_message::{Delivery, RelayMessage};
use super::{PURPOSE, RendezvousError};
use crate::auth::{Connection, Listener, ListenerLimits};
use crate::report::call_log::RankPosition;

/// The time that a message waits for the messages of the other ranks, which mostly come at the same time.
const GATHER_TIME: Duration = Duration::from_millis(10);
/// After how long without a message a rank is reported as silent.
const SILENCE: Duration = Duration::from_secs(1);

/// The relay of a machine, in the process of its first rank.
#[derive(Debug)]
pub(crate) struct Relay {
    state: Arc<RelayState>,
    /// Dropped first, so that no rank connects while the others are disconnected.
    listener: Option<Listener>,
    coordinator: Option<Arc<TcpStream>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct RelayState {
    /// The rank in whose process it is.
    rank: usize,
    ranks: Mutex<LocalRanks>,
    /// A message for the coordinator is due.
    changed: Condvar,
    closing: AtomicBool,
    sent: AtomicUsize,
}

#[derive(Debug, Default)]
struct LocalRanks {
    connected: BTreeMap<usize, LocalRank>,
    /// The news that the coordinator has not been sent yet.
    message: RelayMessage,
    is_urgent: bool,
    /// Why the coordinator is lost, for ranks that connect later.
    lost: Option<CoordinatorMessage>,
}

/// A connection, locked while a message is sent.
type LocalStream = Arc<Mutex<Arc<TcpStream>>>;

#[derive(Debug)]
struct LocalRank {
    hello: Hello,
    stream: LocalStream,
    last_message: Instant,
    position: RankPosition,
}

impl Relay {
    /// Listens on `address`, a loopback one, for the `ranks` ranks of this machine, and connects to the coordinator at the
    /// first of its addresses that answers; `request` is that of the rank in this process. `None` if the address is in use: by
    /// the relay of other ranks on this machine, which serves these too.
    ///
    /// # Errors
    /// [`RendezvousError`] if the operating system refuses the address, or the coordinator cannot be reached.
    pub fn open(
        address: SocketAddr,
        ranks: usize,
        coordinator: &[SocketAddr],
        request: &JoinRequest,
    ) -> Result<Option<Self>, RendezvousError> {
        let state = Arc::new(RelayState {
            rank: request.rank,
            ranks: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            sent: AtomicUsize::new(0),
        });
        let server = state.clone();
        let serve = move |connection| {
            // A client with another token reports that itself.
            if let Connection::Authenticated { hello, stream } = connection {
                server.serve_rank(&hello, stream);
            }
        };
        let (token, limits) = (request.token.clone(), ListenerLimits::for_ranks(ranks));
        let listener = match Listener::open(&[address], token, PURPOSE, limits, serve) {
            Ok(listener) => listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Ok(None),
            Err(error) => {
                return Err(RendezvousError::Address {
                    address: address.to_string(),
                    reason: error.to_string(),
                });
            }
        };
        let mut relay = Self {
            state,
            listener: Some(listener),
            coordinator: None,
            threads: vec![],
        };
        let until = Instant::now() + request.join_timeout;
        let (stream, _) = connect(coordinator, request, true, until)?;
        relay.start(stream, request.heartbeat_timeout)?;
        Ok(Some(relay))
    }

    fn start(&mut self, stream: TcpStream, timeout: Duration) -> io::Result<()> {
        let from = Arc::new(stream);
        let to = from.clone();
        self.coordinator = Some(from.clone());
        let (reader, sender) = (self.state.clone(), self.state.clone());
        let reader = spawn("relay-reader", move || reader.pass_on(&from, timeout))?;
        self.threads.push(reader);
        let sender = spawn("relay-sender", move || sender.send_messages(&to))?;
        self.threads.push(sender);
        Ok(())
    }

    /// Waits at most `timeout` until all ranks have disconnected, and the coordinator has been told.
    pub fn wait_for_disconnects(&self, timeout: Duration) {
        let until = Instant::now() + timeout;
        let is_done = || {
            let ranks = self.state.ranks.lock();
            ranks.connected.is_empty() && ranks.message.is_empty()
        };
        while !is_done() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The address that it listens on.
    #[cfg(test)]
    pub fn address(&self) -> SocketAddr {
        self.listener
            .as_ref()
            .expect("it listens until it is dropped")
            .addresses()[0]
    }

    /// The number of ranks that are connected.
    #[cfg(test)]
    pub fn ranks(&self) -> usize {
        self.state.ranks.lock().connected.len()
    }

    /// The number of messages sent.
    #[cfg(test)]
    pub fn sent(&self) -> usize {
        self.state.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Release);
        drop(self.listener.take());
        if let Some(stream) = &self.coordinator {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for rank in self.state.ranks.lock().connected.values() {
            let _ = rank.stream.lock().shutdown(Shutdown::Both);
        }
        self.state.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl RelayState {
    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Serves one authenticated rank until it disconnects.
    fn serve_rank(&self, hello: &str, stream: TcpStream) {
        let Ok(hello) = Hello::read(hello) else {
            return;
        };
        let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        // Reads and writes share its file descriptor.
        let from = Arc::new(stream);
        let (rank, stream) = (hello.rank, Arc::new(Mutex::new(from.clone())));
        self.send(&stream, &CoordinatorMessage::Relay { rank: self.rank });
        match self.register(hello, &stream) {
            Ok(None) => {}
            Ok(Some(lost)) => self.send(&stream, &lost),
            Err(reason) => return self.send(&stream, &CoordinatorMessage::Refused(reason)),
        }
        let mut from = BufReader::new(&*from);
        while let Ok(Some(message)) = message::read::<RankMessage>(&mut from) {
            self.handle(rank, message);
        }
        self.tell(|ranks| {
            ranks.connected.remove(&rank);
            ranks.message.disconnected.push(rank);
        });
    }

    /// Registers a rank; an error if another one has its number. Returns what it has missed if the coordinator is lost.
    fn register(
        &self,
        hello: Hello,
        stream: &LocalStream,
    ) -> Result<Option<CoordinatorMessage>, String> {
        self.tell(|ranks| {
            if let Some(other) = ranks.connected.get(&hello.rank) {
                let reason = duplicate(&hello, &other.hello);
                ranks.message.duplicates.push(hello);
                return Err(reason);
            }
            ranks.message.joined.push(hello.clone());
            let rank = LocalRank {
                stream: Arc::clone(stream),
                last_message: Instant::now(),
                position: RankPosition::NoCalls,
                hello,
            };
            ranks.connected.insert(rank.hello.rank, rank);
            Ok(ranks.lost.clone())
        })
    }

    fn handle(&self, rank: usize, message: RankMessage) {
        if let RankMessage::Heartbeat(position) = message {
            return self.heartbeat(rank, position);
        }
        self.tell(|ranks| {
            if let Some(own) = ranks.connected.get_mut(&rank) {
                own.last_message = Instant::now();
            }
            ranks.message.add(rank, message);
        });
    }

    /// A heartbeat is passed on with the next one of the relay, and its position if it is new.
    fn heartbeat(&self, rank: usize, position: RankPosition) {
        let mut ranks = self.ranks.lock();
        let Some(own) = ranks.connected.get_mut(&rank) else {
            return;
        };
        own.last_message = Instant::now();
        if own.position != position {
            own.position = position.clone();
            ranks.message.set_position(rank, position);
        }
    }

    /// Changes what the coordinator is told at once.
    fn tell<T>(&self, change: impl FnOnce(&mut LocalRanks) -> T) -> T {
        let mut ranks = self.ranks.lock();
        let result = change(&mut ranks);
        ranks.is_urgent = true;
        drop(ranks);
        self.changed.notify_all();
        result
    }

    /// Sends a heartbeat four times a second, and messages of ranks when they come.
    fn send_messages(&self, mut to: &TcpStream) {
        while !self.is_closing() {
            let until = Instant::now() + HEARTBEAT_INTERVAL;
            let mut ranks = self.ranks.lock();
            let is_idle = |ranks: &mut LocalRanks| !ranks.is_urgent && !self.is_closing();
            self.changed.wait_while_until(&mut ranks, is_idle, until);
            if ranks.is_urgent {
                drop(ranks);
                thread::sleep(GATHER_TIME);
                ranks = self.ranks.lock();
            }
            ranks.is_urgent = false;
            let mut message = mem::take(&mut ranks.message);
            message.silent = ranks.silent();
            drop(ranks);
            self.sent.fetch_add(1, Ordering::Relaxed);
            if message::write(&mut to, &message).is_err() {
                // The reader detects that too.
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    /// Passes on what the coordinator sends.
    fn pass_on(&self, from: &TcpStream, timeout: Duration) {
        let mut from = BufReader::new(from);
        let end = loop {
            match message::read::<Delivery>(&mut from) {
                Ok(Some(Delivery { ranks, message })) => self.deliver(ranks, &message),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        if !self.is_closing() {
            let reason = describe_end(end, timeout);
            self.deliver(None, &CoordinatorMessage::Lost(reason));
        }
    }

    fn deliver(&self, to: Option<Vec<usize>>, message: &CoordinatorMessage) {
        let mut ranks = self.ranks.lock();
        if let (None, CoordinatorMessage::Refused(_) | CoordinatorMessage::Lost(_)) = (&to, message)
        {
            ranks.lost.get_or_insert_with(|| message.clone());
        }
        let connected = &ranks.connected;
        let streams: Vec<_> = match to {
            None => connected.values().map(|rank| rank.stream.clone()).collect(),
            Some(to) => {
                let found = to.iter().filter_map(|rank| connected.get(rank));
                found.map(|rank| rank.stream.clone()).collect()
            }
        };
        drop(ranks);
        streams.iter().for_each(|stream| self.send(stream, message));
    }

    /// Sends a message. A connection on which that fails is closed: a part of the line may have been sent.
    fn send(&self, to: &LocalStream, message: &CoordinatorMessage) {
        self.sent.fetch_add(1, Ordering::Relaxed);
        let to = to.lock();
        if message::write(&mut &**to, message).is_err() {
            let _ = to.shutdown(Shutdown::Both);
        }
    }
}

impl LocalRanks {
    /// The ranks that have sent nothing for a while, with the seconds.
    fn silent(&self) -> Vec<(usize, f64)> {
        let silence = |(rank, own): (&usize, &LocalRank)| (*rank, own.last_message.elapsed());
        let silent = self.connected.iter().map(silence);
        let silent = silent.filter(|(_, silence)| *silence >= SILENCE);
        silent
            .map(|(rank, silence)| (rank, silence.as_secs_f64()))
            .collect()
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(work)
}
