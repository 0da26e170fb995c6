//! A snapshot of a rank's tensors for a checkpoint. The snapshot is read slice by slice.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Bytes, Device, Tensor};

use super::{MODEL, StateError, WriteItem, buffers, write_items};
use crate::checkpoint::{CheckpointError, ElementType, TensorMeta, TensorShard};
use crate::data_parallel::{BucketShard, DistributedDataParallel};
use crate::nn::{MeshRank, ParameterEntry};
use crate::optim::{OptimizerState, StateKind};

/// The number of bytes of a tensor that are read at once, small enough for reuse by the allocator and for the
/// cache. Tests use a smaller value, because their tensors are small.
const READ_BYTES: usize = if cfg!(test) { 56 } else { 1 << 20 };

/// Receives the bytes of a shard, in one or more calls.
type ByteSink<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// A snapshot of the state that a rank writes to a checkpoint.
pub struct Snapshot {
    shards: Vec<TensorShard>,
    bytes: SnapshotData,
    /// Tensors that are not parameters, with their bytes. They follow the shards.
    buffers: Vec<(TensorShard, Vec<u8>)>,
}

enum SnapshotData {
    /// References to tensors. Operations do not change these tensors in place while the references exist.
    Live(LiveTensors),
    /// Bytes that have already been read.
    Read(Vec<Vec<u8>>),
}

#[derive(Default)]
struct LiveTensors {
    /// The weights, the optimizer state of each kind, and the frozen weights, by bucket.
    kinds: Vec<Vec<Tensor<1>>>,
    /// The source of each shard.
    sources: Vec<ShardSource>,
    /// The range that was read last.
    window: Option<ReadWindow>,
}

/// A range of a bucket.
struct ReadWindow {
    kind: usize,
    bucket: usize,
    elements: Range<usize>,
    bytes: Bytes,
}

/// The source of a shard.
struct ShardSource {
    kind: usize,
    item: WriteItem,
    /// The shape of the rank's local tensor.
    shape: Vec<usize>,
}

impl Snapshot {
    /// Takes a snapshot of the weights and the optimizer state on this rank. On a CPU device the tensors are not copied
    /// immediately: an operation that changes a tensor while the snapshot exists copies the tensor. Collective: call on
    /// all ranks of the data axis.
    pub fn new<M: Module>(
        ddp: &DistributedDataParallel<M>,
        optimizer: &dyn OptimizerState,
    ) -> Result<Self, StateError> {
        ddp.average_running_states();
        let rank = ddp.groups().mesh_rank();
        let mut parts = SnapshotParts {
            rank,
            shards: vec![],
            tensors: LiveTensors::default(),
        };
        let entries = ddp.table().entries();
        let shards = ddp.shards().iter();
        let own = write_items(
            ddp.layout(),
            entries,
            rank,
            BucketShard::ranges(shards.clone()),
        );
        let masters: Vec<_> = ddp.master_dtypes().collect();
        let mut kinds = vec![StateKind::of_all(MODEL, masters.clone())];
        kinds.extend(optimizer.kinds(&masters));
        let mut tensors: Vec<Vec<_>> = vec![vec![]; kinds.len()];
        for (bucket, shard) in shards.enumerate() {
            tensors[0].push(ddp.master_shard(bucket));
            let state = optimizer.tensors(bucket, shard);
            for (kind, tensor) in tensors[1..].iter_mut().zip(state) {
                kind.push(tensor);
            }
        }
        for (kind, tensors) in kinds.iter().zip(tensors) {
            parts.add(entries, &own, kind, tensors)?;
        }
        if let (Some(layout), Some(table)) = (ddp.saved_frozen(), ddp.frozen_table()) {
            let (shards, values): (Vec<_>, Vec<_>) = ddp.frozen_shards().into_iter().unzip();
            let own = write_items(
                layout,
                table.entries(),
                rank,
                BucketShard::ranges(shards.iter()),
            );
            let kind = StateKind::of_all(MODEL, ddp.frozen_dtypes());
            parts.add(table.entries(), &own, &kind, values)?;
        }
        Ok(Self {
            shards: parts.shards,
            bytes: SnapshotData::Live(parts.tensors),
            buffers: buffers::write(ddp)?,
        })
    }

    /// Returns the shards that this rank writes.
    pub fn shards(&self) -> Vec<TensorShard> {
        let buffers = self.buffers.iter().map(|(shard, _)| shard.clone());
        self.shards.iter().cloned().chain(buffers).collect()
    }

