//! Which layers compute in 8 bits, and what is refused.

use super::*;
use crate::comm::World;
use crate::mesh::ParallelConfig;

fn layers(pattern: &str, recipe: Option<Fp8Recipe>) -> Fp8Layers {
    Fp8Layers {
        pattern: pattern.into(),
        recipe,
    }
}

fn current() -> Fp8Recipe {
    Fp8Recipe::Current(CurrentScaling::default())
}

fn mlp(scope: &Scope) -> Result<ParallelMlp, BuildError> {
    let config = ParallelMlpConfig {
        hidden: 8,
        width: 8,
        activation: Activation::Gelu,
        bias: false,
        init: Init::Normal(0.5),
        output_init: Init::Normal(0.5),
        sequence_parallel: false,
    };
    config.init(scope)
}

fn with(overrides: Vec<Fp8Layers>) -> Fp8Config {
    Fp8Config {
        layers: overrides,
        ..config((current(), Fp8Format::Hybrid))
    }
}

#[test]
fn later_patterns_override_earlier_ones() {
    let fp8 = with(vec![
        layers("**.down", None),
        layers("blocks.1.**", Some(Fp8Recipe::MxFp8)),
        layers("blocks.?.up", Some("delayed".parse().unwrap())),
    ]);
    let scope = scope(&Groups::single(), &fp8);
    for block in 0..2 {
        mlp(&scope.child("blocks").child(block)).unwrap();
    }
    mlp(&scope.child("head")).unwrap();
    let built = scope.fp8();
    let built: Vec<_> = built
        .layers()
        .iter()
        .map(|l| (l.path().to_string(), l.recipe().name()))
        .collect();
    let expected = [
        ("blocks.0.up", "delayed"),
        ("blocks.1.up", "delayed"),
        ("blocks.1.down", "mxfp8"),
        ("head.up", "current"),
    ];
    let expected = expected.map(|(path, recipe)| (path.to_string(), recipe));
    assert_eq!(built, expected);
    scope.fp8().check_layers(&Groups::single()).unwrap();
    let weights: Vec<_> = scope
        .fp8()
        .weights()
        .into_iter()
        .map(|(path, _)| path)
        .collect();
    assert_eq!(weights[2], "blocks.1.down.weight");
}

#[test]
fn a_place_can_be_left_out() {
    let fp8 = with(vec![layers("blocks.0.up", Some(Fp8Recipe::MxFp8))]);
    let scope = scope(&Groups::single(), &fp8);
    mlp(&scope.child("blocks").child(0).without_fp8()).unwrap();
    assert!(scope.fp8().layers().is_empty());
    // It is a layer of the model all the same.
    scope.fp8().check_layers(&Groups::single()).unwrap();
}

#[test]
fn without_a_recipe_nothing_changes() {
    let run = |fp8: Option<&Fp8Config>| {
        let scope = Scope::with(&Groups::single(), &autodiff(), 7, DType::F32);
        let scope = match fp8 {
            Some(fp8) => scope.with_fp8(fp8).unwrap(),
            None => scope,
        };
        let mlp = mlp(&scope.child("mlp")).unwrap();
        let x = leaf(spread([2, 3, 8], 0.5));
        let y = mlp.forward(x.clone());
        let gradients = backward(y.clone(), spread([2, 3, 8], 3.0));
        [floats(y.inner()), floats(x.grad(&gradients).unwrap())].map(|x| bits(&x))
    };
    let plain = run(None);
    assert_eq!(run(Some(&Fp8Config::default())), plain);
    assert_eq!(run(Some(&with(vec![layers("**", None)]))), plain);
    assert_ne!(run(Some(&with(vec![]))), plain);
}

#[test]
fn a_pattern_that_fits_nothing_is_told_with_the_nearest() {
    let fp8 = with(vec![
        layers("**.up", None),
        layers("blocks.*.mlp.upp", None),
    ]);
    let layout = ParallelConfig::new().with_pipeline(2);
    let told = World::threads(2).unwrap().run(|rank| {
        let groups = Groups::new(&layout, &rank)?;
        let scope = scope(&groups, &fp8);
        mlp(&scope.child("blocks").child(groups.rank()).child("mlp")).unwrap();
        Ok::<_, crate::comm::GroupsError>(scope.fp8().check_layers(&groups).unwrap_err())
    });
    let told: Vec<_> = told.unwrap().iter().map(ToString::to_string).collect();
    let expected = |block| {
        format!(
            "the 8-bit layers `blocks.*.mlp.upp` fit no layer; the nearest are blocks.{block}.mlp.up, \
             blocks.{block}.mlp.down"
        )
    };
    assert_eq!(told, [expected(0), expected(1)]);
}

/// A layer of one stage is a layer of the model.
#[test]
fn the_stages_of_a_pipeline_agree_on_the_patterns() {
    let fp8 = with(vec![layers("blocks.0.*", None), layers("blocks.1.*", None)]);
    let layout = ParallelConfig::new().with_pipeline(2);
    let fit = World::threads(2).unwrap().run(|rank| {
        let groups = Groups::new(&layout, &rank)?;
        let scope = scope(&groups, &fp8);
        mlp(&scope.child("blocks").child(groups.rank())).unwrap();
        Ok::<_, crate::comm::GroupsError>(scope.fp8().check_layers(&groups).is_ok())
    });
    assert_eq!(fit.unwrap(), [true, true]);
}

#[test]
fn settings_without_a_meaning_are_refused() {
    let delayed = |margin, history| {
        Fp8Recipe::Delayed(DelayedScaling {
            margin,
            history,
            ..DelayedScaling::default()
        })
    };
    let epsilon = |epsilon| {
        Fp8Recipe::Current(CurrentScaling {
            epsilon,
            ..CurrentScaling::default()
        })
    };
    let of = |recipe| config((recipe, Fp8Format::Hybrid));
    let limit = |saturation_limit| Fp8Config {
        saturation_limit,
        ..of(current())
    };
    let ends = Fp8Config {
        first_last_bf16: 1,
        ..Fp8Config::default()
    };
    let refused = [
        (of(delayed(0, 0)), "history = 0;"),
        (of(delayed(65, 1)), "margin = 65;"),
        (of(delayed(i32::MIN, 1)), "margin = -2147483648;"),
        (of(epsilon(-1.0)), "epsilon = -1;"),
        (of(epsilon(f32::NAN)), "epsilon = NaN;"),
        (limit(1.5), "saturation_limit = 1.5;"),
        (limit(f64::NAN), "saturation_limit = NaN;"),
        (ends, "first_last_bf16 = 1; without a recipe"),
        (
            with(vec![layers("a..b", None)]),
            "the 8-bit layers `a..b`: it has an empty component",
        ),
        (with(vec![layers("a", Some(delayed(0, 0)))]), "history = 0;"),
    ];
    for (fp8, reason) in refused {
        let scope = Scope::new(&Groups::single(), &autodiff());
        let error = scope.with_fp8(&fp8).unwrap_err();
        assert!(matches!(error, BuildError::Fp8(_)));
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn two_layers_cannot_share_a_path() {
    let scope = scope(&Groups::single(), &with(vec![]));
    mlp(&scope.child("mlp")).unwrap();
    let error = mlp(&scope.child("mlp")).unwrap_err().to_string();
    assert_eq!(
        error,
        "two 8-bit layers are called mlp.up; give each a path of its own"
    );
}
