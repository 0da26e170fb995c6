use insta::assert_snapshot;

use super::*;

/// Formats the layers of each stage as `E 0..3 | 3..5 | L`.
fn text(stages: &[StageLayout]) -> String {
    let stage = |stage: &StageLayout| {
        let layers = if stage.layers.is_empty() {
            String::new()
        } else {
            format!("{:?}", stage.layers)
        };
        let embedding = if stage.embedding { "E" } else { "" };
        let loss = if stage.loss { "L" } else { "" };
        [embedding, &layers, loss].join(" ").trim().to_string()
    };
    stages.iter().map(stage).collect::<Vec<_>>().join(" | ")
}

fn split(split: LayerSplit, layers: usize, stages: usize) -> String {
    match split.stages(layers, stages) {
        Ok(stages) => text(&stages),
        Err(error) => error.to_string(),
    }
}

fn ends(first: impl Into<Option<usize>>, last: impl Into<Option<usize>>) -> LayerSplit {
    LayerSplit::Ends {
        first: first.into(),
        last: last.into(),
    }
}

fn layout(of: &str) -> String {
    match parse_layout(of) {
        Ok(stages) => text(&stages),
        Err(error) => error.to_string(),
    }
}

#[test]
fn evenly() {
    let even = |layers, stages| split(LayerSplit::Even, layers, stages);
    assert_eq!(even(8, 4), "E 0..2 | 2..4 | 4..6 | 6..8 L");
    assert_eq!(even(3, 1), "E 0..3 L");
    assert_snapshot!(
        even(10, 4),
        @"10 layers are not divisible by 4 stages: use 8 or 12 layers, or 2 or 5 stages, or set the \
          numbers of layers of the first and the last stage"
    );
    assert_snapshot!(
        even(2, 4),
        @"2 layers are not divisible by 4 stages: use 4 layers, or 2 stages, or set the numbers of \
          layers of the first and the last stage"
    );
    assert_snapshot!(even(0, 4), @"invalid number of layers 0: a pipeline needs at least 1");
    assert_snapshot!(even(4, 0), @"invalid number of stages 0: a pipeline needs at least 1");
}

#[test]
fn with_numbers_for_the_ends() {
    assert_eq!(split(ends(1, 3), 10, 4), "E 0..1 | 1..4 | 4..7 | 7..10 L");
    assert_eq!(split(ends(0, 0), 4, 4), "E | 0..2 | 2..4 | L");
    assert_eq!(
        split(ends(4, None), 10, 4),
        "E 0..4 | 4..6 | 6..8 | 8..10 L"
    );
    assert_eq!(
        split(ends(None, 4), 10, 4),
        "E 0..2 | 2..4 | 4..6 | 6..10 L"
    );
    assert_eq!(split(ends(None, None), 4, 2), "E 0..2 | 2..4 L");
    assert_eq!(split(ends(1, 3), 4, 2), "E 0..1 | 1..4 L");
    assert_eq!(split(ends(4, None), 4, 1), "E 0..4 L");
}

#[test]
fn ends_that_do_not_fit() {
    assert_snapshot!(
        split(ends(2, 1), 10, 4),
        @"3 of 10 layers on the first and the last stage leave 7 for 2 other stages, expected a \
          positive multiple of 2: use 2 or 4 layers at the ends"
    );
    assert_snapshot!(
        split(ends(2, 2), 4, 4),
        @"4 of 4 layers on the first and the last stage leave 0 for 2 other stages, expected a \
          positive multiple of 2: use 2 layers at the ends"
    );
    assert_snapshot!(
        split(ends(6, 6), 10, 4),
        @"12 layers on the first and the last stage do not fit 10 layers over 4 stages: use at \
          most 8 layers there"
    );
    assert_eq!(split(ends(4, 4), 10, 4), "E 0..4 | 4..5 | 5..6 | 6..10 L");
    assert_snapshot!(
        split(ends(1, 1), 2, 1),
        @"2 layers on the first and the last stage do not fit 2 layers over 1 stages: use 2 stages \
          or more"
    );
    assert_snapshot!(
        split(ends(1, 1), 4, 2),
        @"2 layers on the first and the last stage do not fit 4 layers over 2 stages: use 4 layers \
          there, or more stages"
    );
    assert_snapshot!(
        split(ends(1, 1), 3, 20),
        @"2 layers on the first and the last stage do not fit 3 layers over 20 stages: use at most \
          3 stages"
    );
    assert_eq!(split(ends(1, 1), 3, 3), "E 0..1 | 1..2 | 2..3 L");
    assert!(split(ends(usize::MAX, 1), 3, 3).contains("at most 2 layers there"));
    // The message must not say "at most 0": the other stages need all layers.
    assert!(split(ends(5, 1), 3, 5).contains("more than 3 layers"));
}

#[test]
fn every_split_covers_the_layers_in_order() {
    for layers in 1..13 {
        for stages in 1..7 {
            let choices = [LayerSplit::Even, ends(1, None), ends(None, 2), ends(2, 1)];
            for split in choices {
                let Ok(parts) = split.stages(layers, stages) else {
                    continue;
                };
                assert_eq!(parts.len(), stages);
                let all: Vec<_> = parts.iter().flat_map(|part| part.layers.clone()).collect();
                assert_eq!(all, (0..layers).collect::<Vec<_>>());
                for (i, part) in parts.iter().enumerate() {
                    assert_eq!((part.embedding, part.loss), (i == 0, i + 1 == stages));
                }
            }
        }
    }
}

