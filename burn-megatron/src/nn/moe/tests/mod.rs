//! Compares the MoE layer on several ranks with a dense loop over the experts on one rank, in f64. The ranks are
//! threads.

mod bias;
mod capacity;
mod choice;
mod dense;
mod dispatch;
mod edges;
mod flex;
mod fp8;
mod golden;
mod layouts;
mod losses;
mod padding;
mod peers;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::*;
use crate::comm::{ParallelContext, World};
use crate::data_parallel::DistributedDataParallel;
use crate::mesh::{Axis, Grid, MeshRank, ParallelConfig};
use crate::nn::fp8::{Fp8Config, Fp8LayerState};
use crate::nn::tests::{assert_near, values, wave};
use crate::nn::{Activation, AxisRank, ModelBuilder, ParameterTable, RealTokens};
use crate::optim::global_norm;
use dense::Dense;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The sizes `[batch, seq, hidden]` of the complete input. Two tensor ranks have an odd number of tokens each.
const BATCH: usize = 4;
const SEQ: usize = 6;
const HIDDEN: usize = 5;
const EXPERTS: usize = 4;
const WIDTH: usize = 6;

/// The sizes of the axes: tensor (with sequence parallelism), expert, expert-tensor, and data in the expert grid.
type Sizes = [usize; 4];

const ONE: Sizes = [1, 1, 1, 1];

const DISPATCHERS: [DispatcherKind; 3] = [
    DispatcherKind::AllToAll,
    DispatcherKind::AllGather,
    DispatcherKind::Flex,
];

fn router() -> RouterConfig {
    RouterConfig::new(HIDDEN, EXPERTS, 2)
}

fn config(router: RouterConfig) -> MoeMlpConfig {
    MoeMlpConfig::new(router, WIDTH, Activation::SwiGlu)
}

fn ints(values: &[i64], shape: [usize; 2]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
}

/// Returns the integers of a tensor, row by row.
fn read(values: Tensor<2, Int>) -> Vec<i64> {
    let values = values.into_data().convert_dtype(DType::I64);
    values.try_into_vec().unwrap()
}

/// The settings of a run. By default nothing special happens.
#[derive(Clone, Default)]
struct Run {
    /// Choices of the complete batch that replace the router's choices.
    choices: Option<Vec<i64>>,
    /// The loss scale of a training step with the losses of the router. `None` if the run is not a training step.
    loss_scale: Option<f64>,
    /// Whether the layer is recomputed in the backward pass.
    recompute: bool,
    /// Whether all data ranks read the same samples.
    same_samples: bool,
    /// Whether tensor ranks have the same tokens, without sequence parallelism.
    replicated: bool,
    /// The number of ranks of the context axis, which replace data ranks. Each context rank has consecutive tokens of
    /// every sample.
    context: Option<usize>,
    /// The number of real tokens at the start of each sample. The other tokens are padding.
    lengths: Option<[usize; BATCH]>,
    /// The factor of the model loss.
    factor: Option<f64>,
    fp8: Fp8Config,
    ranks_per_node: Option<usize>,
}

/// The results of all ranks, for the complete batch and model.
#[derive(Debug)]
struct Outcome {
    output: Vec<f64>,
    input_gradient: Vec<f64>,
    /// The parameters by path. Gradients are divided by the number of tokens.
    parameters: Vec<(String, Vec<f64>)>,
    norm: f64,
    /// The mean of each router loss.
    losses: Vec<f64>,
    /// The number of tokens of each expert, and of pairs, over all ranks. Empty outside a training step.
    load: Vec<f64>,
    /// The states of all experts, which are the same on all ranks.
    fp8: BTreeMap<String, Fp8LayerState>,
}

struct RankOutcome {
    rank: MeshRank,
    table: ParameterTable,
    output: Vec<f64>,
    input_gradient: Vec<f64>,
    gradients: Vec<Vec<f64>>,
    norm: f64,
    losses: Vec<f64>,
    load: Vec<f64>,
    fp8: BTreeMap<String, Fp8LayerState>,
}

fn layout([tensor, expert, expert_tensor, _]: Sizes) -> ParallelConfig {
    ParallelConfig::new()
        .with_tensor(tensor)
        .with_sequence_parallel(tensor > 1)
        .with_expert(expert)
        .with_expert_tensor(expert_tensor)
}

/// Returns the start of a rank's part in `[batch, seq]`, and its shape.
fn own_part(rank: &MeshRank, run: &Run) -> ([usize; 2], [usize; 2]) {
    let data = rank.on(Grid::Dense, Axis::Data);
    let tensor = rank.on(Grid::Dense, Axis::Tensor);
    let place = |same: bool, AxisRank { index, size }| if same { (0, 1) } else { (index, size) };
    let (row, data) = place(run.same_samples, data);
    let (column, tensor) = place(run.replicated, tensor);
    let context = rank.on(Grid::Dense, Axis::Context);
    let (column, parts) = (context.index * tensor + column, context.size * tensor);
    let shape = [BATCH / data, SEQ / parts];
    ([row * shape[0], column * shape[1]], shape)
}

