//! The assignment of tokens to chunks.

use burn::tensor::{DType, Tensor};

use super::num_splits::num_splits;
use crate::collective::{Comm, invalid};
use crate::mesh::{ParallelConfig, TpCommOverlap};

/// The ranks of the tensor axis, and the method that splits their collectives into chunks.
#[derive(Clone, Debug)]
pub struct TpCommOverlapGroup {
    /// The ranks of the tensor axis.
    pub comm: Comm,
    method: TpCommOverlap,
    num_splits: Option<usize>,
    /// Whether the output of the matmul is the output of a recomputed region, which is not read in the second pass.
    pub(super) ends_region: bool,
}

/// The chunks of a sequence. Each rank holds `part` tokens of the sequence.
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
    /// Creates the group of a layout whose sequences are split over several ranks. Returns `None` if the collectives of
    /// the layout are not split into chunks.
    pub fn of_layout(layout: &ParallelConfig, comm: &Comm) -> Option<Self> {
        let method = layout.tp_comm_overlap.filter(|_| comm.size() > 1)?;
        Some(Self {
            comm: comm.clone(),
            method,
            num_splits: layout.tp_comm_overlap_num_splits,
            ends_region: false,
        })
    }

    /// Returns the group for a matmul whose output is the output of a recomputed region.
    pub(in crate::nn) fn ending_region(self) -> Self {
        Self {
            ends_region: true,
            ..self
        }
    }

    /// Returns the chunks of `batch` sequences. Each rank has `part` tokens of `width` features per sequence.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) before anything is sent, if the tokens cannot be split into the
    /// chunks.
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

    /// Returns the chunks of complete sequences of `seq` tokens.
    pub(super) fn chunks_of_whole(
        &self,
        [batch, seq, width]: [usize; 3],
        dtype: DType,
    ) -> TokenChunks {
        let ranks = self.comm.size();
        if !seq.is_multiple_of(ranks) {
            invalid(format!(
                "{seq} tokens of a sequence cannot be split over the {ranks} ranks of {}: expected a multiple of \
                 {ranks}",
                self.comm.group(),
            ));
        }
        self.chunks([batch, seq / ranks, width], dtype)
    }
}

impl TokenChunks {
    /// Returns the number of tokens per sequence that a chunk has from one rank's part.
    fn tokens(&self) -> usize {
        self.part / self.splits
    }

    /// Returns the order in which the matmuls before a reduce-scatter are computed. In a ring, this rank's chunks are
    /// last.
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

    /// Returns chunk `index` of this rank's part, with one row per token.
    pub fn own_rows(&self, part: &Tensor<3>, index: usize) -> Tensor<2> {
        let (tokens, width) = (self.tokens(), part.dims()[2]);
        let chunk = part.clone().narrow(1, index * tokens, tokens);
        chunk.reshape([self.batch * tokens, width])
    }

    /// Returns the rows of chunk `index` of complete sequences `[batch, seq, width]`. In a ring they are consecutive
    /// tokens of one rank. Otherwise they are an equal part of the tokens of each rank, in rank order.
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

    /// Joins the [rows](Self::rows) of all chunks, given with their indices, to complete sequences
    /// `[batch, seq, width]`.
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

    /// Joins chunks of consecutive tokens, such as the chunks of this rank's part: `[batch, .., width]`.
    pub fn along_sequence(&self, chunks: Vec<Tensor<2>>) -> Tensor<3> {
        let parts = chunks.into_iter().map(|rows| {
            let width = rows.dims()[1];
            rows.reshape([self.batch, self.tokens(), width])
        });
        Tensor::cat(parts.collect(), 1)
    }
}
