//! The transport that executes the calls of a process with NCCL.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use parking_lot::Mutex;

use super::buffer_provider::{DeviceBufferProvider, Wake};
use super::buffers::DeviceBuffers;
use super::call::{CallMemory, NcclCall};
use super::collective_streams::CollectiveStreams;
use super::communicator::{CallQueue, CommKey, LiveComms};
use super::driver::DeviceDriver;
use super::engine_state::{EngineState, Split, WorkerCommand};
use super::library::Library;
use super::opening::Opening;
use super::plan::{CommScope, NcclPlan};
use super::registered::{CopyCount, Registration};
use super::stream_order::StreamOrder;
use super::types;
use super::version::Version;
use super::worker::NcclWorker;
use crate::buffer::Buffer;
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::nccl_config::{NcclConfig, NcclGroup};
use crate::pool::BufferPool;
use crate::process::{
    DeviceJob, DeviceTransport, InFlightDeviceCall, Job, KeyValueStore, ResultSlot, Transport,
};
use burn_megatron_rendezvous::GroupId;

/// The time for the worker to abort its communicators. After this time, another thread aborts them.
const WORKER_ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The NCCL transport of one rank.
pub(crate) struct NcclTransport {
    state: Arc<EngineState>,
    worker: Sender<WorkerCommand>,
    provider: Arc<dyn DeviceBufferProvider>,
    rank: usize,
    size: usize,
    use_for_one_rank: bool,
}

/// The components from which the engine is built.
pub(super) struct NcclComponents {
    pub library: Arc<Library>,
    pub driver: Arc<dyn DeviceDriver>,
    pub provider: Arc<dyn DeviceBufferProvider>,
    pub store: Arc<dyn KeyValueStore>,
    pub pool: Arc<BufferPool>,
    pub config: NcclConfig,
    /// Whether NCCL is also used in a world of one rank.
    pub use_for_one_rank: bool,
}

