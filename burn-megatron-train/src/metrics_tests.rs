use super::*;
use crate::expert_metrics::{ExpertMetrics, LayerLoad};
use burn_megatron::nn::moe::RouterLossKind;
use burn_megatron_test_support::TestFolder;

/// Returns the metrics of the step after `before` updates.
fn step(before: usize) -> StepMetrics {
    StepMetrics {
        step: before + 1,
        loss: 5.5,
        bits_per_byte: 8.0,
        minimised: Minimised::default(),
        gradient_norm: 0.25,
        learning_rate: 1e-3,
        tokens: 1024,
        skipped: false,
        skip_reason: None,
        loss_scale: None,
        zeros: None,
        max_attention_logit: None,
    }
}

fn held_out(step: usize) -> HeldOutMetrics {
    HeldOutMetrics {
        step,
        loss: 5.75,
        bits_per_byte: 8.25,
        minimised: Minimised::default(),
        tokens: 512,
    }
}

fn experts(before: usize) -> ExpertMetrics {
    let layer = LayerLoad {
        layer: "blocks.0.moe".into(),
        load: vec![before as u64, 2],
        dropped: 1,
        losses: vec![(RouterLossKind::Balance, 0.0125)],
    };
    ExpertMetrics {
        step: before + 1,
        layers: vec![layer],
    }
}

/// Writes the updates `from..to`, with a held-out loss after every second update.
fn run(log: &mut MetricsLog, from: usize, to: usize) {
    for i in from..to {
        let evaluates = (i + 1) % 2 == 0;
        log.step(&step(i)).expect("writable");
        log.experts(&experts(i), evaluates).expect("writable");
        if evaluates {
            log.held_out(&held_out(i + 1)).expect("writable");
        }
    }
}

#[test]
fn a_line_is_a_flat_object_with_its_kind() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).expect("new");
    log.step(&step(0)).expect("writable");
    log.held_out(&held_out(1)).expect("writable");
    // The file is read while the log is open: each line is flushed when it is written.
    let text = std::fs::read_to_string(&path).expect("readable");
    let expected = concat!(
        r#"{"kind":"run","version":3}"#,
        "\n",
        r#"{"kind":"step","step":1,"loss":5.5,"bits_per_byte":8.0,"gradient_norm":0.25,"#,
        r#""learning_rate":0.001,"tokens":1024,"skipped":false}"#,
        "\n",
        r#"{"kind":"held_out","step":1,"loss":5.75,"bits_per_byte":8.25,"tokens":512}"#,
        "\n",
    );
    assert_eq!(text, expected);
    let records = read_metrics(&path).expect("readable");
    assert_eq!(
        records,
        [
            MetricsRecord::Run(RunMetrics { version: VERSION }),
            MetricsRecord::Step(step(0)),
            MetricsRecord::HeldOut(held_out(1))
        ]
    );
    assert_eq!(oldest_version(&records), 3);
}

#[test]
fn numbers_that_are_not_finite_are_valid_json_and_are_read_back() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).expect("new");
    let metrics = StepMetrics {
        loss: f64::NAN,
        bits_per_byte: f64::NEG_INFINITY,
        gradient_norm: f64::INFINITY,
        skipped: true,
        loss_scale: None,
        zeros: None,
        max_attention_logit: None,
        ..step(3)
    };
    log.step(&metrics).expect("writable");
    let text = std::fs::read_to_string(&path).expect("readable");
    let line = text.lines().nth(1).expect("after the version");
    let json: serde_json::Value = serde_json::from_str(line).expect("valid JSON");
    assert_eq!(json["loss"], "NaN");
    assert_eq!(json["bits_per_byte"], "-inf");
    assert_eq!(json["gradient_norm"], "inf");
    let records = read_metrics(&path).expect("readable");
    let [MetricsRecord::Run(_), MetricsRecord::Step(read)] = records[..] else {
        panic!("{records:?}")
    };
    assert!(read.loss.is_nan() && read.skipped);
    assert_eq!(
        (read.bits_per_byte, read.gradient_norm),
        (f64::NEG_INFINITY, f64::INFINITY)
    );
}

