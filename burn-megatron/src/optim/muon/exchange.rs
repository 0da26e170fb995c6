//! Whole matrices on one rank each: parts of them go there, are changed, and come back to all ranks that step them.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::checkpoint::state::write_items;
use crate::checkpoint::{TensorSlice, local_shards};
use crate::collective::{Comm, all_to_all};
use crate::comm::{CommError, all_gather_bytes};
use crate::data_parallel::{BucketShard, DistributedDataParallel};
use crate::nn::ParameterEntry;

/// A matrix: a parameter, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// The index of the parameter.
    pub index: usize,
    /// Its place in the parameter; of three dims, the first has one element.
    pub slice: TensorSlice,
}

impl Matrix {
    /// The matrices of a parameter of two or three dims: one for each section of a fused weight, and each index of the
    /// first of three dims.
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

    /// Rows and columns.
    fn shape(&self) -> [usize; 2] {
        match self.slice.shape[..] {
            [.., rows, columns] => [rows, columns],
            _ => unreachable!("a matrix has two dims"),
        }
    }

    /// Multiplications of an orthogonalization, up to a factor.
    fn cost(&self) -> u128 {
        let [rows, columns] = self.shape().map(|n| n as u128);
        rows * columns * rows.min(columns)
    }
}

/// The rank that changes each matrix: the costliest first, to the rank that has the least to do.
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

/// A slice of a parameter on a rank.
#[derive(Clone)]
struct Piece {
    global: TensorSlice,
    /// Its place in the rank's part of the parameter.
    local: TensorSlice,
}

/// The pieces of a rank, by parameter.
type Pieces = BTreeMap<usize, Vec<Piece>>;

/// The places of pieces in their parameters, as the ranks tell each other.
type Places = Vec<(usize, TensorSlice)>;

/// Where this rank's elements of a parameter are in the tensor that is exchanged.
struct Source {
    start: usize,
    /// The first of them, in the rank's part of the parameter.
    first: usize,
    /// The shape of that part.
    shape: Vec<usize>,
}

/// The exchange of the chosen matrices of a stage.
pub(super) struct MatrixExchange {
    comm: Comm,
    /// Rows and columns of the matrices of this rank.
    own: Vec<[usize; 2]>,
    /// To the owners.
    out: Route,
    /// From them.
    back: Route,
}

/// One all-to-all, with the order of elements before and after it.
struct Route {
    before: Option<Tensor<1, Int>>,
    send: Vec<usize>,
    receive: Vec<usize>,
    after: Option<Tensor<1, Int>>,
}

impl MatrixExchange {
    /// The exchange of the parameters that are `chosen`. Collective: call on all ranks of the stage.
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
        let sources = sources(chosen, ddp);
        let (sent, stepped) = (sent(chosen, ddp), stepped(chosen, ddp));
        let all_sent = gather(&sent, &comm)?;
        let all_stepped = gather(&stepped, &comm)?;

        let mut starts = vec![];
        let mut total = 0;
        for matrix in of(rank) {
            starts.push(total);
            total += matrix.slice.len();
        }
        // The elements of the matrices of this rank that another one sends or steps.
        let with = |places: &Places| -> Vec<usize> {
            let pairs = of(rank)
                .zip(starts.iter().copied())
                .flat_map(|(matrix, start)| {
                    let here = places.iter().filter(|(index, _)| *index == matrix.index);
                    here.filter_map(move |(_, place)| place.intersection(&matrix.slice))
                        .flat_map(move |both| {
                            elements(&both.within(&matrix.slice), &matrix.slice.shape)
                                .map(move |at| start + at)
                        })
                });
            pairs.collect()
        };
        // The elements of this rank that belong to the matrices of an owner.
        let at = |pieces: &Pieces, owner: usize| -> Vec<usize> {
            let found = of(owner).flat_map(|matrix| {
                let here = pieces.get(&matrix.index).into_iter().flatten();
                here.flat_map(|piece| sources[&matrix.index].elements(piece, &matrix.slice))
            });
            found.collect()
        };
        let to_owners: Vec<_> = (0..ranks).map(|owner| at(&sent, owner)).collect();
        let from_all: Vec<_> = all_sent.iter().map(with).collect();
        let to_all: Vec<_> = all_stepped.iter().map(with).collect();
        let from_owners: Vec<_> = (0..ranks).map(|owner| at(&stepped, owner)).collect();
        let device = ddp.device();
        Ok(Self {
            own: of(rank).map(Matrix::shape).collect(),
            out: Route::new(&to_owners, &from_all, device),
            back: Route::new(&to_all, &from_owners, device),
            comm,
        })
    }

    /// Replaces each matrix by what `change` makes of the whole of it. `x`, `[elements]`, has this rank's elements of
    /// the chosen parameters, in the order of the buckets. Collective: call on all ranks of the stage.
    pub fn apply(&self, x: Tensor<1>, mut change: impl FnMut(Tensor<2>) -> Tensor<2>) -> Tensor<1> {
        let whole = self.out.send(x, &self.comm);
        let mut start = 0;
        let mut changed = vec![];
        for [rows, columns] in &self.own {
            let elements = rows * columns;
            let matrix = whole.clone().narrow(0, start, elements);
            let matrix = matrix.reshape([*rows, *columns]);
            changed.push(change(matrix).reshape([elements]));
            start += elements;
        }
        let changed = if changed.is_empty() {
            whole
        } else {
            Tensor::cat(changed, 0)
        };
        self.back.send(changed, &self.comm)
    }
}

