//! Copies and reads the files of a checkpoint without interpreting them, as a baseline for saving and loading. Files
//! are processed in parallel, as the ranks do.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn_megatron_cli::internal::Error;
use rayon::prelude::*;

/// Returns the data files of a checkpoint.
fn files(checkpoint: &Path) -> Result<Vec<PathBuf>, Error> {
    let files = fs::read_dir(checkpoint)?.map(|entry| Ok(entry?.path()));
    let mut files = files.collect::<Result<Vec<_>, Error>>()?;
    files.retain(|path| path.extension().is_some_and(|name| name == "safetensors"));
    Ok(files)
}

/// Returns the bytes of the data files.
pub fn bytes(checkpoint: &Path) -> Result<u64, Error> {
    let files = files(checkpoint)?;
    let sizes = files.iter().map(|file| Ok(fs::metadata(file)?.len()));
    sizes.sum()
}

/// Copies the data files into a new folder, and waits until the data is on the disk.
pub fn copy(checkpoint: &Path, to: &Path) -> Result<(), Error> {
    fs::create_dir(to)?;
    files(checkpoint)?.par_iter().try_for_each(|file| {
        let copy = to.join(file.file_name().unwrap_or_default());
        fs::copy(file, &copy)?;
        File::open(&copy)?.sync_all()
    })?;
    Ok(File::open(to)?.sync_all()?)
}

/// Reads the data files into memory.
pub fn read(checkpoint: &Path) -> Result<(), Error> {
    let files = files(checkpoint)?;
    let read = |file: &PathBuf| fs::read(file).map(|bytes| drop(std::hint::black_box(bytes)));
    Ok(files.par_iter().try_for_each(read)?)
}
