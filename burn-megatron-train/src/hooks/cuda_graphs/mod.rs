//! Runs micro-batches as CUDA graphs: the forward and backward are captured once for each input shape, and replayed
//! with one call.
//!
//! The tensors that a replay reads and writes keep their addresses. Ids and targets are written into the same tensors,
//! gradients are added to static buffers, and the optimizer changes the parameters in place. Three operations depend on
//! the micro-batch and run outside of the graph:
//!
//! - The gradient of the embedding is added to the rows of its tokens.
//! - The accumulated gradients are counted.
//! - Reductions are started. With ZeRO-2 they start after each micro-batch, otherwise after the last micro-batch.
//!
//! A graph therefore contains no collective, and collectives have the same deadlines as without graphs.
//!
//! `verify` runs on the CPU, which has no CUDA graphs. The host then runs the operations of the graph for each
//! micro-batch, and runs the operations outside of the graph separately.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::tensor::Tensor;

use super::{RemainingHooks, StepContext, StepHook, StepInput, StepRun};
use crate::config::ConfigError;
use crate::micro_batches::{DeviceBatch, TrainStages};
use crate::{TrainConfig, TrainError, TrainOutcome};
use burn_megatron::comm::ReduceOp;
use burn_megatron::data_parallel::{DistributedDataParallel, MicroBatchUses};
use burn_megatron::kernels::cuda_graph::{CudaGraph, CudaGraphError, memory_id};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::deferred_lookups::{DeferredLookup, defer};
use burn_megatron::nn::hook::with_anchor;
use burn_megatron::nn::schedule_nodes::new_anchor;
use burn_megatron::pipeline::engine::{ActionEvent, ShapeKey, StageOutput};
use burn_megatron::pipeline::schedule::{Action, ActionKind};

/// The name of the hook.
pub(super) const NAME: &str = "cuda_graphs";

mod check;
mod stats;

pub(crate) use check::{check, check_device};
pub use stats::CudaGraphStats;

/// The number of micro-batches of a shape that run without a graph. The last of them is captured.
const WARM_UPS: usize = 3;

/// The hook of [`cuda_graph`](TrainConfig::cuda_graph): the graphs of a trainer, keyed by the shape of rows.
#[derive(Default)]
pub(crate) struct CudaGraphs {
    /// Whether the host runs the body instead of a captured graph.
    on_host: bool,
    by_shape: BTreeMap<ShapeKey, ShapeGraph>,
    pub stats: CudaGraphStats,
}

/// The graph of a shape, once it is captured.
#[derive(Default)]
struct ShapeGraph {
    inputs: Option<DeviceBatch>,
    warm_ups: usize,
    captured: Option<CapturedMicroBatch>,
}

/// A graph, and the data for the operations outside the graph.
struct CapturedMicroBatch {
    graph: CudaGraph,
    /// The tensor into which the graph writes the loss.
    loss: Tensor<1>,
    parts: Option<Tensor<1>>,
    lookups: Vec<DeferredLookup>,
    uses: MicroBatchUses,
    /// The memory that the graph uses but has not allocated.
    memory: Vec<Option<usize>>,
}

impl<M: LanguageModel> StepHook<M> for CudaGraphs {
    fn name(&self) -> &str {
        NAME
    }

    fn check(&self, context: &StepContext<'_, M>) -> Result<(), TrainError> {
        let ddp = context.model();
        check::check(context.config, ddp.groups().config())?;
        check::check_model(ddp)?;
        if !self.on_host {
            check_device(ddp.groups(), context.device, ddp.position())?;
        }
        Ok(())
    }

    /// Runs the micro-batches, so it must be the last hook.
    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        _: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        context.run_with(input, |_, stages| self.run(stages))
    }

    fn outcome(&self, outcome: &mut TrainOutcome) {
        outcome.cuda_graphs = Some(self.stats);
    }
}

impl CudaGraphs {
    /// Returns `None` if CUDA graphs are off.
    pub fn new(config: &TrainConfig) -> Option<Self> {
        config.cuda_graph.then(Self::default)
    }

    /// Creates a hook without graphs: the host runs each micro-batch like a captured one, and counts it as replayed.
    pub fn on_host() -> Self {
        Self {
            on_host: true,
            ..Self::default()
        }
    }

