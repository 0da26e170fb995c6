//! The place where the ranks of a world find each other and hear of each other's ends.

use std::io::{self, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::PURPOSE;
use super::message::{self, Down, Failure, Hello, Up};
use super::registry::{Patience, Refusal, Registry, To};
use crate::auth::{Arrival, Limits, Listener, Token};

/// How often the coordinator looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// How often it says that it lives.
const BEAT: Duration = Duration::from_secs(1);
/// How long a word to a rank may take: one that is stopped does not hold up the others.
const WORD: Duration = Duration::from_secs(1);
/// The clock's thread only waits.
const STACK_BYTES: usize = 256 << 10;

/// The coordinator of one world: rank 0 of it, or its launcher, holds it.
///
/// Every rank keeps a connection to it. It tells each when all have come, hands round small values,
/// watches for signs of life, and says once, to all, who failed first and where the others stood.
#[derive(Debug)]
pub struct Coordinator {
    hall: Arc<Hall>,
    /// Dropped first, so that nobody comes in while the others are sent away.
    listener: Option<Listener>,
    clock: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Hall {
    began: Instant,
    registry: Mutex<Registry>,
    lines: Vec<Mutex<Option<TcpStream>>>,
    closing: AtomicBool,
}

impl Coordinator {
    /// Listens on `address` for `ranks` ranks that have `token`, as a launcher does; port 0 takes a free
    /// one. The ranks get the token by the environment, as [`Token::VARIABLE`].
    ///
    /// `gather` is the time for all to come, `silence` that for a sign of life of each; ranks that are less
    /// patient say so when they come.
    ///
    /// # Errors
    /// What the operating system says, such as that the port is taken.
    pub fn host(
        address: SocketAddr,
        ranks: usize,
        token: &Token,
        gather: Duration,
        silence: Duration,
    ) -> io::Result<Self> {
        let patience = Patience { gather, silence };
        Self::listen(&[address], ranks, 0, Some(token), patience)
    }

    /// Listens on `addresses` for the `size` ranks of the world with the number `world`, which all of them
    /// were told (0 if there is none). Port 0 takes a free one.
    ///
    /// # Errors
    /// What the operating system says, such as that the port is taken; addresses that other machines reach
    /// without a token.
    pub(crate) fn listen(
        addresses: &[SocketAddr],
        size: usize,
        world: u64,
        token: Option<&Token>,
        patience: Patience,
    ) -> io::Result<Self> {
        let hall = Arc::new(Hall {
            began: Instant::now(),
            registry: Mutex::new(Registry::new(size, world, patience)),
            lines: (0..size).map(|_| Mutex::default()).collect(),
            closing: AtomicBool::new(false),
        });
        let (door, clock) = (hall.clone(), hall.clone());
        let serve = move |arrival| match arrival {
            Arrival::Known { hello, stream } => door.attend(&hello, stream),
            Arrival::OtherToken(from) => door.registry().turned_away(from.ip()),
        };
        let limits = Limits::for_ranks(size);
        let listener = Listener::open(addresses, token.cloned(), PURPOSE, limits, serve)?;
        let builder = thread::Builder::new().name("rendezvous-clock".into());
        let builder = builder.stack_size(STACK_BYTES);
        let clock = builder.spawn(move || clock.watch_clock())?;
        Ok(Self {
            hall,
            listener: Some(listener),
            clock: Some(clock),
        })
    }

    /// Where it listens: the first address that it was given, with its port.
    pub fn address(&self) -> SocketAddr {
        self.addresses()[0]
    }

    /// Where it listens, in the order that was given.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        let listener = self.listener.as_ref();
        listener
            .expect("it listens until it is dropped")
            .addresses()
    }

    /// Asks all ranks to end the step in hand and to stop; whether they have come, so that they hear it.
    pub fn request_stop(&self) -> bool {
        let complete = self.hall.registry().is_complete();
        if complete {
            self.hall.say(vec![(To::All, Down::Stop)]);
        }
        complete
    }

    /// Tells that the process of a rank has ended, and how, for example `"ended with exit code 1"`: one that
    /// never came can never come.
    pub fn process_ended(&self, rank: usize, how: &str) {
        let said = self
            .hall
            .registry()
            .process_ended(rank, how, self.hall.now());
        self.hall.say(said);
    }

    /// The rank that failed first, once one has.
    pub fn culprit(&self) -> Option<usize> {
        self.failure_of_a_world().map(|failure| failure.rank)
    }

    fn failure_of_a_world(&self) -> Option<Failure> {
        let registry = self.hall.registry();
        registry
            .failure()
            .filter(|_| registry.has_guests())
            .cloned()
    }

    /// Who failed and where the others stood, once a rank has failed: two lines for a person. None if
    /// nobody ever came: programs that are no ranks have no world.
    pub fn verdict(&self) -> Option<String> {
        let failure = self.failure_of_a_world()?;
        let Failure {
            rank,
            message,
            verdict,
        } = failure;
        Some(format!("rank {rank} failed: {message}\n{verdict}"))
    }

    /// Waits until all ranks that came have gone, at most so long; whether they have.
    pub fn await_departure(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while !self.hall.registry().all_gone() {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.hall.closing.store(true, Ordering::Release);
        drop(self.listener.take());
        for line in &self.hall.lines {
            if let Some(stream) = &*lock(line) {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
        }
        if let Some(clock) = self.clock.take() {
            let _ = clock.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hall {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.registry)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Listens to one rank that has the token, until it goes.
    fn attend(&self, hello: &str, stream: TcpStream) {
        let _ = stream.set_write_timeout(Some(WORD));
        let (Ok(hello), Ok(copy)) = (Hello::read(hello), stream.try_clone()) else {
            return;
        };
        let Some(rank) = self.welcome(hello, stream) else {
            return;
        };
        let mut from = BufReader::new(copy);
        while let Ok(Some(word)) = message::read::<Up>(&mut from) {
            let said = self.registry().hear(rank, word, self.now());
            self.say(said);
        }
        let said = self.registry().closed(rank, self.now());
        self.say(said);
    }

    /// The rank of a newcomer, if it is let in.
    fn welcome(&self, hello: Hello, mut stream: TcpStream) -> Option<usize> {
        let rank = hello.rank;
        let mut registry = self.registry();
        match registry.join(hello, self.now()) {
            Ok(said) => {
                *lock(&self.lines[rank]) = Some(stream);
                drop(registry);
                self.say(said);
                Some(rank)
            }
            Err(refusal) => {
                drop(registry);
                let (reason, said) = match refusal {
                    Refusal::Stranger(reason) => (reason, vec![]),
                    Refusal::Misfit { reason, said } => (reason, said),
                };
                let _ = message::write(&mut stream, &Down::Refused(reason));
                self.say(said);
                None
            }
        }
    }

    fn watch_clock(&self) {
        let mut beat = Duration::ZERO;
        while !self.is_closing() {
            thread::sleep(TICK);
            let now = self.now();
            let mut said = self.registry().tick(now);
            if now >= beat {
                beat = now + BEAT;
                said.push((To::All, Down::Alive));
            }
            self.say(said);
        }
    }

    /// Says it to whom it concerns. A rank that cannot be reached is noticed by its silence.
    fn say(&self, said: Vec<(To, Down)>) {
        for (to, word) in said {
            let ranks = match to {
                To::All => 0..self.lines.len(),
                To::Rank(rank) => rank..rank + 1,
            };
            for rank in ranks {
                let mut line = lock(&self.lines[rank]);
                if let Some(stream) = &mut *line
                    && message::write(stream, &word).is_err()
                {
                    // Half a line may have gone out: nothing more can be said to this rank.
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                    *line = None;
                }
            }
        }
    }
}
