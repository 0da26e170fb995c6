//! The place where the ranks of a world find each other and hear of each other's ends.

use std::io::{self, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::message::{self, Down, Failure, Up};
use super::registry::{Patience, Refusal, Registry, To};

/// How often the coordinator looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// How often it says that it lives.
const BEAT: Duration = Duration::from_secs(1);
/// How long a word to a rank may take: one that is stopped does not hold up the others.
const WORD: Duration = Duration::from_secs(1);
/// A thread per rank only waits.
const STACK_BYTES: usize = 256 << 10;

/// The coordinator of one world: rank 0 of it, or its launcher, holds it.
///
/// Every rank keeps a connection to it. It tells each when all have come, hands round small values,
/// watches for signs of life, and says once, to all, who failed first and where the others stood.
#[derive(Debug)]
pub struct Coordinator {
    hall: Arc<Hall>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Hall {
    began: Instant,
    registry: Mutex<Registry>,
    lines: Vec<Mutex<Option<TcpStream>>>,
    closing: AtomicBool,
}

impl Coordinator {
    /// Listens on `address` for `ranks` ranks, as a launcher does; port 0 takes a free one.
    ///
    /// `gather` is the time for all to come, `silence` that for a sign of life of each; ranks that are less
    /// patient say so when they come.
    ///
    /// # Errors
    /// What the operating system says, such as that the port is taken.
    pub fn host(
        address: SocketAddr,
        ranks: usize,
        gather: Duration,
        silence: Duration,
    ) -> io::Result<Self> {
        Self::listen(address, ranks, 0, Patience { gather, silence })
    }

    /// Listens on `address` for the `size` ranks of the world with the number `world`, which all of them
    /// were told (0 if there is none). Port 0 takes a free one.
    ///
    /// # Errors
    /// What the operating system says, such as that the port is taken.
    pub(in crate::comm) fn listen(
        address: SocketAddr,
        size: usize,
        world: u64,
        patience: Patience,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let hall = Arc::new(Hall {
            began: Instant::now(),
            registry: Mutex::new(Registry::new(size, world, patience)),
            lines: (0..size).map(|_| Mutex::default()).collect(),
            closing: AtomicBool::new(false),
        });
        let (door, clock) = (hall.clone(), hall.clone());
        let threads = vec![
            spawn("rendezvous", move || door.let_in(&listener))?,
            spawn("rendezvous-clock", move || clock.watch_clock())?,
        ];
        Ok(Self {
            hall,
            address,
            threads,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
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
        // Wakes the thread that waits for newcomers.
        let _ = TcpStream::connect_timeout(&reachable(self.address), WORD);
        for line in &self.hall.lines {
            if let Some(stream) = &*lock(line) {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The address by which this machine reaches what listens on all its addresses.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let builder = thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_BYTES);
    builder.spawn(work)
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

    fn let_in(self: Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.is_closing() {
                return;
            }
            let hall = self.clone();
            if let Ok(stream) = stream {
                // A newcomer that cannot have a thread sees its connection closed.
                let _ = spawn("rendezvous-rank", move || hall.attend(stream));
            }
        }
    }

    /// Listens to one rank until it goes.
    fn attend(&self, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let _ = stream.set_write_timeout(Some(WORD));
        let Ok(copy) = stream.try_clone() else {
            return;
        };
        let mut from = BufReader::new(copy);
        let Some(rank) = self.welcome(&mut from, stream) else {
            return;
        };
        while let Ok(Some(word)) = message::read::<Up>(&mut from) {
            let said = self.registry().hear(rank, word, self.now());
            self.say(said);
        }
        let said = self.registry().closed(rank, self.now());
        self.say(said);
    }

    /// The first word of a newcomer; its rank if it is let in.
    fn welcome(&self, from: &mut BufReader<TcpStream>, mut stream: TcpStream) -> Option<usize> {
        // Who connects and says nothing is no rank.
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .ok()?;
        let Ok(Some(Up::Hello(hello))) = message::read::<Up>(from) else {
            return None;
        };
        stream.set_read_timeout(None).ok()?;
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
