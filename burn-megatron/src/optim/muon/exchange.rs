//! Exchanges the matrices of Muon between ranks. Each matrix is gathered on one rank. This rank changes the matrix, and
//! returns each part to the rank that updates the part.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use crate::collective::{Comm, all_to_all};
use crate::comm::{CommError, all_gather_bytes};
use crate::data_parallel::layout::write_items;
use crate::data_parallel::{BucketShard, DistributedDataParallel};
use crate::nn::{LocalShard, ParameterEntry, TensorSlice, local_shards};

/// A matrix: a parameter or a part of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// The index of the parameter.
    pub index: usize,
    /// The slice of the parameter that contains the matrix. If the parameter has three dimensions, the slice has one
    /// element along the first dimension.
    pub slice: TensorSlice,
}

impl Matrix {
    /// Returns the matrices of a parameter of two or three dimensions. Each section of a fused weight is a separate
    /// matrix. If the parameter has three dimensions, each index of the first dimension is also a separate matrix.
    pub fn all_of(index: usize, entry: &ParameterEntry) -> Vec<Self> {
        let dims = entry.shape.len();
        let mut cuts: Vec<Vec<Range<usize>>> = entry
            .shape
            .iter()
            .map(|n| std::iter::once(0..*n).collect())
            .collect();
        if let (3, [stack, ..]) = (dims, &mut cuts[..]) {
            *stack = (0..entry.shape[0]).map(|at| at..at + 1).collect();
        }
        for (_, dim, sections) in entry.placements.splits() {
            if dim + 2 < dims {
                continue;
            }
            let mut end = 0;
            let cut = sections.iter().map(|section| {
                end += section.size;
                end - section.size..end.min(entry.shape[dim])
            });
            cuts[dim] = cut.filter(|range| !range.is_empty()).collect();
        }
        let mut slices = vec![TensorSlice {
            offset: vec![],
            shape: vec![],
        }];
        for cuts in cuts {
            let with = |slice: &TensorSlice, cut: &Range<usize>| {
                let mut slice = slice.clone();
                slice.offset.push(cut.start);
                slice.shape.push(cut.len());
                slice
            };
            let product = slices
                .iter()
                .flat_map(|slice| cuts.iter().map(move |cut| with(slice, cut)));
            slices = product.collect();
        }
        let matrix = |slice| Self { index, slice };
        slices.into_iter().map(matrix).collect()
    }

    /// Returns the number of rows and columns.
    fn shape(&self) -> [usize; 2] {
        match self.slice.shape[..] {
            [.., rows, columns] => [rows, columns],
            _ => unreachable!("a matrix has two dims"),
        }
    }

    /// Returns the number of multiplications of an orthogonalization, up to a constant factor.
    fn cost(&self) -> u128 {
        let [rows, columns] = self.shape().map(|n| n as u128);
        rows * columns * rows.min(columns)
    }
}

/// Returns the rank that changes each matrix. The most expensive matrices are assigned first, each to the rank
/// with the least work.
pub(super) fn owners(matrices: &[Matrix], ranks: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..matrices.len()).collect();
    order.sort_by_key(|number| std::cmp::Reverse(matrices[*number].cost()));
    let (mut load, mut owners) = (vec![0u128; ranks], vec![0; matrices.len()]);
    for number in order {
        let owner = (0..ranks).min_by_key(|rank| load[*rank]).unwrap_or(0);
        load[owner] += matrices[number].cost();
        owners[number] = owner;
    }
    owners
}

/// Slices on a rank, keyed by parameter index.
type Pieces = BTreeMap<usize, Vec<LocalShard>>;

/// The positions of pieces in their parameters, as exchanged between ranks.
type Places = Vec<(usize, TensorSlice)>;

/// A rectangle of one of several tensors `[rows, columns]`.
#[derive(Clone, Debug)]
struct Block {
    /// The index of the tensor.
    of: usize,
    place: [Range<usize>; 2],
}