fn part(x: Tensor<3>, rank: &MeshRank, run: &Run) -> Tensor<3> {
    let ([row, column], [rows, columns]) = own_part(rank, run);
    x.narrow(0, row, rows).narrow(1, column, columns)
}

/// The training step, which determines the random numbers.
const STEP: u64 = 3;

/// All tokens of the input, without padding.
fn whole() -> RoutedTokens {
    RoutedTokens::rows([BATCH, SEQ])
}

fn input() -> Tensor<3> {
    wave([BATCH, SEQ, HIDDEN], 0.5)
}

/// Returns the factor of the output in the loss, which is a sum.
fn loss_weight() -> Tensor<3> {
    wave([BATCH, SEQ, HIDDEN], 4.0)
}

/// Sets every parameter to values that are close to one and do not depend on the layout.
struct Fill<'a> {
    table: &'a ParameterTable,
    rank: &'a MeshRank,
    index: usize,
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let entry = &self.table.entries()[self.index];
        self.index += 1;
        let whole: Vec<f64> = values(wave([entry.len()], self.index as f64));
        let part = TensorData::new(entry.part(&whole, self.rank), entry.local_shape(self.rank));
        param.map(|_| Tensor::from_data(part, (&Device::flex(), DType::F64)))
    }
}

impl Run {
    fn on(&self, sizes: Sizes, config: &MoeMlpConfig) -> Outcome {
        let ranks = sizes[1..].iter().product();
        let rank = |rank: crate::comm::Rank| {
            let mut parallel = layout(sizes);
            parallel.ranks_per_node = self.ranks_per_node;
            let sequence_parallel = parallel.sequence_parallel && !self.replicated;
            let parallel = parallel
                .with_sequence_parallel(sequence_parallel)
                .with_context(self.context.unwrap_or(1));
            let ctx = ParallelContext::from_world(&parallel, rank.communicator())?;
            self.rank(&ctx, config)
        };
        let all = World::threads(ranks).unwrap().run(rank).unwrap();
        self.assembled(all)
    }

    fn rank(&self, ctx: &ParallelContext, config: &MoeMlpConfig) -> Result<RankOutcome, AnyError> {
        let device = Device::flex();
        let builder = ModelBuilder::with(ctx, &device, 7, DType::F64).with_fp8(&self.fp8)?;
        let module = config.init(&builder.child("moe"))?;
        let mut model = builder.finish(Wrapper { moe: module })?;
        let rank = ctx.mesh_rank();
        let (table, index) = (&model.table, 0);
        model.module = model.module.map(&mut Fill { table, rank, index });
        let table = model.table.clone();
        let mut ddp = DistributedDataParallel::new(model, ctx)?;
        let ([row, column], [rows, columns]) = own_part(rank, self);
        let own = |x| part(x, rank, self);
        let x = Tensor::<3>::from_inner(own(input())).require_grad();
        let choices = self.choices.as_ref().map(|choices| {
            let k = config.router.experts_per_token;
            let own: Vec<i64> = (row..row + rows)
                .flat_map(|row| (column..column + columns).map(move |column| row * SEQ + column))
                .flat_map(|token| choices[token * k..(token + 1) * k].to_vec())
                .collect();
            ints(&own, [rows * columns, k])
        });
        let step = self.loss_scale.map(|scale| RouterStep::new(scale.into()));
        let counted = rows * SEQ / self.context.unwrap_or(1);
        let of_batch = step.as_ref().map(|step| step.of_micro_batch(counted));
        ddp.position().set(STEP, row as u64);
        let recompute = self.recompute;
        let tokens = self.lengths.map(|lengths| {
            assert!(self.context.is_none(), "a rank has whole samples");
            let of_row = |length: &usize| (0..SEQ).map(|at| at < *length).collect::<Vec<_>>();
            let is_real = lengths[row..row + rows].iter().flat_map(of_row).collect();
            let real = RealTokens::new(is_real, rows);
            RoutedTokens::new([rows, SEQ], TokenPositions::InRows, real)
        });
        let y = ddp.forward(&device, |model| {
            let moe = model.moe.clone();
            let forward = move |x: Tensor<3>| {
                let with = MoeForward {
                    choices: choices.clone(),
                    tokens: tokens.clone(),
                    step: of_batch.as_ref(),
                    nodes: None,
                };
                moe.forward_with(x, with)
            };
            if recompute {
                crate::nn::recompute(x.clone(), forward)
            } else {
                forward(x.clone())
            }
        });
        let weight = own(loss_weight()).mul_scalar(self.factor.unwrap_or(1.0));
        let leaves = ddp.backward_last((y.clone() * Tensor::from_inner(weight)).sum());
        let gradients = ddp.reduce(counted as u64)?;
        ddp.check_replicas()?;
        ddp.fp8().end_step(ctx)?;
        let sums = step.as_ref().map(RouterStep::losses).unwrap_or_default();
        let loads = step.as_ref().map(RouterStep::loads).unwrap_or_default();
        let load = loads.into_values().flat_map(|RankLoad { tokens, pairs }| {
            let mut load = values(tokens.float());
            load.push(pairs as f64);
            load
        });
        Ok(RankOutcome {
            rank: rank.clone(),
            table,
            output: values(y.inner()),
            input_gradient: values(x.grad(&leaves).unwrap()),
            norm: global_norm(&gradients, &ddp)?,
            gradients: ddp
                .full_gradients(&gradients)
                .into_iter()
                .map(values)
                .collect(),
            losses: sums.into_values().map(|sum| values(sum)[0]).collect(),
            load: load.collect(),
            fp8: ddp.fp8().states(),
        })
    }

