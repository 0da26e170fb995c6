//! Checkpoints as files: round trips, and errors for damaged files.

mod faults;
mod folders;
mod inactive;
#[cfg(unix)]
mod links;
mod manifests;
#[cfg(unix)]
mod output;
mod round_trip;

use std::fs;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::*;

/// Returns a temporary folder, in memory if possible, where syncing takes no time.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    made.unwrap()
}

/// A tensor with its bytes.
#[derive(Clone, Debug)]
struct TestTensor {
    meta: TensorMeta,
    bytes: Vec<u8>,
}

fn whole(key: &str, dtype: ElementType, shape: &[usize]) -> TestTensor {
    let meta = TensorMeta {
        key: key.into(),
        dtype,
        shape: shape.to_vec(),
    };
    // Bytes that depend on the tensor and the offset.
    let seed = key.bytes().map(usize::from).sum::<usize>();
    let bytes = 0..meta.bytes().unwrap();
    let bytes = bytes.map(|at| (((at + seed) * 2_654_435_761) >> 13) as u8);
    TestTensor {
        bytes: bytes.collect(),
        meta,
    }
}

impl TestTensor {
    /// Returns the bytes of a slice.
    fn of(&self, slice: &TensorSlice) -> Vec<u8> {
        let size = self.meta.dtype.size();
        let runs = slice.runs(&self.meta.shape);
        let runs = runs
            .iter()
            .map(|run| &self.bytes[run.in_tensor * size..(run.in_tensor + run.len) * size]);
        runs.flatten().copied().collect()
    }
}

fn metadata(step: u64) -> CheckpointMetadata {
    CheckpointMetadata {
        step,
        samples: step * 8,
        layout: "tensor 2 x data 2".into(),
        config: serde_json::json!({"train": {"rate": 0.1, "name": "ä \"b\""}}),
        state: serde_json::Value::Null,
    }
}

fn slice(offset: &[usize], shape: &[usize]) -> TensorSlice {
    TensorSlice {
        offset: offset.to_vec(),
        shape: shape.to_vec(),
    }
}

/// Writes parts. Each rank has the index of the tensor and the slice of each shard.
fn write(pending: &PendingCheckpoint, tensors: &[TestTensor], parts: &[Vec<(usize, TensorSlice)>]) {
    for (rank, part) in parts.iter().enumerate() {
        let shards: Vec<_> = part
            .iter()
            .map(|(tensor, slice)| TensorShard {
                tensor: tensors[*tensor].meta.clone(),
                slice: slice.clone(),
            })
            .collect();
        let object = (format!("rank {rank}"), vec![rank as u8; 5]);
        let data = |index: usize| Ok(tensors[part[index].0].of(&part[index].1));
        pending.write_part(rank, &shards, &[object], data).unwrap();
    }
}

/// Returns two tensors in three shards, in two parts.
fn small() -> (Vec<TestTensor>, Vec<Vec<(usize, TensorSlice)>>) {
    let tensors = vec![
        whole("model/a.weight", ElementType::F32, &[3, 4]),
        whole("model/b", ElementType::Bf16, &[5]),
    ];
    let parts = vec![
        vec![(0, slice(&[0, 0], &[3, 2])), (1, slice(&[0], &[5]))],
        vec![(0, slice(&[0, 2], &[3, 2]))],
    ];
    (tensors, parts)
}

const WAIT: Duration = Duration::from_secs(20);

/// Saves [`small`] as this step.
fn save(folder: &CheckpointFolder, step: u64, keep: &Retention) -> Checkpoint {
    let (tensors, parts) = small();
    let pending = folder.begin(step).unwrap();
    write(&pending, &tensors, &parts);
    pending.publish(2, &metadata(step), keep, WAIT).unwrap()
}

fn saved(path: &Path) -> Checkpoint {
    save(
        &CheckpointFolder::create(path).unwrap(),
        7,
        &Retention::default(),
    )
}

/// Checks that a checkpoint equals [`small`] in every byte.
fn assert_small(checkpoint: &Checkpoint) {
    checkpoint.verify(&mut |_| {}).unwrap();
    for tensor in small().0 {
        let slice = TensorSlice::whole(&tensor.meta.shape);
        assert_eq!(
            checkpoint.tensor(&tensor.meta.key),
            Some(tensor.meta.clone())
        );
        assert_eq!(
            checkpoint.read(&tensor.meta.key, &slice).unwrap(),
            tensor.bytes
        );
    }
}
