//! Implements `burn-megatron convert`.

#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_megatron::checkpoint::{
    AveragedWeights, Checkpoint, ElementType, TensorSource, check_output,
};
use burn_megatron::nn::lora::LoraLayers;
use burn_megatron::regular_file::is_there;
use burn_megatron_models::hf::peft::is_peft_folder;
use burn_megatron_models::hf::{ExportOptions, is_hf_folder, stored_hf_files};
use clap::{Args, ValueEnum};
use indicatif::{HumanBytes, ProgressBar};

use crate::byte_size::ByteSize;
use crate::companions::Companions;
use crate::error::Error;
use crate::family::{Families, Model};
use crate::model_folder::{lora_of, open_checkpoint};
use crate::numbers::count;
use crate::replaced_folder::{replace, written_path};
use crate::terminal::bar_style;

/// Flags of `convert`.
#[derive(Args)]
pub struct ConvertArgs {
    /// The model to convert. A Hugging Face folder, which contains a config.json, is converted to a checkpoint. A
    /// checkpoint, or the latest checkpoint in a run folder, is converted to a Hugging Face folder.
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// The folder to write. It must not exist, unless --overwrite is given.
    #[arg(value_name = "DST")]
    target: PathBuf,
    /// Replace an existing model folder.
    #[arg(long)]
    overwrite: bool,
    /// The dtype of the converted tensors. The default is the dtype of each tensor in the checkpoint.
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Maximum size of the tensors in a file, such as 512MiB. The default is 5GB. A tensor that is larger is written to
    /// a separate file.
    #[arg(long, value_name = "SIZE")]
    max_shard_size: Option<ByteSize>,
    /// Hugging Face folder from which the model family, special tokens, tokenizer and generation settings are taken. A
    /// checkpoint that was converted from a Hugging Face folder contains them. For other checkpoints, the default is
    /// the model from which the run was loaded (--load). In this case, the tokenizer and the chat template come from
    /// the training data of the run.
    #[arg(long, value_name = "DIR")]
    like: Option<PathBuf>,
    /// Write the whole model, with the LoRA adapters of the checkpoint merged into its weights. By default, a
    /// checkpoint with LoRA adapters is converted to a peft folder, which contains only the adapters.
    #[arg(long)]
    merge_lora: bool,
    /// Write the exponential moving average of the weights (train.ema) instead of the weights.
    #[arg(long)]
    ema: bool,
}

