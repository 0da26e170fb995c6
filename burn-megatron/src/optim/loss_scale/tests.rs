use insta::assert_snapshot;

use super::*;

/// Settings with small numbers. The scale grows after 3 good steps, and is reduced at the second and each later
/// overflow.
const SMALL: LossScaleConfig = LossScaleConfig {
    initial: 16.0,
    min: 1.0,
    growth: 2.0,
    backoff: 0.5,
    growth_interval: 3,
    hysteresis: 2,
};

fn dynamic(config: LossScaleConfig) -> LossScaler {
    LossScaler::new(&LossScale::Dynamic(config)).expect("fits")
}

/// Runs the steps of `text`, where `x` is an overflow and `.` is a step without overflow. Returns each step with the
/// scale, and `=` unchanged, `+` grown, `-` backed off, or `_` at the minimum.
fn run(scaler: &mut LossScaler, text: &str) -> String {
    let after = text.chars().map(|step| {
        let mark = match scaler.update(step == 'x') {
            ScaleChange::Unchanged => '=',
            ScaleChange::Grown => '+',
            ScaleChange::BackedOff => '-',
            ScaleChange::AtMinimum => '_',
        };
        format!("{step}{}{mark}", scaler.scale())
    });
    after.collect::<Vec<_>>().join(" ")
}

#[test]
fn it_grows_after_each_whole_interval() {
    assert_eq!(
        run(&mut dynamic(SMALL), "......."),
        ".16= .16= .32+ .32= .32= .64+ .64="
    );
}

#[test]
fn the_first_overflow_is_tolerated_and_each_further_one_backs_off() {
    assert_eq!(run(&mut dynamic(SMALL), "xxx"), "x16= x8- x4-");
}

#[test]
fn an_overflow_restarts_the_interval() {
    assert_eq!(
        run(&mut dynamic(SMALL), "..x..."),
        ".16= .16= x16= .16= .16= .32+"
    );
}

/// Good steps reset the hysteresis only after a complete interval.
#[test]
fn only_a_whole_interval_resets_the_hysteresis() {
    assert_eq!(
        run(&mut dynamic(SMALL), "x..x..x...xx"),
        "x16= .16= .16= x8- .8= .8= x4- .4= .4= .8+ x8= x4-"
    );
}

#[test]
fn a_hysteresis_of_1_tolerates_no_overflow_and_one_of_3_two() {
    let with = |hysteresis| {
        dynamic(LossScaleConfig {
            hysteresis,
            ..SMALL
        })
    };
    assert_eq!(run(&mut with(1), "x...x"), "x8- .8= .8= .16+ x8-");
    assert_eq!(run(&mut with(3), "xxxx"), "x16= x16= x8- x4-");
}

#[test]
fn it_never_falls_below_the_minimum() {
    let config = LossScaleConfig { min: 3.0, ..SMALL };
    // Halving 4 would go below the minimum of 3, so the last reduction is smaller.
    assert_eq!(
        run(&mut dynamic(config), "xxxxxx...xx"),
        "x16= x8- x4- x3- x3_ x3_ .3= .3= .6+ x6= x3-"
    );
}

#[test]
fn it_stops_growing_where_f32_ends() {
    let config = LossScaleConfig {
        initial: MAX_SCALE / 4.0,
        growth: 3.0,
        growth_interval: 1,
        ..SMALL
    };
    let mut scaler = dynamic(config);
    assert_eq!(scaler.update(false), ScaleChange::Grown);
    assert_eq!(scaler.scale(), MAX_SCALE * 0.75);
    assert_eq!(scaler.update(false), ScaleChange::Grown);
    assert_eq!(scaler.scale(), MAX_SCALE);
    assert_eq!(scaler.update(false), ScaleChange::Unchanged);
    // Both limits and their inverses are f32 of full precision.
    assert_eq!(1.0 / MAX_SCALE, f64::from(f32::MIN_POSITIVE));
    assert_eq!(1.0 / MIN_SCALE, MAX_SCALE);
    assert_eq!(f64::from(MAX_SCALE as f32), MAX_SCALE);
    // At the maximum, an interval still resets the hysteresis.
    assert_eq!(scaler.update(true), ScaleChange::Unchanged);
    assert_eq!(scaler.update(false), ScaleChange::Unchanged);
    assert_eq!(scaler.update(true), ScaleChange::Unchanged);
    assert_eq!(scaler.update(true), ScaleChange::BackedOff);
    assert_eq!(scaler.scale(), MAX_SCALE / 2.0);
}

