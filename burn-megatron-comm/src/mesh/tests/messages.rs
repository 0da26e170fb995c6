//! Tests of the errors of invalid layouts, and of the printed table.

use insta::assert_snapshot;

use super::super::{Axis, Mesh, ParallelConfig, split_evenly};

fn refusal(config: ParallelConfig, world: usize) -> String {
    Mesh::new(&config, world).unwrap_err().to_string()
}

fn config() -> ParallelConfig {
    ParallelConfig::new()
}

#[test]
fn a_world_that_is_no_multiple() {
    assert_snapshot!(
        refusal(config().with_tensor(2).with_pipeline(3), 8),
        @"tensor 2 x context 1 x pipeline 3 requires a multiple of 6 ranks, but the world has 8; possible changes: 6 \
          or 12 ranks, or pipeline = 1, 2 or 4"
    );
    assert_snapshot!(
        refusal(config().with_tensor(8), 4),
        @"tensor 8 x context 1 x pipeline 1 requires a multiple of 8 ranks, but the world has 4; possible changes: 8 \
          ranks, or tensor = 1, 2 or 4"
    );
}

#[test]
fn a_world_that_is_not_the_product() {
    assert_snapshot!(
        refusal(config().with_tensor(2).with_pipeline(2).with_data(3), 8),
        @"tensor 2 x context 1 x pipeline 2 x data 3 requires exactly 12 ranks, but the world has 8; possible changes: \
          12 ranks, or data = 2"
    );
    assert_snapshot!(
        refusal(config().with_tensor(3).with_data(5), 7),
        @"tensor 3 x context 1 x pipeline 1 x data 5 requires exactly 15 ranks, but the world has 7; possible changes: \
          15 ranks"
    );
}

#[test]
fn experts_that_do_not_divide_the_world() {
    assert_snapshot!(
        refusal(config().with_tensor(2).with_expert(8), 8),
        @"expert-tensor 2 x expert 8 x pipeline 1 requires a multiple of 16 ranks, but the world has 8; possible \
          changes: 16 ranks, or tensor = 1, or expert = 1, 2 or 4, or expert-tensor = 1"
    );
}

#[test]
fn nothing_fits() {
    assert_snapshot!(
        refusal(config().with_tensor(usize::MAX).with_context(2), 5),
        @"tensor 18446744073709551615 x context 2 x pipeline 1 requires more ranks than can be counted, but the world \
          has 5; possible changes: none of one size alone"
    );
}

#[test]
fn empty_axes_and_worlds() {
    assert_snapshot!(
        refusal(config().with_pipeline(0), 4),
        @"invalid pipeline = 0: expected at least 1; possible changes: pipeline = 1, 2 or 4"
    );
    for axis in Axis::ALL {
        let text = refusal(config().with_size(axis, 0), 4);
        assert!(
            text.starts_with(&format!("invalid {axis} = 0: expected")),
            "{text}"
        );
    }
    assert_snapshot!(
        refusal(config().with_tensor(2), 0),
        @"the world has 0 ranks; possible changes: 2 ranks"
    );
    assert_snapshot!(refusal(config(), 0), @"the world has 0 ranks; possible changes: 1 rank");
}

#[test]
fn orders() {
    let parse = |order: &str| order.parse::<super::super::AxisOrder>();
    assert_snapshot!(
        parse("tp-xp-dp").unwrap_err(),
        @"invalid axis \"xp\" in the order \"tp-xp-dp\": expected tp, cp, ep, dp or pp"
    );
    assert_snapshot!(
        parse("").unwrap_err(),
        @"invalid axis \"\" in the order \"\": expected tp, cp, ep, dp or pp"
    );
    assert_snapshot!(
        parse("tp-dp-tp").unwrap_err(),
        @"duplicate axis tp in the order \"tp-dp-tp\": expected each axis once"
    );
    assert_snapshot!(
        refusal(
            config()
                .with_context(2)
                .with_order(parse("tp-dp-pp").unwrap()),
            8
        ),
        @"the order tp-dp-pp leaves out cp, but context = 2 in one of the grids; possible changes: order = \
          tp-dp-cp-ep-pp, or context = 1"
    );
}

