//! What the coordinator decides: a pure value. Connections and clocks are around it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::message::{CallOf, Cause, CauseKind, Down, Failure, Hello, Stand, Up, Whereabouts};
use super::seat::{Guest, Seat, is_over, misfit};
use crate::error::ranks_verb;
use crate::log::{Position, verdict};

/// How long the answers of the ranks are waited for.
const ANSWERS: Duration = Duration::from_secs(1);
/// How long a failure is held back, as a more telling one may be on its way: a rank that lost its
/// neighbour can be faster than the news that the neighbour is gone.
const SETTLE: Duration = Duration::from_millis(250);

/// When the coordinator loses patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// For the ranks to come.
    pub gather: Duration,
    /// For a sign of life.
    pub silence: Duration,
}

/// To whom something is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    All,
    Rank(usize),
}

type Said = Vec<(To, Down)>;

/// What the coordinator knows. Times are since it began.
#[derive(Debug)]
pub(super) struct Registry {
    size: usize,
    world: u64,
    patience: Patience,
    seats: Vec<Seat>,
    complete: bool,
    posted: BTreeMap<String, Vec<u8>>,
    readers: BTreeMap<String, Vec<usize>>,
    questions: BTreeMap<u64, Question>,
    asked: u64,
    causes: Vec<(usize, Cause)>,
    failure: Option<Failure>,
    /// Connections that came with another token, and from where the last one did.
    turned_away: (usize, Option<IpAddr>),
}

#[derive(Debug)]
struct Question {
    purpose: Purpose,
    waiting: BTreeSet<usize>,
    not_before: Duration,
    until: Duration,
    stands: BTreeMap<usize, Stand>,
}

#[derive(Debug)]
enum Purpose {
    /// A rank has failed.
    Verdict,
    /// A rank asks who has not come to a call.
    Where { asker: usize, question: u64 },
}

impl Registry {
    pub fn new(size: usize, world: u64, patience: Patience) -> Self {
        Self {
            size,
            world,
            patience,
            seats: (0..size).map(|_| Seat::default()).collect(),
            complete: false,
            posted: BTreeMap::new(),
            readers: BTreeMap::new(),
            questions: BTreeMap::new(),
            asked: 0,
            causes: vec![],
            failure: None,
            turned_away: (0, None),
        }
    }

    /// The end of the world, once it is decided.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Whether every rank has come.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether any rank has come.
    pub fn has_guests(&self) -> bool {
        self.seats.iter().any(|seat| seat.guest().is_some())
    }

    /// Whether every rank has returned.
    pub fn all_returned(&self) -> bool {
        let mut guests = self.seats.iter().map(Seat::guest);
        guests.all(|guest| guest.is_some_and(|guest| guest.returned))
    }

    /// Whether every rank that came has closed its connection.
    pub fn all_gone(&self) -> bool {
        let mut guests = self.seats.iter().filter_map(Seat::guest);
        guests.all(|guest| guest.gone)
    }

    /// Somebody came with another token. It is no rank of this world until it has this one.
    pub fn turned_away(&mut self, from: IpAddr) {
        self.turned_away = (self.turned_away.0 + 1, Some(from));
    }

    /// A rank that has the token introduces itself; an error is why it is refused.
    pub fn join(&mut self, hello: Hello, now: Duration) -> Result<Said, Refusal> {
        let stranger = |reason: String| Err(Refusal::Stranger(reason));
        if hello.world != self.world {
            return stranger(format!(
                "this is the rendezvous of another run; two runs on one machine need two ports \
                 (rank {} of {} came)",
                hello.rank, hello.size
            ));
        }
        if self.complete || self.failure.is_some() {
            return stranger(format!(
                "all {} ranks of this rendezvous have come already; does another run use its port?",
                self.size
            ));
        }
        if let Some(reason) = misfit(&hello, &self.seats) {
            // It was meant for this world, which can never be complete now.
            let rank = hello.rank.min(self.size - 1);
            let said = self.cause(rank, CauseKind::Own, reason.clone(), now);
            return Err(Refusal::Misfit { reason, said });
        }
        let rank = hello.rank;
        let Patience { gather, silence } = &mut self.patience;
        // What is no time is no wish.
        if let Ok(wished) = Duration::try_from_secs_f64(hello.gather) {
            *gather = (*gather).min(now.saturating_add(wished));
        }
        if let Ok(wished) = Duration::try_from_secs_f64(hello.silence) {
            *silence = (*silence).min(wished);
        }
        self.seats[rank] = Seat::Taken(Guest {
            hello,
            heard: now,
            position: Position::Nowhere,
            returned: false,
            gone: false,
        });
        let all = self.seats.iter().all(|seat| seat.guest().is_some());
        self.complete = all;
        Ok(match all {
            true => vec![(To::All, Down::Complete)],
            false => vec![],
        })
    }