#[test]
fn the_defaults_have_their_known_trajectory() {
    let mut scaler = dynamic(LossScaleConfig::default());
    assert_eq!(scaler.scale(), 65536.0);
    assert_eq!(run(&mut scaler, "xx"), "x65536= x32768-");
    for _ in 0..999 {
        assert_eq!(scaler.update(false), ScaleChange::Unchanged);
    }
    assert_eq!(scaler.update(false), ScaleChange::Grown);
    // One overflow is tolerated, and 16 overflows halve the scale from 2^16 to 1.
    let overflows = (1..100).find(|_| scaler.update(true) == ScaleChange::AtMinimum);
    assert_eq!(overflows, Some(1 + 16 + 1));
    assert_eq!(scaler.scale(), 1.0);
}

#[test]
fn what_is_not_dynamic_never_changes() {
    for (setting, scale) in [
        (LossScale::None, 1.0),
        (LossScale::Constant(1024.0), 1024.0),
    ] {
        let mut scaler = LossScaler::new(&setting).expect("fits");
        for step in 0..5000 {
            assert_eq!(scaler.update(step < 100), ScaleChange::Unchanged);
        }
        assert_eq!((scaler.scale(), scaler.state()), (scale, None));
    }
}

/// A scaler that is restored after any step of a run continues like the saved scaler.
#[test]
fn a_run_resumes_from_any_step() {
    let steps = "..x...xx..x....xxx.......x.x...";
    let whole = run(&mut dynamic(SMALL), steps);
    for at in 0..=steps.len() {
        let (before, after) = steps.split_at(at);
        let mut first = dynamic(SMALL);
        let head = run(&mut first, before);
        let saved = serde_json::to_string(&first.state()).expect("is json");
        let mut second = dynamic(SMALL);
        let state: Option<LossScalerState> = serde_json::from_str(&saved).expect("is a state");
        second.restore(state.expect("is dynamic")).expect("fits");
        assert_eq!(second, first);
        let tail = run(&mut second, after);
        assert_eq!(format!("{head} {tail}").trim(), whole);
    }
}

/// Numbers that some JSON readers round, and powers of two, which are the usual scales.
#[test]
fn a_checkpoint_keeps_the_bits_of_the_scale() {
    let powers = (-126..=126).map(|power| 2f64.powi(power));
    for scale in powers.chain([0.1, 1.0 / 3.0, 2f64.powi(80) / 3.0]) {
        let state = LossScalerState {
            scale,
            good_steps: 7,
            overflows: 1,
        };
        let json = serde_json::to_string(&state).expect("is json");
        let read: LossScalerState = serde_json::from_str(&json).expect("is a state");
        assert_eq!(read, state, "{json}");
        let toml = toml::to_string(&state).expect("is toml");
        let read: LossScalerState = toml::from_str(&toml).expect("is a state");
        assert_eq!(read, state, "{toml}");
    }
    let wrong = r#"{"scale":"large","good_steps":0,"overflows":0}"#;
    let error = serde_json::from_str::<LossScalerState>(wrong).expect_err("is no number");
    assert!(error.to_string().contains("a number as text"), "{error}");
}

#[test]
fn a_shorter_interval_ends_at_the_next_good_step() {
    let mut scaler = dynamic(SMALL);
    let state = LossScalerState {
        scale: 8.0,
        good_steps: 900,
        overflows: 1,
    };
    scaler.restore(state).expect("fits");
    assert_eq!(run(&mut scaler, ".x"), ".16+ x16=");
}

