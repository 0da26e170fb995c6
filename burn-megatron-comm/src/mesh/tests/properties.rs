//! Tests of properties of random meshes. The reference is an odometer that shares no code with the grids.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::{Index, subsequence};

use super::super::Axis::{Context, Data, Expert, ExpertTensor, Pipeline, Tensor};
use super::super::split::divisors;
use super::super::{Axis, AxisOrder, Coordinates, ExpertCoordinates, Grid, MeshFault};
use super::super::{Mesh, MeshError, ParallelConfig, split_evenly};

const DENSE: [Axis; 4] = [Tensor, Context, Data, Pipeline];
const EXPERT: [Axis; 4] = [ExpertTensor, Expert, Data, Pipeline];

type AxisCoordinates = BTreeMap<Axis, usize>;

/// Returns the coordinates of every rank, counted up like an odometer. The first axis varies fastest.
fn odometer(wheels: &[(Axis, usize)]) -> Vec<AxisCoordinates> {
    let mut places = vec![];
    let mut place: AxisCoordinates = wheels.iter().map(|(axis, _)| (*axis, 0)).collect();
    loop {
        places.push(place.clone());
        let turned = wheels.iter().any(|(axis, size)| {
            let wheel = place.get_mut(axis).unwrap();
            *wheel = (*wheel + 1) % size;
            *wheel > 0
        });
        if !turned {
            return places;
        }
    }
}

/// Returns the odometers of the dense and of the expert grid.
fn odometers(
    config: &ParallelConfig,
    world: usize,
) -> (Vec<AxisCoordinates>, Vec<AxisCoordinates>) {
    let expert_tensor = config.expert_tensor.unwrap_or(config.tensor);
    let expert_data = world / (expert_tensor * config.expert * config.pipeline);
    let (mut dense, mut expert) = (vec![], vec![]);
    for axis in config.order.axes() {
        match axis {
            Tensor => dense.push((Tensor, config.tensor)),
            Context => dense.push((Context, config.context)),
            Data => dense.push((Data, config.data.unwrap())),
            Pipeline => dense.push((Pipeline, config.pipeline)),
            Expert | ExpertTensor => {}
        }
        match axis {
            Tensor => expert.push((ExpertTensor, expert_tensor)),
            Expert => expert.push((Expert, config.expert)),
            Data => expert.push((Data, expert_data)),
            Pipeline => expert.push((Pipeline, config.pipeline)),
            Context | ExpertTensor => {}
        }
    }
    (odometer(&dense), odometer(&expert))
}

/// Groups ranks by their coordinates on the fixed axes. The groups are sorted by their first rank.
fn gathered(places: &[AxisCoordinates], varying: &[Axis]) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<AxisCoordinates, Vec<usize>> = BTreeMap::new();
    for (rank, place) in places.iter().enumerate() {
        let mut fixed = place.clone();
        fixed.retain(|axis, _| !varying.contains(axis));
        groups.entry(fixed).or_default().push(rank);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort();
    groups
}

fn orders() -> impl Strategy<Value = AxisOrder> {
    let shuffled = Just(vec!["tp", "cp", "ep", "dp", "pp"]).prop_shuffle();
    (shuffled, any::<bool>()).prop_map(|(mut names, pipeline_last)| {
        if pipeline_last {
            names.retain(|name| *name != "pp");
            names.push("pp");
        }
        names.join("-").parse().unwrap()
    })
}

/// Generates layouts whose size products match the world in both grids. The order of the axes may still be invalid.
fn layouts() -> impl Strategy<Value = (ParallelConfig, usize)> {
    let size = || 1..=4usize;
    let sizes = (size(), size(), size(), size());
    let experts = (any::<Index>(), any::<Option<Index>>());
    (sizes, experts, orders()).prop_map(|((tensor, context, pipeline, data), experts, order)| {
        let stage = tensor * context * data;
        let pick = |index: Index, of: usize| *index.get(&divisors(of));
        let expert_tensor = experts.1.map(|index| pick(index, stage));
        let expert = pick(experts.0, stage / expert_tensor.unwrap_or(tensor));
        let data = Some(data);
        let config = ParallelConfig {
            tensor,
            context,
            pipeline,
            data,
            expert,
            expert_tensor,
            order,
            ..ParallelConfig::new()
        };
        (config, stage * pipeline)
    })
}

/// Generates valid meshes.
fn meshes() -> impl Strategy<Value = Mesh> {
    layouts().prop_filter_map("pipelines differ", |(config, world)| {
        Mesh::new(&config, world).ok()
    })
}

