//! The part of the tokens that a tensor rank routes if all tensor ranks have the same tokens.

use burn::tensor::{Int, Tensor};

use crate::collective::{Comm, gather, split};
use crate::nn::SEQUENCE_DIM;
use crate::nn::forward_context::is_training;

/// The part of each sequence that this rank routes. Ranks split each sequence, so that losses cover complete sequences.
/// Outside autodiff, for example in generation, a sequence may have any length. The ranks then split the concatenated
/// tokens, and the last part is padded with zero rows.
pub(super) struct TokenPart<'a> {
    shape: [usize; 3],
    /// The padded number of tokens, if the tokens of all ranks form one sequence.
    flattened: Option<usize>,
    comm: &'a Comm,
}

impl<'a> TokenPart<'a> {
    pub fn of(x: &Tensor<3>, comm: &'a Comm) -> Self {
        let shape = x.dims();
        let [batch, seq, _] = shape;
        let is_even = is_training(x) || seq.is_multiple_of(comm.size());
        let flattened = (!is_even).then(|| (batch * seq).next_multiple_of(comm.size()));
        Self {
            shape,
            flattened,
            comm,
        }
    }

    /// Returns this rank's part of `[batch, seq, hidden]`.
    pub fn tokens(&self, x: Tensor<3>) -> Tensor<3> {
        split(self.sequences(x), SEQUENCE_DIM, self.comm)
    }

    /// Returns this rank's part of the choices `[batch * seq, k]`.
    pub fn choices(&self, choices: Tensor<2, Int>) -> Tensor<2, Int> {
        let [_, k] = choices.dims();
        let [batch, seq, _] = self.shape;
        let choices = choices.reshape([batch, seq, k]).float();
        let own: Tensor<3> = self.tokens(choices);
        let [batch, seq, _] = own.dims();
        own.int().reshape([batch * seq, k])
    }

    /// Gathers the parts of all ranks: `[batch, seq, hidden]`.
    pub fn gather(&self, y: Tensor<3>) -> Tensor<3> {
        let y = gather(y, SEQUENCE_DIM, self.comm);
        match self.flattened {
            None => y,
            Some(_) => {
                let [batch, seq, _] = self.shape;
                y.narrow(SEQUENCE_DIM, 0, batch * seq).reshape(self.shape)
            }
        }
    }

    fn sequences(&self, x: Tensor<3>) -> Tensor<3> {
        let Some(tokens) = self.flattened else {
            return x;
        };
        let [batch, seq, features] = x.dims();
        let more = tokens - batch * seq;
        let zeros = Tensor::zeros([1, more, features], (&x.device(), x.dtype()));
        let x = x.reshape([1, batch * seq, features]);
        if more == 0 {
            return x;
        }
        Tensor::cat(vec![x, zeros], SEQUENCE_DIM)
    }
}
