//! The link of one rank, and a record of its transfers.

use std::cmp::Ordering;
use std::mem;
use std::sync::{Arc, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use super::TransferSize;
use burn_megatron_comm::{Buffer, CommError, Group, Pending};

/// The longest duration of a transfer, so that a wrong unit is an error and not a hang.
pub(super) const MAX_TRANSFER_TIME: Duration = Duration::from_secs(600);

/// The network link of one rank: a latency for each call and a bandwidth.
///
/// The transfers of a rank follow one another in the order in which they were started, over all its
/// groups. Times count from the creation of the link.
#[derive(Debug)]
pub struct Link {
    latency: Duration,
    bytes_per_second: f64,
    nodes: Option<NodeLink>,
    epoch: Instant,
    /// The time of a link with a virtual clock.
    virtual_clock: Option<Mutex<Duration>>,
    state: Mutex<LinkState>,
}

/// The link inside of a node.
#[derive(Clone, Copy, Debug)]
struct NodeLink {
    ranks: usize,
    bytes_per_second: f64,
}

#[derive(Debug, Default)]
struct LinkState {
    /// When the transfers so far are done.
    free_at: Duration,
    /// When the messages that have begun to arrive are there.
    arrived_at: Duration,
    /// The number of transfers that were taken.
    taken: u64,
    transfers: Vec<Transfer>,
}

/// Invalid settings of a link.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LinkError {
    /// A bandwidth that is not positive.
    #[error("invalid bandwidth {0} bytes/s: expected more than 0 (infinity for no limit)")]
    Bandwidth(f64),
    /// Nodes without ranks.
    #[error("invalid nodes of 0 ranks: expected at least 1")]
    Nodes,
    /// A latency that looks like a wrong unit.
    #[error("invalid latency {0:?}: expected at most {MAX_TRANSFER_TIME:?}")]
    Latency(Duration),
}

/// What a rank sent in one call over a [`Link`], and how long it waited for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfer {
    /// The name of the operation, for example `"all_gather"`.
    pub op: &'static str,
    /// The name of the group.
    pub group: String,
    /// The bytes that the rank sends.
    pub bytes: u64,
    /// Those of them that go to another [node](Link::with_nodes).
    pub between: u64,
    /// When the call was started.
    pub asked: Duration,
    /// When the link was free for it.
    pub started: Duration,
    /// When the transfer ends.
    pub done: Duration,
    /// When the rank began to wait for it; `None` while it has not.
    pub begin_wait: Option<Duration>,
    /// How long the rank was blocked in the wait: for the transfer, and then for the other ranks.
    pub waited: Duration,
}

impl Transfer {
    /// How long the transfer takes on the link.
    pub fn duration(&self) -> Duration {
        self.done - self.started
    }
}

/// The share of the transfer time that was hidden behind other work: 1 - (time blocked in waits) /
/// (time of transfers).
///
/// It is 1 if nothing was transferred, and 0 if the rank was blocked for longer than that, as it also
/// waits for ranks that are late.
pub fn hidden_share(transfers: &[Transfer]) -> f64 {
    let total: Duration = transfers.iter().map(Transfer::duration).sum();
    let blocked: Duration = transfers.iter().map(|transfer| transfer.waited).sum();
    if total.is_zero() {
        return 1.0;
    }
    (1.0 - blocked.as_secs_f64() / total.as_secs_f64()).max(0.0)
}

impl Link {
    /// A link with `latency` for each call and a bandwidth of `bytes_per_second`.
    ///
    /// # Errors
    /// [`LinkError`] for a bandwidth that is not positive, or a latency above 600 s.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Arc<Self>, LinkError> {
        Self::with_clock(latency, bytes_per_second, None, None)
    }

    /// A link whose bandwidth is that between nodes of `ranks_per_node` ranks with consecutive numbers in the world; inside
    /// of a node it is `inside`, in bytes per second.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`LinkError::Nodes`] for nodes without ranks.
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

    /// The same link with a virtual clock, which only waits for transfers and [`advance`](Self::advance) advance,
    /// without a sleep, so that a test does not depend on how busy the machine is.
    ///
    /// # Errors
    /// As [`new`](Self::new).
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
            // Also where it is NaN.
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

    /// Advances the time, as a computation does: the virtual clock, or by a sleep.
    pub fn advance(&self, time: Duration) {
        match &self.virtual_clock {
            Some(now) => *now.lock() += time,
            None => sleep(time),
        }
    }

    /// The instant from which the times of its transfers count.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Takes the transfers since the last call, in the order of their starts. One in flight is among them with its
    /// wait so far, and is not returned again.
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

    /// So many that all ranks are on one, if nodes are not known.
    pub(super) fn ranks_per_node(&self) -> usize {
        self.nodes.map_or(usize::MAX, |nodes| nodes.ranks)
    }

    /// The time since the creation of the link, on its clock.
    pub fn now(&self) -> Duration {
        match &self.virtual_clock {
            Some(now) => *now.lock(),
            None => self.epoch.elapsed(),
        }
    }

    /// How long a transfer takes, without the latency.
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

    /// Schedules a transfer after those that were started before it.
    pub(super) fn schedule(
        self: &Arc<Self>,
        group: &Group,
        part: &TransferSize,
        time: Duration,
    ) -> ScheduledTransfer {
        let mut state = self.state.lock();
        // Read under the lock, so that the order of the transfers is that of their times.
        let asked = self.now();
        let started = asked.max(state.free_at);
        let done = started + time;
        state.free_at = done;
        self.record(&mut state, group.name(), part, [asked, started, done])
    }

    /// The arrival of a message whose receive was started as `inner`: it begins when its send is.
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
            // Nobody waits for a message whose handle was dropped.
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

    /// Writes down a transfer with the times at which it was asked for, starts and is done.
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

/// A transfer to wait for.
pub(super) struct ScheduledTransfer {
    link: Arc<Link>,
    number: u64,
    done: Duration,
}

impl ScheduledTransfer {
    /// Waits until it is done and then for the result, for one who has waited since `begin`.
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
