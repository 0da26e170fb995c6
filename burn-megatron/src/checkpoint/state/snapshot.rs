//! The tensors of a rank as they were at one moment, box by box.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Bytes, Device, Tensor};

use super::{FIRST, MODEL, Part, SECOND, StateError, parts};
use crate::checkpoint::{ElementType, Piece, TensorMeta};
use crate::data_parallel::DistributedDataParallel;
use crate::optim::ParallelAdamW;

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
    /// The stretch that was read last.
    last: Option<(usize, usize, Range<usize>, Bytes)>,
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
            last: None,
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
        let read = pieces.map(|(number, piece)| tensors.bytes(number, &piece.tensor.key));
        self.bytes = Source::Read(read.collect::<Result<_, _>>()?);
        Ok(())
    }

    /// The bytes of a piece, in row-major order. Each is asked for once, in order.
    pub fn bytes(&mut self, number: usize) -> Result<Vec<u8>, StateError> {
        match &mut self.bytes {
            Source::Tensors(tensors) => tensors.bytes(number, &self.pieces[number].tensor.key),
            Source::Read(bytes) => Ok(std::mem::take(&mut bytes[number])),
        }
    }
}

impl Tensors {
    fn bytes(&mut self, number: usize, key: &str) -> Result<Vec<u8>, StateError> {
        let Of { kind, part, shape } = &self.sources[number];
        let tensor = &self.kinds[*kind][part.bucket];
        let size = tensor.dtype().size();
        let is_last = |(of, bucket, stretch, _): &(usize, usize, Range<usize>, Bytes)| {
            (*of, *bucket) == (*kind, part.bucket) && *stretch == part.stretch
        };
        let bytes = match self.last.take_if(|last| is_last(last)) {
            Some((.., bytes)) => bytes,
            None => read(tensor.clone().slice([part.stretch.clone()]), key)?,
        };
        let mut found = Vec::with_capacity(part.part.len() * size);
        for run in part.part.runs(shape) {
            let at = (run.in_tensor - part.begins) * size;
            found.extend_from_slice(&bytes[at..at + run.len * size]);
        }
        self.last = Some((*kind, part.bucket, part.stretch.clone(), bytes));
        Ok(found)
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
