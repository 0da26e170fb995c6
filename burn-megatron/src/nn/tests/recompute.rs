//! Tests that recomputed blocks have bit-identical gradients to recorded blocks, and save only their input.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, Tensor};

use super::{autodiff, values, wave};
use crate::comm::{ParallelContext, World};
use crate::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel, ZeroStage,
};
use crate::mesh::ParallelConfig;
use crate::nn::forward_context;
use crate::nn::hook::with_anchor;
use crate::nn::*;

const WIDTH: usize = 6;
const BLOCKS: usize = 6;
const SAMPLES: usize = 4;
const STAGES: [ZeroStage; 3] = [
    ZeroStage::Replicated,
    ZeroStage::Gradients,
    ZeroStage::Parameters,
];

/// A block of burn-nn modules.
#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let up = self.up.forward(self.norm.forward(x.clone()));
        x + self.down.forward(gelu(up))
    }
}

#[derive(Module, Debug)]
struct Model {
    stem: Linear,
    blocks: Vec<Block>,
    head: Linear,
}

/// The method of running the blocks of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RunMode {
    Recorded,
    Recomputed,
    /// Each block is recomputed, and also each group of three blocks.
    Nested,
}

impl RunMode {
    fn run<const D: usize, const E: usize>(
        self,
        x: Tensor<D>,
        body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
    ) -> Tensor<E> {
        match self {
            Self::Recorded => body(x),
            Self::Recomputed | Self::Nested => recompute(x, body),
        }
    }
}

impl Model {
    fn new(dtype: DType) -> Self {
        let device = Device::flex();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let block = |_| Block {
            norm: LayerNormConfig::new(WIDTH).init(&device),
            up: linear(WIDTH, 2 * WIDTH),
            down: linear(2 * WIDTH, WIDTH),
        };
        let model = Self {
            stem: linear(3, WIDTH),
            blocks: (0..BLOCKS).map(block).collect(),
            head: linear(WIDTH, 2),
        };
        model.map(&mut FillParameters(0.0, dtype))
    }

    fn forward(&self, x: Tensor<2>, mode: RunMode) -> Tensor<2> {
        let Self { stem, blocks, head } = self.clone();
        let x = mode.run(x, move |x| stem.forward(x));
        let x = match mode {
            RunMode::Nested => blocks.chunks(3).fold(x, |x, chunk| {
                let chunk = chunk.to_vec();
                recompute(x, move |x| in_order(&chunk, x, mode))
            }),
            RunMode::Recorded | RunMode::Recomputed => in_order(&blocks, x, mode),
        };
        mode.run(x, move |x| head.forward(x))
    }
}

fn in_order(blocks: &[Block], x: Tensor<2>, mode: RunMode) -> Tensor<2> {
    blocks.iter().fold(x, |x, block| {
        let block = block.clone();
        mode.run(x, move |x| block.forward(x))
    })
}

pub(super) struct FillParameters(pub f64, pub DType);

impl ModuleMapper for FillParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1.0;
        param.map(|tensor| wave(tensor.dims(), self.0).mul_scalar(0.5).cast(self.1))
    }
}

/// Returns values of this dtype that all differ.
fn input(phase: f64, dtype: DType) -> Tensor<2> {
    Tensor::from_inner(wave([SAMPLES, 3], phase).cast(dtype))
}

/// Returns the sum of squares, so that every output has a different gradient.
fn loss(y: Tensor<2>) -> Tensor<1> {
    (y.clone() * y).sum()
}

fn wrapped<M: Module>(
    model: M,
    stage: ZeroStage,
    groups: &ParallelContext,
) -> DistributedDataParallel<M> {
    let config = DataParallelConfig {
        zero_stage: stage,
        ..DataParallelConfig::default()
    };
    DistributedDataParallel::with(ParallelModule::replicated(model), groups, &config).unwrap()
}

/// Returns the gradients of all parameters.
pub(super) fn reduced<M: Module>(ddp: &mut DistributedDataParallel<M>) -> Vec<Vec<f64>> {
    let gradients = ddp.reduce(1).unwrap();
    let whole = ddp.full_gradients(&gradients).into_iter();
    whole.map(values).collect()
}