impl Block {
    /// Returns the last two dims of a slice of tensors `[.., rows, columns]`, whose rows are stacked.
    fn new(of: usize, slice: &TensorSlice, rows: usize) -> Self {
        let (offset, shape) = (&slice.offset, &slice.shape);
        let last = shape.len() - 2;
        let above = offset[..last].iter().sum::<usize>() * rows;
        let row = above + offset[last];
        let column = offset[last + 1];
        Self {
            of,
            place: [row..row + shape[last], column..column + shape[last + 1]],
        }
    }

    fn shape(&self) -> [usize; 2] {
        self.place.clone().map(|range| range.len())
    }

    fn len(&self) -> usize {
        self.shape().iter().product()
    }
}

/// A contiguous range of this rank's elements of a parameter's local part `[.., columns]`, in the exchanged
/// tensor.
struct Part {
    start: usize,
    length: usize,
    /// The index of the first element in the local part.
    first: usize,
    /// The number of rows of each matrix and the number of columns of the local part.
    shape: [usize; 2],
}

impl Part {
    /// Returns the rows of the local part that contain the elements.
    fn rows(&self) -> Range<usize> {
        let [_, columns] = self.shape;
        self.first / columns..(self.first + self.length).div_ceil(columns)
    }

    /// Returns the number of elements before this rank's elements in the first row, and behind them in the last
    /// row.
    fn around(&self) -> [usize; 2] {
        let ([_, columns], rows) = (self.shape, self.rows());
        let before = self.first - rows.start * columns;
        [before, rows.len() * columns - before - self.length]
    }

    /// Returns the rows, `[elements]` to `[rows, columns]`, with zeros for the elements of other ranks.
    fn read(&self, x: &Tensor<1>) -> Tensor<2> {
        let own = x.clone().narrow(0, self.start, self.length);
        let [before, after] = self.around();
        let zeros = |length: usize| Tensor::zeros([length], (&x.device(), x.dtype()));
        let whole = match before + after {
            0 => own,
            _ => Tensor::cat(vec![zeros(before), own, zeros(after)], 0),
        };
        whole.reshape([self.rows().len(), self.shape[1]])
    }

    /// Returns rows of zeros.
    fn zeros(&self, device: &Device, dtype: DType) -> Tensor<2> {
        Tensor::zeros([self.rows().len(), self.shape[1]], (device, dtype))
    }

    /// Returns this rank's elements of the rows.
    fn elements(&self, rows: Tensor<2>) -> Tensor<1> {
        let [before, _] = self.around();
        let all = rows.reshape([self.rows().len() * self.shape[1]]);
        all.narrow(0, before, self.length)
    }
}

/// The exchange of the selected matrices of a stage.
pub(super) struct MatrixExchange {
    comm: Comm,
    device: Device,
    /// The parts, in the order of the exchanged tensor.
    parts: Vec<Part>,
    /// The numbers of rows and columns of the matrices of this rank.
    own: Vec<[usize; 2]>,
    /// The route from the parts to the matrices of the owners.
    out: Route,
    /// The route from the matrices to the parts.
    back: Route,
}

/// One all-to-all: the blocks that are sent to each rank, and the blocks that are received from each rank.
struct Route {
    send: Vec<Vec<Block>>,
    receive: Vec<Vec<Block>>,
}