impl NcclTransport {
    /// Connects rank `rank` of `size` ranks. Collective: call on all ranks. Each rank waits up to `timeout` for the
    /// other ranks.
    ///
    /// # Errors
    /// [`CommError::Engine`] for an error of NCCL or of the key-value store, for settings that this NCCL version or
    /// device does not support, or after the timeout.
    pub(super) fn connect(
        parts: NcclComponents,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Arc<Self>, CommError> {
        let NcclComponents {
            library,
            driver,
            provider,
            store,
            pool,
            config,
            use_for_one_rank,
        } = parts;
        check_version(&config, &library)?;
        let streams = CollectiveStreams::new(&config, &*driver, provider.stream_order());
        let streams = streams.map_err(super::error)?;
        let registration = Registration::of(config.registered_buffers, &library);
        let state = Arc::new(EngineState {
            library,
            driver,
            store,
            pool,
            timeout,
            config,
            streams,
            comms: LiveComms::default(),
            copies: CopyCount::default(),
            first_failure: Mutex::default(),
            registration_state: Mutex::new(registration),
        });
        let worker = start_worker(&state, rank)?;
        let transport = Arc::new(Self {
            state,
            worker,
            provider,
            rank,
            size,
            use_for_one_rank,
        });
        if size > 1 || use_for_one_rank {
            transport.init_world(timeout)?;
        }
        Ok(transport)
    }

    fn init_world(&self, timeout: Duration) -> Result<(), CommError> {
        let reply = Arc::new(ResultSlot::default());
        self.submit(WorkerCommand::Open {
            opening: Opening {
                key: CommKey::Group(GroupId::WORLD),
                rank: self.rank,
                size: self.size,
                group: NcclGroup::World,
            },
            reply: reply.clone(),
        });
        match reply.take_within(timeout) {
            Some(result) => result.map(drop),
            None => Err(super::error(format!(
                "after {:.1} s not all {} ranks have called ncclCommInitRankConfig; NCCL_DEBUG=INFO shows which \
                 ranks wait for which",
                timeout.as_secs_f64(),
                self.size
            ))),
        }
    }

    fn submit(&self, command: WorkerCommand) {
        // If the worker has ended, it has aborted, and slots stay empty.
        let _ = self.worker.send(command);
    }

    /// Creates the plan of a call. Returns an error if an earlier call has failed.
    fn plan(&self, signature: &Signature, group: &Group) -> Result<NcclPlan, CommError> {
        match self.state.first_error() {
            Some(failure) => Err(failure),
            None => NcclPlan::of(signature, group)
                .ok_or_else(|| super::error("a split was started as a call".into())),
        }
    }

    /// Creates the worker's call for a host buffer. Returns `None` if the call was completed locally.
    fn host_call(&self, job: Job) -> Option<NcclCall> {
        let Job {
            group,
            group_id,
            signature,
            input,
            mut slot,
            ..
        } = job;
        let plan = self.plan(&signature, &group);
        let plan = plan
            .inspect_err(|error| slot.fulfil(Err(error.clone())))
            .ok()?;
        if let Operation::Call(Call::Send { .. }) = signature.operation {
            // Sends are buffered. Later calls report an error of the send.
            mem::take(&mut slot).fulfil(Ok(Buffer::empty(plan.dtype)));
        }
        if self.is_local(&plan, &group, group_id) {
            slot.fulfil(Ok(match plan.result {
                0 => Buffer::empty(plan.dtype),
                _ => input,
            }));
            return None;
        }
        let memory = CallMemory::Host {
            input,
            slot,
            staged: None,
        };
        Some(self.new_call(group, group_id, signature, plan, memory))
    }

    /// Creates the worker's call for a tensor, or `None` if the call was completed locally. Also returns the handle of
    /// the call.
    fn device_call(
        &self,
        job: DeviceJob,
    ) -> Result<(Option<NcclCall>, InFlightDeviceCall), CommError> {
        let DeviceJob {
            group,
            group_id,
            signature,
            input,
            slot: passed,
            ..
        } = job;
        let plan = self.plan(&signature, &group)?;
        let buffers = DeviceBuffers::new(self.provider.stream_order() == StreamOrder::Host, passed);
        let launched = buffers.launched.clone();
        if self.is_local(&plan, &group, group_id) {
            buffers.complete(Ok(()));
            let result = Box::new(move || Ok(input));
            return Ok((None, InFlightDeviceCall { launched, result }));
        }
        let worker = self.worker.clone();
        let wake: Wake = Box::new(move || {
            let _ = worker.send(WorkerCommand::Wake);
        });
        let result = self
            .provider
            .provide(input, plan.result, buffers.clone(), wake)?;
        let call = self.new_call(
            group,
            group_id,
            signature,
            plan,
            CallMemory::Tensor(buffers),
        );
        Ok((Some(call), InFlightDeviceCall { launched, result }))
    }

    /// Returns whether the result is equal to the input, so that no communication is needed.
    fn is_local(&self, plan: &NcclPlan, group: &Group, id: GroupId) -> bool {
        let alone = group.size() == 1 && plan.scope == CommScope::Group;
        plan.steps.is_empty() || (alone && !(self.use_for_one_rank && id == GroupId::WORLD))
    }

    fn new_call(
        &self,
        group: Arc<Group>,
        group_id: GroupId,
        signature: Arc<Signature>,
        plan: NcclPlan,
        memory: CallMemory,
    ) -> NcclCall {
        let (key, settings, queue) = match plan.scope {
            CommScope::Group => {
                let settings = NcclGroup::of_name(group.name());
                let queue = CallQueue::Collectives(self.state.streams.priority(settings));
                (CommKey::Group(group_id), settings, queue)
            }
            CommScope::Message { from, to } => {
                let group = group_id;
                let key = CommKey::Message { group, from, to };
                (key, NcclGroup::Messages, CallQueue::Messages(key))
            }
        };
        NcclCall {
            key,
            queue,
            settings,
            plan,
            group,
            signature,
            memory,
        }
    }
}

/// Checks that the NCCL version supports the settings.
fn check_version(config: &NcclConfig, library: &Library) -> Result<(), CommError> {
    let version = library.version();
    let mut groups = config.groups.iter();
    let limited = groups.find(|(_, group)| group.min_ctas.or(group.max_ctas).is_some());
    match limited {
        Some((group, _)) if version < Version::CTAS => Err(super::error(format!(
            "min_ctas and max_ctas of nccl.groups.{group} are not supported by NCCL {version}: update NCCL to at least \
             {}, or remove them",
            Version::CTAS
        ))),
        _ => Ok(()),
    }
}

fn start_worker(state: &Arc<EngineState>, rank: usize) -> Result<Sender<WorkerCommand>, CommError> {
    let (worker, commands) = mpsc::channel();
    let (started, started_receiver) = mpsc::sync_channel(1);
    let (state, own) = (state.clone(), worker.clone());
    let work = move || {
        let worker = NcclWorker::new(state, own);
        let _ = started.send(worker.as_ref().map(drop).map_err(String::clone));
        if let Ok(worker) = worker {
            worker.run(&commands);
        }
    };
    let builder = thread::Builder::new().name(format!("nccl-{rank}"));
    let started = builder.spawn(work).map_err(|error| error.to_string());
    let running = started.and_then(|_| {
        started_receiver
            .recv()
            .unwrap_or_else(|_| Err("it panicked".into()))
    });
    running
        .map(|()| worker)
        .map_err(|reason| super::error(format!("cannot start the worker thread: {reason}")))
}

impl Transport for NcclTransport {
    fn name(&self) -> &'static str {
        super::ENGINE
    }

