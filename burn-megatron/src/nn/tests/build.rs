//! What cannot be built is named, with what would fit.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::over;
use crate::comm::Groups;
use crate::nn::*;

#[derive(Module, Debug)]
struct Model {
    norm: Norm,
    scale: Param<Tensor<1>>,
}

fn scope() -> Scope {
    Scope::new(&Groups::single(), &Device::flex())
}

fn norm(scope: &Scope) -> Norm {
    Norm::new(NormKind::Rms, 4, 1e-5, false, scope)
}

fn scale(scope: &Scope) -> Param<Tensor<1>> {
    scope.parameter("scale", ParameterSpec::new([4], Init::Constant(2.0)))
}

fn message<M: Module>(scope: Scope, model: M) -> String {
    let error = scope.finish(model).expect_err("the table does not fit");
    assert!(matches!(error, BuildError::Table(_)), "{error:?}");
    error.to_string()
}

#[test]
fn a_table_lists_the_module_in_its_order() {
    let scope = scope();
    // Declared in another order than the fields have.
    let (scale, norm) = (scale(&scope), norm(&scope.child("norm")));
    let table = scope.finish(Model { norm, scale }).unwrap().table;
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
    let scope = scope();
    let norm = norm(&scope.child("norm"));
    let scale = Param::from_tensor(Tensor::ones([4], &Device::flex()));
    let message = message(scope, Model { norm, scale });
    assert_eq!(message, "no placement was declared for scale");
}

#[test]
fn a_path_that_the_module_has_not_is_named() {
    let scope = scope();
    let (norm, scale) = (norm(&scope.child("normalisation")), scale(&scope));
    let message = message(scope, Model { norm, scale });
    assert_eq!(
        message,
        "declared, but not in the module: normalisation.weight"
    );
}

#[test]
fn a_path_that_is_declared_twice_is_named() {
    let scope = scope();
    let norms = vec![norm(&scope.child("norms")), norm(&scope.child("norms"))];
    let message = message(scope, norms);
    assert_eq!(
        message,
        "norms.weight was declared twice: two layers share the path of one scope"
    );
}

#[test]
fn another_shape_than_declared_is_named() {
    let scope = scope();
    let norm = norm(&scope.child("norm"));
    let _ = scale(&scope);
    let scale = Param::from_tensor(Tensor::ones([5], &Device::flex()));
    let message = message(scope, Model { norm, scale });
    assert_eq!(
        message,
        "scale has the shape [5]; what was declared gives [4] on this rank"
    );
}

#[test]
fn lists_have_paths_with_numbers() {
    let scope = scope();
    let norms = (0..2)
        .map(|i| norm(&scope.child("norms").child(i)))
        .collect();
    #[derive(Module, Debug)]
    struct Norms {
        norms: Vec<Norm>,
    }
    let table = scope.finish(Norms { norms }).unwrap().table;
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
        let scope = Scope::new(&groups, &Device::flex());
        let layer = ColumnParallelLinearConfig::new(6, 8).init(&scope).unwrap();
        let elements = layer.num_params();
        let table = scope.finish(layer).unwrap().table;
        assert_eq!(table.local_elements(groups.place()), elements);
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
        dropout: 0.0,
        init: Init::Normal(0.02),
        output_init: Init::Normal(0.02),
        sequence_parallel: false,
    }
}

/// The error of a layer on `ranks` ranks.
fn refused<M>(ranks: usize, build: impl Fn(&Scope) -> Result<M, BuildError> + Sync) -> String {
    let messages = over(ranks, |groups| {
        let scope = Scope::new(&groups, &Device::flex()).child("block");
        match build(&scope) {
            Ok(_) => panic!("was built"),
            Err(error) => error.to_string(),
        }
    });
    assert!(messages.iter().all(|message| *message == messages[0]));
    messages[0].clone()
}

#[test]
fn heads_that_do_not_fit_are_named() {
    let message = refused(8, |scope| attention(12, 12).init(scope));
    assert_eq!(
        message,
        "heads 12 cannot be split over tensor = 8; 1, 2, 3, 4, 6, 12 can"
    );
}

#[test]
fn groups_that_do_not_fit_are_named() {
    // Neither can each rank have whole groups, nor whole ranks share one.
    let message = refused(4, |scope| attention(12, 6).init(scope));
    assert_eq!(
        message,
        "groups of keys and values 6 cannot be split over tensor = 4; 1, 2, 3, 6 can"
    );
    let message = refused(1, |scope| attention(12, 5).init(scope));
    assert_eq!(
        message,
        "block: 12 heads cannot share 5 groups of keys and values; \
         [1, 2, 3, 4, 6, 12] groups can serve them"
    );
    let message = refused(1, |scope| attention(12, 0).init(scope));
    assert!(
        message.starts_with("block: 12 heads cannot share 0 groups"),
        "{message}"
    );
}

#[test]
fn widths_that_do_not_fit_are_named() {
    let column = ColumnParallelLinearConfig::new(4, 6);
    let message = refused(4, |scope| column.init(scope));
    assert_eq!(
        message,
        "output features 6 cannot be split over tensor = 4; 1, 2, 3, 6 can"
    );
    let row = RowParallelLinearConfig::new(6, 4);
    let message = refused(4, |scope| row.init(scope));
    assert_eq!(
        message,
        "input features 6 cannot be split over tensor = 4; 1, 2, 3, 6 can"
    );
    let (vocabulary, init) = (
        Vocabulary {
            tokens: 10,
            padded: 10,
        },
        Init::Normal(0.02),
    );
    for message in [
        refused(4, |scope| {
            VocabParallelEmbedding::new(vocabulary, 4, init, false, scope)
        }),
        refused(4, |scope| {
            OutputLayer::new(vocabulary, 4, init, false, false, scope)
        }),
        refused(4, |scope| {
            OutputLayer::new(vocabulary, 4, init, true, false, scope)
        }),
    ] {
        let expected = "padded vocabulary 10 cannot be split over tensor = 4; 1, 2, 5, 10 can";
        assert_eq!(message, expected);
    }
}

#[test]
fn sections_cannot_be_gathered() {
    let section = OutputSection {
        unit: "features",
        units: 4,
        width: 1,
        shared: false,
    };
    let config = ColumnParallelLinearConfig::with_sections(4, vec![section.clone(), section])
        .with_gather_output(true);
    let message = refused(2, |scope| config.init(scope));
    assert_eq!(
        message,
        "block: an output of several sections cannot be gathered"
    );
}
