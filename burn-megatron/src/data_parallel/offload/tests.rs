//! Tests of the selection and order of offloaded buckets, and of failures.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::host_stepper::{HostBucket, HostStepper};
use super::*;
use crate::comm::DType::{BF16, F32};
use crate::comm::{ParallelContext, World};
use crate::data_parallel::layout::{BucketRules, BufferLayout, ParameterSize};
use crate::data_parallel::memory::MemoryPlan;
use crate::data_parallel::memory_usage::TrackedTensor;
use crate::data_parallel::{
    DataParallelConfig, DistributedDataParallel, MemoryCategory, OffloadConfig, StepFn,
    SteppedBucket,
};
use crate::host_link::OffloadEventKind::{self, DeviceStep, GradientUp, HostStep, ParametersDown};
use crate::host_link::{HostTraffic, OffloadRecord, SimulatedHostLink};
use crate::mesh::ZeroStage;
use crate::nn::ParallelModule;
use crate::optim::{AdamWConfig, ParallelAdamW};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Four matrices, each in a bucket of 512 bytes. Bucket 0 contains the last matrix.
#[derive(Module, Debug)]
struct Stack {
    matrices: Vec<Param<Tensor<2>>>,
}

const MATRICES: usize = 4;
const ELEMENTS: usize = 128;

fn stack(
    groups: &ParallelContext,
    optimizer: f64,
) -> Result<DistributedDataParallel<Stack>, AnyError> {
    let matrix = |number| Tensor::ones([16, 8], &Device::flex()).mul_scalar(number as f32);
    let matrices = (1..=MATRICES).map(|number| Param::from_tensor(matrix(number)));
    let model = ParallelModule::replicated(Stack {
        matrices: matrices.collect(),
    });
    let config = DataParallelConfig {
        bucket_size: Some(ELEMENTS),
        offload: OffloadConfig { optimizer },
        ..DataParallelConfig::default()
    };
    Ok(DistributedDataParallel::with(model, groups, &config)?)
}

/// Runs a step in which the gradient of every element is 1.
fn step(
    ddp: &mut DistributedDataParallel<Stack>,
    optimizer: &mut ParallelAdamW,
    rate: f64,
) -> Result<(), AnyError> {
    let parts = vec![Tensor::ones([ELEMENTS], &Device::flex()); MATRICES];
    let gradients = ddp.gradients_of(parts, 1)?;
    optimizer.step(rate, ddp, gradients);
    Ok(())
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Returns the record of a step over a simulated link. The link copies a bucket in 10 ms, the host steps it in
/// 5 ms, and the device steps a bucket in 15 ms.
fn recorded(fraction: f64) -> OffloadRecord {
    let mut ddp = stack(&ParallelContext::single(), fraction).unwrap();
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp).unwrap();
    let link = SimulatedHostLink::new(ms(2), 64_000.0).unwrap();
    ddp.simulate_host_link(link, ms(5), ms(15));
    step(&mut ddp, &mut optimizer, 0.1).unwrap();
    let buckets = ddp.offload().buckets as u64;
    let bytes = buckets * 512;
    assert_eq!((ddp.offload().up, ddp.offload().down), (bytes, bytes));
    let traffic = HostTraffic {
        up: bytes,
        down: bytes,
    };
    assert_eq!(ddp.host_traffic(), traffic);
    ddp.take_offload_record()
}

/// Returns the start and end of the events of a kind, by bucket, in the order in which they happened.
fn times(record: &OffloadRecord, kind: OffloadEventKind) -> Vec<(usize, u128, u128)> {
    let events = record.events.iter().filter(|event| event.kind == kind);
    events
        .map(|event| (event.number, event.start.as_millis(), event.end.as_millis()))
        .collect()
}

#[test]
fn half_of_the_buckets_are_stepped_on_the_host_beside_the_device() {
    let record = recorded(0.5);
    assert_eq!(times(&record, GradientUp), [(1, 0, 10), (0, 10, 20)]);
    assert_eq!(times(&record, HostStep), [(1, 10, 15), (0, 20, 25)]);
    assert_eq!(times(&record, ParametersDown), [(1, 15, 25), (0, 25, 35)]);
    assert_eq!(times(&record, DeviceStep), [(3, 0, 15), (2, 15, 30)]);
    // Regardless of the link, the gradient of a bucket comes before its step, and the step before its
    // parameters.
    for bucket in [0, 1] {
        let of_bucket = record.events.iter().filter(|event| event.number == bucket);
        let kinds: Vec<_> = of_bucket.map(|event| event.kind).collect();
        assert_eq!(kinds, [GradientUp, HostStep, ParametersDown]);
    }
    assert_eq!(record.blocked, ms(5));
    assert_eq!(record.hidden_share(), 1.0 - 0.005 / 0.05);
}

#[test]
fn without_a_step_of_the_device_transfers_and_steps_hide_each_other() {
    let record = recorded(1.0);
    assert_eq!(times(&record, DeviceStep), []);
    assert_eq!(times(&record, ParametersDown)[3], (0, 45, 55));
    assert_eq!(record.blocked, ms(55));
    assert_eq!(record.hidden_share(), 1.0 - 0.055 / 0.1);
    let nothing = recorded(0.0);
    assert_eq!((nothing.events.len(), nothing.hidden_share()), (0, 1.0));
}

/// A panic of a step on the host is an error of the rank, and names the bucket.
#[test]
fn a_failure_on_the_host_is_an_error() {
    let run = |rank| {
        let layout = crate::mesh::ParallelConfig::new().with_data(2);
        let groups = ParallelContext::new(&layout, &rank)?;
        let mut ddp = stack(&groups, 1.0)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        step(&mut ddp, &mut optimizer, f64::NAN)
    };
    let error = World::threads(2).unwrap().run(run).unwrap_err().to_string();
    assert!(
        error.contains("the step of bucket 3 on the host failed: "),
        "{error}"
    );
    assert!(error.contains("rate"), "{error}");
}