    /// The launcher says that the process of a rank has ended, and how. One that came says so itself, or
    /// its connection does.
    pub fn process_ended(&mut self, rank: usize, how: &str, now: Duration) -> Said {
        match self.seats.get(rank) {
            Some(Seat::Empty) => {
                let message = format!("its process {how} before it came to the rendezvous");
                self.cause(rank, CauseKind::Own, message, now)
            }
            _ => vec![],
        }
    }

    /// A rank says something.
    pub fn hear(&mut self, rank: usize, message: Up, now: Duration) -> Said {
        if let Some(guest) = self.seats[rank].guest_mut() {
            guest.heard = now;
        }
        match message {
            Up::Alive(position) => {
                self.set_position(rank, position);
                vec![]
            }
            Up::Post { key, value } => {
                let readers = self.readers.remove(&key).unwrap_or_default().into_iter();
                let posted = |reader| (To::Rank(reader), posted(&key, &value));
                let said = readers.map(posted).collect();
                self.posted.insert(key, value);
                said
            }
            Up::Read { key } => match self.posted.get(&key) {
                Some(value) => vec![(To::Rank(rank), posted(&key, value))],
                None => {
                    self.readers.entry(key).or_default().push(rank);
                    vec![]
                }
            },
            Up::Where { question, call } => {
                let asker = rank;
                self.ask(Purpose::Where { asker, question }, Some(call), now, now)
            }
            Up::Stands { question, stand } => {
                self.set_position(rank, stand.position.clone());
                if let Some(question) = self.questions.get_mut(&question) {
                    question.waiting.remove(&rank);
                    question.stands.insert(rank, stand);
                }
                self.close_questions(now)
            }
            Up::Failed { cause, stood } => {
                self.set_position(rank, Position::Failed(Box::new(stood)));
                for question in self.questions.values_mut() {
                    question.waiting.remove(&rank);
                }
                self.cause(rank, cause.kind, cause.message, now)
            }
            Up::Returned(calls) => {
                if let Some(guest) = self.seats[rank].guest_mut() {
                    guest.returned = true;
                    guest.position = Position::Returned;
                }
                match self.all_returned() {
                    true => vec![(To::All, Down::AllReturned)],
                    false => vec![(To::All, Down::Returned { rank, calls })],
                }
            }
        }
    }

