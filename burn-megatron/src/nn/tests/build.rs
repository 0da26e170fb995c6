//! Tests that errors of building a model name the problem and the valid values.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use insta::assert_snapshot;

use super::over;
use crate::comm::ParallelContext;
use crate::nn::*;

#[derive(Module, Debug)]
struct Model {
    norm: Norm,
    scale: Param<Tensor<1>>,
}

fn builder() -> ModelBuilder {
    ModelBuilder::new(&ParallelContext::single(), &Device::flex())
}

fn norm(builder: &ModelBuilder) -> Norm {
    NormConfig::new(NormKind::Rms, 4, 1e-5).init(builder)
}

fn scale(builder: &ModelBuilder) -> Param<Tensor<1>> {
    builder.parameter("scale", ParameterSpec::new([4], Init::Constant(2.0)))
}

fn message<M: Module>(builder: ModelBuilder, model: M) -> String {
    let error = builder.finish(model).expect_err("the table does not fit");
    assert!(matches!(error, BuildError::Table(_)), "{error:?}");
    error.to_string()
}

#[test]
fn a_table_lists_the_module_in_its_order() {
    let builder = builder();
    // The parameters are declared in another order than the fields.
    let (scale, norm) = (scale(&builder), norm(&builder.child("norm")));
    let table = builder.finish(Model { norm, scale }).unwrap().table;
    let paths: Vec<_> = table
        .entries()
        .iter()
        .map(|entry| entry.path.as_str())
        .collect();
    assert_eq!(paths, ["norm.weight", "scale"]);
    assert_eq!((table.index("scale"), table.index("norm")), (Some(1), None));
    assert_eq!(table.num_elements(), 8);
}

#[test]
fn an_undeclared_parameter_is_named() {
    let builder = builder();
    let norm = norm(&builder.child("norm"));
    let scale = Param::from_tensor(Tensor::ones([4], &Device::flex()));
    let message = message(builder, Model { norm, scale });
    assert_snapshot!(message, @"no placement was declared for scale");
}

#[test]
fn a_path_that_the_module_has_not_is_named() {
    let builder = builder();
    let (norm, scale) = (norm(&builder.child("normalisation")), scale(&builder));
    let message = message(builder, Model { norm, scale });
    assert_snapshot!(message, @"declared, but not in the module: normalisation.weight");
}

#[test]
fn a_path_that_is_declared_twice_is_named() {
    let builder = builder();
    let norms = vec![norm(&builder.child("norms")), norm(&builder.child("norms"))];
    let message = message(builder, norms);
    assert_snapshot!(
        message,
        @"norms.weight was declared twice: two layers share the path of one builder"
    );
}

#[test]
fn another_shape_than_declared_is_named() {
    let builder = builder();
    let norm = norm(&builder.child("norm"));
    let _ = scale(&builder);
    let scale = Param::from_tensor(Tensor::ones([5], &Device::flex()));
    let message = message(builder, Model { norm, scale });
    assert_snapshot!(message, @"scale has the shape [5], expected [4] on this rank");
}

#[test]
fn lists_have_paths_with_numbers() {
    let builder = builder();
    let norms = (0..2)
        .map(|i| norm(&builder.child("norms").child(i)))
        .collect();
    #[derive(Module, Debug)]
    struct Norms {
        norms: Vec<Norm>,
    }
    let table = builder.finish(Norms { norms }).unwrap().table;
    let paths: Vec<_> = table
        .entries()
        .iter()
        .map(|entry| entry.path.as_str())
        .collect();
    assert_eq!(paths, ["norms.0.weight", "norms.1.weight"]);
}

#[test]
fn local_sizes_add_up() {
    let tables = over(4, |groups| {
        let builder = ModelBuilder::new(&groups, &Device::flex());
        let layer = ColumnParallelLinearConfig::new(6, 8)
            .init(&builder)
            .unwrap();
        let elements = layer.num_params();
        let table = builder.finish(layer).unwrap().table;
        assert_eq!(table.local_elements(groups.mesh_rank()), elements);
        (table.num_elements(), elements)
    });
    assert_eq!(tables, [(56, 14); 4]);
}

