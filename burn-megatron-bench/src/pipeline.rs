//! The `burn-megatron-bench pipeline` benchmark: the time of pipeline schedules over a simulated slow link, compared
//! with the schedule simulator.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Gradients, Tensor};
use burn_megatron::comm::Rank;
use burn_megatron::nn::hook::{Deferred, DeferringSink, GradientSink};
use burn_megatron::pipeline::engine::{Engine, P2pConfig, Stage, StageOutput};
use burn_megatron::pipeline::schedule::{
    Schedule, ScheduleConfig, ScheduleKind, StageTimes, generate, simulate,
};
use burn_megatron_cli::internal::{Error, at_least_one, median};
use burn_megatron_comm_testing::{Link, SimulatedNetwork};
use clap::Args;
use serde::Serialize;

use crate::args::StepFlags;
use crate::links::on_threads;
use crate::report::{Column, Report, fixed};

const SCHEDULES: [ScheduleKind; 2] = [ScheduleKind::OneFOneB, ScheduleKind::EagerOneFOneB];

const MICRO_BATCHES: usize = 16;

/// The time of a message, relative to the time of a forward.
const TRANSFER: f64 = 0.3;

/// Flags of `pipeline`.
#[derive(Args)]
pub struct PipelineBenchArgs {
    /// Number of pipeline ranks.
    #[arg(long, visible_alias = "pp", value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub pipeline_parallel: usize,
    /// Duration of a forward on a rank in milliseconds. Instead of computing, the rank sleeps. A backward takes twice
    /// as long.
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub forward_ms: u64,
    /// Flags for the number of steps and the JSON file.
    #[command(flatten)]
    pub steps: StepFlags,
}

/// A row of the table. Times are relative to the time of a forward on a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PipelineRow {
    schedule: ScheduleKind,
    receives_ahead: usize,
    /// The total time in the simulator.
    simulated: f64,
    /// The median of the measured steps.
    measured: f64,
    /// The number of messages of a step over all ranks.
    messages: usize,
    /// The number of messages that are activations or gradients.
    tensors: usize,
}

const COLUMNS: &[Column<PipelineRow>] = &[
    Column::new("schedule", -12, |row| row.schedule.to_string()),
    Column::new("receives ahead", 14, |row| row.receives_ahead.to_string()),
    Column::new("simulated", 9, |row| fixed(row.simulated, 1)),
    Column::new("measured", 8, |row| fixed(row.measured, 1)),
    Column::new("measured / simulated", 20, |row| {
        fixed(row.measured / row.simulated, 3)
    }),
    Column::new("messages", 8, |row| row.messages.to_string()),
    Column::optional(1, "tensors", 7, |row| row.tensors.to_string()),
];

/// Runs every schedule twice: with one receive posted ahead, and without a receive posted ahead.
pub fn run(args: &PipelineBenchArgs) -> Result<(), Error> {
    let bench = Benchmark(args);
    let about = format!(
        "{} ranks, {MICRO_BATCHES} micro-batches; a forward sleeps {} ms, a backward {} ms; a message takes {TRANSFER} times \
         the forward time on a simulated link; totals are multiples of the forward time",
        args.pipeline_parallel,
        args.forward_ms,
        2 * args.forward_ms,
    );
    let mut report = Report::begin(&about, COLUMNS, (), &args.steps.json);
    for kind in SCHEDULES {
        let config = ScheduleConfig::new(kind, args.pipeline_parallel, MICRO_BATCHES);
        let schedule = generate(&config)?;
        for ahead in [0, 1] {
            report.add(bench.measure(&schedule, kind, ahead)?)?;
        }
    }
    report.finish("")
}

struct Benchmark<'a>(&'a PipelineBenchArgs);

/// The measurements of a rank for each step: the start of the first computation, the end of the last computation, and
/// the number of messages.
type RankSteps = Vec<(Instant, Instant, usize)>;

