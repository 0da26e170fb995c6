//! A world whose ranks are processes. This process is one of the ranks.

#[cfg(feature = "cuda")]
mod nccl;

mod addresses;
mod monitor;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Dispatch;

use super::rank::{AnyError, CallLogDir, Rank, start_error};
use super::{Engine, World, WorldError};
use crate::error::{CommError, with_causes};
use crate::nccl_config::NcclConfig;
use crate::process::{CallTracker, ProcessCommunicator, ProcessWorld, Transport, peer_failed};
use crate::report::flight_recorder::FlightRecorder;
use addresses::{host_rendezvous, rendezvous_addresses, share_rendezvous};
use burn_megatron_rendezvous::{
    Coordinator, FailureReport, JoinRequest, Launch, Launcher, RendezvousClient, RendezvousError,
    RendezvousTimeouts, Token, describe_rank,
};
use monitor::FailureMonitor;

/// The time for which the host of the rendezvous waits until the other ranks are disconnected.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Implements [`World::run`] for ranks that are processes.
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
    let engine = choose(engine, launch)?;
    // Over NCCL, several ranks with different devices may be threads of this process. MPI has one world per process.
    static JOINED: Mutex<BTreeSet<(Option<String>, usize)>> = Mutex::new(BTreeSet::new());
    let place = match (engine, &launch.rendezvous) {
        (Engine::Nccl, Some(address)) => (Some(address.to_string()), launch.rank),
        _ => (None, 0),
    };
    if !JOINED.lock().insert(place) {
        return Err(WorldError::RanAlready);
    }
    let rank = ProcessRank::join(world, launch, engine)?;
    let call_log_dir = CallLogDir::new(world.call_log_dir.clone());
    let monitor = FailureMonitor::start(&rank, &call_log_dir)
        .map_err(|error| WorldError::from(RendezvousError::System(error.to_string())))?;
    let result = rank.run(world, dispatch, &call_log_dir, f, &monitor);
    monitor.ended.store(true, Ordering::Release);
    result.map(|value| vec![value])
}

