use super::LossCurve;
use burn_megatron_test_support::TestFolder;

/// Returns a loss that falls from 5.5 to about 2.5, with deterministic noise.
fn example(steps: usize) -> LossCurve {
    let mut curve = LossCurve::new("tiny: training loss");
    for step in 0..steps {
        let noise = ((step * 7919) % 101) as f64 / 101.0 - 0.5;
        let loss = 2.4 + 3.1 * (-(step as f64) / 60.0).exp() + 0.3 * noise;
        curve.training(step, loss);
        if step % 50 == 0 {
            curve.held_out(step, loss + 0.1);
        }
    }
    curve
}

fn check_terminal(curve: &LossCurve, columns: usize) -> String {
    let text = curve.terminal(columns);
    assert_eq!(text.lines().count(), 12, "{text}");
    for line in text.lines() {
        assert!(
            line.chars().count() <= columns.max(40),
            "'{line}' is wider than {columns}"
        );
    }
    text
}

#[test]
fn any_number_of_points_can_be_drawn() {
    for steps in [0, 1, 2, 3, 19, 20, 21, 400] {
        let curve = example(steps);
        let svg = curve.svg().expect("draws");
        assert!(
            svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
            "{steps}"
        );
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{steps}");
        assert_eq!(svg.contains("held-out"), steps > 0);
        assert_eq!(svg.contains("smoothed"), steps >= 20);
        for columns in [0, 40, 100] {
            check_terminal(&curve, columns);
        }
    }
}

#[test]
fn axes_have_names_and_units() {
    let svg = example(400).svg().expect("draws");
    for label in [
        "tiny: training loss",
        "loss (nats per token)",
        "step",
        "training, smoothed",
    ] {
        assert!(svg.contains(label), "{label}");
    }
    let text = check_terminal(&example(400), 100);
    for label in [
        "loss (nats per token)",
        "step",
        "training",
        "held-out",
        "399",
    ] {
        assert!(text.contains(label), "{label} in\n{text}");
    }
}

#[test]
fn the_curve_falls_from_the_upper_left_to_the_lower_right() {
    let text = check_terminal(&example(400), 100);
    let lines: Vec<Vec<char>> = text.lines().map(|line| line.chars().collect()).collect();
    let drawn = |c: char| c == 'o' || ('\u{2801}'..='\u{28ff}').contains(&c);
    let columns = |line: usize| -> Vec<usize> {
        (10..lines[line].len())
            .filter(|&column| drawn(lines[line][column]))
            .collect()
    };
    let (top, bottom) = (columns(1), columns(9));
    assert!(
        !top.is_empty() && top.iter().all(|&column| column < 20),
        "{text}"
    );
    assert!(
        !bottom.is_empty() && bottom.iter().all(|&column| column > 40),
        "{text}"
    );
}

#[test]
fn losses_that_are_not_finite_are_omitted_and_counted() {
    let mut curve = example(100);
    let (svg, steps, losses) = (curve.svg().expect("draws"), curve.steps(), curve.losses());
    for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX] {
        curve.training(100, loss);
    }
    curve.held_out(100, f64::NAN);
    assert_eq!((curve.steps(), curve.losses()), (steps, losses));
    assert_eq!(
        curve.svg().expect("draws"),
        svg.replace("step\n", "step (5 not finite, omitted)\n")
    );
    assert!(check_terminal(&curve, 100).contains("5 not finite"));

    let mut nothing = LossCurve::new("diverged");
    nothing.training(0, f64::NAN);
    assert!(nothing.svg().expect("draws").contains("1 not finite"));
    assert!(check_terminal(&nothing, 100).contains("no values"));
}

#[test]
fn extreme_values_and_steps_end() {
    for loss in [0.0, -1.0, 1e-300, 1e30, -1e30, 5.0_f64.next_up()] {
        let mut curve = LossCurve::new("extreme");
        curve.training(0, 5.0);
        curve.training(1, loss);
        curve.held_out(usize::MAX, loss);
        assert!(curve.svg().is_ok(), "{loss}");
        check_terminal(&curve, 100);
    }
}

