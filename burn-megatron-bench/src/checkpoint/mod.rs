//! The `burn-megatron-bench checkpoint` benchmark.

mod case;
mod files;

use std::path::PathBuf;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_cli::internal::{Error, at_least_one, median};
use burn_megatron_models::TransformerConfig;
use clap::Args;
use serde::Serialize;

use crate::report::write;
use case::{CheckpointBench, CheckpointTimings};

/// Layers and hidden size of the model.
const LAYERS: usize = 12;
const HIDDEN: usize = 512;

/// Steps between two asynchronous checkpoints.
const EVERY: usize = 12;

/// Flags of `checkpoint`.
#[derive(Args)]
pub struct CheckpointBenchArgs {
    /// Number of data-parallel ranks, each with one compute thread.
    #[arg(long, visible_alias = "dp", value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub data_parallel: usize,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also parameters.
    #[arg(long, value_name = "STAGE", default_value_t = ZeroStage::Optimizer)]
    pub zero_stage: ZeroStage,
    /// Number of checkpoints of each kind. The median is reported.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub repeats: usize,
    /// Folder on the disk to measure. Default: the temporary folder of the system.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The results. Bandwidths are in MB/s (1e6 bytes).
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

/// Saves, copies, loads and reads the same bytes, interleaved, and prints the bandwidth of each.
pub fn run(args: &CheckpointBenchArgs) -> Result<(), Error> {
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = tempfile::tempdir_in(&dir)
        .map_err(|error| format!("cannot create a folder in {}: {error}", dir.display()))?;
    let setup = CheckpointBench {
        args,
        model: TransformerConfig {
            layers: LAYERS,
            hidden: HIDDEN,
            ..TransformerConfig::gpt2()
        },
        every: EVERY,
        folder: folder.path(),
    };
    println!(
        "{LAYERS} layers, hidden {HIDDEN}, on {} ranks with ZeRO-{}; medians of {}; in {}\n",
        args.data_parallel,
        args.zero_stage,
        args.repeats,
        dir.display(),
    );
    let report = CheckpointReport::of(args.data_parallel, &setup.run()?);
    folder
        .close()
        .map_err(|error| format!("cannot remove a folder in {}: {error}", dir.display()))?;
    print!("{report}");
    match &args.json {
        Some(path) => write(path, &serde_json::to_vec_pretty(&report)?),
        None => Ok(()),
    }
}

impl CheckpointReport {
    fn of(ranks: usize, record: &CheckpointTimings) -> Self {
        let megabytes = record.bytes as f64 / 1e6;
        let rate = |seconds: &[f64]| megabytes / median(seconds);
        let [save, copy, load, read] = [&record.save, &record.copy, &record.load, &record.read];
        // Ratios are computed within a round, so that other load on the disk affects both values.
        let ratio = |own: &[f64], plain: &[f64]| {
            let ratios = own.iter().zip(plain).map(|(own, plain)| plain / own);
            median(&ratios.collect::<Vec<_>>())
        };
        Self {
            ranks,
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
            "\nduring training: written in {:.2} s; training stalls for {:.3} s ({:.1} % of the write time); \
             a step otherwise takes {:.2} s, and all steps together take {:.2} s longer ({:.0} % of the write time)",
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
    use crate::test_flags::parse_text;

    #[test]
    fn zero_is_refused() {
        for flag in ["--data-parallel 0", "--repeats 0"] {
            assert!(parse_text::<CheckpointBenchArgs>(flag).is_err(), "{flag}");
        }
    }

    #[test]
    fn a_small_model_is_saved_and_loaded() {
        let args = parse_text::<CheckpointBenchArgs>("--repeats 2").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let setup = CheckpointBench {
            args: &args,
            model: TransformerConfig {
                layers: 2,
                hidden: 32,
                heads: 2,
                vocabulary: 256,
                vocabulary_divisible_by: 1,
                context: 64,
                ..TransformerConfig::gpt2()
            },
            every: 2,
            folder: folder.path(),
        };
        let record = setup.run().unwrap();
        let report = CheckpointReport::of(2, &record);
        let turns = [&record.save, &record.copy, &record.load, &record.read];
        assert!(turns.iter().all(|seconds| seconds.len() == 2), "{record:?}");
        assert_eq!(
            [record.write.len(), record.stall.len()],
            [2, 2],
            "{record:?}"
        );
        // Weights and both moments in f32, and the headers.
        let blocks = 2 * (12 * 32 * 32 + 13 * 32);
        let bytes = 12 * ((256 + 64 + 2) * 32 + blocks) as u64;
        assert!(
            (bytes..bytes + bytes / 8).contains(&record.bytes),
            "{record:?}"
        );
        assert!(report.to_string().contains("during training: written in"));
    }
}
