//! `burn-megatron-bench checkpoint`.

mod case;
mod files;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_models::TransformerConfig;
use clap::Args;
use serde::Serialize;

use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use case::{CheckpointBench, CheckpointTimings};

/// Flags of `checkpoint`.
#[derive(Args)]
pub struct CheckpointBenchArgs {
    /// Blocks of the model.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub layers: usize,
    /// Features of its residual stream.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub hidden: usize,
    /// Number of data-parallel ranks, each with one compute thread.
    #[arg(long, visible_alias = "dp", value_name = "N", default_value_t = 2)]
    pub data_parallel: usize,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also parameters.
    #[arg(long, value_name = "STAGE", default_value_t = ZeroStage::Optimizer)]
    pub zero_stage: ZeroStage,
    /// Checkpoints of each kind, of which the median is reported.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeats: usize,
    /// Steps between two asynchronous checkpoints.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub every: usize,
    /// A folder on the disk to measure; by default the system's temporary folder.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The results; bandwidths in MB/s (1e6 bytes).
#[derive(Serialize)]
struct CheckpointReport {
    ranks: usize,
    megabytes: f64,
    save: f64,
    copy: f64,
    save_to_copy: f64,
    load: f64,
    read: f64,
    load_to_read: f64,
    write_seconds: f64,
    stall_seconds: f64,
    slower_seconds: f64,
    step_seconds: f64,
}

/// Saves, copies, loads and reads the same bytes, interleaved, and prints the time of each.
pub fn run(args: &CheckpointBenchArgs) -> Result<ExitCode, Error> {
    let setup = setup(args)?;
    println!("{}\n", describe(&setup));
    // It is removed at the end, so it must not exist before.
    fs::create_dir(&setup.folder).map_err(|error| {
        format!(
            "cannot create the folder {}: {error}",
            setup.folder.display()
        )
    })?;
    let record = setup.run();
    // Removed also after an error.
    let removed = fs::remove_dir_all(&setup.folder);
    let report = CheckpointReport::of(&setup, &record?);
    removed.map_err(|error| format!("cannot remove {}: {error}", setup.folder.display()))?;
    print!("{report}");
    if let Some(path) = &args.json {
        replace_file(path, &serde_json::to_vec_pretty(&report)?)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn setup(args: &CheckpointBenchArgs) -> Result<CheckpointBench, Error> {
    let model = TransformerConfig {
        layers: args.layers,
        hidden: args.hidden,
        ..TransformerConfig::gpt2()
    };
    model.check(1, false)?;
    for (flag, number) in [
        ("data-parallel", args.data_parallel),
        ("repeats", args.repeats),
        ("every", args.every),
    ] {
        if number == 0 {
            return Err(format!("invalid --{flag} 0: expected at least 1").into());
        }
    }
    let folder = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    Ok(CheckpointBench {
        model,
        ranks: args.data_parallel,
        zero_stage: args.zero_stage,
        samples: args.repeats,
        every: args.every,
        folder: folder.join(format!("bench-checkpoint-{}", std::process::id())),
    })
}

fn describe(setup: &CheckpointBench) -> String {
    let CheckpointBench {
        model,
        ranks,
        zero_stage,
        samples,
        folder,
        ..
    } = setup;
    format!(
        "{} layers, hidden {}, on {ranks} ranks with ZeRO-{zero_stage}; medians of {samples}; in {}",
        model.layers,
        model.hidden,
        folder.display(),
    )
}

impl CheckpointReport {
    fn of(setup: &CheckpointBench, record: &CheckpointTimings) -> Self {
        let megabytes = record.bytes as f64 / 1e6;
        let rate = |seconds: &[f64]| megabytes / median(seconds);
        let [save, copy, load, read] = [&record.save, &record.copy, &record.load, &record.read];
        // Ratios within a round, so that other load on the disk affects both.
        let ratio = |own: &[f64], plain: &[f64]| {
            let ratios = own.iter().zip(plain).map(|(own, plain)| plain / own);
            median(&ratios.collect::<Vec<_>>())
        };
        Self {
            ranks: setup.ranks,
            megabytes,
            save: rate(save),
            copy: rate(copy),
            save_to_copy: ratio(save, copy),
            load: rate(load),
            read: rate(read),
            load_to_read: ratio(load, read),
            write_seconds: median(&record.write),
            stall_seconds: median(&record.stall),
            slower_seconds: median(&record.slower),
            step_seconds: median(&record.step),
        }
    }
}

impl std::fmt::Display for CheckpointReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { megabytes, .. } = self;
        writeln!(f, "a checkpoint has {megabytes:.0} MB\n")?;
        let mut row = |what: &str, rate: f64, ratio: Option<f64>| {
            let ratio = ratio.map(|ratio| format!("{:>6.0} %", 100.0 * ratio));
            writeln!(f, "{what:<10}{rate:>8.0} MB/s{}", ratio.unwrap_or_default())
        };
        row("save", self.save, Some(self.save_to_copy))?;
        row("copy", self.copy, None)?;
        row("load", self.load, Some(self.load_to_read))?;
        row("read", self.read, None)?;
        let of_write = |seconds: f64| 100.0 * seconds / self.write_seconds;
        writeln!(
            f,
            "\nduring training: written in {:.2} s; training stalls for {:.3} s ({:.1} % of that), \
             and its steps, of {:.2} s otherwise, take {:.2} s more in all ({:.0} %)",
            self.write_seconds,
            self.stall_seconds,
            of_write(self.stall_seconds),
            self.step_seconds,
            self.slower_seconds,
            of_write(self.slower_seconds),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse;

    fn args(flags: &[&str]) -> CheckpointBenchArgs {
        parse(flags).unwrap()
    }

    #[test]
    fn zero_is_refused() {
        for flag in ["--data-parallel", "--repeats", "--every"] {
            let error = setup(&args(&[flag, "0"])).err().unwrap().to_string();
            assert!(
                error.starts_with(&format!("invalid {flag} 0: expected")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_small_model_is_saved_and_loaded() {
        let dir =
            std::env::temp_dir().join(format!("bench-checkpoint-test-{}", std::process::id()));
        let flags = [
            "--repeats",
            "2",
            "--every",
            "2",
            "--dir",
            dir.to_str().unwrap(),
        ];
        let mut setup = setup(&args(&flags)).unwrap();
        setup.model = TransformerConfig {
            layers: 2,
            hidden: 32,
            heads: 2,
            vocabulary: 256,
            vocabulary_divisible_by: 1,
            context: 64,
            ..TransformerConfig::gpt2()
        };
        fs::create_dir_all(&setup.folder).unwrap();
        let record = setup.run().unwrap();
        let report = CheckpointReport::of(&setup, &record);
        fs::remove_dir_all(dir).unwrap();
        let turns = [&record.save, &record.copy, &record.load, &record.read];
        assert!(turns.iter().all(|seconds| seconds.len() == 2), "{record:?}");
        assert_eq!(
            [record.write.len(), record.stall.len()],
            [2, 2],
            "{record:?}"
        );
        // Weights and both moments, in f32, and the headers.
        let blocks = 2 * (12 * 32 * 32 + 13 * 32);
        let bytes = 12 * ((256 + 64 + 2) * 32 + blocks) as u64;
        assert!(
            (bytes..bytes + bytes / 8).contains(&record.bytes),
            "{record:?}"
        );
        assert!(report.to_string().contains("during training: written in"));
    }
}
