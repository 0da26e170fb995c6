//! Tests that results are bit-identical, independent of the operation that adds the output of a branch to the residual
//! stream.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};

use super::{autodiff, values, wave};
use crate::comm::{ParallelContext, ParallelContextError, World};
use crate::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use crate::mesh::ParallelConfig;
use crate::nn::*;

const HIDDEN: usize = 8;
const SHAPE: [usize; 3] = [2, 5, HIDDEN];

/// An MLP with a normalized input.
#[derive(Module, Debug)]
struct Block {
    norm: Norm,
    mlp: ParallelMlp,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Model {
    blocks: Vec<Block>,
    norm: Norm,
}

/// The place where the output of a block is added.
#[derive(Clone, Copy, Debug)]
enum Addition {
    NextNorm,
    Block,
    RecomputedBlock,
}

impl Block {
    fn forward(&self, x: Residual) -> Residual {
        let (normal, x) = self.norm.forward_add(x);
        let (fed, bias) = self.mlp.forward_without_bias(normal);
        let x = self
            .dropout
            .forward_add(fed, bias, x, ActivationLayout::Whole);
        assert!(x.branch.is_some(), "nothing is dropped");
        x
    }
}

impl Model {
    fn build(groups: &ParallelContext, dtype: DType) -> ParallelModule<Self> {
        let builder = ModelBuilder::with(groups, &Device::flex(), 5, dtype);
        let norm =
            |builder: ModelBuilder| NormConfig::new(NormKind::Layer, HIDDEN, 1e-5).init(&builder);
        let mlp = ParallelMlpConfig::new(HIDDEN, 3 * HIDDEN, Activation::Gelu)
            .with_init(Init::Normal(0.4))
            .with_output_init(Init::Normal(0.4));
        let block = |i| {
            let builder = builder.child("blocks").child(i);
            Block {
                norm: norm(builder.child("norm")),
                mlp: mlp.init(&builder.child("mlp")).unwrap(),
                dropout: Dropout::new(0.0, &builder.child("dropout")).unwrap(),
            }
        };
        let blocks = (0..3).map(block).collect();
        let norm = norm(builder.child("norm"));
        builder.finish(Self { blocks, norm }).unwrap()
    }

    fn forward(&self, x: Tensor<3>, addition: Addition) -> Tensor<3> {
        let x = self.blocks.iter().fold(Residual::from(x), |x, block| {
            let block = block.clone();
            match addition {
                Addition::NextNorm => block.forward(x),
                Addition::Block => block.forward(x).sum().into(),
                Addition::RecomputedBlock => {
                    recompute(x.sum(), move |x: Tensor<3>| block.forward(x.into()).sum()).into()
                }
            }
        });
        self.norm.forward_add(x).0
    }
}

/// Adds a small wave, so that biases affect the result.
struct Shift;

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| {
            let wave = wave(x.dims(), 0.3).cast(x.dtype());
            x + wave * 0.1
        })
    }
}

/// Returns the outputs and the gradients of two micro-batches on each of two ranks.
fn train(addition: Addition, stage: ZeroStage, dtype: DType) -> Vec<Vec<Vec<f64>>> {
    let layout = ParallelConfig::new().with_data(2);
    let run = |rank| {
        let groups = ParallelContext::new(&layout, &rank)?;
        let config = DataParallelConfig {
            zero_stage: stage,
            ..DataParallelConfig::default()
        };
        let model = Model::build(&groups, dtype);
        let mut ddp = DistributedDataParallel::with(model, &groups, &config).unwrap();
        ddp.update(|model| model.map(&mut Shift));
        let mut seen = vec![];
        for micro_batch in 0..2 {
            let wave = |phase: usize| Tensor::from_inner(wave(SHAPE, phase as f64).cast(dtype));
            let x = wave(2 * micro_batch + groups.rank());
            let y = ddp.forward(&autodiff(), |model| model.forward(x, addition));
            seen.push(values(y.clone().inner()));
            ddp.backward((y * wave(9)).sum());
        }
        let gradients = ddp.reduce(1).unwrap();
        seen.extend(ddp.full_gradients(&gradients).into_iter().map(values));
        Ok::<_, ParallelContextError>(seen)
    };
    World::threads(2).unwrap().run(run).unwrap()
}

#[test]
fn a_branch_is_added_in_the_next_norm_as_in_its_own_block() {
    for dtype in [DType::F64, DType::F32] {
        for stage in [
            ZeroStage::Replicated,
            ZeroStage::Gradients,
            ZeroStage::Parameters,
        ] {
            let expected = train(Addition::Block, stage, dtype);
            let is_given = |values: &Vec<f64>| values.iter().any(|x| *x != 0.0);
            assert!(expected.iter().flatten().all(is_given));
            for addition in [Addition::NextNorm, Addition::RecomputedBlock] {
                let found = train(addition, stage, dtype);
                assert_eq!(found, expected, "{addition:?}, {stage:?}, {dtype:?}");
            }
        }
    }
}
