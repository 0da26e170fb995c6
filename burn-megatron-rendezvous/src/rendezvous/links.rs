//! The connections of the coordinator, one per rank.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::message::{self, CoordinatorMessage};
use super::registry::Recipient;

/// The timeout of a send, so that a stopped process does not block other ranks.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// The connection to a rank.
#[derive(Debug)]
pub(super) struct Link(Mutex<Arc<TcpStream>>);

impl Link {
    pub fn new(stream: Arc<TcpStream>) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Self(Mutex::new(stream)))
    }

    /// Sends a line. If the rank cannot be reached, it fails later because its heartbeats are missing.
    pub fn send(&self, line: &[u8]) {
        let stream = self.0.lock();
        if io::Write::write_all(&mut &**stream, line).is_err() {
            // A part of the line may have been sent, so the connection cannot be used anymore.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The connections to all ranks, indexed by rank.
#[derive(Debug)]
pub(super) struct Links {
    ranks: Mutex<Vec<Option<Arc<Link>>>>,
    #[cfg(test)]
    pub sent: AtomicUsize,
}

impl Links {
    pub fn new(size: usize) -> Self {
        Self {
            ranks: Mutex::new(vec![None; size]),
            #[cfg(test)]
            sent: AtomicUsize::new(0),
        }
    }

    pub fn set(&self, rank: usize, link: Link) {
        self.ranks.lock()[rank] = Some(Arc::new(link));
    }

    /// Drops a closed connection to free its file descriptor.
    pub fn remove(&self, rank: usize) {
        self.ranks.lock()[rank] = None;
    }

    /// Sends messages. A message to all ranks is serialized once.
    pub fn send(&self, outgoing: &[(Recipient, CoordinatorMessage)]) {
        for (recipient, message) in outgoing {
            let recipients = match recipient {
                Recipient::All => self.all(),
                Recipient::Rank(rank) => self.ranks.lock()[*rank].iter().cloned().collect(),
            };
            #[cfg(test)]
            self.sent.fetch_add(recipients.len(), Ordering::Relaxed);
            let line = message::line(message);
            recipients.iter().for_each(|link| link.send(&line));
        }
    }

    /// Closes all connections.
    pub fn close(&self) {
        for link in self.all() {
            let _ = link.0.lock().shutdown(Shutdown::Both);
        }
    }

    fn all(&self) -> Vec<Arc<Link>> {
        self.ranks.lock().iter().flatten().cloned().collect()
    }
}
