//! The errors of a device mesh. They contain the valid values.

use std::fmt;

use super::split::listed;
use super::{Axis, AxisOrder, LayoutError};

/// The reason why a device mesh, an axis order or a split is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// The layout does not match the world size.
    #[error("{fault}; possible changes: {fits}")]
    InvalidLayout {
        /// The first fault that was found.
        fault: MeshFault,
        /// Changes that would make the layout valid.
        fits: Box<Suggestions>,
    },
    /// A setting conflicts with another setting or has no effect.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A name in an [`AxisOrder`] is not an axis.
    #[error("invalid axis \"{name}\" in the order \"{order}\": expected tp, cp, ep, dp or pp")]
    UnknownAxis {
        /// The unknown name.
        name: String,
        /// The complete axis order, as given.
        order: String,
    },
    /// An [`AxisOrder`] contains the same axis twice.
    #[error("duplicate axis {} in the order \"{order}\": expected each axis once", axis.abbreviation())]
    DuplicateAxis {
        /// The repeated axis.
        axis: Axis,
        /// The complete axis order, as given.
        order: String,
    },
    /// The number of items is not divisible by the size of an axis.
    #[error("{what} {size} cannot be split over {axis} = {parts}: expected {axis} = {}", listed(fits, 1, *size))]
    Uneven {
        /// The name of the items, for example `heads`.
        what: String,
        /// The number of items.
        size: usize,
        /// The axis.
        axis: Axis,
        /// The size of the axis.
        parts: usize,
        /// The axis sizes that divide the number of items. If there are many, only the nearest sizes are listed.
        fits: Vec<usize>,
    },
    /// The number of samples per data-parallel rank is not a multiple of the micro-batch size.
    #[error(
        "{samples} samples over data = {data} are {share} per rank, not a multiple of the micro-batch size \
         {micro_batch}: expected {}", listed(fits, 1, *share)
    )]
    MicroBatch {
        /// The number of samples per step.
        samples: usize,
        /// The size of the data axis.
        data: usize,
        /// The number of samples per rank.
        share: usize,
        /// The number of samples per micro-batch.
        micro_batch: usize,
        /// The micro-batch sizes that divide the number of samples per rank. If there are many, only the nearest sizes
        /// are listed.
        fits: Vec<usize>,
    },
    /// The number of items to split is 0.
    #[error(
        "{what} 0 cannot be split over {axis} = {parts}: expected a multiple of {}",
        (*parts).max(1)
    )]
    NothingToSplit {
        /// The name of the items, for example `heads`.
        what: String,
        /// The axis.
        axis: Axis,
        /// The size of the axis.
        parts: usize,
    },
}

/// The first fault that was found in a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshFault {
    /// The world has no ranks.
    #[error("the world has 0 ranks")]
    EmptyWorld,
    /// The size of an axis is 0. An axis that is not used must have size 1.
    #[error("invalid {axis} = 0: expected at least 1")]
    ZeroSize {
        /// The axis.
        axis: Axis,
    },
    /// The product of the axis sizes of one grid does not match the world size.
    #[error("{sizes} requires {need}, but the world has {world}")]
    Product {
        /// The axes and their sizes, for example `tensor 2 x context 1 x pipeline 3`.
        sizes: String,
        /// The number of ranks that the axis sizes require.
        need: RequiredRanks,
        /// The number of ranks in the world.
        world: usize,
    },
    /// The axis order omits an axis that has more than one rank.
    #[error(
        "the order {order} leaves out {}, but {axis} = {size} in one of the grids",
        axis.abbreviation()
    )]
    MissingAxis {
        /// The omitted axis. As in an axis order, the tensor axis also stands for the expert-tensor axis.
        axis: Axis,
        /// The larger of the sizes of this axis in the two grids.
        size: usize,
        /// The axis order.
        order: AxisOrder,
    },
    /// The pipelines of the dense grid and the expert grid contain different ranks. Or the data sizes of the two grids
    /// differ, although the axis order does not end with the pipeline axis.
    #[error(
        "with the order {order} the pipelines of the two grids do not line up: \
         data {dense_data} and pipeline stride {dense_stride} in the dense grid, \
         data {expert_data} and pipeline stride {expert_stride} in the expert grid"
    )]
    Pipelines {
        /// The axis order.
        order: AxisOrder,
        /// The size of the data axis in the dense grid.
        dense_data: usize,
        /// The stride of the pipeline axis in the dense grid, in ranks.
        dense_stride: usize,
        /// The size of the data axis in the expert grid.
        expert_data: usize,
        /// The stride of the pipeline axis in the expert grid, in ranks.
        expert_stride: usize,
    },
}

/// The number of ranks that a grid requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredRanks {
    /// The grid requires exactly this number of ranks.
    Exactly(usize),
    /// The grid requires a multiple of this number of ranks.
    MultipleOf(usize),
    /// The product of the axis sizes exceeds the range of `usize`.
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

/// A list of changes. Each change alone would make the layout valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suggestions {
    /// The nearest valid world sizes.
    pub worlds: Vec<usize>,
    /// Axes, each with the valid sizes that are nearest to the requested size.
    pub sizes: Vec<(Axis, Vec<usize>)>,
    /// A different order of the axes.
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
            [] => write!(f, "none of one size alone"),
            all => write!(f, "{}", all.join(", or ")),
        }
    }
}

/// Formats `1 rank`, `2 ranks`.
fn counted(ranks: usize) -> String {
    let plural = if ranks == 1 { "" } else { "s" };
    format!("{ranks} rank{plural}")
}

/// Formats `1, 2 or 4`.
fn either(sizes: &[usize]) -> String {
    let texts: Vec<_> = sizes.iter().map(usize::to_string).collect();
    match texts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => texts.concat(),
    }
}
