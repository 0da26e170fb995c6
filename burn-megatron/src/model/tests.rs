//! Tests of a model that consists of Burn's modules, in pipeline stages.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};

use super::*;
use crate::comm::ParallelContext;
use crate::mesh::{Mesh, ParallelConfig};
use crate::nn::{BuildError, ModelBuilder, ParallelModule};
use crate::pipeline::split::{LayerSplit, StageLayout};

#[derive(Module, Debug)]
struct Model {
    embedding: Option<Linear>,
    blocks: StageLayers<LayerNorm>,
    output: Option<Linear>,
}

fn linear(builder: ModelBuilder) -> Linear {
    builder.replicated(|device| LinearConfig::new(3, 4).init(device))
}

fn build(builder: ModelBuilder, stages: &[(usize, StageLayout)]) -> ParallelModule<Model> {
    let stages = StageBuilder::new(builder, stages);
    let blocks = stages.layers("blocks", |number, builder| {
        Ok::<_, BuildError>(
            builder.replicated(|device| LayerNormConfig::new(number + 1).init(device)),
        )
    });
    let model = Model {
        embedding: stages.first_and_last("embedding").map(linear),
        blocks: blocks.unwrap(),
        output: stages.last("output").map(linear),
    };
    stages.finish(model).unwrap()
}

/// Returns the builder of a rank of a pipeline.
fn builder(ranks: usize, rank: usize) -> ModelBuilder {
    let layout = ParallelConfig::new().with_pipeline(ranks).with_data(1);
    let mesh = Mesh::new(&layout, ranks).unwrap();
    let groups = ParallelContext::offline(mesh, rank).unwrap();
    ModelBuilder::with(&groups, &Device::flex(), 7, DType::F64)
}

/// Returns the model of a rank, with two stages on each of two ranks.
fn of_rank(builder: ModelBuilder, rank: usize) -> ParallelModule<Model> {
    let stages = LayerSplit::Even.stages(8, 4).unwrap().into_iter();
    let own: Vec<_> = stages.enumerate().filter(|(s, _)| s % 2 == rank).collect();
    build(builder, &own)
}

#[derive(Default)]
struct Values(Vec<Vec<f64>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data().iter().collect());
    }
}

fn values(model: &impl Module) -> Vec<Vec<f64>> {
    let mut values = Values::default();
    model.visit(&mut values);
    values.0
}

fn named(model: &ParallelModule<Model>) -> Vec<(String, Vec<f64>)> {
    let paths = model.table.entries().iter().map(|entry| entry.path.clone());
    paths.zip(values(&model.module)).collect()
}

/// Every parameter has the path and the values of the single-rank model, and the stage that holds it.
#[test]
fn a_rank_has_the_modules_of_its_stages() {
    let whole = LayerSplit::Even.stages(8, 1).unwrap();
    let whole = build(builder(1, 0), &[(0, whole[0].clone())]);
    let expected = named(&whole);
    assert_eq!(expected.len(), 2 + 8 * 2 + 2);
    let distinct = |at: usize| expected.iter().any(|(_, other)| *other == expected[at].1);
    assert!(distinct(0));
    assert_ne!(expected[0].1, expected[18].1);
    let mut found = 0;
    for rank in 0..2 {
        let part = of_rank(builder(2, rank), rank);
        for (path, values) in named(&part) {
            let expected = expected.iter().find(|(other, _)| *other == path);
            assert_eq!(&values, &expected.unwrap().1, "{path}");
            found += 1;
        }
        for entry in part.table.entries() {
            let stage = match entry.path.split('.').collect::<Vec<_>>()[..] {
                ["blocks", number, _] => number.parse::<usize>().unwrap() / 2,
                // A copy belongs to the stage (the first or the last) that the rank has.
                ["embedding", _] => 3 * rank,
                _ => 3,
            };
            assert_eq!(entry.stage, stage, "{}", entry.path);
            let copies = entry.path.starts_with("embedding");
            assert_eq!(
                entry.pipeline_copies,
                if copies { vec![0, 1] } else { vec![] }
            );
        }
        let own = |stage: usize| part.module.blocks.of_stage(stage);
        let sizes = |stage| own(stage).map(|(i, norm)| (i, norm.gamma.dims()[0]));
        let first = 4 * rank;
        assert_eq!(
            sizes(rank).collect::<Vec<_>>(),
            [(0, 2 * rank + 1), (1, 2 * rank + 2)]
        );
        let second: Vec<_> = sizes(rank + 2).collect();
        assert_eq!(second, [(2, 2 * rank + 5), (3, 2 * rank + 6)], "{first}");
    }
    assert_eq!(found, expected.len() + 2);
}

#[test]
fn an_outline_has_shapes_without_values() {
    let stages = LayerSplit::Even.stages(8, 1).unwrap();
    let outline = build(builder(1, 0).outline(), &[(0, stages[0].clone())]);
    let whole = build(builder(1, 0), &[(0, stages[0].clone())]);
    assert_eq!(outline.table, whole.table);
    assert!(values(&outline.module).iter().flatten().all(|x| x.is_nan()));
    assert!(
        values(&whole.module)
            .iter()
            .flatten()
            .all(|x| x.is_finite())
    );
}

/// A list of layers is traversed, moved and mapped like Burn's own lists.
#[test]
fn layers_are_a_module() {
    let model = of_rank(builder(2, 0), 0).module;
    let count = values(&model).iter().map(Vec::len).sum::<usize>();
    assert_eq!(model.num_params(), count);
    let moved = model.clone().fork(&Device::flex());
    assert_eq!(values(&moved.valid().train()), values(&model));
    assert!(model.to_string().contains("StageLayers"), "{model}");
}

#[test]
#[should_panic(expected = "stage 1 is not on this rank of the pipeline")]
fn a_stage_of_another_rank_is_a_bug_of_the_caller() {
    let model = of_rank(builder(2, 0), 0).module;
    let _ = model.blocks.of_stage(1).count();
}
