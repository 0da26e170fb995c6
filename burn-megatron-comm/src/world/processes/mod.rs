//! A world of processes, of which this one is a rank.

#[cfg(feature = "cuda")]
mod nccl;
mod place;
#[cfg(test)]
mod tests;
mod watch;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tracing::Dispatch;

use super::rank::{AnyError, LogFolder, Rank, StopSign, unstarted};
use super::{Engine, World, WorldError};
use crate::auth::NoToken;
use crate::error::{CommError, with_causes};
use crate::journal::Journal;
use crate::launch::{Launch, Launcher};
use crate::log;
use crate::process::{Desk, ProcessCommunicator, ProcessWorld, Transport};
use crate::rendezvous::{Coordinator, Failure, Introduction, Member, Patience, RendezvousError};
use place::{hold, meeting_place, share};
use watch::Watch;

/// How long the one who holds the rendezvous waits for the others to hear its last word.
const DEPARTURE: Duration = Duration::from_secs(2);

/// See [`World::run`].
pub(super) fn run<T, E>(
    world: &World,
    launch: &Launch,
    engine: Option<Engine>,
    dispatch: &Dispatch,
    f: &(impl Fn(Rank) -> Result<T, E> + Sync),
) -> Result<Vec<T>, WorldError>
where
    T: Send,
    E: Into<AnyError>,
{
    static RAN: AtomicBool = AtomicBool::new(false);
    let engine = choose(engine, launch)?;
    if RAN.swap(true, Ordering::Relaxed) {
        return Err(WorldError::RanAlready);
    }
    let seat = Seat::take(world, launch, engine)?;
    let log_folder = LogFolder::new(world.call_log_dir.clone());
    let watch = Watch::start(&seat, &log_folder)
        .map_err(|error| WorldError::from(RendezvousError::System(error.to_string())))?;
    let result = seat.run(world, dispatch, &log_folder, f, &watch);
    watch.ended.store(true, Ordering::Release);
    result.map(|value| vec![value])
}

/// The engine that was asked for, or the one that fits, if it is compiled in.
fn choose(engine: Option<Engine>, launch: &Launch) -> Result<Engine, WorldError> {
    let [nccl, mpi] = [cfg!(feature = "cuda"), cfg!(feature = "mpi")];
    let fitting = match (launch.launcher, nccl) {
        (Launcher::OpenMpi, _) | (_, false) => Engine::Mpi,
        (_, true) => Engine::Nccl,
    };
    match engine.unwrap_or(fitting) {
        Engine::Threads => Err(WorldError::ThreadsAcrossProcesses {
            ranks: launch.world_size,
        }),
        engine @ Engine::Nccl if !nccl => Err(WorldError::NotCompiled {
            engine,
            feature: "cuda",
        }),
        engine @ Engine::Mpi if !mpi => Err(WorldError::NotCompiled {
            engine,
            feature: "mpi",
        }),
        engine => Ok(engine),
    }
}

/// This rank among the processes of its world.
struct Seat {
    rank: usize,
    size: usize,
    world: Arc<ProcessWorld>,
    desk: Arc<Desk>,
    /// Held by rank 0, unless a launcher holds it.
    coordinator: Option<Coordinator>,
    launched: bool,
    closing: Duration,
}

impl Seat {
    fn take(world: &World, launch: &Launch, engine: Engine) -> Result<Self, WorldError> {
        let (rank, size) = (launch.rank, launch.world_size);
        let patience = Patience {
            gather: world.deadlines.first,
            silence: world.silence,
        };
        let desk = Desk::new(Journal::new(Instant::now(), world.deadlines));
        let introduction = |number, token| Introduction {
            rank,
            size,
            world: number,
            token,
            gather: patience.gather,
            silence: patience.silence,
        };
        let join = |addresses: &[SocketAddr], number, token| {
            Member::join(addresses, introduction(number, token), desk.clone())
        };
        let launched = launch.launcher == Launcher::BurnMegatron;
        // MPI hands an address round itself, on a port that is free for certain.
        let by_mpi = engine == Engine::Mpi && !launched;
        let (coordinator, member, transport) = match &launch.rendezvous {
            Some(place) if !by_mpi => {
                let addresses = meeting_place(place, launch)?;
                let holds = rank == 0 && !launched;
                let number = if launched { 0 } else { launch.number() };
                let token = launch.token.as_ref();
                let coordinator = holds.then(|| hold(&addresses, size, number, token, patience));
                let coordinator = coordinator.transpose()?;
                let member = join(&addresses, number, token.cloned())?;
                let transport = open(
                    engine,
                    launch,
                    patience.gather,
                    Some(&member),
                    world.registered,
                );
                (coordinator, member, transport.map_err(WorldError::Engine)?)
            }
            _ if by_mpi => {
                let transport = open(engine, launch, patience.gather, None, world.registered);
                let transport = transport.map_err(WorldError::Engine)?;
                let (coordinator, ticket) = share(&*transport, launch, patience)?;
                let token = ticket.token.parse().map_err(|error: NoToken| {
                    RendezvousError::System(format!("the token of rank 0: {error}"))
                })?;
                let member = join(&ticket.addresses, ticket.number, Some(token))?;
                (coordinator, member, transport)
            }
            _ => {
                return Err(WorldError::NoRendezvous {
                    launcher: launch.launcher,
                });
            }
        };
        Ok(Self {
            rank,
            size,
            world: ProcessWorld::new(member, transport, &desk).map_err(RendezvousError::from)?,
            desk,
            coordinator,
            launched,
            closing: world.deadlines.then,
        })
    }

