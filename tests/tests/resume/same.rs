//! Tests that resuming in the same layout is bit-equal.

use burn_megatron::checkpoint::{Checkpoint, Retention};
use burn_megatron::data_parallel::{Moments, Precision};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{LossScale, LossScaleConfig};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_tests::Text;
use burn_megatron_tests::tolerance::assert_steps_near;
use burn_megatron_train::{BatchWarmup, Saver, SequenceWarmup, TrainConfig};

use super::run::{Case, Folder, Seen, assert_same, lines};

/// Compares six steps with three steps, a checkpoint, and three steps.
fn goes_on(name: &str, case: &Case) {
    let folder = Folder::new();
    let [whole, half] = ["whole", "half"].map(|name| folder.join(name));
    let uninterrupted = case.run(None, 6, Some(&whole));
    let first = case.run(None, 3, Some(&half));
    let second = case.run(Some(&half), 6, Some(&half));
    for (rank, whole) in uninterrupted.iter().enumerate() {
        let (first, second) = (&first[rank], &second[rank]);
        let both = [&first.steps[..], &second.steps].concat();
        assert_eq!(lines(&both), lines(&whole.steps), "{name}: rank {rank}");
        let both = [&first.held_out[..], &second.held_out].concat();
        assert_eq!(lines(&both), lines(&whole.held_out), "{name}: rank {rank}");
        assert!(second.weights == whole.weights, "{name}: rank {rank}");
    }
    assert_same(name, &whole, &half);
    let moved = uninterrupted[0].steps.iter().any(|step| !step.skipped);
    assert!(moved, "{name}: every step was skipped");
}

#[test]
fn whatever_is_shared() {
    for layout in [
        "tp1",
        "tp2-sp-dp2-mb3",
        // Uneven shards: no parameter is a multiple of three.
        "dp3-mb2-z1",
        "dp2-mb2-z2",
        "dp3-mb2-z3",
        "dp4-mb3-z1-hsdp2",
        "dp4-mb3-z3-hsdp2",
    ] {
        let case = if layout.contains("z3") {
            Case::llama(layout)
        } else {
            Case::gpt(layout)
        };
        goes_on(layout, &case);
    }
    goes_on("llama", &Case::llama("tp2-sp-dp2-mb3"));
}

/// The run is saved between two batch sizes.
#[test]
fn a_batch_size_warm_up() {
    let mut case = Case::gpt("pp2-dp2-mb1/1f1b");
    let part = |until_step, global_batch_size| BatchWarmup {
        until_step,
        global_batch_size,
    };
    case.train.batch_warmup = vec![part(2, 4), part(5, 8)];
    goes_on("warm-up", &case);
}

/// The run is saved between two sequence lengths.
#[test]
fn a_sequence_length_warm_up() {
    let mut case = Case::llama("tp2-sp-cp2-dp2-mb3");
    let part = |until_step, length| SequenceWarmup { until_step, length };
    case.train.sequence_warmup = vec![part(2, 4), part(5, 8)];
    goes_on("warm-up", &case);
}

#[test]
fn pipelines_with_virtual_and_uneven_stages() {
    let ends = LayerSplit::Ends {
        first: Some(1),
        last: None,
    };
    for (layout, split) in [
        ("pp2-dp2-mb3-z1/interleaved/v2", LayerSplit::Even),
        ("tp2-pp2-mb3/zb-v", LayerSplit::Even),
        ("pp2-dp2-mb3-z3/1f1b", ends),
    ] {
        for case in [Case::gpt(layout), Case::llama(layout)] {
            goes_on(layout, &case.split(split.clone()));
        }
    }
}

fn precision(precision: Precision, moments: Moments, layout: &str) -> Case {
    let mut case = Case::gpt(layout);
    case.train.data_parallel.precision = precision;
    case.train.data_parallel.moments = moments;
    case
}

#[test]
fn sixteen_bits() {
    goes_on(
        "bf16",
        &precision(Precision::Bf16, Moments::F32, "dp2-mb3-z2"),
    );
    goes_on(
        "bf16 moments",
        &precision(Precision::Bf16, Moments::Bf16, "dp3-mb2-z3"),
    );
    goes_on(
        "bf16 moments",
        &precision(Precision::F32, Moments::Bf16, "tp2-dp2-mb3"),
    );
}

/// The scale falls before and after the checkpoint, and grows.
#[test]
fn a_dynamic_loss_scale() {
    let mut case = precision(Precision::F16, Moments::F32, "dp2-mb3-z1");
    case.train.loss_scale = Some(LossScale::Dynamic(LossScaleConfig {
        initial: 2f64.powi(14),
        growth_interval: 1,
        hysteresis: 1,
        ..LossScaleConfig::default()
    }));
    let seen = case.run(None, 6, None).swap_remove(0);
    let skipped: Vec<_> = seen.steps.iter().map(|step| step.skipped).collect();
    for half in skipped.chunks(3) {
        assert!(half.contains(&true) && half.contains(&false), "{skipped:?}");
    }
    goes_on("f16", &case);
}

#[test]
fn eight_bits() {
    for (recipe, layout, gather) in [
        ("delayed", "dp2-mb2-z1", false),
        ("delayed", "dp2-mb2-z1", true),
        ("delayed", "tp2-pp2-dp1-mb2/1f1b", false),
        ("delayed", "dp2-mb2-z3", false),
        ("blockwise", "dp2-mb2-z2", true),
    ] {
        let mut case = Case::llama(layout);
        case.model.hidden = 32;
        case.model.mlp_width = Some(64);
        case.model.layers = 2;
        case.train.global_batch_size = 4;
        case.fp8 = Fp8Config {
            recipe: Some(recipe.parse().unwrap()),
            ..Fp8Config::default()
        };
        case.train.data_parallel.fp8_param_gather = gather;
        goes_on(&format!("{recipe} {layout} {gather}"), &case);
    }
}