/// The gradients of the model inputs and of the parameters, by step, and the maximum number of blocks.
type TrainResult = (Vec<Vec<f64>>, Vec<Vec<f64>>, u64);

/// Runs two steps of some micro-batches on `ranks` ranks.
fn train(
    (mode, stage, dtype): (RunMode, ZeroStage, DType),
    ranks: usize,
    micro_batches: usize,
    tracked: bool,
) -> Vec<TrainResult> {
    let config = ParallelConfig::new().with_data(ranks);
    let run = |rank| {
        let groups = ParallelContext::new(&config, &rank).unwrap();
        let mut ddp = wrapped(Model::new(dtype), stage, &groups);
        let (mut of_inputs, mut of_parameters) = (vec![], vec![]);
        for step in 0..2 {
            for micro_batch in 0..micro_batches {
                let phase = 100 * step + 10 * micro_batch + groups.rank();
                let x = input(phase as f64, dtype);
                let x = if tracked { x.require_grad() } else { x };
                let loss = ddp.forward(&autodiff(), |model| loss(model.forward(x.clone(), mode)));
                let gradients = if micro_batch + 1 == micro_batches {
                    ddp.backward_last(loss)
                } else {
                    ddp.backward(loss)
                };
                of_inputs.extend(x.grad(&gradients).map(values));
            }
            of_parameters.extend(reduced(&mut ddp));
        }
        Ok::<_, DataParallelError>((of_inputs, of_parameters, ddp.usage().peak_unsharded_units()))
    };
    World::threads(ranks).unwrap().run(run).unwrap()
}

#[track_caller]
fn assert_as_recorded(stage: ZeroStage, dtype: DType, micro_batches: usize, tracked: bool) {
    let run = |mode| train((mode, stage, dtype), 2, micro_batches, tracked);
    let expected = run(RunMode::Recorded);
    let of_inputs = if tracked { 2 * micro_batches } else { 0 };
    for (of_input, of_parameters, _) in &expected {
        assert_eq!(of_input.len(), of_inputs);
        let all = of_parameters.iter().flatten();
        assert!(all.clone().any(|x| *x != 0.0) && all.clone().all(|x| x.is_finite()));
    }
    for mode in [RunMode::Recomputed, RunMode::Nested] {
        for (found, expected) in run(mode).iter().zip(&expected) {
            let what = format!("{mode:?}, {stage:?}, {dtype:?}, {micro_batches}");
            assert_eq!(found.0, expected.0, "inputs: {what}");
            assert_eq!(found.1, expected.1, "parameters: {what}");
        }
    }
}

#[test]
fn gradients_are_those_of_a_recorded_forward() {
    for stage in STAGES {
        for dtype in [DType::F32, DType::F64] {
            for (micro_batches, tracked) in [(1, true), (3, true), (1, false)] {
                assert_as_recorded(stage, dtype, micro_batches, tracked);
            }
        }
    }
}

#[test]
fn nothing_of_a_block_is_saved() {
    let peak_unsharded_units = |mode| {
        let setting = (mode, ZeroStage::Parameters, DType::F32);
        let ranks = train(setting, 2, 2, false).into_iter();
        ranks.map(|(.., most)| most).max().unwrap()
    };
    let recorded = peak_unsharded_units(RunMode::Recorded);
    assert!(recorded > BLOCKS as u64, "all blocks are in the graph");
    for mode in [RunMode::Recomputed, RunMode::Nested] {
        let most = peak_unsharded_units(mode);
        assert_eq!(most, 2, "{mode:?}: the one at hand, and the next one");
    }
}

