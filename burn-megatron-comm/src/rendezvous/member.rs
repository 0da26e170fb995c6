//! A rank's end of the rendezvous.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::message::{self, CallOf, Cause, Down, Failure, Hello, Stand, Up, Whereabouts};
use super::{PURPOSE, RendezvousError};
use crate::auth::{IntroduceError, Token, introduce};
#[cfg(any(test, feature = "cuda"))]
use crate::error::CommError;
use crate::log::Position;
#[cfg(any(test, feature = "cuda"))]
use crate::process::Bulletin;

/// How often a rank says that it lives, and where it stands.
const BEAT: Duration = Duration::from_millis(250);
/// How long an address is tried at a time.
const TRY: Duration = Duration::from_secs(2);
/// The pause between two rounds over the addresses.
const PAUSE: Duration = Duration::from_millis(50);
/// How long an answer of the coordinator is waited for; it waits for the ranks a second at the most.
const ANSWER: Duration = Duration::from_secs(3);

/// How a rank introduces itself, and how patient it is.
#[derive(Clone, Debug)]
pub(crate) struct Introduction {
    pub rank: usize,
    pub size: usize,
    /// The number of the world; 0 if there is none.
    pub world: u64,
    /// What lets it in; on one machine there may be none.
    pub token: Option<Token>,
    /// For the coordinator, and then for all ranks to come.
    pub gather: Duration,
    /// For a sign of life of the coordinator.
    pub silence: Duration,
}

/// Tells where the rank stands, also while it computes.
pub(crate) trait Witness: Send + Sync {
    /// Where it stands.
    fn position(&self) -> Position;
    /// Where it stands with regard to a collective: whether it came, and with which call.
    fn stand(&self, call: Option<CallOf>) -> Stand;
}

/// The connection of one rank to the coordinator of its world.
#[derive(Debug)]
pub(crate) struct Member {
    introduction: Introduction,
    address: SocketAddr,
    line: Mutex<TcpStream>,
    heard: Mutex<Heard>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Heard {
    complete: bool,
    stop: bool,
    all_returned: bool,
    /// This rank is leaving: a closed connection is no failure any more.
    leaving: bool,
    failure: Option<Failure>,
    /// The connection is lost.
    lost: bool,
    refused: Option<String>,
    posted: HashMap<String, Vec<u8>>,
    answers: HashMap<u64, Whereabouts>,
    asked: u64,
    /// The next sign of life is due now.
    beat: bool,
    returned: HashMap<usize, HashMap<u64, u64>>,
}

impl Member {
    /// Goes to the rendezvous, at the first of the addresses where it is, and waits until all ranks have
    /// come.
    ///
    /// # Errors
    /// [`RendezvousError`].
    pub fn join(
        addresses: &[SocketAddr],
        introduction: Introduction,
        witness: Arc<dyn Witness>,
    ) -> Result<Arc<Self>, RendezvousError> {
        let until = Instant::now() + introduction.gather;
        let (member, from) = loop {
            match Self::knock(addresses, &introduction, until) {
                Ok(found) => break found,
                Err(error @ RendezvousError::Token { .. }) => return Err(error),
                // Another run may just be leaving the port, or the right one not be there yet.
                Err(_) if Instant::now() < until => thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        };
        member.listen(from, &witness)?;
        let (beating, position) = (Arc::downgrade(&member), witness);
        let beat = move || {
            while let Some(member) = beating.upgrade() {
                if member.say(&Up::Alive(position.position())).is_err() || member.is_over() {
                    return;
                }
                member.rest();
            }
        };
        spawn("heartbeat", beat)?;
        member.await_all(until)?;
        Ok(member)
    }

    fn knock(
        addresses: &[SocketAddr],
        introduction: &Introduction,
        until: Instant,
    ) -> Result<(Arc<Self>, BufReader<TcpStream>), RendezvousError> {
        let mut last = RendezvousError::Unreachable {
            addresses: super::list(addresses),
            waited: introduction.gather.as_secs(),
            reason: "no address was given".into(),
        };
        for address in addresses {
            let left = until.saturating_duration_since(Instant::now());
            let patience = TRY.min(left).max(Duration::from_millis(1));
            let tried = TcpStream::connect_timeout(address, patience)
                .map_err(IntroduceError::from)
                .and_then(|stream| Self::introduce(stream, *address, introduction));
            match tried {
                Ok(found) => return Ok(found),
                Err(IntroduceError::Token) => {
                    last = RendezvousError::Token {
                        address: address.to_string(),
                    };
                }
                // That one is there but has another token says more.
                Err(_) if matches!(last, RendezvousError::Token { .. }) => {}
                Err(error) => {
                    last = RendezvousError::Unreachable {
                        addresses: super::list(addresses),
                        waited: introduction.gather.as_secs(),
                        reason: error.to_string(),
                    };
                }
            }
        }
        Err(last)
    }

    fn introduce(
        stream: TcpStream,
        address: SocketAddr,
        introduction: &Introduction,
    ) -> Result<(Arc<Self>, BufReader<TcpStream>), IntroduceError> {
        stream.set_nodelay(true)?;
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            rank: introduction.rank,
            size: introduction.size,
            world: introduction.world,
            host: super::host_name(),
            process: process::id(),
            gather: introduction.gather.as_secs_f64(),
            silence: introduction.silence.as_secs_f64(),
        };
        let hello = serde_json::to_string(&hello).map_err(io::Error::from)?;
        let token = introduction.token.as_ref();
        introduce(&stream, token, PURPOSE, &hello, introduction.silence)?;
        let from = BufReader::new(stream.try_clone()?);
        // The coordinator speaks at least once a second.
        stream.set_read_timeout(Some(introduction.silence))?;
        stream.set_write_timeout(Some(introduction.silence))?;
        let member = Self {
            introduction: introduction.clone(),
            address,
            line: Mutex::new(stream),
            heard: Mutex::default(),
            bell: Condvar::new(),
        };
        Ok((Arc::new(member), from))
    }