    fn description(&self) -> String {
        let EngineState {
            library, driver, ..
        } = &*self.state;
        format!(
            "{library:?} on {}, order {}, {}, {}, types {}",
            driver.name(),
            self.provider.description(),
            self.state.streams.description(),
            self.state.registration().description(&self.state.copies),
            types::names(library.version())
        )
    }

    fn share(&self, own: Option<&[u8]>, timeout: Duration) -> Result<Vec<u8>, CommError> {
        const KEY: &str = "nccl/shared";
        let store = &self.state.store;
        match own {
            Some(bytes) => store.post(KEY, bytes).map(|()| bytes.to_vec()),
            None => store.read(KEY, timeout),
        }
    }

    fn pool(&self) -> &Arc<BufferPool> {
        &self.state.pool
    }

    fn start(&self, jobs: Vec<Job>) {
        let calls: Vec<_> = jobs
            .into_iter()
            .filter_map(|job| self.host_call(job))
            .collect();
        if !calls.is_empty() {
            self.submit(WorkerCommand::Calls(calls));
        }
    }

    fn device(&self) -> Option<&dyn DeviceTransport> {
        Some(self)
    }

    fn split(&self, job: Job, part: Arc<Group>, part_id: GroupId) {
        let reply = job.slot;
        let Operation::Split { groups, .. } = &job.signature.operation else {
            return reply.fulfil(Err(super::error("a call was started as a split".into())));
        };
        if let Some(failure) = self.state.first_error() {
            return reply.fulfil(Err(failure));
        }
        let alone = part.size() == 1;
        let everybody_alone = groups.iter().all(|group| group.len() == 1);
        // The members create the communicator at its first call.
        let is_lazy = !self.state.config.eager_init;
        let by_id = !self.state.library.can_split();
        if is_lazy || everybody_alone || (alone && by_id) {
            return reply.fulfil(Ok(Buffer::empty(job.signature.dtype)));
        }
        let (key, group) = (CommKey::Group(part_id), NcclGroup::of_name(part.name()));
        if by_id {
            let (rank, size) = (part.index(), part.size());
            let opening = Opening {
                key,
                rank,
                size,
                group,
            };
            return self.submit(WorkerCommand::Open { opening, reply });
        }
        let own = part.world_rank();
        let number = groups.iter().position(|group| group.contains(&own));
        let number = number.filter(|_| !alone);
        self.submit(WorkerCommand::Split(Split {
            parent: CommKey::Group(job.group_id),
            part: number.map(|number| (key, number, part.index())),
            group,
            reply,
        }));
    }

    fn abort(&self) {
        let comms = &self.state.comms;
        if comms.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        self.submit(WorkerCommand::Wake);
        // The abort of its communicators releases a worker that is blocked inside NCCL.
        let start = Instant::now();
        while !comms.is_empty() && start.elapsed() < WORKER_ABORT_TIMEOUT {
            thread::sleep(Duration::from_millis(1));
        }
        comms.abort_all(&self.state.library);
    }

    fn close(&self, deadline: Duration) -> Result<(), CommError> {
        let (reply, ended) = mpsc::sync_channel(1);
        let until = Instant::now() + deadline;
        self.submit(WorkerCommand::Close { until, reply });
        // The worker checks the deadline too. The additional time is for its reply.
        let ended = ended.recv_timeout(deadline + WORKER_ABORT_TIMEOUT);
        let ended = ended.unwrap_or_else(|_| Err("the worker thread does not reply".into()));
        ended.map_err(|reason| super::error(format!("cannot close: {reason}")))
    }
}

impl DeviceTransport for NcclTransport {
    fn takes(&self, device: &Device) -> bool {
        self.provider.takes(device)
    }

    /// Returns false if context events are used, because a started receive then blocks all later calls.
    fn allows_early_receives(&self) -> bool {
        self.provider.stream_order() != StreamOrder::Context
    }

    fn start_on_device(&self, jobs: Vec<DeviceJob>) -> Result<Vec<InFlightDeviceCall>, CommError> {
        let resolved: Result<Vec<_>, _> =
            jobs.into_iter().map(|job| self.device_call(job)).collect();
        let (calls, flights): (Vec<_>, Vec<_>) = resolved?.into_iter().unzip();
        let calls: Vec<_> = calls.into_iter().flatten().collect();
        if !calls.is_empty() {
            self.submit(WorkerCommand::Calls(calls));
        }
        Ok(flights)
    }
}

impl Drop for NcclTransport {
    fn drop(&mut self) {
        self.submit(WorkerCommand::Quit);
    }
}

impl fmt::Debug for NcclTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "NcclTransport(rank {} of {}, {:?})",
            self.rank, self.size, self.state.library
        )
    }
}
