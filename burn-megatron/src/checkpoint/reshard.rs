//! Rewrites a checkpoint with other file sizes.

use std::cmp::Reverse;
use std::time::Duration;

use super::{
    Checkpoint, CheckpointError, CheckpointFolder, Retention, TensorEntry, TensorShard,
    TensorSlice, TensorSource,
};

/// The distribution of the tensors over the files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSizes {
    /// At most this number of files. The file sizes are as equal as possible without splitting tensors.
    Files(usize),
    /// The maximum size of a file in bytes. The number of files is as small as possible. A tensor that is larger than
    /// the maximum gets its own file.
    MaxBytes(u64),
}

/// Writes a checkpoint to another folder, with one shard per tensor. The objects are stored in the first file. Only one
/// tensor at a time is in memory. `progress` is called with the number of bytes that were written since the previous
/// call.
///
/// # Errors
///
/// [`CheckpointError::Exists`] if the folder has a checkpoint of this step; [`CheckpointError`] if reading or
/// writing fails.
pub fn reshard(
    from: &Checkpoint,
    to: &CheckpointFolder,
    sizes: FileSizes,
    progress: &mut dyn FnMut(u64),
) -> Result<Checkpoint, CheckpointError> {
    let tensors = from.manifest().tensors.iter();
    let tensors: Vec<_> = tensors.map(TensorEntry::meta).collect();
    let bytes = tensors.iter().map(|tensor| Ok(tensor.bytes()? as u64));
    let bytes = bytes.collect::<Result<Vec<_>, CheckpointError>>()?;
    let step = from.metadata().step;
    if to.steps()?.contains(&step) {
        let path = to.path().to_path_buf();
        return Err(CheckpointError::Exists { path, step });
    }
    let pending = to.begin(step)?;
    let mut files = distribute(&bytes, sizes);
    if files.is_empty() {
        files.push(vec![]);
    }
    for (number, indices) in files.iter().enumerate() {
        let shards: Vec<_> = indices
            .iter()
            .map(|index| TensorShard {
                slice: TensorSlice::whole(&tensors[*index].shape),
                tensor: tensors[*index].clone(),
            })
            .collect();
        let objects = from
            .objects()
            .into_iter()
            .filter(|_| number == 0)
            .map(|key| Ok((key.clone(), from.object(&key)?)))
            .collect::<Result<Vec<_>, CheckpointError>>()?;
        pending.write_part(number, &shards, &objects, |index| {
            let TensorShard { tensor, slice } = &shards[index];
            let bytes = from.read(&tensor.key, slice)?;
            progress(bytes.len() as u64);
            Ok(bytes)
        })?;
    }
    pending.publish(
        files.len(),
        from.metadata(),
        &Retention::default(),
        // All parts are already written.
        Duration::ZERO,
    )
}

/// Assigns tensors of these sizes to files. Returns the tensor indices of each file.
fn distribute(bytes: &[u64], sizes: FileSizes) -> Vec<Vec<usize>> {
    let mut files: Vec<Vec<usize>> = vec![];
    match sizes {
        FileSizes::Files(count) => {
            let mut order: Vec<_> = (0..bytes.len()).collect();
            order.sort_by_key(|index| Reverse(bytes[*index]));
            files.resize(count.max(1).min(bytes.len()), vec![]);
            let mut loads = vec![0; files.len()];
            for index in order {
                // The largest tensors come first, and each is added to the smallest file.
                let least = (0..loads.len()).min_by_key(|file| loads[*file]);
                if let Some(file) = least {
                    loads[file] += bytes[index];
                    files[file].push(index);
                }
            }
            files.iter_mut().for_each(|file| file.sort_unstable());
        }
        FileSizes::MaxBytes(most) => {
            let mut load = u64::MAX;
            for (index, size) in bytes.iter().enumerate() {
                load = load.saturating_add(*size);
                match files.last_mut() {
                    Some(file) if load <= most => file.push(index),
                    _ => {
                        load = *size;
                        files.push(vec![index]);
                    }
                }
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_of_equal_size() {
        let bytes = [5, 1, 1, 4, 3, 0];
        let files = distribute(&bytes, FileSizes::Files(2));
        assert_eq!(files, [vec![0, 1, 2, 5], vec![3, 4]]);
        assert_eq!(distribute(&bytes, FileSizes::Files(9)).len(), 6);
        assert_eq!(distribute(&bytes, FileSizes::Files(0)).len(), 1);
        let files = distribute(&bytes, FileSizes::MaxBytes(6));
        assert_eq!(files, [vec![0, 1], vec![2, 3], vec![4, 5]]);
        let files = distribute(&bytes, FileSizes::MaxBytes(2));
        assert_eq!(files, [vec![0], vec![1, 2], vec![3], vec![4], vec![5]]);
        assert!(distribute(&[], FileSizes::Files(3)).is_empty());
        assert!(distribute(&[], FileSizes::MaxBytes(3)).is_empty());
    }
}
