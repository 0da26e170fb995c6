//! Builds a mesh from a configuration: all checks of sizes, and the search for valid alternatives.

use super::error::{MeshFault, RequiredRanks, Suggestions};
use super::rank_grid::RankGrid;
use super::split::{divisors, nearest};
use super::{Axis, Grid, Mesh, ParallelConfig};

/// The number of suggested sizes of an axis.
const MAX_SUGGESTED: usize = 4;

/// Builds the mesh, or returns the first fault. Its memory use does not grow with the world.
pub(super) fn build(config: &ParallelConfig, world: usize) -> Result<Mesh, MeshFault> {
    for (axis, size) in requested(config) {
        if size == 0 {
            return Err(MeshFault::ZeroSize { axis });
        }
    }
    if world == 0 {
        return Err(MeshFault::EmptyWorld);
    }
    let data = dense_data(config, world)?;
    let expert_data = expert_data(config, world)?;
    let resolved = ParallelConfig {
        data: Some(data),
        expert_tensor: Some(config.expert_tensor_size()),
        order: config.order.completed(),
        ..config.clone()
    };
    check_order(config, data, expert_data)?;
    let (dense, expert) = grids(&resolved, data, expert_data);
    check_pipelines(config, &dense, &expert)?;
    Ok(Mesh {
        config: resolved,
        world,
        dense,
        expert,
    })
}

/// Returns every size that is set in the configuration.
fn requested(config: &ParallelConfig) -> impl Iterator<Item = (Axis, usize)> {
    let data = config.data.map(|size| (Axis::Data, size));
    let expert_tensor = config.expert_tensor.map(|size| (Axis::ExpertTensor, size));
    [
        (Axis::Tensor, config.tensor),
        (Axis::Context, config.context),
        (Axis::Pipeline, config.pipeline),
        (Axis::Expert, config.expert),
    ]
    .into_iter()
    .chain(data)
    .chain(expert_tensor)
}

/// Returns the data size of the dense grid, as requested or derived.
fn dense_data(config: &ParallelConfig, world: usize) -> Result<usize, MeshFault> {
    let mut factors = vec![
        (Axis::Tensor, config.tensor),
        (Axis::Context, config.context),
        (Axis::Pipeline, config.pipeline),
    ];
    let Some(data) = config.data else {
        return derived_size(&factors, config.replica_size(), world);
    };
    factors.push((Axis::Data, data));
    match config.world_size() {
        Some(size) if size == world => Ok(data),
        size => Err(product_fault(
            &factors,
            size.map(RequiredRanks::Exactly),
            world,
        )),
    }
}

/// Returns the data size of the expert grid, which is always derived.
fn expert_data(config: &ParallelConfig, world: usize) -> Result<usize, MeshFault> {
    let factors = [
        (Axis::ExpertTensor, config.expert_tensor_size()),
        (Axis::Expert, config.expert),
        (Axis::Pipeline, config.pipeline),
    ];
    derived_size(&factors, config.expert_replica_size(), world)
}

fn derived_size(
    factors: &[(Axis, usize)],
    product: Option<usize>,
    world: usize,
) -> Result<usize, MeshFault> {
    match product {
        Some(product) if world.is_multiple_of(product) => Ok(world / product),
        product => Err(product_fault(
            factors,
            product.map(RequiredRanks::MultipleOf),
            world,
        )),
    }
}

fn product_fault(
    factors: &[(Axis, usize)],
    need: Option<RequiredRanks>,
    world: usize,
) -> MeshFault {
    let factors: Vec<_> = factors
        .iter()
        .map(|(axis, size)| format!("{axis} {size}"))
        .collect();
    MeshFault::Product {
        sizes: factors.join(" x "),
        need: need.unwrap_or(RequiredRanks::Uncountable),
        world,
    }
}

/// Checks that each axis that the order omits has size 1 in both grids.
fn check_order(config: &ParallelConfig, data: usize, expert_data: usize) -> Result<(), MeshFault> {
    let sizes = [
        (Axis::Tensor, config.tensor.max(config.expert_tensor_size())),
        (Axis::Context, config.context),
        (Axis::Expert, config.expert),
        (Axis::Data, data.max(expert_data)),
        (Axis::Pipeline, config.pipeline),
    ];
    for (axis, size) in sizes {
        if size > 1 && !config.order.axes().contains(&axis) {
            return Err(MeshFault::MissingAxis {
                axis,
                size,
                order: config.order.clone(),
            });
        }
    }
    Ok(())
}

