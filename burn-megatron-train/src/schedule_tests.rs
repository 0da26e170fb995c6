use proptest::prelude::*;

use super::*;

const TAILS: [WsdTail; 4] = [
    WsdTail::Linear,
    WsdTail::Exponential,
    WsdTail::MinusSqrt,
    WsdTail::Cosine,
];

fn rates(schedule: &LrSchedule, steps: &[usize]) -> Vec<f64> {
    steps.iter().map(|&step| schedule.lr(step)).collect()
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!(
            (a - b).abs() <= 1e-12 * b.abs().max(1e-3),
            "{found:?} is not {expected:?}"
        );
    }
}

#[test]
fn cosine_has_its_known_values() {
    let schedule = LrSchedule::new(1.0, 0.1, 4, 12, LrStyle::Cosine).expect("fits");
    assert_close(&rates(&schedule, &[0, 1, 2, 3]), &[0.25, 0.5, 0.75, 1.0]);
    // After a quarter of the decay, the cosine is sqrt(2)/2. After half of the decay, the learning rate is in the
    // middle.
    let quarter = 0.1 + 0.45 * (1.0 + 0.5_f64.sqrt());
    let three_quarters = 0.1 + 0.45 * (1.0 - 0.5_f64.sqrt());
    assert_close(
        &rates(&schedule, &[4, 6, 8, 10, 12, 1000]),
        &[1.0, quarter, 0.55, three_quarters, 0.1, 0.1],
    );
}

#[test]
fn linear_has_its_known_values() {
    let schedule = LrSchedule::new(2e-3, 0.0, 0, 4, LrStyle::Linear).expect("fits");
    assert_close(
        &rates(&schedule, &[0, 1, 2, 3, 4]),
        &[2e-3, 1.5e-3, 1e-3, 0.5e-3, 0.0],
    );
}

#[test]
fn the_inverse_square_root_has_its_known_values() {
    let schedule = LrSchedule::new(1.0, 0.3, 4, 100, LrStyle::InverseSqrt).expect("fits");
    assert_close(
        &rates(&schedule, &[0, 3, 4, 15, 24, 63, 99, 100]),
        &[0.25, 1.0, 0.8_f64.sqrt(), 0.5, 0.4, 0.3, 0.3, 0.3],
    );
    let at_once = LrSchedule::new(1.0, 0.0, 0, 100, LrStyle::InverseSqrt).expect("fits");
    assert_close(&rates(&at_once, &[0, 3, 24]), &[1.0, 0.5, 0.2]);
}

#[test]
fn each_tail_of_wsd_has_its_known_values() {
    let half = |tail| {
        let style = LrStyle::Wsd {
            decay_steps: 4,
            tail,
        };
        let schedule = LrSchedule::new(1.0, 0.0, 2, 10, style).expect("fits");
        assert_close(
            &rates(&schedule, &[0, 1, 2, 5, 6, 10]),
            &[0.5, 1.0, 1.0, 1.0, 1.0, 0.0],
        );
        rates(&schedule, &[7, 8])
    };
    assert_close(&half(WsdTail::Linear), &[0.75, 0.5]);
    // 2 / 2^(1/4) - 1 and sqrt(2) - 1.
    assert_close(
        &half(WsdTail::Exponential),
        &[2.0 / 2.0_f64.sqrt().sqrt() - 1.0, 2_f64.sqrt() - 1.0],
    );
    assert_close(&half(WsdTail::MinusSqrt), &[0.5, 1.0 - 0.5_f64.sqrt()]);
    assert_close(&half(WsdTail::Cosine), &[0.5 + 0.5_f64.sqrt() / 2.0, 0.5]);
}

#[test]
fn constant_warms_up_and_stays() {
    let schedule = LrSchedule::new(3e-4, 0.0, 3, 5, LrStyle::Constant).expect("fits");
    assert_close(
        &rates(&schedule, &[0, 1, 2, 3, 4, 99]),
        &[1e-4, 2e-4, 3e-4, 3e-4, 3e-4, 3e-4],
    );
}

#[test]
fn a_run_of_one_step_learns() {
    for warmup in [0, 1] {
        let schedule = LrSchedule::new(1.0, 0.0, warmup, 1, LrStyle::Cosine).expect("fits");
        assert_eq!(schedule.lr(0), 1.0);
    }
}

#[test]
fn inconsistent_sizes_are_refused_with_both_sizes() {
    let wsd = |decay_steps| LrStyle::Wsd {
        decay_steps,
        tail: WsdTail::Linear,
    };
    let refused = |peak, min, warmup, total, style, parts: &[&str]| {
        let message = LrSchedule::new(peak, min, warmup, total, style)
            .unwrap_err()
            .to_string();
        for part in parts {
            assert!(message.contains(part), "'{part}' in '{message}'");
        }
    };
    refused(
        1.0,
        0.0,
        20,
        10,
        LrStyle::Cosine,
        &["warm-up of 20", "run of 10", "at most 10"],
    );
    refused(
        1.0,
        0.0,
        6,
        10,
        wsd(5),
        &["warm-up of 6", "decay of 5", "run of 10", "at most 4"],
    );
    let no_decay = &["use a warm-up of less than 10"];
    refused(1.0, 0.0, 10, 10, wsd(1), no_decay);
    refused(1.0, 0.0, 0, 10, wsd(0), &["invalid decay_steps 0"]);
    refused(1.0, 0.0, 0, 0, LrStyle::Cosine, &["invalid total_steps 0"]);
    refused(1.0, 2.0, 0, 10, LrStyle::Cosine, &["rate 2", "peak of 1"]);
    refused(1.0, 0.5, 0, 10, LrStyle::Constant, &["0.5", "constant"]);
    for peak in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(
            LrSchedule::new(peak, 0.0, 0, 10, LrStyle::Cosine).is_err(),
            "{peak}"
        );
    }
    for min in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(
            LrSchedule::new(1.0, min, 0, 10, LrStyle::Cosine).is_err(),
            "{min}"
        );
    }
    assert!(LrSchedule::new(1.0, 0.0, 5, 10, wsd(5)).is_ok());
}

