//! The flags of `checkpoint`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// What can be done with checkpoints. PATH is a checkpoint, or a folder of them, or the folder of a run,
/// whose latest is taken.
#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// Show what a checkpoint is of, and what it has.
    Inspect(InspectArgs),
    /// Compare all tensors and objects of two checkpoints, whatever files they are in.
    ///
    /// Ends with 0 if they are the same to the bit, with 1 if not, with 2 if one cannot be read.
    Diff(DiffArgs),
    /// Write a checkpoint into another folder, every tensor whole, in as many files as wanted.
    ///
    /// Other programs find every tensor under its key in the safetensors files. What was written is
    /// compared with what was read.
    Reshard(ReshardArgs),
    /// Read every byte of a checkpoint and say what has changed since it was written.
    ///
    /// Ends with 1 if anything has.
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
    /// Print JSON; it has all of it, the recipe and the state of the run too.
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
    /// The folder of checkpoints that gets the new one; it is created if need be.
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Into how many files, as equal as whole tensors allow.
    #[arg(long, value_name = "N", value_parser = at_least_one, required_unless_present = "max_file_size")]
    pub files: Option<usize>,
    /// The most that a file has, such as 5GB or 512MiB; a larger tensor gets a file of its own.
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
        Ok(0) => Err("0 files hold nothing; 1 and more do".into()),
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
            "'{text}' is no size: a whole number with KB, MB, GB, TB, KiB, MiB, GiB or TiB is"
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
