//! What can be wrong with a mesh, and what would be right.

use std::fmt;

use super::split::listed;
use super::{Axis, AxisOrder};

/// Why a mesh, an order or a split was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// The configuration does not lie over the world.
    #[error("{fault}; what fits: {fits}")]
    Unfit {
        /// What is wrong.
        fault: Fault,
        /// What would be right.
        fits: Box<Fits>,
    },
    /// A name in an [`AxisOrder`] is no axis.
    #[error("\"{name}\" in the order \"{order}\" is no axis; the axes are tp, cp, ep, dp and pp")]
    UnknownAxis {
        /// The name as it stands in the order.
        name: String,
        /// The whole order.
        order: String,
    },
    /// An [`AxisOrder`] names an axis twice.
    #[error("{} stands twice in the order \"{order}\"; name each axis once", axis.abbreviation())]
    DuplicateAxis {
        /// The repeated axis.
        axis: Axis,
        /// The whole order.
        order: String,
    },
    /// A number of things cannot be shared out evenly over an axis.
    #[error("{what} {size} cannot be split over {axis} = {parts}; {} can", listed(fits, 1, *size))]
    Uneven {
        /// What was to be split.
        what: String,
        /// How many of them there are.
        size: usize,
        /// The axis over which they were to be split.
        axis: Axis,
        /// The size of that axis.
        parts: usize,
        /// Sizes of the axis that divide `size`, the nearest ones where there are many.
        fits: Vec<usize>,
    },
    /// Micro-batches do not make up a rank's share of a batch.
    #[error(
        "{samples} samples over data = {data} are {share} for each rank, which micro-batches of \
         {micro_batch} do not make up; micro-batches of {} do", listed(fits, 1, *share)
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
        /// Sizes that divide the share, the nearest ones where there are many.
        fits: Vec<usize>,
    },
    /// There is nothing to share out.
    #[error(
        "{what} 0 cannot be split over {axis} = {parts}; a multiple of {} can",
        (*parts).max(1)
    )]
    NothingToSplit {
        /// What was to be split.
        what: String,
        /// The axis over which it was to be split.
        axis: Axis,
        /// The size of that axis.
        parts: usize,
    },
}

/// The first thing found wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There are no ranks to lay anything over.
    #[error("the world has 0 ranks")]
    EmptyWorld,
    /// An axis has no ranks. An axis that is not used has size 1.
    #[error("{axis} = 0, but an axis has at least 1 rank")]
    ZeroSize {
        /// The axis.
        axis: Axis,
    },
    /// The sizes of one grid, multiplied, do not suit the world.
    #[error("{sizes} needs {need}, the world has {world}")]
    Product {
        /// The axes and their sizes, as in `tensor 2 x context 1 x pipeline 3`.
        sizes: String,
        /// The number of ranks they call for.
        need: Need,
        /// The number of ranks there are.
        world: usize,
    },
    /// The order leaves out an axis that has more than one rank.
    #[error(
        "the order {order} leaves out {}, but {axis} = {size} in one of the grids",
        axis.abbreviation()
    )]
    MissingAxis {
        /// The axis. Tensor stands for expert-tensor as well, as it does in an order.
        axis: Axis,
        /// Its size, the larger one of the two grids.
        size: usize,
        /// The order.
        order: AxisOrder,
    },
    /// The pipelines of the dense grid and of the expert grid would not be the same ranks, or the
    /// order does not end with the pipeline and the data sizes differ.
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
        /// The distance between neighbouring stages in the dense grid, in ranks.
        dense_stride: usize,
        /// The data size of the expert grid.
        expert_data: usize,
        /// The distance between neighbouring stages in the expert grid, in ranks.
        expert_stride: usize,
    },
}

/// The number of ranks that some sizes call for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// This many, no more and no less.
    Exactly(usize),
    /// Any multiple of this many.
    MultipleOf(usize),
    /// More than a `usize` holds.
    Uncountable,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Need::Exactly(ranks) => write!(f, "exactly {}", counted(*ranks)),
            Need::MultipleOf(ranks) => write!(f, "a multiple of {}", counted(*ranks)),
            Need::Uncountable => write!(f, "more ranks than can be counted"),
        }
    }
}

/// Changes of one thing, everything else staying, with which the configuration makes a mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fits {
    /// World sizes, next to the one at hand.
    pub worlds: Vec<usize>,
    /// Axes, and a few sizes of each, the nearest ones to what was asked for.
    pub sizes: Vec<(Axis, Vec<usize>)>,
    /// Another order of the axes.
    pub order: Option<AxisOrder>,
}

impl fmt::Display for Fits {
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