fn attention(heads: usize, groups: usize) -> ParallelAttentionConfig {
    ParallelAttentionConfig {
        hidden: 24,
        heads,
        groups,
        head_width: 2,
        bias: true,
        qkv_bias: true,
        qk_norm: None,
        window: None,
        sinks: false,
        scale: None,
        soft_cap: None,
        dropout: 0.0,
        init: Init::Normal(0.02),
        output_init: Init::Normal(0.02),
        sequence: 64,
    }
}

/// Returns the error of a layer on `ranks` ranks.
fn refused<M>(
    ranks: usize,
    build: impl Fn(&ModelBuilder) -> Result<M, BuildError> + Sync,
) -> String {
    let messages = over(ranks, |groups| {
        let builder = ModelBuilder::new(&groups, &Device::flex()).child("block");
        match build(&builder) {
            Ok(_) => panic!("was built"),
            Err(error) => error.to_string(),
        }
    });
    assert!(messages.iter().all(|message| *message == messages[0]));
    messages[0].clone()
}

#[test]
fn heads_that_do_not_fit_are_named() {
    let message = refused(8, |builder| attention(12, 12).init(builder));
    assert_snapshot!(message, @"heads 12 cannot be split over tensor = 8: expected tensor = 1, 2, 3, 4, 6, 12");
}

#[test]
fn groups_that_do_not_fit_are_named() {
    // Neither the number of groups nor the number of ranks is a multiple of the other number.
    let message = refused(4, |builder| attention(12, 6).init(builder));
    assert_snapshot!(
        message,
        @"groups of keys and values 6 cannot be split over tensor = 4: expected tensor = 1, 2, 3, 6"
    );
    let message = refused(1, |builder| attention(12, 5).init(builder));
    assert_snapshot!(
        message,
        @"block: 12 heads cannot share 5 groups of keys and values: use one of [1, 2, 3, 4, 6, 12] groups"
    );
    let message = refused(1, |builder| attention(12, 0).init(builder));
    assert!(
        message.starts_with("block: 12 heads cannot share 0 groups"),
        "{message}"
    );
}

#[test]
fn widths_that_do_not_fit_are_named() {
    let column = ColumnParallelLinearConfig::new(4, 6);
    let message = refused(4, |builder| column.init(builder));
    assert_snapshot!(message, @"output features 6 cannot be split over tensor = 4: expected tensor = 1, 2, 3, 6");
    let row = RowParallelLinearConfig::new(6, 4);
    let message = refused(4, |builder| row.init(builder));
    assert_snapshot!(message, @"input features 6 cannot be split over tensor = 4: expected tensor = 1, 2, 3, 6");
    let (vocabulary, init) = (
        Vocabulary {
            tokens: 10,
            padded: 10,
        },
        Init::Normal(0.02),
    );
    for message in [
        refused(4, |builder| {
            VocabParallelEmbeddingConfig::new(vocabulary, 4)
                .with_init(init)
                .init(builder)
        }),
        refused(4, |builder| {
            OutputLayerConfig::new(vocabulary, 4)
                .with_init(init)
                .with_tied(false)
                .init(builder)
        }),
        refused(4, |builder| {
            OutputLayerConfig::new(vocabulary, 4)
                .with_init(init)
                .with_tied(true)
                .init(builder)
        }),
    ] {
        let expected =
            "padded vocabulary 10 cannot be split over tensor = 4: expected tensor = 1, 2, 5, 10";
        assert_eq!(message, expected);
    }
}

#[test]
fn sections_are_the_whole_output() {
    let section = OutputSection::new("features".into(), 4, 2);
    let config = ColumnParallelLinearConfig::new(4, 6).with_sections(vec![section]);
    let message = refused(2, |builder| config.init(builder));
    assert_snapshot!(
        message,
        @"block: the sections have 8 features in all: expected the 6 of the output"
    );
}

#[test]
fn sections_cannot_be_gathered() {
    let section = OutputSection::new("features".into(), 4, 1);
    let config = ColumnParallelLinearConfig::new(4, 8)
        .with_sections(vec![section.clone(), section])
        .with_gather_output(true);
    let message = refused(2, |builder| config.init(builder));
    assert_snapshot!(message, @"block: an output of several sections cannot be gathered");
}
