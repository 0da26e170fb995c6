//! Tests that a checkpoint that does not match is an error on every rank, unless the load tolerance allows it.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{Checkpoint, LoadTolerance, load_weights};
use burn_megatron::data_parallel::{Moments, Precision};
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron_train::Saver;

use super::run::{Case, Folder};

const LAYOUT: &str = "tp2-pp2-dp2-mb1-z1/1f1b";

fn saved(case: &Case, folder: &Folder) -> PathBuf {
    let path = folder.join("from");
    case.run(None, 1, Some(&path));
    path
}

/// Asserts that loading fails on every rank, and that some of the errors contain these texts.
fn refused(case: &Case, from: &Path, leniency: LoadTolerance, says: &[&str]) {
    let errors = case.errors(from, leniency);
    assert!(errors.iter().all(Option::is_some), "{errors:?}");
    for text in says {
        let all = errors.iter().flatten().all(|error| error.contains(text));
        assert!(all, "{text}: {errors:?}");
    }
}

fn allowed(case: &Case, from: &Path, leniency: LoadTolerance) {
    let errors = case.errors(from, leniency);
    assert!(errors.iter().all(Option::is_none), "{errors:?}");
}

const MISSING: LoadTolerance = LoadTolerance {
    missing: true,
    unexpected: false,
    rounding: false,
};
const UNEXPECTED: LoadTolerance = LoadTolerance {
    missing: false,
    unexpected: true,
    rounding: false,
};
const ROUNDING: LoadTolerance = LoadTolerance {
    missing: false,
    unexpected: false,
    rounding: true,
};

#[test]
fn tensors_that_are_missing_or_too_many() {
    let folder = Folder::new();
    let case = Case::llama(LAYOUT);
    let from = saved(&case, &folder);
    allowed(&case, &from, LoadTolerance::default());
    let layers = |layers| {
        let mut other = case.clone();
        other.model.layers = layers;
        other
    };
    let strict = LoadTolerance::default();
    refused(
        &layers(6),
        &from,
        strict,
        &["has no ", "model/blocks.", "weight"],
    );
    refused(&layers(6), &from, UNEXPECTED, &["has no "]);
    allowed(&layers(6), &from, MISSING);
    let says = [
        "model/blocks.2.attention.qkv.weight",
        "which the model does not have",
    ];
    refused(&layers(2), &from, strict, &says);
    refused(&layers(2), &from, MISSING, &says);
    allowed(&layers(2), &from, UNEXPECTED);
}

/// Only the ranks of one stage read the tensor. All ranks return the error.
#[test]
fn another_shape_is_never_allowed() {
    let folder = Folder::new();
    let from = saved(&Case::llama(LAYOUT), &folder);
    let mut case = Case::llama(LAYOUT);
    case.model.mlp_width = Some(32);
    let all = LoadTolerance {
        missing: true,
        unexpected: true,
        rounding: true,
    };
    let says = [
        "mlp.up.weight has the shape [16, 48]",
        "[16, 64] in the model",
    ];
    refused(&case, &from, all, &says);
}

#[test]
fn types_that_would_round() {
    let folder = Folder::new();
    let from = saved(&Case::llama(LAYOUT), &folder);
    let mut narrow = Case::llama(LAYOUT);
    narrow.train.data_parallel.moments = Moments::Bf16;
    let says = [
        "adamw.first/",
        "is F32 in",
        "BF16 in this run",
        "allow rounding by name",
    ];
    refused(&narrow, &from, LoadTolerance::default(), &says);
    allowed(&narrow, &from, ROUNDING);
    // The opposite conversion is exact.
    let folder = Folder::new();
    let from = saved(&narrow, &folder);
    allowed(&Case::llama(LAYOUT), &from, LoadTolerance::default());
}

#[test]
fn the_other_state_of_a_run() {
    let folder = Folder::new();
    let plain = Case::llama(LAYOUT);
    let from = saved(&plain, &folder);
    let strict = LoadTolerance::default();
    let mut seed = plain.clone();
    seed.train.seed = 7;
    refused(
        &seed,
        &from,
        strict,
        &["the seed 1", "this run has the seed 7"],
    );
    let mut scaled = plain.clone();
    scaled.train.data_parallel.precision = Precision::F16;
    refused(&scaled, &from, strict, &["has no loss scale"]);
    allowed(&scaled, &from, MISSING);
    let mut fp8 = plain.clone();
    fp8.model.hidden = 32;
    fp8.model.mlp_width = Some(64);
    let wide = fp8.clone();
    fp8.fp8 = Fp8Config {
        recipe: Some("delayed".parse().unwrap()),
        ..Fp8Config::default()
    };
    let folder = Folder::new();
    let from = saved(&wide, &folder);
    refused(&fp8, &from, strict, &["no FP8 state of blocks."]);
    allowed(&fp8, &from, MISSING);
    let folder = Folder::new();
    let from = saved(&fp8, &folder);
    refused(
        &wide,
        &from,
        strict,
        &["fp8/blocks.", "which the model does not have"],
    );
    allowed(&wide, &from, UNEXPECTED);
}