impl Benchmark<'_> {
    fn measure(
        &self,
        schedule: &Schedule,
        kind: ScheduleKind,
        receives_ahead: usize,
    ) -> Result<PipelineRow, Error> {
        let args = self.0;
        let each = (schedule.ranks() as f64) / schedule.stages() as f64;
        let times = StageTimes::uniform(schedule.stages(), each, each, each, TRANSFER);
        let simulated = simulate(schedule, &times)?.total();
        let ranks = on_threads(schedule.ranks(), |rank| {
            self.run_rank(rank, schedule, receives_ahead)
        })?;
        let steps = (0..args.steps.steps).map(|step| {
            let first = ranks.iter().map(|steps| steps[step].0).min();
            let last = ranks.iter().map(|steps| steps[step].1).max();
            let seconds = first.zip(last).map(|(first, last)| last - first);
            seconds.unwrap_or_default().as_secs_f64()
        });
        let measured = median(&steps.collect::<Vec<_>>());
        let actions = (0..schedule.ranks()).flat_map(|rank| schedule.actions(rank));
        Ok(PipelineRow {
            schedule: kind,
            receives_ahead,
            simulated,
            measured: 1000.0 * measured / args.forward_ms as f64,
            messages: ranks.iter().map(|steps| steps[0].2).sum(),
            tensors: actions.filter(|action| action.kind.is_send()).count(),
        })
    }

    fn run_rank(
        &self,
        rank: &Rank,
        schedule: &Schedule,
        receives_ahead: usize,
    ) -> Result<RankSteps, Error> {
        let args = self.0;
        let forward = Duration::from_millis(args.forward_ms);
        let link = Link::new(forward.mul_f64(TRANSFER), f64::INFINITY)?;
        let world = rank.communicator();
        let comm = SimulatedNetwork::over(Arc::clone(&world), &link);
        let engine = Engine::new(schedule, &comm, &Device::flex(), Arc::new(NoParameters))?;
        let engine = engine.with_p2p(P2pConfig {
            receives_ahead,
            fp8: false,
        });
        let stages = Sleeping {
            stages: schedule.stages(),
            forward: forward.mul_f64(schedule.ranks() as f64 / schedule.stages() as f64),
        };
        let mut steps = vec![];
        // In the first step, the ranks also send each other the shapes.
        for _ in 0..=args.steps.steps {
            world.barrier()?;
            link.take_transfers();
            let run = engine.run(&stages)?;
            let sent = link.take_transfers().into_iter();
            let sent = sent.filter(|transfer| transfer.op == "send").count();
            let computed = || {
                let events = run.events.iter();
                events.filter(|event| event.action.kind.is_compute())
            };
            let ends = computed().next().zip(computed().next_back());
            steps.extend(ends.map(|(first, last)| (first.start, last.end, sent)));
        }
        steps.remove(0);
        Ok(steps)
    }
}

/// The gradient sink of stages without parameters.
struct NoParameters;

impl GradientSink for NoParameters {
    fn expect(&self, _index: usize) {}

    fn accumulate(&self, _index: usize, _gradient: Tensor<1>) {}
}

impl DeferringSink for NoParameters {
    fn set_deferring(&self, _deferring: bool) {}

    fn take_deferred(&self) -> Vec<Deferred> {
        vec![]
    }
}

/// Stages that sleep instead of computing. A backward sleeps twice as long as a forward.
struct Sleeping {
    stages: usize,
    forward: Duration,
}

impl Stage for Sleeping {
    fn forward(&self, stage: usize, _: usize, input: Option<Tensor<3>>) -> StageOutput {
        sleep(self.forward);
        let x = input.unwrap_or_else(|| Tensor::ones([1, 1, 1], &Device::flex().autodiff()));
        if stage + 1 == self.stages {
            StageOutput::Loss(x.sum())
        } else {
            StageOutput::Activation(x)
        }
    }

    fn after_backward(&self, _: usize, _: usize, _: &mut Gradients) {
        sleep(2 * self.forward);
    }
}
