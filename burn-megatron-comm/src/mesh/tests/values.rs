//! Tests of layouts and axis orders as values: text, files and defaults.

use std::sync::Arc;

use super::super::stages::LayerSplit;
use super::super::{
    Axis, AxisOrder, AxisRank, AxisSet, ContextExchange, ContextSplit, Grid, LayoutError, Mesh,
    MeshError, MeshRank, ParallelConfig, ScheduleKind, ScheduleSource, TpCommOverlap, ZeroStage,
};

#[test]
fn a_configuration_survives_a_file() {
    let config = ParallelConfig::new()
        .with_tensor(2)
        .with_context(3)
        .with_pipeline(4)
        .with_expert(5)
        .with_order("tp-pp-dp".parse().unwrap());
    for config in [
        config.clone().with_data(6).with_expert_tensor(7),
        config
            .clone()
            .with_sequence_parallel(true)
            .with_schedule(ScheduleKind::Interleaved { group: Some(6) })
            .with_virtual_stages(2)
            .with_split(LayerSplit::Layout("Et|L".into())),
        config
            .clone()
            .with_schedule(ScheduleSource::File("own.csv".into())),
        config,
        Default::default(),
    ] {
        let text = toml::to_string(&config).unwrap();
        assert_eq!(
            toml::from_str::<ParallelConfig>(&text).unwrap(),
            config,
            "{text}"
        );
    }
}

#[test]
fn a_file_names_only_what_it_changes() {
    let read = toml::from_str::<ParallelConfig>("tensor = 2\norder = 'tp-dp'").unwrap();
    let built = ParallelConfig::new()
        .with_tensor(2)
        .with_order("tp-dp".parse().unwrap());
    assert_eq!(read, built);
}

/// A recipe file always contains the axes that every run has. It contains other axes only if they are used.
#[test]
fn a_file_has_the_axes_of_every_run_and_others_where_they_are_used() {
    let recipe = ParallelConfig::new().with_data(1);
    let text = "tensor = 1\ndata = 1\nsequence_parallel = false\npipeline = 1\nsplit = \"even\"\n";
    assert_eq!(toml::to_string(&recipe).unwrap(), text);
    // The state that is sharded over the data axis is set in another table.
    let sharded = recipe
        .clone()
        .with_zero_stage(ZeroStage::Optimizer)
        .with_hsdp(2);
    assert_eq!(toml::to_string(&sharded).unwrap(), text);
    let used = toml::to_string(&recipe.with_context(2)).unwrap();
    assert!(used.ends_with("context = 2\n"), "{used}");
}

#[test]
fn a_setting_without_effect_is_refused() {
    let refusal = |config: &ParallelConfig| match Mesh::new(config, 4).unwrap_err() {
        MeshError::Layout(error) => error,
        other => panic!("{other}"),
    };
    let config = ParallelConfig::new();
    assert_eq!(
        refusal(&config.clone().with_sequence_parallel(true)),
        LayoutError::SequenceParallel
    );
    let tensor = config.clone().with_tensor(2);
    let ring = tensor.clone().with_tp_comm_overlap(TpCommOverlap::Ring);
    let name = "tp_comm_overlap";
    assert_eq!(refusal(&ring), LayoutError::NoSequenceParallel { name });
    let split = |config: &ParallelConfig, splits| {
        let config = config.clone().with_sequence_parallel(true);
        config.with_tp_comm_overlap_num_splits(splits)
    };
    let bulk = tensor.clone().with_tp_comm_overlap(TpCommOverlap::Bulk);
    for (config, splits, method) in [(&tensor, 2, "none"), (&bulk, 1, "bulk"), (&ring, 0, "ring")] {
        let method = method.to_string();
        let expected = LayoutError::NumSplits { splits, method };
        assert_eq!(refusal(&split(config, splits)), expected);
    }
    assert!(Mesh::new(&split(&ring, 1), 4).is_ok() && Mesh::new(&split(&bulk, 2), 4).is_ok());
    let read = toml::from_str::<ParallelConfig>("tp_comm_overlap = 'ring_exchange'").unwrap();
    assert_eq!(read.tp_comm_overlap, ring.tp_comm_overlap);
    let pipeline_settings = [
        ("schedule", config.clone().with_schedule(ScheduleKind::ZbV)),
        ("virtual_stages", config.clone().with_virtual_stages(1)),
        (
            "split",
            config
                .clone()
                .with_split(LayerSplit::Layout("Et|tL".into())),
        ),
        ("receives_ahead", config.clone().with_receives_ahead(0)),
        ("fp8_transfers", config.clone().with_fp8_transfers(true)),
        (
            "defer_embedding_wgrad",
            ParallelConfig {
                defer_embedding_wgrad: Some(0),
                ..config
            },
        ),
    ];
    for (name, config) in pipeline_settings {
        assert_eq!(refusal(&config), LayoutError::NoPipeline { name });
        assert_eq!(
            refusal(&config).to_string(),
            format!(
                "{name} requires pipeline parallelism, but pipeline = 1: set pipeline (--pp) to 2 or more, or remove \
                 {name}"
            )
        );
        assert!(Mesh::new(&config.with_pipeline(2), 4).is_ok(), "{name}");
    }
}

