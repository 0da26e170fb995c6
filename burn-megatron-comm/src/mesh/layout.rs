//! Laying a configuration over a world: every check of sizes, and the search for what would fit.

use super::error::{Fault, Fits, Need};
use super::grid::Grid;
use super::split::{divisors, nearest};
use super::{Axis, Mesh, ParallelConfig};

/// How many sizes of one axis a message offers.
const OFFERS: usize = 4;

/// Builds the mesh or finds the first thing wrong with it. Allocates nothing that grows with the
/// world.
pub(super) fn lay_out(config: &ParallelConfig, world: usize) -> Result<Mesh, Fault> {
    for (axis, size) in asked(config) {
        if size == 0 {
            return Err(Fault::ZeroSize { axis });
        }
    }
    if world == 0 {
        return Err(Fault::EmptyWorld);
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

/// Every size that the configuration names.
fn asked(config: &ParallelConfig) -> impl Iterator<Item = (Axis, usize)> {
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

/// The data size of the dense grid, asked for or left over.
fn dense_data(config: &ParallelConfig, world: usize) -> Result<usize, Fault> {
    let mut factors = vec![
        (Axis::Tensor, config.tensor),
        (Axis::Context, config.context),
        (Axis::Pipeline, config.pipeline),
    ];
    let Some(data) = config.data else {
        return left_over(&factors, config.replica_size(), world);
    };
    factors.push((Axis::Data, data));
    match config.world_size() {
        Some(size) if size == world => Ok(data),
        size => Err(product_fault(&factors, size.map(Need::Exactly), world)),
    }
}

/// The data size of the expert grid, which is always what is left over.
fn expert_data(config: &ParallelConfig, world: usize) -> Result<usize, Fault> {
    let factors = [
        (Axis::ExpertTensor, config.expert_tensor_size()),
        (Axis::Expert, config.expert),
        (Axis::Pipeline, config.pipeline),
    ];
    left_over(&factors, config.expert_replica_size(), world)
}

fn left_over(
    factors: &[(Axis, usize)],
    product: Option<usize>,
    world: usize,
) -> Result<usize, Fault> {
    match product {
        Some(product) if world.is_multiple_of(product) => Ok(world / product),
        product => Err(product_fault(factors, product.map(Need::MultipleOf), world)),
    }
}

fn product_fault(factors: &[(Axis, usize)], need: Option<Need>, world: usize) -> Fault {
    let factors: Vec<_> = factors
        .iter()
        .map(|(axis, size)| format!("{axis} {size}"))
        .collect();
    Fault::Product {
        sizes: factors.join(" x "),
        need: need.unwrap_or(Need::Uncountable),
        world,
    }
}

/// An axis that the order leaves out must have size 1 in both grids.
fn check_order(config: &ParallelConfig, data: usize, expert_data: usize) -> Result<(), Fault> {
    let sizes = [
        (Axis::Tensor, config.tensor.max(config.expert_tensor_size())),
        (Axis::Context, config.context),
        (Axis::Expert, config.expert),
        (Axis::Data, data.max(expert_data)),
        (Axis::Pipeline, config.pipeline),
    ];
    for (axis, size) in sizes {
        if size > 1 && !config.order.axes().contains(&axis) {
            return Err(Fault::MissingAxis {
                axis,
                size,
                order: config.order.clone(),
            });
        }
    }
    Ok(())
}

/// The dense grid, without the expert axis, and the expert grid, without the context axis.
fn grids(resolved: &ParallelConfig, data: usize, expert_data: usize) -> (Grid, Grid) {
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
        Grid::new(axes.iter().filter_map(dense)),
        Grid::new(axes.iter().filter_map(expert)),
    )
}

/// A stage must hold the same ranks in both grids, or a layer's experts would sit on another stage.
///
/// That is so where the pipeline counts slowest. Elsewhere Megatron asks for equal data sizes too.
fn check_pipelines(config: &ParallelConfig, dense: &Grid, expert: &Grid) -> Result<(), Fault> {
    let stride = |grid: &Grid| grid.stride(Axis::Pipeline);
    let data = |grid: &Grid| grid.size(Axis::Data);
    let last = [dense, expert]
        .iter()
        .all(|grid| grid.slowest() == Some(Axis::Pipeline));
    let agree = stride(dense) == stride(expert) && data(dense) == data(expert);
    if config.pipeline == 1 || last || agree {
        return Ok(());
    }
    Err(Fault::Pipelines {
        order: config.order.clone(),
        dense_data: data(dense),
        dense_stride: stride(dense),
        expert_data: data(expert),
        expert_stride: stride(expert),
    })
}

/// Changes of one thing that turn a faulty configuration into a mesh. Each was tried.
pub(super) fn what_fits(config: &ParallelConfig, world: usize) -> Fits {
    let fits = |config: &ParallelConfig| lay_out(config, world).is_ok();
    let order = config.order.pipeline_last();
    let candidates = divisors(world);
    let sizes = Axis::ALL.into_iter().filter_map(|axis| {
        let mut fitting = candidates.clone();
        fitting.retain(|size| fits(&config.clone().with_size(axis, *size)));
        (!fitting.is_empty()).then(|| (axis, nearest(fitting, size_of(config, axis), OFFERS)))
    });
    Fits {
        worlds: near_worlds(config, world)
            .into_iter()
            .filter(|world| lay_out(config, *world).is_ok())
            .collect(),
        sizes: sizes.collect(),
        order: fits(&config.clone().with_order(order.clone())).then_some(order),
    }
}

/// The size an axis was asked to have; 1 where it was left open.
fn size_of(config: &ParallelConfig, axis: Axis) -> usize {
    asked(config)
        .find(|(asked, _)| *asked == axis)
        .map_or(1, |(_, size)| size)
}

/// The worlds nearest to `world` whose size suits both grids.
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

/// `None` where a number is zero or the multiple is more than a `usize` holds.
fn least_common_multiple(a: usize, b: usize) -> Option<usize> {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1))
        .checked_mul(b)
        .filter(|multiple| *multiple > 0)
}