#[test]
fn a_resumed_file_reads_as_an_uninterrupted_one_and_keeps_every_byte() {
    let folder = TestFolder::new();
    let whole = folder.path().join("whole.jsonl");
    run(&mut MetricsLog::create(&whole).expect("new"), 0, 8);
    let whole = read_metrics(&whole).expect("readable");

    for torn in ["", "{\"kind\":\"st", "\0\0\0"] {
        for checkpoint in 0..=6 {
            let name = format!("resumed-{}-{checkpoint}.jsonl", torn.len());
            let path = folder.path().join(name);
            run(&mut MetricsLog::create(&path).expect("new"), 0, 6);
            let text = std::fs::read(&path).expect("readable");
            std::fs::write(&path, [&text, torn.as_bytes()].concat()).expect("writable");
            let mut before = std::fs::read(&path).expect("readable");
            // Resumed once more, before the first step.
            drop(MetricsLog::resume(&path, checkpoint).expect("ours"));
            let mut log = MetricsLog::resume(&path, checkpoint).expect("ours");
            run(&mut log, checkpoint, 8);
            assert_eq!(read_metrics(&path).expect("ours"), whole, "{checkpoint}");
            let after = std::fs::read(&path).expect("readable");
            let marker = format!("{{\"kind\":\"resumed\",\"step\":{checkpoint}}}\n");
            let end = if torn.is_empty() { "" } else { "\n" };
            before.extend([end, &marker, &marker].concat().bytes());
            assert!(after.starts_with(&before), "{torn} {checkpoint}");
        }
    }
}

#[test]
fn a_line_that_is_not_utf_8_is_named() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    run(&mut MetricsLog::create(&path).expect("new"), 0, 2);
    let whole = std::fs::read(&path).expect("readable");
    let second = whole.iter().position(|byte| *byte == b'\n').expect("lines") + 1;
    let mut broken = whole.clone();
    broken[second + 2] = 0xff;
    std::fs::write(&path, &broken).expect("writable");
    let error = MetricsLog::resume(&path, 2)
        .expect_err("broken")
        .to_string();
    for says in ["line 2 of", "remove that line, or move the file away"] {
        assert!(error.contains(says), "{error}");
    }
    // A truncated UTF-8 character at the end of a truncated line is not an error.
    std::fs::write(&path, [&whole[..], b"{\"kind\":\"\xc3"].concat()).expect("writable");
    MetricsLog::resume(&path, 2).expect("ours");
    read_metrics(&path).expect("ours");
}

#[test]
fn the_last_saved_step_leaves_out_discarded_checkpoints() {
    let folder = TestFolder::new();
    let path = folder.path().join("timings.jsonl");
    let save = |log: &mut TimingsLog, saved_step| {
        log.save(&SaveTiming {
            saved_step,
            bytes: 1,
            seconds: 1.0,
            stall_seconds: 0.0,
        })
        .expect("writable");
    };
    let mut log = TimingsLog::create(&path).expect("new");
    assert_eq!(last_saved_step(&path).expect("ours"), None);
    save(&mut log, 4);
    save(&mut log, 8);
    assert_eq!(last_saved_step(&path).expect("ours"), Some(8));
    TimingsLog::resume(&path, 4).expect("ours");
    assert_eq!(last_saved_step(&path).expect("ours"), Some(4));
}

/// Only lines that an interruption can have truncated are omitted.
#[test]
fn a_bad_line_is_an_error_wherever_no_marker_follows() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    run(&mut MetricsLog::create(&path).expect("new"), 0, 2);
    let whole = std::fs::read_to_string(&path).expect("readable");
    let middle = whole.replacen("step", "st", 2);
    for bad in [middle, format!("{whole}half\n")] {
        folder.write("metrics.jsonl", bad);
        assert!(read_metrics(&path).is_err());
        assert!(MetricsLog::resume(&path, 1).is_err());
    }
}

#[test]
fn an_old_file_is_not_overwritten_and_a_foreign_one_not_continued() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    assert!(MetricsLog::resume(&path, 0).is_err());
    folder.write("metrics.jsonl", "{\"kind\":\"other\"}\n");
    let message = MetricsLog::create(&path).unwrap_err().to_string();
    assert!(
        message.contains("cannot create") && message.contains("metrics.jsonl"),
        "{message}"
    );
    let message = MetricsLog::resume(&path, 0).unwrap_err().to_string();
    assert!(message.starts_with("line 1 of"), "{message}");
    assert_eq!(
        std::fs::read(&path).expect("readable"),
        b"{\"kind\":\"other\"}\n"
    );
    assert!(TimingsLog::create(&path).is_err());
}

