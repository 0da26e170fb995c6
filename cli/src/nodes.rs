//! The assignment of ranks to nodes: the launcher's value if the recipe has none, and its effect on collectives.

use burn_megatron::comm::{Buffer, Communicator};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::{Axis, AxisSet, Grid, Mesh, ParallelConfig};

use crate::error::Error;

/// Position of a process on its machine, as set by the launcher.
#[derive(Clone, Copy, Debug)]
pub struct LocalRank {
    /// The local rank.
    pub rank: usize,
    /// The number of processes on the machine.
    pub world_size: usize,
}

/// Returns the layout with [`ranks_per_node`](ParallelConfig::ranks_per_node) from the launcher, if the recipe does
/// not set it. It is set only if all machines have the same number of consecutive ranks. Collective over the world.
pub fn in_nodes(
    layout: &ParallelConfig,
    place: Option<LocalRank>,
    world: &dyn Communicator,
) -> Result<ParallelConfig, Error> {
    let (None, Some(place)) = (layout.ranks_per_node, place) else {
        return Ok(layout.clone());
    };
    let own = [place.rank as i64, place.world_size as i64];
    let all: Vec<i64> = world.all_gather(Buffer::I64(own.to_vec()))?.into_vec();
    let places: Vec<_> = all
        .chunks(2)
        .map(|place| [place[0] as usize, place[1] as usize])
        .collect();
    Ok(ParallelConfig {
        ranks_per_node: equal_nodes(&places),
        ..layout.clone()
    })
}

/// Returns the number of ranks per machine, if all machines are equal. `places` holds the local rank and the number
/// of ranks on the machine for every rank.
fn equal_nodes(places: &[[usize; 2]]) -> Option<usize> {
    let [_, size] = *places.first()?;
    let mut all = places.iter().enumerate();
    let is_equal = size > 0
        && places.len().is_multiple_of(size)
        && all.all(|(rank, place)| *place == [rank % size, size]);
    (is_equal && size < places.len()).then_some(size)
}

/// Returns the header line about nodes, if the ranks are on several nodes, or if the recipe requests gradient sums
/// over nodes.
pub fn describe(mesh: &Mesh, config: &DataParallelConfig) -> Option<String> {
    let world = mesh.world_size();
    let ranks = mesh.config().ranks_per_node.filter(|ranks| *ranks < world);
    let nodes = match ranks {
        Some(ranks) => format!("{} of up to {ranks} ranks", world.div_ceil(ranks)),
        None if config.hierarchical_reduce => "one, or unequal ones".into(),
        None => return None,
    };
    let on_each = |grid, axes: AxisSet| mesh.members_per_node(&mesh.members(grid, axes, 0));
    let mut all = vec![nodes];
    if config.hierarchical_reduce {
        all.push(match on_each(Grid::Dense, Grid::Dense.data_axes()) {
            Some(own) => format!("gradients are summed over {own} ranks of each, then between them"),
            None => "gradients are summed over all ranks at once, because hierarchical_reduce requires several nodes \
                     with equal numbers of data-parallel ranks, at least 2 on each"
                .into(),
        });
    }
    if mesh.size(Grid::Expert, Axis::Expert) > 1 {
        let axes = AxisSet::from([Axis::Expert, Axis::ExpertTensor]);
        all.push(match on_each(Grid::Expert, axes) {
            Some(own) => format!("{own} expert ranks on each"),
            None => "expert ranks exchange tokens directly".into(),
        });
    }
    Some(all.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_equally_many_consecutive_ranks_are_nodes() {
        let of = |sizes: &[usize]| {
            let of_machine = |size: &usize| {
                let size = *size;
                (0..size).map(move |rank| [rank, size])
            };
            equal_nodes(&sizes.iter().flat_map(of_machine).collect::<Vec<_>>())
        };
        assert_eq!(of(&[2, 2]), Some(2));
        assert_eq!(of(&[4, 4, 4]), Some(4));
        for sizes in [&[4][..], &[2, 3], &[4, 2], &[]] {
            assert_eq!(of(sizes), None, "{sizes:?}");
        }
        // Ranks are assigned to the machines in round-robin order.
        assert_eq!(equal_nodes(&[[0, 2], [0, 2], [1, 2], [1, 2]]), None);
    }

    #[test]
    fn the_header_says_how_nodes_are_used() {
        let config = |hierarchical_reduce| DataParallelConfig {
            hierarchical_reduce,
            ..DataParallelConfig::default()
        };
        let text = |layout: ParallelConfig, sums| {
            let world = layout.world_size().unwrap();
            describe(&Mesh::new(&layout, world).unwrap(), &config(sums))
        };
        let four = ParallelConfig::new().with_data(4);
        assert_eq!(text(four.clone(), false), None);
        assert!(text(four.clone(), true).unwrap().contains("at once"));
        let nodes = four.with_ranks_per_node(2);
        insta::assert_snapshot!(
            text(nodes.clone().with_expert(4), true).unwrap(),
            @"2 of up to 2 ranks; gradients are summed over 2 ranks of each, then between them; 2 expert ranks on each"
        );
        let uneven = nodes.with_ranks_per_node(3).with_expert(2);
        assert!(
            text(uneven, true)
                .unwrap()
                .ends_with("; expert ranks exchange tokens directly")
        );
    }
}
