//! The checked description of one attention.

use burn::tensor::{DType, Tensor};

use super::options::{AttentionOptions, Heads, MAX_POSITIONS};
use crate::KernelError;

/// The widest head that the kernels hold on chip.
pub const MAX_WIDTH: usize = 256;

pub(super) const OPERATION: &str = "flash_attention";

/// One attention: sizes, type and mask. Only the functions of this module construct it, after
/// checking that everything agrees.
#[derive(Clone, Debug)]
pub struct AttentionProblem {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence.
    pub keys: usize,
    /// Query heads, groups of keys and values, and the features of a head.
    pub heads: Heads,
    /// The element type of queries, keys and values.
    pub dtype: DType,
    /// The factor of the scores.
    pub scale: f64,
    /// The mask; its `scale` is the one above, filled in.
    pub options: AttentionOptions,
    /// Whether each head has a sink.
    pub sink: bool,
    /// Whether queries, keys and values come as one joint projection.
    pub packed: bool,
}

/// Queries, keys and values, or their gradients.
// A few handles each, and only ever one of them at a time.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Projections {
    /// Each on its own.
    Separate {
        /// `[batch, queries, heads, width]`.
        q: Tensor<4>,
        /// `[batch, keys, groups, width]`.
        k: Tensor<4>,
        /// `[batch, keys, groups, width]`.
        v: Tensor<4>,
    },
    /// `[batch, seq, (heads + 2 groups) * width]`: all query heads, then the keys, then the values.
    Packed(Tensor<3>),
}

impl AttentionProblem {
    pub(super) fn separate(
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
    ) -> Result<Self, KernelError> {
        let ([batch, queries, heads, width], [_, keys, groups, _]) = (q.dims(), k.dims());
        if k.dims() != v.dims() || k.dims() != [batch, keys, groups, width] {
            return Err(KernelError::shape(
                OPERATION,
                format!(
                    "queries {:?}, keys {:?} and values {:?} do not agree: expected \
                     [batch, queries, heads, width] and twice [batch, keys, groups, width]",
                    q.dims(),
                    k.dims(),
                    v.dims()
                ),
            ));
        }
        for (other, name) in [(k.dtype(), "keys"), (v.dtype(), "values")] {
            if other != q.dtype() {
                let message = format!(
                    "queries are {:?}, {name} {other:?}: expected one type",
                    q.dtype()
                );
                return Err(KernelError::shape(OPERATION, message));
            }
        }
        let heads = Heads {
            heads,
            groups,
            width,
        };
        let sizes = (batch, queries, keys);
        Self::new(sizes, heads, q.dtype(), sink, options, false)
    }

    pub(super) fn packed(
        qkv: &Tensor<3>,
        heads: Heads,
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
    ) -> Result<Self, KernelError> {
        let [batch, seq, features] = qkv.dims();
        if features != heads.features() {
            return Err(KernelError::shape(
                OPERATION,
                format!(
                    "a joint projection {:?} does not hold {heads:?}, which takes {} features",
                    qkv.dims(),
                    heads.features()
                ),
            ));
        }
        Self::new((batch, seq, seq), heads, qkv.dtype(), sink, options, true)
    }

    fn new(
        (batch, queries, keys): (usize, usize, usize),
        heads: Heads,
        dtype: DType,
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
        packed: bool,
    ) -> Result<Self, KernelError> {
        check_heads(heads)?;
        if queries.max(keys) > MAX_POSITIONS {
            let message =
                format!("{queries} queries and {keys} keys: expected at most 2^30 of each");
            return Err(KernelError::shape(OPERATION, message));
        }
        if let Some(sink) = sink
            && sink.dims() != [heads.heads]
        {
            let (dims, heads) = (sink.dims(), heads.heads);
            let message = format!("a sink {dims:?} for {heads} heads: expected one logit per head");
            return Err(KernelError::shape(OPERATION, message));
        }
        if let Some(documents) = &options.documents
            && (documents.length() != queries || queries != keys)
        {
            let length = documents.length();
            return Err(KernelError::shape(
                OPERATION,
                format!(
                    "documents of {length} positions for {queries} queries and {keys} keys: expected \
                     as many of each"
                ),
            ));
        }
        let scale = options.scale.unwrap_or(1.0 / (heads.width as f64).sqrt());
        if !scale.is_finite() {
            return Err(KernelError::Option {
                operation: OPERATION,
                name: "scale",
                value: scale.to_string(),
                fits: "a finite number",
            });
        }
        let mut options = options.clone();
        options.scale = Some(scale);
        Ok(Self {
            batch,
            queries,
            keys,
            heads,
            dtype,
            scale,
            options,
            sink: sink.is_some(),
            packed,
        })
    }

    /// Checks that an output, its statistics and its gradient are those of this problem.
    pub(super) fn check_result(
        &self,
        out: &Tensor<4>,
        lse: &Tensor<3>,
        dout: &Tensor<4>,
    ) -> Result<(), KernelError> {
        let shape = self.out_shape();
        for (name, given) in [("output", out), ("gradient of the output", dout)] {
            if given.dims() != shape || given.dtype() != self.dtype {
                let message = format!(
                    "the {name} is {:?} in {:?}: expected {shape:?} in {:?}",
                    given.dims(),
                    given.dtype(),
                    self.dtype
                );
                return Err(KernelError::shape(OPERATION, message));
            }
        }
        let (shape, wide) = (self.lse_shape(), crate::cpu::wide(self.dtype));
        if lse.dims() != shape || lse.dtype() != wide {
            let message = format!(
                "the log-sum-exp is {:?} in {:?}: expected {shape:?} in {wide:?}",
                lse.dims(),
                lse.dtype()
            );
            return Err(KernelError::shape(OPERATION, message));
        }
        Ok(())
    }

    /// `[batch, queries, heads, width]`.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads.heads, self.heads.width]
    }

    /// `[batch, heads, queries]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads.heads, self.queries]
    }

    /// Whether there are no keys or no queries.
    pub fn is_empty(&self) -> bool {
        self.batch * self.queries * self.keys == 0
    }
}

fn check_heads(heads: Heads) -> Result<(), KernelError> {
    if heads.groups == 0 || heads.heads == 0 || !heads.heads.is_multiple_of(heads.groups) {
        let (heads, groups) = (heads.heads, heads.groups);
        let message =
            format!("{heads} heads for {groups} groups: expected a multiple of the groups");
        return Err(KernelError::shape(OPERATION, message));
    }
    if heads.width == 0 || heads.width > MAX_WIDTH {
        let message = format!("heads of width {}: expected 1 to {MAX_WIDTH}", heads.width);
        return Err(KernelError::shape(OPERATION, message));
    }
    Ok(())
}