    /// Runs the micro-batches of a step. Returns their losses (`[1]` each) and the timed actions of the host.
    fn run<M: LanguageModel>(
        &mut self,
        stages: &TrainStages<'_, M>,
    ) -> Result<(Vec<Tensor<1>>, Vec<ActionEvent>), TrainError> {
        let (mut losses, mut events) = (vec![], vec![]);
        for (number, batch) in stages.batches.iter().enumerate() {
            if batch.documents.is_some() {
                let (setting, expected) =
                    ("documents in rows".into(), "rows of one sequence".into());
                return Err(ConfigError::WithCudaGraph { setting, expected }.into());
            }
            stages.ddp.hold_reductions();
            losses.push(if self.on_host {
                micro_batch_on_host(number, stages, &mut events)
            } else {
                let graph = self.by_shape.entry([batch.rows, batch.seq]).or_default();
                graph.micro_batch(number, stages, &mut events, &mut self.stats)?
            });
            stages
                .ddp
                .release_reductions(number + 1 == stages.batches.len());
        }
        Ok((losses, events))
    }
}

impl ShapeGraph {
    /// Runs a micro-batch, and returns its loss.
    fn micro_batch<M: LanguageModel>(
        &mut self,
        number: usize,
        stages: &TrainStages<'_, M>,
        events: &mut Vec<ActionEvent>,
        stats: &mut CudaGraphStats,
    ) -> Result<Tensor<1>, TrainError> {
        let batch = &stages.batches[number];
        let inputs = match self.inputs.take() {
            Some(inputs) => inputs.overwritten(DeviceBatch::new(batch, true, &stages.device)),
            None => DeviceBatch::new(batch, true, &stages.device),
        };
        self.inputs = Some(inputs.clone());
        let memory = used_memory(&inputs, stages.ddp);
        if self
            .captured
            .as_ref()
            .is_some_and(|graph| graph.memory != memory)
        {
            tracing::debug!("parameters have moved: a CUDA graph is captured again");
            self.captured = None;
        }
        let start = Instant::now();
        if let Some(captured) = &self.captured {
            stats.replayed += 1;
            // SAFETY: `memory` holds all tensors that the body used and did not create, and only this thread uses the
            // graph.
            unsafe { captured.graph.replay() }?;
            let replayed = Instant::now();
            events.push(event(ActionKind::Forward, number, [start, replayed]));
            finish(number, stages, &captured.uses, &captured.lookups);
            events.push(event(
                ActionKind::Backward,
                number,
                [replayed, Instant::now()],
            ));
            // Copied because the next replay overwrites the tensors of the graph.
            let copy = |x: &Tensor<1>| x.clone().mul_scalar(1.0);
            stages
                .parts
                .borrow_mut()
                .push(captured.parts.as_ref().map(copy));
            return Ok(copy(&captured.loss));
        }
        stats.eager += 1;
        self.warm_ups += 1;
        let captures = self.warm_ups >= WARM_UPS;
        if captures {
            CudaGraph::prepare(&stages.device)?;
        }
        let (loss, times) = forward_backward(number, stages, inputs.clone());
        let [forward, backward] = [[times[0], times[1]], [times[1], times[2]]];
        events.push(event(ActionKind::Forward, number, forward));
        events.push(event(ActionKind::Backward, number, backward));
        if captures {
            self.captured = Some(in_turn(stages, || capture(number, stages, inputs))?);
            stats.captured += 1;
        }
        Ok(loss)
    }
}

/// Counts the gradients that a graph has added to the buffers, and adds the gradients of the embedding's tokens.
fn finish<M: LanguageModel>(
    number: usize,
    stages: &TrainStages<'_, M>,
    uses: &MicroBatchUses,
    lookups: &[DeferredLookup],
) {
    stages.ddp.count_micro_batch(uses);
    for lookup in lookups {
        lookup.accumulate(stages.batches[number].sorted());
    }
}