#[test]
fn hybrid_context_parallelism_is_refused_where_it_cannot_be() {
    let refusal = |config: &ParallelConfig| Mesh::new(config, 4).unwrap_err().to_string();
    let hybrid = ParallelConfig::new().with_hybrid_context_parallel(8);
    assert!(Mesh::new(&hybrid, 4).is_ok());
    // The groups of hybrid context parallelism have an exchange without a context axis.
    let exchange = |exchange| hybrid.clone().with_context_exchange(exchange);
    assert!(Mesh::new(&exchange(ContextExchange::AllGather), 4).is_ok());
    let mut without_size = hybrid.clone();
    without_size.max_seqlen_per_dp_cp_rank = None;
    let mut without_it = hybrid.clone();
    without_it.hybrid_context_parallel = false;
    for (config, expected) in [
        (
            without_size,
            "with max_seqlen_per_dp_cp_rank = none: expected the maximum",
        ),
        (
            without_it,
            "max_seqlen_per_dp_cp_rank requires hybrid context parallelism",
        ),
        (hybrid.clone().with_pipeline(2), "pipeline = 2: expected 1"),
        (hybrid.clone().with_expert(2), "expert = 2: expected 1"),
        (
            exchange(ContextExchange::AllToAll),
            "expected ring or all-gather",
        ),
        (
            hybrid
                .clone()
                .with_context(2)
                .with_context_split(ContextSplit::Striped),
            "context_split = striped: expected zigzag",
        ),
        (
            hybrid
                .clone()
                .with_context(2)
                .with_order("tp-dp-cp".parse().unwrap()),
            "expected cp before dp",
        ),
    ] {
        let error = refusal(&config);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_with_an_error_is_refused() {
    let refusal = |text| {
        toml::from_str::<ParallelConfig>(text)
            .unwrap_err()
            .to_string()
    };
    assert!(refusal("schedule = '2f1b'").contains("invalid schedule \"2f1b\": expected gpipe"));
    assert!(refusal("zero_stage = 1").contains("unknown field `zero_stage`"));
    assert!(refusal("tensr = 2").contains("unknown field `tensr`"));
    assert!(refusal("order = 'tp-tp'").contains("duplicate axis tp in the order \"tp-tp\""));
}

#[test]
fn axes_have_one_name_everywhere() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct File {
        axis: Axis,
    }
    for axis in Axis::ALL {
        let text = toml::to_string(&File { axis }).unwrap();
        assert_eq!(text, format!("axis = \"{axis}\"\n"));
        assert_eq!(toml::from_str::<File>(&text).unwrap().axis, axis);
    }
    assert_eq!(Axis::ExpertTensor.to_string(), "expert-tensor");
}

#[test]
fn the_world_a_configuration_needs() {
    let config = ParallelConfig::new()
        .with_tensor(2)
        .with_context(3)
        .with_pipeline(4);
    assert_eq!(config.world_size(), None);
    assert_eq!(config.clone().with_data(5).world_size(), Some(120));
    assert_eq!(config.with_data(usize::MAX).world_size(), None);
}

#[test]
fn a_mesh_fills_its_configuration_in() {
    let order: AxisOrder = "dp-tp".parse().unwrap();
    let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2).with_order(order), 8).unwrap();
    let resolved = mesh.config();
    assert_eq!((resolved.data, resolved.expert_tensor), (Some(4), Some(2)));
    assert_eq!(resolved.order.to_string(), "dp-tp-cp-ep-pp");
    // The left-most axis of the order is data, so data has stride 1.
    assert_eq!(mesh.groups(Grid::Dense, Axis::Data)[0], [0, 1, 2, 3]);
}