impl MatrixExchange {
    /// Builds the exchange of the `chosen` parameters. Collective: call on all ranks of the stage.
    pub fn new<M: Module>(
        chosen: &[bool],
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, CommError> {
        let entries = ddp.table().entries();
        let comm = ddp.groups().stage().clone();
        let (rank, ranks) = (comm.rank(), comm.size());
        let parameters = entries
            .iter()
            .enumerate()
            .filter(|(index, _)| chosen[*index]);
        let matrices = parameters.flat_map(|(index, entry)| Matrix::all_of(index, entry));
        let matrices: Vec<_> = matrices.collect();
        let owners = owners(&matrices, ranks);
        let of = |owner: usize| {
            let all = matrices.iter().zip(&owners);
            all.filter(move |(_, of)| **of == owner)
                .map(|(matrix, _)| matrix)
        };
        let (parts, numbers) = parts(chosen, ddp);
        let (sent, stepped) = (sent(chosen, ddp), stepped(chosen, ddp));
        let all_sent = gather(&sent, &comm)?;
        let all_stepped = gather(&stepped, &comm)?;

        // The blocks of this rank's matrices that another rank sends or steps.
        let with = |places: &Places| -> Vec<Block> {
            let blocks = of(rank).enumerate().flat_map(|(number, matrix)| {
                let here = places.iter().filter(|(index, _)| *index == matrix.index);
                here.filter_map(move |(_, place)| {
                    let both = place.intersection(&matrix.slice)?;
                    let [rows, _] = matrix.shape();
                    Some(Block::new(number, &both.within(&matrix.slice), rows))
                })
            });
            blocks.collect()
        };
        // The blocks of this rank's parts that belong to the matrices of an owner.
        let at = |pieces: &Pieces, owner: usize| -> Vec<Block> {
            let blocks = of(owner).flat_map(|matrix| {
                let here = pieces.get(&matrix.index).into_iter().flatten();
                let number = numbers.get(&matrix.index).copied();
                here.filter_map(move |piece| Some((number?, intersection(piece, &matrix.slice)?)))
            });
            let block = |(number, slice): (usize, TensorSlice)| {
                let part: &Part = &parts[number];
                let mut block = Block::new(number, &slice, part.shape[0]);
                let first = part.rows().start;
                let [rows, _] = &mut block.place;
                *rows = rows.start - first..rows.end - first;
                block
            };
            blocks.map(block).collect()
        };
        let out = Route {
            send: (0..ranks).map(|owner| at(&sent, owner)).collect(),
            receive: all_sent.iter().map(with).collect(),
        };
        let back = Route {
            send: all_stepped.iter().map(with).collect(),
            receive: (0..ranks).map(|owner| at(&stepped, owner)).collect(),
        };
        let own = of(rank).map(Matrix::shape).collect();
        Ok(Self {
            device: ddp.device().clone(),
            own,
            out,
            back,
            parts,
            comm,
        })
    }

    /// Applies `change` to each complete matrix, and returns this rank's elements of the results. `x`, `[elements]`,
    /// contains this rank's elements of the chosen parameters, in the order of the buckets. Collective: call on all
    /// ranks of the stage.
    pub fn apply(&self, x: Tensor<1>, change: impl Fn(Tensor<2>) -> Tensor<2>) -> Tensor<1> {
        let dtype = x.dtype();
        let parts = self.parts.iter().map(|part| part.read(&x)).collect();
        let matrices = self.own.iter();
        let matrices = matrices.map(|shape| Tensor::zeros(*shape, (&self.device, dtype)));
        let empty = Tensor::empty([0], (&self.device, dtype));
        let whole = self.out.send(parts, matrices.collect(), &empty, &self.comm);
        let changed = whole.into_iter().map(change).collect();
        let parts = self.parts.iter();
        let zeros = parts.clone().map(|part| part.zeros(&self.device, dtype));
        let rows = self.back.send(changed, zeros.collect(), &empty, &self.comm);
        let mut elements: Vec<_> = parts
            .zip(rows)
            .map(|(part, rows)| part.elements(rows))
            .collect();
        match elements.len() {
            0 => empty,
            1 => elements.remove(0),
            _ => Tensor::cat(elements, 0),
        }
    }
}

impl Route {
    /// Writes blocks of the `from` tensors of all ranks into `to`.
    fn send(
        &self,
        from: Vec<Tensor<2>>,
        to: Vec<Tensor<2>>,
        empty: &Tensor<1>,
        comm: &Comm,
    ) -> Vec<Tensor<2>> {
        let lengths = |of: &[Vec<Block>]| -> Vec<usize> {
            let length = |blocks: &Vec<Block>| blocks.iter().map(Block::len).sum();
            of.iter().map(length).collect()
        };
        let read = |block: &Block| {
            let values = from[block.of].clone().slice(block.place.clone());
            values.reshape([block.len()])
        };
        let mut all: Vec<Tensor<1>> = self.send.iter().flatten().map(read).collect();
        drop(from);
        let x = match all.len() {
            0 => empty.clone(),
            1 => all.remove(0),
            _ => Tensor::cat(all, 0),
        };
        let x = match comm.size() {
            1 => x,
            _ => all_to_all(x, lengths(&self.send), lengths(&self.receive), comm),
        };
        // Taken out, so that a tensor has no other reference when it is written.
        let mut to: Vec<_> = to.into_iter().map(Some).collect();
        let mut start = 0;
        for block in self.receive.iter().flatten() {
            let values = x.clone().narrow(0, start, block.len());
            start += block.len();
            let values = values.reshape(block.shape());
            let tensor = to[block.of].take();
            to[block.of] = tensor.map(|tensor| tensor.slice_assign(block.place.clone(), values));
        }
        to.into_iter().flatten().collect()
    }
}

/// Returns the intersection of a piece and a matrix, as a slice of the rank's part of the parameter.
fn intersection(piece: &LocalShard, matrix: &TensorSlice) -> Option<TensorSlice> {
    let both = piece.global.intersection(matrix)?;
    let mut local = piece.local.clone();
    for (dim, offset) in local.offset.iter_mut().enumerate() {
        *offset += both.offset[dim] - piece.global.offset[dim];
    }
    local.shape = both.shape;
    Some(local)
}

/// Returns this rank's elements of the chosen parameters in the order of its shards, and the part number of
/// each parameter.
fn parts<M: Module>(
    chosen: &[bool],
    ddp: &DistributedDataParallel<M>,
) -> (Vec<Part>, BTreeMap<usize, usize>) {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let slices = ddp.shards().iter().flat_map(|shard| &shard.slices);
    let (mut parts, mut numbers, mut start) = (vec![], BTreeMap::new(), 0);
    for slice in slices.filter(|slice| chosen[slice.index]) {
        let [.., rows, columns] = entries[slice.index].local_shape(rank)[..] else {
            unreachable!("a matrix has two dims")
        };
        let length = slice.local_range.len();
        if length == 0 {
            continue;
        }
        numbers.insert(slice.index, parts.len());
        parts.push(Part {
            start,
            length,
            first: slice.parameter_range.start,
            shape: [rows, columns],
        });
        start += length;
    }
    (parts, numbers)
}

/// Returns the pieces that this rank sends to the owners, so that each element is sent once.
fn sent<M: Module>(chosen: &[bool], ddp: &DistributedDataParallel<M>) -> Pieces {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let ranges = BucketShard::ranges(ddp.shards().iter());
    let mut pieces = Pieces::new();
    for item in write_items(ddp.layout(), entries, rank, ranges) {
        if chosen[item.index] {
            pieces.entry(item.index).or_default().push(item.shard);
        }
    }
    pieces
}

/// Returns the pieces that this rank steps.
fn stepped<M: Module>(chosen: &[bool], ddp: &DistributedDataParallel<M>) -> Pieces {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let mut pieces = Pieces::new();
    for slice in ddp.shards().iter().flat_map(|shard| &shard.slices) {
        if chosen[slice.index] {
            let shards = local_shards(&entries[slice.index], rank, slice.parameter_range.clone());
            pieces.entry(slice.index).or_default().extend(shards);
        }
    }
    pieces
}

/// Gathers the positions of the pieces of all ranks.
fn gather(pieces: &Pieces, comm: &Comm) -> Result<Vec<Places>, CommError> {
    let places = |(index, pieces): (&usize, &Vec<LocalShard>)| -> Places {
        let places = pieces.iter().map(|piece| (*index, piece.global.clone()));
        places.collect()
    };
    let own: Places = pieces.iter().flat_map(places).collect();
    let own = serde_json::to_vec(&own);
    let own = own.unwrap_or_else(|error| unreachable!("places are JSON: {error}"));
    let all = all_gather_bytes(&**comm, &own)?;
    let read = |bytes: &Vec<u8>| {
        serde_json::from_slice(bytes)
            .unwrap_or_else(|error| unreachable!("places are JSON: {error}"))
    };
    Ok(all.iter().map(read).collect())
}
