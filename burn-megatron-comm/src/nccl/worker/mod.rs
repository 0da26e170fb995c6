//! The one thread that calls NCCL for a rank.
//!
//! The collectives of all groups share a stream, and go on it in the order in which they were started. NCCL
//! asks for that: a kernel of a collective sits on the device until its peers have come, so two of them at
//! a time, of groups that share ranks, are safe only as long as both fit on every device at once, which
//! no NCCL promises. One at a time, in the order of the program, is safe if that order is the same on all
//! ranks. Messages are another matter: they may be sent before they are asked for, so nothing may stand
//! behind them. Each direction between two ranks has a communicator and a stream of its own.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::driver::{Mark, Stream};
use super::item::Item;
use super::lane::{Key, Lane, Queue, State};
use super::library::Comm;
use super::shared::{Command, Shared, Split};
use crate::error::CommError;
use crate::process::Slot;
use close::Closing;
use launch::Placed;

mod close;
mod land;
mod lanes;
mod launch;
mod staging;

/// How long it sleeps while something is under way.
const NAP: Duration = Duration::from_micros(20);
/// The same after nothing has happened for [`RESTLESS`].
const LONG_NAP: Duration = Duration::from_micros(200);
const RESTLESS: Duration = Duration::from_millis(100);
/// How often the communicators are asked for errors of what runs on the device.
const ROUND: Duration = Duration::from_millis(20);
/// How long memory is kept for a device that does not end what was aborted.
const MOURNING: Duration = Duration::from_secs(5);

/// The most commands that are taken before anything is done.
const GULP: usize = 64;

pub(super) struct Worker {
    shared: Arc<Shared>,
    own: Sender<Command>,
    lanes: BTreeMap<Key, Lane>,
    /// The stream of all collectives, and that of the copies of host buffers.
    collectives: Stream,
    copies: Stream,
    /// In the order in which they were started.
    waiting: VecDeque<Work>,
    /// Handed to NCCL, which is still busy with them.
    launching: Vec<Vec<Placed>>,
    /// On their streams.
    flying: VecDeque<Flight>,
    /// Splits that leave this rank out of every communicator, with the parent that they are under way on.
    leaving: Vec<(Comm, Box<AtomicPtr<c_void>>, Arc<Slot>)>,
    closing: Option<Closing>,
    asked_at: Instant,
    moved_at: Instant,
    given_up_at: Option<Instant>,
}

enum Work {
    Calls(Vec<Item>),
    Split(Split),
}

/// A call that is on its stream.
struct Flight {
    item: Item,
    queue: Queue,
    comm: Comm,
    done: Arc<Mark>,
    /// Whether its error has been told already.
    failed: bool,
}

impl Worker {
    pub fn new(shared: Arc<Shared>, own: Sender<Command>) -> Result<Self, String> {
        shared.driver.enter()?;
        let (collectives, copies) = (shared.driver.stream()?, shared.driver.stream()?);
        let now = Instant::now();
        Ok(Self {
            shared,
            own,
            lanes: BTreeMap::new(),
            collectives,
            copies,
            waiting: VecDeque::new(),
            launching: vec![],
            flying: VecDeque::new(),
            leaving: vec![],
            closing: None,
            asked_at: now,
            moved_at: now,
            given_up_at: None,
        })
    }

    /// Works until it is told to quit.
    pub fn run(mut self, inbox: &Receiver<Command>) {
        let mut quit = false;
        while !quit {
            let first = self.next(inbox);
            for command in first.into_iter().chain(inbox.try_iter().take(GULP)) {
                quit |= matches!(command, Command::Quit);
                self.take(command);
            }
            if self.shared.comms.given_up.load(Ordering::Acquire) {
                self.give_up();
            } else {
                self.advance_lanes();
                self.launch_what_can_be();
                self.follow_launches();
                self.ask_for_errors();
            }
            self.land();
            self.close_if_asked();
        }
        self.give_up();
        while !self.flying.is_empty() {
            std::thread::sleep(LONG_NAP);
            self.land();
        }
    }

    /// The next command; `None` when something else is to be done before one comes.
    fn next(&self, inbox: &Receiver<Command>) -> Option<Command> {
        if self.idle() {
            return Some(inbox.recv().unwrap_or(Command::Quit));
        }
        let nap = match self.moved_at.elapsed() < RESTLESS {
            true => NAP,
            false => LONG_NAP,
        };
        match inbox.recv_timeout(nap) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Command::Quit),
        }
    }

    fn idle(&self) -> bool {
        let given_up = self.shared.comms.given_up.load(Ordering::Acquire);
        let opening = |lane: &Lane| matches!(lane.state, State::Split { .. } | State::Init(_));
        self.waiting.is_empty()
            && self.launching.is_empty()
            && self.flying.is_empty()
            && self.leaving.is_empty()
            && self.closing.is_none()
            && given_up == self.given_up_at.is_some()
            && !self.lanes.values().any(opening)
    }

    fn take(&mut self, command: Command) {
        self.moved_at = Instant::now();
        match command {
            Command::Close { until, told } => self.closing = Some(Closing::new(until, told)),
            // What comes too late is forgotten, as what waited was.
            _ if self.given_up_at.is_some() => {}
            Command::Open {
                key,
                rank,
                size,
                told,
            } => self.open(key, rank, size, Some(told)),
            Command::Id { key, id } => self.init(key, id),
            Command::Calls(items) => self.waiting.push_back(Work::Calls(items)),
            Command::Split(split) => self.waiting.push_back(Work::Split(split)),
            Command::Wake | Command::Quit => {}
        }
    }

    /// Ends every communicator; what waits is forgotten, and its slots stay empty.
    fn give_up(&mut self) {
        if self.given_up_at.is_some() {
            return;
        }
        self.given_up_at = Some(Instant::now());
        self.shared.comms.given_up.store(true, Ordering::Release);
        self.shared.comms.abort_all(&self.shared.library);
        self.waiting.clear();
        for (item, _) in self.launching.drain(..).flatten() {
            item.leak();
        }
        // The library may still write to their places.
        for (_, place, _) in self.leaving.drain(..) {
            Box::leak(place);
        }
        for lane in mem::take(&mut self.lanes).into_values() {
            if let State::Split { place, .. } = lane.state {
                Box::leak(place);
            }
        }
    }
}

fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = vec![];
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

impl Work {
    fn queues(&self) -> Vec<Queue> {
        match self {
            Work::Split(_) => vec![Queue::Collectives],
            Work::Calls(items) => distinct(items.iter().map(|item| item.key.queue())),
        }
    }

    fn refuse(&self, error: &CommError) {
        match self {
            Work::Split(split) => split.told.fulfil(Err(error.clone())),
            Work::Calls(items) => items.iter().for_each(|item| item.refuse(error.clone())),
        }
    }
}
