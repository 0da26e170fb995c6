//! `burn-megatron-bench pipeline`: the time of schedules over a slow link, against the simulator.

use std::fmt::{self, Display};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Gradients, Tensor};
use burn_megatron::atomic_file::replace_file;
use burn_megatron::comm::testing::{Link, SimulatedNetwork};
use burn_megatron::comm::{Rank, World};
use burn_megatron::nn::hook::{Deferred, DeferringSink, GradientSink};
use burn_megatron::pipeline::engine::{Engine, P2pConfig, Stage, StageOutput};
use burn_megatron::pipeline::schedule::{
    Schedule, ScheduleConfig, ScheduleKind, StageTimes, generate, simulate,
};
use serde::Serialize;

use super::args::PipelineBenchArgs;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::{Columns, wrapped};

/// Timeout of a message.
const DEADLINE: Duration = Duration::from_secs(300);

/// A line of the table. Times are in units of a forward of a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PipelineRow {
    schedule: ScheduleKind,
    receives_ahead: usize,
    /// The total of the simulator.
    simulated: f64,
    /// The median of the measured steps.
    measured: f64,
    /// Messages of a step, over all ranks.
    messages: usize,
    /// Of them, activations and gradients.
    tensors: usize,
}

/// Runs every schedule with every number of receives ahead.
pub fn run(args: &PipelineBenchArgs) -> Result<ExitCode, Error> {
    if let Some(kind) = args
        .pipeline_schedules
        .iter()
        .find(|kind| kind.splits_backward())
    {
        return Err(format!(
            "--pipeline-schedules {kind}: its weight gradients are computed by themselves, and the stages have none: \
             expected gpipe, 1f1b, eager-1f1b or interleaved"
        )
        .into());
    }
    let bench = Benchmark(args);
    println!("{}\n", wrapped(&bench.describe()));
    println!("{}", PipelineRow::header());
    let mut rows = vec![];
    for kind in &args.pipeline_schedules {
        let config = ScheduleConfig::new(*kind, args.pipeline_parallel, args.micro_batches);
        let schedule = generate(&config)?;
        for ahead in &args.receives_ahead {
            let row = bench.measure(&schedule, *kind, *ahead)?;
            println!("{row}");
            rows.push(row);
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows)?;
        replace_file(path, text.as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Benchmark<'a>(&'a PipelineBenchArgs);

/// The measurements of a rank: by step, its first and last computation, and its messages.
type RankSteps = Vec<(Instant, Instant, usize)>;

impl Benchmark<'_> {
    fn describe(&self) -> String {
        let args = self.0;
        format!(
            "{} ranks, {} micro-batches; a forward of a rank sleeps {} ms, its backward {} ms, and a message takes {} \
             forwards on a simulated link; totals are in forwards",
            args.pipeline_parallel,
            args.micro_batches,
            args.forward_ms,
            2 * args.forward_ms,
            args.transfer,
        )
    }

    fn measure(
        &self,
        schedule: &Schedule,
        kind: ScheduleKind,
        receives_ahead: usize,
    ) -> Result<PipelineRow, Error> {
        let args = self.0;
        let each = (schedule.ranks() as f64) / schedule.stages() as f64;
        let times = StageTimes::uniform(schedule.stages(), each, each, each, args.transfer);
        let simulated = simulate(schedule, &times)?.total();
        let world = World::threads(schedule.ranks())?;
        let world = world.deadline(DEADLINE).compute_threads(1);
        let ranks = world.run(|rank| self.run_rank(&rank, schedule, receives_ahead))?;
        let steps = (0..args.steps).map(|step| {
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
        let link = Link::new(forward.mul_f64(args.transfer), f64::INFINITY)?;
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
        // In the first step the ranks send each other the shapes.
        for _ in 0..=args.steps {
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

/// The sink of stages without parameters.
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

/// Stages that sleep, a backward twice as long as a forward.
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

impl PipelineRow {
    /// The header of the table.
    fn header() -> String {
        COLUMNS.line([
            "schedule",
            "receives ahead",
            "simulated",
            "measured",
            "measured / simulated",
            "messages",
            "tensors",
        ])
    }
}

const COLUMNS: Columns<7> = Columns {
    widths: [-12, 14, 9, 8, 20, 8, 7],
    optional: &[6],
};

impl Display for PipelineRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&COLUMNS.line([
            self.schedule.to_string(),
            self.receives_ahead.to_string(),
            format!("{:.1}", self.simulated),
            format!("{:.1}", self.measured),
            format!("{:.3}", self.measured / self.simulated),
            self.messages.to_string(),
            self.tensors.to_string(),
        ]))
    }
}
