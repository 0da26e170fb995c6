//! Implements `burn-megatron checkpoint diff`.

use std::path::Path;
use std::process::ExitCode;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointComparison, CheckpointError, TensorDifference, compare,
};

use super::args::DiffArgs;
use super::{bar, tensor_bytes};
use crate::numbers::count;

/// Prints the differences of two checkpoints.
pub fn run(args: &DiffArgs) -> ExitCode {
    match differences(&args.first, &args.second) {
        Ok((lines, is_same)) => {
            println!("{}", lines.join("\n"));
            ExitCode::from(u8::from(!is_same))
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn differences(first: &Path, second: &Path) -> Result<(Vec<String>, bool), CheckpointError> {
    let (first, second) = (Checkpoint::open(first)?, Checkpoint::open(second)?);
    let bar = bar(tensor_bytes(&first));
    let tensors = compare(&first, &second, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let objects = objects(&first, &second)?;
    let mut lines = vec![
        format!("A  {}", about(&first)),
        format!("B  {}", about(&second)),
        String::new(),
    ];
    lines.extend(describe(&tensors));
    lines.extend(objects.iter().cloned());
    let is_same = tensors.is_same() && objects.is_empty();
    lines.push(if is_same {
        format!(
            "the same: {}, {}",
            count(tensors.same, "tensor"),
            count(first.objects().len(), "object")
        )
    } else {
        format!("the same: {}", count(tensors.same, "tensor"))
    });
    Ok((lines, is_same))
}

fn about(checkpoint: &Checkpoint) -> String {
    let (path, about) = (checkpoint.path().display(), checkpoint.metadata());
    format!(
        "{path}: step {}, {} samples, {}",
        about.step, about.samples, about.layout
    )
}

/// Returns a line for each tensor that differs.
fn describe(comparison: &CheckpointComparison) -> Vec<String> {
    let only = |which: &'static str, keys: &[String]| {
        let lines = keys
            .iter()
            .map(move |key| format!("only in {which}  {key}"));
        lines.collect::<Vec<_>>()
    };
    let mut lines = only("A", &comparison.only_first);
    lines.extend(only("B", &comparison.only_second));
    lines.extend(comparison.different.iter().map(difference));
    lines
}

fn difference(of: &TensorDifference) -> String {
    let TensorDifference { first, second, .. } = of;
    let mut parts = vec![];
    if first.dtype != second.dtype {
        parts.push(format!("{} in A, {} in B", first.dtype, second.dtype));
    }
    match of.elements {
        None => parts.push(format!("{:?} in A, {:?} in B", first.shape, second.shape)),
        Some(0) => parts.push("the same values".into()),
        Some(elements) => parts.push(format!(
            "{elements} of {} elements differ, by at most {:.3e} absolute, {:.3e} relative",
            first.shape.iter().product::<usize>(),
            of.max_absolute,
            of.max_relative
        )),
    }
    format!("differs    {}: {}", first.key, parts.join("; "))
}

/// Returns a line for each object that differs.
fn objects(first: &Checkpoint, second: &Checkpoint) -> Result<Vec<String>, CheckpointError> {
    let (a, b) = (first.objects(), second.objects());
    let mut lines = vec![];
    for key in &a {
        if b.binary_search(key).is_err() {
            lines.push(format!("only in A  object {key}"));
        } else if first.object(key)? != second.object(key)? {
            lines.push(format!("differs    object {key}"));
        }
    }
    let only = b.iter().filter(|key| a.binary_search(key).is_err());
    lines.extend(only.map(|key| format!("only in B  object {key}")));
    Ok(lines)
}
