//! A test harness that runs ranks as threads over the engine, with a fake NCCL on a fake device.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use parking_lot::{Mutex, MutexGuard};

use super::super::library::Library;
use super::super::stream_order::StreamOrder;
use super::super::transport::{NcclComponents, NcclTransport};
use super::super::version::Version;
use super::fake_device::FakeDevice;
use super::fake_nccl::{self, v2_27};
use super::fake_provider::FakeBufferProvider;
use crate::buffer::{Buffer, DType};
use crate::call::{Call, Signature};
use crate::communicator::{Communicator, Group};
use crate::device::{DeviceCommunicator, DevicePending};
use crate::error::CommError;
use crate::nccl_config::{NcclConfig, NcclGroup, NcclGroupConfig, RegisteredBuffers};
use crate::pending::Pending;
use crate::pool::BufferPool;
use crate::process::{
    DeviceJob, DeviceTransport, Job, KeyValueStore, MemoryStore, ResultSlot, Transport,
    device_type, part_id,
};
use burn_megatron_rendezvous::GroupId;
use burn_megatron_test_support::wait_until;

/// The timeout for events that must happen in a test.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A lock for one world at a time. The fake library is global, so its counters are only correct for one world.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[derive(Clone, Copy)]
pub struct TestSetup {
    pub version: extern "C" fn(*mut c_int) -> c_int,
    pub registered: Option<RegisteredBuffers>,
    pub eager_init: bool,
    pub groups: &'static [(NcclGroup, NcclGroupConfig)],
    pub order: StreamOrder,
    pub breaks: bool,
    pub use_for_one_rank: bool,
    pub timeout: Duration,
}

impl Default for TestSetup {
    fn default() -> Self {
        Self {
            version: v2_27,
            registered: None,
            eager_init: false,
            groups: &[],
            order: StreamOrder::Stream,
            breaks: false,
            use_for_one_rank: false,
            timeout: TIMEOUT,
        }
    }
}

/// The state that the ranks of one run share.
pub struct TestRun {
    setup: TestSetup,
    size: usize,
    pub device: Arc<FakeDevice>,
    store: Arc<MemoryStore>,
    _alone: MutexGuard<'static, ()>,
}

impl TestRun {
    pub fn new(size: usize, setup: TestSetup) -> Self {
        let alone = ONE_AT_A_TIME.lock();
        fake_nccl::reset();
        let mut code = 0;
        (setup.version)(&mut code);
        let concurrent = Version::from_code(code) >= Version::CONCURRENT_GROUPS;
        fake_nccl::CONCURRENT_GROUPS.store(concurrent, Ordering::SeqCst);
        Self {
            setup,
            size,
            device: Arc::default(),
            store: Arc::default(),
            _alone: alone,
        }
    }

    /// Starts one rank.
    pub fn start(&self, rank: usize) -> Result<Arc<NcclTransport>, CommError> {
        let mut provider = FakeBufferProvider::new(&self.device, self.setup.order);
        provider.breaks = self.setup.breaks;
        let parts = NcclComponents {
            library: Library::from_api(fake_nccl::api(self.setup.version), "fake".into()).unwrap(),
            driver: self.device.clone(),
            provider: Arc::new(provider),
            store: self.store.clone(),
            pool: Arc::default(),
            config: NcclConfig {
                eager_init: self.setup.eager_init,
                registered_buffers: self.setup.registered,
                groups: self.setup.groups.iter().copied().collect(),
            },
            use_for_one_rank: self.setup.use_for_one_rank,
        };
        NcclTransport::connect(parts, rank, self.size, self.setup.timeout)
    }

    /// Returns the fake world of the communicator of all ranks.
    pub fn world(&self) -> Arc<fake_nccl::FakeWorld> {
        fake_nccl::world(&self.store.read("nccl/world", Duration::ZERO).unwrap())
    }

    /// Runs `f` on every rank without closing the world.
    pub fn on_all<T: Send>(
        &self,
        f: impl Fn(Arc<NcclTransport>, Arc<TestComm>) -> T + Sync,
    ) -> Vec<T> {
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..self.size)
                .map(|rank| {
                    let f = &f;
                    scope.spawn(move || {
                        let transport = self.start(rank).unwrap();
                        let comm = TestComm::world(&transport, rank, self.size);
                        f(transport, comm)
                    })
                })
                .collect();
            let joined = ranks.into_iter().map(|rank| rank.join().unwrap());
            joined.collect()
        })
    }
}