/// Builds the dense grid, without the expert axis, and the expert grid, without the context axis.
fn grids(resolved: &ParallelConfig, data: usize, expert_data: usize) -> (RankGrid, RankGrid) {
    let dense = |axis: &Axis| match axis {
        Axis::Tensor => Some((Axis::Tensor, resolved.tensor)),
        Axis::Context => Some((Axis::Context, resolved.context)),
        Axis::Data => Some((Axis::Data, data)),
        Axis::Pipeline => Some((Axis::Pipeline, resolved.pipeline)),
        Axis::Expert | Axis::ExpertTensor => None,
    };
    let expert = |axis: &Axis| match axis {
        Axis::Tensor => Some((Axis::ExpertTensor, resolved.expert_tensor_size())),
        Axis::Expert => Some((Axis::Expert, resolved.expert)),
        Axis::Data => Some((Axis::Data, expert_data)),
        Axis::Pipeline => Some((Axis::Pipeline, resolved.pipeline)),
        Axis::Context | Axis::ExpertTensor => None,
    };
    let axes = resolved.order.axes();
    (
        RankGrid::new(Grid::Dense, axes.iter().filter_map(dense)),
        RankGrid::new(Grid::Expert, axes.iter().filter_map(expert)),
    )
}

/// Checks that a stage has the same ranks in both grids, so that a layer's experts are on its stage.
///
/// This is true if the pipeline varies slowest. Otherwise the data sizes must be equal too, as in Megatron-LM.
fn check_pipelines(
    config: &ParallelConfig,
    dense: &RankGrid,
    expert: &RankGrid,
) -> Result<(), MeshFault> {
    let stride = |grid: &RankGrid| grid.stride(Axis::Pipeline);
    let data = |grid: &RankGrid| grid.size(Axis::Data);
    let last = [dense, expert]
        .iter()
        .all(|grid| grid.slowest() == Some(Axis::Pipeline));
    let agree = stride(dense) == stride(expert) && data(dense) == data(expert);
    if config.pipeline == 1 || last || agree {
        return Ok(());
    }
    Err(MeshFault::Pipelines {
        order: config.order.clone(),
        dense_data: data(dense),
        dense_stride: stride(dense),
        expert_data: data(expert),
        expert_stride: stride(expert),
    })
}

/// Returns single changes that make an invalid configuration valid. Each change is tested.
pub(super) fn suggestions(config: &ParallelConfig, world: usize) -> Suggestions {
    let fits = |config: &ParallelConfig| build(config, world).is_ok();
    let order = config.order.pipeline_last();
    let candidates = divisors(world);
    let sizes = Axis::ALL.into_iter().filter_map(|axis| {
        let mut fitting = candidates.clone();
        fitting.retain(|size| fits(&config.clone().with_size(axis, *size)));
        (!fitting.is_empty())
            .then(|| (axis, nearest(fitting, size_of(config, axis), MAX_SUGGESTED)))
    });
    Suggestions {
        worlds: near_worlds(config, world)
            .into_iter()
            .filter(|world| build(config, *world).is_ok())
            .collect(),
        sizes: sizes.collect(),
        order: fits(&config.clone().with_order(order.clone())).then_some(order),
    }
}

/// Returns the requested size of an axis, or 1 if it is not set.
fn size_of(config: &ParallelConfig, axis: Axis) -> usize {
    requested(config)
        .find(|(requested, _)| *requested == axis)
        .map_or(1, |(_, size)| size)
}

/// Returns the world sizes nearest to `world` that match both grids.
fn near_worlds(config: &ParallelConfig, world: usize) -> Vec<usize> {
    if config.data.is_some() {
        return config.world_size().into_iter().collect();
    }
    let unit = config.replica_size().zip(config.expert_replica_size());
    match unit.and_then(|(dense, expert)| least_common_multiple(dense, expert)) {
        None => Vec::new(),
        Some(unit) => {
            let below = world / unit * unit;
            [Some(below), below.checked_add(unit)]
                .into_iter()
                .flatten()
                .collect()
        }
    }
}

/// Returns the least common multiple. Returns `None` if a number is zero or the multiple overflows.
fn least_common_multiple(a: usize, b: usize) -> Option<usize> {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1))
        .checked_mul(b)
        .filter(|multiple| *multiple > 0)
}
