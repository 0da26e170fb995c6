//! The connections of the coordinator: one of each rank, or of each relay for the ranks of its node.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::message::{self, CoordinatorMessage};
use super::registry::Recipient;
use super::relay_message::Delivery;

/// The timeout of a send, so that a stopped process does not block the others.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection to a rank or a relay.
#[derive(Debug)]
pub(super) struct Link {
    /// `None` once a send has failed.
    stream: Mutex<Option<Arc<TcpStream>>>,
    is_relay: bool,
    sent: AtomicUsize,
}

impl Link {
    pub fn new(stream: Arc<TcpStream>, is_relay: bool) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Self {
            stream: Mutex::new(Some(stream)),
            is_relay,
            sent: AtomicUsize::new(0),
        })
    }

    /// Sends a message; `ranks` are those of a relay, `None` for all. A rank that cannot be reached fails by its missing
    /// heartbeats.
    pub fn send(&self, ranks: Option<Vec<usize>>, message: &CoordinatorMessage) {
        let mut stream = self.stream.lock();
        let Some(mut to) = stream.as_deref() else {
            return;
        };
        let written = if self.is_relay {
            let message = message.clone();
            message::write(&mut to, &Delivery { ranks, message })
        } else {
            message::write(&mut to, message)
        };
        self.sent.fetch_add(1, Ordering::Relaxed);
        if written.is_err() {
            // A part of the line may have been sent, so the connection cannot be used any more.
            let _ = to.shutdown(Shutdown::Both);
            *stream = None;
        }
    }

    fn close(&self) {
        if let Some(stream) = &*self.stream.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// All connections, and by rank the one that leads to it.
#[derive(Debug)]
pub(super) struct Links {
    all: Mutex<Vec<Arc<Link>>>,
    routes: Mutex<Vec<Option<Arc<Link>>>>,
    /// Messages sent over connections that are closed.
    sent: AtomicUsize,
}

impl Links {
    pub fn new(size: usize) -> Self {
        Self {
            all: Mutex::default(),
            routes: Mutex::new(vec![None; size]),
            sent: AtomicUsize::new(0),
        }
    }

    pub fn add(&self, link: Arc<Link>) {
        self.all.lock().push(link);
    }

    pub fn set_route(&self, rank: usize, link: &Arc<Link>) {
        self.routes.lock()[rank] = Some(Arc::clone(link));
    }

    /// Forgets a connection that is closed, so that its file descriptor is free.
    pub fn remove(&self, link: &Arc<Link>) {
        self.all.lock().retain(|other| !Arc::ptr_eq(other, link));
        let is_this = |route: &Option<Arc<Link>>| {
            route.as_ref().is_some_and(|other| Arc::ptr_eq(other, link))
        };
        let mut routes = self.routes.lock();
        for route in routes.iter_mut().filter(|route| is_this(route)) {
            *route = None;
        }
        self.sent
            .fetch_add(link.sent.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Sends messages: one to each connection for all ranks that it leads to.
    pub fn send(&self, outgoing: &[(Recipient, CoordinatorMessage)]) {
        let same = |(one, a): &(Recipient, _), (other, b): &(Recipient, _)| {
            *one != Recipient::All && *other != Recipient::All && a == b
        };
        for messages in outgoing.chunk_by(same) {
            let (first, message) = &messages[0];
            if *first == Recipient::All {
                let all = self.all.lock().clone();
                all.iter().for_each(|link| link.send(None, message));
                continue;
            }
            for (link, ranks) in self.by_link(messages) {
                link.send(Some(ranks), message);
            }
        }
    }

    /// The ranks that messages are for, by the connections that lead to them.
    fn by_link(
        &self,
        messages: &[(Recipient, CoordinatorMessage)],
    ) -> Vec<(Arc<Link>, Vec<usize>)> {
        let routes = self.routes.lock();
        let mut found: Vec<(Arc<Link>, Vec<usize>)> = vec![];
        let ranks = messages
            .iter()
            .filter_map(|(recipient, _)| match recipient {
                Recipient::All => None,
                Recipient::Rank(rank) => Some(*rank),
            });
        for rank in ranks {
            let Some(link) = &routes[rank] else { continue };
            // The ranks of a node mostly follow each other.
            match found.last_mut() {
                Some((last, ranks)) if Arc::ptr_eq(last, link) => ranks.push(rank),
                _ => found.push((Arc::clone(link), vec![rank])),
            }
        }
        found
    }

    /// The number of messages sent, and of connections.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let all = self.all.lock();
        let open: usize = all
            .iter()
            .map(|link| link.sent.load(Ordering::Relaxed))
            .sum();
        (open + self.sent.load(Ordering::Relaxed), all.len())
    }

    /// Closes all connections.
    pub fn close(&self) {
        self.all.lock().iter().for_each(|link| link.close());
    }
}
