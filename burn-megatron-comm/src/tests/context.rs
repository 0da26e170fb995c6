//! Tests of process groups by grid and axes: names, sharing, participating ranks, and errors of missing or different
//! calls.

use std::sync::Arc;

use crate::mesh::Axis::{Context, Data, Expert, ExpertTensor, Pipeline, Tensor};
use crate::mesh::{Axis, AxisSet, Coordinates, Grid, Mesh, ParallelConfig};
use crate::*;

/// Runs `f` on every rank of a mesh.
fn over<T: Send>(
    config: &ParallelConfig,
    ranks: usize,
    f: impl Fn(&ParallelContext) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, WorldError> {
    let mesh = Mesh::new(config, ranks).unwrap();
    World::threads(ranks).unwrap().run(|rank| {
        f(&ParallelContext::from_mesh(
            mesh.clone(),
            rank.communicator(),
        )?)
    })
}

fn config() -> ParallelConfig {
    ParallelConfig::new()
}

fn described(comm: &Arc<dyn Communicator>) -> String {
    comm.group().to_string()
}

#[test]
fn groups_are_named_by_their_axes_and_have_their_ranks() {
    let config = config().with_tensor(2).with_context(2).with_expert(2);
    let groups = over(&config, 8, |ctx| {
        let group = |grid, axes: &[Axis]| ctx.group(grid, axes.to_vec()).map(|c| described(&c));
        Ok([
            group(Grid::Dense, &[Context])?,
            group(Grid::Dense, &[Context, Tensor])?,
            group(Grid::Dense, &[Data, Context])?,
            group(Grid::Dense, &[Tensor])?,
            group(Grid::Dense, &[Data])?,
            group(Grid::Dense, &[Tensor, Context, Data])?,
            group(Grid::Expert, &[ExpertTensor, Expert])?,
            group(Grid::Expert, &[Expert, Data])?,
        ])
    });
    assert_eq!(
        groups.unwrap()[5],
        [
            "context [5, 7]",
            "tensor x context [4, 5, 6, 7]",
            "context x data [1, 3, 5, 7]",
            "tensor [4, 5]",
            "data [1, 5]",
            "stage [0, 1, 2, 3, 4, 5, 6, 7]",
            // The same ranks as tensor x context, but for expert tokens.
            "expert: expert x expert-tensor [4, 5, 6, 7]",
            // The same group as context x data.
            "context x data [1, 3, 5, 7]",
        ]
    );
}

#[test]
fn data_of_the_expert_grid_is_a_group_of_its_own_where_its_ranks_differ() {
    let config = config().with_expert(2);
    let data_of = |ctx: &ParallelContext| {
        let experts = ctx.group(Grid::Expert, Data)?;
        Ok((described(ctx.data()), described(&experts)))
    };
    let groups = over(&config, 4, data_of).unwrap();
    assert_eq!(
        groups[3],
        ("data [0, 1, 2, 3]".into(), "expert: data [1, 3]".into())
    );
    // Here, two experts replace two tensor slices, and the replicas are the same.
    let config = config.with_tensor(2).with_expert_tensor(1);
    let groups = over(&config, 8, data_of).unwrap();
    assert_eq!(
        groups[3],
        ("data [1, 3, 5, 7]".into(), "data [1, 3, 5, 7]".into())
    );
}

/// Layouts without context and expert parallelism use only the standard communicators.
#[test]
fn axes_of_size_one_do_not_count() {
    for (tensor, data, pipeline) in [(2, 2, 2), (1, 4, 1), (4, 1, 1), (1, 2, 2)] {
        let config = config().with_tensor(tensor).with_pipeline(pipeline);
        let shared = over(&config, tensor * data * pipeline, |ctx| {
            let same = |grid, axes: AxisSet, comm: &Arc<dyn Communicator>| {
                let group = ctx.group(grid, axes)?;
                Ok::<_, CommError>(Arc::ptr_eq(&group, comm) || group.size() == 1)
            };
            Ok([
                same(Grid::Dense, Grid::Dense.data_axes(), ctx.data())?,
                same(Grid::Expert, Grid::Expert.data_axes(), ctx.data())?,
                same(Grid::Dense, Grid::Dense.model_axes(), ctx.tensor())?,
                same(Grid::Expert, Grid::Expert.model_axes(), ctx.tensor())?,
                same(Grid::Dense, Pipeline.into(), ctx.pipeline())?,
            ])
        });
        assert!(shared.unwrap().iter().all(|all| *all == [true; 5]));
    }
}

#[test]
fn a_group_is_made_once_for_all_clones() {
    let config = config().with_tensor(2).with_context(2);
    let shared = over(&config, 8, |ctx| {
        let clone = ctx.clone();
        let first = ctx.group(Grid::Dense, [Tensor, Context])?;
        // The calls of a second split would not match the calls of the other ranks.
        if ctx.rank() % 2 == 0 {
            assert!(Arc::ptr_eq(
                &clone.group(Grid::Dense, [Context, Tensor])?,
                &first
            ));
        }
        // There is no axis with several ranks. The group has one rank and needs no other rank.
        let single = clone.group(Grid::Dense, Pipeline)?;
        let none = clone.group(Grid::Dense, AxisSet::EMPTY)?;
        assert_eq!((single.size(), none.size()), (1, 1));
        assert_eq!(none.group().world_rank(), ctx.rank());
        first.barrier()
    });
    shared.unwrap();
}

#[test]
fn one_stage_makes_a_group_without_the_others() {
    let config = config().with_context(2).with_pipeline(2);
    let groups = over(&config, 8, |ctx| {
        if ctx.coordinates().pipeline == 0 {
            return Ok(None);
        }
        Ok(Some(described(&ctx.group(Grid::Dense, Context)?)))
    });
    let groups = groups.unwrap();
    assert_eq!(groups[..4], [None, None, None, None]);
    assert_eq!(groups[6].as_deref(), Some("context [6, 7]"));

    // With the pipeline axis, all ranks of the world must call.
    let groups = over(&config, 8, |ctx| {
        Ok(described(&ctx.group(Grid::Dense, [Context, Pipeline])?))
    });
    insta::assert_snapshot!(groups.unwrap()[2], @"context x pipeline [2, 3, 6, 7]");
}

#[test]
fn a_missing_rank_and_another_group_are_named() {
    let config = config()
        .with_tensor(2)
        .with_context(2)
        .with_data(2)
        .with_pipeline(2);
    let axes = [Context, Data];
    let group = |ctx: &ParallelContext| ctx.group(Grid::Dense, axes).map(drop);
    let missing = over(&config, 16, |ctx| match ctx.rank() {
        14 => Ok(()),
        8..16 => group(ctx),
        _ => Ok(()),
    });
    let said = missing.unwrap_err().to_string();
    assert!(said.contains("rank 14 has returned"), "{said}");
    assert!(
        said.contains("over stage [8, 9, 10, 11, 12, 13, 14, 15]"),
        "{said}"
    );

    let config = config.with_pipeline(1);
    let other = over(&config, 8, |ctx| match ctx.rank() {
        3 => ctx.group(Grid::Dense, [Tensor, Context]).map(drop),
        _ => group(ctx),
    });
    let said = other.unwrap_err().to_string();
    assert!(
        said.contains("context x data") && said.contains("tensor x context"),
        "{said}"
    );
    assert!(said.contains("rank 3"), "{said}");
}

#[test]
fn an_axis_of_the_other_grid_is_an_error() {
    let error = ParallelContext::single().group(Grid::Dense, [Tensor, Expert]);
    let said = error.unwrap_err().to_string();
    assert!(
        said.contains(
            "invalid axis expert: expected axes of the dense grid, which has tensor x context x data x pipeline"
        ),
        "{said}"
    );
}

#[test]
fn a_replaced_group_is_what_is_returned() {
    let wrapped = |name: &str| -> Arc<dyn Communicator> { Arc::new(SingleRank::new(name)) };
    let mesh = Mesh::new(&config().with_tensor(2).with_context(2), 8).unwrap();
    let rank = mesh.rank_at(Coordinates::default());
    let plain = ParallelContext::offline(mesh, rank).unwrap();
    let ctx = plain
        .clone()
        .with_group(Grid::Dense, Context, wrapped("other"))
        .with_data(wrapped("recorded"));
    let name = |ctx: &ParallelContext, axis: Axis| {
        ctx.group(Grid::Dense, axis)
            .unwrap()
            .group()
            .name()
            .to_string()
    };
    assert_eq!(
        (name(&ctx, Context), name(&ctx, Data)),
        ("other".into(), "recorded".into())
    );
    assert_eq!(ctx.data().group().name(), "recorded");
    assert_eq!(
        (name(&plain, Context), name(&plain, Data)),
        ("context".into(), "data".into())
    );
}

#[test]
fn sections_of_an_axis_have_subgroups() {
    let config = config().with_tensor(4).with_context(2);
    let groups = over(&config, 8, |ctx| {
        let pairs = ctx.subgroups(Grid::Dense, Tensor, 2)?;
        Ok(described(&pairs))
    });
    assert_eq!(groups.unwrap()[6], "tensor/2 [6, 7]");
}
