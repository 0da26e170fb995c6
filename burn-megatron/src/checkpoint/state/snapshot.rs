//! The tensors of a rank as they were at one moment, box by box.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Bytes, Device, Tensor};

use super::{FIRST, MODEL, Part, SECOND, StateError, parts};
use crate::checkpoint::{CheckpointError, ElementType, Piece, TensorMeta};
use crate::data_parallel::DistributedDataParallel;
use crate::optim::ParallelAdamW;

/// Bytes of a tensor that are read at once. The allocator keeps so few when they are let go, and what reads
/// them next finds them in a cache. Few in tests, whose tensors are small.
const WINDOW: usize = if cfg!(test) { 56 } else { 1 << 20 };

/// Takes the bytes of a piece, stretch by stretch.
type To<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// What a rank writes, as it was when this was made.
pub(crate) struct Snapshot {
    pieces: Vec<Piece>,
    bytes: Source,
}

enum Source {
    /// Tensors that nobody changes in place as long as they are held here.
    Tensors(Tensors),
    /// What was read already.
    Read(Vec<Vec<u8>>),
}

struct Tensors {
    /// Of weights and moments, by bucket.
    kinds: Vec<Vec<Tensor<1>>>,
    /// By piece.
    sources: Vec<Of>,
    /// What was read last.
    window: Option<Window>,
}

/// Some elements of a bucket.
struct Window {
    kind: usize,
    bucket: usize,
    elements: Range<usize>,
    bytes: Bytes,
}

/// Where a piece comes from.
struct Of {
    kind: usize,
    part: Part,
    /// Of the rank's part of the parameter.
    shape: Vec<usize>,
}

impl Snapshot {
    /// The weights and the moments of this rank. Those of a CPU are not copied: who changes them while
    /// this lives makes the copy.
    pub fn new<M: Module>(
        ddp: &DistributedDataParallel<M>,
        optimizer: &ParallelAdamW,
    ) -> Result<Self, StateError> {
        let (plan, groups) = (ddp.plan(), ddp.groups());
        let (entries, place) = (ddp.table().entries(), groups.place());
        let stretches = |bucket| {
            let elements = plan.elements(bucket);
            (plan.axes.own(elements), plan.axes.counted(elements))
        };
        let first = groups.pipeline().rank() == 0;
        let own = parts(&plan.layout, entries, place, first, stretches);
        let moments: Vec<_> = (0..plan.buckets())
            .map(|bucket| optimizer.moments(bucket, plan))
            .collect();
        let moment = |which: usize| moments.iter().map(|of| of[which].clone()).collect();
        let kinds: Vec<Vec<_>> = vec![
            (0..plan.buckets()).map(|bucket| ddp.kept(bucket)).collect(),
            moment(0),
            moment(1),
        ];
        let (mut pieces, mut sources) = (vec![], vec![]);
        for (kind, prefix) in [MODEL, FIRST, SECOND].into_iter().enumerate() {
            for part in &own {
                let entry = &entries[part.index];
                let key = format!("{prefix}{}", entry.path);
                let dtype = kinds[kind][part.bucket].dtype();
                let Some(dtype) = ElementType::of(dtype) else {
                    return Err(StateError::Unsaved { key, found: dtype });
                };
                let shape = entry.shape.clone();
                pieces.push(Piece {
                    tensor: TensorMeta { key, dtype, shape },
                    slice: part.whole.clone(),
                });
                sources.push(Of {
                    kind,
                    part: part.clone(),
                    shape: entry.local_shape(place),
                });
            }
        }
        let tensors = Tensors {
            kinds,
            sources,
            window: None,
        };
        Ok(Self {
            pieces,
            bytes: Source::Tensors(tensors),
        })
    }

    /// What a part of the checkpoint will hold.
    pub fn pieces(&self) -> Vec<Piece> {
        self.pieces.clone()
    }

    /// Reads what lies on a device that changes its memory in place.
    pub fn keep(&mut self) -> Result<(), StateError> {
        let Source::Tensors(tensors) = &mut self.bytes else {
            return Ok(());
        };
        let device = tensors.kinds[0].first().map(Tensor::device);
        if device.is_none_or(|device| device == Device::flex()) {
            return Ok(());
        }
        let pieces = self.pieces.iter().enumerate();
        let read = pieces.map(|(number, piece)| {
            let size = piece.slice.len() * piece.tensor.dtype.size();
            let mut bytes = Vec::with_capacity(size);
            let keep = &mut |some: &[u8]| {
                bytes.extend_from_slice(some);
                Ok(())
            };
            tensors.stream(number, &piece.tensor.key, keep)?;
            Ok(bytes)
        });
        self.bytes = Source::Read(read.collect::<Result<_, StateError>>()?);
        Ok(())
    }

    /// Gives the bytes of a piece, in row-major order, to `to` stretch by stretch. Each piece is asked for
    /// once, in order.
    ///
    /// # Errors
    ///
    /// What cannot be read, and what `to` fails with.
    pub fn stream(&mut self, number: usize, to: &mut To) -> Result<(), StateError> {
        match &mut self.bytes {
            Source::Tensors(tensors) => tensors.stream(number, &self.pieces[number].tensor.key, to),
            Source::Read(bytes) => Ok(to(&std::mem::take(&mut bytes[number]))?),
        }
    }
}

impl Tensors {
    fn stream(&mut self, number: usize, key: &str, to: &mut To) -> Result<(), StateError> {
        let Of { kind, part, shape } = &self.sources[number];
        let tensor = &self.kinds[*kind][part.bucket];
        let size = tensor.dtype().size();
        for run in part.part.runs(shape) {
            let begin = part.stretch.start + run.in_tensor - part.begins;
            let (mut at, end) = (begin, begin + run.len);
            while at < end {
                let known = self.window.take();
                let window = match known.filter(|known| known.has(*kind, part.bucket, at)) {
                    Some(window) => window,
                    None => Window::read(tensor, *kind, part.bucket, at..part.stretch.end, key)?,
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

impl Window {
    /// As many of these elements of a bucket as are read at once, from the first on.
    fn read(
        tensor: &Tensor<1>,
        kind: usize,
        bucket: usize,
        elements: Range<usize>,
        key: &str,
    ) -> Result<Self, StateError> {
        let most = elements.start + WINDOW / tensor.dtype().size();
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

/// The bytes of a tensor.
pub(super) fn read(tensor: Tensor<1>, key: &str) -> Result<Bytes, StateError> {
    let data = tensor.try_into_data();
    let data = data.map_err(|error| StateError::Unreadable {
        key: key.into(),
        reason: error.to_string(),
    })?;
    Ok(data.into_bytes())
}
