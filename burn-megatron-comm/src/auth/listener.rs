//! A listener that lets in who knows the token, and that strangers can neither fill nor block.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::handshake::{Admission, admit};
use super::token::Token;

/// How often the listener looks whether somebody has come: it can end at any time, whatever the network
/// does.
const LOOK: Duration = Duration::from_millis(20);
/// The pause after the operating system has refused a connection or a thread.
const PAUSE: Duration = Duration::from_millis(100);
/// A thread per connection only waits.
const STACK_BYTES: usize = 256 << 10;

/// What connections may cost that have not shown the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many there may be at once: when one more comes, the oldest goes.
    pub pending: usize,
    /// The time for the whole hello.
    pub hello: Duration,
}

impl Limits {
    /// The limits for `ranks` ranks, which may all come at once.
    pub fn for_ranks(ranks: usize) -> Self {
        Self {
            pending: 32 + ranks,
            hello: Duration::from_secs(10),
        }
    }
}

/// Who has come to a [`Listener`].
#[derive(Debug)]
pub enum Arrival {
    /// Somebody who knows the token, with its hello.
    Known {
        /// What it said of itself.
        hello: String,
        /// The connection.
        stream: TcpStream,
    },
    /// Somebody with another token, who was turned away.
    OtherToken(SocketAddr),
}

/// A TCP listener that asks for the token. Every connection is served in a thread of its own.
#[derive(Debug)]
pub struct Listener {
    addresses: Vec<SocketAddr>,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on `addresses`, at a free port where it is 0, for those who have `token` and come for
    /// `purpose`. Without a token only loopback addresses will do.
    ///
    /// # Errors
    /// What the operating system says, such as that a port is taken.
    pub fn open(
        addresses: &[SocketAddr],
        token: Option<Token>,
        purpose: &'static str,
        limits: Limits,
        serve: impl Fn(Arrival) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        if token.is_none()
            && let Some(open) = addresses.iter().find(|address| !address.ip().is_loopback())
        {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "without a token nothing listens on {open}, which other machines may reach"
                ),
            ));
        }
        let listeners: io::Result<Vec<_>> = addresses.iter().map(TcpListener::bind).collect();
        let listeners = listeners?;
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        let own: io::Result<Vec<_>> = listeners.iter().map(TcpListener::local_addr).collect();
        let closing = Arc::new(AtomicBool::new(false));
        let desk = Arc::new(Desk {
            token,
            purpose,
            limits,
            closing: Arc::clone(&closing),
            pending: Mutex::default(),
            serve: Box::new(serve),
        });
        let work = move || desk.take_in(&listeners);
        let thread = spawn("listener", work)?;
        Ok(Self {
            addresses: own?,
            closing,
            thread: Some(thread),
        })
    }

    /// Where it listens, in the order that was given.
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

struct Desk {
    token: Option<Token>,
    purpose: &'static str,
    limits: Limits,
    closing: Arc<AtomicBool>,
    /// Connections that have not shown the token yet, the oldest first.
    pending: Mutex<VecDeque<Arc<TcpStream>>>,
    serve: Box<dyn Fn(Arrival) + Send + Sync>,
}

impl Desk {
    fn take_in(self: Arc<Self>, listeners: &[TcpListener]) {
        while !self.closing.load(Ordering::Acquire) {
            let mut came = false;
            for listener in listeners {
                match listener.accept() {
                    Ok((stream, _)) => {
                        came = true;
                        self.hear(stream);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // What is missing, such as a file descriptor, may come back.
                    Err(_) => thread::sleep(PAUSE),
                }
            }
            if !came {
                thread::sleep(LOOK);
            }
        }
        for stream in self.pending().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn hear(self: &Arc<Self>, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut pending = self.pending();
        if pending.len() >= self.limits.pending
            && let Some(oldest) = pending.pop_front()
        {
            // A process of the run says its hello at once, and comes again if this was one.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        pending.push_back(Arc::clone(&stream));
        drop(pending);
        let desk = Arc::clone(self);
        if spawn("connection", move || desk.attend(stream)).is_err() {
            // Who cannot have a thread sees the connection closed.
            self.pending().pop_back();
            thread::sleep(PAUSE);
        }
    }

    /// Hears one hello, and serves the connection if it is in order.
    fn attend(&self, stream: Arc<TcpStream>) {
        let until = Instant::now() + self.limits.hello;
        let admitted = blocking(&stream).and_then(|()| {
            let timed = Timed {
                stream: &stream,
                until,
            };
            admit(timed, self.token.as_ref(), self.purpose, || {
                self.forget(&stream)
            })
        });
        self.forget(&stream);
        // Whoever has it besides is closing it.
        let Some(stream) = Arc::into_inner(stream) else {
            return;
        };
        match admitted {
            Ok(Admission::Known(hello)) => {
                let timeless = stream.set_read_timeout(None);
                if timeless
                    .and_then(|()| stream.set_write_timeout(None))
                    .is_ok()
                {
                    (self.serve)(Arrival::Known { hello, stream });
                }
            }
            Ok(Admission::OtherToken) => {
                if let Ok(from) = stream.peer_addr() {
                    (self.serve)(Arrival::OtherToken(from));
                }
            }
            // A stranger, of whom nothing is to be said.
            Err(_) => {}
        }
    }

    /// Takes a connection off the list of those that have shown nothing; whether it was still on it.
    fn forget(&self, stream: &Arc<TcpStream>) -> bool {
        let mut pending = self.pending();
        let before = pending.len();
        pending.retain(|other| !Arc::ptr_eq(other, stream));
        pending.len() < before
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// On some systems a connection is as its listener was.
fn blocking(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let builder = thread::Builder::new().name(name.into());
    builder.stack_size(STACK_BYTES).spawn(work)
}

/// A connection on which all reads and writes together have until a time.
#[derive(Debug)]
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
