//! Trains two toy parameters of the dense and the expert grid on 8 ranks (expert 2, context 2, expert-data 4).
//! Checkpoints are saved and loaded by other meshes, and results are compared with one rank.
//!
//! A rank of the dense grid reads two of 16 tokens. Its experts compute the tokens of all ranks of its expert group, as
//! after an all-to-all. The loss is the sum over all tokens of the squares of `x router - y`, and of the squares of
//! `z expert - w` for each expert.

use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::save::CheckpointContent;
use super::{SaveConfig, Saver};
use burn_megatron::checkpoint::state::{BucketReader, FIRST, SECOND, Snapshot};
use burn_megatron::checkpoint::{Checkpoint, CheckpointFolder, CheckpointMetadata, read_buckets};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel, ZeroStage,
};
use burn_megatron::mesh::{Axis, Grid, Mesh, ParallelConfig};
use burn_megatron::nn::{BuildError, Init, ModelBuilder, ParallelModule, ParameterSpec, Placement};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, count_zeros, global_norm};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const TOKENS: usize = 16;
const EXPERTS: usize = 4;
const STEPS: usize = 4;
/// Smaller than every gradient norm of the run.
const CLIP: f64 = 0.5;

#[derive(Module, Debug)]
struct Toy {
    /// `[3, 2]`, replicated.
    router: Param<Tensor<2>>,
    /// `[EXPERTS, 5]`, split over the expert axis.
    experts: Param<Tensor<2>>,
}

fn toy(ctx: &ParallelContext) -> Result<ParallelModule<Toy>, BuildError> {
    let builder = ModelBuilder::with(ctx, &Device::flex(), 7, DType::F64);
    let init = Init::Normal(1.0);
    let ranks = ctx.mesh().size(Grid::Expert, Axis::Expert);
    let experts = ParameterSpec::new([EXPERTS, 5], init)
        .in_grid(Grid::Expert)
        .with_placement(Axis::Expert, Placement::split(0, EXPERTS, ranks));
    let module = Toy {
        router: builder.parameter("router", ParameterSpec::new([3, 2], init)),
        experts: builder.parameter("experts", experts),
    };
    builder.finish(module)
}

/// Returns feature `index` of a token.
fn feature(token: usize, index: usize) -> f64 {
    (((token + 1) * (index + 3) * 37) % 19) as f64 / 7.0 - 1.0
}

/// Returns `[tokens, width]` features, starting with feature `first`.
fn features(tokens: &[usize], first: usize, width: usize) -> Tensor<2> {
    let row = |token: &usize| {
        (first..first + width)
            .map(|index| feature(*token, index))
            .collect()
    };
    let values: Vec<f64> = tokens
        .iter()
        .flat_map(|token| -> Vec<f64> { row(token) })
        .collect();
    let options = (&Device::flex().autodiff(), DType::F64);
    Tensor::from_data(TensorData::new(values, [tokens.len(), width]), options)
}

/// Returns the tokens that a rank reads.
fn own_tokens(ctx: &ParallelContext, rank: usize) -> Vec<usize> {
    let own = ctx
        .mesh_rank()
        .with_rank(rank)
        .among(Grid::Dense, Grid::Dense.data_axes());
    (0..TOKENS)
        .filter(|token| token % own.size == own.index)
        .collect()
}

fn loss(toy: &Toy, ctx: &ParallelContext) -> Tensor<1> {
    let own = own_tokens(ctx, ctx.rank());
    let dense = features(&own, 0, 3).matmul(toy.router.val()) - features(&own, 10, 2);
    let expert = ctx.mesh_rank().on(Grid::Expert, Axis::Expert);
    let peers = ctx.mesh().members(Grid::Expert, Axis::Expert, ctx.rank());
    let sent: Vec<usize> = peers
        .into_iter()
        .flat_map(|rank| own_tokens(ctx, rank))
        .collect();
    let local = EXPERTS / expert.size;
    let targets = features(&sent, 30 + expert.index * local, local);
    let routed = features(&sent, 20, 5).matmul(toy.experts.val().transpose()) - targets;
    dense.square().sum() + routed.square().sum()
}

/// The results of some steps on a rank.
#[derive(Clone, Debug, Default)]
struct Seen {
    norms: Vec<f64>,
    zeros: Vec<u64>,
    /// The weights of the complete model: router, then experts.
    weights: Vec<f64>,
}

/// A run of some steps, which may load and save a checkpoint.
struct Run<'a> {
    config: DataParallelConfig,
    steps: std::ops::Range<usize>,
    from: Option<&'a Path>,
    into: Option<&'a Path>,
}

