//! Tests which layers use FP8, and invalid settings.

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

fn mlp(builder: &ModelBuilder) -> Result<ParallelMlp, BuildError> {
    let config = ParallelMlpConfig {
        hidden: 8,
        width: 8,
        activation: Activation::Gelu,
        bias: false,
        init: Init::Normal(0.5),
        output_init: Init::Normal(0.5),
    };
    config.init(builder)
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
    let builder = builder(&ParallelContext::single(), &fp8);
    for block in 0..2 {
        mlp(&builder.child("blocks").child(block)).unwrap();
    }
    mlp(&builder.child("head")).unwrap();
    let built = builder.fp8();
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
    builder
        .fp8()
        .check_layers(&ParallelContext::single())
        .unwrap();
    let weights: Vec<_> = builder
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
    let builder = builder(&ParallelContext::single(), &fp8);
    mlp(&builder.child("blocks").child(0).without_fp8()).unwrap();
    assert!(builder.fp8().layers().is_empty());
    // The layer is still registered as a layer of the model.
    builder
        .fp8()
        .check_layers(&ParallelContext::single())
        .unwrap();
}

#[test]
fn without_a_recipe_nothing_changes() {
    let run = |fp8: Option<&Fp8Config>| {
        let builder = ModelBuilder::with(&ParallelContext::single(), &autodiff(), 7, DType::F32);
        let builder = match fp8 {
            Some(fp8) => builder.with_fp8(fp8).unwrap(),
            None => builder,
        };
        let mlp = mlp(&builder.child("mlp")).unwrap();
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
fn an_unmatched_pattern_is_an_error_with_the_nearest_paths() {
    let fp8 = with(vec![
        layers("**.up", None),
        layers("blocks.*.mlp.upp", None),
    ]);
    let layout = ParallelConfig::new().with_pipeline(2);
    let errors = World::threads(2).unwrap().run(|rank| {
        let groups = ParallelContext::new(&layout, &rank)?;
        let builder = builder(&groups, &fp8);
        mlp(&builder.child("blocks").child(groups.rank()).child("mlp")).unwrap();
        Ok::<_, crate::comm::ParallelContextError>(builder.fp8().check_layers(&groups).unwrap_err())
    });
    let errors: Vec<_> = errors.unwrap().iter().map(ToString::to_string).collect();
    let expected = |block| {
        format!(
            "FP8 layers: `blocks.*.mlp.upp` matches no layer; the nearest are blocks.{block}.mlp.up, \
             blocks.{block}.mlp.down"
        )
    };
    assert_eq!(errors, [expected(0), expected(1)]);
}

/// A layer of one stage counts as a layer of the model.
#[test]
fn the_stages_of_a_pipeline_agree_on_the_patterns() {
    let fp8 = with(vec![layers("blocks.0.*", None), layers("blocks.1.*", None)]);
    let layout = ParallelConfig::new().with_pipeline(2);
    let fit = World::threads(2).unwrap().run(|rank| {
        let groups = ParallelContext::new(&layout, &rank)?;
        let builder = builder(&groups, &fp8);
        mlp(&builder.child("blocks").child(groups.rank())).unwrap();
        Ok::<_, crate::comm::ParallelContextError>(builder.fp8().check_layers(&groups).is_ok())
    });
    assert_eq!(fit.unwrap(), [true, true]);
}

#[test]
fn invalid_settings_are_refused() {
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
        (of(delayed(0, 0)), "invalid history = 0: expected"),
        (of(delayed(65, 1)), "invalid margin = 65: expected"),
        (
            of(delayed(i32::MIN, 1)),
            "invalid margin = -2147483648: expected",
        ),
        (of(epsilon(-1.0)), "invalid epsilon = -1: expected"),
        (of(epsilon(f32::NAN)), "invalid epsilon = NaN: expected"),
        (limit(1.5), "invalid saturation_limit = 1.5: expected"),
        (limit(f64::NAN), "invalid saturation_limit = NaN: expected"),
        (ends, "first_last_bf16 = 1: expected 0 without a recipe"),
        (
            with(vec![layers("a..b", None)]),
            "FP8 layers: invalid pattern `a..b`: it has an empty component",
        ),
        (
            with(vec![layers("a", Some(delayed(0, 0)))]),
            "invalid history = 0: expected",
        ),
    ];
    for (fp8, reason) in refused {
        let builder = ModelBuilder::new(&ParallelContext::single(), &autodiff());
        let error = builder.with_fp8(&fp8).unwrap_err();
        assert!(matches!(error, BuildError::Fp8(_)));
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn two_layers_cannot_share_a_path() {
    let builder = builder(&ParallelContext::single(), &with(vec![]));
    mlp(&builder.child("mlp")).unwrap();
    let error = mlp(&builder.child("mlp")).unwrap_err().to_string();
    insta::assert_snapshot!(
        error,
        @"FP8 layers: two layers have the path mlp.up; give each its own"
    );
}
