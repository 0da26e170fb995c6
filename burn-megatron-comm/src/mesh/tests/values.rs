//! Configurations and orders as values: text, files, defaults.

use super::super::{Axis, AxisOrder, Mesh, ParallelConfig};

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

#[test]
fn a_file_with_an_error_is_refused() {
    let refusal = |text| {
        toml::from_str::<ParallelConfig>(text)
            .unwrap_err()
            .to_string()
    };
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
    // The order left to right: data has stride 1.
    assert_eq!(mesh.groups(&[Axis::Data])[0], [0, 1, 2, 3]);
}

#[test]
fn one_rank_is_every_stage() {
    let mesh = Mesh::single();
    assert_eq!(mesh.world_size(), 1);
    assert!(mesh.is_first_stage(0) && mesh.is_last_stage(0));
    assert_eq!((mesh.next_stage(0), mesh.previous_stage(0)), (0, 0));
    assert_eq!(mesh.embedding_group(0), [0]);
    assert_eq!(Axis::ALL.map(|axis| mesh.size(axis)), [1; 6]);
}

#[test]
fn axes_are_a_set() {
    let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2).with_pipeline(2), 8).unwrap();
    let once = mesh.groups(&[Axis::Tensor, Axis::Pipeline]);
    assert_eq!(
        mesh.groups(&[Axis::Pipeline, Axis::Tensor, Axis::Pipeline]),
        once
    );
    assert_eq!(mesh.groups(&[]).len(), 8);
}

#[test]
#[should_panic = "axis expert is not in this grid, which has tensor, context, data, pipeline"]
fn the_dense_grid_has_no_experts() {
    Mesh::single().groups(&[Axis::Expert]);
}

#[test]
#[should_panic = "rank 8 is outside a mesh of 8 ranks"]
fn a_rank_outside_the_world() {
    Mesh::new(&ParallelConfig::new(), 8).unwrap().coordinates(8);
}