#[test]
fn one_rank_is_every_stage() {
    let mesh = Mesh::single();
    assert_eq!(mesh.world_size(), 1);
    assert_eq!(mesh.embedding_group(0), [0]);
    for grid in Grid::ALL {
        assert!(grid.axes().iter().all(|axis| mesh.size(grid, axis) == 1));
    }
}

#[test]
fn axes_are_a_set() {
    let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2).with_pipeline(2), 8).unwrap();
    let once = mesh.groups(Grid::Dense, [Axis::Tensor, Axis::Pipeline]);
    assert_eq!(
        mesh.groups(Grid::Dense, [Axis::Pipeline, Axis::Tensor, Axis::Pipeline]),
        once
    );
    assert_eq!(mesh.groups(Grid::Dense, AxisSet::EMPTY).len(), 8);
}

#[test]
#[should_panic = "axis expert is not in the dense grid, which has tensor, context, data, pipeline"]
fn the_dense_grid_has_no_experts() {
    Mesh::single().groups(Grid::Dense, Axis::Expert);
}

#[test]
#[should_panic = "rank 8 is outside a mesh of 8 ranks"]
fn a_rank_outside_the_world() {
    Mesh::new(&ParallelConfig::new(), 8).unwrap().coordinates(8);
}

#[test]
fn a_set_of_axes_has_one_order() {
    let axes = AxisSet::from([Axis::Data, Axis::Context, Axis::Data]);
    insta::assert_snapshot!(axes, @"context x data");
    assert_eq!(axes, Grid::Dense.data_axes());
    assert_eq!(
        serde_json::to_string(&axes).unwrap(),
        r#"["context","data"]"#
    );
    let read: AxisSet = serde_json::from_str(r#"["data","context"]"#).unwrap();
    assert_eq!(read, axes);
    assert_eq!(serde_json::to_string(&Grid::Expert).unwrap(), r#""expert""#);
    assert_eq!(axes.without(Axis::Data), AxisSet::of(Axis::Context));
    assert!(AxisSet::from(None).is_empty() && !axes.contains(Axis::Tensor));
    assert_eq!(Axis::ALL.into_iter().collect::<AxisSet>().iter().count(), 6);
}

#[test]
fn each_axis_of_a_grid_splits_or_sums_or_is_the_pipeline() {
    for grid in Grid::ALL {
        let (data, model) = (grid.data_axes(), grid.model_axes());
        assert!(data.intersection(model).is_empty());
        assert_eq!(data.union(model).with(Axis::Pipeline), grid.axes());
    }
}

#[test]
fn a_rank_is_on_every_axis_of_both_grids() {
    let config = ParallelConfig::new().with_tensor(2).with_expert(2);
    let mesh = Arc::new(Mesh::new(&config, 8).unwrap());
    let rank = MeshRank::new(mesh.clone(), 6);
    let on = |grid, axis| {
        let AxisRank { index, size } = rank.on(grid, axis);
        (index, size)
    };
    assert_eq!(on(Grid::Dense, Axis::Data), (3, 4));
    assert_eq!(on(Grid::Expert, Axis::Data), (1, 2));
    assert_eq!(on(Grid::Expert, Axis::Expert), (1, 2));
    assert_eq!(on(Grid::Dense, Axis::Pipeline), (0, 1));
    // Ranks 4, 5, 6 and 7 differ in expert and expert-tensor.
    let place = rank.among(Grid::Expert, Grid::Expert.model_axes());
    assert_eq!((place.index, place.size), (2, 4));
    assert_eq!(rank.with_rank(7), MeshRank::new(mesh, 7));
}

#[test]
#[should_panic = "rank 8 is outside a mesh of 8 ranks"]
fn a_mesh_rank_is_in_its_mesh() {
    let mesh = Mesh::new(&ParallelConfig::new(), 8).unwrap();
    MeshRank::new(Arc::new(mesh), 8);
}