#[test]
fn a_recipe_is_read_checked_and_written_back() {
    let read = |recipe: &str| toml::from_str::<LrSchedule>(recipe);
    let short = read("peak = 1e-3\ntotal_steps = 9").expect("the rest has defaults");
    assert_eq!(
        short,
        LrSchedule::new(1e-3, 0.0, 0, 9, LrStyle::Cosine).expect("fits")
    );

    let recipe = "peak = 1e-3\nmin = 1e-4\nwarmup_steps = 2\ntotal_steps = 9\n\
                  style = { wsd = { decay_steps = 3, tail = \"minus_sqrt\" } }";
    let style = LrStyle::Wsd {
        decay_steps: 3,
        tail: WsdTail::MinusSqrt,
    };
    let wsd = LrSchedule::new(1e-3, 1e-4, 2, 9, style).expect("fits");
    assert_eq!(read(recipe).expect("a table is a style"), wsd);
    assert_eq!(
        read(&toml::to_string(&wsd).expect("writes")).expect("reads back"),
        wsd
    );
    assert!(
        toml::to_string(&short)
            .expect("writes")
            .contains("style = \"cosine\"")
    );

    let message = read("peak = 1.0\ntotal_steps = 9\nwarmup_steps = 10")
        .unwrap_err()
        .to_string();
    assert!(message.contains("longer than the run of 9"), "{message}");
    let message = read("peak = 1.0\ntotal_steps = 9\nwarm_up = 1")
        .unwrap_err()
        .to_string();
    assert!(message.contains("warm_up"), "{message}");
    assert!(read("peak = 1.0\ntotal_steps = 9\nstyle = \"cosin\"").is_err());
}

/// Generates any valid schedule.
fn schedules() -> impl Strategy<Value = LrSchedule> {
    let sizes = (1_usize..300).prop_flat_map(|total| (Just(total), 0..=total));
    (
        sizes,
        1e-6_f64..10.0,
        0.0_f64..=1.0,
        0_usize..7,
        0.0_f64..1.0,
    )
        .prop_filter_map(
            "no steps for a decay",
            |((total, warmup), peak, share, style, decay)| {
                let decay_steps = 1 + ((total - warmup) as f64 * decay) as usize;
                let (style, min) = match style {
                    0 => (LrStyle::Cosine, peak * share),
                    1 => (LrStyle::Linear, peak * share),
                    2 => (LrStyle::Constant, 0.0),
                    i => (
                        LrStyle::Wsd {
                            decay_steps,
                            tail: TAILS[i - 3],
                        },
                        peak * share,
                    ),
                };
                LrSchedule::new(peak, min, warmup, total, style).ok()
            },
        )
}

proptest! {
    #[test]
    fn it_rises_then_falls_and_keeps_its_bounds(schedule in schedules()) {
        let LrSchedule { peak, min, warmup_steps, total_steps, style } = schedule;
        for step in 1..warmup_steps {
            prop_assert!(schedule.lr(step) > schedule.lr(step - 1));
        }
        for step in warmup_steps..total_steps + 3 {
            let lr = schedule.lr(step);
            prop_assert!((min..=peak).contains(&lr));
            prop_assert!(lr >= schedule.lr(step + 1));
        }
        let end = if style == LrStyle::Constant { peak } else { min };
        prop_assert_eq!(schedule.lr(total_steps), end);
        // `peak` is reached at the end of warm-up, and in the step after it, if there is one.
        if warmup_steps > 0 {
            prop_assert_eq!(schedule.lr(warmup_steps - 1), peak);
        }
        if warmup_steps < total_steps {
            prop_assert_eq!(schedule.lr(warmup_steps), peak);
        }
    }

    #[test]
    fn it_has_no_jump(schedule in schedules()) {
        let LrSchedule { peak, warmup_steps, total_steps, style, .. } = schedule;
        let decay = match style {
            LrStyle::Wsd { decay_steps, .. } => decay_steps,
            _ => total_steps - warmup_steps,
        };
        // The steepest style drops by sqrt(1/D) of the peak in one of D steps, the others by pi/2D.
        let steepest = (1.0 / decay.max(1) as f64).sqrt().max(1.6 / decay.max(1) as f64);
        let bound = peak * steepest.max(1.0 / warmup_steps.max(1) as f64) * (1.0 + 1e-9);
        for step in 0..total_steps.saturating_sub(1) {
            prop_assert!((schedule.lr(step + 1) - schedule.lr(step)).abs() <= bound);
        }
    }
}