/// Uses a block twice in one body, and once in another body.
#[test]
fn every_use_of_a_parameter_is_counted() {
    let run = |mode: RunMode, stage| {
        let mut ddp = wrapped(Model::new(DType::F64), stage, &ParallelContext::single());
        for micro_batch in 0..2 {
            let x = wave([SAMPLES, WIDTH], f64::from(micro_batch)).autodiff();
            let loss = ddp.forward(&autodiff(), |model| {
                let block = model.blocks[0].clone();
                let twice = move |x| block.forward(block.forward(x));
                let x = mode.run(x, twice);
                let block = model.blocks[0].clone();
                loss(mode.run(x, move |x| block.forward(x)))
            });
            ddp.backward_last(loss);
        }
        reduced(&mut ddp)
    };
    for stage in STAGES {
        let expected = run(RunMode::Recorded, stage);
        assert_eq!(run(RunMode::Recomputed, stage), expected, "{stage:?}");
    }
}

/// The linear layers of this crate do not save their weight. They fetch it separately.
#[test]
fn our_own_layers_can_be_run_again() {
    let run = |mode: RunMode, stage| {
        let builder =
            ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 3, DType::F64);
        let config = ParallelMlpConfig {
            hidden: WIDTH,
            width: 8,
            activation: Activation::Gelu,
            bias: true,
            init: Init::Normal(0.5),
            output_init: Init::Normal(0.5),
        };
        let mlp = config.init(&builder).unwrap();
        let config = DataParallelConfig {
            zero_stage: stage,
            ..DataParallelConfig::default()
        };
        let model = builder.finish(mlp).unwrap();
        let mut ddp =
            DistributedDataParallel::with(model, &ParallelContext::single(), &config).unwrap();
        let x = wave([2, 3, WIDTH], 4.0).autodiff().require_grad();
        let loss = ddp.forward(&autodiff(), |mlp| {
            let mlp = mlp.clone();
            let y = mode.run(x.clone(), move |x| mlp.forward(x));
            (y.clone() * y).sum()
        });
        let of_input = x.grad(&ddp.backward_last(loss)).map(values);
        (of_input, reduced(&mut ddp))
    };
    for stage in [ZeroStage::Replicated, ZeroStage::Parameters] {
        assert_eq!(
            run(RunMode::Recomputed, stage),
            run(RunMode::Recorded, stage)
        );
    }
}

#[test]
fn an_evaluation_records_nothing() {
    let model = Model::new(DType::F64);
    let x = input(7.0, DType::F64).inner();
    let expected = values(model.forward(x.clone(), RunMode::Recorded));
    let mut ddp = wrapped(model, ZeroStage::Parameters, &ParallelContext::single());
    let train = |ddp: &DistributedDataParallel<Model>, evaluate: bool| {
        let x = input(1.0, DType::F64);
        let loss = ddp.forward(&autodiff(), |model| loss(model.forward(x, RunMode::Nested)));
        if evaluate {
            let y = ddp
                .module()
                .forward(input(7.0, DType::F64).inner(), RunMode::Nested);
            assert!(!y.is_autodiff());
            assert_eq!(values(y), expected);
        }
        ddp.backward_last(loss);
    };
    train(&ddp, false);
    let alone = reduced(&mut ddp);
    train(&ddp, true);
    assert_eq!(
        reduced(&mut ddp),
        alone,
        "an evaluation in between changes nothing"
    );
}

#[test]
fn a_module_without_a_wrapper_is_recorded_as_it_is() {
    let layer = Linear {
        weight: Param::from_tensor(super::leaf(wave([3, 3], 1.0))),
        bias: None,
    };
    let gradient = |mode: RunMode| {
        let inner = layer.clone();
        let y = mode.run(input(2.0, DType::F64), move |x| inner.forward(x));
        values(layer.weight.grad(&loss(y).backward()).unwrap())
    };
    assert_eq!(gradient(RunMode::Recomputed), gradient(RunMode::Recorded));
}

#[test]
fn an_input_without_any_influence_has_a_gradient_of_zeros() {
    let x = super::leaf(wave([2, 3], 1.0));
    let y: Tensor<1> = with_anchor(&x, || recompute(x.clone(), |x| x.ones_like().inner().sum()));
    let gradients = (y + x.clone().sum()).backward();
    assert_eq!(values(x.grad(&gradients).unwrap()), [1.0; 6]);
}

