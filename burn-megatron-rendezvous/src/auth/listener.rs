//! A listener that requires the token. Clients without the token cannot exhaust its resources or block it.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::SockRef;

use super::handshake::{HandshakeOutcome, server_handshake};
use super::token::Token;

/// The interval at which the listener polls for connections, so that the listener can be closed at any time.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The pause after the operating system rejected a connection or could not start a thread.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum number of connections that wait to be accepted. The standard library uses 128, which is too low if all
/// ranks connect at the same time. The operating system may lower the number (`net.core.somaxconn` on Linux).
const BACKLOG: i32 = 4096;
/// The stack size of a connection thread. These threads need little stack.
const STACK_BYTES: usize = 256 << 10;

/// The limits on connections that are not authenticated yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerLimits {
    /// The maximum number of open connections that are not authenticated. If this number is exceeded, the oldest of
    /// these connections is closed.
    pub pending: usize,
    /// The timeout of the complete handshake.
    pub hello: Duration,
}

impl ListenerLimits {
    /// Returns the limits for a world of `ranks` ranks that may all connect at the same time.
    pub fn for_ranks(ranks: usize) -> Self {
        Self {
            pending: 32 + ranks,
            hello: Duration::from_secs(10),
        }
    }
}

/// A connection to a [`Listener`].
#[derive(Debug)]
pub enum Connection {
    /// The client has proved that it has the token.
    Authenticated {
        /// The first message of the client, which is part of the handshake.
        hello: String,
        /// The authenticated connection.
        stream: TcpStream,
    },
    /// The client has a different token and was rejected.
    WrongToken(SocketAddr),
}

/// A TCP listener that requires the token. Each connection is handled by its own thread.
#[derive(Debug)]
pub struct Listener {
    addresses: Vec<SocketAddr>,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on `addresses` for clients that have the token. Port 0 selects a free port. If `token` is `None`, all
    /// addresses must be loopback addresses.
    ///
    /// # Errors
    /// If the operating system rejects an address, for example because the port is in use.
    pub fn open(
        addresses: &[SocketAddr],
        token: Option<Token>,
        limits: ListenerLimits,
        on_connection: impl Fn(Connection) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        if token.is_none()
            && let Some(open) = addresses.iter().find(|address| !address.ip().is_loopback())
        {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("invalid address {open}: expected a loopback address, or a token"),
            ));
        }
        let listeners: io::Result<Vec<_>> = addresses.iter().map(TcpListener::bind).collect();
        let listeners = listeners?;
        for listener in &listeners {
            SockRef::from(listener).listen(BACKLOG)?;
            listener.set_nonblocking(true)?;
        }
        let own: io::Result<Vec<_>> = listeners.iter().map(TcpListener::local_addr).collect();
        let closing = Arc::new(AtomicBool::new(false));
        let state = Arc::new(ListenerState {
            token,
            limits,
            closing: Arc::clone(&closing),
            pending: Mutex::default(),
            on_connection: Box::new(on_connection),
        });
        let work = move || state.accept_all(&listeners);
        let thread = spawn("listener", work)?;
        Ok(Self {
            addresses: own?,
            closing,
            thread: Some(thread),
        })
    }

    /// Returns the addresses on which the listener listens, in the given order.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct ListenerState {
    token: Option<Token>,
    limits: ListenerLimits,
    closing: Arc<AtomicBool>,
    /// Connections that are not authenticated yet, oldest first.
    pending: Mutex<VecDeque<Arc<TcpStream>>>,
    on_connection: Box<dyn Fn(Connection) + Send + Sync>,
}

impl ListenerState {
    fn accept_all(self: Arc<Self>, listeners: &[TcpListener]) {
        while !self.closing.load(Ordering::Acquire) {
            let mut accepted = false;
            for listener in listeners {
                match listener.accept() {
                    Ok((stream, _)) => {
                        accepted = true;
                        self.spawn_handshake(stream);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The error may be temporary, for example a lack of file descriptors.
                    Err(_) => thread::sleep(RETRY_INTERVAL),
                }
            }
            if !accepted {
                thread::sleep(POLL_INTERVAL);
            }
        }
        for stream in self.pending.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn spawn_handshake(self: &Arc<Self>, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut pending = self.pending.lock();
        if pending.len() >= self.limits.pending
            && let Some(oldest) = pending.pop_front()
        {
            // A process of the run sends its hello at once, and reconnects if its connection was closed.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        pending.push_back(Arc::clone(&stream));
        drop(pending);
        let state = Arc::clone(self);
        if spawn("connection", move || state.serve(stream)).is_err() {
            // Without a thread, the connection is closed.
            self.pending.lock().pop_back();
            thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Runs the handshake and passes on the connection if the handshake succeeds.
    fn serve(&self, stream: Arc<TcpStream>) {
        let until = Instant::now() + self.limits.hello;
        let outcome = blocking(&stream).and_then(|()| {
            let timed = Timed {
                stream: &stream,
                until,
            };
            server_handshake(timed, timed, self.token.as_ref(), || self.forget(&stream))
        });
        self.forget(&stream);
        // If another reference exists, the connection is being closed.
        let Some(stream) = Arc::into_inner(stream) else {
            return;
        };
        match outcome {
            Ok(HandshakeOutcome::Authenticated(hello)) => {
                let cleared = stream.set_read_timeout(None);
                if cleared
                    .and_then(|()| stream.set_write_timeout(None))
                    .is_ok()
                {
                    (self.on_connection)(Connection::Authenticated { hello, stream });
                }
            }
            Ok(HandshakeOutcome::WrongToken) => {
                if let Ok(from) = stream.peer_addr() {
                    (self.on_connection)(Connection::WrongToken(from));
                }
            }
            // Invalid handshakes are not reported.
            Err(_) => {}
        }
    }

    /// Removes a connection from the pending connections. Returns whether it was pending.
    fn forget(&self, stream: &Arc<TcpStream>) -> bool {
        let mut pending = self.pending.lock();
        let before = pending.len();
        pending.retain(|other| !Arc::ptr_eq(other, stream));
        pending.len() < before
    }
}

/// Makes a connection blocking. On some systems, a connection inherits the non-blocking mode of the listener.
fn blocking(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)
}

/// Starts a thread with a small stack.
pub(crate) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let builder = thread::Builder::new().name(name.into());
    builder.stack_size(STACK_BYTES).spawn(work)
}

/// A connection with a single deadline for all reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed<'a> {
    pub stream: &'a TcpStream,
    pub until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        (&mut &*self.stream).read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        (&mut &*self.stream).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