    /// Runs the closure, and ends the world together with the others.
    fn run<T, E>(
        self,
        world: &World,
        dispatch: &Dispatch,
        log_folder: &Arc<LogFolder>,
        f: &(impl Fn(Rank) -> Result<T, E> + Sync),
        watch: &Watch,
    ) -> Result<T, WorldError>
    where
        T: Send,
        E: Into<AnyError>,
    {
        let member = self.world.member().clone();
        let rank = Rank {
            rank: self.rank,
            compute_threads: world.compute_threads,
            communicator: ProcessCommunicator::world(&self.world, self.rank, self.size),
            journal: self.desk.journal().clone(),
            log_folder: log_folder.clone(),
            stop: StopSign(Arc::new(move || member.stop_requested())),
            engine: engine_of(&**self.world.transport()).into(),
        };
        let ended = std::sync::Mutex::new(None);
        let tell = |end: Result<(), AnyError>| {
            let end = end.err().map(|error| (self.give_up(&*error), error));
            *ended.lock().unwrap_or_else(|e| e.into_inner()) = end;
        };
        let name = rank.thread_name();
        let value = thread::scope(|scope| {
            let builder = thread::Builder::new().name(name);
            let thread = builder.spawn_scoped(scope, || rank.run(dispatch, f, &tell));
            match thread {
                Ok(thread) => thread.join().unwrap_or_else(|payload| {
                    tell(Err(super::rank::from_panic(payload)));
                    None
                }),
                Err(error) => {
                    tell(Err(unstarted(&error)));
                    None
                }
            }
        });
        let ended = ended.into_inner().unwrap_or_else(|e| e.into_inner());
        match (value, ended) {
            (Some(value), _) => self.return_with(value, watch),
            (None, Some((failure, error))) => Err(self.fail(failure, Some(error), watch)),
            (None, None) => unreachable!("a rank that gives no value tells why"),
        }
    }

    /// Tells the others that this rank has failed; the failure of the world.
    fn give_up(&self, error: &(dyn std::error::Error + 'static)) -> Failure {
        let message = with_causes(error);
        let stood = self.desk.journal().position();
        let own = Failure {
            rank: self.rank,
            message: message.clone(),
            verdict: log::verdict_of(self.rank, &stood),
        };
        let member = self.world.member();
        let known = match self.world.cause_of(message) {
            Some(cause) => member.fail(cause, stood),
            // Another rank's failure has reached this one.
            None => member.await_failure(DEPARTURE),
        };
        known.unwrap_or(own)
    }

    fn return_with<T>(self, value: T, watch: &Watch) -> Result<T, WorldError> {
        let member = self.world.member().clone();
        if let Err(failure) = member.return_with_all(self.desk.calls()) {
            return Err(self.fail(failure, None, watch));
        }
        let closed = self.world.transport().close(self.closing);
        self.leave();
        closed.map_err(WorldError::Engine).map(|()| value)
    }

    /// Ends what this rank has under way, and says what happened.
    fn fail(self, failure: Failure, error: Option<AnyError>, watch: &Watch) -> WorldError {
        let call_log = watch.call_log();
        self.leave();
        let Failure {
            rank,
            message,
            verdict,
        } = failure;
        let own = error.filter(|_| rank == self.rank);
        let source = own.unwrap_or_else(|| {
            Box::new(CommError::PeerFailed {
                rank,
                message: message.clone(),
            })
        });
        WorldError::RankFailed {
            rank,
            message,
            source,
            verdict,
            call_log,
            told: true,
        }
    }

    fn leave(&self) {
        self.world.member().leave();
        if let Some(coordinator) = &self.coordinator {
            coordinator.await_departure(DEPARTURE);
        }
    }
}

/// The name of the engine, and what it is: `mpi, Open MPI v4.1.4 (...)`.
fn engine_of(transport: &dyn Transport) -> String {
    format!("{}, {}", transport.name(), transport.description())
}

/// Checks that the engine and the launcher's variables mean the same rank.
#[cfg(any(test, feature = "mpi"))]
fn check_place(launch: &Launch, rank: usize, size: usize) -> Result<(), CommError> {
    let Launch {
        launcher,
        rank: told,
        world_size,
        ..
    } = launch;
    match (rank, size) == (*told, *world_size) {
        true => Ok(()),
        false => Err(CommError::Engine {
            engine: "mpi".into(),
            message: format!(
                "MPI takes this process for rank {rank} of {size}, the variables ({launcher}) for \
                 rank {told} of {world_size}; start it with the mpirun of the MPI library that this \
                 program was built with, or with `burn-megatron launch`"
            ),
        }),
    }
}

#[allow(unused_variables, reason = "each engine takes what it needs")]
fn open(
    engine: Engine,
    launch: &Launch,
    patience: Duration,
    member: Option<&Arc<Member>>,
    registered: bool,
) -> Result<Arc<dyn Transport>, CommError> {
    match engine {
        #[cfg(feature = "mpi")]
        Engine::Mpi => {
            let transport = crate::mpi::MpiTransport::open(Arc::default(), patience)?;
            check_place(launch, transport.rank(), transport.size())?;
            Ok(transport)
        }
        #[cfg(feature = "cuda")]
        Engine::Nccl => nccl::open(launch, patience, member, registered),
        engine => unreachable!("{engine} was refused, as it is not compiled in"),
    }
}