fn micro_batch_on_host<M: LanguageModel>(
    number: usize,
    stages: &TrainStages<'_, M>,
    events: &mut Vec<ActionEvent>,
) -> Tensor<1> {
    let batch = &stages.batches[number];
    let inputs = DeviceBatch::new(batch, true, &stages.device);
    let body = || defer(batch.sorted(), || forward_backward(number, stages, inputs));
    let (((loss, [start, forward, end]), lookups), uses) = stages.ddp.capture_micro_batch(body);
    events.push(event(ActionKind::Forward, number, [start, forward]));
    events.push(event(ActionKind::Backward, number, [forward, end]));
    finish(number, stages, &uses, &lookups);
    loss
}

impl DeviceBatch {
    /// Copies the values of another batch of the same shape into the memory of this batch.
    fn overwritten(self, new: Self) -> Self {
        let [rows, seq] = self.ids.dims();
        let all = [0..rows, 0..seq];
        let targets = self.targets.zip(new.targets);
        Self {
            ids: self.ids.slice_assign(all.clone(), new.ids),
            targets: targets.map(|(old, new)| old.slice_assign(all, new)),
        }
    }
}

/// Returns the memory that a micro-batch uses but does not allocate.
fn used_memory<M: LanguageModel>(
    inputs: &DeviceBatch,
    ddp: &DistributedDataParallel<M>,
) -> Vec<Option<usize>> {
    let mut memory = ddp.memory_ids();
    memory.push(memory_id(&inputs.ids));
    memory.extend(inputs.targets.as_ref().map(memory_id));
    memory
}

/// Runs the forward and the backward of a micro-batch. Returns the loss, and the start, middle and end times.
fn forward_backward<M: LanguageModel>(
    number: usize,
    stages: &TrainStages<'_, M>,
    inputs: DeviceBatch,
) -> (Tensor<1>, [Instant; 3]) {
    let start = Instant::now();
    stages.ddp.sink().begin_stage(0);
    let anchor = new_anchor(&stages.device);
    let output = with_anchor(&anchor, || {
        stages.forward_in((0, number), None, inputs, None)
    });
    let StageOutput::Loss(loss) = output else {
        unreachable!("the only stage returns a loss");
    };
    let forward = Instant::now();
    stages.loss_scale.scale(loss.clone()).backward();
    (loss.inner(), [start, forward, Instant::now()])
}

/// Captures a graph on one rank at a time. If ranks are threads of one process, the other ranks must not call the
/// device during a capture. All ranks capture the same micro-batch.
fn in_turn<M: LanguageModel>(
    stages: &TrainStages<'_, M>,
    capture: impl FnOnce() -> Result<CapturedMicroBatch, TrainError>,
) -> Result<CapturedMicroBatch, TrainError> {
    let world = stages.ddp.groups().world();
    let wait = || world.all_reduce_scalar(0i32, ReduceOp::Max);
    for _ in 0..world.rank() {
        wait()?;
    }
    let captured = capture()?;
    for _ in world.rank()..world.size() {
        wait()?;
    }
    Ok(captured)
}

/// Captures a micro-batch that has just run.
fn capture<M: LanguageModel>(
    number: usize,
    stages: &TrainStages<'_, M>,
    inputs: DeviceBatch,
) -> Result<CapturedMicroBatch, TrainError> {
    let sorted = stages.batches[number].sorted();
    let memory = used_memory(&inputs, stages.ddp);
    if memory.iter().any(Option::is_none) {
        let setting = "tensors whose memory is not known".into();
        let expected = "parameters and tokens on a CUDA device".into();
        return Err(ConfigError::WithCudaGraph { setting, expected }.into());
    }
    let body = || defer(sorted, || forward_backward(number, stages, inputs).0);
    let (captured, uses) = stages
        .ddp
        .capture_micro_batch(|| CudaGraph::capture(&stages.device, body));
    let (graph, (loss, lookups)) = captured?;
    Ok(CapturedMicroBatch {
        graph,
        loss,
        parts: stages.parts.borrow_mut().pop().flatten(),
        lookups,
        uses,
        memory,
    })
}

fn event(kind: ActionKind, micro_batch: usize, [start, end]: [Instant; 2]) -> ActionEvent {
    ActionEvent {
        action: Action::new(kind, 0, micro_batch),
        start,
        end,
    }
}

impl From<CudaGraphError> for TrainError {
    fn from(error: CudaGraphError) -> Self {
        Self::CudaGraph(error)
    }
}