#[test]
fn a_title_is_escaped() {
    let svg = LossCurve::new("a < b & c").svg().expect("draws");
    assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
}

#[test]
fn smoothing_keeps_a_straight_line_and_quietens_noise() {
    let mut line = LossCurve::new("");
    (0..100).for_each(|step| line.training(step, step as f64));
    // The last window of 2 * 2 + 1 points is truncated to 3 points, so the position of its mean is one step earlier.
    for (step, smoothed) in line.smoothed() {
        let lag = step.saturating_sub(97) as f64 / 2.0;
        assert!(
            (smoothed - (step as f64 - lag)).abs() < 1e-9,
            "{smoothed} at {step}"
        );
    }
    let noisy = example(400);
    let roughness = |curve: &[(usize, f64)]| -> f64 {
        curve
            .windows(2)
            .map(|pair| (pair[1].1 - pair[0].1).powi(2))
            .sum()
    };
    assert!(roughness(&noisy.smoothed()) < 0.1 * roughness(&noisy.training));
}

#[test]
fn a_long_run_keeps_its_ends_and_its_extremes_in_a_small_picture() {
    let mut curve = example(100_001);
    curve.training[70_000].1 = 9.0;
    curve.training[70_001].1 = -9.0;
    let drawn = LossCurve::downsample(&curve.training);
    assert!(drawn.len() <= 2000 && drawn.is_sorted_by_key(|point| point.0));
    for extreme in [(70_000, 9.0), (70_001, -9.0)] {
        assert!(drawn.contains(&extreme), "{extreme:?}");
    }
    let smoothed = curve.smoothed();
    assert_eq!(
        (smoothed.len(), smoothed[0].0, smoothed[999].0),
        (1000, 0, 100_000)
    );
    let mut alone = curve.clone();
    alone.held_out.clear();
    let svg = alone.svg().expect("draws");
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = TestFolder::new();
    let path = folder.path().join("loss.svg");
    example(10).write_svg(&path).expect("writable");
    assert_eq!(
        std::fs::read_to_string(path).expect("there"),
        example(10).svg().expect("draws")
    );
    let message = example(1)
        .write_svg(&folder.path().join("none/loss.svg"))
        .unwrap_err()
        .to_string();
    assert!(message.contains("none/loss.svg"), "{message}");
}

#[test]
fn the_objective_is_a_curve_of_its_own() {
    use crate::metrics::{HeldOutMetrics, MetricsRecord, Minimised, SkipReason, StepMetrics};

    let step = |step: usize, objective| {
        MetricsRecord::Step(StepMetrics {
            step,
            loss: 3.0,
            bits_per_byte: 4.3,
            minimised: Minimised {
                objective,
                ..Minimised::default()
            },
            gradient_norm: 1.0,
            learning_rate: 1e-3,
            tokens: 8,
            skipped: false,
            skip_reason: None,
            loss_scale: None,
            zeros: None,
            max_attention_logit: None,
        })
    };
    let plain = LossCurve::from_records("", &[step(0, None), step(1, None)]);
    assert!(!plain.svg().expect("draws").contains("objective"));
    let mut records = vec![step(0, Some(3.5)), step(1, Some(3.25))];
    let curve = LossCurve::from_records("", &records);
    assert!(curve.svg().expect("draws").contains("objective"));
    assert_eq!(curve.training, [(0, 3.0), (1, 3.0)]);
    assert!(curve.losses().1 > 3.5);
    // A step without targets has no loss, and is not counted as not finite.
    let MetricsRecord::Step(mut masked) = step(2, None) else {
        unreachable!("it was made above")
    };
    masked.loss = f64::NAN;
    masked.skip_reason = Some(SkipReason::NoTargets);
    records.push(MetricsRecord::Step(masked));
    records.push(MetricsRecord::HeldOut(HeldOutMetrics {
        step: 3,
        loss: f64::NAN,
        bits_per_byte: f64::NAN,
        minimised: Minimised::default(),
        tokens: 0,
    }));
    let with = LossCurve::from_records("", &records);
    assert_eq!((with.omitted, with.training), (0, curve.training));
}
