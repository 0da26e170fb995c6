//! Errors of a mesh, with the values that would be valid.

use std::fmt;

use super::split::listed;
use super::{Axis, AxisOrder, LayoutError};

/// Why a mesh, an order or a split was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// The configuration does not match the world.
    #[error("{fault}; what fits: {fits}")]
    InvalidLayout {
        /// The first fault.
        fault: MeshFault,
        /// Changes that would be valid.
        fits: Box<Suggestions>,
    },
    /// A setting contradicts another one, or has no effect.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A name in an [`AxisOrder`] is not an axis.
    #[error("invalid axis \"{name}\" in the order \"{order}\": expected tp, cp, ep, dp or pp")]
    UnknownAxis {
        /// The name as given.
        name: String,
        /// The whole order.
        order: String,
    },
    /// An [`AxisOrder`] names an axis twice.
    #[error("duplicate axis {} in the order \"{order}\": expected each axis once", axis.abbreviation())]
    DuplicateAxis {
        /// The repeated axis.
        axis: Axis,
        /// The whole order.
        order: String,
    },
    /// A number of items is not divisible by the size of an axis.
    #[error("{what} {size} cannot be split over {axis} = {parts}; {} can", listed(fits, 1, *size))]
    Uneven {
        /// The name of the items.
        what: String,
        /// The number of items.
        size: usize,
        /// The axis.
        axis: Axis,
        /// The size of that axis.
        parts: usize,
        /// Sizes of the axis that divide `size`; the nearest ones if there are many.
        fits: Vec<usize>,
    },
    /// The samples of a rank are not a multiple of the micro-batch.
    #[error(
        "{samples} samples over data = {data} are {share} per rank, not a multiple of the micro-batch size \
         {micro_batch}: expected {}", listed(fits, 1, *share)
    )]
    MicroBatch {
        /// Samples of a step.
        samples: usize,
        /// Size of the data axis.
        data: usize,
        /// Samples of a rank.
        share: usize,
        /// Samples of a micro-batch.
        micro_batch: usize,
        /// Sizes that divide the samples of a rank; the nearest ones if there are many.
        fits: Vec<usize>,
    },
    /// There are no items to split.
    #[error(
        "{what} 0 cannot be split over {axis} = {parts}; a multiple of {} can",
        (*parts).max(1)
    )]
    NothingToSplit {
        /// The name of the items.
        what: String,
        /// The axis.
        axis: Axis,
        /// The size of that axis.
        parts: usize,
    },
}

/// The first fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshFault {
    /// The world has no ranks.
    #[error("the world has 0 ranks")]
    EmptyWorld,
    /// The size of an axis is 0. An axis that is not used has size 1.
    #[error("invalid {axis} = 0: expected at least 1")]
    ZeroSize {
        /// The axis.
        axis: Axis,
    },
    /// The product of the sizes of one grid does not match the world.
    #[error("{sizes} needs {need}, the world has {world}")]
    Product {
        /// The axes and their sizes, as in `tensor 2 x context 1 x pipeline 3`.
        sizes: String,
        /// The required number of ranks.
        need: RequiredRanks,
        /// The number of ranks of the world.
        world: usize,
    },
    /// The order does not contain an axis of more than one rank.
    #[error(
        "the order {order} leaves out {}, but {axis} = {size} in one of the grids",
        axis.abbreviation()
    )]
    MissingAxis {
        /// The axis. Tensor stands for expert-tensor as well, as it does in an order.
        axis: Axis,
        /// The larger one of its sizes in the two grids.
        size: usize,
        /// The order.
        order: AxisOrder,
    },
    /// The pipelines of the dense and the expert grid are not the same ranks, or the order does not end with
    /// the pipeline and the data sizes differ.
    #[error(
        "with the order {order} the pipelines of the two grids do not line up: \
         data {dense_data} and pipeline stride {dense_stride} in the dense grid, \
         data {expert_data} and pipeline stride {expert_stride} in the expert grid"
    )]
    Pipelines {
        /// The order.
        order: AxisOrder,
        /// The data size of the dense grid.
        dense_data: usize,
        /// The stride of the pipeline axis in the dense grid, in ranks.
        dense_stride: usize,
        /// The data size of the expert grid.
        expert_data: usize,
        /// The stride of the pipeline axis in the expert grid, in ranks.
        expert_stride: usize,
    },
}

/// The number of ranks that a grid requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredRanks {
    /// Exactly this many.
    Exactly(usize),
    /// A multiple of this many.
    MultipleOf(usize),
    /// More than a `usize` holds.
    Uncountable,
}

impl fmt::Display for RequiredRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequiredRanks::Exactly(ranks) => write!(f, "exactly {}", counted(*ranks)),
            RequiredRanks::MultipleOf(ranks) => write!(f, "a multiple of {}", counted(*ranks)),
            RequiredRanks::Uncountable => write!(f, "more ranks than can be counted"),
        }
    }
}

/// Single changes that would make the configuration valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suggestions {
    /// World sizes next to the given one.
    pub worlds: Vec<usize>,
    /// Axes, with the valid sizes that are nearest to the requested one.
    pub sizes: Vec<(Axis, Vec<usize>)>,
    /// Another order of the axes.
    pub order: Option<AxisOrder>,
}

impl fmt::Display for Suggestions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worlds = match self.worlds.last() {
            None => None,
            Some(1) => Some("1 rank".to_string()),
            Some(_) => Some(format!("{} ranks", either(&self.worlds))),
        };
        let order = self.order.as_ref().map(|order| format!("order = {order}"));
        let sizes = self
            .sizes
            .iter()
            .map(|(axis, sizes)| format!("{axis} = {}", either(sizes)));
        let all: Vec<_> = worlds.into_iter().chain(order).chain(sizes).collect();
        match all.as_slice() {
            [] => write!(f, "no change of one size alone"),
            all => write!(f, "{}", all.join(", or ")),
        }
    }
}

/// `1 rank`, `2 ranks`.
fn counted(ranks: usize) -> String {
    let plural = if ranks == 1 { "" } else { "s" };
    format!("{ranks} rank{plural}")
}

/// `1, 2 or 4`.
fn either(sizes: &[usize]) -> String {
    let texts: Vec<_> = sizes.iter().map(usize::to_string).collect();
    match texts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => texts.concat(),
    }
}