    fn listen(
        self: &Arc<Self>,
        mut from: BufReader<TcpStream>,
        witness: &Arc<dyn Witness>,
    ) -> io::Result<()> {
        let (member, witness) = (Arc::clone(self), Arc::clone(witness));
        spawn("rendezvous", move || {
            let lost = loop {
                match message::read::<Down>(&mut from) {
                    Ok(Some(word)) => member.hear(word, &*witness),
                    Ok(None) => break "has closed the connection".to_owned(),
                    Err(error) if is_timeout(&error) => {
                        let seconds = member.introduction.silence.as_secs();
                        break format!("has not been heard of for {seconds} s");
                    }
                    Err(error) => break format!("cannot be read ({error})"),
                }
            };
            member.lose(&lost, &*witness);
        })
    }

    fn hear(&self, word: Down, witness: &dyn Witness) {
        let mut heard = self.heard();
        match word {
            Down::Alive => return,
            Down::Complete => heard.complete = true,
            Down::Refused(reason) => heard.refused = Some(reason),
            Down::Posted { key, value } => {
                heard.posted.insert(key, value);
            }
            Down::Ask { question, call } => {
                drop(heard);
                let stand = witness.stand(call);
                // If it cannot be said, the connection is closed, which the reader sees.
                let _ = self.say(&Up::Stands { question, stand });
                return;
            }
            Down::Whereabouts { question, found } => {
                heard.answers.insert(question, found);
            }
            Down::Failure(failure) => {
                heard.failure.get_or_insert(failure);
            }
            Down::Returned { rank, calls } => {
                heard.returned.insert(rank, calls.into_iter().collect());
            }
            Down::AllReturned => heard.all_returned = true,
            Down::Stop => heard.stop = true,
        }
        drop(heard);
        self.bell.notify_all();
    }

    /// The coordinator is gone, and with it the world.
    fn lose(&self, how: &str, witness: &dyn Witness) {
        let mut heard = self.heard();
        if !heard.leaving && heard.refused.is_none() && !heard.all_returned {
            let own = self.introduction.rank;
            let place = crate::log::verdict_of(own, &witness.position());
            heard.lost = heard.failure.is_none();
            heard.failure.get_or_insert(Failure {
                rank: 0,
                message: format!("the rendezvous at {} {how}", self.address),
                verdict: format!("{place}; where the others are is not known"),
            });
        }
        drop(heard);
        self.bell.notify_all();
    }

    fn await_all(&self, until: Instant) -> Result<(), RendezvousError> {
        // The coordinator is the one to lose patience, as it knows who is missing.
        let last = until + ANSWER;
        let heard = self.wait_until(last, |heard| {
            heard.complete || heard.failure.is_some() || heard.refused.is_some()
        });
        match heard {
            None => Err(RendezvousError::Unreachable {
                addresses: self.address.to_string(),
                waited: self.introduction.gather.as_secs(),
                reason: "it answers, but does not say that all ranks have come".into(),
            }),
            Some(heard) if heard.complete => Ok(()),
            Some(heard) => Err(match (&heard.refused, &heard.failure) {
                (Some(reason), _) => RendezvousError::Refused {
                    address: self.address.to_string(),
                    reason: reason.clone(),
                },
                (None, failure) => {
                    let Failure { rank, message, .. } = failure.clone().unwrap_or_default();
                    RendezvousError::Failed { rank, message }
                }
            }),
        }
    }

    /// Says soon where the rank stands: a step begins, which is what a person wants to know of a rank that
    /// dies.
    pub fn beat(&self) {
        self.heard().beat = true;
        self.bell.notify_all();
    }

    /// The pause between two signs of life.
    fn rest(&self) {
        let heard = self.wait_until(Instant::now() + BEAT, |heard| heard.beat || heard.leaving);
        if let Some(mut heard) = heard {
            heard.beat = false;
        }
    }