impl Route {
    /// `send` has, for each rank, the elements that go there, `receive` the places of those that come from it.
    fn new(send: &[Vec<usize>], receive: &[Vec<usize>], device: &Device) -> Self {
        let lengths = |of: &[Vec<usize>]| of.iter().map(Vec::len).collect();
        let places = receive.concat();
        let mut after = vec![usize::MAX; places.len()];
        for (number, place) in places.into_iter().enumerate() {
            after[place] = number;
        }
        debug_assert!(!after.contains(&usize::MAX), "each place is received once");
        Self {
            before: indices(send.concat(), device),
            send: lengths(send),
            receive: lengths(receive),
            after: indices(after, device),
        }
    }

    fn send(&self, x: Tensor<1>, comm: &Comm) -> Tensor<1> {
        let select = |x: Tensor<1>, order: &Option<Tensor<1, Int>>| match order {
            Some(order) => x.select(0, order.clone()),
            None => Tensor::empty([0], (&x.device(), x.dtype())),
        };
        let x = select(x, &self.before);
        let x = match comm.size() {
            1 => x,
            _ => all_to_all(x, self.send.clone(), self.receive.clone(), comm),
        };
        select(x, &self.after)
    }
}

/// `None` if there are none.
fn indices(values: Vec<usize>, device: &Device) -> Option<Tensor<1, Int>> {
    let values: Vec<i64> = values.into_iter().map(|value| value as i64).collect();
    let length = values.len();
    (length > 0).then(|| Tensor::from_data(TensorData::new(values, [length]), device))
}

/// The flat indices of the elements of a slice in its tensor, in row-major order.
fn elements(slice: &TensorSlice, shape: &[usize]) -> impl Iterator<Item = usize> + use<> {
    let runs = slice.runs(shape).into_iter();
    runs.flat_map(|run| run.in_tensor..run.in_tensor + run.len)
}

impl Source {
    /// The elements of the exchanged tensor that are in a piece and in a matrix.
    fn elements(&self, piece: &Piece, matrix: &TensorSlice) -> Vec<usize> {
        let Some(both) = piece.global.intersection(matrix) else {
            return vec![];
        };
        let mut local = piece.local.clone();
        for (dim, offset) in local.offset.iter_mut().enumerate() {
            *offset += both.offset[dim] - piece.global.offset[dim];
        }
        local.shape = both.shape;
        let at = |element: usize| self.start + element - self.first;
        elements(&local, &self.shape).map(at).collect()
    }
}

/// Where the chosen parameters of this rank's shards are in the exchanged tensor.
fn sources<M: Module>(
    chosen: &[bool],
    ddp: &DistributedDataParallel<M>,
) -> BTreeMap<usize, Source> {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let slices = ddp.shards().iter().flat_map(|shard| &shard.slices);
    let mut start = 0;
    let source = |slice: &crate::data_parallel::layout::ParameterSlice| {
        start += slice.local_range.len();
        let source = Source {
            start: start - slice.local_range.len(),
            first: slice.parameter_range.start,
            shape: entries[slice.index].local_shape(rank),
        };
        (slice.index, source)
    };
    slices
        .filter(|slice| chosen[slice.index])
        .map(source)
        .collect()
}

/// What this rank sends to the owners, so that each element is sent once.
fn sent<M: Module>(chosen: &[bool], ddp: &DistributedDataParallel<M>) -> Pieces {
    let (shards, rank) = (ddp.shards(), ddp.groups().mesh_rank());
    let ranges = |bucket: usize| {
        let BucketShard {
            range, partition, ..
        } = &shards[bucket];
        (range.clone(), partition.clone())
    };
    let mut pieces = Pieces::new();
    for item in write_items(ddp.layout(), ddp.table().entries(), rank, ranges) {
        if chosen[item.index] {
            let (global, local) = (item.global, item.local);
            pieces
                .entry(item.index)
                .or_default()
                .push(Piece { global, local });
        }
    }
    pieces
}

/// What this rank steps.
fn stepped<M: Module>(chosen: &[bool], ddp: &DistributedDataParallel<M>) -> Pieces {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let mut pieces = Pieces::new();
    for slice in ddp.shards().iter().flat_map(|shard| &shard.slices) {
        if chosen[slice.index] {
            let shards = local_shards(&entries[slice.index], rank, slice.parameter_range.clone());
            let shards = shards.into_iter().map(|shard| Piece {
                global: shard.global,
                local: shard.local,
            });
            pieces.entry(slice.index).or_default().extend(shards);
        }
    }
    pieces
}

/// The places of the pieces of all ranks.
fn gather(pieces: &Pieces, comm: &Comm) -> Result<Vec<Places>, CommError> {
    let places = |(index, pieces): (&usize, &Vec<Piece>)| -> Places {
        pieces
            .iter()
            .map(|piece| (*index, piece.global.clone()))
            .collect()
    };
    let own: Places = pieces.iter().flat_map(places).collect();
    let text = |own: &Places| serde_json::to_vec(own);
    let own = text(&own).unwrap_or_else(|error| unreachable!("places are JSON: {error}"));
    let all = all_gather_bytes(&**comm, &own)?;
    let read = |bytes: &Vec<u8>| {
        serde_json::from_slice(bytes)
            .unwrap_or_else(|error| unreachable!("places are JSON: {error}"))
    };
    Ok(all.iter().map(read).collect())
}