#[test]
fn pipelines_that_do_not_line_up() {
    let config = config().with_context(2).with_pipeline(2);
    assert_snapshot!(
        refusal(
            config.clone().with_order("tp-cp-ep-pp-dp".parse().unwrap()),
            8
        ),
        @"with the order tp-cp-ep-pp-dp the pipelines of the two grids do not line up: \
          data 2 and pipeline stride 2 in the dense grid, \
          data 4 and pipeline stride 1 in the expert grid; possible changes: order = tp-cp-ep-dp-pp, \
          or context = 1, or expert = 2, or expert-tensor = 2, or pipeline = 1"
    );
    // Equal data sizes are not sufficient: in one grid, the expert axis varies between the pipeline and the data axis.
    let config = config
        .with_expert(2)
        .with_order("tp-cp-pp-ep-dp".parse().unwrap());
    assert!(refusal(config, 8).contains(
        "data 2 and pipeline stride 2 in the dense grid, \
         data 2 and pipeline stride 1 in the expert grid"
    ));
}

#[test]
fn splits() {
    let text = |what, size, parts| {
        split_evenly(what, size, Axis::Tensor, parts)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(split_evenly("heads", 12, Axis::Tensor, 4), Ok(3));
    assert_snapshot!(
        text("heads", 12, 8),
        @"heads 12 cannot be split over tensor = 8: expected tensor = 1, 2, 3, 4, 6, 12"
    );
    assert_snapshot!(text("heads", 7, 0), @"heads 7 cannot be split over tensor = 0: expected tensor = 1, 7");
    assert_snapshot!(
        text("hidden", 5120, 6),
        @"hidden 5120 cannot be split over tensor = 6: expected tensor = 1, 2, 4, 5, 8, 10, 16, 20, ..."
    );
    assert_snapshot!(
        text("hidden", 5120, 500),
        @"hidden 5120 cannot be split over tensor = 500: expected tensor = ..., 64, 80, 128, 160, 256, 320, 512, 640, \
          ..."
    );
    assert_snapshot!(
        text("heads", 0, 8),
        @"heads 0 cannot be split over tensor = 8: expected a multiple of 8"
    );
}

#[test]
fn the_table_of_a_small_mesh() {
    let config = config()
        .with_tensor(2)
        .with_pipeline(2)
        .with_expert_tensor(1)
        .with_expert(2);
    assert_snapshot!(Mesh::new(&config, 8).unwrap(), @"
    mesh of 8 ranks: tensor 2 x context 1 x data 2 x pipeline 2, order tp-cp-ep-dp-pp
    expert grid: expert-tensor 1 x expert 2 x expert-data 2 x pipeline 2

    rank  tensor  context  data  pipeline  expert-tensor  expert  expert-data
       0       0        0     0         0              0       0            0
       1       1        0     0         0              0       1            0
       2       0        0     1         0              0       0            1
       3       1        0     1         0              0       1            1
       4       0        0     0         1              0       0            0
       5       1        0     0         1              0       1            0
       6       0        0     1         1              0       0            1
       7       1        0     1         1              0       1            1

    groups
    tensor       [0 1] [2 3] [4 5] [6 7]
    data         [0 2] [1 3] [4 6] [5 7]
    pipeline     [0 4] [1 5] [2 6] [3 7]
    expert       [0 1] [2 3] [4 5] [6 7]
    expert-data  [0 2] [1 3] [4 6] [5 7]
    ");
    assert_snapshot!(Mesh::single(), @"
    mesh of 1 rank: tensor 1 x context 1 x data 1 x pipeline 1, order tp-cp-ep-dp-pp

    rank  tensor  context  data  pipeline
       0       0        0     0         0
    ");
}

#[test]
fn the_table_in_the_documentation() {
    let lines = include_str!("../mod.rs").lines();
    let text: Vec<_> = lines
        .filter_map(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    let mesh = Mesh::new(&config().with_tensor(2).with_pipeline(2), 4).unwrap();
    assert!(text.join("\n").contains(&mesh.to_string()), "{mesh}");
}

#[test]
fn the_table_of_a_large_mesh_is_cut() {
    let text = Mesh::new(&config().with_tensor(16), 8192)
        .unwrap()
        .to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines[18..],
        [
            "  15      15        0     0         0",
            " ...",
            "8191      15        0   511         0",
            "",
            "groups",
            "tensor  [0 1 2 3 ... 15] [16 17 18 19 ... 31] [32 33 34 35 ... 47] \
             [48 49 50 51 ... 63] ... [8176 8177 8178 8179 ... 8191]",
            "data    [0 16 32 48 ... 8176] [1 17 33 49 ... 8177] [2 18 34 50 ... 8178] \
             [3 19 35 51 ... 8179] ... [15 31 47 63 ... 8191]",
        ]
    );
    // The cost of printing does not grow with the number of ranks.
    assert!(
        Mesh::new(&config(), usize::MAX)
            .unwrap()
            .to_string()
            .lines()
            .count()
            < 30
    );
}
