//! Which tokens a chunk has.

use burn::tensor::{DType, Tensor};

use super::num_splits::num_splits;
use crate::collective::{Comm, invalid};
use crate::mesh::{ParallelConfig, TpCommOverlap};

/// The ranks of the tensor axis, and how their exchanges are split into chunks.
#[derive(Clone, Debug)]
pub struct TpCommOverlapGroup {
    /// The ranks.
    pub comm: Comm,
    method: TpCommOverlap,
    num_splits: Option<usize>,
    /// Whether the output of the product is that of a recomputed region, which nobody reads in the second pass.
    pub(super) ends_region: bool,
}

/// The chunks of a sequence of which each rank has `part` tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenChunks {
    pub method: TpCommOverlap,
    rank: usize,
    ranks: usize,
    batch: usize,
    part: usize,
    /// The number of chunks of each rank's part.
    pub splits: usize,
}

impl TpCommOverlapGroup {
    /// The group of a layout, whose sequences are split over several ranks; `None` if its exchanges are not split into
    /// chunks.
    pub fn of_layout(layout: &ParallelConfig, comm: &Comm) -> Option<Self> {
        let method = layout.tp_comm_overlap.filter(|_| comm.size() > 1)?;
        Some(Self {
            comm: comm.clone(),
            method,
            num_splits: layout.tp_comm_overlap_num_splits,
            ends_region: false,
        })
    }

    /// The same for a product whose output is that of a recomputed region.
    pub(in crate::nn) fn ending_region(self) -> Self {
        Self {
            ends_region: true,
            ..self
        }
    }

    /// The chunks of `batch` sequences, of which each rank has `part` tokens of `width` features.
    ///
    /// Unwinds with [`raise`](crate::comm::raise), with nothing sent, if the tokens cannot be split into so many chunks.
    pub(super) fn chunks(&self, [batch, part, width]: [usize; 3], dtype: DType) -> TokenChunks {
        let ranks = self.comm.size();
        let sent = (ranks - 1) * batch * part * width * dtype.size();
        let splits = num_splits(self.method, self.num_splits, ranks, part, sent as f64);
        let splits =
            splits.unwrap_or_else(|error| invalid(format!("{}: {error}", self.comm.group())));
        TokenChunks {
            method: self.method,
            rank: self.comm.rank(),
            ranks,
            batch,
            part,
            splits,
        }
    }

    /// The same of whole sequences of `seq` tokens.
    pub(super) fn chunks_of_whole(
        &self,
        [batch, seq, width]: [usize; 3],
        dtype: DType,
    ) -> TokenChunks {
        let ranks = self.comm.size();
        if !seq.is_multiple_of(ranks) {
            invalid(format!(
                "{seq} tokens of a sequence cannot be split over the {ranks} ranks of {}; a multiple of {ranks} can",
                self.comm.group(),
            ));
        }
        self.chunks([batch, seq / ranks, width], dtype)
    }
}

impl TokenChunks {
    /// The tokens of a sequence that a chunk has of one rank's part.
    fn tokens(&self) -> usize {
        self.part / self.splits
    }

    /// The order in which products before a reduce-scatter are computed: of a ring, the chunks of this rank are the last.
    pub fn reduce_order(self) -> Vec<usize> {
        match self.method {
            TpCommOverlap::Ring => {
                let owners =
                    (1..=self.ranks).map(|step| (self.rank + self.ranks - step) % self.ranks);
                let owners: Vec<_> = owners.collect();
                let of = |owner: &usize| owner * self.splits..(owner + 1) * self.splits;
                owners.iter().flat_map(of).collect()
            }
            TpCommOverlap::Bulk => (0..self.splits).collect(),
        }
    }

    /// Chunk `index` of the part of this rank, as rows.
    pub fn own_rows(&self, part: &Tensor<3>, index: usize) -> Tensor<2> {
        let (tokens, width) = (self.tokens(), part.dims()[2]);
        let chunk = part.clone().narrow(1, index * tokens, tokens);
        chunk.reshape([self.batch * tokens, width])
    }

    /// The rows of chunk `index` of whole sequences `[batch, seq, width]`: of a ring, consecutive tokens of one rank;
    /// otherwise an equal part of the tokens of each rank, in the order of the ranks.
    pub fn rows(&self, whole: &Tensor<3>, index: usize) -> Tensor<2> {
        let (whole, width, tokens) = (whole.clone(), whole.dims()[2], self.tokens());
        match self.method {
            TpCommOverlap::Ring => {
                let chunk = whole.narrow(1, index * tokens, tokens);
                chunk.reshape([self.batch * tokens, width])
            }
            TpCommOverlap::Bulk => {
                let by_rank = whole.reshape([self.batch, self.ranks, self.part, width]);
                let chunk = by_rank.narrow(2, index * tokens, tokens).swap_dims(0, 1);
                chunk.reshape([self.ranks * self.batch * tokens, width])
            }
        }
    }

    /// Whole sequences from the [rows](Self::rows) of all chunks, given with their indices: `[batch, seq, width]`.
    pub fn join(&self, mut chunks: Vec<(usize, Tensor<2>)>) -> Tensor<3> {
        chunks.sort_by_key(|(index, _)| *index);
        let chunks = chunks.into_iter().map(|(_, rows)| rows);
        let (batch, ranks, tokens) = (self.batch, self.ranks, self.tokens());
        match self.method {
            TpCommOverlap::Ring => self.along_sequence(chunks.collect()),
            TpCommOverlap::Bulk => {
                let by_rank = chunks.map(|rows| {
                    let width = rows.dims()[1];
                    rows.reshape([ranks, batch, tokens, width])
                });
                let by_rank: Tensor<4> = Tensor::cat(by_rank.collect(), 2);
                let width = by_rank.dims()[3];
                let by_sample = by_rank.swap_dims(0, 1);
                by_sample.reshape([batch, ranks * self.part, width])
            }
        }
    }

    /// Chunks of consecutive tokens one after the other, such as those of this rank's part: `[batch, .., width]`.
    pub fn along_sequence(&self, chunks: Vec<Tensor<2>>) -> Tensor<3> {
        let parts = chunks.into_iter().map(|rows| {
            let width = rows.dims()[1];
            rows.reshape([self.batch, self.tokens(), width])
        });
        Tensor::cat(parts.collect(), 1)
    }
}
