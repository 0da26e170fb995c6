//! The same bytes without a format: what saving and loading are compared with.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread;

use burn_megatron_cli::internal::Error;

/// The data files of a checkpoint.
fn files(checkpoint: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = vec![];
    for entry in fs::read_dir(checkpoint)? {
        files.push(entry?.path());
    }
    files.retain(|path| path.extension().is_some_and(|name| name == "safetensors"));
    files.sort();
    Ok(files)
}

/// Does something with each file, on a thread of its own, as ranks do.
fn each<T: Send>(
    files: &[PathBuf],
    what: impl Fn(&Path) -> std::io::Result<T> + Sync,
) -> Result<Vec<T>, Error> {
    thread::scope(|scope| {
        let threads: Vec<_> = files
            .iter()
            .map(|file| scope.spawn(|| what(file)))
            .collect();
        let done = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => Ok(done?),
            Err(_) => Err("a thread panicked".into()),
        });
        done.collect()
    })
}

/// The bytes of the data files.
pub fn bytes(checkpoint: &Path) -> Result<u64, Error> {
    let sizes = each(&files(checkpoint)?, |file| Ok(fs::metadata(file)?.len()))?;
    Ok(sizes.iter().sum())
}

/// Copies the data files into a new folder, and waits until they are on the disk.
pub fn copy(checkpoint: &Path, to: &Path) -> Result<(), Error> {
    fs::create_dir(to)?;
    each(&files(checkpoint)?, |file| {
        let copy = to.join(file.file_name().unwrap_or_default());
        fs::copy(file, &copy)?;
        File::open(&copy)?.sync_all()
    })?;
    File::open(to)?.sync_all()?;
    Ok(())
}

/// Reads the data files into memory.
pub fn read(checkpoint: &Path) -> Result<(), Error> {
    each(&files(checkpoint)?, |file| {
        let mut bytes = Vec::with_capacity(fs::metadata(file)?.len() as usize);
        File::open(file)?.read_to_end(&mut bytes)?;
        Ok(std::hint::black_box(bytes).len())
    })?;
    Ok(())
}
