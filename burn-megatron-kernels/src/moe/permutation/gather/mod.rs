//! Gather operations on rows, which implement the permutation in both directions.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Int, Tensor};

use super::{RowMap, check_rows};
use crate::apply;
use crate::cpu::for_float;
use crate::error::{accept, check_shape};
use crate::function::{Function, Gradients, Tensors};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

const NAME: &str = "permute";

/// Copies the tokens of `x`, `[tokens, hidden]`, into the row order of `map`. The result is `[rows, hidden]`. Each row
/// is a copy of its token. Empty rows (padding) are zero.
///
/// The backward pass calls [`unpermute`].
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the number of tokens differs from the number of tokens in
/// `map`.
pub fn permute(x: Tensor<2>, map: &RowMap) -> Tensor<2> {
    accept(check_rows(NAME, x.dims()[0], map.tokens));
    let [to_rows, to_tokens] = map.gathers();
    run(x, to_rows, to_tokens)
}

/// Sums the rows of each token. `rows` is `[rows, hidden]` and the result is `[tokens, hidden]`.
///
/// The rows of a token are added in the order of its chosen experts, in f32 (f64 for f64). The result is 0 for a token
/// without rows. Empty rows are not read.
///
/// The backward pass calls [`permute`].
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the number of rows differs from the number of rows in `map`.
pub fn unpermute(rows: Tensor<2>, map: &RowMap) -> Tensor<2> {
    accept(check_rows("unpermute", rows.dims()[0], map.rows));
    let [to_rows, to_tokens] = map.gathers();
    run(rows, to_tokens, to_rows)
}

/// Gathers the router weight of each row. `weights`, `[tokens, k]`, are the weights of the token-expert pairs, and the
/// result is `[rows]`. Empty rows have weight 0. The gradient of the weight of a dropped pair is 0.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the shape of `weights` does not match `map`.
pub fn permute_weights(weights: Tensor<2>, map: &RowMap) -> Tensor<1> {
    let ([tokens, top_k], of_map) = (weights.dims(), [map.tokens, map.top_k]);
    accept(check_shape(
        "permute_weights",
        [tokens, top_k] == of_map,
        || format!("weights [{tokens}, {top_k}] for a map of {of_map:?}: expected equal shapes"),
    ));
    let pairs = map.tokens * map.top_k;
    let to_rows = Gather {
        index: map.row_to_pair.clone().into_dispatch(),
        sizes: GatherSizes {
            rows: map.rows,
            terms: 1,
            divisor: 1,
            width: 1,
        },
        shape: vec![map.rows],
    };
    let to_pairs = Gather {
        index: map.slot_to_row.clone().into_dispatch(),
        sizes: GatherSizes {
            rows: pairs,
            ..to_rows.sizes
        },
        shape: vec![map.tokens, map.top_k],
    };
    let both = GatherFunction {
        forward: to_rows,
        backward: to_pairs,
    };
    apply(vec![weights.into_dispatch()], both)
}

fn run(x: Tensor<2>, mut forward: Gather, mut backward: Gather) -> Tensor<2> {
    let [_, width] = x.dims();
    for gather in [&mut forward, &mut backward] {
        gather.sizes.width = width;
        gather.shape[1] = width;
    }
    apply(
        vec![x.into_dispatch()],
        GatherFunction { forward, backward },
    )
}

impl RowMap {
    /// Returns the gather from tokens to rows, and the gather from rows to tokens. The width is set later.
    fn gathers(&self) -> [Gather; 2] {
        let gather = |index, rows, terms, divisor| Gather {
            index,
            sizes: GatherSizes {
                rows,
                terms,
                divisor,
                width: 0,
            },
            shape: vec![rows, 0],
        };
        let pairs = self.row_to_pair.clone().into_dispatch();
        let slots: Tensor<2, Int> = self.slot_to_row.clone();
        [
            gather(pairs, self.rows, 1, self.top_k),
            gather(slots.into_dispatch(), self.tokens, self.top_k, 1),
        ]
    }
}

/// The sizes of a gather. Row `i` of the result is the sum of the input rows `index[i * terms + j] / divisor`, over all
/// `j` for which the index is not negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GatherSizes {
    rows: usize,
    terms: usize,
    divisor: usize,
    width: usize,
}

/// A gather, and the indices that it reads.
#[derive(Clone, Debug)]
struct Gather {
    /// The indices, `[rows * terms]` in I32.
    index: DispatchTensor,
    sizes: GatherSizes,
    /// The shape of the result.
    shape: Vec<usize>,
}

impl Gather {
    fn of(&self, x: DispatchTensor) -> DispatchTensor {
        let op = SimpleOp {
            name: NAME,
            parameters: (self.sizes, self.shape.clone()),
            outputs: vec![Spec::new(self.shape.clone(), x.dtype())],
            cpu: |(sizes, shape), inputs| {
                let dtype = inputs[0].dtype();
                vec![for_float!(dtype, E => cpu::gather::<E>(*sizes, shape, &inputs))]
            },
            #[cfg(feature = "cubecl")]
            cube: |(sizes, shape), inputs| vec![kernel::gather(*sizes, shape, inputs)],
        };
        launch_one(op, vec![x, self.index.clone()])
    }
}

/// A gather whose backward pass is another gather.
#[derive(Debug)]
struct GatherFunction {
    forward: Gather,
    backward: Gather,
}

impl Function for GatherFunction {
    fn forward(&self, mut inputs: Tensors) -> (DispatchTensor, Tensors) {
        (self.forward.of(inputs.remove(0)), vec![])
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        vec![Some(self.backward.of(gradient))]
    }
}