#[test]
fn timings_are_in_their_own_file() {
    let folder = TestFolder::new();
    let path = folder.path().join("timings.jsonl");
    let timing = StepTiming {
        step: 1,
        seconds: 0.5,
        tokens_per_second: 2048.0,
        flops_per_second: 1.5e9,
    };
    let line =
        r#"{"step":1,"seconds":0.5,"tokens_per_second":2048.0,"flops_per_second":1500000000.0}"#;
    TimingsLog::create(&path)
        .expect("new")
        .step(&timing)
        .expect("writable");
    assert_eq!(
        std::fs::read_to_string(&path).expect("readable"),
        format!("{line}\n")
    );

    // A repeated step, a repeated checkpoint and a truncated line: all stay in the file.
    let save = r#"{"saved_step":1,"bytes":12,"seconds":0.25,"stall_seconds":0.125}"#;
    let later = line.replace(r#""step":1"#, r#""step":2"#);
    let gone = save.replace(":1,", ":2,");
    let before = format!("{line}\n{save}\n{later}\n{gone}\n{{\"step\":");
    folder.write("timings.jsonl", &before);
    drop(TimingsLog::resume(&path, 1).expect("ours"));
    let mut log = TimingsLog::resume(&path, 1).expect("ours");
    let next = StepTiming { step: 2, ..timing };
    log.step(&next).expect("writable");
    let saved = SaveTiming {
        saved_step: 2,
        bytes: 12,
        seconds: 0.25,
        stall_seconds: 0.125,
    };
    log.save(&saved).expect("writable");
    let marker = r#"{"kind":"resumed","step":1}"#;
    assert_eq!(
        std::fs::read_to_string(&path).expect("readable"),
        format!("{before}\n{marker}\n{marker}\n{later}\n{gone}\n")
    );
    folder.write("timings.jsonl", "{\"kind\":\"other\"}\n");
    assert!(TimingsLog::resume(&path, 0).is_err());
}

#[test]
fn eight_bits_are_256_equally_likely_bytes() {
    assert!((bits_per_byte(256_f64.ln(), 1.0) - 8.0).abs() < 1e-12);
    assert!((bits_per_byte(256_f64.ln(), 4.0) - 2.0).abs() < 1e-12);
}

#[test]
fn the_objective_and_the_skip_reason_are_in_the_line_of_a_step() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).expect("new");
    let minimised = Minimised {
        further_tokens: Some(0.0625),
        objective: Some(6.0),
        label_smoothing: Some(f64::INFINITY),
        z_loss: Some(0.125),
    };
    let metrics = StepMetrics {
        minimised,
        skipped: true,
        skip_reason: Some(SkipReason::NoTargets),
        ..step(0)
    };
    let held_out = HeldOutMetrics {
        minimised: Minimised {
            label_smoothing: None,
            ..minimised
        },
        ..held_out(1)
    };
    log.step(&metrics).expect("writable");
    log.held_out(&held_out).expect("writable");
    let text = std::fs::read_to_string(&path).expect("readable");
    for part in [
        r#""bits_per_byte":8.0,"objective":6.0,"label_smoothing":"inf","z_loss":0.125,"further_tokens":0.0625,"gradient_norm""#,
        r#""skipped":true,"skip_reason":"no_targets"}"#,
        r#""bits_per_byte":8.25,"objective":6.0,"z_loss":0.125,"further_tokens":0.0625,"tokens":512}"#,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let records = read_metrics(&path).expect("readable");
    assert_eq!(
        records[1..],
        [
            MetricsRecord::Step(metrics),
            MetricsRecord::HeldOut(held_out)
        ]
    );
    let terms: Vec<_> = held_out.minimised.terms().collect();
    assert_eq!(terms, [("z-loss", 0.125), ("further tokens", 0.0625)]);
}

