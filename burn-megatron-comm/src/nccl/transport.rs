//! The engine as the communicators of a process see it.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::driver::Driver;
use super::item::{Item, Memory};
use super::lane::Key;
use super::lender::{Lender, Wake};
use super::library::Library;
use super::memory::Loan;
use super::order::Order;
use super::own_mail::OwnMail;
use super::plan::{Plan, Way};
use super::shared::{Command, Shared, Split};
use super::types;
use super::worker::Worker;
use crate::buffer::Buffer;
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::{
    Bulletin, DeviceFlight, DeviceJob, DeviceTransport, GroupId, Job, Slot, Transport,
};

/// How long the worker has to abort before another thread does it.
const ABORT_WITHIN: Duration = Duration::from_secs(1);

/// NCCL for one rank.
pub(crate) struct NcclTransport {
    shared: Arc<Shared>,
    worker: Sender<Command>,
    lender: Arc<dyn Lender>,
    own_mail: Mutex<OwnMail>,
    rank: usize,
    size: usize,
    alone_too: bool,
}

/// What the engine is made of.
pub(super) struct Parts {
    pub library: Arc<Library>,
    pub driver: Arc<dyn Driver>,
    pub lender: Arc<dyn Lender>,
    pub bulletin: Arc<dyn Bulletin>,
    pub pool: Arc<BufferPool>,
    /// Asks for registered buffers.
    pub registered: bool,
    /// A world of one rank uses NCCL as well.
    pub alone_too: bool,
}

impl NcclTransport {
    /// The rank `rank` of `size`, when all ranks have come; each waits at most `patience` for the others.
    ///
    /// # Errors
    /// [`CommError::Engine`] with what NCCL or the bulletin says, or that they have not come.
    pub(super) fn start_up(
        parts: Parts,
        rank: usize,
        size: usize,
        patience: Duration,
    ) -> Result<Arc<Self>, CommError> {
        let Parts {
            library,
            driver,
            lender,
            bulletin,
            pool,
            registered,
            alone_too,
        } = parts;
        let shared = Shared::new(library, driver, bulletin, pool, patience, registered);
        let worker = start_worker(&shared, rank)?;
        let transport = Arc::new(Self {
            shared,
            worker,
            lender,
            own_mail: Mutex::default(),
            rank,
            size,
            alone_too,
        });
        if size > 1 || alone_too {
            transport.open_world(patience)?;
        }
        Ok(transport)
    }

    fn open_world(&self, patience: Duration) -> Result<(), CommError> {
        let told = Arc::new(Slot::default());
        self.tell(Command::Open {
            key: Key::Group(GroupId::WORLD),
            rank: self.rank,
            size: self.size,
            told: told.clone(),
        });
        match told.take_within(patience) {
            Some(result) => result.map(drop),
            None => Err(super::error(format!(
                "after {:.1} s not all {} ranks have come to ncclCommInitRankConfig; NCCL_DEBUG=INFO shows \
                 who waits for whom",
                patience.as_secs_f64(),
                self.size
            ))),
        }
    }

    fn tell(&self, command: Command) {
        // A worker that has ended has aborted, and leaves slots empty.
        let _ = self.worker.send(command);
    }

    /// The call, for the worker; `None` if this rank could do it alone.
    fn item(&self, job: Job) -> Option<Item> {
        let Job {
            group,
            group_id,
            signature,
            input,
            slot,
            ..
        } = job;
        let Some(plan) = Plan::of(&signature, &group) else {
            slot.fulfil(Err(super::error("a split was started as a call".into())));
            return None;
        };
        if let Some(failure) = self.shared.failure() {
            slot.fulfil(Err(failure));
            return None;
        }
        let own = group.index();
        let slot = match (&signature.operation, plan.way) {
            (Operation::Call(Call::Send { .. }), Way::Message { to, .. }) => {
                // Sends are buffered: what becomes of them is told by the calls that follow.
                slot.fulfil(Ok(Buffer::empty(plan.dtype)));
                if to == own {
                    self.own_mail().send(group_id, input);
                    return None;
                }
                Arc::default()
            }
            (_, Way::Message { from, .. }) if from == own => {
                self.own_mail().receive(group_id, signature, slot);
                return None;
            }
            _ => slot,
        };
        if self.is_done_alone(&plan, &group, group_id) {
            slot.fulfil(Ok(match plan.result {
                0 => Buffer::empty(plan.dtype),
                _ => input,
            }));
            return None;
        }
        let memory = Memory::Host {
            input,
            slot,
            staged: None,
        };
        Some(item(group, group_id, signature, plan, memory))
    }