/// Steps bucket 0 with `step`, and then waits for at most 100 ms.
fn wait_for(step: Arc<StepFn>) -> Result<(), AnyError> {
    let run = |_| {
        let ddp = stack(&ParallelContext::single(), 1.0)?;
        let plan = &ddp.buffers.plan;
        let host = HostStepper::with_deadline(plan, ms(100)).map_err(|error| error.to_string())?;
        let tensor = || Tensor::ones([ELEMENTS], &Device::flex());
        let tracked = || TrackedTensor::new(tensor(), MemoryCategory::Buffers, &plan.usage);
        let bucket = HostBucket {
            number: 0,
            gradient: tracked(),
            master: tracked(),
            model: None,
        };
        host.begin(bucket, &step, None);
        host.wait(0);
        Ok::<_, AnyError>(())
    };
    Ok(World::threads(1)?.run(run).map(drop)?)
}

#[test]
fn a_wait_for_the_host_has_a_deadline() {
    let (release, released) = mpsc::channel::<()>();
    let released = parking_lot::Mutex::new(released);
    let began = Instant::now();
    let stuck = wait_for(Arc::new(move |bucket, _| {
        let _ = released.lock().recv();
        SteppedBucket {
            master: bucket.master,
            model: None,
        }
    }));
    let error = stuck.unwrap_err().to_string();
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(
        error.contains("the step of bucket 0 on the host failed: it has not ended after 0.1 s"),
        "{error}"
    );
    drop(release);
}

#[test]
fn links_without_bandwidth_are_refused() {
    for bandwidth in [0.0, -1.0, f64::NAN] {
        let error = SimulatedHostLink::new(ms(0), bandwidth).unwrap_err();
        assert!(error.to_string().contains("expected more than 0"));
    }
}

/// Buckets of 256, 128, 128 and 512 elements, in 16 bits with master weights.
fn layout() -> BufferLayout {
    let size = |elements| ParameterSize {
        elements,
        parameter: BF16,
        gradient: F32,
        grid: crate::mesh::Grid::Dense,
        shared: false,
        unit: 0,
        quantized_bytes: None,
    };
    let rules = BucketRules {
        size: Some(1),
        ..BucketRules::sharded(2)
    };
    BufferLayout::new(&[512, 128, 128, 256].map(size), &rules).unwrap()
}

#[test]
fn the_fewest_buckets_with_at_least_the_fraction_are_offloaded() {
    let layout = layout();
    let sizes: Vec<_> = layout
        .buckets()
        .map(|(.., bucket)| bucket.padded())
        .collect();
    assert_eq!(sizes, [256, 128, 128, 512]);
    for (fraction, buckets) in [
        (0.0, 0),
        (1e-9, 1),
        (0.25, 1),
        (0.26, 2),
        (0.375, 2),
        (0.5, 3),
        (0.51, 4),
        (1.0, 4),
    ] {
        for (stage, shards) in [(ZeroStage::Replicated, 1), (ZeroStage::Gradients, 2)] {
            let rules = MemoryRules::adam(stage);
            let plan = OffloadPlan::new(&layout, &rules, fraction);
            let elements = sizes[..buckets].iter().sum::<usize>() as u64 / shards;
            let expected = OffloadPlan {
                buckets,
                up: 4 * elements,
                down: 2 * elements,
            };
            assert_eq!(plan, expected, "{fraction} of stage {stage}");
        }
    }
}

#[test]
fn the_host_has_masters_and_moments_and_the_device_the_rest() {
    let layout = layout();
    let rules = |offloaded| MemoryRules {
        offloaded,
        ..MemoryRules::adam(ZeroStage::Optimizer)
    };
    let all = MemoryPlan::new(&layout, &rules(0)).unwrap();
    assert_eq!((all.optimizer, all.host_optimizer), (12 * 512, 0));
    let part = MemoryPlan::new(&layout, &rules(2)).unwrap();
    assert_eq!((part.optimizer, part.host_optimizer), (12 * 320, 12 * 192));
    assert_eq!(part.total(), all.total() - 12 * 192);
    let lines = |plan: MemoryPlan| plan.to_string().lines().count();
    assert_eq!((lines(all), lines(part)), (6, 7));
    let table = part.to_string();
    let last: Vec<_> = table.lines().last().unwrap().split("  ").collect();
    insta::assert_snapshot!(last[0], @"optimizer state on the host");
    assert_eq!(last[last.len() - 1].trim(), "2.25 KiB");
}

#[test]
fn fractions_out_of_range_are_refused() {
    let check = |optimizer, fp8_param_gather| {
        let config = DataParallelConfig {
            zero_stage: ZeroStage::Optimizer,
            offload: OffloadConfig { optimizer },
            fp8_param_gather,
            ..DataParallelConfig::default()
        };
        config.check(2).map_err(|error| error.to_string())
    };
    for fraction in [-0.1, 1.01, f64::NAN, f64::INFINITY] {
        let expected =
            format!("invalid offload.optimizer = {fraction}: expected a fraction from 0 to 1");
        assert_eq!(check(fraction, false), Err(expected));
    }
    for fraction in [0.0, 0.3, 1.0] {
        assert_eq!(check(fraction, false), Ok(()));
    }
    assert_eq!(check(0.0, true), Ok(()));
    let error = check(0.5, true).unwrap_err();
    assert!(error.contains("fp8_param_gather"), "{error}");
}