/// Runs `f` on `size` ranks, closes them, and checks that no memory is left.
pub fn over<T: Send>(
    size: usize,
    setup: TestSetup,
    f: impl Fn(Arc<TestComm>) -> T + Sync,
) -> Vec<T> {
    let run = TestRun::new(size, setup);
    let results = run.on_all(|transport, comm| {
        let result = f(comm);
        transport.close(TIMEOUT).unwrap();
        result
    });
    assert_eq!(
        fake_nccl::ALIVE.load(Ordering::SeqCst),
        0,
        "communicators left"
    );
    assert_eq!(
        fake_nccl::ABORTED.load(Ordering::SeqCst),
        0,
        "communicators aborted"
    );
    assert_eq!(fake_nccl::live_allocations(), 0, "registered memory left");
    // The last frees are still on their streams.
    wait_until("no memory is left", || run.device.held() == 0);
    results
}

/// A minimal communicator over a transport. It numbers and checks calls, and waits for their results.
#[derive(Debug)]
pub struct TestComm {
    transport: Arc<NcclTransport>,
    group: Arc<Group>,
    id: GroupId,
    /// The number of the next collective. The engine does not use the numbers of messages.
    next: AtomicU64,
}

impl TestComm {
    pub fn world(transport: &Arc<NcclTransport>, rank: usize, size: usize) -> Arc<Self> {
        let group = Group::new("world", (0..size).collect(), rank);
        Self::over(transport, group, GroupId::WORLD)
    }

    fn over(transport: &Arc<NcclTransport>, group: Group, id: GroupId) -> Arc<Self> {
        Arc::new(Self {
            transport: transport.clone(),
            group: Arc::new(group),
            id,
            next: AtomicU64::new(0),
        })
    }

    fn number(&self, call: &Call) -> u64 {
        match call {
            Call::Send { .. } | Call::Receive { .. } => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn job(&self, call: Call, input: Buffer) -> Result<(Job, Arc<ResultSlot>), CommError> {
        call.check(&self.group, &input)?;
        let slot = Arc::new(ResultSlot::default());
        let job = Job {
            group: self.group.clone(),
            group_id: self.id,
            sequence: self.number(&call),
            signature: Arc::new(Signature::new(call, &input)),
            input,
            slot: slot.clone(),
        };
        Ok((job, slot))
    }
}

fn take(slot: &ResultSlot) -> Result<Buffer, CommError> {
    let late = || {
        Err(CommError::Engine {
            engine: "test".into(),
            message: "nothing came".into(),
        })
    };
    slot.take_within(TIMEOUT).unwrap_or_else(late)
}

impl Communicator for TestComm {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        Ok(self.start_all(vec![(call, input)])?.remove(0))
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        let jobs: Result<Vec<_>, _> = calls.into_iter().map(|(c, b)| self.job(c, b)).collect();
        let (jobs, slots): (Vec<_>, Vec<_>) = jobs?.into_iter().unzip();
        self.transport.start(jobs);
        let pending = |slot: Arc<ResultSlot>| Pending::new(move || take(&slot));
        Ok(slots.into_iter().map(pending).collect())
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let slot = Arc::new(ResultSlot::default());
        let sequence = self.number(&Call::Barrier);
        let own = self.group.world_rank();
        let number = groups.iter().position(|g| g.contains(&own)).unwrap();
        let index = groups[number].iter().position(|r| *r == own).unwrap();
        let part = Group::new(name, groups[number].clone(), index);
        let id = part_id(self.id, sequence, number);
        let job = Job {
            group: self.group.clone(),
            group_id: self.id,
            sequence,
            signature: Arc::new(Signature::split(name, groups)),
            input: Buffer::empty(DType::U8),
            slot: slot.clone(),
        };
        self.transport.split(job, Arc::new(part.clone()), id);
        take(&slot)?;
        Ok(Self::over(&self.transport, part, id))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        Some(self.transport.pool())
    }

    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        Some(self)
    }
}

impl DeviceCommunicator for TestComm {
    fn takes(&self, device: &Device) -> bool {
        self.transport.takes(device)
    }

    fn allows_early_receives(&self) -> bool {
        self.transport.allows_early_receives()
    }

    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError> {
        let passed: Vec<Arc<ResultSlot>> = calls.iter().map(|_| Arc::default()).collect();
        let job = |((call, input), passed): ((Call, Tensor<1>), &Arc<ResultSlot>)| {
            let (dtype, len) = (device_type(input.dtype()).unwrap(), input.dims()[0]);
            call.check_sizes(&self.group, dtype, len)?;
            Ok(DeviceJob {
                group: self.group.clone(),
                group_id: self.id,
                sequence: self.number(&call),
                signature: Arc::new(Signature::sized(call, dtype, len)),
                input,
                slot: passed.clone(),
            })
        };
        let jobs: Result<Vec<_>, CommError> = calls.into_iter().zip(&passed).map(job).collect();
        let flights = self.transport.start_on_device(jobs?)?.into_iter();
        let pending = |(flight, passed): (crate::process::InFlightDeviceCall, Arc<ResultSlot>)| {
            DevicePending::new(move || {
                take(&flight.launched)?;
                let result = (flight.result)()?;
                take(&passed)?;
                Ok(result)
            })
        };
        Ok(flights.zip(passed).map(pending).collect())
    }
}