fn run<'a>(
    config: &DataParallelConfig,
    steps: std::ops::Range<usize>,
    from: Option<&'a Path>,
    into: Option<&'a Path>,
) -> Run<'a> {
    Run {
        config: config.clone(),
        steps,
        from,
        into,
    }
}

fn train(layout: &ParallelConfig, ranks: usize, run: &Run) -> Vec<Seen> {
    let rank = |rank: burn_megatron::comm::Rank| {
        let ctx = ParallelContext::new(layout, &rank)?;
        let mut ddp = DistributedDataParallel::with(toy(&ctx)?, &ctx, &run.config)?;
        let adam = AdamWConfig {
            weight_decay: 0.1,
            epsilon: 1e-3,
            ..AdamWConfig::default()
        };
        let mut optimizer = ParallelAdamW::new(&adam, &ddp)?;
        if let Some(from) = run.from {
            load(&mut ddp, &mut optimizer, from, run.steps.start)?;
        }
        let mut seen = Seen::default();
        for _ in run.steps.clone() {
            let sum = ddp.forward(&Device::flex(), |toy| loss(toy, &ctx));
            ddp.backward_last(sum);
            let mut gradients = ddp.reduce(own_tokens(&ctx, ctx.rank()).len() as u64)?;
            assert_eq!(gradients.tokens, TOKENS as u64);
            let norm = global_norm(&gradients, &ddp)?;
            seen.norms.push(norm);
            seen.zeros.push(count_zeros(&gradients, &ddp)?);
            gradients.scale(CLIP / norm);
            optimizer.step(0.01, &mut ddp, gradients);
        }
        ddp.check_replicas()?;
        if let Some(into) = run.into {
            save(&ddp, &optimizer, into, run.steps.end)?;
        }
        seen.weights = whole(&ddp, &ctx)?;
        Ok::<_, AnyError>(seen)
    };
    World::threads(ranks).unwrap().run(rank).unwrap()
}

/// Returns the weights of the complete model, assembled from the ranks of the expert group.
fn whole(ddp: &DistributedDataParallel<Toy>, ctx: &ParallelContext) -> Result<Vec<f64>, AnyError> {
    let comm = ctx.group(Grid::Expert, Axis::Expert)?;
    let mut weights = vec![];
    for (entry, own) in ddp.table().entries().iter().zip(ddp.parameters()) {
        let own = own
            .into_data()
            .try_into_vec::<f64>()
            .map_err(|e| format!("{e:?}"))?;
        let ranks = comm
            .group()
            .ranks()
            .iter()
            .map(|rank| ctx.mesh_rank().with_rank(*rank));
        let burn_megatron::comm::Buffer::F64(all) = comm.all_gather(own.clone().into())? else {
            unreachable!("a collective of f64 returned another type")
        };
        weights.extend(entry.assemble(ranks.zip(all.chunks(own.len()))));
    }
    Ok(weights)
}

fn save(
    ddp: &DistributedDataParallel<Toy>,
    optimizer: &ParallelAdamW,
    into: &Path,
    step: usize,
) -> Result<(), AnyError> {
    let content = CheckpointContent {
        snapshot: Snapshot::new(ddp, optimizer)?,
        objects: vec![],
        about: CheckpointMetadata {
            step: step as u64,
            samples: 0,
            layout: String::new(),
            config: serde_json::Value::Null,
            state: serde_json::Value::Null,
        },
    };
    let mut saver = Saver::open(SaveConfig::into_folder(into), ddp.groups())?;
    saver.save(Ok(content))?;
    Ok(())
}

fn load(
    ddp: &mut DistributedDataParallel<Toy>,
    optimizer: &mut ParallelAdamW,
    from: &Path,
    step: usize,
) -> Result<(), AnyError> {
    let checkpoint: Checkpoint = CheckpointFolder::open(from)?
        .latest()?
        .ok_or("no checkpoint")?;
    let reader = BucketReader {
        source: &checkpoint,
        entries: ddp.table().entries(),
        rank: ddp.groups().mesh_rank(),
    };
    for (bucket, shard) in ddp.shards().iter().enumerate() {
        let [first, second] = optimizer.moments(bucket, shard);
        let first = reader.bucket(FIRST, &shard.slices, &first)?;
        let second = reader.bucket(SECOND, &shard.slices, &second)?;
        optimizer.restore_moments(bucket, [first, second], step as u64);
    }
    let buckets = read_buckets(ddp, &checkpoint)?;
    ddp.replace_masters(buckets);
    Ok(())
}