#[test]
fn experts_are_lines_of_their_own_and_are_read_back() {
    let folder = TestFolder::new();
    let path = folder.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).expect("new");
    let mut metrics = experts(2);
    metrics.layers[0]
        .losses
        .insert(0, (RouterLossKind::ZLoss, f64::INFINITY));
    metrics.layers.push(LayerLoad {
        layer: "blocks.1.moe".into(),
        load: vec![0, 0],
        dropped: 0,
        losses: vec![],
    });
    log.experts(&metrics, true).expect("writable");
    let text = std::fs::read_to_string(&path).expect("readable");
    let lines: Vec<_> = text.lines().skip(1).collect();
    let expected = [
        concat!(
            r#"{"kind":"experts","step":3,"layers":[{"layer":"blocks.0.moe","min":1.0,"max":1.0,"#,
            r#""entropy":1.0,"dropped":0.2,"losses":{"balance":0.0125,"z-loss":"inf"}},"#,
            r#"{"layer":"blocks.1.moe","min":"NaN","max":"NaN","entropy":"NaN","dropped":"NaN"}]}"#,
        ),
        concat!(
            r#"{"kind":"expert_load","step":3,"layers":[{"layer":"blocks.0.moe","load":[2,2]},"#,
            r#"{"layer":"blocks.1.moe","load":[0,0]}]}"#,
        ),
    ];
    assert_eq!(lines, expected);
    let records = read_metrics(&path).expect("readable");
    let [
        MetricsRecord::Run(_),
        MetricsRecord::Experts(summary),
        MetricsRecord::ExpertLoad(load),
    ] = &records[..]
    else {
        panic!("{records:?}")
    };
    assert_eq!(summary.layers[0], metrics.summary().layers[0]);
    assert!(summary.layers[1].min.is_nan());
    assert_eq!(*load, metrics.load());
}

/// There is one load before each held-out loss, in every order in which a run can write and end.
#[test]
fn a_load_is_written_once_and_before_its_checkpoint() {
    let folder = TestFolder::new();
    let expected = [
        MetricsRecord::Run(RunMetrics { version: VERSION }),
        MetricsRecord::Step(step(0)),
        MetricsRecord::Experts(experts(0).summary()),
        MetricsRecord::ExpertLoad(experts(0).load()),
        MetricsRecord::HeldOut(held_out(1)),
    ];
    for (name, evaluates, is_killed) in [
        ("whole", true, false),
        // The run is interrupted after the last checkpoint and before the evaluation.
        ("killed", true, true),
        // The run is stopped at a step without an evaluation, and it has no checkpoints.
        ("stopped", false, false),
    ] {
        let path = folder.path().join(name);
        let mut log = MetricsLog::create(&path).expect("new");
        log.step(&step(0)).expect("writable");
        log.experts(&experts(0), evaluates).expect("writable");
        if is_killed {
            log = MetricsLog::resume(&path, 1).expect("ours");
        }
        log.held_out(&held_out(1)).expect("writable");
        assert_eq!(read_metrics(&path).expect("readable"), expected, "{name}");
    }
}

/// Reads and resumes a file from before metrics had versions.
#[test]
fn a_file_of_the_first_version_is_read_and_resumed() {
    let folder = TestFolder::new();
    let old = concat!(
        r#"{"kind":"step","step":0,"loss":5.5,"bits_per_byte":8.0,"gradient_norm":0.25,"#,
        r#""learning_rate":0.001,"tokens":1024,"skipped":false}"#,
        "\n",
        r#"{"kind":"held_out","step":1,"loss":5.75,"bits_per_byte":8.25,"tokens":512}"#,
        "\n",
    );
    folder.write("metrics.jsonl", old);
    let path = folder.path().join("metrics.jsonl");
    let records = read_metrics(&path).expect("readable");
    assert_eq!(
        records,
        [
            MetricsRecord::Step(step(0)),
            MetricsRecord::HeldOut(held_out(1))
        ]
    );
    assert_eq!(oldest_version(&records), 1);
    // The version line applies to the lines after it. Resuming again does not add another version line.
    for _ in 0..2 {
        MetricsLog::resume(&path, 1).expect("ours");
    }
    let text = std::fs::read_to_string(&path).expect("readable");
    let [resumed, version] = [
        r#"{"kind":"resumed","step":1}"#,
        r#"{"kind":"run","version":3}"#,
    ];
    assert_eq!(text, format!("{old}{resumed}\n{version}\n{resumed}\n"));
    assert_eq!(oldest_version(&read_metrics(&path).expect("readable")), 1);
    // Later lines are numbered from 1.
    run(&mut MetricsLog::resume(&path, 1).expect("ours"), 1, 2);
    let steps = read_metrics(&path).expect("readable").into_iter();
    let steps = steps.filter(|record| matches!(record, MetricsRecord::Step(_)));
    let expected = [0, 1].map(|before| MetricsRecord::Step(step(before)));
    assert_eq!(steps.collect::<Vec<_>>(), expected);

    folder.write("newer.jsonl", "{\"kind\":\"run\",\"version\":4}\n");
    let newer = folder.path().join("newer.jsonl");
    let message = read_metrics(&newer).unwrap_err().to_string();
    assert!(message.contains("metrics of version 4: expected version 1 to 3"));
    assert!(MetricsLog::resume(&newer, 0).is_err());
}
