//! Tests of groups that were derived by hand, in the order in which Megatron-LM creates them.

use super::super::Axis::{Context, Data, Expert, ExpertTensor, Pipeline, Tensor};
use super::super::{Grid, Mesh, ParallelConfig};

/// Returns a layout of 16 ranks with two ranks along each dense axis.
fn sixteen() -> ParallelConfig {
    ParallelConfig::new()
        .with_tensor(2)
        .with_context(2)
        .with_data(2)
        .with_pipeline(2)
}

fn mesh(config: &ParallelConfig) -> Mesh {
    Mesh::new(config, 16).unwrap()
}

/// Compares groups with a string such as `0 1 | 2 3`.
#[track_caller]
fn assert_groups(actual: Vec<Vec<usize>>, expected: &str) {
    let write = |group: &Vec<usize>| {
        let ranks: Vec<_> = group.iter().map(usize::to_string).collect();
        ranks.join(" ")
    };
    let actual: Vec<_> = actual.iter().map(write).collect();
    assert_eq!(actual.join(" | "), expected);
}

#[test]
fn dense_groups_of_sixteen_ranks() {
    let mesh = mesh(&sixteen());
    let families: [(&[_], _); 9] = [
        (
            &[Tensor],
            "0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15",
        ),
        (
            &[Context],
            "0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15",
        ),
        (
            &[Data],
            "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15",
        ),
        (
            &[Pipeline],
            "0 8 | 1 9 | 2 10 | 3 11 | 4 12 | 5 13 | 6 14 | 7 15",
        ),
        (
            &[Data, Context],
            "0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15",
        ),
        (
            &[Tensor, Pipeline],
            "0 1 8 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15",
        ),
        (
            &[Tensor, Context],
            "0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15",
        ),
        (
            &[Tensor, Data, Context],
            "0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15",
        ),
        (
            &[Tensor, Data],
            "0 1 4 5 | 2 3 6 7 | 8 9 12 13 | 10 11 14 15",
        ),
    ];
    for (axes, expected) in families {
        assert_groups(mesh.groups(Grid::Dense, axes.to_vec()), expected);
    }
    for rank in 0..16 {
        assert_eq!(mesh.embedding_group(rank), vec![rank % 8, rank % 8 + 8]);
    }
}

#[test]
fn experts_over_four_ranks() {
    let mesh = mesh(&sixteen().with_expert_tensor(1).with_expert(4));
    assert_eq!(mesh.size(Grid::Expert, Data), 2);
    assert_groups(
        mesh.groups(Grid::Expert, [Expert]),
        "0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15",
    );
    assert_groups(
        mesh.groups(Grid::Expert, [Data]),
        "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15",
    );
    assert_groups(
        mesh.groups(Grid::Expert, [ExpertTensor, Expert, Pipeline]),
        "0 1 2 3 8 9 10 11 | 4 5 6 7 12 13 14 15",
    );
}

#[test]
fn experts_over_two_ranks_sliced_in_two() {
    let mesh = mesh(&sixteen().with_expert(2));
    assert_eq!(
        (
            mesh.size(Grid::Expert, ExpertTensor),
            mesh.size(Grid::Expert, Expert),
            mesh.size(Grid::Expert, Data)
        ),
        (2, 2, 2)
    );
    assert_groups(
        mesh.groups(Grid::Expert, [ExpertTensor]),
        "0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15",
    );
    assert_groups(
        mesh.groups(Grid::Expert, [Expert]),
        "0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15",
    );
    assert_groups(
        mesh.groups(Grid::Expert, [Data]),
        "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15",
    );
}

/// The data axis may vary slower than the pipeline axis if both grids have the same data size and the same ranks in
/// each pipeline.
#[test]
fn pipelines_inside_the_data_axis() {
    let tail_of_data = [
        ("tp-cp-pp-ep-dp", sixteen().with_expert_tensor(4)),
        ("tp-cp-ep-pp-dp", sixteen().with_expert(2)),
    ];
    for (order, config) in tail_of_data {
        let mesh = mesh(&config.with_order(order.parse().unwrap()));
        let pipelines = "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15";
        assert_groups(mesh.groups(Grid::Dense, [Pipeline]), pipelines);
        assert_groups(mesh.groups(Grid::Expert, [Pipeline]), pipelines);
        let copies = "0 8 | 1 9 | 2 10 | 3 11 | 4 12 | 5 13 | 6 14 | 7 15";
        assert_groups(mesh.groups(Grid::Dense, [Data]), copies);
        assert_groups(mesh.groups(Grid::Expert, [Data]), copies);
    }
}

#[test]
fn two_way_tensor_and_four_stages() {
    let config = ParallelConfig::new().with_tensor(2).with_pipeline(4);
    let mesh = mesh(&config);
    assert_eq!(mesh.size(Grid::Dense, Data), 2);
    assert_groups(
        mesh.groups(Grid::Dense, [Tensor]),
        "0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15",
    );
    assert_groups(
        mesh.groups(Grid::Dense, [Data]),
        "0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15",
    );
    assert_groups(
        mesh.groups(Grid::Dense, [Pipeline]),
        "0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15",
    );
    assert_eq!(mesh.embedding_group(6), vec![2, 14]);
}