fn assert_close(found: &Seen, expected: &Seen, what: &str) {
    assert_eq!(found.zeros, expected.zeros, "{what}");
    let pairs = found.norms.iter().zip(&expected.norms);
    for (found, expected) in pairs.chain(found.weights.iter().zip(&expected.weights)) {
        let error = (found - expected).abs() / expected.abs().max(1.0);
        assert!(error < 1e-13, "{what}: {found} is not {expected}");
    }
    assert_eq!(found.weights.len(), 3 * 2 + EXPERTS * 5, "{what}");
}

/// Returns a layout with context 2, expert 2, and data 4 in both grids.
fn both_grids() -> ParallelConfig {
    ParallelConfig::new().with_context(2).with_expert(2)
}

/// Returns every way to shard the 8 ranks of [`both_grids`].
fn shardings() -> Vec<(String, DataParallelConfig)> {
    let config = |stage, hsdp| DataParallelConfig {
        zero_stage: ZeroStage::try_from(stage).unwrap(),
        hsdp,
        ..DataParallelConfig::default()
    };
    let cases = [
        (0, None),
        (1, None),
        (2, None),
        (3, None),
        (1, Some(2)),
        (3, Some(4)),
    ];
    let named = |(stage, hsdp)| (format!("ZeRO-{stage}, hsdp {hsdp:?}"), config(stage, hsdp));
    cases.map(named).into()
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("bm-grids-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn parameters_of_both_grids_train_and_reshard_as_on_one_rank() {
    let one = ParallelConfig::new();
    let plain = DataParallelConfig::default();
    let expected = train(&one, 1, &run(&plain, 0..STEPS, None, None)).remove(0);
    let half = STEPS / 2;
    let rest = Seen {
        norms: expected.norms[half..].to_vec(),
        zeros: expected.zeros[half..].to_vec(),
        ..expected.clone()
    };
    for (number, (name, config)) in shardings().into_iter().enumerate() {
        let found = train(&both_grids(), 8, &run(&config, 0..STEPS, None, None));
        for (rank, found) in found.iter().enumerate() {
            assert_close(found, &expected, &format!("{name}, rank {rank}"));
        }
        let saved = folder(&number.to_string());
        train(&both_grids(), 8, &run(&config, 0..half, None, Some(&saved)));
        let others = [
            ("one rank", one.clone(), 1, plain.clone()),
            ("another sharding", both_grids(), 8, plain.clone()),
            ("expert 4", one.clone().with_expert(4), 4, config.clone()),
            (
                "context 4",
                one.clone().with_context(4).with_expert(1),
                8,
                plain.clone(),
            ),
        ];
        for (mesh, layout, ranks, config) in others {
            // With expert 4, the expert grid has a single replica, so it cannot be divided into shard groups.
            if mesh == "expert 4" && config.hsdp.is_some() {
                continue;
            }
            let found = train(
                &layout,
                ranks,
                &run(&config, half..STEPS, Some(&saved), None),
            );
            assert_close(&found[0], &rest, &format!("{name}, loaded by {mesh}"));
        }
        std::fs::remove_dir_all(saved).unwrap();
    }
}

/// Returns the error of each rank after rank 5 has changed a parameter.
fn replica_errors(path: &str) -> Vec<Option<String>> {
    let rank = |rank: burn_megatron::comm::Rank| {
        let ctx = ParallelContext::from_mesh(Mesh::new(&both_grids(), 8)?, rank.communicator())?;
        let mut ddp = DistributedDataParallel::new(toy(&ctx)?, &ctx)?;
        ddp.check_replicas()?;
        let change = |param: Param<Tensor<2>>, of: &str| {
            let by = if ctx.rank() == 5 && of == path {
                1e-9
            } else {
                0.0
            };
            param.map(|value| value + by)
        };
        ddp.update(|toy| Toy {
            router: change(toy.router, "router"),
            experts: change(toy.experts, "experts"),
        });
        match ddp.check_replicas() {
            Ok(()) => Ok::<_, AnyError>(None),
            Err(error @ DataParallelError::ReplicaMismatch { .. }) => Ok(Some(error.to_string())),
            Err(error) => Err(error.into()),
        }
    };
    World::threads(8).unwrap().run(rank).unwrap()
}

#[test]
fn a_replica_that_differs_is_found_by_the_ranks_that_hold_one() {
    for (path, holders) in [
        ("router", vec![0, 1, 2, 3, 4, 5, 6, 7]),
        ("experts", vec![1, 3, 5, 7]),
    ] {
        for (rank, error) in replica_errors(path).into_iter().enumerate() {
            let names_it = error.as_ref().is_some_and(|error| error.contains(path));
            assert_eq!(
                names_it,
                holders.contains(&rank),
                "{path}, rank {rank}: {error:?}"
            );
        }
    }
}
