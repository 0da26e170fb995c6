//! Tests that the reduction of a stage's gradients over the data axis starts during the stage's last backward pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::pipeline::engine::{Engine, Stage, StageOutput};
use burn_megatron::pipeline::schedule::{ScheduleConfig, ScheduleKind, generate};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_comm_testing::Intercept;
use burn_megatron_data::Samples;
use burn_megatron_models::Transformer;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::small_gpt;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

struct Stages<'a> {
    subject: &'a TransformerSubject,
    model: &'a Transformer,
    last: usize,
    started: &'a AtomicUsize,
    /// The number of reductions that were started before each forward pass.
    seen: std::cell::RefCell<Vec<usize>>,
}

impl Stage for Stages<'_> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        self.seen
            .borrow_mut()
            .push(self.started.load(Ordering::SeqCst));
        let device = Device::flex().autodiff();
        let number = micro_batch as u64;
        let batch = self.subject.batch(number..number + 1).unwrap();
        let matrix = |values: Vec<i32>| {
            let data = TensorData::new(values, [batch.rows, batch.seq]);
            Tensor::<2, Int>::from_data(data, &device)
        };
        let tokens = matrix(batch.tokens().to_vec());
        let hidden = self.model.hidden(stage, input, tokens.into());
        if stage < self.last {
            return StageOutput::Activation(hidden);
        }
        let losses = self.model.losses_of(hidden, matrix(batch.targets.clone()));
        StageOutput::Loss(losses.objective.sum())
    }
}

/// Returns the number of collectives on the data axis at the end of the run, and the number after the reduction.
fn counts(kind: ScheduleKind) -> Vec<[usize; 2]> {
    let mut subject = small_gpt();
    subject.config.layers = 4;
    subject.config.tied = false;
    let layout = ParallelConfig::new().with_pipeline(2).with_data(2);
    let run = World::threads(4)
        .unwrap()
        .run(|rank| -> Result<_, AnyError> {
            let groups = ParallelContext::new(&layout, &rank)?;
            let device = Device::flex();
            let schedule = generate(&ScheduleConfig::new(kind, 2, 4))?;
            let stages = LayerSplit::Even.stages(4, schedule.stages())?;
            let own = schedule.stages_of(groups.pipeline().rank()).into_iter();
            let own: Vec<_> = own.map(|stage| (stage, stages[stage].clone())).collect();
            let builder = ModelBuilder::with(&groups, &device, subject.seed, DType::F64);
            let model = subject.config.init_stages(builder, &own)?;

            let started = Arc::new(AtomicUsize::new(0));
            let count = started.clone();
            let counted = Intercept::over(groups.data().clone(), move |inner, call, input| {
                count.fetch_add(1, Ordering::SeqCst);
                inner.start(call, input)
            });
            let counted = groups.clone().with_data(counted);
            let mut ddp = DistributedDataParallel::new(model, &counted)?;
            started.store(0, Ordering::SeqCst);

            let sink = ddp.sink();
            let engine = Engine::new(&schedule, groups.pipeline(), &device, sink)?;
            let stages = Stages {
                subject: &subject,
                model: ddp.module(),
                last: schedule.stages() - 1,
                started: &started,
                seen: Default::default(),
            };
            engine.run(&stages)?;
            // A stage with outstanding forward passes is not closed.
            assert!(stages.seen.into_inner().iter().all(|seen| *seen == 0));
            let after_run = started.load(Ordering::SeqCst);
            ddp.reduce(1)?;
            Ok([after_run, started.load(Ordering::SeqCst)])
        });
    run.unwrap()
}

#[test]
fn sums_begin_before_the_reduction_and_are_not_made_twice() {
    for kind in ScheduleKind::ALL {
        let stages = if kind.default_virtual_stages() == 1 {
            1
        } else {
            2
        };
        for [after_run, after_reduction] in counts(kind) {
            // The parameters are small, so there is one collective per stage. The collective of the tokens follows.
            assert_eq!(after_run, stages, "{kind}");
            assert_eq!(after_reduction, stages + 1, "{kind}");
        }
    }
}