    /// Copies the tensors of the snapshot to host memory, unless all tensors are on the CPU device.
    pub fn keep(&mut self) -> Result<(), StateError> {
        let SnapshotData::Live(tensors) = &mut self.bytes else {
            return Ok(());
        };
        // Some tensors may be on the host.
        let mut all = tensors.kinds.iter().flatten();
        if all.all(|tensor| tensor.device() == Device::flex()) {
            return Ok(());
        }
        let shards = self.shards.iter().enumerate();
        let read = shards.map(|(number, shard)| {
            let size = shard.slice.len() * shard.tensor.dtype.size();
            let mut bytes = Vec::with_capacity(size);
            let keep = &mut |some: &[u8]| {
                bytes.extend_from_slice(some);
                Ok(())
            };
            tensors.stream(number, &shard.tensor.key, keep)?;
            Ok(bytes)
        });
        self.bytes = SnapshotData::Read(read.collect::<Result<_, StateError>>()?);
        Ok(())
    }

    /// Passes the bytes of a shard, in row-major order, to `to` in one or more calls. Call it once per shard,
    /// in order.
    ///
    /// # Errors
    ///
    /// [`StateError`] for failed reads, and the errors of `to`.
    pub fn stream(&mut self, number: usize, to: &mut ByteSink) -> Result<(), StateError> {
        if let Some(number) = number.checked_sub(self.shards.len()) {
            return Ok(to(&self.buffers[number].1)?);
        }
        match &mut self.bytes {
            SnapshotData::Live(tensors) => {
                tensors.stream(number, &self.shards[number].tensor.key, to)
            }
            SnapshotData::Read(bytes) => Ok(to(&std::mem::take(&mut bytes[number]))?),
        }
    }
}

/// The state that a rank writes, while it is being collected.
struct SnapshotParts<'a> {
    rank: &'a MeshRank,
    shards: Vec<TensorShard>,
    tensors: LiveTensors,
}

impl SnapshotParts<'_> {
    /// Adds the tensors of a kind, by bucket. `items` are the slices of the parameters that this rank writes.
    fn add(
        &mut self,
        entries: &[ParameterEntry],
        items: &[WriteItem],
        StateKind { prefix, types }: &StateKind,
        buckets: Vec<Tensor<1>>,
    ) -> Result<(), StateError> {
        for item in items.iter().filter(|item| types[item.index].is_some()) {
            let entry = &entries[item.index];
            let key = format!("{prefix}{}", entry.path);
            let dtype = buckets[item.bucket].dtype();
            let Some(dtype) = ElementType::of(dtype) else {
                return Err(StateError::UnsupportedType { key, found: dtype });
            };
            let shape = entry.shape.clone();
            self.shards.push(TensorShard {
                tensor: TensorMeta { key, dtype, shape },
                slice: item.shard.global.clone(),
            });
            self.tensors.sources.push(ShardSource {
                kind: self.tensors.kinds.len(),
                item: item.clone(),
                shape: entry.local_shape(self.rank),
            });
        }
        self.tensors.kinds.push(buckets);
        Ok(())
    }
}

impl LiveTensors {
    fn stream(&mut self, number: usize, key: &str, to: &mut ByteSink) -> Result<(), StateError> {
        let ShardSource { kind, item, shape } = &self.sources[number];
        let tensor = &self.kinds[*kind][item.bucket];
        let size = tensor.dtype().size();
        for run in item.shard.local.runs(shape) {
            let begin = item.source.start + run.in_tensor - item.local_start;
            let (mut at, end) = (begin, begin + run.len);
            while at < end {
                let known = self.window.take();
                let window = match known.filter(|known| known.has(*kind, item.bucket, at)) {
                    Some(window) => window,
                    None => ReadWindow::read(tensor, *kind, item.bucket, at..item.source.end, key)?,
                };
                let next = end.min(window.elements.end);
                let from = at - window.elements.start;
                to(&window.bytes[from * size..(from + next - at) * size])?;
                self.window = Some(window);
                at = next;
            }
        }
        Ok(())
    }
}

impl ReadWindow {
    /// Reads the first of these elements, up to [`READ_BYTES`].
    fn read(
        tensor: &Tensor<1>,
        kind: usize,
        bucket: usize,
        elements: Range<usize>,
        key: &str,
    ) -> Result<Self, StateError> {
        let most = elements.start + READ_BYTES / tensor.dtype().size();
        let elements = elements.start..elements.end.min(most);
        Ok(Self {
            kind,
            bucket,
            bytes: read(tensor.clone().slice([elements.clone()]), key)?,
            elements,
        })
    }

    fn has(&self, kind: usize, bucket: usize, element: usize) -> bool {
        (self.kind, self.bucket) == (kind, bucket) && self.elements.contains(&element)
    }
}

/// Returns the bytes of a tensor.
pub(super) fn read(tensor: Tensor<1>, key: &str) -> Result<Bytes, StateError> {
    let data = tensor
        .try_into_data()
        .map_err(|error| StateError::Unreadable {
            key: key.into(),
            reason: error.to_string(),
        })?;
    Ok(data.into_bytes())
}
