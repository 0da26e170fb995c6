//! The two grids of a device mesh, and sets of the axes of a grid.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Axis;

/// One of the two grids of a device mesh. Each grid numbers the same ranks by its own set of axes. Both grids have a
/// `data` axis, but its groups contain different ranks in each grid.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Grid {
    /// The grid for all layers except experts, with the axes tensor, context, data and pipeline.
    #[default]
    Dense,
    /// The grid for experts, with the axes expert-tensor, expert, data and pipeline.
    Expert,
}

impl Grid {
    /// The list of both grids.
    pub const ALL: [Grid; 2] = [Grid::Dense, Grid::Expert];

    /// Returns the name of the grid, which is used in [`Display`](fmt::Display) and in files.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the axes of the grid.
    pub const fn axes(self) -> AxisSet {
        let shared = AxisSet::of(Axis::Data).with(Axis::Pipeline);
        match self {
            Grid::Dense => shared.with(Axis::Tensor).with(Axis::Context),
            Grid::Expert => shared.with(Axis::ExpertTensor).with(Axis::Expert),
        }
    }

    /// Returns the axes whose ranks process different tokens. In the dense grid, these are the context and data axes.
    /// In the expert grid, this is only the data axis. On each rank, the gradient of a parameter is a partial sum,
    /// which must be reduced over these axes.
    pub const fn data_axes(self) -> AxisSet {
        let data = AxisSet::of(Axis::Data);
        match self {
            Grid::Dense => data.with(Axis::Context),
            Grid::Expert => data,
        }
    }

    /// Returns the axes along which a parameter can be split: all axes except the pipeline and the [data
    /// axes](Self::data_axes).
    pub const fn model_axes(self) -> AxisSet {
        match self {
            Grid::Dense => AxisSet::of(Axis::Tensor),
            Grid::Expert => AxisSet::of(Axis::ExpertTensor).with(Axis::Expert),
        }
    }
}

/// A set of axes, for example `AxisSet::from([Axis::Context, Axis::Data])`.
///
/// Axes are iterated in the order of [`Axis::ALL`]. A set is displayed as `context x data` and serialized as a list.
///
/// ```
/// use burn_megatron_comm::mesh::{Axis, AxisSet, Grid};
///
/// let axes = AxisSet::from([Axis::Data, Axis::Context]);
/// assert_eq!(axes, Grid::Dense.data_axes());
/// assert_eq!(axes.to_string(), "context x data");
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Vec<Axis>", into = "Vec<Axis>")]
pub struct AxisSet(u8);

impl AxisSet {
    /// The empty set.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// Creates a set that contains only `axis`.
    pub const fn of(axis: Axis) -> Self {
        Self(1 << axis as u8)
    }

    /// Returns this set with `axis` added.
    pub const fn with(self, axis: Axis) -> Self {
        self.union(Self::of(axis))
    }

    /// Returns this set without `axis`.
    pub const fn without(self, axis: Axis) -> Self {
        self.difference(Self::of(axis))
    }

    /// Returns the axes that are in at least one of the sets.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the axes that are in both sets.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the axes of this set that are not in the other set.
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns whether `axis` is in the set.
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 & Self::of(axis).0 != 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the axes in the order of [`Axis::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Axis> + Clone {
        Axis::ALL
            .into_iter()
            .filter(move |axis| self.contains(*axis))
    }
}

impl FromIterator<Axis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> Self {
        axes.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl<const N: usize> From<[Axis; N]> for AxisSet {
    fn from(axes: [Axis; N]) -> Self {
        axes.into_iter().collect()
    }
}

impl From<Axis> for AxisSet {
    fn from(axis: Axis) -> Self {
        Self::of(axis)
    }
}

impl From<Option<Axis>> for AxisSet {
    fn from(axis: Option<Axis>) -> Self {
        axis.into_iter().collect()
    }
}

impl From<Vec<Axis>> for AxisSet {
    fn from(axes: Vec<Axis>) -> Self {
        axes.into_iter().collect()
    }
}

impl From<AxisSet> for Vec<Axis> {
    fn from(axes: AxisSet) -> Self {
        axes.iter().collect()
    }
}

impl fmt::Display for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Axis::name).collect();
        f.pad(&names.join(" x "))
    }
}

impl fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
