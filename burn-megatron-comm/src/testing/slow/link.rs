//! The link of one rank, and what went over it.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Part;
use crate::buffer::Buffer;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pending::Pending;

/// The longest that one transfer may take, so that a wrong unit is an error and not a hang.
pub(super) const LONGEST: Duration = Duration::from_secs(600);

/// The network link of one rank: a latency for each call and a bandwidth.
///
/// The transfers of a rank follow one another in the order in which they were started, over all its
/// groups. Times count from the creation of the link.
#[derive(Debug)]
pub struct Link {
    latency: Duration,
    bytes_per_second: f64,
    began: Instant,
    /// The time of a link whose time is counted.
    counted: Option<Mutex<Duration>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When the transfers so far are done.
    free_at: Duration,
    /// The transfers that were handed out already.
    taken: u64,
    transfers: Vec<Transfer>,
}

/// A link that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LinkError {
    /// A bandwidth that is no positive number.
    #[error("the bandwidth of a link must be above 0 bytes/s (infinity for no limit), but is {0}")]
    Bandwidth(f64),
    /// A latency that looks like a mistaken unit.
    #[error("a link has a latency of at most {LONGEST:?}, but {0:?} was asked for")]
    Latency(Duration),
}

/// What a rank sent in one call over a [`Link`], and how long it stood still for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfer {
    /// The name of the operation, for example `"all_gather"`.
    pub op: &'static str,
    /// The name of the group.
    pub group: String,
    /// The bytes that the rank sends.
    pub bytes: u64,
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

/// The share of the time of `transfers` in which the rank did something else: 1 - (time blocked in
/// waits) / (time of transfers).
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
    /// A link with `latency` for each call and room for `bytes_per_second`.
    ///
    /// # Errors
    /// [`LinkError`] for a bandwidth that is no positive number, or a latency above 600 s.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Arc<Self>, LinkError> {
        Self::on(latency, bytes_per_second, None)
    }

    /// The same link, whose time does not pass by itself: it is counted. It goes on by the waits for
    /// transfers and by [`pass`](Self::pass), without a sleep, so that what a test sees of it does not depend
    /// on how busy the machine is.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn counted(latency: Duration, bytes_per_second: f64) -> Result<Arc<Self>, LinkError> {
        Self::on(latency, bytes_per_second, Some(Mutex::default()))
    }

    fn on(
        latency: Duration,
        bytes_per_second: f64,
        counted: Option<Mutex<Duration>>,
    ) -> Result<Arc<Self>, LinkError> {
        match (bytes_per_second > 0.0, latency <= LONGEST) {
            (false, _) => Err(LinkError::Bandwidth(bytes_per_second)),
            (true, false) => Err(LinkError::Latency(latency)),
            (true, true) => Ok(Arc::new(Self {
                latency,
                bytes_per_second,
                began: Instant::now(),
                counted,
                state: Mutex::default(),
            })),
        }
    }

    /// Lets time pass, as a computation does: counted, or slept through.
    pub fn pass(&self, time: Duration) {
        match &self.counted {
            Some(now) => *now.lock().unwrap_or_else(PoisonError::into_inner) += time,
            None => sleep(time),
        }
    }

    /// The moment from which the times of its transfers count.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// The transfers since the last call of this, in the order of their starts. What is still under way
    /// is among them with the wait that it has had, and is not seen again.
    pub fn take_transfers(&self) -> Vec<Transfer> {
        let mut state = self.state();
        state.taken += state.transfers.len() as u64;
        mem::take(&mut state.transfers)
    }

    pub(super) fn latency(&self) -> Duration {
        self.latency
    }

    fn now(&self) -> Duration {
        match &self.counted {
            Some(now) => *now.lock().unwrap_or_else(PoisonError::into_inner),
            None => self.began.elapsed(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long a part of a transfer takes, without the latency.
    pub(super) fn time_of(&self, part: &Part) -> Result<Duration, CommError> {
        let seconds = part.bytes as f64 / self.bytes_per_second;
        let time = Duration::try_from_secs_f64(seconds).ok();
        time.filter(|time| *time <= LONGEST)
            .ok_or_else(|| CommError::Engine {
                engine: "slow link".into(),
                message: format!(
                    "{} of {} bytes would take {seconds:.0} s at {} bytes/s; a transfer takes at \
                     most {} s, so send less at once or use a faster link",
                    part.op,
                    part.bytes,
                    self.bytes_per_second,
                    LONGEST.as_secs()
                ),
            })
    }

    /// Puts a transfer behind those that were started before it.
    pub(super) fn book(self: &Arc<Self>, group: &Group, part: &Part, time: Duration) -> Ticket {
        let mut state = self.state();
        // Read under the lock, so that the order of the transfers is that of their times.
        let asked = self.now();
        let started = asked.max(state.free_at);
        let done = started + time;
        state.free_at = done;
        state.transfers.push(Transfer {
            op: part.op,
            group: group.name().to_owned(),
            bytes: part.bytes,
            asked,
            started,
            done,
            begin_wait: None,
            waited: Duration::ZERO,
        });
        Ticket {
            link: Arc::clone(self),
            number: state.taken + state.transfers.len() as u64 - 1,
            done,
        }
    }
}

/// The right to wait for a transfer.
pub(super) struct Ticket {
    link: Arc<Link>,
    number: u64,
    done: Duration,
}

impl Ticket {
    fn wait(self, inner: Pending) -> Result<Buffer, CommError> {
        let begin = self.link.now();
        self.link.pass(self.done.saturating_sub(begin));
        let result = inner.wait();
        let waited = self.link.now() - begin;
        let mut state = self.link.state();
        let index = self.number.checked_sub(state.taken);
        if let Some(transfer) = index.and_then(|index| state.transfers.get_mut(index as usize)) {
            transfer.begin_wait = Some(begin);
            transfer.waited = waited;
        }
        result
    }

    pub fn pending(self, inner: Pending) -> Pending {
        Pending::new(move || self.wait(inner))
    }
}
