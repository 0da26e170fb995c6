//! The flags of `checkpoint`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Commands for checkpoints. PATH is a checkpoint, or a folder of checkpoints or of a run, whose latest is used.
#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// Show the metadata and the contents of a checkpoint.
    Inspect(InspectArgs),
    /// Compare all tensors and objects of two checkpoints, however they are sharded.
    ///
    /// Exits with 0 if they are equal bit for bit, with 1 if not, with 2 if one cannot be read.
    Diff(DiffArgs),
    /// Write a checkpoint to another folder with unsharded tensors, in a given number of files.
    ///
    /// Every tensor is in the safetensors files under its key, for other programs to read. The result is
    /// compared with the source.
    Reshard(ReshardArgs),
    /// Verify the checksums of all files of a checkpoint.
    ///
    /// Exits with 1 if anything has changed since it was written.
    Verify(VerifyArgs),
}

/// Flags of `checkpoint inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// The checkpoint.
    pub path: PathBuf,
    /// List each tensor: type, shape, bytes, pieces.
    #[arg(long)]
    pub tensors: bool,
    /// Print everything as JSON, with the recipe and the state of the run.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `checkpoint diff`.
#[derive(Args)]
pub struct DiffArgs {
    /// A checkpoint.
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// Another one.
    #[arg(value_name = "B")]
    pub second: PathBuf,
}

/// Flags of `checkpoint reshard`.
#[derive(Args)]
pub struct ReshardArgs {
    /// The checkpoint.
    pub path: PathBuf,
    /// Folder of checkpoints to write the new one to; created if missing.
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Number of files, of sizes as equal as whole tensors allow.
    #[arg(long, value_name = "N", value_parser = at_least_one, required_unless_present = "max_file_size")]
    pub files: Option<usize>,
    /// Maximum size of a file, such as 5GB or 512MiB; a larger tensor gets a file of its own.
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "files")]
    pub max_file_size: Option<u64>,
}

/// Flags of `checkpoint verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// The checkpoint.
    pub path: PathBuf,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(files) => Ok(files),
        Err(error) => Err(format!("{error}")),
    }
}

/// Bytes, with a unit or without.
fn size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];
    let split = UNITS.iter().find_map(|(name, unit)| {
        let number = text.strip_suffix(name)?;
        Some((number.trim_end(), *unit))
    });
    let (number, unit) = split.unwrap_or((text, 1));
    let bytes = number.parse::<u64>().ok();
    let bytes = bytes.and_then(|number| number.checked_mul(unit));
    match bytes {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!(
            "invalid size '{text}': expected a whole number with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let good = [
            ("7", 7),
            ("7B", 7),
            ("5GB", 5_000_000_000),
            ("512 MiB", 512 << 20),
        ];
        for (text, bytes) in good {
            assert_eq!(size(text), Ok(bytes));
        }
        for bad in [
            "",
            "0",
            "0GB",
            "-1MB",
            "1.5GB",
            "GB",
            "99999999999TiB",
            "5 gigs",
            "5GBB",
        ] {
            assert!(size(bad).unwrap_err().contains(bad), "{bad}");
        }
    }
}