    /// The tensor's call for the worker, or none if this rank could do it alone; and its flight.
    fn lend(&self, job: DeviceJob) -> Result<(Option<Item>, DeviceFlight), CommError> {
        let DeviceJob {
            group,
            group_id,
            signature,
            input,
            passed,
            ..
        } = job;
        if let Some(failure) = self.shared.failure() {
            return Err(failure);
        }
        let Some(plan) = Plan::of(&signature, &group) else {
            return Err(super::error("a split was started as a call".into()));
        };
        if let Way::Message { from, to } = plan.way
            && from == to
        {
            return Err(super::error(format!(
                "a rank's messages to itself go through host memory, not {} over {group}",
                signature.describe(&group)
            )));
        }
        let loan = Loan::new(self.lender.order() == Order::Host, passed);
        let launched = loan.launched.clone();
        if self.is_done_alone(&plan, &group, group_id) {
            loan.end(Ok(()));
            let result = Box::new(move || Ok(input));
            return Ok((None, DeviceFlight { launched, result }));
        }
        let worker = self.worker.clone();
        let wake: Wake = Box::new(move || {
            let _ = worker.send(Command::Wake);
        });
        let result = self.lender.lend(input, plan.result, loan.clone(), wake)?;
        let item = item(group, group_id, signature, plan, Memory::Tensor(loan));
        Ok((Some(item), DeviceFlight { launched, result }))
    }

    /// Whether nothing is to be moved: the result is the input.
    fn is_done_alone(&self, plan: &Plan, group: &Group, id: GroupId) -> bool {
        let alone = group.size() == 1 && plan.way == Way::Group;
        plan.steps.is_empty() || (alone && !(self.alone_too && id == GroupId::WORLD))
    }

    fn own_mail(&self) -> MutexGuard<'_, OwnMail> {
        self.own_mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn item(
    group: Arc<Group>,
    group_id: GroupId,
    signature: Arc<Signature>,
    plan: Plan,
    memory: Memory,
) -> Item {
    let key = match plan.way {
        Way::Group => Key::Group(group_id),
        Way::Message { from, to } => Key::Message {
            group: group_id,
            from,
            to,
        },
    };
    Item {
        key,
        plan,
        group,
        signature,
        memory,
    }
}

fn start_worker(shared: &Arc<Shared>, rank: usize) -> Result<Sender<Command>, CommError> {
    let (worker, inbox) = mpsc::channel();
    let (said, heard) = mpsc::sync_channel(1);
    let (shared, own) = (shared.clone(), worker.clone());
    let work = move || match Worker::new(shared, own) {
        Ok(worker) => {
            let _ = said.send(Ok(()));
            worker.run(&inbox);
        }
        Err(reason) => {
            let _ = said.send(Err(reason));
        }
    };
    let builder = thread::Builder::new().name(format!("nccl-{rank}"));
    let started = builder.spawn(work).map_err(|error| error.to_string());
    let began = started.and_then(|_| heard.recv().unwrap_or_else(|_| Err("it panicked".into())));
    began
        .map(|()| worker)
        .map_err(|reason| super::error(format!("its thread cannot work: {reason}")))
}

impl Transport for NcclTransport {
    fn name(&self) -> &'static str {
        super::ENGINE
    }

    fn description(&self) -> String {
        let Shared {
            library, driver, ..
        } = &*self.shared;
        format!(
            "{library:?} on {}, order {}, {}, types {}",
            driver.name(),
            self.lender.description(),
            self.shared.registration().line(),
            types::names(library.version())
        )
    }