    /// The connection of a rank is closed.
    pub fn closed(&mut self, rank: usize, now: Duration) -> Said {
        let Some(guest) = self.seats[rank].guest_mut() else {
            return vec![];
        };
        guest.gone = true;
        let has_spoken = guest.returned || matches!(guest.position, Position::Failed(_));
        for question in self.questions.values_mut() {
            question.waiting.remove(&rank);
        }
        if has_spoken || self.failure.is_some() {
            return self.close_questions(now);
        }
        let (host, process) = (guest.hello.host.clone(), guest.hello.process);
        let stood = self.position(rank);
        self.set_position(rank, Position::Gone(Box::new(stood)));
        let message = format!("its process {process} on {host} has ended without a word");
        self.cause(rank, CauseKind::Gone, message, now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Said {
        let mut said = self.close_questions(now);
        if self.failure.is_some() || !self.causes.is_empty() {
            return said;
        }
        if !self.complete && now >= self.patience.gather {
            said.extend(self.give_up_gathering(now));
        }
        for rank in 0..self.size {
            let Some(guest) = self.seats[rank].guest() else {
                continue;
            };
            let silence = now.saturating_sub(guest.heard);
            if !guest.gone && silence >= self.patience.silence {
                let stood = self.position(rank);
                let seconds = silence.as_secs();
                let message = format!(
                    "its process {} on {} has not been heard of for {seconds} s: it is stopped, \
                     or cut off",
                    guest.hello.process, guest.hello.host
                );
                self.set_position(rank, Position::Silent(seconds, Box::new(stood)));
                said.extend(self.cause(rank, CauseKind::Silent, message, now));
            }
        }
        said
    }

    fn give_up_gathering(&mut self, now: Duration) -> Said {
        let came = |rank: &usize| self.seats[*rank].guest().is_some();
        let missing: Vec<usize> = (0..self.size).filter(|rank| !came(rank)).collect();
        let message = format!(
            "{} not come to the rendezvous within {} s, where {} of {} ranks are; started with \
             the same address?{}",
            ranks_verb(&missing, "has", "have"),
            self.patience.gather.as_secs(),
            self.size - missing.len(),
            self.size,
            self.with_another_token()
        );
        self.cause(missing[0], CauseKind::Own, message, now)
    }

    fn with_another_token(&self) -> String {
        match self.turned_away {
            (count, Some(from)) => format!(
                " Whoever came with another token was turned away ({count} times, last from {from})."
            ),
            _ => String::new(),
        }
    }

    /// Notes that a rank has failed; the first time, asks the others where they stand.
    fn cause(&mut self, rank: usize, kind: CauseKind, message: String, now: Duration) -> Said {
        if self.failure.is_some() {
            return vec![];
        }
        let first = self.causes.is_empty();
        self.causes.push((rank, Cause { kind, message }));
        // Nothing tells more than a process that is gone.
        let settled = match kind {
            CauseKind::Gone => now,
            _ => now + SETTLE,
        };
        if first {
            return self.ask(Purpose::Verdict, None, settled, now);
        }
        for question in self.questions.values_mut() {
            question.not_before = question.not_before.min(settled);
        }
        self.close_questions(now)
    }

    fn ask(
        &mut self,
        purpose: Purpose,
        call: Option<CallOf>,
        not_before: Duration,
        now: Duration,
    ) -> Said {
        let question = self.asked;
        self.asked += 1;
        let answers = |rank: &usize| {
            let guest = self.seats[*rank].guest();
            let speaks = |guest: &Guest| !guest.gone && !is_over(&guest.position);
            guest.is_some_and(speaks)
        };
        let waiting: BTreeSet<usize> = (0..self.size).filter(answers).collect();
        let said = waiting.iter().map(|rank| {
            let ask = Down::Ask { question, call };
            (To::Rank(*rank), ask)
        });
        let mut said: Said = said.collect();
        self.questions.insert(
            question,
            Question {
                purpose,
                waiting,
                not_before,
                until: now + ANSWERS,
                stands: BTreeMap::new(),
            },
        );
        said.extend(self.close_questions(now));
        said
    }

    /// Answers every question that all have answered, or that took too long.
    fn close_questions(&mut self, now: Duration) -> Said {
        let is_ready = |(_, question): &(&u64, &Question)| {
            now >= question.until || (question.waiting.is_empty() && now >= question.not_before)
        };
        let ready: Vec<u64> = self
            .questions
            .iter()
            .filter(is_ready)
            .map(|(k, _)| *k)
            .collect();
        let mut said = vec![];
        for number in ready {
            let Some(asked) = self.questions.remove(&number) else {
                continue;
            };
            match asked.purpose {
                Purpose::Verdict => said.push((To::All, Down::Failure(self.decide(&asked)))),
                Purpose::Where { asker, question } => {
                    let found = self.whereabouts(&asked);
                    said.push((To::Rank(asker), Down::Whereabouts { question, found }));
                }
            }
        }
        said
    }

    /// The most telling cause, and where everybody stood.
    fn decide(&mut self, asked: &Question) -> Failure {
        let telling = self.causes.iter().min_by_key(|(_, cause)| cause.kind);
        let (rank, cause) = telling.expect("a verdict follows a cause");
        let place = |rank: usize| match (&self.seats[rank], asked.waiting.contains(&rank)) {
            (Seat::Empty, _) => Position::Absent,
            (Seat::Taken(guest), false) => guest.position.clone(),
            (Seat::Taken(guest), true) => {
                let heard = asked.until.saturating_sub(guest.heard).as_secs();
                Position::Silent(heard, Box::new(guest.position.clone()))
            }
        };
        let positions: Vec<Position> = (0..self.size).map(place).collect();
        let failure = Failure {
            rank: *rank,
            message: cause.message.clone(),
            verdict: verdict(&positions),
        };
        self.failure = Some(failure.clone());
        failure
    }

    fn whereabouts(&self, asked: &Question) -> Whereabouts {
        let came = |rank: &usize| asked.stands.get(rank).is_some_and(|stand| stand.came);
        let call = |(rank, stand): (&usize, &Stand)| Some((*rank, stand.call.clone()?));
        Whereabouts {
            absent: (0..self.size).filter(|rank| !came(rank)).collect(),
            calls: asked.stands.iter().filter_map(call).collect(),
        }
    }

    fn position(&self, rank: usize) -> Position {
        let guest = self.seats[rank].guest();
        guest.map_or(Position::Absent, |guest| guest.position.clone())
    }

    /// What a rank has failed with, or that it has returned, stays true.
    fn set_position(&mut self, rank: usize, position: Position) {
        if let Some(guest) = self.seats[rank].guest_mut()
            && !is_over(&guest.position)
        {
            guest.position = position;
        }
    }
}

/// Why somebody is not let in.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It has nothing to do with this world.
    Stranger(String),
    /// It shows that this world is set up wrong.
    Misfit { reason: String, said: Said },
}

fn posted(key: &str, value: &[u8]) -> Down {
    Down::Posted {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}