/// Dtypes of converted tensors.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Dtype {
    #[value(aliases = ["fp64", "float64"])]
    F64,
    #[value(aliases = ["fp32", "float32"])]
    F32,
    #[value(aliases = ["fp16", "float16"])]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<Dtype> for ElementType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 => Self::F64,
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// Converts a Hugging Face folder to a checkpoint, or a checkpoint to a Hugging Face folder.
pub fn run(args: &ConvertArgs, families: &Families) -> Result<ExitCode, Error> {
    check_target(args)?;
    if is_hf_folder(&args.source) {
        check_output(&written_path(&args.target), &[&args.source])?;
        from_hf(args, families)?;
    } else {
        from_checkpoint(args, families)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that the target can be written: it does not exist, or --overwrite is given and this command wrote it.
fn check_target(args: &ConvertArgs) -> Result<(), Error> {
    let (source, target) = (&args.source, &args.target);
    if !is_there(target) {
        return Ok(());
    }
    let shown = target.display();
    if !args.overwrite {
        return Err(format!(
            "{shown} exists already: name another folder, or replace this one with --overwrite"
        )
        .into());
    }
    let is_empty = || std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    // Checkpoints of runs do not contain these files.
    let is_converted = || {
        let files = Checkpoint::open(target).map(|checkpoint| stored_hf_files(&checkpoint));
        files.is_ok_and(|files| files.is_ok_and(|files| !files.is_empty()))
    };
    if !(is_hf_folder(target) || is_peft_folder(target) || is_empty() || is_converted()) {
        return Err(format!(
            "--overwrite replaces a folder that convert wrote, and {shown} is neither that nor empty: remove it, or name \
             another folder"
        )
        .into());
    }
    if let (Ok(source), Ok(target)) = (source.canonicalize(), target.canonicalize())
        && (source.starts_with(&target) || target.starts_with(&source))
    {
        let source = args.source.display();
        return Err(format!("{shown} and {source} contain each other: name another folder").into());
    }
    Ok(())
}

fn from_hf(args: &ConvertArgs, families: &Families) -> Result<(), Error> {
    let path = &args.source;
    for (flag, is_given) in [
        ("dtype", args.dtype.is_some()),
        ("max-shard-size", args.max_shard_size.is_some()),
        ("like", args.like.is_some()),
        ("merge-lora", args.merge_lora),
        ("ema", args.ema),
    ] {
        if is_given {
            return Err(format!(
                "--{flag} requires a checkpoint, but {} is a Hugging Face folder: remove it",
                path.display()
            )
            .into());
        }
    }
    let exchange = families.hf(path)?;
    let (model, source) = exchange.open(path)?;
    let bytes = total(&*source);
    let bar = bar(bytes);
    let tensors = replace(&args.target, |to| {
        let checkpoint = exchange.import(path, to, &mut |bytes| bar.inc(bytes))?;
        Ok(checkpoint.keys().len())
    })?;
    bar.finish_and_clear();
    let what = format!("{}, {}", model.family(), count(tensors, "tensor"));
    report(
        &what,
        bytes,
        Checkpoint::open(&args.target)?.path().display(),
    );
    Ok(())
}

fn from_checkpoint(args: &ConvertArgs, families: &Families) -> Result<(), Error> {
    let path = &args.source;
    let checkpoint = open_checkpoint(path)?;
    check_output(&written_path(&args.target), &[checkpoint.path()])?;
    let model = families.model_of(&checkpoint)?;
    let Some(exchange) = model.hf() else {
        let (name, family) = (checkpoint.name(), model.family());
        return Err(format!("{name}: the family {family:?} is not a Hugging Face family").into());
    };
    let usual = ExportOptions::default();
    let options = ExportOptions {
        dtype: args.dtype.map(ElementType::from),
        max_shard_size: args
            .max_shard_size
            .map_or(usual.max_shard_size, |size| size.0),
        ..usual
    };
    let lora = lora_of(&checkpoint)?;
    if args.ema && lora.is_some() {
        return Err("--ema has no effect on adapters; remove the flag".into());
    }
    let merged = match (&lora, args.merge_lora) {
        (Some(lora), false) => {
            let layers = model.adapted_layers(lora)?;
            return export_adapters(&checkpoint, (&model, &layers), options, args);
        }
        (None, true) => {
            let name = checkpoint.name();
            return Err(format!("--merge-lora: {name} has no adapters; remove the flag").into());
        }
        (Some(_), true) => Some(families.open(path)?.1),
        (None, false) => None,
    };
    let average = args.ema.then(|| AveragedWeights::of(&checkpoint));
    let average = average.map(|average| {
        average.ok_or_else(|| {
            let name = checkpoint.name();
            format!("--ema: {name} has no average of the weights, because its run had no train.ema; remove the flag")
        })
    });
    let average = average.transpose()?;
    let weights = average.as_ref().map(|average| average as &dyn TensorSource);
    let weights = weights.or(merged.as_deref()).unwrap_or(&checkpoint);
    let companions = match &args.like {
        Some(like) => Companions::like(like),
        None => Companions::of_checkpoint(&checkpoint)?,
    };
    let bar = bar(total(weights));
    let progress = &mut |bytes| bar.inc(bytes);
    let weights = (&checkpoint, weights);
    let exported = replace(&args.target, |to| {
        exchange.export(weights, &companions, to, options, progress)
    })?;
    bar.finish_and_clear();
    let summary = exported.summary;
    let what = format!(
        "{}, {} in {}",
        exported.model_type,
        count(summary.tensors, "tensor"),
        count(summary.files, "file")
    );
    report(&what, summary.bytes, args.target.display());
    if !exported.has_files {
        println!("it has no tokenizer; --like DIR copies the tokenizer of another folder");
    }
    Ok(())
}

/// Writes the adapters of a checkpoint as a `peft` folder.
fn export_adapters(
    checkpoint: &Checkpoint,
    (model, layers): (&Model, &LoraLayers),
    options: ExportOptions,
    args: &ConvertArgs,
) -> Result<(), Error> {
    for (flag, is_given) in [
        ("like", args.like.is_some()),
        ("max-shard-size", args.max_shard_size.is_some()),
    ] {
        if is_given {
            return Err(format!("--{flag} has no effect on adapters without --merge-lora").into());
        }
    }
    let Some(exchange) = model.hf() else {
        unreachable!("the caller has checked the family")
    };
    let model = (model, layers);
    let summary = replace(&args.target, |to| {
        exchange.export_adapter(checkpoint, model, to, options, &mut |_| {})
    })?;
    let what = format!("adapters, {}", count(summary.tensors, "tensor"));
    report(&what, summary.bytes, args.target.display());
    Ok(())
}

/// Returns the number of bytes of the model's tensors.
pub fn total(source: &dyn TensorSource) -> u64 {
    let keys = source.keys().into_iter();
    let weights = keys.filter(|key| key.starts_with(burn_megatron::checkpoint::MODEL));
    let sizes = weights.filter_map(|key| source.tensor(&key)?.bytes().ok());
    sizes.map(|bytes| bytes as u64).sum()
}

fn bar(total: u64) -> ProgressBar {
    let style = "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    ProgressBar::new(total).with_style(bar_style(style))
}

fn report(what: &str, bytes: u64, to: impl Display) {
    println!("{what}, {} written to {to}", HumanBytes(bytes));
}