#[test]
fn layout_strings() {
    assert_eq!(layout("Et*3|(tt|)*2,L"), "E 0..3 | 3..5 | 5..7 | L");
    assert_eq!(layout("Et*3|(tt|)*29,L").split(" | ").count(), 31);
    assert_eq!(layout("EtL"), "E 0..1 L");
    assert_eq!(layout("E|t*2|*2,t|L"), "E | 0..2 |  | 2..3 | L");
    assert_eq!(layout(" E t, t\n| t L "), "E 0..2 | 2..3 L");
    assert_eq!(
        layout("E((t|)*2,tt|)*2,L"),
        "E 0..1 | 1..2 | 2..4 | 4..5 | 5..6 | 6..8 | L"
    );
    // Megatron-LM removes commas before it reads a count.
    assert_eq!(layout("Et*1,2|L"), "E 0..12 | L");
}

#[test]
fn layout_errors_point_at_the_character() {
    let m = "m (multi-token prediction) is not supported: remove it";
    assert_eq!(
        layout("Et*3|(tt|)*2,m|L"),
        format!("{m}\n  Et*3|(tt|)*2,m|L\n               ^")
    );
    let cases = [
        (
            "Et|x|L",
            3,
            "invalid character 'x' in the layout: expected E",
        ),
        ("Et|2t|L", 3, "invalid character '2' in the layout"),
        ("Et|é|L", 3, "invalid character 'é' in the layout"),
        ("Et|Et|L", 3, "E occurs twice in the layout"),
        ("(Et|)*2,L", 1, "E occurs twice in the layout"),
        ("Et|L|L", 5, "L occurs twice in the layout"),
        ("t|E|L", 2, "E (embedding) must be the first"),
        ("|Et|L", 1, "E (embedding) must be the first"),
        ("Et|L|t", 3, "L (loss) must be the last"),
        ("EtLt", 2, "L (loss) must be the last"),
        ("t|L", 0, "the layout has no embedding"),
        ("", 0, "the layout has no embedding"),
        ("Et|t", 4, "the layout has no loss"),
        ("E|L", 3, "the layout has no layers"),
        ("Et*|L", 2, "expected a count of 1 or more"),
        ("Et*0|L", 2, "expected a count of 1 or more"),
        ("Et*-1|L", 2, "expected a count of 1 or more"),
        ("E*", 1, "expected a count of 1 or more"),
        ("*2EtL", 0, "nothing to repeat before *"),
        ("Et*2*3L", 4, "nothing to repeat before *"),
        ("E(*2)L", 2, "nothing to repeat before *"),
        ("E(t|L", 1, "unclosed ("),
        ("E((t|)*2L", 1, "unclosed ("),
        ("Et|)*2L", 3, "unmatched )"),
        ("E(t|)L", 4, "expected a count after the group"),
        (
            "Et*65536|L",
            2,
            "this count makes the layout longer than 65536",
        ),
        (
            "E(((t*999)*999)*999)*999L",
            10,
            "this count makes the layout longer",
        ),
        (
            "Et*99999999999999999999999|L",
            2,
            "this count makes the layout longer",
        ),
    ];
    for (of, at, fault) in cases {
        let message = layout(of);
        assert!(message.starts_with(fault), "{of}: {message}");
        let caret = message.lines().last().unwrap_or("");
        assert_eq!(caret, format!("  {}^", " ".repeat(at)), "{message}");
    }
    // An empty group can have any count.
    assert_eq!(layout("Et()*99999999999999999999999L"), "E 0..1 L");
}

#[test]
fn a_layout_has_to_have_the_models_sizes() {
    let of = |layers, stages| split(LayerSplit::Layout("Et*3|tt|L".into()), layers, stages);
    assert_eq!(of(5, 3), "E 0..3 | 3..5 | L");
    assert_snapshot!(of(6, 3), @"the layout \"Et*3|tt|L\" has 5 layers (t), the model has 6");
    assert_snapshot!(of(5, 4), @"the layout \"Et*3|tt|L\" has 3 stages, the pipeline has 4");
}

#[test]
fn stages_over_ranks() {
    assert_eq!(virtual_stages(8, 4), Ok(2));
    assert_snapshot!(
        virtual_stages(5, 2).unwrap_err(),
        @"5 stages are not divisible by 2 ranks: use 4 or 6 stages, or 1 or 5 ranks"
    );
    assert!(virtual_stages(5, 0).is_err() && virtual_stages(0, 5).is_err());
}

#[test]
fn splits_in_files() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        split: LayerSplit,
    }
    let cases = [
        ("split = \"even\"\n", LayerSplit::Even),
        ("[split.ends]\nfirst = 1\n", ends(1, None)),
        (
            "[split]\nlayout = \"Et|L\"\n",
            LayerSplit::Layout("Et|L".into()),
        ),
    ];
    for (text, split) in cases {
        let file = File { split };
        assert_eq!(toml::from_str::<File>(text).unwrap(), file);
        assert_eq!(toml::to_string(&file).unwrap(), text);
    }
}
