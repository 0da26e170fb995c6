//! A multi-dimensional numbering of ranks, and the groups over any set of its axes.

use super::{Axis, AxisSet, Grid};

/// Ranks numbered by axes: `rank = sum of coordinate x stride`. The first axis has stride 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankGrid {
    name: Grid,
    levels: Vec<GridAxis>,
}

/// One axis of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GridAxis {
    axis: Axis,
    size: usize,
    stride: usize,
}

impl GridAxis {
    fn coordinate(&self, rank: usize) -> usize {
        rank / self.stride % self.size
    }
}

impl RankGrid {
    /// Creates a grid with these sizes. They must not be 0, and their product must not overflow.
    pub(super) fn new(name: Grid, sizes: impl IntoIterator<Item = (Axis, usize)>) -> RankGrid {
        let mut next = 1;
        let levels = sizes.into_iter().map(|(axis, size)| {
            let stride = next;
            next *= size;
            GridAxis { axis, size, stride }
        });
        RankGrid {
            name,
            levels: levels.collect(),
        }
    }

    #[track_caller]
    pub(super) fn size(&self, axis: Axis) -> usize {
        self.level(axis).size
    }

    pub(super) fn stride(&self, axis: Axis) -> usize {
        self.level(axis).stride
    }

    #[track_caller]
    pub(super) fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        self.level(axis).coordinate(rank)
    }

    /// Returns the slowest varying axis that has more than one rank.
    pub(super) fn slowest(&self) -> Option<Axis> {
        self.levels
            .iter()
            .rfind(|level| level.size > 1)
            .map(|level| level.axis)
    }

    /// Returns the contribution of one coordinate to the rank.
    #[track_caller]
    pub(super) fn offset(&self, axis: Axis, coordinate: usize) -> usize {
        let level = self.level(axis);
        assert!(
            coordinate < level.size,
            "coordinate {coordinate} is outside {axis}, which has {} ranks",
            level.size
        );
        coordinate * level.stride
    }

    /// Returns the groups in which `axes` vary and all other axes are constant.
    #[track_caller]
    pub(super) fn group_set(&self, axes: AxisSet) -> GroupSet {
        for axis in axes.iter() {
            self.level(axis);
        }
        let (varying, fixed) = self
            .levels
            .iter()
            .partition(|level| axes.contains(level.axis));
        GroupSet { varying, fixed }
    }

    #[track_caller]
    fn level(&self, axis: Axis) -> &GridAxis {
        self.levels
            .iter()
            .find(|level| level.axis == axis)
            .unwrap_or_else(|| {
                let names: Vec<_> = self.name.axes().iter().map(Axis::name).collect();
                panic!(
                    "axis {axis} is not in the {} grid, which has {}",
                    self.name,
                    names.join(", ")
                )
            })
    }
}

/// The ranks of the group that contains rank 0, which are sums of multiples of strides. Each entry is a stride and the
/// number of its multiples.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupShape(Vec<(usize, usize)>);

/// All groups over one set of axes. They partition the world and are computed on demand.
pub(super) struct GroupSet {
    varying: Vec<GridAxis>,
    fixed: Vec<GridAxis>,
}

impl GroupSet {
    /// Returns the number of groups.
    pub(super) fn count(&self) -> usize {
        self.fixed.iter().map(|level| level.size).product()
    }

    /// Returns the number of ranks of a group.
    pub(super) fn group_size(&self) -> usize {
        self.varying.iter().map(|level| level.size).product()
    }

    /// Returns the rank of a member of a group.
    pub(super) fn rank(&self, group: usize, member: usize) -> usize {
        nth(&self.fixed, group) + nth(&self.varying, member)
    }

    /// Returns a value that two sets of axes share if and only if they have the same groups.
    ///
    /// The first group determines all other groups: the lowest rank that no earlier group contains starts the next
    /// group.
    pub(super) fn shape(&self) -> GroupShape {
        let mut runs: Vec<(usize, usize)> = vec![];
        for level in self.varying.iter().filter(|level| level.size > 1) {
            match runs.last_mut() {
                Some((stride, size)) if *stride * *size == level.stride => *size *= level.size,
                _ => runs.push((level.stride, level.size)),
            }
        }
        GroupShape(runs)
    }

    /// Returns every group.
    pub(super) fn groups(&self) -> Vec<Vec<usize>> {
        (0..self.count())
            .map(|group| self.members_from(nth(&self.fixed, group)))
            .collect()
    }

    /// Returns the group that contains `rank`.
    pub(super) fn group_of(&self, rank: usize) -> Vec<usize> {
        let own: usize = self
            .varying
            .iter()
            .map(|level| level.coordinate(rank) * level.stride)
            .sum();
        self.members_from(rank - own)
    }

    fn members_from(&self, first: usize) -> Vec<usize> {
        (0..self.group_size())
            .map(|member| first + nth(&self.varying, member))
            .collect()
    }
}

/// Returns the offset of the n-th point of the grid of `levels`, whose first level varies fastest.
fn nth(levels: &[GridAxis], mut n: usize) -> usize {
    let mut offset = 0;
    for level in levels {
        offset += n % level.size * level.stride;
        n /= level.size;
    }
    offset
}