#[test]
fn a_scale_out_of_range_is_refused() {
    let state = |scale| LossScalerState {
        scale,
        good_steps: 0,
        overflows: 0,
    };
    let mut scaler = dynamic(LossScaleConfig { min: 4.0, ..SMALL });
    let before = scaler.clone();
    for scale in [2.0, 0.0, -8.0, f64::NAN, f64::INFINITY, 2.0 * MAX_SCALE] {
        let error = scaler.restore(state(scale)).expect_err("does not fit");
        assert!(
            matches!(error, LossScaleError::Saved { min: 4.0, .. }),
            "{error}"
        );
    }
    assert_eq!(scaler, before);
    assert_snapshot!(
        scaler.restore(state(2.0)).unwrap_err(),
        @"loss_scale: the checkpoint has a scale of 2, expected one between min = 4 and 2^126: change min, or \
          start with the initial scale"
    );
    let mut constant = LossScaler::new(&LossScale::Constant(8.0)).expect("fits");
    let error = constant.restore(state(8.0)).expect_err("is not dynamic");
    assert_eq!(error, LossScaleError::NotDynamic { scale: 8.0 });
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Recipe {
    #[serde(default)]
    loss_scale: LossScale,
}

fn read(text: &str) -> Result<LossScale, toml::de::Error> {
    toml::from_str::<Recipe>(text).map(|recipe| recipe.loss_scale)
}

#[test]
fn a_recipe_has_four_forms() {
    let forms = [
        ("", LossScale::None),
        ("loss_scale = 'none'", LossScale::None),
        (
            "loss_scale = 'dynamic'",
            LossScale::Dynamic(LossScaleConfig::default()),
        ),
        ("loss_scale = 1024.5", LossScale::Constant(1024.5)),
        ("loss_scale = 1024", LossScale::Constant(1024.0)),
        (
            "[loss_scale]\nhysteresis = 1\nmin = 2.0",
            LossScale::Dynamic(LossScaleConfig {
                hysteresis: 1,
                min: 2.0,
                ..LossScaleConfig::default()
            }),
        ),
    ];
    for (text, expected) in forms {
        assert_eq!(read(text).expect(text), expected, "{text}");
        let recipe = Recipe {
            loss_scale: expected,
        };
        let toml = toml::to_string(&recipe).expect("is toml");
        assert_eq!(read(&toml).expect("is a recipe"), expected, "{toml}");
        let json = serde_json::to_string(&recipe).expect("is json");
        let again: Recipe = serde_json::from_str(&json).expect("is a recipe");
        assert_eq!(again, recipe, "{json}");
    }
}

#[test]
fn an_invalid_recipe_names_the_valid_forms() {
    let error = |text| read(text).expect_err(text).to_string();
    let forms = "\"none\", \"dynamic\", a number, or a table of a dynamic scale";
    for text in [
        "loss_scale = 'dynamc'",
        "loss_scale = true",
        "loss_scale = [1]",
    ] {
        assert!(error(text).contains(forms), "{}", error(text));
    }
    let unknown = error("loss_scale = { initial = 2.0, growht = 2.0 }");
    assert!(
        unknown.contains("unknown field `growht`") && unknown.contains("`growth`"),
        "{unknown}"
    );
    assert!(error("loss_scale = { growth_interval = -1 }").contains("-1"));
}

#[test]
fn settings_out_of_range_are_named() {
    let config = LossScaleConfig::default();
    let with = |change: &dyn Fn(&mut LossScaleConfig)| {
        let mut config = config;
        change(&mut config);
        match LossScaler::new(&LossScale::Dynamic(config)) {
            Err(LossScaleError::Setting { name, .. }) => name,
            other => panic!("{config:?} gives {other:?}"),
        }
    };
    for value in [0.0, -1.0, f64::NAN, f64::INFINITY, MIN_SCALE / 2.0] {
        assert_eq!(with(&|c| c.min = value), "min");
    }
    for value in [0.5, f64::NAN, f64::INFINITY, MAX_SCALE * 2.0] {
        assert_eq!(with(&|c| c.initial = value), "initial");
    }
    for value in [1.0, 0.5, -2.0, f64::NAN, f64::INFINITY] {
        assert_eq!(with(&|c| c.growth = value), "growth");
    }
    for value in [0.0, 1.0, 2.0, -0.5, f64::NAN] {
        assert_eq!(with(&|c| c.backoff = value), "backoff");
    }
    assert_eq!(with(&|c| c.growth_interval = 0), "growth_interval");
    assert_eq!(with(&|c| c.hysteresis = 0), "hysteresis");
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, MAX_SCALE * 2.0] {
        let error = LossScale::Constant(scale).check().expect_err("is no scale");
        assert!(
            error
                .to_string()
                .starts_with("invalid loss_scale: constant = ")
        );
    }
    let config = LossScaleConfig { min: 1e6, ..config };
    assert_snapshot!(
        config.check().expect_err("min is too large"),
        @"invalid loss_scale: initial = 65536 must lie between min = 1000000 and 2^126"
    );
    // The limits of the ranges are valid.
    let ends = LossScaleConfig {
        initial: MAX_SCALE,
        min: MAX_SCALE,
        growth_interval: 1,
        hysteresis: 1,
        ..config
    };
    assert_eq!(ends.check(), Ok(()));
    assert_eq!(LossScale::Constant(MIN_SCALE).check(), Ok(()));
}