fn unfused() -> KernelChoices {
    let mut choices = KernelChoices::default();
    choices.set("unfused").unwrap();
    choices
}

#[test]
fn the_unfused_optimizer() {
    let kernels = unfused();
    for layout in ["dp2-mb3-z1", "dp2-mb3-z3"] {
        goes_on(
            layout,
            &Case {
                kernels: kernels.clone(),
                ..Case::gpt(layout)
            },
        );
    }
}

/// Fused and unfused optimizers have the same tensors.
#[test]
fn either_optimizer_loads_what_the_other_saved() {
    let folder = Folder::new();
    let fused = Case::llama("dp2-mb3-z1");
    let unfused = Case {
        kernels: unfused(),
        ..fused.clone()
    };
    for (name, one, other) in [("fused", &fused, &unfused), ("unfused", &unfused, &fused)] {
        let [from, to] = ["from", "to"].map(|end| folder.join(&format!("{name}-{end}")));
        one.run(None, 3, Some(&from));
        other.pass_on(&from, &to);
        assert_same(name, &from, &to);
        let [own, others] = [one, other].map(|case| case.run(Some(&from), 6, None));
        assert_steps_near(name, &own[0].steps, &others[0].steps);
    }
}

/// A skipped step changes the scales just before the checkpoint.
#[test]
fn eight_bits_with_skipped_steps() {
    for (gather, initial) in [(false, 40), (true, 40), (false, 16), (true, 16)] {
        let mut case = precision(Precision::F16, Moments::F32, "dp2-mb2-z1");
        case.model.hidden = 32;
        case.model.layers = 2;
        case.train.global_batch_size = 4;
        case.fp8 = Fp8Config {
            recipe: Some("delayed".parse().unwrap()),
            ..Fp8Config::default()
        };
        case.train.data_parallel.fp8_param_gather = gather;
        case.train.loss_scale = Some(LossScale::Dynamic(LossScaleConfig {
            initial: 2f64.powi(initial),
            backoff: 2f64.powi(if initial == 40 { -8 } else { -1 }),
            growth_interval: 1,
            hysteresis: 1,
            ..LossScaleConfig::default()
        }));
        let skipped = case.run(None, 6, None).swap_remove(0).steps;
        assert!(skipped[..3].iter().any(|step| step.skipped), "{skipped:?}");
        assert!(skipped.iter().any(|step| !step.skipped), "{skipped:?}");
        goes_on(&format!("8 bits {gather} 2^{initial}"), &case);
    }
}

/// Training continues while the tensors of an earlier step are written.
#[test]
fn saving_in_the_background_saves_the_earlier_weights() {
    let folder = Folder::new();
    for layout in ["dp2-mb3", "dp2-mb3-z3", "tp2-pp2-mb3/1f1b"] {
        let case = Case {
            every: Some(1),
            ..Case::llama(layout)
        };
        let other = Case {
            asynchronous: true,
            ..case.clone()
        };
        let [one, two] =
            ["sync", "async"].map(|end| folder.join(&format!("{end}-{}", layout.len())));
        let a = case.run(None, 6, Some(&one));
        let b = other.run(None, 6, Some(&two));
        for (a, b) in a.iter().zip(&b) {
            assert_eq!(lines(&a.steps), lines(&b.steps));
        }
        let steps = |seen: &Seen| {
            seen.saved
                .iter()
                .map(|saved| saved.step)
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(&a[0]), [1, 2, 3, 4, 5, 6]);
        assert_eq!(steps(&b[0]), [1, 2, 3, 4, 5, 6]);
        assert!(steps(&a[1]).is_empty() && steps(&b[1]).is_empty());
        for step in 1..=6 {
            let name = format!("step-{step:08}");
            assert_same(layout, &one.join(&name), &two.join(&name));
        }
        let saved = &b[0].saved[2];
        assert!(saved.bytes > 10_000 && saved.seconds > 0.0);
        let line = saved.to_string();
        assert!(
            line.starts_with("saved step 3 in ") && line.ends_with("KiB)"),
            "{line}"
        );
    }
}

#[test]
fn old_checkpoints_are_removed() {
    let folder = Folder::new();
    let case = Case {
        every: Some(1),
        ..Case::llama("dp2-mb3-z1")
    };
    let into = folder.join("kept");
    let text = Text::new();
    let text = text.open();
    let run = |groups: &_| {
        let mut trainer = case.trainer(groups)?;
        let mut saving = case.saving(&into);
        saving.keep = Retention {
            last: Some(2),
            every: Some(3),
        };
        trainer.save_with(Saver::open(saving, groups)?);
        trainer.fit(&text, &mut burn_megatron_train::NoopObserver)?;
        Ok(())
    };
    case.on_ranks(run).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&into)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("step-"))
        .collect();
    names.sort();
    assert_eq!(names, ["step-00000003", "step-00000005", "step-00000006"]);
}

/// A run that is resumed with larger batches reads the next samples.
#[test]
fn another_batch_size_continues_with_the_next_sample() {
    let folder = Folder::new();
    let case = Case::llama("dp2-mb3");
    let from = folder.join("from");
    case.run(None, 3, Some(&from));
    let larger = Case {
        train: TrainConfig {
            global_batch_size: 24,
            ..case.train.clone()
        },
        ..case.clone()
    };
    let to = folder.join("to");
    larger.run(Some(&from), 5, Some(&to));
    assert_eq!(
        Checkpoint::open(&to).unwrap().metadata().samples,
        3 * 12 + 2 * 24
    );
}