    fn assembled(&self, all: Vec<RankOutcome>) -> Outcome {
        let whole = |of: &dyn Fn(&RankOutcome) -> Vec<f64>| {
            let mut whole = vec![f64::NAN; BATCH * SEQ * HIDDEN];
            for outcome in &all {
                let ([row, column], [rows, columns]) = own_part(&outcome.rank, self);
                let own = of(outcome);
                for (i, token) in own.chunks(HIDDEN).enumerate() {
                    let at = (row + i / columns) * SEQ + column + i % columns;
                    whole[at * HIDDEN..(at + 1) * HIDDEN].copy_from_slice(token);
                }
                assert_eq!(own.len(), rows * columns * HIDDEN);
            }
            whole
        };
        let table = &all[0].table;
        let parameters = table.entries().iter().enumerate().map(|(index, entry)| {
            let parts = all.iter().map(|outcome| {
                let part = &outcome.gradients[index];
                (outcome.rank.clone(), &part[..])
            });
            let whole: Vec<f64> = entry.assemble(parts.clone());
            for (rank, part) in parts {
                assert_eq!(
                    entry.part(&whole, &rank),
                    part,
                    "replicas of {}",
                    entry.path
                );
            }
            (entry.path.clone(), whole)
        });
        assert!(all.iter().all(|outcome| outcome.norm == all[0].norm));
        assert!(all.iter().all(|outcome| outcome.fp8 == all[0].fp8));
        let data = all[0].rank.on(Grid::Dense, Axis::Data).size;
        let copies = if self.same_samples { data } else { 1 };
        let tokens = (copies * BATCH * SEQ) as f64;
        let losses = (0..all[0].losses.len()).map(|index| {
            let sum: f64 = all.iter().map(|outcome| outcome.losses[index]).sum();
            sum / tokens
        });
        let load =
            (0..all[0].load.len()).map(|index| all.iter().map(|outcome| outcome.load[index]).sum());
        Outcome {
            load: load.collect(),
            fp8: all[0].fp8.clone(),
            output: whole(&|outcome| outcome.output.clone()),
            input_gradient: whole(&|outcome| outcome.input_gradient.clone()),
            norm: all[0].norm,
            losses: losses.collect(),
            parameters: parameters.collect(),
        }
    }
}

#[derive(Module, Debug)]
struct Wrapper {
    moe: MoeMlp,
}

impl Outcome {
    /// Compares all results with `expected`.
    #[track_caller]
    fn assert_near(&self, expected: &Self, what: &str) {
        const TOLERANCE: f64 = 1e-12;
        let near = |of: &str, found: &[f64], expected: &[f64]| {
            // The expected values may all be zero, for example gradients of experts without tokens.
            if expected.iter().all(|x| *x == 0.0) {
                assert_eq!(found, expected, "{what}: {of}");
            } else {
                assert_near(&format!("{what}: {of}"), found, expected, TOLERANCE);
            }
        };
        near("output", &self.output, &expected.output);
        near(
            "input gradient",
            &self.input_gradient,
            &expected.input_gradient,
        );
        let paths = |outcome: &Self| {
            let paths = outcome.parameters.iter().map(|(path, _)| path.clone());
            paths.collect::<Vec<_>>()
        };
        assert_eq!(paths(self), paths(expected), "{what}");
        for ((path, found), (_, expected)) in self.parameters.iter().zip(&expected.parameters) {
            near(path, found, expected);
        }
        near("norm", &[self.norm], &[expected.norm]);
        near("losses", &self.losses, &expected.losses);
    }

    fn gradient(&self, path: &str) -> &[f64] {
        let mut found = self.parameters.iter();
        &found.find(|(found, _)| found.ends_with(path)).unwrap().1
    }
}

/// Checks all layouts against the dense loop.
fn check(config: &MoeMlpConfig, layouts: &[Sizes], what: &str) {
    let expected = Dense::new(config).run(None);
    for sizes in layouts {
        let found = Run::default().on(*sizes, config);
        found.assert_near(&expected, &format!("{what} on {sizes:?}"));
    }
}