#[test]
fn a_tracked_tensor_from_outside_is_refused() {
    let (x, outside) = (super::leaf(wave([2], 1.0)), super::leaf(wave([2], 2.0)));
    let run = || {
        with_anchor(&x, || {
            recompute(x.clone(), move |x: Tensor<1>| x * outside.clone())
        })
    };
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    let message = panic.downcast_ref::<&str>().unwrap();
    assert!(
        message.contains("a tracked tensor that is not its input"),
        "{message}"
    );
}

/// The first pass runs in the forward pass, and the second pass runs in the backward pass.
#[test]
fn a_fault_in_a_block_leaves_nothing_behind() {
    let mut ddp = wrapped(
        Model::new(DType::F64),
        ZeroStage::Parameters,
        &ParallelContext::single(),
    );
    let step = |ddp: &DistributedDataParallel<Model>, faulty_run: usize| {
        let runs = Arc::new(AtomicUsize::new(0));
        let x = input(1.0, DType::F64);
        let loss = ddp.forward(&autodiff(), |model| {
            let Model { stem, head, .. } = model.clone();
            let x = recompute(x, move |x| {
                let y = stem.forward(x);
                if runs.fetch_add(1, Ordering::Relaxed) == faulty_run {
                    std::panic::resume_unwind(Box::new("a fault"));
                }
                y
            });
            loss(recompute(x, move |x| head.forward(x)))
        });
        ddp.backward_last(loss);
    };
    step(&ddp, usize::MAX);
    let expected = reduced(&mut ddp);
    for faulty_run in [0, 1] {
        let fault = catch_unwind(AssertUnwindSafe(|| step(&ddp, faulty_run)));
        assert!(fault.is_err(), "run {faulty_run}");
        assert!(forward_context::anchor().is_none());
        let over = ddp.reduce(1);
        assert!(
            matches!(over, Err(DataParallelError::NoBackward { .. })),
            "{over:?}"
        );
        step(&ddp, usize::MAX);
        assert_eq!(
            reduced(&mut ddp),
            expected,
            "after a fault in run {faulty_run}"
        );
    }
}

#[derive(Module, Debug)]
struct Dropping {
    layer: Linear,
    dropout: Dropout,
}

/// Returns the gradients after two forward passes at two positions, followed by both backward passes.
fn dropping(run: impl Fn(&DropoutPosition, Tensor<2>, Dropping) -> Tensor<2>) -> Vec<Vec<f64>> {
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 5, DType::F64);
    let layer = Linear {
        weight: Param::from_tensor(wave([3, 4], 1.0)),
        bias: Some(Param::from_tensor(wave([4], 2.0))),
    };
    let dropout = Dropout::new(0.4, &builder).unwrap();
    let mut ddp = wrapped(
        Dropping { layer, dropout },
        ZeroStage::Replicated,
        &ParallelContext::single(),
    );
    let position = builder.position();
    let losses = [0, 1].map(|micro_batch| {
        position.set(3, micro_batch * SAMPLES as u64);
        let x = input(micro_batch as f64, DType::F64);
        ddp.forward(&autodiff(), |model| loss(run(position, x, model.clone())))
    });
    for loss in losses {
        ddp.backward(loss);
        assert_eq!(
            position.get(),
            BatchPosition::new(3, SAMPLES as u64),
            "the position comes back"
        );
    }
    reduced(&mut ddp)
}

#[test]
fn dropout_draws_its_masks_again() {
    let forward = |model: &Dropping, x| {
        let y = model.layer.forward(x);
        model.dropout.forward(y, ActivationLayout::Whole)
    };
    let recorded = dropping(|_, x, model| forward(&model, x));
    let again =
        dropping(|position, x, model| recompute_at(position, x, move |x| forward(&model, x)));
    assert_eq!(again, recorded);
    let elsewhere = dropping(|_, x, model| recompute(x, move |x| forward(&model, x)));
    assert_ne!(elsewhere, recorded, "the position had moved on");
}

#[test]
fn a_position_comes_back_after_a_fault() {
    let position = DropoutPosition::default();
    position.set(1, 2);
    let run = || {
        position.at(BatchPosition::new(5, 6), || {
            std::panic::resume_unwind(Box::new("a fault"))
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    assert_eq!(position.get(), BatchPosition::new(1, 2));
}
