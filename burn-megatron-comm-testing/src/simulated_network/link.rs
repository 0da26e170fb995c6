//! The simulated network link of one rank, and the records of its transfers.

use std::cmp::Ordering;
use std::mem;
use std::sync::{Arc, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use super::TransferSize;
use burn_megatron_comm::{Buffer, CommError, Group, Pending};

/// The maximum duration of a transfer. If a setting has the wrong unit, the call returns an error instead of blocking
/// for a long time.
pub(super) const MAX_TRANSFER_TIME: Duration = Duration::from_secs(600);

/// The simulated network link of one rank. It has a bandwidth, and a latency that is added to each call.
///
/// All groups of a rank share its link. The transfers run one after the other, in the order in which they were started.
/// All times count from the creation of the link.
#[derive(Debug)]
pub struct Link {
    latency: Duration,
    bytes_per_second: f64,
    nodes: Option<NodeLink>,
    epoch: Instant,
    /// The current time of the virtual clock, or `None` for a link with a real clock.
    virtual_clock: Option<Mutex<Duration>>,
    state: Mutex<LinkState>,
}

/// The network link between the ranks of one node.
#[derive(Clone, Copy, Debug)]
struct NodeLink {
    ranks: usize,
    bytes_per_second: f64,
}

#[derive(Debug, Default)]
struct LinkState {
    /// The time at which all scheduled transfers are complete.
    free_at: Duration,
    /// The time at which all scheduled messages have arrived.
    arrived_at: Duration,
    /// The number of transfers that [`Link::take_transfers`] has returned so far.
    taken: u64,
    transfers: Vec<Transfer>,
}

/// The error for an invalid setting of a link.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LinkError {
    /// The bandwidth is not positive.
    #[error("invalid bandwidth {0} bytes/s: expected more than 0 (infinity for no limit)")]
    Bandwidth(f64),
    /// The number of ranks per node is 0.
    #[error("invalid nodes of 0 ranks: expected at least 1")]
    Nodes,
    /// The latency is greater than 600 s, so its unit is probably wrong.
    #[error("invalid latency {0:?}: expected at most {MAX_TRANSFER_TIME:?}")]
    Latency(Duration),
}

/// The record of the transfer of one call over a [`Link`], including the time for which the rank waited for the call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfer {
    /// The name of the operation, for example `"all_gather"`.
    pub op: &'static str,
    /// The name of the group.
    pub group: String,
    /// The number of bytes that the rank sends, or for a receive the number of bytes that arrive.
    pub bytes: u64,
    /// The number of bytes that are transferred between [nodes](Link::with_nodes).
    pub between: u64,
    /// The time at which the call was started.
    pub asked: Duration,
    /// The time at which the transfer starts to use the link.
    pub started: Duration,
    /// The time at which the transfer is complete.
    pub done: Duration,
    /// The time at which the rank began to wait for the call. `None` if the wait has not ended.
    pub begin_wait: Option<Duration>,
    /// The time for which the rank was blocked while it waited for the call: first for the transfer, and then for the
    /// other ranks.
    pub waited: Duration,
}

impl Transfer {
    /// Returns the duration of the transfer on the link.
    pub fn duration(&self) -> Duration {
        self.done - self.started
    }
}

/// Returns the share of the transfer time that was hidden behind other work: 1 - (blocked time) / (transfer time). The
/// blocked time is the time for which the rank waited for transfers.
///
/// Returns 1 if nothing was transferred. Returns 0 if the rank was blocked for longer than the transfers took. This is
/// possible because the rank also waits for late ranks.
pub fn hidden_share(transfers: &[Transfer]) -> f64 {
    let total: Duration = transfers.iter().map(Transfer::duration).sum();
    let blocked: Duration = transfers.iter().map(|transfer| transfer.waited).sum();
    if total.is_zero() {
        return 1.0;
    }
    (1.0 - blocked.as_secs_f64() / total.as_secs_f64()).max(0.0)
}