/// One rank reads the byte. All ranks return the error within the deadline.
#[test]
fn a_flipped_byte() {
    let folder = Folder::new();
    let case = Case::llama(LAYOUT);
    let from = saved(&case, &folder);
    let part = Checkpoint::open(&from)
        .unwrap()
        .path()
        .join("part-00003.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&part, bytes).unwrap();
    refused(
        &case,
        &from,
        LoadTolerance::default(),
        &["part-00003.safetensors"],
    );
}

/// Loading only weights does not change the optimizer and the step count.
#[test]
fn weights_alone() {
    let folder = Folder::new();
    let case = Case::gpt(LAYOUT);
    let from = saved(&case, &folder);
    let other = case.layout("tp2-dp2-mb3-z3");
    let run = |groups: &_| {
        let mut trainer = other.trainer(groups)?;
        trainer.load_weights(&Checkpoint::open(&from)?, LoadTolerance::default())?;
        assert_eq!((trainer.steps(), trainer.state().samples), (0, 0));
        let mut twice = other.trainer(groups)?;
        twice.load(&Checkpoint::open(&from)?, LoadTolerance::default())?;
        assert_eq!((twice.steps(), twice.state().samples), (1, 12));
        let [one, two] = [&trainer, &twice].map(|of| of.model().parameters());
        for (one, two) in one.into_iter().zip(two) {
            assert_eq!(one.into_data(), two.into_data());
        }
        Ok(())
    };
    other.on_ranks(run).unwrap();
    let mut fewer = other.clone();
    fewer.model.layers = 2;
    let run = |groups: &_| {
        let mut trainer = fewer.trainer(groups)?;
        let source = Checkpoint::open(&from)?;
        let error = trainer
            .load_weights(&source, LoadTolerance::default())
            .unwrap_err();
        assert!(error.to_string().contains("model/blocks.3."), "{error}");
        // Moments are not weights.
        assert!(!error.to_string().contains("adamw"), "{error}");
        Ok(())
    };
    fewer.on_ranks(run).unwrap();
    // The function can be used without a trainer.
    let _ = load_weights::<burn_megatron_models::Transformer>;
}

/// Only one run at a time may write to a folder.
#[test]
fn a_second_run_is_refused_on_every_rank() {
    let folder = Folder::new();
    let case = Case::llama("dp2-mb3");
    let into = folder.join("shared");
    let first = case
        .on_ranks(|groups| Ok(Saver::open(case.saving(&into), groups)?))
        .unwrap();
    let run = |groups: &_| {
        Ok(Saver::open(case.saving(&into), groups)
            .err()
            .map(|e| e.to_string()))
    };
    for error in case.on_ranks(run).unwrap() {
        assert!(error.unwrap().contains("being written by"));
    }
    drop(first);
    case.on_ranks(run)
        .unwrap()
        .into_iter()
        .for_each(|error| assert_eq!(error, None));
}

/// A rank that cannot write fails the save on all ranks.
#[test]
fn a_rank_that_cannot_write_fails_all() {
    for asynchronous in [false, true] {
        let folder = Folder::new();
        let case = Case {
            asynchronous,
            ..Case::llama("dp2-mb3-z1")
        };
        let into = folder.join("broken");
        let run = |groups: &_| {
            let mut trainer = case.trainer(groups)?;
            trainer.save_with(Saver::open(case.saving(&into), groups)?);
            let first = trainer.save().and_then(|_| trainer.finish_saving());
            // The folder of the draft is replaced by a file.
            groups.world().barrier()?;
            if groups.rank() == 0 {
                fs::rename(&into, into.with_extension("away"))?;
                fs::write(&into, "")?;
            }
            groups.world().barrier()?;
            let second = trainer.save().and_then(|_| trainer.finish_saving());
            Ok((first.is_ok(), second.map_err(|error| error.to_string())))
        };
        for (first, second) in case.on_ranks(run).unwrap() {
            assert!(first);
            assert!(second.unwrap_err().contains("broken"));
        }
    }
}
