use insta::assert_snapshot;

use super::*;

/// The paths of a small model, and whether each parameter has weight decay by default.
const MODEL: [(&str, bool); 7] = [
    ("embedding.weight", true),
    ("blocks.0.norm.weight", false),
    ("blocks.0.mlp.up.weight", true),
    ("blocks.0.mlp.up.bias", false),
    ("blocks.1.mlp.up.weight", true),
    ("blocks.1.mlp.up.bias", false),
    ("output.weight", true),
];

fn paths() -> impl Iterator<Item = &'static str> {
    MODEL.into_iter().map(|(path, _)| path)
}

fn group(pattern: &str, weight_decay: Option<f64>, learning_rate: Option<f64>) -> ParameterGroup {
    ParameterGroup {
        pattern: pattern.into(),
        weight_decay,
        learning_rate,
        optimizer: None,
    }
}

/// Returns the decay and rate of each parameter of the model.
fn resolved(groups: &[ParameterGroup]) -> Vec<(f64, f64)> {
    let multipliers = resolve(groups, MODEL).expect("valid groups");
    multipliers.iter().map(|m| (m.decay, m.rate)).collect()
}

const WEIGHT: (f64, f64) = (1.0, 1.0);
const PLAIN: (f64, f64) = (0.0, 1.0);

#[test]
fn without_groups_the_table_decides() {
    let defaults = [WEIGHT, PLAIN, WEIGHT, PLAIN, WEIGHT, PLAIN, WEIGHT];
    assert_eq!(resolved(&[]), defaults);
}

#[test]
fn a_group_sets_its_settings_where_it_matches() {
    let groups = [group("blocks.*.mlp.**", None, Some(0.5))];
    assert_eq!(
        resolved(&groups),
        [
            WEIGHT,
            PLAIN,
            (1.0, 0.5),
            (0.0, 0.5),
            (1.0, 0.5),
            (0.0, 0.5),
            WEIGHT
        ],
    );
    let groups = [
        group("**.bias", Some(1.0), None),
        group("embedding.weight", Some(0.0), None),
    ];
    assert_eq!(
        resolved(&groups),
        [PLAIN, PLAIN, WEIGHT, WEIGHT, WEIGHT, WEIGHT, WEIGHT],
    );
}

#[test]
fn later_groups_override_setting_by_setting() {
    let mut groups = vec![
        group("**", Some(0.5), Some(3.0)),
        group("blocks.**", None, Some(2.0)),
        group("blocks.1.**.weight", Some(0.25), None),
    ];
    let outer = (0.5, 3.0);
    let inner = (0.5, 2.0);
    let weight = (0.25, 2.0);
    assert_eq!(
        resolved(&groups),
        [outer, inner, inner, inner, weight, inner, outer]
    );
    // In reverse order, the widest pattern overrides the others.
    groups.reverse();
    assert_eq!(resolved(&groups), [outer; 7]);
}

/// A pipeline rank resolves the same multipliers for its part as a single rank.
#[test]
fn a_part_of_the_model_is_resolved_as_in_the_whole() {
    let groups = [
        group("blocks.0.**", Some(0.0), None),
        group("output.*", None, Some(0.1)),
    ];
    let whole = resolve(&groups, MODEL).expect("valid groups");
    let parts = MODEL
        .chunks(3)
        .map(|part| resolve(&groups, part.iter().copied()).expect("valid groups"));
    assert_eq!(parts.collect::<Vec<_>>().concat(), whole);
    assert_eq!(resolve(&groups, []), Ok(vec![]));
}

#[test]
fn unmatched_groups_are_found_over_all_ranks() {
    let groups = [
        group("embedding.*", Some(0.0), None),
        group("blocks.*.mpl.up.weight", Some(0.0), None),
        group("output.*", Some(0.0), None),
    ];
    let on = |paths: &[(&'static str, bool)]| {
        let paths = paths.iter().map(|(path, _)| *path);
        unmatched(&groups, paths).expect("valid groups")
    };
    assert_eq!(on(&MODEL[..3]), [1, 2]);
    assert_eq!(on(&MODEL[3..]), [0, 1]);
    assert_eq!(on(&MODEL), [1]);
    assert_eq!(on(&[]), [0, 1, 2]);
    assert_snapshot!(
        unmatched_error(&groups[1], paths()),
        @"the parameter group `blocks.*.mpl.up.weight` matches no parameter; the nearest are \
          blocks.0.mlp.up.weight, blocks.1.mlp.up.weight, blocks.0.norm.weight"
    );
    assert_snapshot!(
        unmatched_error(&groups[1], ["norm.weight"]),
        @"the parameter group `blocks.*.mpl.up.weight` matches no parameter; the nearest is norm.weight"
    );
    assert_snapshot!(
        unmatched_error(&groups[1], []),
        @"the parameter group `blocks.*.mpl.up.weight` matches no parameter: the model has none"
    );
}

#[test]
fn invalid_groups_are_named() {
    let error = |group: ParameterGroup| {
        let good = self::group("**", Some(1.0), None);
        let groups = [good, group];
        let error = check(&groups)
            .expect_err("the second is invalid")
            .to_string();
        // The errors are compared as text, because NaN equals nothing.
        let others = [
            resolve(&groups, MODEL).expect_err("the second is invalid"),
            unmatched(&groups, paths()).expect_err("the second is invalid"),
            unmatched_error(&groups[1], paths()),
        ];
        assert!(others.iter().all(|other| other.to_string() == error));
        error
    };
    for value in [-0.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(
            error(group("**.bias", Some(1.0), Some(value))),
            format!(
                "invalid parameter group `**.bias`: learning_rate = {value}, expected a finite \
                 multiplier of at least 0"
            ),
        );
        assert!(error(group("**.bias", Some(value), None)).contains("weight_decay = "));
    }
    assert_snapshot!(
        error(group("**.bias", None, None)),
        @"the parameter group `**.bias` sets nothing: give weight_decay, learning_rate or both"
    );
    assert_snapshot!(
        error(group("**bias", Some(0.0), None)),
        @"invalid parameter group `**bias`: ** has to stand alone between dots, as in **.bias; inside of a \
          component use *"
    );
    assert!(error(group("", Some(0.0), None)).contains("empty component"));
    // The smallest multiplier is 0, of either sign.
    for zero in [0.0, -0.0] {
        assert_eq!(check(&[group("**", Some(zero), Some(zero))]), Ok(()));
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    groups: Vec<ParameterGroup>,
}

#[test]
fn a_recipe_lists_groups() {
    let text = "[[groups]]\npattern = \"embedding.*\"\nweight_decay = 0.0\n\n\
                [[groups]]\npattern = \"**.bias\"\nlearning_rate = 2.0\n";
    let recipe: Recipe = toml::from_str(text).expect("is a recipe");
    let expected = vec![
        group("embedding.*", Some(0.0), None),
        group("**.bias", None, Some(2.0)),
    ];
    assert_eq!(recipe.groups, expected);
    assert_eq!(toml::to_string(&recipe).expect("is toml"), text);
    let error = |text| toml::from_str::<Recipe>(text).expect_err(text).to_string();
    assert!(error("[[groups]]\nweight_decay = 0.0").contains("missing field `pattern`"));
    assert!(error("[[groups]]\npattern = '**'\ndecay = 0.0").contains("unknown field `decay`"));
}