impl Link {
    /// Creates a link with the given latency per call and the given bandwidth.
    ///
    /// # Errors
    /// [`LinkError`] if the bandwidth is not positive, or if the latency is greater than 600 s.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Arc<Self>, LinkError> {
        Self::with_clock(latency, bytes_per_second, None, None)
    }

    /// Creates a link with different bandwidths inside and between nodes. Each node has `ranks_per_node` consecutive
    /// world ranks. `bytes_per_second` is the bandwidth between nodes and `inside` is the bandwidth inside a node, both
    /// in bytes per second.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`LinkError::Nodes`] if `ranks_per_node` is 0.
    pub fn with_nodes(
        latency: Duration,
        bytes_per_second: f64,
        ranks_per_node: usize,
        inside: f64,
    ) -> Result<Arc<Self>, LinkError> {
        let nodes = NodeLink {
            ranks: ranks_per_node,
            bytes_per_second: inside,
        };
        Self::with_clock(latency, bytes_per_second, Some(nodes), None)
    }

    /// Creates a link with a virtual clock. The clock advances only if a rank waits for a transfer or calls
    /// [`advance`](Self::advance). Neither of them sleeps, so a test does not depend on the load of the machine.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_virtual_clock(
        latency: Duration,
        bytes_per_second: f64,
    ) -> Result<Arc<Self>, LinkError> {
        Self::with_clock(latency, bytes_per_second, None, Some(Mutex::default()))
    }

    fn with_clock(
        latency: Duration,
        bytes_per_second: f64,
        nodes: Option<NodeLink>,
        virtual_clock: Option<Mutex<Duration>>,
    ) -> Result<Arc<Self>, LinkError> {
        if let Some(nodes) = nodes {
            if nodes.ranks == 0 {
                return Err(LinkError::Nodes);
            }
            // The comparison also rejects NaN.
            if nodes.bytes_per_second.partial_cmp(&0.0) != Some(Ordering::Greater) {
                return Err(LinkError::Bandwidth(nodes.bytes_per_second));
            }
        }
        match (bytes_per_second > 0.0, latency <= MAX_TRANSFER_TIME) {
            (false, _) => Err(LinkError::Bandwidth(bytes_per_second)),
            (true, false) => Err(LinkError::Latency(latency)),
            (true, true) => Ok(Arc::new(Self {
                latency,
                bytes_per_second,
                nodes,
                epoch: Instant::now(),
                virtual_clock,
                state: Mutex::default(),
            })),
        }
    }

    /// Advances the clock of the link by the duration of a computation. With a real clock, sleeps for this duration.
    pub fn advance(&self, time: Duration) {
        match &self.virtual_clock {
            Some(now) => *now.lock() += time,
            None => sleep(time),
        }
    }

    /// Returns the time at which the link was created. The times of its transfers count from this time.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Returns the transfers since the last call of this method, in the order in which they were started. A transfer in
    /// flight is returned with the time that the rank has waited so far, and is not returned again.
    pub fn take_transfers(&self) -> Vec<Transfer> {
        let mut state = self.state.lock();
        state.taken += state.transfers.len() as u64;
        mem::take(&mut state.transfers)
    }

    pub(super) fn has_virtual_clock(&self) -> bool {
        self.virtual_clock.is_some()
    }

    pub(super) fn latency(&self) -> Duration {
        self.latency
    }

    /// Returns the number of ranks per node. Returns `usize::MAX` if no nodes are defined, so that all ranks are on one
    /// node.
    pub(super) fn ranks_per_node(&self) -> usize {
        self.nodes.map_or(usize::MAX, |nodes| nodes.ranks)
    }

    /// Returns the time since the creation of the link, according to the clock of the link.
    pub fn now(&self) -> Duration {
        match &self.virtual_clock {
            Some(now) => *now.lock(),
            None => self.epoch.elapsed(),
        }
    }

    /// Returns the duration of a transfer, without the latency.
    pub(super) fn transfer_time(&self, part: &TransferSize) -> Result<Duration, CommError> {
        let seconds = match self.nodes {
            Some(nodes) if !part.in_step => {
                let inside = (part.bytes - part.between) as f64 / nodes.bytes_per_second;
                inside.max(part.between as f64 / self.bytes_per_second)
            }
            _ => part.bytes as f64 / self.bytes_per_second,
        };
        let time = Duration::try_from_secs_f64(seconds).ok();
        time.filter(|time| *time <= MAX_TRANSFER_TIME)
            .ok_or_else(|| {
                failed(format!(
                    "{} of {} bytes would take {seconds:.0} s at {} bytes/s; a transfer takes at \
                     most {} s, so send less at once or use a faster link",
                    part.op,
                    part.bytes,
                    self.bytes_per_second,
                    MAX_TRANSFER_TIME.as_secs()
                ))
            })
    }

    /// Schedules a transfer after all transfers that were started earlier.
    pub(super) fn schedule(
        self: &Arc<Self>,
        group: &Group,
        part: &TransferSize,
        time: Duration,
    ) -> ScheduledTransfer {
        let mut state = self.state.lock();
        // The time is read under the lock, so that transfers are ordered by their times.
        let asked = self.now();
        let started = asked.max(state.free_at);
        let done = started + time;
        state.free_at = done;
        self.record(&mut state, group.name(), part, [asked, started, done])
    }

    /// Creates the handle of a message that this rank receives. `inner` is the handle of the started receive. The
    /// simulated transfer begins when the message has been sent.
    pub(super) fn arrival(
        self: &Arc<Self>,
        group: &Group,
        part: TransferSize,
        time: Duration,
        inner: Pending,
    ) -> Result<Pending, CommError> {
        let (link, asked, group) = (Arc::clone(self), self.now(), group.name().to_owned());
        let (sender, arrived) = mpsc::channel();
        let receive = move || {
            let message = inner.wait();
            let mut state = link.state.lock();
            let started = link.now().max(state.arrived_at);
            let done = started + time;
            state.arrived_at = done;
            let transfer = link.record(&mut state, &group, &part, [asked, started, done]);
            drop(state);
            // There is no receiver if the handle of the message was dropped.
            let _ = sender.send((transfer, message));
        };
        let thread = thread::Builder::new().name("arrival".into()).spawn(receive);
        thread.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        let link = Arc::clone(self);
        Ok(Pending::new(move || {
            let begin = link.now();
            let (transfer, message) = arrived
                .recv()
                .map_err(|_| failed("the thread of a message panicked".into()))?;
            transfer.wait_since(begin, || message)
        }))
    }

    /// Records a transfer. The arguments are the times at which the call is started, the transfer starts and the
    /// transfer ends.
    fn record(
        self: &Arc<Self>,
        state: &mut LinkState,
        group: &str,
        part: &TransferSize,
        [asked, started, done]: [Duration; 3],
    ) -> ScheduledTransfer {
        state.transfers.push(Transfer {
            op: part.op,
            group: group.to_owned(),
            bytes: part.bytes,
            between: part.between,
            asked,
            started,
            done,
            begin_wait: None,
            waited: Duration::ZERO,
        });
        ScheduledTransfer {
            link: Arc::clone(self),
            number: state.taken + state.transfers.len() as u64 - 1,
            done,
        }
    }
}

fn failed(message: String) -> CommError {
    CommError::engine("simulated network", message)
}

/// A scheduled transfer that a handle can wait for.
pub(super) struct ScheduledTransfer {
    link: Arc<Link>,
    number: u64,
    done: Duration,
}

impl ScheduledTransfer {
    /// Waits until the transfer is complete, and then for the result. `begin` is the time at which the caller began to
    /// wait.
    fn wait_since(
        self,
        begin: Duration,
        result: impl FnOnce() -> Result<Buffer, CommError>,
    ) -> Result<Buffer, CommError> {
        let now = self.link.now();
        self.link.advance(self.done.saturating_sub(now));
        let result = result();
        let waited = self.link.now() - begin;
        let mut state = self.link.state.lock();
        let index = self.number.checked_sub(state.taken);
        if let Some(transfer) = index.and_then(|index| state.transfers.get_mut(index as usize)) {
            transfer.begin_wait = Some(begin);
            transfer.waited = waited;
        }
        result
    }

    pub fn pending(self, inner: Pending) -> Pending {
        Pending::new(move || {
            let begin = self.link.now();
            self.wait_since(begin, || inner.wait())
        })
    }
}
