//! Checkpoints as files: what comes back, and what is said of files that are not as they were written.

mod aside;
mod faults;
mod folders;
#[cfg(unix)]
mod links;
mod manifests;
mod round_trip;

use std::fs;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::*;

/// A folder that goes with the value: in memory if there is such a place, as it takes no time to sync.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    made.unwrap()
}

/// A tensor with its bytes.
#[derive(Clone, Debug)]
struct Whole {
    meta: TensorMeta,
    bytes: Vec<u8>,
}

fn whole(key: &str, dtype: ElementType, shape: &[usize]) -> Whole {
    let meta = TensorMeta {
        key: key.into(),
        dtype,
        shape: shape.to_vec(),
    };
    // Bytes that differ from tensor to tensor and from place to place.
    let seed = key.bytes().map(usize::from).sum::<usize>();
    let bytes = 0..meta.bytes().unwrap();
    let bytes = bytes.map(|at| (((at + seed) * 2_654_435_761) >> 13) as u8);
    Whole {
        bytes: bytes.collect(),
        meta,
    }
}

impl Whole {
    /// The bytes of a box.
    fn of(&self, slice: &Slice) -> Vec<u8> {
        let size = self.meta.dtype.size();
        let runs = slice.runs(&self.meta.shape);
        let runs = runs
            .iter()
            .map(|run| &self.bytes[run.in_tensor * size..(run.in_tensor + run.len) * size]);
        runs.flatten().copied().collect()
    }
}

fn about(step: u64) -> About {
    About {
        step,
        samples: step * 8,
        layout: "tensor 2 x data 2".into(),
        config: serde_json::json!({"train": {"rate": 0.1, "name": "ä \"b\""}}),
        state: serde_json::Value::Null,
    }
}

fn slice(offset: &[usize], shape: &[usize]) -> Slice {
    Slice {
        offset: offset.to_vec(),
        shape: shape.to_vec(),
    }
}

/// Writes parts: for each rank the number of the tensor and the box of each piece.
fn write(draft: &Draft, tensors: &[Whole], parts: &[Vec<(usize, Slice)>]) {
    for (rank, part) in parts.iter().enumerate() {
        let pieces = part.iter().map(|(tensor, slice)| Piece {
            tensor: tensors[*tensor].meta.clone(),
            slice: slice.clone(),
        });
        let pieces: Vec<_> = pieces.collect();
        let object = (format!("rank {rank}"), vec![rank as u8; 5]);
        let data = |index: usize| Ok(tensors[part[index].0].of(&part[index].1));
        draft.write_part(rank, &pieces, &[object], data).unwrap();
    }
}

/// Two tensors in three pieces, in two parts.
fn small() -> (Vec<Whole>, Vec<Vec<(usize, Slice)>>) {
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
    let draft = folder.begin(step).unwrap();
    write(&draft, &tensors, &parts);
    draft.publish(2, &about(step), keep, WAIT).unwrap()
}

fn saved(path: &Path) -> Checkpoint {
    save(
        &CheckpointFolder::create(path).unwrap(),
        7,
        &Retention::default(),
    )
}

/// Checks that a checkpoint is [`small`], to the last byte.
fn assert_small(checkpoint: &Checkpoint) {
    checkpoint.verify(&mut |_| {}).unwrap();
    for tensor in small().0 {
        let slice = Slice::whole(&tensor.meta.shape);
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