    /// The end of the world, once a rank has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.heard().failure.clone()
    }

    /// Whether the world failed because the coordinator is gone.
    pub fn is_lost(&self) -> bool {
        self.heard().lost
    }

    /// Whether the launcher asks that all ranks stop after the step in hand.
    pub fn stop_requested(&self) -> bool {
        self.heard().stop
    }

    /// Whether a rank has returned without coming to a collective.
    pub fn has_returned_before(&self, rank: usize, call: CallOf) -> bool {
        let heard = self.heard();
        let calls = heard.returned.get(&rank);
        calls.is_some_and(|calls| {
            calls
                .get(&call.group)
                .is_none_or(|made| *made <= call.sequence)
        })
    }

    /// Asks all ranks whether they have come to a collective.
    pub fn whereabouts(&self, call: CallOf) -> Whereabouts {
        let question = {
            let mut heard = self.heard();
            heard.asked += 1;
            heard.asked
        };
        let asked = self.say(&Up::Where { question, call });
        let until = Instant::now() + ANSWER;
        let is_there =
            |heard: &Heard| heard.answers.contains_key(&question) || heard.failure.is_some();
        let found = asked.ok().and_then(|()| self.wait_until(until, is_there));
        found
            .and_then(|mut heard| heard.answers.remove(&question))
            .unwrap_or_default()
    }

    /// Says that this rank has failed; the world's failure, once it is known.
    pub fn fail(&self, cause: Cause, stood: Position) -> Option<Failure> {
        // If it cannot be said, the connection is closed, and that is the failure.
        let _ = self.say(&Up::Failed { cause, stood });
        self.await_failure(ANSWER)
    }

    /// Waits for the world to fail, at most so long.
    pub fn await_failure(&self, patience: Duration) -> Option<Failure> {
        let until = Instant::now() + patience;
        let heard = self.wait_until(until, |heard| heard.failure.is_some())?;
        heard.failure.clone()
    }

    /// Waits for the world to fail; nothing if it has ended well before.
    pub fn await_end(&self) -> Option<Failure> {
        let mut heard = self.heard();
        while heard.failure.is_none() && !heard.all_returned && !heard.leaving {
            heard = self
                .bell
                .wait(heard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        heard.failure.clone()
    }

    /// Says that this rank's closure has returned, with the number of collectives it made on each group,
    /// and waits until all have returned.
    pub fn return_with_all(&self, calls: Vec<(u64, u64)>) -> Result<(), Failure> {
        // If it cannot be said, the reader sees that the connection is closed.
        let _ = self.say(&Up::Returned(calls));
        match self.await_end() {
            None => Ok(()),
            Some(failure) => Err(failure),
        }
    }

    /// Closes the connection.
    pub fn leave(&self) {
        self.heard().leaving = true;
        self.bell.notify_all();
        let _ = self.line().shutdown(Shutdown::Both);
    }

    fn is_over(&self) -> bool {
        let heard = self.heard();
        heard.leaving || heard.refused.is_some()
    }

    fn say(&self, word: &Up) -> io::Result<()> {
        message::write(&mut *self.line(), word)
    }

    pub(super) fn line(&self) -> MutexGuard<'_, TcpStream> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No code that can panic leaves what was heard half noted.
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(
        &self,
        until: Instant,
        enough: impl Fn(&Heard) -> bool,
    ) -> Option<MutexGuard<'_, Heard>> {
        let mut heard = self.heard();
        while !enough(&heard) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            (heard, _) = self
                .bell
                .wait_timeout(heard, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Some(heard)
    }
}

#[cfg(any(test, feature = "cuda"))]
impl Bulletin for Member {
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let post = Up::Post {
            key: key.into(),
            value: value.into(),
        };
        let posted = self.say(&post);
        posted.map_err(|error| unread(format!("{key} cannot be posted: {error}")))
    }

    fn read(&self, key: &str, patience: Duration) -> Result<Vec<u8>, CommError> {
        let asked = self.say(&Up::Read { key: key.into() });
        asked.map_err(|error| unread(format!("{key} cannot be asked for: {error}")))?;
        let until = Instant::now() + patience;
        let is_there = |heard: &Heard| heard.posted.contains_key(key) || heard.failure.is_some();
        let heard = self.wait_until(until, is_there);
        let value = heard.and_then(|heard| heard.posted.get(key).cloned());
        value.ok_or_else(|| {
            let seconds = patience.as_secs_f64();
            unread(format!("no rank has posted {key} within {seconds:.1} s"))
        })
    }
}

#[cfg(any(test, feature = "cuda"))]
fn unread(message: String) -> CommError {
    CommError::Engine {
        engine: "rendezvous".into(),
        message,
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = thread::Builder::new().name(name.into());
    builder.spawn(work).map(drop)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}