    fn share(&self, own: Option<&[u8]>, patience: Duration) -> Result<Vec<u8>, CommError> {
        const KEY: &str = "nccl/shared";
        let bulletin = &self.shared.bulletin;
        match own {
            Some(bytes) => bulletin.post(KEY, bytes).map(|()| bytes.to_vec()),
            None => bulletin.read(KEY, patience),
        }
    }

    fn pool(&self) -> &Arc<BufferPool> {
        &self.shared.pool
    }

    fn start(&self, jobs: Vec<Job>) {
        let items: Vec<_> = jobs.into_iter().filter_map(|job| self.item(job)).collect();
        if !items.is_empty() {
            self.tell(Command::Calls(items));
        }
    }

    fn device(&self) -> Option<&dyn DeviceTransport> {
        Some(self)
    }

    fn split(&self, job: Job, part: Arc<Group>, part_id: GroupId) {
        let told = job.slot;
        let Operation::Split { groups, .. } = &job.signature.operation else {
            return told.fulfil(Err(super::error("a call was started as a split".into())));
        };
        if let Some(failure) = self.shared.failure() {
            return told.fulfil(Err(failure));
        }
        let alone = part.size() == 1;
        let by_id = !self.shared.library.splits();
        let everybody_alone = groups.iter().all(|group| group.len() == 1);
        if everybody_alone || (alone && by_id) {
            return told.fulfil(Ok(Buffer::empty(job.signature.dtype)));
        }
        let key = Key::Group(part_id);
        if by_id {
            return self.tell(Command::Open {
                key,
                rank: part.index(),
                size: part.size(),
                told,
            });
        }
        let own = part.world_rank();
        let number = groups.iter().position(|group| group.contains(&own));
        let number = number.filter(|_| !alone);
        self.tell(Command::Split(Split {
            parent: Key::Group(job.group_id),
            part: number.map(|number| (key, number, part.index())),
            told,
        }));
    }

    /// NCCL does not know: it waits on the device.
    fn missing(&self, _group_id: GroupId, _sequence: u64) -> Option<Vec<usize>> {
        None
    }

    fn abort(&self) {
        let comms = &self.shared.comms;
        if comms.given_up.swap(true, Ordering::AcqRel) {
            return;
        }
        self.tell(Command::Wake);
        // A worker that is stuck inside of NCCL is set free by the abort of what it is stuck in.
        let began = Instant::now();
        while !comms.is_empty() && began.elapsed() < ABORT_WITHIN {
            thread::sleep(Duration::from_millis(1));
        }
        comms.abort_all(&self.shared.library);
    }

    fn close(&self, deadline: Duration) -> Result<(), CommError> {
        let (told, ended) = mpsc::sync_channel(1);
        let until = Instant::now() + deadline;
        self.tell(Command::Close { until, told });
        // The worker watches the deadline too; a little more is for its answer.
        let ended = ended.recv_timeout(deadline + ABORT_WITHIN);
        let ended = ended.unwrap_or_else(|_| Err("its thread does not answer".into()));
        ended.map_err(|reason| super::error(format!("it cannot be closed: {reason}")))
    }
}

impl DeviceTransport for NcclTransport {
    fn takes(&self, device: &Device) -> bool {
        self.lender.takes(device)
    }

    fn start_on_device(&self, jobs: Vec<DeviceJob>) -> Result<Vec<DeviceFlight>, CommError> {
        let lent: Result<Vec<_>, _> = jobs.into_iter().map(|job| self.lend(job)).collect();
        let (items, flights): (Vec<_>, Vec<_>) = lent?.into_iter().unzip();
        let items: Vec<_> = items.into_iter().flatten().collect();
        if !items.is_empty() {
            self.tell(Command::Calls(items));
        }
        Ok(flights)
    }
}

impl Drop for NcclTransport {
    fn drop(&mut self) {
        self.tell(Command::Quit);
    }
}

impl fmt::Debug for NcclTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "NcclTransport(rank {} of {}, {:?})",
            self.rank, self.size, self.shared.library
        )
    }
}