proptest! {
    /// A layout is rejected because of its order if and only if the pipelines of the two grids would differ.
    #[test]
    fn refused_exactly_where_pipelines_differ((config, world) in layouts()) {
        let (dense, expert) = odometers(&config, world);
        let differ = gathered(&dense, &[Pipeline]) != gathered(&expert, &[Pipeline]);
        let copies = |places: &[AxisCoordinates]| places.iter().map(|place| place[&Data]).max();
        let pipeline_last = world / config.pipeline == dense.iter()
            .position(|place| place[&Pipeline] > 0).unwrap_or(world / config.pipeline);
        let refused = differ || (!pipeline_last && copies(&dense) != copies(&expert));
        match Mesh::new(&config, world) {
            Ok(_) => prop_assert!(!refused),
            Err(MeshError::InvalidLayout { fault: MeshFault::Pipelines { .. }, .. }) => prop_assert!(refused),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn groups_are_those_of_the_odometer(
        mesh in meshes(),
        dense_axes in subsequence(DENSE.to_vec(), 0..=4).prop_shuffle(),
        expert_axes in subsequence(EXPERT.to_vec(), 0..=4).prop_shuffle(),
    ) {
        let (dense, expert) = odometers(mesh.config(), mesh.world_size());
        let families = [
            (mesh.groups(Grid::Dense, dense_axes.clone()), gathered(&dense, &dense_axes)),
            (mesh.groups(Grid::Expert, expert_axes.clone()), gathered(&expert, &expert_axes)),
        ];
        for (groups, expected) in families {
            // The groups need not be sorted: members are ascending, and groups are ascending by their first rank.
            prop_assert_eq!(&groups, &expected);
            let ranks: BTreeSet<_> = groups.iter().flatten().copied().collect();
            prop_assert_eq!(ranks, (0..mesh.world_size()).collect());
            prop_assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), mesh.world_size());
        }
    }

    #[test]
    fn groups_are_the_same_if_their_shapes_are(
        mesh in meshes(),
        dense_axes in subsequence(DENSE.to_vec(), 0..=4),
        expert_axes in subsequence(EXPERT.to_vec(), 0..=4),
    ) {
        let both = [(Grid::Dense, dense_axes), (Grid::Expert, expert_axes)];
        let [dense, expert] = both.clone().map(|(grid, axes)| mesh.groups(grid, axes));
        let shapes = both.map(|(grid, axes)| mesh.group_shape(grid, axes));
        prop_assert_eq!(dense == expert, shapes[0] == shapes[1]);
    }

    #[test]
    fn members_are_the_group_of_a_rank(mesh in meshes()) {
        for axes in [&[Tensor][..], &[Tensor, Data], &[Context, Data], &[Pipeline], &DENSE] {
            for group in mesh.groups(Grid::Dense, axes.to_vec()) {
                for rank in &group {
                    prop_assert_eq!(&mesh.members(Grid::Dense, axes.to_vec(), *rank), &group);
                }
            }
        }
        for axes in [&[Expert][..], &[ExpertTensor, Expert], &[Data], &EXPERT] {
            for group in mesh.groups(Grid::Expert, axes.to_vec()) {
                for rank in &group {
                    prop_assert_eq!(&mesh.members(Grid::Expert, axes.to_vec(), *rank), &group);
                }
            }
        }
    }

    /// A tensor group and a group over the data and context axes never share two ranks.
    #[test]
    fn tensor_and_data_groups_meet_in_one_rank(mesh in meshes()) {
        for rank in 0..mesh.world_size() {
            let tensor = mesh.members(Grid::Dense, Tensor, rank);
            let reduced = mesh.members(Grid::Dense, [Data, Context], rank);
            let both: Vec<_> = tensor.into_iter().filter(|r| reduced.contains(r)).collect();
            prop_assert_eq!(both, vec![rank]);
        }
    }

    #[test]
    fn both_grids_have_the_same_pipelines(mesh in meshes()) {
        prop_assert_eq!(mesh.groups(Grid::Dense, Pipeline), mesh.groups(Grid::Expert, Pipeline));
        for rank in 0..mesh.world_size() {
            let (dense, expert) = (mesh.coordinates(rank), mesh.expert_coordinates(rank));
            prop_assert_eq!(dense.pipeline, expert.pipeline);
        }
    }

    #[test]
    fn coordinates_are_those_of_the_odometer_and_lead_back(mesh in meshes()) {
        let (dense, expert) = odometers(mesh.config(), mesh.world_size());
        for rank in 0..mesh.world_size() {
            let here = mesh.coordinates(rank);
            let Coordinates { tensor, context, data, pipeline } = here;
            let place = [(Tensor, tensor), (Context, context), (Data, data), (Pipeline, pipeline)];
            prop_assert_eq!(AxisCoordinates::from(place), dense[rank].clone());
            prop_assert_eq!(mesh.rank_at(here), rank);

            let here = mesh.expert_coordinates(rank);
            let ExpertCoordinates { expert_tensor, expert: share, expert_data, pipeline } = here;
            let place = [
                (ExpertTensor, expert_tensor),
                (Expert, share),
                (Data, expert_data),
                (Pipeline, pipeline),
            ];
            prop_assert_eq!(AxisCoordinates::from(place), expert[rank].clone());
            prop_assert_eq!(mesh.expert_rank_at(here), rank);
        }
    }

    #[test]
    fn tied_embeddings_are_on_the_ends_of_a_pipeline(mesh in meshes()) {
        for rank in 0..mesh.world_size() {
            let stages = mesh.members(Grid::Dense, Pipeline, rank);
            let mut ends = vec![stages[0], stages[stages.len() - 1]];
            ends.dedup();
            prop_assert_eq!(mesh.embedding_group(rank), ends);
        }
    }

    #[test]
    fn a_resolved_configuration_makes_the_same_mesh(mesh in meshes()) {
        prop_assert_eq!(mesh.config().world_size(), Some(mesh.world_size()));
        prop_assert_eq!(&Mesh::new(mesh.config(), mesh.world_size()).unwrap(), &mesh);
    }

    #[test]
    fn an_axis_of_size_one_may_be_left_out(mesh in meshes()) {
        let config = mesh.config();
        let used = |axis: &&Axis| match axis {
            Tensor => mesh.size(Grid::Dense, Tensor).max(mesh.size(Grid::Expert, ExpertTensor)) > 1,
            Data => Grid::ALL.into_iter().any(|grid| mesh.size(grid, Data) > 1),
            Expert => mesh.size(Grid::Expert, Expert) > 1,
            axis => mesh.size(Grid::Dense, **axis) > 1,
        };
        let names: Vec<_> =
            config.order.axes().iter().filter(used).map(|axis| axis.abbreviation()).collect();
        prop_assume!(!names.is_empty());
        let short = config.clone().with_order(names.join("-").parse().unwrap());
        let short = Mesh::new(&short, mesh.world_size()).unwrap();
        for rank in 0..mesh.world_size() {
            prop_assert_eq!(short.coordinates(rank), mesh.coordinates(rank));
            prop_assert_eq!(short.expert_coordinates(rank), mesh.expert_coordinates(rank));
        }
        // Omitting any other axis is an error.
        for left_out in &names {
            let rest: Vec<_> = names.iter().filter(|name| *name != left_out).copied().collect();
            let Ok(order) = rest.join("-").parse() else { continue };
            let refusal = Mesh::new(&config.clone().with_order(order), mesh.world_size());
            let missed = matches!(
                refusal,
                Err(MeshError::InvalidLayout { fault: MeshFault::MissingAxis { axis, .. }, .. })
                    if axis.abbreviation() == *left_out
            );
            prop_assert!(missed);
        }
    }

    /// Any sizes lead to a mesh of exactly this world or to an error, but never to a panic. The changes that an error
    /// suggests are valid.
    #[test]
    fn what_an_error_offers_fits(
        sizes in prop::collection::vec(prop_oneof![8 => 0..=12usize, 1 => any::<usize>()], 6),
        given in any::<(bool, bool)>(),
        order in orders(),
        world in prop_oneof![8 => 0..=64usize, 1 => 0..1usize << 40],
    ) {
        let config = ParallelConfig {
            tensor: sizes[0],
            context: sizes[1],
            pipeline: sizes[2],
            data: given.0.then_some(sizes[3]),
            expert: sizes[4],
            expert_tensor: given.1.then_some(sizes[5]),
            order,
            ..ParallelConfig::new()
        };
        match Mesh::new(&config, world) {
            Ok(mesh) => {
                prop_assert_eq!(DENSE.map(|axis| mesh.size(Grid::Dense, axis)).iter().product::<usize>(), world);
                let expert = EXPERT.map(|axis| mesh.size(Grid::Expert, axis));
                prop_assert_eq!(expert.iter().product::<usize>(), world);
            }
            Err(MeshError::InvalidLayout { fits, .. }) => {
                for other in fits.worlds {
                    prop_assert!(Mesh::new(&config, other).is_ok());
                }
                for (axis, sizes) in fits.sizes {
                    for size in sizes {
                        let changed = config.clone().with_size(axis, size);
                        prop_assert!(Mesh::new(&changed, world).is_ok());
                    }
                }
                if let Some(order) = fits.order {
                    prop_assert!(Mesh::new(&config.with_order(order), world).is_ok());
                }
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn divisors_are_all_divisors(size in 0..5000usize) {
        let expected: Vec<_> = (1..=size).filter(|part| size % part == 0).collect();
        prop_assert_eq!(divisors(size), expected);
    }

    #[test]
    fn a_split_is_even_or_refused(size in 0..500usize, parts in 0..50usize) {
        match split_evenly("things", size, Tensor, parts) {
            Ok(each) => prop_assert!(size > 0 && each * parts == size),
            Err(MeshError::NothingToSplit { .. }) => prop_assert_eq!(size, 0),
            Err(MeshError::Uneven { fits, .. }) => {
                prop_assert!(size > 0 && (parts == 0 || size % parts != 0));
                prop_assert!(!fits.is_empty() && fits.iter().all(|part| size % part == 0));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
