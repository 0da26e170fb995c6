//! Implements `burn-megatron checkpoint inspect`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, InactiveCheckpoint, TensorEntry,
};
use burn_megatron::text_table::Table;
use indicatif::{HumanBytes, HumanCount};
use serde_json::json;

use super::args::InspectArgs;
use super::bytes_of;
use crate::banner::describe_aside;
use crate::error::Error;
use crate::numbers::count;
use crate::terminal;

/// Prints a checkpoint.
pub fn run(args: &InspectArgs) -> Result<ExitCode, Error> {
    let checkpoint = Checkpoint::open(&args.path).map_err(none_but_aside)?;
    if args.json {
        println!("{}", as_json(&checkpoint)?)
    } else {
        print!("{}", text(&checkpoint, args.tensors))
    }
    Ok(ExitCode::SUCCESS)
}

fn text(checkpoint: &Checkpoint, with_tensors: bool) -> String {
    let (about, totals) = (checkpoint.metadata(), checkpoint.totals());
    let mut lines = vec![
        format!("checkpoint  {}", checkpoint.path().display()),
        format!("step        {}", HumanCount(about.step)),
        format!("samples     {}", HumanCount(about.samples)),
        format!("layout      {}", about.layout),
        format!(
            "tensors     {}, {} elements in {}",
            totals.tensors,
            HumanCount(totals.elements),
            count(totals.shards, "piece")
        ),
        format!("objects     {}", totals.objects),
        format!(
            "data        {} in {}",
            HumanBytes(totals.bytes),
            count(totals.files, "file")
        ),
    ];
    let others = others(checkpoint);
    if !others.is_empty() {
        lines.push(format!("next to it  step {}", others.join(", ")));
    }
    let aside = aside(checkpoint).into_iter();
    lines.extend(aside.map(|aside| format!("aside       {}", describe_aside(&aside))));
    lines.push(String::new());
    lines.push(groups(checkpoint));
    if with_tensors {
        lines.push(String::new());
        lines.push(tensors(checkpoint));
    }
    lines.join("\n") + "\n"
}

/// Adds the checkpoints that were set aside to the error for a folder without a checkpoint.
fn none_but_aside(error: CheckpointError) -> Error {
    let CheckpointError::NoCheckpoint { path, .. } = &error else {
        return error.into();
    };
    let aside = CheckpointFolder::open(path).and_then(|folder| folder.inactive());
    let aside = aside.unwrap_or_default().into_iter();
    let aside: Vec<_> = aside.map(|aside| describe_aside(&aside)).collect();
    if aside.is_empty() {
        error.into()
    } else {
        format!("{error}; set aside: {}", aside.join("; ")).into()
    }
}

/// Returns the folder that contains the checkpoint.
fn folder_of(checkpoint: &Checkpoint) -> Option<CheckpointFolder> {
    let parent = checkpoint.path().parent();
    parent.and_then(|parent| CheckpointFolder::open(parent).ok())
}

/// Returns the checkpoints that were set aside in the same folder.
fn aside(checkpoint: &Checkpoint) -> Vec<InactiveCheckpoint> {
    let aside = folder_of(checkpoint).and_then(|folder| folder.inactive().ok());
    aside.unwrap_or_default()
}

/// Returns the steps of the other checkpoints in the same folder.
fn others(checkpoint: &Checkpoint) -> Vec<String> {
    let steps = folder_of(checkpoint).and_then(|folder| folder.steps().ok());
    let steps = steps.unwrap_or_default().into_iter();
    let others = steps.filter(|step| *step != checkpoint.metadata().step);
    others.map(|step| step.to_string()).collect()
}

/// Returns a line for each key prefix before the first `/`.
fn groups(checkpoint: &Checkpoint) -> String {
    let mut groups: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in &checkpoint.manifest().tensors {
        let name = tensor.key.split_once('/').map_or("", |(name, _)| name);
        let (tensors, bytes) = groups.entry(name).or_default();
        *tensors += 1;
        *bytes += bytes_of(tensor);
    }
    let rows = groups.into_iter().map(|(name, (tensors, bytes))| {
        let name = if name.is_empty() { "(no group)" } else { name };
        vec![
            name.to_string(),
            count(tensors, "tensor"),
            HumanBytes(bytes).to_string(),
        ]
    });
    Table::new(rows).with_left(0..3).fit(terminal::width())
}

fn tensors(checkpoint: &Checkpoint) -> String {
    let row = |tensor: &TensorEntry| {
        vec![
            tensor.key.clone(),
            tensor.dtype.to_string(),
            format!("{:?}", tensor.shape),
            HumanBytes(bytes_of(tensor)).to_string(),
            count(tensor.shards.len(), "piece"),
        ]
    };
    let mut rows: Vec<_> = checkpoint.manifest().tensors.iter().map(row).collect();
    let objects = checkpoint.manifest().objects.iter().map(|object| {
        let bytes = HumanBytes(object.size).to_string();
        vec![object.key.clone(), "object".into(), String::new(), bytes]
    });
    rows.extend(objects);
    // On a narrow terminal, drop the pieces first, then the bytes.
    let table = Table::new(rows).with_left(0..5).with_optional([4, 3]);
    table.fit(terminal::width())
}

fn as_json(checkpoint: &Checkpoint) -> Result<String, Error> {
    let (manifest, totals) = (checkpoint.manifest(), checkpoint.totals());
    let tensors = manifest.tensors.iter().map(|tensor| {
        json!({
            "key": tensor.key, "dtype": tensor.dtype, "shape": tensor.shape,
            "bytes": bytes_of(tensor), "pieces": tensor.shards.len(),
        })
    });
    let objects = manifest.objects.iter();
    let objects = objects.map(|object| json!({"key": object.key, "bytes": object.size}));
    let files = manifest.files.iter();
    let files = files.map(|file| json!({"name": file.name, "bytes": file.size}));
    let aside = aside(checkpoint).into_iter();
    let aside = aside.map(|aside| json!({"path": aside.path, "bytes": aside.bytes}));
    let value = json!({
        "path": checkpoint.path(),
        "about": manifest.metadata,
        "elements": totals.elements,
        "pieces": totals.shards,
        "bytes": totals.bytes,
        "files": files.collect::<Vec<_>>(),
        "tensors": tensors.collect::<Vec<_>>(),
        "objects": objects.collect::<Vec<_>>(),
        "aside": aside.collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&value)?)
}
