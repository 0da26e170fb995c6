//! Formats the table of a mesh.

use std::fmt;

use super::rank_grid::RankGrid;
use super::{Axis, AxisSet, Grid, Mesh};

/// The maximum world size for which the coordinates of every rank are printed.
const ROWS: usize = 32;

/// The maximum number of printed groups per axis and of printed members per group.
const LISTED: usize = 8;

/// A column of the table: one axis of one grid.
struct Column<'a> {
    name: &'static str,
    axis: Axis,
    grid: &'a RankGrid,
}

impl Column<'_> {
    fn size(&self) -> usize {
        self.grid.size(self.axis)
    }
}

/// Formats the sizes and the order of the axes, the coordinates of every rank, and the groups of every axis.
///
/// The expert grid is omitted if the expert size is 1 and the expert-tensor size equals the tensor size. Groups of one
/// rank are not listed. Long lists are shortened.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dense = self.columns(
            Grid::Dense,
            [Axis::Tensor, Axis::Context, Axis::Data, Axis::Pipeline],
        );
        let expert = match self.config.splits_experts() {
            true => self.columns(
                Grid::Expert,
                [Axis::ExpertTensor, Axis::Expert, Axis::Data, Axis::Pipeline],
            ),
            false => vec![],
        };
        let order = &self.config.order;
        let plural = if self.world == 1 { "" } else { "s" };
        write!(
            f,
            "mesh of {} rank{plural}: {}, order {order}",
            self.world,
            sizes(&dense)
        )?;
        if !expert.is_empty() {
            write!(f, "\nexpert grid: {}", sizes(&expert))?;
        }
        // The pipelines of both grids are the same ranks, so one column serves.
        let mut columns = dense;
        columns.extend(
            expert
                .into_iter()
                .filter(|column| column.axis != Axis::Pipeline),
        );
        write_ranks(f, &columns, self.world)?;
        write_groups(f, &columns)
    }
}

impl Mesh {
    fn columns(&self, grid: Grid, axes: [Axis; 4]) -> Vec<Column<'_>> {
        let column = |axis: Axis| Column {
            name: match (grid, axis) {
                (Grid::Expert, Axis::Data) => "expert-data",
                _ => axis.name(),
            },
            axis,
            grid: self.grid(grid),
        };
        axes.map(column).into()
    }
}

fn sizes(columns: &[Column]) -> String {
    let sizes: Vec<_> = columns
        .iter()
        .map(|c| format!("{} {}", c.name, c.size()))
        .collect();
    sizes.join(" x ")
}

fn write_ranks(f: &mut fmt::Formatter<'_>, columns: &[Column], world: usize) -> fmt::Result {
    let width = (world - 1).to_string().len().max("rank".len());
    write!(f, "\n\n{:>width$}", "rank")?;
    for column in columns {
        write!(f, "  {}", column.name)?;
    }
    for row in abridged(world, ROWS) {
        let Some(rank) = row else {
            write!(f, "\n{:>width$}", "...")?;
            continue;
        };
        write!(f, "\n{rank:>width$}")?;
        for Column { name, axis, grid } in columns {
            write!(
                f,
                "  {:>width$}",
                grid.coordinate(*axis, rank),
                width = name.len()
            )?;
        }
    }
    Ok(())
}

fn write_groups(f: &mut fmt::Formatter<'_>, columns: &[Column]) -> fmt::Result {
    let shown = || columns.iter().filter(|column| column.size() > 1);
    let width = shown().map(|column| column.name.len()).max().unwrap_or(0);
    if width > 0 {
        write!(f, "\n\ngroups")?;
    }
    for column in shown() {
        let groups_of_axis = column.grid.group_set(AxisSet::of(column.axis));
        let groups = abridged(groups_of_axis.count(), LISTED).map(|group| {
            let Some(group) = group else {
                return "...".to_string();
            };
            let members =
                abridged(groups_of_axis.group_size(), LISTED).map(|member| match member {
                    Some(member) => groups_of_axis.rank(group, member).to_string(),
                    None => "...".to_string(),
                });
            format!("[{}]", members.collect::<Vec<_>>().join(" "))
        });
        write!(
            f,
            "\n{:<width$}  {}",
            column.name,
            groups.collect::<Vec<_>>().join(" ")
        )?;
    }
    Ok(())
}

/// Returns the numbers below `count`. If `count` is greater than `limit`, returns the first half of `limit`, a gap, and
/// the last number.
fn abridged(count: usize, limit: usize) -> impl Iterator<Item = Option<usize>> {
    let (head, tail) = if count <= limit {
        (count, None)
    } else {
        (limit / 2, Some(count - 1))
    };
    (0..head)
        .map(Some)
        .chain(tail.into_iter().flat_map(|last| [None, Some(last)]))
}