/// Returns the requested engine or the default engine. Returns an error if the engine is not compiled in.
fn choose(engine: Option<Engine>, launch: &Launch) -> Result<Engine, WorldError> {
    let [nccl, mpi] = [cfg!(feature = "cuda"), cfg!(feature = "mpi")];
    let default = match (launch.launcher, nccl) {
        (Launcher::OpenMpi, _) | (_, false) => Engine::Mpi,
        (_, true) => Engine::Nccl,
    };
    match engine.unwrap_or(default) {
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

/// The rank of this process after it has joined the world.
struct ProcessRank {
    rank: usize,
    size: usize,
    world: Arc<ProcessWorld>,
    tracker: Arc<CallTracker>,
    /// The server of the rendezvous. It is set only on rank 0, and only if the launcher does not host the rendezvous.
    coordinator: Option<Coordinator>,
    launched: bool,
    close_timeout: Duration,
}

impl ProcessRank {
    fn join(world: &World, launch: &Launch, engine: Engine) -> Result<Self, WorldError> {
        let (rank, size) = (launch.rank, launch.world_size);
        let timeouts = RendezvousTimeouts {
            join: world.deadlines.first,
            heartbeat: world.heartbeat_timeout,
        };
        let tracker = CallTracker::new(FlightRecorder::new(Instant::now(), world.deadlines));
        let join = |addresses: &[SocketAddr], world_id, token| {
            let request = JoinRequest {
                rank,
                size,
                world: world_id,
                token,
                join_timeout: timeouts.join,
                heartbeat_timeout: timeouts.heartbeat,
            };
            RendezvousClient::join(addresses, request, tracker.clone())
        };
        let open = |client: Option<&_>| open(engine, launch, timeouts.join, client, &world.nccl);
        let launched = launch.launcher == Launcher::BurnMegatron;
        let (coordinator, client, transport) = if engine == Engine::Mpi && !launched {
            // Over MPI rank 0 broadcasts the address, so it can use a free port.
            let transport = open(None)?;
            let (coordinator, shared) = share_rendezvous(&*transport, launch, timeouts)?;
            let token = Token::parse(&shared.token, "the rendezvous of rank 0");
            let token = token.map_err(|error| RendezvousError::System(error.to_string()))?;
            let client = join(&shared.addresses, shared.number, Some(token))?;
            (coordinator, client, transport)
        } else {
            let Some(address) = &launch.rendezvous else {
                let launcher = launch.launcher;
                return Err(WorldError::NoRendezvous { launcher });
            };
            let addresses = rendezvous_addresses(address, launch)?;
            let (id, token) = (launch.world_id(), launch.token.as_ref());
            let coordinator = match rank == 0 && !launched {
                true => Some(host_rendezvous(&addresses, size, id, token, timeouts)?),
                false => None,
            };
            let client = join(&addresses, id, token.cloned())?;
            let transport = open(Some(&client))?;
            (coordinator, client, transport)
        };
        Ok(Self {
            rank,
            size,
            world: ProcessWorld::new(client, transport, &tracker).map_err(RendezvousError::from)?,
            tracker,
            coordinator,
            launched,
            close_timeout: world.deadlines.later,
        })
    }

    /// Runs the closure and leaves the world together with the other ranks.
    fn run<T, E>(
        self,
        world: &World,
        dispatch: &Dispatch,
        call_log_dir: &Arc<CallLogDir>,
        f: &(impl Fn(Rank) -> Result<T, E> + Sync),
        monitor: &FailureMonitor,
    ) -> Result<T, WorldError>
    where
        T: Send,
        E: Into<AnyError>,
    {
        let client = self.world.rendezvous.clone();
        let transport = self.world.transport.clone();
        let rank = Rank {
            rank: self.rank,
            compute_threads: world.compute_threads,
            communicator: ProcessCommunicator::world(&self.world, self.rank, self.size),
            recorder: self.tracker.recorder().clone(),
            call_log_dir: call_log_dir.clone(),
            stop: Arc::new(move || client.stop_requested()),
            engine: Arc::new(move || engine_of(&*transport)),
        };
        let ended = Mutex::new(None);
        let report_end = |end: Result<(), AnyError>| {
            let end = end.err().map(|error| (self.report_failure(&*error), error));
            *ended.lock() = end;
        };
        let name = rank.thread_name();
        let value = thread::scope(|scope| {
            let builder = thread::Builder::new().name(name);
            let thread = builder.spawn_scoped(scope, || rank.run(dispatch, f, &report_end));
            match thread {
                Ok(thread) => thread.join().unwrap_or_else(|payload| {
                    report_end(Err(super::rank::from_panic(payload)));
                    None
                }),
                Err(error) => {
                    report_end(Err(start_error(&error)));
                    None
                }
            }
        });
        match (value, ended.into_inner()) {
            (Some(value), _) => self.finish(value, monitor),
            (None, Some((failure, error))) => Err(self.fail(failure, Some(error), monitor)),
            (None, None) => unreachable!("a rank without a value has reported an error"),
        }
    }

    /// Reports the failure of this rank to the other ranks. Returns the failure report of the world.
    fn report_failure(&self, error: &(dyn std::error::Error + 'static)) -> FailureReport {
        let message = with_causes(error);
        let position = self.tracker.recorder().position();
        let own = FailureReport {
            rank: self.rank,
            message: message.clone(),
            positions: describe_rank(self.rank, &position),
        };
        let client = &self.world.rendezvous;
        let known = match self.world.cause_of(message) {
            Some(cause) => client.fail(cause, position),
            // This rank failed because another rank failed.
            None => client.await_failure(DISCONNECT_TIMEOUT),
        };
        known.unwrap_or(own)
    }

    fn finish<T>(self, value: T, monitor: &FailureMonitor) -> Result<T, WorldError> {
        let client = self.world.rendezvous.clone();
        if let Err(failure) = client.return_with_all(self.tracker.calls()) {
            return Err(self.fail(failure, None, monitor));
        }
        let closed = self.world.transport.close(self.close_timeout);
        self.leave();
        closed?;
        Ok(value)
    }

    /// Leaves the world and returns the error of the world.
    fn fail(
        self,
        failure: FailureReport,
        error: Option<AnyError>,
        monitor: &FailureMonitor,
    ) -> WorldError {
        let call_log = monitor.call_log();
        self.leave();
        let own = error.filter(|_| failure.rank == self.rank);
        let source = own.unwrap_or_else(|| Box::new(peer_failed(&failure)));
        WorldError::rank_failed(failure, source, call_log, true)
    }

    fn leave(&self) {
        self.world.rendezvous.leave();
        if let Some(coordinator) = &self.coordinator {
            coordinator.wait_for_disconnects(DISCONNECT_TIMEOUT);
        }
    }
}

/// Returns the name and the description of the engine, for example `mpi, Open MPI v4.1.4 (...)`.
fn engine_of(transport: &dyn Transport) -> String {
    format!("{}, {}", transport.name(), transport.description())
}

/// Checks that MPI and the environment variables of the launcher contain the same rank and the same number of ranks.
#[cfg(any(test, feature = "mpi"))]
fn check_mpi_rank(launch: &Launch, rank: usize, size: usize) -> Result<(), CommError> {
    let Launch {
        launcher,
        rank: expected,
        world_size,
        ..
    } = launch;
    if (rank, size) == (*expected, *world_size) {
        return Ok(());
    }
    Err(CommError::engine(
        "mpi",
        format!(
            "this process is rank {rank} of {size} by MPI, but rank {expected} of {world_size} by its \
             environment variables ({launcher}): start it with the mpirun of the MPI library that this \
             program was built with, or with `burn-megatron launch`"
        ),
    ))
}

#[allow(unused_variables, reason = "each engine uses what it needs")]
fn open(
    engine: Engine,
    launch: &Launch,
    timeout: Duration,
    client: Option<&Arc<RendezvousClient>>,
    config: &NcclConfig,
) -> Result<Arc<dyn Transport>, CommError> {
    match engine {
        #[cfg(feature = "mpi")]
        Engine::Mpi => {
            let transport = crate::engines::mpi::MpiTransport::open(Arc::default(), timeout)?;
            check_mpi_rank(launch, transport.rank(), transport.size())?;
            Ok(transport)
        }
        #[cfg(feature = "cuda")]
        Engine::Nccl => nccl::open(launch, timeout, client, config),
        engine => unreachable!("{engine} is not compiled in, which was checked"),
    }
}
